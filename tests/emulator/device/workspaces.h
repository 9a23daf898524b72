// The workspaces of cuBLAS: memory that the first product of a thread on a stream takes, and keeps.
#pragma once
#include <string>

namespace emulated {

// To be called before an operator is launched on the current device and stream. `has_bias` of one dimension: then
// addmm goes through cuBLASLt.
void take_workspaces(const std::string& op, bool has_bias);
void clear_workspaces();

}  // namespace emulated
