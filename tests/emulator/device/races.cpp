#include "races.h"

#include <algorithm>

namespace emulated {
namespace {

constexpr size_t kMostRaces = 200;  // one missing wait in a loop should not fill the memory

std::vector<std::string>& races() {
  static auto& races = *new std::vector<std::string>;
  return races;
}

}  // namespace

bool check_order(const Access& earlier, const StreamState& later, bool writes, const std::string& by,
                 const std::string& what) {
  if (!writes && !earlier.writes) return false;
  if (earlier.stream == later.number || later.clock.covers(earlier.stream, earlier.epoch)) return false;
  auto text = std::string(writes ? "the write" : "the read") + " of " + what + " by " + by + " on " + later.name() +
              " does not wait for the " + (earlier.writes ? "write" : "read") + " by " + earlier.by + " on " +
              stream_numbered(earlier.stream).name();
  if (earlier.freed) text += ": the memory was freed while that was pending, and record_stream had not told of it";
  if (earlier.owned) text += ": the memory is that stream's, which used it before for something else";
  note_race(std::move(text));
  return true;
}

void Accesses::add(const StreamState& stream, Epoch epoch, bool writes, const std::string& by) {
  for (const auto& earlier : all_) check_order(earlier, stream, writes, by, "memory");
  auto is_over = [&](const Access& one) { return writes || (!one.writes && one.stream == stream.number); };
  all_.erase(std::remove_if(all_.begin(), all_.end(), is_over), all_.end());
  all_.push_back({stream.number, epoch, writes, by});
}

Accesses Accesses::left_behind(const StreamState& owner) const {
  Accesses left;
  for (auto one : all_) {
    if (host().covers(one.stream, one.epoch)) continue;
    one.owned = one.stream == owner.number;
    if (!one.owned && owner.clock.covers(one.stream, one.epoch)) continue;
    one.freed = !one.owned;
    left.all_.push_back(std::move(one));
  }
  return left;
}

void Accesses::inherit(const Accesses& before) {
  all_.insert(all_.end(), before.all_.begin(), before.all_.end());
}

void note_race(std::string text) {
  auto& all = races();
  if (all.size() < kMostRaces && std::find(all.begin(), all.end(), text) == all.end()) all.push_back(std::move(text));
}

std::vector<std::string> take_races() {
  std::vector<std::string> taken;
  taken.swap(races());
  return taken;
}

}  // namespace emulated
