#pragma once
/// Spans and counters for a timeline in the Trace Event Format that Perfetto and chrome://tracing open.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace tranche {

/// Thread-safe recorder of one rank (a process of the timeline; every track is a thread of it). Recording
/// costs one short lock; nothing is written before save(). Times and values that are not finite are left out,
/// as the format cannot hold them.
class TraceRecorder {
 public:
  explicit TraceRecorder(int rank);
  ~TraceRecorder();
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  /// Names the rank once it is known; it becomes the process of the timeline.
  void set_rank(int rank);
  /// Adds a finished span; times in seconds since the epoch of std::chrono::steady_clock.
  void span(std::string_view track, std::string_view name, double begin, double end);
  /// Adds a counter sample (bytes by category, say).
  void counter(std::string_view track, std::string_view name, double time, double value);
  /// Adds the beginning or the end of an arrow, at a time within a span of the track. The n-th beginning on a
  /// channel and the n-th end on it, on whichever rank, are those of one arrow. Channels are numbers from 0
  /// to 2^20 over all ranks. Only entries() has arrows, since they go from one rank to another.
  void arrow(std::string_view track, std::string_view name, int channel, bool begins, double time);
  /// From now on at most `events` (at least 2) are kept: the first half of them, and the latest. 0: all.
  void set_capacity(std::int64_t events);
  /// The whole trace as JSON text; with the events of `more` on tracks beside its own.
  std::string to_json(const TraceRecorder* more = nullptr) const;
  /// The entries of this rank in a trace of several, one a line with commas between: its process, named
  /// `name` and drawn in the order of `position`, tracks and events. `shift(time)` is added to every time, so
  /// that the clocks of ranks agree.
  std::string entries(std::string_view name, int position, const std::function<double(double)>& shift) const;
  /// Writes to_json() to `path` as OutputFile does; throws IoError.
  void save(const std::string& path, const TraceRecorder* more = nullptr) const;
  /// Events that are kept.
  std::int64_t size() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche
