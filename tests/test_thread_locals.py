import subprocess
import sys

import pytest
import torch

from torchremat import Session
from torchremat._compat.autograd import get_from_tls, is_in_tls, remove_from_tls, stash_in_tls

KEY = "torchremat.test"


def test_an_object_has_as_many_references_as_before():
    # Torch 2.11 once took none for what it let go of: a session was freed while it was open, and the process crashed.
    value = object()
    before = sys.getrefcount(value)

    for _ in range(3):
        stash_in_tls(KEY, value)
        assert get_from_tls(KEY) is value
        assert sys.getrefcount(value) == before + 1
        remove_from_tls(KEY)

    assert sys.getrefcount(value) == before
    assert not is_in_tls(KEY) or get_from_tls(KEY) is None


def test_a_session_is_there_after_many_uses():
    session = Session()
    before = sys.getrefcount(session), sys.getrefcount(None)

    for _ in range(1000):
        with session.active():
            pass

    assert sys.getrefcount(session) == before[0]
    assert abs(sys.getrefcount(None) - before[1]) < 100  # others take and drop some as well


ENDS_AFTER_A_THREAD = """
import threading
from torchremat import session

def work():
    with session():
        pass

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.skipif(
    not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch cannot remove what it has stashed for a thread"
)
def test_a_process_may_end_right_after_a_thread_that_had_a_session():
    # The thread left None with torch, which needed the GIL to let go of it: "terminate called without an active
    # exception".
    found = subprocess.run([sys.executable, "-c", ENDS_AFTER_A_THREAD], capture_output=True, text=True, timeout=120)

    assert (found.returncode, found.stderr) == (0, "")
