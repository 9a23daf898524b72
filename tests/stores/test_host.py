import threading

import pytest
import torch

from torchremat import Host, MutationError, UnsupportedError


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "6", "6 apples", "", [1], "-1GiB"])
def test_a_limit_that_is_no_size_is_named(limit):
    with pytest.raises(UnsupportedError) as raised:
        Host(limit)

    assert str(raised.value).startswith("Host(limit=...): ")
    assert repr(limit) in str(raised.value)


@pytest.mark.parametrize("pin", [0, -1, "6", "6 apples", [1], None, 1.5])
def test_what_is_to_be_pinned_is_a_size_or_a_bool(pin):
    with pytest.raises(UnsupportedError, match=r"^Host\(pin=...\): "):
        Host(pin=pin)


def test_a_limit_is_written_as_a_size():
    assert Host("1.5KiB").statistics.limit_bytes == 1536
    assert repr(Host("1.5KiB")) == "Host('1.50 KiB')"
    assert repr(Host()) == "Host()"


def test_the_value_is_that_at_the_time_of_put():
    x = torch.ones(3)
    handle = Host().put(x)

    x.add_(1)

    assert torch.equal(handle.get(), torch.ones(3))


def test_a_tensor_that_another_thread_writes_meanwhile_is_an_error(monkeypatch):
    x = torch.ones(3)
    clone = torch.Tensor.clone

    def slow(tensor):
        thread = threading.Thread(target=x.add_, args=(1,))
        thread.start()
        thread.join()
        return clone(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", slow)
        handle = Host().put(x)

    for _ in range(2):
        with pytest.raises(MutationError, match="at version 1; expected version 0"):
            handle.get()


def test_a_copy_that_fails_gives_its_bytes_back(monkeypatch):
    store = Host(100)

    def fail(tensor):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", fail)
        with pytest.raises(MemoryError):
            store.put(torch.ones(25))

    assert store.statistics.stored_bytes == 0
    assert store.put(torch.ones(25)) is not None
