#include "clocks.h"

#include "pinned.h"
#include "settings.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>

namespace emulated {
namespace {

constexpr int kPool = 32;

// Never destroyed: tensors of Python outlive static objects.
struct Streams {
  std::deque<StreamState> all;  // by number; places stay
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, int> numbers;
  std::array<std::array<int, 2>, kMostDevices> taken{};  // of the pools
  Clock host;
};

Streams& streams() {
  static auto& streams = *new Streams;
  return streams;
}

thread_local c10::DeviceIndex thread_device = 0;
thread_local std::array<c10::StreamId, kMostDevices> thread_streams{};

}  // namespace

std::recursive_mutex& mutex() {
  static auto& mutex = *new std::recursive_mutex;
  return mutex;
}

void Clock::join(const Clock& other) {
  if (epochs_.size() < other.epochs_.size()) epochs_.resize(other.epochs_.size());
  for (size_t i = 0; i < other.epochs_.size(); ++i) epochs_[i] = std::max(epochs_[i], other.epochs_[i]);
}

Epoch Clock::tick(int stream) {
  if (epochs_.size() <= size_t(stream)) epochs_.resize(stream + 1);
  return ++epochs_[stream];
}

std::string StreamState::name() const {
  auto place = "cuda:" + std::to_string(int(device));
  return id == 0 ? "the default stream of " + place : "stream " + std::to_string(id) + " of " + place;
}

StreamState& stream_of(c10::DeviceIndex device, c10::StreamId id) {
  auto& all = streams().all;
  auto [found, is_new] = streams().numbers.try_emplace({device, id}, int(all.size()));
  if (is_new) all.push_back({found->second, device, id, {}});
  return all[found->second];
}

StreamState& stream_of(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }
StreamState& stream_numbered(int number) { return streams().all[number]; }

c10::DeviceIndex current_device() { return thread_device; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  auto before = thread_device;
  if (device >= settings().devices)
    TORCH_CHECK(false, "CUDA error: invalid device ordinal (", int(device), " of ", int(settings().devices), ")");
  if (device >= 0) thread_device = device;
  return before;
}

StreamState& current_stream(c10::DeviceIndex device) { return stream_of(device, thread_streams[device]); }
void set_current_stream(c10::DeviceIndex device, c10::StreamId id) { thread_streams[device] = id; }

c10::StreamId next_stream(c10::DeviceIndex device, bool high_priority) {
  auto& taken = streams().taken[device][high_priority];
  auto id = 1 + (high_priority ? kPool : 0) + taken++ % kPool;
  stream_of(device, id);
  return id;
}

bool is_high_priority(c10::StreamId id) { return id > kPool; }

Epoch launch(StreamState& stream) {
  stream.clock.join(streams().host);
  return stream.clock.tick(stream.number);
}

const Clock& host() { return streams().host; }

void host_waits(const Clock& clock) {
  streams().host.join(clock);
  finish_copies();
}

void host_waits_for_device(c10::DeviceIndex device) {
  for (auto& stream : streams().all)
    if (stream.device == device) streams().host.join(stream.clock);
  finish_copies();
}

}  // namespace emulated
