#include "events.h"

#include <c10/util/Exception.h>

#include <chrono>

namespace emulated {

void Event::record(StreamState& stream) {
  epoch_ = launch(stream);
  stream_ = stream.number;
  clock_ = stream.clock;
  polls_ = 0;
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  milliseconds_ = std::chrono::duration<double, std::milli>(now).count();
}

void Event::block(StreamState& stream) const { stream.clock.join(clock_); }

bool Event::query() {
  if (stream_ < 0 || host().covers(stream_, epoch_)) return true;
  if (settings().lag == kNever || polls_++ < settings().lag) return false;
  host_waits(clock_);
  return true;
}

void Event::synchronize() { host_waits(clock_); }

double Event::milliseconds_between(const Event& start, const Event& end) {
  for (const auto* event : {&start, &end})
    TORCH_CHECK(event->stream_ < 0 || host().covers(event->stream_, event->epoch_), "CUDA error: device not ready");
  return end.milliseconds_ - start.milliseconds_;
}

}  // namespace emulated
