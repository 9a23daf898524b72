#include "history.h"

#include <chrono>

namespace emulated {

void History::start(size_t most, bool clear) {
  is_on_ = true;
  most_ = most;
  if (clear) entries_.clear();
}

void History::stop() {
  is_on_ = false;
  entries_.clear();
}

void History::add(const char* action, const void* address, size_t size, c10::StreamId stream) {
  if (!is_on_ || most_ == 0) return;
  if (entries_.size() >= most_) entries_.pop_front();
  auto now = std::chrono::system_clock::now().time_since_epoch();
  auto microseconds = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  entries_.push_back({action, reinterpret_cast<int64_t>(address), int64_t(size), stream, microseconds});
}

}  // namespace emulated
