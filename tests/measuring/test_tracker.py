from __future__ import annotations

import pytest
import torch
from torch import nn

from probes.memory import StorageTracker, record_allocations

CPU = torch.device("cpu")
MIB = 2**20


def test_six_linears_with_gelu_by_hand():
    # B = 1024, width 512, float32: an activation is 2 MiB, a weight gradient 1 MiB, a bias gradient 2 KiB.
    # Forward ends with 12 activations: each GELU saves its input; the next Linear saves the GELU's output, and the last
    # output is held by `y`: 12 * 2 MiB = 25,165,824 B. The input is from before and not counted.
    # Backward peaks in the first Linear that it reaches. Live then: the loss and its gradient (4 + 4 B), the 11
    # activations left after the GELU freed its own, the GELU's gradient, and the Linear's three results:
    # 8 + 11*2 MiB + 2 MiB + 2 MiB + 1 MiB + 2 KiB = 28,313,608 B. Later ones free 4 MiB each and add 1 MiB.
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())))
    x = torch.randn(1024, 512)

    with StorageTracker(CPU) as tracker:
        y = model(x)
        forward_bytes = tracker.live_bytes
        y.sum().backward()

    assert forward_bytes == 25_165_824
    assert tracker.trace.peak_bytes == 28_313_608
    assert tracker.trace.live.max() == 28_313_608


def test_bytes_at_the_end_are_those_of_gradients():
    model = nn.Linear(512, 512)

    with StorageTracker(CPU) as tracker:
        model(torch.randn(8, 512)).sum().backward()

    assert tracker.live_bytes == MIB + 2048
    assert tracker.trace.live[-1] == tracker.live_bytes
    model.zero_grad()
    assert tracker.live_bytes == 0


def test_views_and_in_place_results_count_once_or_not_at_all():
    before = torch.ones(256)

    with StorageTracker(CPU) as tracker:
        before.view(16, 16).add_(1)
        assert tracker.live_bytes == 0
        made = torch.ones(256)
        kept = made[:4]
        assert tracker.live_bytes == 1024
        del made
        assert tracker.live_bytes == 1024
        del kept
        assert tracker.live_bytes == 0


def test_resized_storages():
    with StorageTracker(CPU) as tracker:
        made = torch.ones(256)
        made.resize_(512)
        assert tracker.live_bytes == 2048
        # Not an operator: seen at the next use, or when asked.
        made.untyped_storage().resize_(0)
        assert tracker.live_bytes == 2048
        tracker.refresh()
        assert tracker.live_bytes == 0

    assert tracker.trace.live[1:].tolist() == [1024, 2048, 0]


def test_a_resized_storage_from_before_is_not_counted():
    before = torch.ones(4)

    with StorageTracker(CPU) as tracker:
        before.resize_(1024)

    assert tracker.live_bytes == 0


def test_tensors_made_from_python_numbers_count():
    with StorageTracker(CPU) as tracker:
        made = torch.tensor([1.0, 2.0])

    assert tracker.live_bytes == made.nbytes == 8


def test_tuples_and_out_arguments():
    out = torch.empty(0)

    with StorageTracker(CPU) as tracker:
        torch.ones(8).max(0)
        values, indices = torch.ones(8, 4).max(1)
        torch.add(values, 1, out=out)

    assert tracker.live_bytes == values.nbytes + indices.nbytes == 32 + 64


def test_wrapper_subclasses_are_opened():
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    wrapped = two(torch.ones(256), torch.ones(256))

    with StorageTracker(CPU) as tracker:
        result = wrapped + 1

    assert tracker.live_bytes == 2 * 1024
    assert result.shape == (256,)


def test_other_devices_and_sparse_tensors_are_left_out():
    with StorageTracker(CPU) as tracker:
        torch.ones(256, device="meta")
        indices, values = torch.zeros(1, 1, dtype=torch.long), torch.ones(1)
        sparse = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)

    assert tracker.live_bytes == indices.nbytes + values.nbytes
    assert sparse.shape == (4,)


def test_agrees_with_the_allocator_where_kernels_have_no_temporaries():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(32, 64)

    def step() -> None:
        model.zero_grad()
        # Not `.sum()` alone: its gradient is an expanded scalar, and a matrix product copies that inside its kernel.
        model(x).square().sum().backward()

    step()
    model.zero_grad()
    with record_allocations(CPU) as recorder:
        step()
    model.zero_grad()
    with StorageTracker(CPU) as tracker:
        step()

    assert tracker.trace.peak_bytes == recorder.trace.peak_bytes
    assert tracker.live_bytes == int(recorder.trace.live[-1])


def test_a_tracker_that_is_gone_is_no_trouble_for_its_storages():
    with StorageTracker(CPU) as tracker:
        made = torch.ones(4)
    del tracker

    del made  # its callback finds no tracker
