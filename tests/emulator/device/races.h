// Accesses to memory whose order nobody has said. See NOTE [ Time is a vector clock ].
#pragma once
#include "clocks.h"

namespace emulated {

struct Access {
  int stream;
  Epoch epoch;
  bool writes;
  std::string by;      // the operator
  bool freed = false;  // the memory has been given back and taken again since
  bool owned = false;  // the same, and it was the access of the stream that the memory belongs to
};

// The accesses to one block that a later one may have to wait for: the last write, and the reads since, by stream.
class Accesses {
 public:
  // Notes an access, and a race for each earlier one that it does not wait for.
  void add(const StreamState& stream, Epoch epoch, bool writes, const std::string& by);

  // When a block is freed: what its next user has to wait for. On the block's own stream that comes in order, and
  // others have to wait for that stream.
  Accesses left_behind(const StreamState& owner) const;
  void inherit(const Accesses& before);
  bool empty() const { return all_.empty(); }

 private:
  std::vector<Access> all_;
};

// Whether the two are out of order; a race is noted if so. `what` names the memory, as in "pinned memory".
bool check_order(const Access& earlier, const StreamState& later, bool writes, const std::string& by,
                 const std::string& what);

void note_race(std::string text);
std::vector<std::string> take_races();

}  // namespace emulated
