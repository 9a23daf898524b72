"""Each race is found, and each program that is right has none."""

import pytest
import torch

import emulator

DEVICE = torch.device("cuda", 0)


class Streams:
    """The default stream, where `x` was made, and another one."""

    def __init__(self):
        self.x = torch.ones(1000, device=DEVICE)
        self.main, self.side = torch.cuda.current_stream(), torch.cuda.Stream()

    def on_side(self):
        return torch.cuda.stream(self.side)

    def side_waits(self):
        self.side.wait_stream(self.main)

    def main_waits(self):
        self.main.wait_stream(self.side)


@pytest.fixture(autouse=True)
def _events_do_not_fire(configured):
    configured(lag=emulator.NEVER)


@pytest.fixture
def s():
    return Streams()


def races():
    return " / ".join(emulator.races())


class TestTwoStreams:
    def test_a_read_after_a_write(self, s):
        with s.on_side():
            s.x.sum()
        assert races() == (
            f"the read of memory by aten::sum.IntList_out on stream {s.side.stream_id} of cuda:0 does not wait for the "
            "write by aten::fill_.Scalar on the default stream of cuda:0"
        )

        s.side_waits()
        with s.on_side():
            s.x.sum()
        assert races() == ""

    def test_a_write_after_a_read(self, s):
        s.side_waits()
        with s.on_side():
            s.x.sum()
        s.x.mul_(2)
        assert "the write of memory by aten::mul.out on the default stream of cuda:0 does not wait for the r" in races()

        s.main_waits()
        s.x.mul_(2)
        assert races() == ""

    def test_a_write_after_a_write(self, s):
        s.side_waits()
        with s.on_side():
            s.x.zero_()
        s.x.fill_(1)
        assert "the write of memory by aten::fill_.Scalar on the default stream" in races()

        s.main_waits()
        s.x.fill_(1)
        assert races() == ""

    def test_reads_need_no_order(self, s):
        s.side_waits()
        with s.on_side():
            s.x.sum()
        s.x.sum()

        assert races() == ""

    def test_an_event_covers_what_came_before_it(self, s):
        event = torch.cuda.Event()
        event.record()
        s.x.mul_(2)
        s.side.wait_event(event)
        with s.on_side():
            s.x.sum()
        assert "does not wait for the write by aten::mul.out" in races()

        event.record()
        s.side.wait_event(event)
        with s.on_side():
            s.x.sum()
        assert races() == ""

    def test_waits_go_on(self, s):
        third = torch.cuda.Stream()
        s.side_waits()
        third.wait_stream(s.side)

        with torch.cuda.stream(third):
            s.x.sum()

        assert races() == ""

    @pytest.mark.parametrize("wait", [torch.cuda.synchronize, lambda: torch.cuda.current_stream().synchronize()])
    def test_the_host_waits_for_all_that_it_calls_then(self, s, wait):
        wait()
        with s.on_side():
            s.x.sum()

        assert races() == ""

    def test_a_number_that_the_host_reads_is_waited_for(self, s):
        s.x.sum().item()
        with s.on_side():
            s.x.sum()

        assert races() == ""

    def test_outputs_lists_and_indices_count_too(self, s):
        with s.on_side():
            torch._foreach_add_([s.x], 1.0)
        assert "the write of memory by aten::add.out" in races()
        index = torch.zeros(3, dtype=torch.long, device=DEVICE)
        s.side_waits()
        index.fill_(1)
        with s.on_side():
            s.x[index]
        assert "does not wait for the write by aten::fill_" in races()
        out = torch.zeros(1000, device=DEVICE)
        with s.on_side():
            torch.add(s.x, 1, out=out)
        assert "the write of memory by aten::add.out" in races()

    def test_backward_waits_by_itself(self, s):
        x = s.x.requires_grad_()
        s.side_waits()
        with s.on_side():
            loss = (x * x).sum()
        s.main_waits()

        loss.backward()

        assert x.grad[0].item() == 2
        assert races() == ""


class TestTwoDevices:
    def test_a_copy_between_them_waits_on_both_sides(self, s):
        there = s.x.to("cuda:1")
        there.mul_(2)
        back = there.to(DEVICE)
        s.x.add_(back)

        assert s.x[0].item() == 3
        assert races() == ""

    def test_a_copy_waits_for_current_streams_alone(self, s):
        with s.on_side():
            s.x.to("cuda:1")

        assert "the read of memory by copy_ on stream" in races()


class TestFreedMemory:
    def make_on_side(self, s):
        """Memory of the default stream that the other one reads, and that is given back meanwhile."""
        temporary = s.x * 2
        s.side_waits()
        with s.on_side():
            temporary.sum()
        return temporary

    def test_freed_too_early(self, s):
        temporary = self.make_on_side(s)
        address = temporary.data_ptr()
        del temporary

        again = s.x * 3

        assert again.data_ptr() == address
        assert "the memory was freed while that was pending, and record_stream had not told of it" in races()

    def test_record_stream_keeps_it(self, s):
        temporary = self.make_on_side(s)
        address = temporary.data_ptr()
        temporary.record_stream(s.side)
        del temporary

        again = s.x * 3

        assert again.data_ptr() != address
        assert races() == ""

    def test_a_wait_before_it_is_used_again_will_do(self, s):
        temporary = self.make_on_side(s)
        del temporary
        s.main_waits()

        again = s.x * 3

        assert races() == ""
        assert again[0].item() == 3

    def test_a_part_of_it_counts(self, s):
        temporary = torch.empty(100_000, device=DEVICE)
        s.side_waits()
        with s.on_side():
            temporary.fill_(1)
        del temporary

        parts = [torch.zeros(20_000, device=DEVICE) for _ in range(2)]

        assert len(parts) == 2 and "the memory was freed" in races()


class TestPrefetching:
    """Memory filled on one stream ahead of its use on another."""

    @pytest.fixture
    def host(self):
        return torch.arange(1000.0, device="cpu").pin_memory()

    def test_a_use_that_does_not_wait(self, s, host):
        with s.on_side():
            ahead = torch.empty(1000, device=DEVICE)
            ahead.copy_(host, non_blocking=True)

        s.x.add_(ahead)

        assert (
            "the read of memory by aten::add.out on the default stream of cuda:0 does not wait for the write" in races()
        )

    def test_a_use_that_waits(self, s, host):
        with s.on_side():
            ahead = torch.empty(1000, device=DEVICE)
            ahead.copy_(host, non_blocking=True)
            there = torch.cuda.Event()
            there.record()
        s.main.wait_event(there)

        s.x.add_(ahead)
        ahead.record_stream(s.main)
        del ahead

        assert s.x[5].item() == 6
        assert races() == ""

    def test_memory_of_the_user_that_the_copy_does_not_wait_for(self, s, host):
        s.x.mul_(2)
        with s.on_side():
            s.x.copy_(host, non_blocking=True)

        assert "the write of memory by copy_ on stream" in races()


class TestPinnedMemory:
    @pytest.fixture
    def host(self):
        return torch.zeros(1000, device="cpu").pin_memory()

    def test_a_host_that_reads_too_early_reads_nonsense(self, s, host):
        host.copy_(s.x, non_blocking=True)

        assert host.isnan().all()
        torch.cuda.synchronize()
        assert torch.equal(host, s.x.cpu())
        assert races() == ""

    def test_a_host_that_writes_before_the_copy_has_ended(self, s, host):
        host.copy_(s.x, non_blocking=True)
        host[3] = 7
        torch.cuda.synchronize()

        assert "the host writes pinned memory while a copy into it is pending on the default stream" in races()

    def test_a_source_that_the_host_reuses(self, s, host):
        s.x.copy_(host, non_blocking=True)
        host.fill_(3)
        torch.cuda.synchronize()
        assert "the host writes pinned memory while a copy from it is pending on the default stream" in races()

        s.x.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        host.fill_(4)
        assert s.x[0].item() == 3
        assert races() == ""

    def test_two_streams_on_one_range(self, s, host):
        host.copy_(s.x, non_blocking=True)
        with s.on_side():
            target = torch.empty(1000, device=DEVICE)
            target.copy_(host, non_blocking=True)
        assert "the read of pinned memory by copy_ on stream" in races()

        s.side_waits()
        with s.on_side():
            target.copy_(host, non_blocking=True)
        s.main_waits()
        assert target[0].item() == 1
        assert races() == ""

    def test_other_ranges_are_other_memory(self, s, host):
        host[:500].copy_(s.x[:500], non_blocking=True)
        with s.on_side():
            torch.empty(500, device=DEVICE).copy_(host[500:], non_blocking=True)
        torch.cuda.synchronize()

        assert races() == ""
        assert host.sum().item() == 500

    def test_freed_memory_is_kept_until_its_copy_has_ended(self, s, host):
        address = host.data_ptr()
        host.copy_(s.x, non_blocking=True)
        del host

        fresh = torch.ones(1000, device="cpu").pin_memory()

        assert fresh.data_ptr() != address
        torch.cuda.synchronize()
        assert races() == ""

    def test_a_copy_that_blocks_is_done(self, s, host):
        host.copy_(s.x)

        assert host.sum().item() == 1000

    def test_memory_that_is_not_pinned_is_waited_for(self, s):
        host = torch.zeros(1000, device="cpu")

        host.copy_(s.x, non_blocking=True)

        assert host.sum().item() == 1000
