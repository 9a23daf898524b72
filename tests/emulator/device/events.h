// Events, which may say for a while that they have not fired.
#pragma once
#include "clocks.h"
#include "settings.h"

namespace emulated {

class Event {
 public:
  void record(StreamState& stream);
  void block(StreamState& stream) const;

  // Whether it has fired. A program must not depend on when: the first `lag` polls say no, and with `kNever` all do
  // until the host has waited for what the event marks.
  bool query();
  void synchronize();

  int stream() const { return stream_; }  // its number, or -1 if it was never recorded

  // Both must have been recorded, and the host must have waited for them. Kernels run at their launch, so this is a
  // time of the CPU.
  static double milliseconds_between(const Event& start, const Event& end);

 private:
  int stream_ = -1;
  Epoch epoch_ = 0;
  Clock clock_;
  int64_t polls_ = 0;
  double milliseconds_ = 0;
};

}  // namespace emulated
