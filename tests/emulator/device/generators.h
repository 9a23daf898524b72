// Generators of a device: a seed and an offset, as those of CUDA.
#pragma once
#include <ATen/core/Generator.h>

namespace emulated {

at::Generator& default_generator(c10::DeviceIndex device);  // below 0: of the current device
at::Generator new_generator(c10::DeviceIndex device);

// A generator of the CPU for one draw. It depends on the seed and the offset alone, and the offset moves on.
at::Generator drawing(const at::Generator& generator);

}  // namespace emulated
