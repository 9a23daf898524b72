#include "generators.h"

#include "clocks.h"
#include "settings.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>

namespace emulated {
namespace {

constexpr uint64_t kDefaultSeed = 67280421310721ULL;
constexpr uint64_t kStep = 4;  // offsets of CUDA are multiples of it, and a small draw takes one

struct State : c10::intrusive_ptr_target {
  uint64_t seed = kDefaultSeed;
  uint64_t offset = 0;
};

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : Generator(device, c10::make_intrusive<State>()) {}
  Generator(c10::DeviceIndex device, c10::intrusive_ptr<State> state)
      : c10::GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        state(std::move(state)) {}

  void set_current_seed(uint64_t seed) override {
    state->seed = seed;
    state->offset = 0;
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % kStep == 0, "offset must be a multiple of 4");
    state->offset = offset;
  }
  uint64_t get_offset() const override { return state->offset; }
  uint64_t current_seed() const override { return state->seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return state->seed;
  }
  void set_state(const c10::TensorImpl& from) override {
    at::detail::check_rng_state(from);
    auto bytes = size_t(from.numel());
    TORCH_CHECK(bytes == 8 || bytes == 16, "RNG state is wrong size");  // 8: a seed without an offset
    auto* data = static_cast<const char*>(from.data());
    uint64_t offset = 0;
    if (bytes == 16) std::memcpy(&offset, data + 8, 8);
    std::memcpy(&state->seed, data, 8);
    set_offset(offset);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto bytes = at::detail::empty_cpu({16}, at::kByte);
    std::memcpy(bytes.data_ptr(), &state->seed, 8);
    std::memcpy(static_cast<char*>(bytes.data_ptr()) + 8, &state->offset, 8);
    return bytes.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& from) override {
    state = static_cast<Generator*>(from.get())->state;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<Generator>(device_.index(), state);
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->state->seed = state->seed;
    copy->state->offset = state->offset;
    return copy;
  }

  c10::intrusive_ptr<State> state;
};

// SplitMix64: neighbouring seeds and offsets should draw nothing alike.
uint64_t mix(uint64_t value) {
  value += 0x9E3779B97F4A7C15ULL;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

}  // namespace

at::Generator& default_generator(c10::DeviceIndex device) {
  static auto& all = *[] {
    auto* generators = new std::vector<at::Generator>;
    for (int i = 0; i < kMostDevices; ++i) generators->push_back(new_generator(c10::DeviceIndex(i)));
    return generators;
  }();
  return all[device < 0 ? current_device() : device];
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device);
}

at::Generator drawing(const at::Generator& generator) {
  auto* impl = static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  std::lock_guard<std::mutex> lock(impl->mutex_);
  auto one = at::make_generator<at::CPUGeneratorImpl>(mix(impl->state->seed ^ mix(impl->state->offset)));
  impl->state->offset += kStep;
  return one;
}

}  // namespace emulated
