// What the allocator of a device has done, for `torch.cuda.memory._snapshot()`.
#pragma once
#include <c10/core/Stream.h>

#include <deque>
#include <string>

namespace emulated {

struct HistoryEntry {
  const char* action;  // torch's names: "alloc", "free_requested", "free_completed", "segment_alloc", ...
  int64_t address;
  int64_t size;  // for a block what was asked for, for a segment its own size
  c10::StreamId stream;
  int64_t microseconds;
};

// Keeps the last `most` entries while it is on.
class History {
 public:
  void start(size_t most, bool clear);
  void stop();
  void add(const char* action, const void* address, size_t size, c10::StreamId stream);

  bool is_on() const { return is_on_; }
  const std::deque<HistoryEntry>& entries() const { return entries_; }

 private:
  bool is_on_ = false;
  size_t most_ = 0;
  std::deque<HistoryEntry> entries_;
};

}  // namespace emulated
