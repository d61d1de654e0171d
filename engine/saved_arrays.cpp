#include "engine/saved_arrays.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "checkpoint/digest.h"
#include "checkpoint/layout.h"
#include "engine/rank_texts.h"
#include "tranche/core/error.h"

namespace tranche::detail {

using checkpoint::ArrayRecord;
using nlohmann::json;

namespace {

enum class Kind { whole, part, of_rank };

/// One array, as one rank passes it.
struct Given {
  std::string name;
  Kind kind = Kind::whole;
  DataType dtype = DataType::float32;
  Shape shape;
  ElementRange range;
  std::string digest;  ///< of values that must be equal on all ranks
};

Kind kind_of(const SavedArray& array) {
  if (array.per_rank) return Kind::of_rank;
  return array.partial ? Kind::part : Kind::whole;
}

json described(const std::vector<SavedArray>& arrays, bool replicas, bool simulated) {
  json list = json::array();
  for (const SavedArray& array : arrays) {
    const std::int64_t elements = array.values.elements();
    const Kind kind = kind_of(array);
    std::string problem;
    if (array.values.data == nullptr && elements > 0 && !simulated) problem = "has no memory";
    const bool whole = kind != Kind::part;
    if (array.first < 0 || array.first + elements > array.shape.elements() ||
        (whole && elements != array.shape.elements())) {
      problem =
          fmt::format("has {} elements from {} on of {}", elements, array.first, array.shape.elements());
    }
    const std::string fault = checkpoint::fault_of_name(array.name);
    if (!fault.empty()) problem = fault;
    std::string digest;
    if ((kind == Kind::whole || (kind == Kind::part && replicas)) && !simulated && problem.empty()) {
      digest = checkpoint::to_hex(checkpoint::digest_of(std::span(
          static_cast<const std::byte*>(array.values.data), static_cast<std::size_t>(array.values.bytes()))));
    }
    const auto extents = array.shape.extents();
    list.push_back({{"name", fault.empty() ? array.name : checkpoint::shown_name(array.name)},
                    {"kind", static_cast<int>(kind)},
                    {"dtype", std::string(name_of(array.values.dtype))},
                    {"shape", std::vector<std::int64_t>(extents.begin(), extents.end())},
                    {"first", array.first},
                    {"elements", elements},
                    {"digest", digest},
                    {"problem", problem}});
  }
  return list;
}

[[noreturn]] void refuse(std::size_t rank, const std::string& what) {
  throw InvalidArgument(fmt::format("arrays for a checkpoint: rank {} {}", rank, what));
}

std::vector<std::vector<Given>> parse(const std::vector<std::string>& texts) {
  std::vector<std::vector<Given>> ranks;
  for (std::size_t r = 0; r < texts.size(); ++r) {
    std::vector<Given>& given = ranks.emplace_back();
    for (const json& item : json::parse(texts[r])) {
      Given one;
      one.name = item["name"];
      one.kind = static_cast<Kind>(item["kind"].get<int>());
      one.dtype = parse_data_type(item["dtype"].get<std::string>());
      one.shape = Shape(item["shape"].get<std::vector<std::int64_t>>());
      const std::int64_t first = item["first"];
      one.range = {first, first + item["elements"].get<std::int64_t>()};
      one.digest = item["digest"];
      if (const std::string problem = item["problem"]; !problem.empty()) {
        refuse(r, fmt::format("gives '{}', which {}", one.name, problem));
      }
      given.push_back(std::move(one));
    }
  }
  return ranks;
}

std::string words(const Given& array) {
  const char* kind = array.kind == Kind::whole  ? "whole"
                     : array.kind == Kind::part ? "a part of"
                                                : "of each rank";
  return fmt::format("'{}' ({}, {}{})", array.name, kind, name_of(array.dtype),
                     array.kind == Kind::of_rank ? "" : " " + array.shape.to_string());
}

bool same_array(const Given& a, const Given& b) {
  return a.name == b.name && a.kind == b.kind && a.dtype == b.dtype &&
         (a.kind == Kind::of_rank || a.shape == b.shape);
}

/// Parts follow each other in rank order; ranks with the same part store a share of it each.
std::vector<checkpoint::StoredRange> ranges_of_parts(const std::vector<const Given*>& parts, std::size_t own,
                                                     bool simulated) {
  const std::int64_t elements = parts.front()->shape.elements();
  if (simulated) {
    // Without knowledge of peers, everything before this rank's part is assigned to the first rank, and
    // everything after it to the last.
    const ElementRange mine = parts[own]->range;
    std::vector<std::int64_t> cuts{0};
    for (std::size_t r = 0; r < parts.size(); ++r) cuts.push_back(r < own ? mine.begin : mine.end);
    cuts.back() = elements;
    return checkpoint::ranges_between(cuts);
  }
  std::vector<std::pair<ElementRange, std::vector<std::size_t>>> held;  // parts, and the ranks with each
  std::int64_t end = 0;
  for (std::size_t r = 0; r < parts.size(); ++r) {
    const ElementRange part = parts[r]->range;
    const auto same =
        std::find_if(held.begin(), held.end(), [&](const auto& one) { return one.first == part; });
    if (same != held.end() && !part.empty()) {
      if (parts[r]->digest != parts[same->second.front()]->digest) {
        refuse(r, fmt::format("gives other values of its part of {} than rank {}, which has the same part",
                              words(*parts[r]), same->second.front()));
      }
      same->second.push_back(r);
      continue;
    }
    if (part.begin != end) {
      refuse(r,
             fmt::format("gives {} from element {} on, and the ranks before it end at {}: parts follow each "
                         "other in the order of ranks, without gaps",
                         words(*parts[r]), part.begin, end));
    }
    held.push_back({part, {r}});
    end = part.end;
  }
  if (end != elements) {
    refuse(parts.size() - 1,
           fmt::format("ends its part of '{}' at element {} of {}", parts.back()->name, end, elements));
  }
  std::vector<checkpoint::StoredRange> ranges;
  for (const auto& [part, ranks] : held) {
    const std::int64_t share = divide_round_up(part.size(), static_cast<std::int64_t>(ranks.size()));
    std::int64_t begin = part.begin;
    for (std::size_t i = 0; i < ranks.size() && begin < part.end; ++i, begin += share) {
      ranges.push_back({static_cast<int>(ranks[i]), begin, std::min(begin + share, part.end), 0});
    }
  }
  return ranges;
}

}  // namespace

std::vector<ArrayRecord> agree_on_arrays(Communicator& ranks, const std::vector<SavedArray>& mine,
                                         bool replicas, bool simulated) {
  const OperationLabel label{"checkpoint", "arrays", Traffic::control, Tier::host};
  const std::vector<std::vector<Given>> all =
      parse(exchange_texts(ranks, described(mine, replicas, simulated).dump(), label));
  const std::vector<Given>& first = all.front();
  std::vector<ArrayRecord> records;
  for (std::size_t r = 0; r < all.size(); ++r) {
    for (std::size_t a = 0; a < std::max(all[r].size(), first.size()); ++a) {
      const std::string theirs = a < all[r].size() ? words(all[r][a]) : "nothing";
      const std::string firsts = a < first.size() ? words(first[a]) : "nothing";
      if (theirs == "nothing" || firsts == "nothing" || !same_array(all[r][a], first[a])) {
        refuse(r, fmt::format("gives {} where rank 0 gives {}: all ranks give the same, in the same order",
                              theirs, firsts));
      }
      if (!simulated && first[a].kind == Kind::whole && all[r][a].digest != first[a].digest) {
        refuse(r,
               fmt::format("gives other values of {} than rank 0: give it as one of each rank, or in parts",
                           theirs));
      }
    }
  }
  for (std::size_t a = 0; a < first.size(); ++a) {
    ArrayRecord record{first[a].name, first[a].dtype, first[a].kind == Kind::of_rank, {first[a].shape}, {}};
    std::vector<const Given*> given;
    for (const auto& rank : all) given.push_back(&rank[a]);
    if (first[a].kind == Kind::of_rank) {
      record.shapes.clear();
      for (const Given* one : given) record.shapes.push_back(one->shape);
    } else if (first[a].kind == Kind::part) {
      record.ranges = ranges_of_parts(given, static_cast<std::size_t>(ranks.rank()), simulated);
    } else {  // every rank has the whole array, and stores a share
      const std::int64_t elements = first[a].shape.elements(), size = ranks.size();
      const std::int64_t share = (elements + size - 1) / size;
      std::vector<std::int64_t> cuts;
      for (std::int64_t r = 0; r <= size; ++r) cuts.push_back(std::min(r * share, elements));
      record.ranges = checkpoint::ranges_between(cuts);
    }
    records.push_back(std::move(record));
  }
  return records;
}

const void* stored_part(const ArrayRecord& record, const SavedArray& given, int rank) {
  return static_cast<const std::byte*>(given.values.data) +
         (record.range(rank).begin - given.first) * size_of(record.dtype);
}

}  // namespace tranche::detail
