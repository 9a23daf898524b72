import gc
import threading

import pytest
import torch

import emulator

MIB = 2**20


@pytest.fixture(autouse=True)
def _fresh(configured):
    """Nothing is allocated or cached at the start, and there are no workspaces in the way."""
    configured(workspaces=False)
    torch.cuda.init()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_accumulated_memory_stats()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_reserved() == 0, "a test before has left something"
    yield
    torch.cuda.memory._record_memory_history(None)


def take(size):
    return torch.empty(int(size), dtype=torch.uint8, device="cuda")


def stat(name):
    return torch.cuda.memory_stats()[name]


def actions():
    return [(event["action"], event["size"]) for event in torch.cuda.memory._snapshot()["device_traces"][0]]


class TestStatistics:
    def test_sizes_are_counted_as_asked_for_and_as_rounded(self):
        kept = [take(size) for size in (1, 511, 513, 3 * MIB, 30 * MIB)]

        assert torch.cuda.memory_allocated() == 512 + 512 + 1024 + 33 * MIB
        assert stat("requested_bytes.all.current") == 1 + 511 + 513 + 33 * MIB
        # The small ones are in a segment of 2 MiB, 3 MiB is in one of 20, and 30 MiB has one of its own.
        assert torch.cuda.memory_reserved() == 52 * MIB
        assert stat("allocated_bytes.small_pool.current") == 2048
        assert stat("segment.all.current") == 3
        assert stat("inactive_split_bytes.all.current") == 19 * MIB - 2048
        assert len(kept) == stat("allocation.all.current")

    def test_peaks_and_sums(self):
        kept = take(2 * MIB)
        del kept
        kept = take(5 * MIB)

        assert (stat("allocated_bytes.all.current"), stat("allocated_bytes.all.peak")) == (5 * MIB, 5 * MIB)
        assert (stat("allocated_bytes.all.allocated"), stat("allocated_bytes.all.freed")) == (7 * MIB, 2 * MIB)
        assert (stat("allocation.all.allocated"), stat("allocation.all.freed")) == (2, 1)

        del kept
        torch.cuda.reset_peak_memory_stats()

        assert torch.cuda.max_memory_allocated() == 0
        assert torch.cuda.max_memory_reserved() == 20 * MIB

    def test_freed_neighbours_become_one(self):
        blocks = [take(3 * MIB) for _ in range(6)]  # 18 of 20 MiB; the rest is too small for one more
        blocks.append(take(3 * MIB))
        assert torch.cuda.memory_reserved() == 40 * MIB

        del blocks[1], blocks[1]
        blocks.append(take(6 * MIB))

        assert torch.cuda.memory_reserved() == 40 * MIB
        blocks.clear()
        assert stat("inactive_split_bytes.all.current") == 0
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0

    @pytest.mark.parametrize(("slack", "allocated"), [(True, 20 * MIB), (False, 19.5 * MIB)])
    def test_a_large_block_keeps_a_rest(self, configured, slack, allocated):
        configured(slack=slack)

        kept = take(19.5 * MIB)

        assert torch.cuda.memory_allocated() == allocated
        assert stat("requested_bytes.all.current") == kept.nbytes

    def test_a_stream_keeps_its_memory(self):
        del_me = take(12 * MIB)
        del del_me

        with torch.cuda.stream(torch.cuda.Stream()):
            kept = take(12 * MIB)

        assert torch.cuda.memory_reserved() == 2 * kept.nbytes

    def test_a_snapshot_adds_up(self):
        kept = [take(100), take(3 * MIB)]

        segments = torch.cuda.memory_snapshot()

        assert [one["total_size"] for one in segments if one["segment_type"] == "large"] == [20 * MIB]
        assert sum(one["allocated_size"] for one in segments) == torch.cuda.memory_allocated()
        assert sum(block["size"] for one in segments for block in one["blocks"]) == torch.cuda.memory_reserved()
        addresses = {block["address"] for one in segments for block in one["blocks"]}
        assert {one.data_ptr() for one in kept} <= addresses

    def test_the_profiler_is_told(self):
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            torch.empty(1000, device="cuda").sin()

        # Both blocks of 4096 bytes, and both of them freed.
        seen: list[int] = []

        def walk(nodes):
            for node in nodes:
                if node.name == "[memory]" and str(node.extra_fields.device) == "cuda:0":
                    seen.append(node.extra_fields.alloc_size)
                walk(node.children)

        walk(profiled.profiler.kineto_results.experimental_event_tree())
        assert 4096 in seen  # below operators; the others have no parent there, as on a real device


class TestHistory:
    def test_it_says_what_was_done(self):
        torch.cuda.memory._record_memory_history("all", context=None)

        kept = take(3 * MIB)
        del kept
        kept = take(1)

        assert actions() == [
            ("segment_alloc", 20 * MIB),
            ("alloc", 3 * MIB),
            ("free_requested", 3 * MIB),
            ("free_completed", 3 * MIB),
            ("segment_alloc", 2 * MIB),
            ("alloc", 1),
        ]
        assert actions()[-1] == ("snapshot", 512)  # of the first: it comes after what it shows
        assert kept.nbytes == 1

    def test_it_agrees_with_the_counters(self):
        torch.cuda.memory._record_memory_history("all", context=None)
        position = stat("allocation.all.allocated") + stat("allocation.all.freed")

        x = torch.rand(300, 300, device="cuda", requires_grad=True)
        (x @ x).relu().sum().backward()

        done = stat("allocation.all.allocated") + stat("allocation.all.freed") - position
        assert sum(action in ("alloc", "free_completed") for action, _ in actions()) == done > 10

    def test_an_entry_is_as_torchs(self):
        torch.cuda.memory._record_memory_history("all", context=None)
        side = torch.cuda.Stream()

        with torch.cuda.stream(side):
            kept = take(5)

        (entry,) = [one for one in torch.cuda.memory._snapshot()["device_traces"][0] if one["action"] == "alloc"]
        assert entry["addr"] == kept.data_ptr()
        assert entry["stream"] == side.cuda_stream
        assert entry["time_us"] > 1_600_000_000_000_000
        assert entry["frames"] == []

    def test_it_keeps_the_last_entries(self):
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=3)

        kept = [take(size) for size in (10, 20, 30, 40)]

        assert actions() == [("alloc", 20), ("alloc", 30), ("alloc", 40)]
        assert len(kept) == 4

    def test_it_can_be_asked_whether_it_is_on(self):
        found = [torch._C._cuda_isHistoryEnabled()]
        torch.cuda.memory._record_memory_history("all", context=None)
        found.append(torch._C._cuda_isHistoryEnabled())
        torch.cuda.memory._record_memory_history(None)
        found.append(torch._C._cuda_isHistoryEnabled())

        assert found == [False, True, False]
        assert torch.cuda.get_allocator_backend() == "native"

    def test_a_block_that_another_stream_has_used_is_freed_later(self, configured):
        configured(lag=emulator.NEVER)
        torch.cuda.memory._record_memory_history("all", context=None)
        side = torch.cuda.Stream()
        block = take(3 * MIB)
        block.record_stream(side)

        del block

        assert stat("allocated_bytes.all.current") == 0
        assert (stat("active_bytes.all.current"), stat("requested_bytes.all.current")) == (3 * MIB, 3 * MIB)
        assert actions()[-1] == ("free_requested", 3 * MIB)
        take(1)  # the allocator looks for blocks that have become free, and finds none
        assert stat("active_bytes.large_pool.current") == 3 * MIB
        torch.cuda.synchronize()
        take(1)
        assert stat("active_bytes.large_pool.current") == 0
        assert ("free_completed", 3 * MIB) in actions()


class TestWorkspaces:
    @pytest.fixture(autouse=True)
    def _on(self, _fresh, configured):
        configured(workspaces=True)
        yield
        torch._C._cuda_clearCublasWorkspaces()

    def added(self, function):
        """In MiB; what is small may still be held by autograd's thread."""
        before = torch.cuda.memory_allocated()
        function()
        return round((torch.cuda.memory_allocated() - before) / MIB)

    def test_the_first_product_of_a_thread_and_stream_takes_one(self):
        x = torch.rand(8, 8, device="cuda", requires_grad=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())

        def product():
            return x.detach() @ x.detach()

        def on_side():
            with torch.cuda.stream(side):
                product()

        def in_thread():
            thread = threading.Thread(target=product)
            thread.start()
            thread.join()

        loss = (x @ x).sum()
        assert self.added(product) == 0
        assert self.added(lambda: torch.autograd.grad(loss, x)) == 32  # in autograd's thread
        assert self.added(in_thread) == 32
        assert self.added(in_thread) == 0  # has what the thread before has left
        assert self.added(on_side) == 32
        assert self.added(torch._C._cuda_clearCublasWorkspaces) == -128

    def test_a_bias_takes_one_of_its_own(self):
        x = torch.rand(8, 8, device="cuda")
        x @ x

        assert self.added(lambda: torch.nn.functional.linear(x, x, x[0])) == 1


class TestLimits:
    def test_out_of_memory_is_torchs(self):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            take(2**40)

        said = str(caught.value).replace("6.00 GiB allowed; ", "")  # once a fraction has been set, be it 1
        assert said.startswith(
            "CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0 has a total capacity of 6.00 GiB of which "
            "5.71 GiB is free. Including non-PyTorch memory, this process has 300.00 MiB memory in use. "
            "Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
            "unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF"
        )
        assert stat("num_ooms") == 1

    def test_a_fraction_is_kept_to_and_works_after_freeing(self):
        torch.cuda.set_per_process_memory_fraction(100 * MIB / (6 * 2**30))
        kept = take(60 * MIB)

        with pytest.raises(torch.OutOfMemoryError, match=r"100\.00 MiB allowed; Of the allocated memory 60\.00 MiB is"):
            take(50 * MIB)
        del kept
        kept = take(70 * MIB)

        assert torch.cuda.memory_reserved() == 70 * MIB  # the segment of 60 MiB has been given back
        assert stat("num_alloc_retries") == 2
        assert kept.nbytes == 70 * MIB

    def test_a_block_that_waits_for_a_stream_is_waited_for(self, configured):
        configured(lag=emulator.NEVER)
        torch.cuda.set_per_process_memory_fraction(100 * MIB / (6 * 2**30))
        block = take(60 * MIB)
        block.record_stream(torch.cuda.Stream())
        del block

        kept = take(60 * MIB)

        assert stat("num_sync_all_streams") == 1
        assert kept.nbytes == torch.cuda.memory_reserved()

    def test_what_is_free(self):
        free, total = torch.cuda.mem_get_info()
        kept = take(30 * MIB)

        assert total == 6 * 2**30
        assert free - torch.cuda.mem_get_info()[0] == kept.nbytes
