// What a program may choose about the device. Python's `configure` sets these.
#pragma once
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>

namespace emulated {

constexpr int kMostDevices = 8;
constexpr int64_t kNever = -1;

struct Settings {
  c10::DeviceIndex devices = 2;
  size_t capacity = size_t{6} << 30;  // of each device
  int64_t lag = 3;                    // polls for which an event says that it has not fired, or kNever
  bool workspaces = true;             // the first product of a thread on a stream takes one, as with cuBLAS
  bool slack = true;                  // a large block keeps a rest of up to 1 MiB
};

inline Settings& settings() {
  static Settings settings;
  return settings;
}

}  // namespace emulated
