// The module that Python's side is written on: names as in `torch._C`, without `_cuda_`.
#include "generators.h"
#include "memory.h"
#include "pinned.h"
#include "workspaces.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace emulated {
namespace {

using Index = int;  // Python's devices

DeviceMemory& memory_at(Index device) {
  TORCH_CHECK(0 <= device && device < settings().devices, "Invalid device argument ", device);
  return memory_of(c10::DeviceIndex(device));
}

py::dict dict_of(const c10::CachingAllocator::Stat& stat) {
  py::dict result;
  result["current"] = stat.current;
  result["peak"] = stat.peak;
  result["allocated"] = stat.allocated;
  result["freed"] = stat.freed;
  return result;
}

py::dict dict_of(const c10::CachingAllocator::StatArray& stats) {
  py::dict result;
  result["all"] = dict_of(stats[0]);
  result["small_pool"] = dict_of(stats[1]);
  result["large_pool"] = dict_of(stats[2]);
  return result;
}

py::dict memory_stats(Index device) {
  Lock lock;
  const auto& stats = memory_at(device).stats();
  py::dict result;
  result["num_alloc_retries"] = stats.num_alloc_retries;
  result["num_ooms"] = stats.num_ooms;
  result["max_split_size"] = stats.max_split_size;
  result["num_sync_all_streams"] = stats.num_sync_all_streams;
  result["num_device_alloc"] = stats.num_device_alloc;
  result["num_device_free"] = stats.num_device_free;
  result["allocated_bytes"] = dict_of(stats.allocated_bytes);
  result["reserved_bytes"] = dict_of(stats.reserved_bytes);
  result["active_bytes"] = dict_of(stats.active_bytes);
  result["inactive_split_bytes"] = dict_of(stats.inactive_split_bytes);
  result["requested_bytes"] = dict_of(stats.requested_bytes);
  result["allocation"] = dict_of(stats.allocation);
  result["segment"] = dict_of(stats.segment);
  result["active"] = dict_of(stats.active);
  result["inactive_split"] = dict_of(stats.inactive_split);
  result["oversize_allocations"] = dict_of(stats.oversize_allocations);
  result["oversize_segments"] = dict_of(stats.oversize_segments);
  return result;
}

py::dict dict_of(const Block& block) {
  py::dict result;
  result["address"] = reinterpret_cast<int64_t>(block.start);
  result["size"] = block.size;
  result["requested_size"] = block.requested;
  result["state"] = block.is_allocated ? "active_allocated" : block.pending ? "active_pending_free" : "inactive";
  result["frames"] = py::list();
  return result;
}

py::dict dict_of(const Segment& segment, const DeviceMemory& memory) {
  py::list blocks;
  size_t allocated = 0, active = 0, requested = 0;
  auto all = memory.blocks_of(segment);
  for (const auto* block : all) {
    blocks.append(dict_of(*block));
    bool is_active = block->is_allocated || block->pending;
    allocated += block->is_allocated ? block->size : 0;
    active += is_active ? block->size : 0;
    requested += is_active ? block->requested : 0;
  }
  py::dict result;
  result["device"] = int(all[0]->device);
  result["address"] = reinterpret_cast<int64_t>(segment.start);
  result["total_size"] = segment.size;
  result["allocated_size"] = allocated;
  result["active_size"] = active;
  result["requested_size"] = requested;
  result["stream"] = all[0]->stream;
  result["segment_type"] = all[0]->pool->is_small ? "small" : "large";
  result["segment_pool_id"] = py::make_tuple(0, 0);
  result["is_expandable"] = false;
  result["frames"] = py::list();
  result["blocks"] = blocks;
  return result;
}

py::dict dict_of(const HistoryEntry& entry) {
  py::dict result;
  result["action"] = entry.action;
  result[std::string_view(entry.action) == "oom" ? "device_free" : "addr"] = entry.address;
  result["size"] = entry.size;
  result["stream"] = entry.stream;
  result["time_us"] = entry.microseconds;
  result["compile_context"] = "N/A";
  result["user_metadata"] = "";
  result["frames"] = py::list();
  return result;
}

py::dict memory_snapshot() {
  Lock lock;
  py::list segments, traces;
  for (int i = 0; i < settings().devices; ++i) {
    auto& memory = memory_at(i);
    for (const auto* segment : memory.segments()) segments.append(dict_of(*segment, memory));
    py::list trace;
    for (const auto& entry : memory.history().entries()) trace.append(dict_of(entry));
    traces.append(trace);
    memory.note_snapshot();
  }
  py::dict result;
  result["segments"] = segments;
  result["device_traces"] = traces;
  result["allocator_settings"] = py::dict();
  result["external_annotations"] = py::list();
  return result;
}

void record_history(bool enabled, size_t most, bool clear) {
  Lock lock;
  for (int i = 0; i < settings().devices; ++i) {
    if (enabled)
      memory_at(i).history().start(most, clear);
    else
      memory_at(i).history().stop();
  }
}

void configure(int devices, size_t capacity, int64_t lag, bool workspaces, bool slack) {
  Lock lock;
  TORCH_CHECK(0 < devices && devices <= kMostDevices, "devices=", devices, ": 1 to ", kMostDevices, " can be emulated");
  TORCH_CHECK(lag >= kNever, "lag=", lag, ": a number of polls, or NEVER");
  settings() = {c10::DeviceIndex(devices), capacity, lag, workspaces, slack};
}

py::dict configuration() {
  py::dict result;
  result["devices"] = int(settings().devices);
  result["capacity"] = settings().capacity;
  result["lag"] = settings().lag;
  result["workspaces"] = settings().workspaces;
  result["slack"] = settings().slack;
  return result;
}

}  // namespace
}  // namespace emulated

PYBIND11_MODULE(_device, m) {
  using namespace emulated;
  m.attr("NEVER") = kNever;
  m.def("configure", &configure, py::kw_only(), py::arg("devices"), py::arg("capacity"), py::arg("lag"),
        py::arg("workspaces"), py::arg("slack"));
  m.def("configuration", &configuration);
  m.def("races", [] {
    Lock lock;
    return take_races();
  });

  m.def("getDeviceCount", [] { return int(settings().devices); });
  m.def("getDevice", [] { return int(current_device()); });
  m.def("exchangeDevice", [](Index device) { return int(exchange_device(c10::DeviceIndex(device))); });
  // The same, but another object: torch.compile tells functions apart.
  m.def("maybeExchangeDevice", [](Index device) { return int(exchange_device(c10::DeviceIndex(device))); });
  m.def("synchronize", [] {
    Lock lock;
    host_waits_for_device(current_device());
  });
  m.def("getCurrentStream", [](Index device) {
    Lock lock;
    return current_stream(c10::DeviceIndex(device)).id;
  });
  m.def("setStream", [](Index device, int64_t id) {
    exchange_device(c10::DeviceIndex(device));
    set_current_stream(c10::DeviceIndex(device), id);
  });
  m.def("newStream", [](bool high_priority) {
    Lock lock;
    return next_stream(current_device(), high_priority);
  });
  m.def("isHighPriority", &is_high_priority);

  m.def("elapsedTime", [](int64_t start, int64_t end) {
    Lock lock;
    return Event::milliseconds_between(*reinterpret_cast<Event*>(start), *reinterpret_cast<Event*>(end));
  });

  m.def("memoryStats", &memory_stats);
  m.def("memorySnapshot", &memory_snapshot);
  m.def("memoryInfo", [](Index device) {
    Lock lock;
    return memory_at(device).info();
  });
  m.def("resetPeakMemoryStats", [](Index device) { allocator().resetPeakStats(c10::DeviceIndex(device)); });
  m.def("resetAccumulatedMemoryStats", [](Index device) { allocator().resetAccumulatedStats(c10::DeviceIndex(device)); });
  m.def("emptyCache", [] { allocator().emptyCache({0, 0}); });
  m.def("setMemoryFraction", [](double fraction, Index device) {
    Lock lock;
    memory_at(device).set_fraction(fraction);
  });
  m.def("getMemoryFraction", [](Index device) {
    Lock lock;
    return memory_at(device).fraction() < 0 ? 1.0 : memory_at(device).fraction();
  });
  m.def("recordHistory", &record_history);
  m.def("isHistoryEnabled", [] {
    Lock lock;
    return memory_at(0).history().is_on();
  });
  m.def("emptyHostCache", [] { pinned_allocator().empty_cache(); });
  m.def("clearCublasWorkspaces", &clear_workspaces);
  m.def("defaultGenerator", [](Index device) { return default_generator(c10::DeviceIndex(device)); });
}
