// The text files of a memory profile, and its part of the trace.

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "core/csv.h"
#include "core/folded_name.h"
#include "report/memory_profile_impl.h"

namespace tranche::memory_profile {

using nlohmann::ordered_json;
using Kind = MemoryEvent::Kind;

namespace {

std::size_t index_of(Tier tier) {
  return static_cast<std::size_t>(tier);
}

bool counts(const MemoryEvent& event) {
  return event.kind != Kind::phase && event.kind != Kind::step;
}

std::string_view name_of_kind(Kind kind) {
  switch (kind) {
    case Kind::allocated:
      return "allocated";
    case Kind::released:
      return "released";
    case Kind::occupied:
      return "occupied";
    case Kind::vacated:
      return "vacated";
    case Kind::phase:
      return "phase";
    case Kind::step:
      return "step";
  }
  return "unknown";
}

std::int64_t change_of(const MemoryEvent& event) {
  return event.kind == Kind::allocated || event.kind == Kind::occupied ? event.bytes : -event.bytes;
}

/// Texts may hold any bytes; invalid UTF-8 is replaced.
std::string dumped(const ordered_json& document, int indent) {
  return document.dump(indent, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

ordered_json categories_json(const CategoryBytes& bytes) {
  ordered_json result = ordered_json::object();
  for (const Category category : all_categories) result[std::string(name_of(category))] = bytes[category];
  return result;
}

bool held_anything(const MemoryRecord& record, Tier tier) {
  return record.peaks[index_of(tier)].bytes > 0;
}

double share_of(std::int64_t part, std::int64_t whole) {
  return 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

/// Merges items whose names differ only in numbers, such as the blocks of a model, into one with a count.
std::vector<BornItem> folded(const std::vector<BornItem>& items) {
  std::vector<BornItem> result;
  for (BornItem item : items) {
    item.tag = detail::with_folded_numbers(item.tag);
    item.unit = detail::with_folded_numbers(item.unit);
    const auto same = std::find_if(result.begin(), result.end(), [&](const BornItem& other) {
      return std::tie(item.tag, item.unit, item.phase, item.category, item.bytes) ==
             std::tie(other.tag, other.unit, other.phase, other.category, other.bytes);
    });
    if (same == result.end()) {
      result.push_back(std::move(item));
    } else {
      same->count += item.count;
    }
  }
  std::stable_sort(result.begin(), result.end(), [](const BornItem& a, const BornItem& b) {
    return a.bytes * a.count > b.bytes * b.count;
  });
  return result;
}

std::vector<std::string> csv_fields(const std::vector<std::string>& texts) {
  std::vector<std::string> fields;
  for (const std::string& text : texts) fields.push_back(detail::csv_field(text));
  return fields;
}

}  // namespace

std::string moment_of(const MemoryRecord& record, const MemoryRecord::Peak& peak) {
  const std::string& phase = record.phases[peak.phase];
  const std::string& unit = record.units[peak.unit];
  const bool inside = phase == "forward" || phase == "backward" || phase == "reduce" || phase == "step";
  const std::string when = inside           ? fmt::format("of step {}", peak.step)
                           : peak.step <= 1 ? "before the first step"
                                            : fmt::format("after step {}", peak.step - 1);
  return fmt::format("{}{}{} {}", phase, unit.empty() ? "" : " ", unit, when);
}

std::string timeline_csv(const MemoryRecord& record) {
  std::string text =
      "seconds,step,phase,unit,tier,category,event,change_bytes,category_bytes,tier_bytes,free_bytes,tag\n";
  auto out = std::back_inserter(text);
  const auto tags = csv_fields(record.tags), phases = csv_fields(record.phases),
             units = csv_fields(record.units);
  // The memory held is written when the timeline begins, and again after events that were not kept, in
  // separate lines, so that the changes add up from each such place on.
  const auto held = [&](const MemoryState& state, double seconds) {
    for (const Tier tier : all_tiers) {
      for (const Category category : all_categories) {
        const std::int64_t bytes = state.current[index_of(tier)][category];
        if (bytes == 0) continue;
        fmt::format_to(out, "{:.6f},{},{},{},{},{},held,0,{},{},{},\n", seconds, state.step,
                       phases[state.phase], units[state.unit], name_of(tier), name_of(category), bytes,
                       state.total(tier), state.block_free[index_of(tier)]);
      }
    }
  };
  held(record.start, 0);
  const std::int64_t jump =
      record.dropped > 0 ? static_cast<std::int64_t>(record.first.size()) + record.dropped : -1;
  record.replay([&](const MemoryEvent& event, std::int64_t number, const MemoryState& state) {
    if (number == jump) held(record.resumed, event.seconds - record.began);
    if (!counts(event)) return;
    fmt::format_to(out, "{:.6f},{},{},{},{},{},{},{},{},{},{},{}\n", event.seconds - record.began, state.step,
                   phases[event.phase], units[event.unit], name_of(event.tier), name_of(event.category),
                   name_of_kind(event.kind), change_of(event),
                   state.current[index_of(event.tier)][event.category], state.total(event.tier),
                   state.block_free[index_of(event.tier)], tags[event.tag]);
  });
  return text;
}

std::string timeline_json(const MemoryRecord& record, RankNumber rank) {
  ordered_json document = {
      {"schema", "tranche-memory-timeline-1"},  {"rank", rank.rank},         {"ranks", rank.ranks},
      {"seconds", record.ended - record.began}, {"events", record.events()}, {"dropped", record.dropped},
      {"dropped_from", record.first.size()}};
  ordered_json start = ordered_json::object(), by_phase = ordered_json::object();
  for (const Tier tier : all_tiers) {
    if (!held_anything(record, tier)) continue;
    start[std::string(name_of(tier))] = categories_json(record.start.current[index_of(tier)]);
  }
  for (std::size_t p = 0; p < record.by_phase.size(); ++p) {
    for (const Tier tier : all_tiers) {
      const MemoryRecord::PhasePeak& peak = record.by_phase[p];
      if (peak.total[index_of(tier)] == 0) continue;
      by_phase[record.phases[p]][std::string(name_of(tier))] = {
          {"peak_bytes", peak.total[index_of(tier)]},
          {"by_category", categories_json(peak.categories[index_of(tier)])}};
    }
  }
  document["start"] = std::move(start);
  document["by_phase"] = std::move(by_phase);
  document["tags"] = record.tags;
  document["phases"] = record.phases;
  document["units"] = record.units;
  document["columns"] = {"seconds",  "step",         "phase",          "unit",       "event",      "tier",
                         "category", "change_bytes", "category_bytes", "tier_bytes", "free_bytes", "tag"};
  std::string text = dumped(document, -1);
  text.resize(text.rfind('}'));
  // Each row is one line of text; as a JSON document each would cost a hundred times its size.
  text += ",\"rows\":[";
  auto out = std::back_inserter(text);
  bool first = true;
  record.replay([&](const MemoryEvent& event, std::int64_t, const MemoryState& state) {
    fmt::format_to(out, "{}\n[{:.6f},{},{},{},\"{}\"", first ? "" : ",", event.seconds - record.began,
                   state.step, event.phase, event.unit, name_of_kind(event.kind));
    first = false;
    if (counts(event)) {
      fmt::format_to(out, ",\"{}\",\"{}\",{},{},{},{},{}", name_of(event.tier), name_of(event.category),
                     change_of(event), state.current[index_of(event.tier)][event.category],
                     state.total(event.tier), state.block_free[index_of(event.tier)], event.tag);
    }
    text += ']';
  });
  return text + "\n]}\n";
}

std::string phases_csv(const MemoryRecord& record) {
  std::string text = "phase,tier,category,peak_bytes\n";
  const auto phases = csv_fields(record.phases);
  for (std::size_t p = 0; p < record.by_phase.size(); ++p) {
    const MemoryRecord::PhasePeak& peak = record.by_phase[p];
    for (const Tier tier : all_tiers) {
      if (peak.total[index_of(tier)] == 0) continue;
      for (const Category category : all_categories) {
        text += fmt::format("{},{},{},{}\n", phases[p], name_of(tier), name_of(category),
                            peak.categories[index_of(tier)][category]);
      }
      text += fmt::format("{},{},total,{}\n", phases[p], name_of(tier), peak.total[index_of(tier)]);
    }
  }
  return text;
}

std::string peak_json(const MemoryRecord& record, RankNumber rank) {
  ordered_json tiers = ordered_json::object();
  for (const Tier tier : all_tiers) {
    if (!held_anything(record, tier)) continue;
    const MemoryRecord::Peak& peak = record.peaks[index_of(tier)];
    ordered_json live = ordered_json::array();
    for (const BornItem& item : record.live_behind(tier, peak.event)) {
      live.push_back({{"tag", item.tag},
                      {"unit", item.unit},
                      {"phase", item.phase},
                      {"category", name_of(item.category)},
                      {"bytes", item.bytes},
                      {"count", item.count}});
    }
    tiers[std::string(name_of(tier))] = {{"peak_bytes", peak.bytes},
                                         {"seconds", peak.seconds - record.began},
                                         {"step", peak.step},
                                         {"phase", record.phases[peak.phase]},
                                         {"unit", record.units[peak.unit]},
                                         {"categories", categories_json(peak.categories)},
                                         {"live", live}};
  }
  return dumped(
      {{"schema", "tranche-memory-peak-1"}, {"rank", rank.rank}, {"ranks", rank.ranks}, {"tiers", tiers}}, 1);
}

std::string peak_text(const MemoryRecord& record, RankNumber rank) {
  std::string text;
  for (const Tier tier : all_tiers) {
    if (!held_anything(record, tier)) continue;
    const MemoryRecord::Peak& peak = record.peaks[index_of(tier)];
    text += fmt::format("{} memory of rank {} of {}: peak {} ({} B), {:.3f} s after the start, in {}\n",
                        name_of(tier), rank.rank, rank.ranks, format_bytes(peak.bytes), peak.bytes,
                        peak.seconds - record.began, moment_of(record, peak));
    for (const Category category : all_categories) {
      if (peak.categories[category] == 0) continue;
      text += fmt::format("  {:>12} {:>5.1f}%  {}\n", format_bytes(peak.categories[category]),
                          share_of(peak.categories[category], peak.bytes), name_of(category));
    }
    if (peak.block_free > 0) {
      text += fmt::format("  {:>12} {:>5.1f}%  of these in the step's block, free at that moment\n",
                          format_bytes(peak.block_free), share_of(peak.block_free, peak.bytes));
    }
    text += "alive, largest first:\n";
    const std::vector<BornItem> items = folded(record.live_behind(tier, peak.event));
    if (items.empty()) text += "  what was alive is not known: the timeline did not keep that range\n";
    text += fmt::format("  {:>12} {:>6}  {:<14} {:<14} {:<20} {}\n", "bytes", "share", "category", "unit",
                        "taken in", "tag");
    for (const BornItem& item : items) {
      const std::int64_t bytes = item.bytes * item.count;
      text += fmt::format(
          "  {:>12} {:>5.1f}%  {:<14} {:<14} {:<20} {}{}\n", format_bytes(bytes), share_of(bytes, peak.bytes),
          name_of(item.category), item.unit.empty() ? "-" : item.unit, item.phase.empty() ? "-" : item.phase,
          item.tag, item.count > 1 ? fmt::format(" ({} x {})", item.count, format_bytes(item.bytes)) : "");
    }
  }
  return text.empty() ? "no memory was held\n" : text;
}

void add_to_trace(const MemoryRecord& record, TraceRecorder& trace) {
  std::array<std::string, tier_count> charts;
  for (const Tier tier : all_tiers) charts[index_of(tier)] = fmt::format("{} memory", name_of(tier));
  const auto sample = [&](Tier tier, Category category, double seconds, const MemoryState& state) {
    trace.counter(charts[index_of(tier)], name_of(category), seconds,
                  static_cast<double>(state.current[index_of(tier)][category]));
  };
  for (const Tier tier : all_tiers) {
    if (!held_anything(record, tier)) continue;
    for (const Category category : all_categories) sample(tier, category, record.began, record.start);
  }
  // The span of a phase or unit lasts until the next one; that of a step from its first forward to its end.
  double phase_began = record.began, unit_began = record.began, step_began = -1;
  std::uint16_t phase = record.start.phase, unit = record.start.unit;
  const auto close = [&](const char* track, const std::string& name, double& began, double now) {
    if (!name.empty() && now > began) trace.span(track, name, began, now);
    began = now;
  };
  record.replay([&](const MemoryEvent& event, std::int64_t, const MemoryState& state) {
    if (counts(event)) {
      sample(event.tier, event.category, event.seconds, state);
      if (event.kind == Kind::occupied || event.kind == Kind::vacated) {
        sample(event.tier, Category::other, event.seconds, state);
      }
      const auto tier = index_of(event.tier);
      trace.counter(charts[tier], "in use", event.seconds,
                    static_cast<double>(state.total(event.tier) - state.block_free[tier]));
      if (event.kind == Kind::allocated || event.kind == Kind::released) {
        trace.counter(charts[tier], "total", event.seconds, static_cast<double>(state.total(event.tier)));
      }
      return;
    }
    if (event.kind == Kind::phase) {
      if (step_began < 0 && record.phases[event.phase] == "forward") step_began = event.seconds;
      if (event.phase != phase) close("phase", record.phases[phase], phase_began, event.seconds);
      if (event.unit != unit) close("unit at work", record.units[unit], unit_began, event.seconds);
      phase = event.phase;
      unit = event.unit;
      return;
    }
    if (step_began >= 0) trace.span("step", fmt::format("step {}", event.bytes), step_began, event.seconds);
    step_began = -1;
  });
  close("phase", record.phases[phase], phase_began, record.ended);
  close("unit at work", record.units[unit], unit_began, record.ended);
}

}  // namespace tranche::memory_profile
