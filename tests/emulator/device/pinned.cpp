#include "pinned.h"

#include "events.h"

#include <cstdlib>
#include <cstring>
#include <list>
#include <map>

namespace emulated {
namespace {

constexpr int kPattern = 0xFF;
constexpr size_t kUnit = 512;

struct Pinned {
  char* start;
  size_t size;
  bool is_freed = false;
  int pending = 0;  // copies
  struct Range {
    char *from, *to;
    Access access;
  };
  std::vector<Range> accesses;
};

struct Copy {
  Pinned* memory;
  char *from, *to;
  bool out;
  int stream;
  Epoch epoch;
  std::vector<char> content;

  bool meets(const char* other_from, const char* other_to) const { return from < other_to && other_from < to; }
};

struct Memories {
  std::map<char*, std::unique_ptr<Pinned>> all;  // by start
  std::multimap<size_t, Pinned*> free;           // by size
  std::list<Copy> copies;                        // in the order of their launches
};

Memories& memories() {
  static auto& memories = *new Memories;
  return memories;
}

Pinned* holder(const void* address) {
  auto& all = memories().all;
  auto at = static_cast<char*>(const_cast<void*>(address));
  auto after = all.upper_bound(at);
  if (after == all.begin()) return nullptr;
  auto* memory = std::prev(after)->second.get();
  return at < memory->start + memory->size ? memory : nullptr;
}

void offer(Pinned* memory) { memories().free.emplace(memory->size, memory); }

void finish(const Copy& copy) {
  auto bytes = copy.content.size();
  if (copy.out) {
    static const std::vector<char> pattern(64 * 1024, char(kPattern));
    for (size_t done = 0; done < bytes; done += pattern.size())
      if (std::memcmp(copy.from + done, pattern.data(), std::min(pattern.size(), bytes - done)) != 0) {
        note_race("the host writes pinned memory while a copy into it is pending on " +
                  stream_numbered(copy.stream).name());
        break;
      }
    std::memcpy(copy.from, copy.content.data(), bytes);
  } else if (std::memcmp(copy.from, copy.content.data(), bytes) != 0) {
    note_race("the host writes pinned memory while a copy from it is pending on " +
              stream_numbered(copy.stream).name());
  }
  if (--copy.memory->pending == 0 && copy.memory->is_freed) offer(copy.memory);
}

template <typename Predicate>
void finish_where(Predicate is_due) {
  auto& copies = memories().copies;
  for (auto copy = copies.begin(); copy != copies.end();) {
    if (!is_due(*copy)) {
      ++copy;
      continue;
    }
    finish(*copy);
    copy = copies.erase(copy);
  }
}

void free_pinned(void* start) {
  if (!start) return;
  Lock lock;
  auto* memory = holder(start);
  memory->is_freed = true;
  if (memory->pending == 0) offer(memory);
}

size_t power_of_two(size_t size) {
  size_t rounded = kUnit;
  while (rounded < size) rounded *= 2;
  return rounded;
}

struct Allocator final : at::HostAllocator {
  at::DataPtr allocate(size_t size) override {
    Lock lock;
    if (size == 0) return {nullptr, nullptr, &free_pinned, at::Device(at::kCPU)};
    auto rounded = power_of_two(size);
    auto& [all, free, copies] = memories();
    auto found = free.find(rounded);
    Pinned* memory;
    if (found != free.end()) {
      memory = found->second;
      free.erase(found);
      memory->is_freed = false;
    } else {
      auto* start = static_cast<char*>(std::aligned_alloc(kUnit, rounded));
      TORCH_CHECK(start, "CUDA error: out of memory (", rounded, " bytes of pinned memory)");
      all[start] = std::make_unique<Pinned>(Pinned{start, rounded});
      memory = all[start].get();
    }
    return {memory->start, memory->start, &free_pinned, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // pending copies are known already
  void empty_cache() override {
    Lock lock;
    for (auto& [size, memory] : memories().free) {
      std::free(memory->start);
      memories().all.erase(memory->start);
    }
    memories().free.clear();
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

at::HostAllocator& pinned_allocator() {
  static auto& allocator = *new Allocator;
  return allocator;
}

bool is_pinned(const void* address) {
  Lock lock;
  return holder(address) != nullptr;
}

void launch_copy(void* pinned, const void* device, size_t bytes, bool out, const StreamState& stream, Epoch epoch) {
  if (bytes == 0) return;
  auto* from = static_cast<char*>(pinned);
  auto* to = from + bytes;
  auto* memory = holder(pinned);
  const auto by = std::string("copy_");
  std::vector<Pinned::Range> left;
  for (auto& earlier : memory->accesses) {
    bool meets = earlier.from < to && from < earlier.to;
    if (meets) check_order(earlier.access, stream, out, by, "pinned memory");
    bool is_covered = out && from <= earlier.from && earlier.to <= to;
    if (!is_covered && !host().covers(earlier.access.stream, earlier.access.epoch)) left.push_back(std::move(earlier));
  }
  left.push_back({from, to, {stream.number, epoch, out, by}});
  memory->accesses.swap(left);

  // Earlier copies of this range come first; whether this one waits for them has just been checked.
  finish_where([&](const Copy& copy) { return (out || copy.out) && copy.meets(from, to); });
  ++memory->pending;
  auto* content = static_cast<const char*>(out ? device : pinned);
  memories().copies.push_back({memory, from, to, out, stream.number, epoch, std::vector<char>(content, content + bytes)});
  if (out) std::memset(from, kPattern, bytes);
}

void finish_copies() {
  finish_where([](const Copy& copy) { return host().covers(copy.stream, copy.epoch); });
}

}  // namespace emulated
