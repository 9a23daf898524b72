#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>

namespace emulated {
namespace {

constexpr size_t KiB = 1024, MiB = KiB * 1024, GiB = MiB * 1024;
constexpr size_t kUnit = 512;
constexpr size_t kSmallSize = 1 * MiB;      // the largest block of the small pool
constexpr size_t kSmallSegment = 2 * MiB;   // a segment of the small pool
constexpr size_t kLargeSegment = 20 * MiB;  // one of the large pool, for blocks below kOwnSegment
constexpr size_t kOwnSegment = 10 * MiB;    // from here on a block has a segment of its own ...
constexpr size_t kOwnUnit = 2 * MiB;        // ... rounded up to this
constexpr size_t kContext = 300 * MiB;      // what the driver takes for itself

size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

size_t segment_size(size_t size) {
  if (size <= kSmallSize) return kSmallSegment;
  return size < kOwnSegment ? kLargeSegment : round_up(size, kOwnUnit);
}

bool should_split(const Block& block, size_t size) {
  auto rest = block.size - size;
  return block.pool->is_small || !settings().slack ? rest >= kUnit : rest > kSmallSize;
}

std::string words(size_t size) {
  char text[32];
  if (size <= KiB)
    std::snprintf(text, sizeof text, "%zu bytes", size);
  else if (size <= MiB)
    std::snprintf(text, sizeof text, "%.2f KiB", double(size) / KiB);
  else if (size <= GiB)
    std::snprintf(text, sizeof text, "%.2f MiB", double(size) / MiB);
  else
    std::snprintf(text, sizeof text, "%.2f GiB", double(size) / GiB);
  return text;
}

}  // namespace

bool BySize::operator()(const Block* one, const Block* other) const {
  return std::tie(one->stream, one->size, one->start) < std::tie(other->stream, other->size, other->start);
}

void* DeviceMemory::allocate(size_t requested) {
  auto& stream = current_stream(device_);
  settle();
  auto size = round_up(std::max(requested, kUnit), kUnit);
  auto& pool = size <= kSmallSize ? small_ : large_;
  auto* block = find_free(size, pool, stream.id);
  if (!block) block = add_segment(segment_size(size), pool, stream.id);
  if (!block) {
    ++stats_.num_alloc_retries;
    settle_all();
    release_segments();
    block = add_segment(segment_size(size), pool, stream.id);
  }
  if (!block) fail(requested);

  bool was_split = block->is_split();
  if (was_split) {
    count(stats_.inactive_split, pool, -1);
    count(stats_.inactive_split_bytes, pool, -int64_t(block->size));
  }
  if (should_split(*block, size)) split(block, size);
  block->is_allocated = true;
  block->requested = requested;
  block->accesses = {};
  auto* end = block->start + block->size;
  auto& remains = block->segment->remains;
  for (const auto& one : remains)
    if (one.from < end && block->start < one.to) block->accesses.inherit(one.accesses);
  auto is_taken = [&](const Segment::Remains& one) { return block->start <= one.from && one.to <= end; };
  remains.erase(std::remove_if(remains.begin(), remains.end(), is_taken), remains.end());
  active_[block->start] = block;
  count(stats_.allocation, pool, 1);
  count(stats_.allocated_bytes, pool, int64_t(block->size));
  count(stats_.active, pool, 1);
  count(stats_.active_bytes, pool, int64_t(block->size));
  count(stats_.requested_bytes, pool, int64_t(requested));
  history_.add("alloc", block->start, requested, block->stream);
  c10::reportMemoryUsageToProfiler(block->start, int64_t(block->size), stats_.allocated_bytes[0].current, reserved(),
                                   c10::Device(c10::kCUDA, device_));
  return block->start;
}

void DeviceMemory::free(void* start) {
  auto* block = active_.at(start);
  block->is_allocated = false;
  count(stats_.allocation, *block->pool, -1);
  count(stats_.allocated_bytes, *block->pool, -int64_t(block->size));
  history_.add("free_requested", block->start, block->requested, block->stream);
  c10::reportMemoryUsageToProfiler(block->start, -int64_t(block->size), stats_.allocated_bytes[0].current, reserved(),
                                   c10::Device(c10::kCUDA, device_));
  for (int number : block->used_on) {
    pending_.emplace_back(Event(), block);
    pending_.back().first.record(stream_numbered(number));
    ++block->pending;
  }
  block->used_on.clear();
  if (block->pending == 0) release(block);
}

void DeviceMemory::record_stream(void* start, const StreamState& stream) {
  auto* block = block_of(start);
  if (block && !(stream.id == block->stream && stream.device == block->device)) block->used_on.insert(stream.number);
}

void DeviceMemory::empty_cache() {
  settle_all();
  release_segments();
}

Block* DeviceMemory::block_of(const void* start) const {
  auto found = active_.find(start);
  return found == active_.end() ? nullptr : found->second;
}

Block* DeviceMemory::find_free(size_t size, Pool& pool, c10::StreamId stream) {
  Block smallest{nullptr, size, device_, stream, &pool, nullptr};
  auto found = pool.free.lower_bound(&smallest);
  if (found == pool.free.end() || (*found)->stream != stream) return nullptr;
  auto* block = *found;
  pool.free.erase(found);
  return block;
}

Block* DeviceMemory::add_segment(size_t size, Pool& pool, c10::StreamId stream) {
  auto allowed = fraction_ < 0 ? settings().capacity : size_t(fraction_ * double(settings().capacity));
  if (reserved() + size > allowed || size > info().first) return nullptr;
  auto* start = static_cast<char*>(std::aligned_alloc(kUnit, size));
  if (!start) return nullptr;
  auto& segment = segments_[start];
  segment = std::make_unique<Segment>(Segment{start, size, {}});
  auto* block = new Block{start, size, device_, stream, &pool, segment.get()};
  first_[segment.get()] = block;
  count(stats_.segment, pool, 1);
  count(stats_.reserved_bytes, pool, int64_t(size));
  ++stats_.num_device_alloc;
  history_.add("segment_alloc", start, size, stream);
  return block;
}

void DeviceMemory::split(Block* block, size_t size) {
  auto* rest = new Block{block->start + size, block->size - size, device_, block->stream, block->pool, block->segment};
  rest->before = block;
  rest->after = block->after;
  if (rest->after) rest->after->before = rest;
  block->after = rest;
  block->size = size;
  block->pool->free.insert(rest);
  count(stats_.inactive_split, *block->pool, 1);
  count(stats_.inactive_split_bytes, *block->pool, int64_t(rest->size));
}

// The block is no longer in use by any stream that the allocator was told of.
void DeviceMemory::release(Block* block) {
  auto& pool = *block->pool;
  history_.add("free_completed", block->start, block->requested, block->stream);
  active_.erase(block->start);
  auto& owner = stream_of(device_, block->stream);
  auto& remains = block->segment->remains;
  auto is_over = [&](const Segment::Remains& one) { return one.accesses.left_behind(owner).empty(); };
  remains.erase(std::remove_if(remains.begin(), remains.end(), is_over), remains.end());
  auto left = block->accesses.left_behind(owner);
  if (!left.empty()) remains.push_back({block->start, block->start + block->size, std::move(left)});

  count(stats_.active, pool, -1);
  count(stats_.active_bytes, pool, -int64_t(block->size));
  count(stats_.requested_bytes, pool, -int64_t(block->requested));
  join_neighbour(block, block->before, pool);
  join_neighbour(block, block->after, pool);
  pool.free.insert(block);
  if (block->is_split()) {
    count(stats_.inactive_split, pool, 1);
    count(stats_.inactive_split_bytes, pool, int64_t(block->size));
  }
}

void DeviceMemory::join_neighbour(Block* block, Block* neighbour, Pool& pool) {
  if (!neighbour || neighbour->is_allocated || neighbour->pending) return;
  if (neighbour == block->before) {
    block->start = neighbour->start;
    block->before = neighbour->before;
    if (block->before) block->before->after = block;
    if (first_[block->segment] == neighbour) first_[block->segment] = block;
  } else {
    block->after = neighbour->after;
    if (block->after) block->after->before = block;
  }
  pool.free.erase(neighbour);
  block->size += neighbour->size;
  count(stats_.inactive_split, pool, -1);
  count(stats_.inactive_split_bytes, pool, -int64_t(neighbour->size));
  delete neighbour;
}

// Frees the blocks whose events have fired. As torch does, it looks no further on a stream than the first that has not.
void DeviceMemory::settle() {
  std::set<int> behind;  // streams
  std::vector<std::pair<Event, Block*>> left;
  for (auto& [event, block] : pending_) {
    if (behind.count(event.stream()) || !event.query()) {
      behind.insert(event.stream());
      left.emplace_back(event, block);
    } else if (--block->pending == 0) {
      release(block);  // at once: a neighbour must not find a block that is neither in use nor free
    }
  }
  pending_.swap(left);
}

void DeviceMemory::settle_all() {
  ++stats_.num_sync_all_streams;
  for (auto& [event, block] : pending_) event.synchronize();
  settle();
}

void DeviceMemory::release_segments() {
  bool waited = false;
  for (auto* pool : {&small_, &large_}) {
    std::vector<Block*> whole;
    for (auto* block : pool->free)
      if (!block->is_split()) whole.push_back(block);
    for (auto* block : whole) {
      if (!waited) host_waits_for_device(device_);  // cudaFree waits for the device
      waited = true;
      pool->free.erase(block);
      history_.add("segment_free", block->start, block->size, block->stream);
      count(stats_.segment, *pool, -1);
      count(stats_.reserved_bytes, *pool, -int64_t(block->size));
      ++stats_.num_device_free;
      first_.erase(block->segment);
      auto* start = block->start;
      segments_.erase(start);
      std::free(start);
      delete block;
    }
  }
}

void DeviceMemory::fail(size_t size) {
  ++stats_.num_ooms;
  auto [free, total] = info();
  history_.add("oom", reinterpret_cast<void*>(free), size, current_stream(device_).id);
  auto allocated = stats_.allocated_bytes[0].current;
  c10::reportOutOfMemoryToProfiler(int64_t(size), allocated, reserved(), c10::Device(c10::kCUDA, device_));
  std::string allowed;
  if (fraction_ >= 0) allowed = words(size_t(fraction_ * double(total))) + " allowed; ";
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", words(size), ". GPU ", int(device_),
      " has a total capacity of ", words(total), " of which ", words(free),
      " is free. Including non-PyTorch memory, this process has ", words(total - free), " memory in use. ", allowed,
      "Of the allocated memory ", words(allocated), " is allocated by PyTorch, and ", words(reserved() - allocated),
      " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting ",
      "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory ",
      "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)");
}

std::pair<size_t, size_t> DeviceMemory::info() const {
  auto total = settings().capacity, used = reserved() + kContext;
  return {used < total ? total - used : 0, total};
}

size_t DeviceMemory::reserved() const { return size_t(stats_.reserved_bytes[0].current); }

void DeviceMemory::count(c10::CachingAllocator::StatArray& stat, const Pool& pool, int64_t amount) {
  for (auto* one : {&stat[0], &stat[pool.is_small ? 1 : 2]})
    if (amount < 0)
      one->decrease(size_t(-amount));
    else
      one->increase(size_t(amount));
}

void DeviceMemory::reset_peaks() {
  for (auto* stats : {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.inactive_split,
                      &stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes,
                      &stats_.inactive_split_bytes, &stats_.requested_bytes})
    for (auto& stat : *stats) stat.reset_peak();
}

void DeviceMemory::reset_sums() {
  for (auto* stats : {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.inactive_split,
                      &stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes,
                      &stats_.inactive_split_bytes, &stats_.requested_bytes})
    for (auto& stat : *stats) stat.reset_accumulated();
  stats_.num_alloc_retries = stats_.num_ooms = stats_.num_sync_all_streams = 0;
  stats_.num_device_alloc = stats_.num_device_free = 0;
}

void DeviceMemory::note_snapshot() { history_.add("snapshot", nullptr, size_t(stats_.active_bytes[0].current), 0); }

std::vector<Segment*> DeviceMemory::segments() const {
  std::vector<Segment*> all;
  for (const auto& [start, segment] : segments_) all.push_back(segment.get());
  std::sort(all.begin(), all.end(), [](auto* one, auto* other) { return one->start < other->start; });
  return all;
}

std::vector<Block*> DeviceMemory::blocks_of(const Segment& segment) const {
  std::vector<Block*> all;
  for (auto* block = first_.at(&segment); block; block = block->after) all.push_back(block);
  return all;
}

DeviceMemory& memory_of(c10::DeviceIndex device) {
  static auto& memories = *[] {
    auto* all = new std::deque<DeviceMemory>;  // places stay: blocks point to the pools
    for (int i = 0; i < kMostDevices; ++i) all->emplace_back(c10::DeviceIndex(i));
    return all;
  }();
  return memories[device];
}

Block* find_block(const void* start) {
  for (int i = 0; start && i < settings().devices; ++i)
    if (auto* block = memory_of(c10::DeviceIndex(i)).block_of(start)) return block;
  return nullptr;
}

namespace {

void free_block(void* start) {
  if (!start) return;
  Lock lock;
  if (auto* block = find_block(start)) memory_of(block->device).free(start);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override { return emulated::allocate(size); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    Lock lock;
    for (int i = 0; i < settings().devices; ++i) memory_of(c10::DeviceIndex(i)).empty_cache();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock;
    if (auto* block = find_block(data.get())) memory_of(block->device).record_stream(block->start, stream_of(stream));
  }
  Stats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock;
    return memory_of(device).stats();
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock;
    memory_of(device).reset_sums();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock;
    memory_of(device).reset_peaks();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock;
    return memory_of(device).info();
  }
};

}  // namespace

c10::DataPtr allocate(size_t size) {
  Lock lock;
  auto device = current_device();
  auto* start = size ? memory_of(device).allocate(size) : nullptr;
  return {start, start, &free_block, c10::Device(c10::kCUDA, device)};
}

c10::DeviceAllocator& allocator() {
  static auto& allocator = *new Allocator;
  return allocator;
}

}  // namespace emulated
