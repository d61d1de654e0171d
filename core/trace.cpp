#include "tranche/core/trace.h"

#include <fmt/format.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

#include "tranche/core/error.h"

namespace tranche {

namespace {

/// A JSON string literal; bytes that are not UTF-8 become replacement characters.
std::string json_string(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

struct Event {
  bool counter = false;
  int track = 0;
  int name = 0;
  double time = 0;   // seconds
  double value = 0;  // seconds of a span, value of a counter
};

/// Gives every distinct text a small number, so that a recorded event owns no string.
class Names {
 public:
  int number_of(std::string_view text) {
    if (const auto found = numbers_.find(text); found != numbers_.end()) return found->second;
    const int number = static_cast<int>(numbers_.size());
    numbers_.emplace(text, number);
    return number;
  }
  std::vector<std::string> quoted_by_number() const {
    std::vector<std::string> texts(numbers_.size());
    for (const auto& [text, number] : numbers_) texts[static_cast<std::size_t>(number)] = json_string(text);
    return texts;
  }

 private:
  std::map<std::string, int, std::less<>> numbers_;
};

}  // namespace

struct TraceRecorder::Impl {
  explicit Impl(int rank_number) : rank(rank_number) {}

  int rank;
  mutable std::mutex mutex;
  Names tracks;
  Names charts;
  Names names;
  std::vector<Event> events;
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
  impl_->events.push_back({false, impl_->tracks.number_of(track), impl_->names.number_of(name), begin,
                           std::fmax(end - begin, 0.0)});
}

void TraceRecorder::counter(std::string_view track, std::string_view name, double time, double value) {
  if (!std::isfinite(time) || !std::isfinite(value)) return;
  const std::lock_guard lock(impl_->mutex);
  impl_->events.push_back({true, impl_->charts.number_of(track), impl_->names.number_of(name), time, value});
}

std::string TraceRecorder::to_json() const {
  const std::lock_guard lock(impl_->mutex);
  const auto tracks = impl_->tracks.quoted_by_number();
  const auto charts = impl_->charts.quoted_by_number();
  const auto names = impl_->names.quoted_by_number();
  const int pid = impl_->rank;

  std::string text;
  auto out = std::back_inserter(text);
  fmt::format_to(out,
                 R"({{"displayTimeUnit":"ms","traceEvents":[)"
                 "\n"
                 R"({{"ph":"M","name":"process_name","pid":{0},"tid":0,"args":{{"name":"rank {0}"}}}})"
                 ",\n"
                 R"({{"ph":"M","name":"process_sort_index","pid":{0},"tid":0,"args":{{"sort_index":{0}}}}})",
                 pid);
  for (std::size_t i = 0; i < tracks.size(); ++i) {
    fmt::format_to(out,
                   ",\n"
                   R"({{"ph":"M","name":"thread_name","pid":{},"tid":{},"args":{{"name":{}}}}})",
                   pid, i + 1, tracks[i]);
  }
  for (const Event& event : impl_->events) {
    const double microseconds = event.time * 1e6;
    const auto& name = names[static_cast<std::size_t>(event.name)];
    if (event.counter) {
      fmt::format_to(out,
                     ",\n"
                     R"({{"ph":"C","name":{},"pid":{},"ts":{:.3f},"args":{{{}:{}}}}})",
                     charts[static_cast<std::size_t>(event.track)], pid, microseconds, name, event.value);
    } else {
      fmt::format_to(out,
                     ",\n"
                     R"({{"ph":"X","name":{},"pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f}}})",
                     name, pid, event.track + 1, microseconds, event.value * 1e6);
    }
  }
  text += "\n]}\n";
  return text;
}

void TraceRecorder::save(const std::string& path) const {
  const std::string text = to_json();
  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) {
    const std::string reason = errno != 0 ? std::strerror(errno) : "unknown reason";
    throw Error("cannot write the trace to '" + path + "': " + reason);
  }
}

std::int64_t TraceRecorder::size() const {
  const std::lock_guard lock(impl_->mutex);
  return static_cast<std::int64_t>(impl_->events.size());
}

}  // namespace tranche
