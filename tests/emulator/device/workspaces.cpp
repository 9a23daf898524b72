#include "workspaces.h"

#include "memory.h"

#include <map>
#include <set>
#include <tuple>

namespace emulated {
namespace {

// On an H100, as measured: `benchmarks/gpu/results/facts.json`, "workspaces".
constexpr size_t kBytes = size_t{32} << 20;
constexpr size_t kLtBytes = size_t{1} << 20;

const std::set<std::string> kProducts = {"aten::mm",    "aten::addmm", "aten::_addmm_activation", "aten::bmm",
                                         "aten::baddbmm", "aten::addmv", "aten::dot",             "aten::vdot"};
const std::set<std::string> kWithLt = {"aten::addmm", "aten::_addmm_activation"};

// A thread has a handle of each device from a pool, and gives it back when it ends: the next thread has its workspaces.
struct Handles {
  std::map<c10::DeviceIndex, std::set<int>> free;
  std::map<c10::DeviceIndex, int> made;
};

Handles& handles() {
  static auto& handles = *new Handles;
  return handles;
}

struct ThreadHandles {
  std::map<c10::DeviceIndex, int> own;

  int of(c10::DeviceIndex device) {
    auto [found, is_new] = own.try_emplace(device, 0);
    auto& free = handles().free[device];
    if (is_new && free.empty())
      found->second = handles().made[device]++;
    else if (is_new)
      found->second = free.extract(free.begin()).value();
    return found->second;
  }
  ~ThreadHandles() {
    Lock lock;
    for (auto [device, handle] : own) handles().free[device].insert(handle);
  }
};

thread_local ThreadHandles thread_handles;

using Key = std::tuple<c10::DeviceIndex, int, c10::StreamId, size_t>;  // device, handle, stream, bytes

std::map<Key, c10::DataPtr>& workspaces() {
  static auto& workspaces = *new std::map<Key, c10::DataPtr>;
  return workspaces;
}

}  // namespace

void take_workspaces(const std::string& op, bool has_bias) {
  if (!settings().workspaces || !kProducts.count(op)) return;
  auto device = current_device();
  auto stream = current_stream(device).id;
  auto take = [&](size_t bytes) {
    Key key{device, thread_handles.of(device), stream, bytes};
    if (!workspaces().count(key)) workspaces()[key] = allocate(bytes);
  };
  take(kBytes);
  if (has_bias && kWithLt.count(op)) take(kLtBytes);
}

void clear_workspaces() {
  Lock lock;
  workspaces().clear();
}

}  // namespace emulated
