import pytest
import torch

from torchremat import Host, Keep, StoreError, Tiers, UnsupportedError


def test_the_first_store_with_room_takes_a_tensor():
    first, second = Host(100), Host(200)
    store = Tiers(first, second)
    sizes = [40, 80, 40, 20, 100, 1, 20]  # to 1, 2, 1, 1, 2, 2, none: 20 more than 100, and than 200

    handles = [store.put(torch.zeros(size, dtype=torch.uint8)) for size in sizes]

    assert [handle is None for handle in handles] == [False] * 6 + [True]
    assert first.statistics.stored_bytes == 100
    assert second.statistics.stored_bytes == 181
    assert store.statistics.stored_bytes == 281
    assert store.statistics.limit_bytes == 300
    assert store.statistics.refused == 1
    # What the second one took, the first one refused.
    assert first.statistics.refused == 4 and second.statistics.refused == 1


def test_room_in_the_first_store_is_used_again():
    first, second = Host(100), Host(100)
    store = Tiers(first, second)
    handles = [store.put(torch.zeros(100, dtype=torch.uint8)) for _ in range(2)]

    handles[0] = None
    handles.append(store.put(torch.zeros(100, dtype=torch.uint8)))

    assert first.statistics.stored_bytes == second.statistics.stored_bytes == 100


def test_a_strict_one_names_every_store_with_its_bytes():
    store = Tiers(Host("1KiB"), Tiers(Host(100)), strict=True)
    handles = [store.put(torch.zeros(size, dtype=torch.uint8)) for size in (512, 50)]

    with pytest.raises(StoreError) as raised:
        store.put(torch.zeros(200, 3))

    assert str(raised.value) == (
        "no room for a tensor of shape (200, 3), float32, 2.34 KiB, from cpu: "
        "Host('1.00 KiB') holds 562 B of 1.00 KiB, Tiers(Host('100 B')) holds 0 B of 100 B."
    )
    assert len(handles) == 2


def test_the_last_store_may_keep():
    host, keep = Host(10), Keep()
    store = Tiers(host, keep)

    handles = [store.put(torch.zeros(8, dtype=torch.uint8)) for _ in range(2)]

    assert store.statistics.limit_bytes is None
    assert host.statistics.stored_bytes == keep.statistics.stored_bytes == 8
    assert len(handles) == 2


def test_a_store_of_ones_own():
    class Nothing:
        def put(self, tensor):
            return None

        def __repr__(self):
            return "Nothing()"

    store = Tiers(Nothing(), strict=True)

    with pytest.raises(StoreError, match=r"Nothing\(\)\.$"):
        store.put(torch.zeros(1))
    assert store.statistics.limit_bytes is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Tiers, r"Tiers\(\): expected at least one store"),
        (lambda: Tiers("1GiB"), "expected a store, got '1GiB'"),
        (lambda: Tiers(Host(strict=True), Host()), r"Host\(\) is strict.*Tiers\(..., strict=True\)"),
    ],
)
def test_what_is_no_chain_of_stores_is_refused(make, message):
    with pytest.raises(UnsupportedError, match=message):
        make()
