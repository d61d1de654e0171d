#include "pipeline/schedule/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <system_error>

#include "tranche/core/error.h"

namespace tranche::pipeline {

namespace {

constexpr std::array all_kinds{ActionKind::forward,        ActionKind::backward,
                               ActionKind::input_gradient, ActionKind::weight_gradient,
                               ActionKind::send_residual,  ActionKind::receive_residual,
                               ActionKind::send_gradient,  ActionKind::receive_gradient,
                               ActionKind::gather,         ActionKind::free};
constexpr std::size_t quoted_bytes = 40;
constexpr std::int64_t most_micro_batches = 1'000'000'000;

std::string_view without_spaces(std::string_view text) {
  constexpr std::string_view spaces = " \t\r";
  const std::size_t first = text.find_first_not_of(spaces);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(spaces) - first + 1);
}

/// Parses a number of 0 or more at the front of `text` and removes it. nullopt if there is none, or it is too
/// large.
template <typename Number>
std::optional<Number> take_number(std::string_view& text) {
  if (text.starts_with('-')) return std::nullopt;
  Number number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

std::optional<Action> action_of(std::string_view cell) {
  const std::optional<int> chunk = take_number<int>(cell);
  if (!chunk) return std::nullopt;
  const std::size_t letters = std::min(cell.find_first_of("0123456789"), cell.size());
  const auto kind = std::find_if(all_kinds.begin(), all_kinds.end(),
                                 [&](ActionKind one) { return letters_of(one) == cell.substr(0, letters); });
  if (kind == all_kinds.end()) return std::nullopt;
  cell.remove_prefix(letters);
  Action action{*kind, *chunk, 0};
  if (computes(*kind) || is_message(*kind)) {
    const std::optional<std::int64_t> micro_batch = take_number<std::int64_t>(cell);
    if (!micro_batch) return std::nullopt;
    action.micro_batch = *micro_batch;
  }
  return cell.empty() ? std::optional(action) : std::nullopt;
}

[[noreturn]] void refuse_cell(const std::string& where, std::string_view cell) {
  const std::string shown =
      cell.size() > quoted_bytes ? std::string(cell.substr(0, quoted_bytes)) + "..." : std::string(cell);
  for (const std::string_view word : {"UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_", "OVERLAP"}) {
    if (cell.find(word) != std::string_view::npos) {
      throw ConfigurationError(
          fmt::format("{}: '{}' is an action of torch's own lowering; write the schedule's compute actions "
                      "alone, like 2F0, 1I3, 1W3 and 0B1, and the rest is added",
                      where, shown));
    }
  }
  throw ConfigurationError(
      fmt::format("{}: '{}' is no action; there are 2F0 (forward of micro-batch 0 on chunk 2), and in the "
                  "same way B, I, W, SEND_F, RECV_F, SEND_B and RECV_B, and 2GATHER and 2FREE",
                  where, shown));
}

/// The first action of a chunk in the text, and its rank.
struct Seen {
  int rank = -1;
  Action action;
};

}  // namespace

PipelineSchedule read_schedule(std::string_view text, const std::string& file) {
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.remove_suffix(1);
  if (without_spaces(text).empty()) {
    throw ConfigurationError(
        fmt::format("{} has no action; a schedule has a line for each rank, like 0F0,0F1,0B0,0B1", file));
  }
  PipelineSchedule schedule;
  const auto where = [&](std::size_t cell) {
    const std::size_t rank = schedule.ranks.size() - 1;
    return fmt::format("{}: line {} (rank {}), cell {}", file, rank + 1, rank, cell);
  };
  std::vector<Seen> chunks;
  // Each chunk needs an action, so that a file cannot reserve memory for more chunks than it has cells.
  const auto cells = static_cast<std::int64_t>(
      1 + std::count_if(text.begin(), text.end(), [](char c) { return c == ',' || c == '\n'; }));
  for (std::size_t line_start = 0; line_start <= text.size();) {
    const std::size_t line_end = std::min(text.find('\n', line_start), text.size());
    const std::string_view line_text = text.substr(line_start, line_end - line_start);
    line_start = line_end + 1;
    std::vector<Action>& line = schedule.ranks.emplace_back();
    std::size_t at = 0;
    for (std::size_t cell = 1; at <= line_text.size(); ++cell) {
      const std::size_t end = std::min(line_text.find(',', at), line_text.size());
      const std::string_view content = without_spaces(line_text.substr(at, end - at));
      at = end + 1;
      if (content.empty()) continue;
      const std::optional<Action> action = action_of(content);
      if (!action) refuse_cell(where(cell), content);
      if (action->chunk >= cells || action->micro_batch >= most_micro_batches) {
        throw ConfigurationError(fmt::format("{}: {} has a number that no schedule of {} cells can reach",
                                             where(cell), content, cells));
      }
      if (static_cast<std::size_t>(action->chunk) >= chunks.size())
        chunks.resize(static_cast<std::size_t>(action->chunk) + 1);
      Seen& seen = chunks[static_cast<std::size_t>(action->chunk)];
      const int rank = schedule.stages() - 1;
      if (seen.rank < 0) seen = {rank, *action};
      if (seen.rank != rank) {
        throw ConfigurationError(fmt::format(
            "{}: {} is on rank {}, but {} of the same chunk is on rank {}; a chunk lies on one rank",
            where(cell), action->name(), rank, seen.action.name(), seen.rank));
      }
      schedule.micro_batches = std::max(schedule.micro_batches, action->micro_batch + 1);
      line.push_back(*action);
    }
    if (line.empty()) {
      throw ConfigurationError(
          fmt::format("{}: line {} (rank {}) has no action; each rank holds a chunk at least", file,
                      schedule.ranks.size(), schedule.ranks.size() - 1));
    }
  }
  for (std::size_t chunk = 0; chunk < chunks.size(); ++chunk) {
    if (chunks[chunk].rank < 0) {
      throw ConfigurationError(
          fmt::format("{} has actions of chunk {}, but none of chunk {}", file, chunks.size() - 1, chunk));
    }
    schedule.rank_of_chunk.push_back(chunks[chunk].rank);
  }
  return schedule;
}

std::string write_schedule(const PipelineSchedule& schedule) {
  std::string text;
  for (const std::vector<Action>& line : schedule.ranks) {
    bool first = true;
    for (const Action& action : line) {
      if (!first) text += ',';
      first = false;
      text += action.name();
    }
    text += '\n';
  }
  return text;
}

void require_numbers(const PipelineSchedule& schedule, const std::string& file, int stages,
                     std::int64_t micro_batches, int chunks_per_rank) {
  const auto compare = [&](std::int64_t has, std::int64_t wanted, const char* what) {
    if (wanted != 0 && has != wanted) {
      throw ConfigurationError(
          fmt::format("{} was made for {} {}, but there are {}", file, has, what, wanted));
    }
  };
  compare(schedule.stages(), stages, "stages");
  compare(schedule.micro_batches, micro_batches, "micro-batches");
  compare(schedule.chunks(), std::int64_t{chunks_per_rank} * schedule.stages(), "chunks");
}

}  // namespace tranche::pipeline
