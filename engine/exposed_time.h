#pragma once
/// Measures how long the compute stream waited for other work, which is the part that computation did not
/// hide. Private to engine/.

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "tranche/device/event.h"
#include "tranche/device/stream.h"

namespace tranche::detail {

/// The operation for which the compute stream waited.
enum class Exposed { gather, reduce, offload, message };

/// The times at which the compute stream passes certain points of a pass.
class PassTimes {
 public:
  explicit PassTimes(Stream& compute) : compute_(compute) {}
  /// Marks the boundary between the first part of a micro-batch and the second.
  void begin() { marks_.push_back({mark(), {}, {}}); }
  void turn() {
    if (!marks_.empty() && !marks_.back().turned.taken) marks_.back().turned = mark();
  }
  void end() {
    if (!marks_.empty()) marks_.back().ended = mark();
  }
  /// Seconds of all micro-batches from begin() to turn(), and from there to end(). The device must have
  /// passed them. Then forgets them.
  std::pair<double, double> take();
  void clear() { marks_.clear(); }

 private:
  struct Mark {
    Event passed;  ///< has no time if work is inline
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
  /// `compute` must outlive it.
  explicit ExposedTime(Stream& compute) : compute_(compute) {}

  /// Makes the compute stream wait for the event of a collective or a copy. The time of the wait is known
  /// once the device has passed both points. Rethrows the event's failure.
  void wait_for(const Event& event, Exposed what);
  /// Adds up the times of all waits; the device must have passed them.
  void settle();
  /// Seconds added up since the last call.
  double take(Exposed what);
  /// Forgets everything, including waits not yet added up.
  void clear();

 private:
  struct Wait {
    Event arrived;  ///< the point at which the compute stream began to wait; has no time if work is inline
    double issued = 0;
    Event awaited;
    Exposed what;
  };

  Stream& compute_;
  std::vector<Wait> waits_;
  std::array<double, 4> seconds_{};  ///< by Exposed
};

}  // namespace tranche::detail
