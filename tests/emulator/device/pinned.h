// Pinned memory, and the copies on their way between it and a device.
//
// NOTE [ A copy from or to pinned memory takes its time ]
//
// `copy_(..., non_blocking=True)` returns before the copy has run. Here it runs when the host has waited for it:
//
//   1. On the way out, the target holds a pattern until then (of floats: NaN), so that a host that reads too early
//      reads nonsense. If the pattern is gone, the host has written meanwhile: a race.
//   2. On the way in, the source is compared with what it was at the launch: if it has changed, the host has written
//      meanwhile: a race.
//   3. Freed memory is not given out again before its copies have run, which torch's allocator sees to as well.
//   4. Ranges that two streams copy are checked as memory of a device is.
#pragma once
#include "races.h"

#include <ATen/core/CachingHostAllocator.h>

namespace emulated {

at::HostAllocator& pinned_allocator();
bool is_pinned(const void* address);

// A copy of `bytes` bytes between a device and pinned memory at `pinned`, launched on `stream` as `epoch`.
// `out` if the pinned memory is its target: then `device` is what it will hold.
void launch_copy(void* pinned, const void* device, size_t bytes, bool out, const StreamState& stream, Epoch epoch);

// Runs the copies that the host has waited for.
void finish_copies();

}  // namespace emulated
