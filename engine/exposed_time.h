#pragma once
/// How long the compute stream waited for others, which is the part of their work that computation
/// did not hide. Private to engine/.

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "tranche/device/event.h"
#include "tranche/device/stream.h"

namespace tranche::detail {

/// The operation that was waited for.
enum class Exposed { gather, reduce, offload, message };

/// When the compute stream passes points of a pass that the host issues.
class PassTimes {
 public:
  explicit PassTimes(Stream& compute) : compute_(compute) {}
  /// The end of one part of a micro-batch and the beginning of the next.
  void begin() { marks_.push_back({mark(), {}, {}}); }
  void turn() {
    if (!marks_.empty() && !marks_.back().turned.taken) marks_.back().turned = mark();
  }
  void end() {
    if (!marks_.empty()) marks_.back().ended = mark();
  }
  /// Seconds of all micro-batches from begin() to turn() and from there to end(), which the device has
  /// passed. Forgets them.
  std::pair<double, double> take();
  void clear() { marks_.clear(); }

 private:
  struct Mark {
    Event passed;  ///< without a time of its own where work is inline
    double issued = 0;
    bool taken = false;
    double seconds() const;
  };
  struct MicroBatch {
    Mark begun, turned, ended;
  };
  Mark mark();

  Stream& compute_;
  std::vector<MicroBatch> marks_;
};

class ExposedTime {
 public:
  /// `compute` outlives it.
  explicit ExposedTime(Stream& compute) : compute_(compute) {}

  /// Has the compute stream wait for a collective's or a copy's event; the time that this costs is known once
  /// the device has passed both points. Rethrows the event's failure.
  void wait_for(const Event& event, Exposed what);
  /// The device has passed all that was waited for: adds up what it cost.
  void settle();
  /// Seconds settled since it was last taken.
  double take(Exposed what);
  /// Forgets everything, also what is not settled.
  void clear();

 private:
  struct Wait {
    Event arrived;  ///< the point at which the compute stream began to wait; without a time of its own where
                    ///< work is inline
    double issued = 0;
    Event awaited;
    Exposed what;
  };

  Stream& compute_;
  std::vector<Wait> waits_;
  std::array<double, 4> seconds_{};  ///< by Exposed
};

}  // namespace tranche::detail
