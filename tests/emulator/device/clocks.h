// Streams, and what each of them and the host know to have finished.
//
// NOTE [ Time is a vector clock ]
//
// Kernels run at once, on the CPU, in the order of their calls. So results are always right, and order has to be
// checked apart from them:
//
//   1. A launch is one tick of its stream. "Epoch 7 of stream 2" names the seventh launch there.
//   2. A clock says up to which epoch of each stream something has waited. The host has one, and so has each stream.
//   3. A launch first takes over what the host knows: the host calls after it has waited.
//   4. An event is a copy of its stream's clock. Who waits for the event takes the copy over.
//
// Two accesses are in order exactly if the later stream's clock covers the epoch of the earlier. All threads of the
// host share one clock: an order between threads is taken to be said, by a lock or by Python's own.
#pragma once
#include <c10/core/Stream.h>

#include <mutex>
#include <string>
#include <vector>

namespace emulated {

using Epoch = uint64_t;

// One lock for all of the device: kernels run outside of it, and all else is short. Recursive, because freeing memory
// may free more.
std::recursive_mutex& mutex();
struct Lock : std::lock_guard<std::recursive_mutex> {
  Lock() : std::lock_guard<std::recursive_mutex>(mutex()) {}
};

class Clock {
 public:
  bool covers(int stream, Epoch epoch) const { return size_t(stream) < epochs_.size() && epochs_[stream] >= epoch; }
  void join(const Clock& other);
  Epoch tick(int stream);

 private:
  std::vector<Epoch> epochs_;  // by the number of a stream
};

struct StreamState {
  int number;  // its place in clocks
  c10::DeviceIndex device;
  c10::StreamId id;  // 0 is the default stream of its device
  Clock clock;

  std::string name() const;
};

StreamState& stream_of(c10::DeviceIndex device, c10::StreamId id);
StreamState& stream_of(const c10::Stream& stream);
StreamState& stream_numbered(int number);

// The calling thread's device, and its stream on each.
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);  // below 0: leaves it
StreamState& current_stream(c10::DeviceIndex device);
void set_current_stream(c10::DeviceIndex device, c10::StreamId id);

// The next stream of torch's pool: 32 of each priority on each device, in turn.
c10::StreamId next_stream(c10::DeviceIndex device, bool high_priority);
bool is_high_priority(c10::StreamId id);

Epoch launch(StreamState& stream);

// The host has waited for all of this. Copies of pinned memory that have ended thereby are carried out.
const Clock& host();
void host_waits(const Clock& clock);
void host_waits_for_device(c10::DeviceIndex device);

}  // namespace emulated
