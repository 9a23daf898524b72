"""What every test shares: one thread, no network, and CUDA tests skipped where there is no device."""

import gc
import os
import signal
import sys

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


def pytest_report_header():
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu only"
    return f"torch: {torch.__version__}, {device}"


def pytest_collection_modifyitems(items):
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


@pytest.fixture(autouse=True, scope="module")
def _frozen(_set_aside):
    """Leave what is there already out of collections: thousands of tests and all of torch take a second each time.

    What the tests of the module before shared is collected: threads of its stores end.
    """
    gc.unfreeze()
    _freeze()


_modules = 0
_MANY = 5_000


@pytest.fixture(autouse=True)
def _imported():
    """The same with what was imported since, and with what tests of a module share: planners with all their profiles.

    The first test that needs inductor brings more than all before, and planning collects garbage many times.
    """
    if len(sys.modules) != _modules or len(gc.get_objects(generation=2)) > _MANY:
        _freeze()


def _freeze():
    global _modules
    gc.collect()
    gc.freeze()
    _modules = len(sys.modules)


# With a device other than the CPU here, all tests run on it as far as they do not name one.
_DEFAULT_DEVICE = os.environ.get("TORCHREMAT_DEFAULT_DEVICE")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


if _DEFAULT_DEVICE is not None:

    @pytest.fixture(autouse=True)
    def _on_the_default_device():
        torch.set_default_device(_DEFAULT_DEVICE)
        yield
        torch.set_default_device(None)
