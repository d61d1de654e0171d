#include "tranche/core/trace.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/output_file.h"
#include "tranche/core/error.h"

namespace tranche {

namespace {

/// A JSON string literal; bytes that are not UTF-8 become replacement characters.
std::string json_string(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

enum class Kind : std::uint8_t { span, counter, arrow_begins, arrow_ends };

struct Event {
  Kind kind = Kind::span;
  int track = 0;
  int name = 0;
  double time = 0;   // seconds
  double value = 0;  // seconds of a span, value of a counter, or an arrow's number
};

/// The arrows of each channel have a range of numbers; a double holds each exactly.
constexpr std::int64_t arrows_of_a_channel = std::int64_t{1} << 32;

double no_shift(double /*time*/) {
  return 0;
}

/// Numbers distinct texts, so that a recorded event owns no string.
class Names {
 public:
  int number_of(std::string_view text) {
    if (const auto found = numbers_.find(text); found != numbers_.end()) return found->second;
    const int number = static_cast<int>(numbers_.size());
    numbers_.emplace(text, number);
    return number;
  }
  std::size_t size() const { return numbers_.size(); }
  std::vector<std::string> quoted_by_number() const {
    std::vector<std::string> texts(numbers_.size());
    for (const auto& [text, number] : numbers_) texts[static_cast<std::size_t>(number)] = json_string(text);
    return texts;
  }

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept {
      return std::hash<std::string_view>{}(text);
    }
  };
  std::unordered_map<std::string, int, Hash, std::equal_to<>> numbers_;
};

/// Writes the metadata of a rank's process.
void write_process(std::string& text, int pid, std::string_view name, int position) {
  fmt::format_to(std::back_inserter(text),
                 R"({{"ph":"M","name":"process_name","pid":{0},"tid":0,"args":{{"name":{1}}}}})"
                 ",\n"
                 R"({{"ph":"M","name":"process_sort_index","pid":{0},"tid":0,"args":{{"sort_index":{2}}}}})",
                 pid, json_string(name), position);
}

}  // namespace

struct TraceRecorder::Impl {
  explicit Impl(int rank_number) : rank(rank_number) {}

  int rank;
  mutable std::mutex mutex;
  Names tracks;
  Names charts;
  Names names;
  std::vector<Event> events;
  std::size_t capacity = 0;  // 0: no bound
  std::size_t oldest = 0;    // index in the second half, a ring of the latest events

  void add(const Event& event) {
    if (capacity == 0 || events.size() < capacity) {
      events.push_back(event);
      return;
    }
    const std::size_t kept = capacity / 2;
    events[kept + oldest] = event;
    oldest = oldest + 1 == capacity - kept ? 0 : oldest + 1;
  }

  std::map<std::pair<int, bool>, std::int64_t> arrows;  // by channel: beginnings, ends

  /// Writes metadata and events, their tracks numbered from first_track on; each entry with a comma in front.
  void write(std::string& text, int pid, std::size_t first_track, bool with_arrows,
             const std::function<double(double)>& shift) const;
};

TraceRecorder::TraceRecorder(int rank) : impl_(std::make_unique<Impl>(rank)) {}
TraceRecorder::~TraceRecorder() = default;

void TraceRecorder::set_rank(int rank) {
  const std::lock_guard lock(impl_->mutex);
  impl_->rank = rank;
}

void TraceRecorder::span(std::string_view track, std::string_view name, double begin, double end) {
  if (!std::isfinite(begin) || !std::isfinite(end)) return;
  const std::lock_guard lock(impl_->mutex);
  impl_->add({Kind::span, impl_->tracks.number_of(track), impl_->names.number_of(name), begin,
              std::fmax(end - begin, 0.0)});
}

void TraceRecorder::counter(std::string_view track, std::string_view name, double time, double value) {
  if (!std::isfinite(time) || !std::isfinite(value)) return;
  const std::lock_guard lock(impl_->mutex);
  impl_->add({Kind::counter, impl_->charts.number_of(track), impl_->names.number_of(name), time, value});
}

void TraceRecorder::arrow(std::string_view track, std::string_view name, int channel, bool begins,
                          double time) {
  if (!std::isfinite(time)) return;
  const std::lock_guard lock(impl_->mutex);
  const std::int64_t number = channel * arrows_of_a_channel + impl_->arrows[{channel, begins}]++;
  impl_->add({begins ? Kind::arrow_begins : Kind::arrow_ends, impl_->tracks.number_of(track),
              impl_->names.number_of(name), time, static_cast<double>(number)});
}

void TraceRecorder::set_capacity(std::int64_t events) {
  const std::lock_guard lock(impl_->mutex);
  if (events < 0 || events == 1) {
    throw InvalidArgument(
        fmt::format("a trace of at most {} events; give it 2 or more, or 0 for all", events));
  }
  if (impl_->events.size() > static_cast<std::size_t>(events) && events > 0) {
    throw LogicError(
        fmt::format("a bound of {} events for a trace that holds {} already", events, impl_->events.size()));
  }
  impl_->capacity = static_cast<std::size_t>(events);
}

void TraceRecorder::Impl::write(std::string& text, int pid, std::size_t first_track, bool with_arrows,
                                const std::function<double(double)>& shift) const {
  const auto track_texts = tracks.quoted_by_number();
  const auto chart_texts = charts.quoted_by_number();
  const auto name_texts = names.quoted_by_number();
  auto out = std::back_inserter(text);
  for (std::size_t i = 0; i < track_texts.size(); ++i) {
    fmt::format_to(out,
                   ",\n"
                   R"({{"ph":"M","name":"thread_name","pid":{},"tid":{},"args":{{"name":{}}}}})",
                   pid, first_track + i, track_texts[i]);
  }
  for (const Event& event : events) {
    const double microseconds = (event.time + shift(event.time)) * 1e6;
    const auto& name = name_texts[static_cast<std::size_t>(event.name)];
    if (event.kind == Kind::arrow_begins || event.kind == Kind::arrow_ends) {
      if (!with_arrows) continue;
      const bool begins = event.kind == Kind::arrow_begins;
      fmt::format_to(out,
                     ",\n"
                     R"({{"ph":"{}","cat":"message","name":{},"id":{},"pid":{},"tid":{},"ts":{:.3f}{}}})",
                     begins ? "s" : "f", name, static_cast<std::int64_t>(event.value), pid,
                     first_track + static_cast<std::size_t>(event.track), microseconds,
                     begins ? "" : R"(,"bp":"e")");
    } else if (event.kind == Kind::counter) {
      fmt::format_to(out,
                     ",\n"
                     R"({{"ph":"C","name":{},"pid":{},"ts":{:.3f},"args":{{{}:{}}}}})",
                     chart_texts[static_cast<std::size_t>(event.track)], pid, microseconds, name,
                     event.value);
    } else {
      fmt::format_to(out,
                     ",\n"
                     R"({{"ph":"X","name":{},"pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f}}})",
                     name, pid, first_track + static_cast<std::size_t>(event.track), microseconds,
                     event.value * 1e6);
    }
  }
}

std::string TraceRecorder::to_json(const TraceRecorder* more) const {
  const std::lock_guard lock(impl_->mutex);
  const int pid = impl_->rank;
  std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  write_process(text, pid, fmt::format("rank {}", pid), pid);
  impl_->write(text, pid, 1, false, no_shift);
  if (more != nullptr && more != this) {
    const std::lock_guard also(more->impl_->mutex);
    more->impl_->write(text, pid, 1 + impl_->tracks.size(), false, no_shift);
  }
  text += "\n]}\n";
  return text;
}

std::string TraceRecorder::entries(std::string_view name, int position,
                                   const std::function<double(double)>& shift) const {
  const std::lock_guard lock(impl_->mutex);
  std::string text;
  write_process(text, impl_->rank, name, position);
  impl_->write(text, impl_->rank, 1, true, shift);
  return text;
}

void TraceRecorder::save(const std::string& path, const TraceRecorder* more) const {
  detail::write_output_file(path, to_json(more));
}

std::int64_t TraceRecorder::size() const {
  const std::lock_guard lock(impl_->mutex);
  return static_cast<std::int64_t>(impl_->events.size());
}

}  // namespace tranche
