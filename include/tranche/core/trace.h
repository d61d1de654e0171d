#pragma once
/// Spans and counters for a timeline in the Trace Event Format that Perfetto and chrome://tracing open.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace tranche {

/// Thread-safe recorder of one rank, which is a process of the timeline; every track is one of its threads.
/// Recording takes one short lock; nothing is written before save(). Times and values that are not finite are
/// left out, because the format cannot hold them.
class TraceRecorder {
 public:
  explicit TraceRecorder(int rank);
  ~TraceRecorder();
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  /// Names the rank once it is known; it becomes the process of the timeline.
  void set_rank(int rank);
  /// Adds a finished span. Times are in seconds since the epoch of std::chrono::steady_clock.
  void span(std::string_view track, std::string_view name, double begin, double end);
  /// Adds a counter sample (bytes by category, say).
  void counter(std::string_view track, std::string_view name, double time, double value);
  /// Adds the beginning or the end of an arrow, at a time within a span of the track. The n-th beginning and
  /// the n-th end on a channel, on whichever ranks, belong to one arrow. Channels are numbers from 0 to 2^20
  /// over all ranks. Only entries() writes arrows, because they connect ranks.
  void arrow(std::string_view track, std::string_view name, int channel, bool begins, double time);
  /// Limits the number of events kept from now on to `events` (at least 2): the first half of them, and the
  /// latest. 0 keeps all.
  void set_capacity(std::int64_t events);
  /// The whole trace as JSON text, with the events of `more` on further tracks.
  std::string to_json(const TraceRecorder* more = nullptr) const;
  /// The entries of this rank in a trace of several ranks, one per line, separated by commas: its process
  /// (named `name` and shown at `position`), tracks and events. `shift(time)` is added to every time, so that
  /// the clocks of ranks agree.
  std::string entries(std::string_view name, int position, const std::function<double(double)>& shift) const;
  /// Writes to_json() to `path` as OutputFile does; throws IoError.
  void save(const std::string& path, const TraceRecorder* more = nullptr) const;
  /// The number of events that are kept.
  std::int64_t size() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche
