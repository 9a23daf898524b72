"""What every test shares: one thread, no network, and CUDA tests skipped where there is no device."""

import gc
import os
import signal

import pytest
import torch

from probes.memory import heap_set_aside
from versions import NEEDS_SAVED_TENSORS

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("KINETO_LOG_LEVEL", None)  # tests read what torch's profiler writes

# A process that a shell has started in the background ignores it, and tests raise it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests run in two processes, and a kernel that changes its number of threads changes its order of summation.
torch.set_num_threads(1)

# `torch.manual_seed` notes the stack for each kind of device that is not there, should it come later: under pytest that
# takes longer than many a test, and it is asked tens of thousands of times.
for _kind in (torch.cuda, torch.xpu, torch.mtia):
    if not _kind.is_available():
        _kind.manual_seed_all = lambda seed: None


def pytest_report_header():
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu only"
    return f"torch: {torch.__version__}, {device}"


def pytest_collection_modifyitems(items):
    # What runs in processes of its own runs for a whole module at once, and would twice where two workers share it:
    # each begins with a half of the tests in order, and takes of the other's last ones.
    items.sort(key=lambda item: not hasattr(getattr(item, "module", None), "case_tests"))
    for item in items:
        if item.name == "torchremat.tensors.tensor.SavedTensor":  # the example in its docstring
            item.add_marker(NEEDS_SAVED_TENSORS)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def _set_aside():
    """The blocks of ours are within one, as asking how much is frozen takes longer than the step of a small model."""
    with heap_set_aside():
        yield


_MANY = 30_000
_froze_shared = False


@pytest.fixture(autouse=True, scope="module")
def _frozen(_set_aside):
    """Leave what is there already out of collections: thousands of tests and all of torch take a second each time.

    What the tests of the module before shared is collected: threads of its stores end. Where that was frozen as well,
    all has to be looked at once.
    """
    global _froze_shared
    if _froze_shared:
        gc.unfreeze()
        _froze_shared = False
    _freeze()


@pytest.fixture(autouse=True)
def _frozen_since():
    """The same with what tests import or share, if it is much: all of inductor, planners with all their profiles.

    Planning collects garbage many times.
    """
    global _froze_shared
    if len(gc.get_objects(generation=2)) > _MANY:
        _freeze()
        _froze_shared = True


def _freeze():
    gc.collect()
    gc.freeze()


# With a device other than the CPU here, all tests run on it as far as they do not name one, as those marked `gpu` do.
_DEFAULT_DEVICE = os.environ.get("TORCHREMAT_DEFAULT_DEVICE")


@pytest.fixture
def no_collector():
    """Nothing that the test does may need it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


if _DEFAULT_DEVICE is not None:

    @pytest.fixture(autouse=True)
    def _on_the_default_device(request):
        if "gpu" not in request.keywords:
            torch.set_default_device(_DEFAULT_DEVICE)
        yield
        torch.set_default_device(None)
