// What torch asks a CUDA build for: hooks, a device guard and the allocators.
//
// torch asks for the hooks once, while it is imported: this library has to be loaded before.
#include "events.h"
#include "generators.h"
#include "memory.h"
#include "pinned.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace emulated {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kCUDA = c10::DeviceType::CUDA;

DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device(); }
Stream handle_of(const StreamState& stream) {
  return Stream(Stream::UNSAFE, Device(kCUDA, stream.device), stream.id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCUDA; }

  Device exchangeDevice(Device device) const override { return {kCUDA, exchange_device(device.index())}; }
  Device getDevice() const override { return {kCUDA, current_device()}; }
  void setDevice(Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { exchange_device(device.index()); }
  DeviceIndex deviceCount() const noexcept override { return settings().devices; }
  void synchronizeDevice(const DeviceIndex device) const override {
    Lock lock;
    host_waits_for_device(device);
  }

  Stream getStream(Device device) const override {
    Lock lock;
    return handle_of(current_stream(index_of(device)));
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, Device(kCUDA, index_of(device))); }
  Stream getNewStream(Device device, int priority) const override {
    Lock lock;
    auto index = index_of(device);
    return Stream(Stream::UNSAFE, Device(kCUDA, index), next_stream(index, priority < 0));
  }
  Stream getStreamFromGlobalPool(Device device, bool high_priority) const override {
    return getNewStream(device, high_priority ? -1 : 0);
  }
  Stream exchangeStream(Stream stream) const override {
    Lock lock;
    auto before = getStream(stream.device());
    set_current_stream(stream.device_index(), stream.id());
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    Lock lock;
    host_waits(stream_of(stream).clock);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    allocator().recordStream(data, stream);
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock;
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->record(stream_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    Lock lock;
    if (event) static_cast<Event*>(event)->block(stream_of(stream));
  }
  bool queryEvent(void* event) const override {
    Lock lock;
    return !event || static_cast<Event*>(event)->query();
  }
  void synchronizeEvent(void* event) const override {
    Lock lock;
    if (event) static_cast<Event*>(event)->synchronize();
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    return Event::milliseconds_between(*static_cast<Event*>(start), *static_cast<Event*>(end));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};

}  // namespace
}  // namespace emulated

namespace at {
namespace {

// torch's registry makes it by this name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}

  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  std::string showConfig() const override { return "an emulated device"; }

  int getNumGPUs() const override { return emulated::settings().devices; }
  DeviceIndex deviceCount() const override { return emulated::settings().devices; }
  DeviceIndex current_device() const override { return emulated::current_device(); }
  DeviceIndex getCurrentDevice() const override { return emulated::current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { emulated::exchange_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return emulated::exchange_device(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return emulated::exchange_device(device); }
  void deviceSynchronize(DeviceIndex device) const override {
    emulated::Lock lock;
    emulated::host_waits_for_device(device < 0 ? emulated::current_device() : device);
  }

  const Generator& getDefaultGenerator(DeviceIndex device) const override {
    return emulated::default_generator(device);
  }
  Generator getNewGenerator(DeviceIndex device) const override { return emulated::new_generator(device); }

  Device getDeviceFromPtr(void* data) const override {
    emulated::Lock lock;
    auto* block = emulated::find_block(data);
    return {kCUDA, block ? block->device : emulated::current_device()};
  }
  bool isPinnedPtr(const void* data) const override { return emulated::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &emulated::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return &emulated::allocator(); }
};

}  // namespace

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks)

}  // namespace at

namespace {

const bool is_registered = [] {
  c10::SetAllocator(c10::kCUDA, &emulated::allocator(), /*priority=*/255);
  at::setHostAllocator(c10::kCUDA, &emulated::pinned_allocator(), /*priority=*/255);
  static auto& guard = *new emulated::Guard;
  static c10::impl::DeviceGuardImplRegistrar registrar(c10::kCUDA, &guard);
  return true;
}();

}  // namespace
