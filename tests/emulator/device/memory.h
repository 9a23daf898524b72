// The memory of the devices: torch's caching allocator, on memory of the host.
//
// NOTE [ What the allocator does ]
//
// It is CUDACachingAllocator without expandable segments, private pools and garbage collection:
//
//   1. Sizes are rounded up to 512 bytes. Blocks of up to 1 MiB come from segments of 2 MiB, the small pool; larger
//      ones from segments of 20 MiB, and from 10 MiB on from one of their own, rounded up to 2 MiB.
//   2. A request takes the smallest free block of its pool and stream that fits. The rest is split off, but a large
//      block keeps a rest of up to 1 MiB: that is the slack, and it counts as allocated.
//   3. A freed block joins its free neighbours. If `record_stream` told of other streams, it waits for them first: it
//      is no longer allocated, but active.
//   4. Without room, blocks that wait are waited for, then all free segments are given back, then it is out of memory.
//
// The history has an entry for each step, with the bytes that were asked for, not the rounded ones.
#pragma once
#include "events.h"
#include "history.h"
#include "races.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <deque>
#include <memory>
#include <set>
#include <unordered_map>

namespace emulated {

using Stats = c10::CachingDeviceAllocator::DeviceStats;

struct Pool;

struct Segment {
  char* start;
  size_t size;
  // What was last done to freed parts of it by streams that the owner has not waited for.
  struct Remains {
    char *from, *to;
    Accesses accesses;
  };
  std::vector<Remains> remains;
};

struct Block {
  char* start;
  size_t size;
  c10::DeviceIndex device;
  c10::StreamId stream;  // the one it was allocated on
  Pool* pool;
  Segment* segment;
  size_t requested = 0;
  bool is_allocated = false;
  Block *before = nullptr, *after = nullptr;  // neighbours in the segment
  std::set<int> used_on;                      // by record_stream
  int pending = 0;                            // events it waits for
  Accesses accesses;

  bool is_split() const { return before || after; }
};

struct BySize {
  bool operator()(const Block* one, const Block* other) const;
};

struct Pool {
  bool is_small;
  std::set<Block*, BySize> free;
};

class DeviceMemory {
 public:
  explicit DeviceMemory(c10::DeviceIndex device) : device_(device) {}

  void* allocate(size_t requested);
  void free(void* start);
  void record_stream(void* start, const StreamState& stream);
  void empty_cache();

  // The block that holds this storage, or null.
  Block* block_of(const void* start) const;

  const Stats& stats() const { return stats_; }
  void reset_peaks();
  void reset_sums();

  History& history() { return history_; }
  void note_snapshot();
  std::vector<Segment*> segments() const;
  std::vector<Block*> blocks_of(const Segment& segment) const;

  // Free and total bytes, as cudaMemGetInfo has them.
  std::pair<size_t, size_t> info() const;
  double fraction() const { return fraction_; }
  void set_fraction(double fraction) { fraction_ = fraction; }

 private:
  Block* find_free(size_t size, Pool& pool, c10::StreamId stream);
  Block* add_segment(size_t size, Pool& pool, c10::StreamId stream);
  void split(Block* block, size_t size);
  void release(Block* block);
  void join_neighbour(Block* block, Block* neighbour, Pool& pool);
  void settle();
  void settle_all();
  void release_segments();
  [[noreturn]] void fail(size_t size);

  size_t reserved() const;
  void count(c10::CachingAllocator::StatArray& stat, const Pool& pool, int64_t amount);

  c10::DeviceIndex device_;
  Pool small_{true, {}}, large_{false, {}};
  std::unordered_map<const void*, Block*> active_;
  std::unordered_map<char*, std::unique_ptr<Segment>> segments_;
  std::unordered_map<const Segment*, Block*> first_;  // of each segment
  std::vector<std::pair<Event, Block*>> pending_;     // in the order of their frees
  Stats stats_;
  History history_;
  double fraction_ = -1;  // not set
};

DeviceMemory& memory_of(c10::DeviceIndex device);
// The block of a storage on whichever device, or null.
Block* find_block(const void* start);
// Memory on the calling thread's device and stream.
c10::DataPtr allocate(size_t size);
c10::DeviceAllocator& allocator();

}  // namespace emulated
