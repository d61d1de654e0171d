// The manifest and a shard's record as JSON.

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "checkpoint/digest.h"
#include "checkpoint/format.h"
#include "core/json.h"
#include "core/json_node.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {

using detail::JsonNode;

namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view format_name = "tranche-checkpoint";
constexpr std::string_view digest_prefix = "{\"manifest_digest\": \"";
constexpr std::string_view digest_suffix = "\",\n";
/// The limit of numbers that only grow by adding: far beyond any run, and as far from overflowing.
constexpr std::int64_t most_counted = INT64_MAX / 2;
/// Elements of a buffer, and of all units of a rank: times the widest element they are a number of bytes.
constexpr std::int64_t most_elements = INT64_MAX / 8;
constexpr std::size_t most_sections = 64;
constexpr std::size_t most_units = 1 << 17;
constexpr int most_ranks = 1 << 20;
/// A reader's table has a place for each of a section's units on each rank.
constexpr std::int64_t most_places = std::int64_t{1} << 27;
/// The years 1 to 9999, in seconds since 1970.
constexpr std::int64_t first_time = -62'135'596'800, last_time = 253'402'300'799;
constexpr std::size_t first_line = digest_prefix.size() + 16 + digest_suffix.size();

Json to_json(const FileRecord& file) {
  Json blocks = Json::array();
  for (const std::uint64_t digest : file.blocks) blocks.push_back(to_hex(digest));
  return {{"name", file.name},
          {"bytes", file.bytes},
          {"digested_bytes", file.digested_bytes},
          {"blocks", blocks}};
}

Json to_json(const ShardRecord& shard) {
  Json json = {{"rank", shard.rank}, {"offsets", shard.offsets}};
  if (!shard.array_offsets.empty()) json["array_offsets"] = shard.array_offsets;
  json.update(to_json(shard.file));
  return json;
}

std::vector<std::int64_t> extents_of(const Shape& shape) {
  return {shape.extents().begin(), shape.extents().end()};
}

Json to_json(const UnitRecord& unit) {
  Json tensors = Json::array();
  for (const TensorRecord& tensor : unit.tensors) {
    tensors.push_back({{"name", tensor.name},
                       {"shape", extents_of(tensor.shape)},
                       {"frozen", tensor.frozen},
                       {"aliases", tensor.aliases},
                       {"offset", tensor.offset}});
  }
  return {{"name", unit.name},
          {"uses_per_pass", unit.uses_per_micro_batch},
          {"trainable_cuts", unit.trainable_cuts},
          {"frozen_cuts", unit.frozen_cuts},
          {"tensors", tensors}};
}

Json to_json(const SectionRecord& section) {
  return {{"dataset", section.dataset},
          {"kind", section.kind},
          {"dtype", std::string(name_of(section.dtype))},
          {"frozen", section.frozen}};
}

Json to_json(const ArrayRecord& array) {
  Json json = {{"name", array.name},
               {"dtype", std::string(name_of(array.dtype))},
               {"of", array.per_rank ? "each rank" : "all ranks"},
               {"shapes", Json::array()}};
  for (const Shape& shape : array.shapes) json["shapes"].push_back(extents_of(shape));
  if (!array.per_rank) json["cuts"] = array.cuts;
  return json;
}

Json object_text(const std::string& text, std::string_view key) {
  if (key == "user" && text.size() > user_limit) {
    throw InvalidArgument(
        fmt::format("the user's JSON for a checkpoint has {} bytes; at most {} fit: keep larger "
                    "things in a file beside it",
                    text.size(), user_limit));
  }
  const Json json = detail::parse_json(text);
  if (!json.is_object()) {
    throw InvalidArgument(fmt::format("'{}' of a checkpoint is not a JSON object: {:.60}", key, text));
  }
  return json;
}

Json to_json(const RunState& run) {
  return {{"step", run.step},
          {"applied", run.applied},
          {"samples", run.samples},
          {"tokens", run.tokens},
          {"random", object_text(run.random, "random")},
          {"loss_scaler", object_text(run.loss_scaler, "loss_scaler")},
          {"schedule", object_text(run.schedule, "schedule")},
          {"optimizer", object_text(run.optimizer, "optimizer")},
          {"config", object_text(run.config, "config")},
          {"user", object_text(run.user, "user")}};
}

FileRecord file_from(const JsonNode& node) {
  FileRecord file;
  file.name = node["name"].text();
  file.bytes = node["bytes"].integer(0, most_counted);
  file.digested_bytes = node["digested_bytes"].integer(0, file.bytes);
  for (const JsonNode& item : node["blocks"].items()) {
    if (!from_hex(item.text(), file.blocks.emplace_back()))
      item.fail("is not a digest of 16 hexadecimal digits");
  }
  const std::int64_t blocks = divide_round_up(file.digested_bytes, block_bytes);
  if (static_cast<std::int64_t>(file.blocks.size()) != blocks) {
    node["blocks"].fail(
        fmt::format("has {} digests; {} bytes need {}", file.blocks.size(), file.digested_bytes, blocks));
  }
  return file;
}

ShardRecord shard_from(const JsonNode& node) {
  ShardRecord shard;
  shard.rank = node["rank"].integer<int>(0);
  shard.offsets = node["offsets"].integers();
  if (node["array_offsets"]) shard.array_offsets = node["array_offsets"].integers();
  shard.file = file_from(node);
  return shard;
}

std::vector<std::int64_t> cuts_from(const JsonNode& node, int world) {
  const std::vector<std::int64_t> cuts = node.integers();
  bool good =
      cuts.size() == static_cast<std::size_t>(world) + 1 && cuts.front() == 0 && cuts.back() <= most_elements;
  for (std::size_t i = 1; good && i < cuts.size(); ++i) good = cuts[i] >= cuts[i - 1];
  if (!good) node.fail(fmt::format("does not cut a buffer from 0 on into {} shards", world));
  return cuts;
}

Shape shape_from(const JsonNode& node, std::int64_t least) {
  try {
    const std::vector<std::int64_t> extents = node.integers();
    for (const std::int64_t extent : extents) {
      if (extent < least) throw InvalidArgument("too small");
    }
    return Shape(extents);
  } catch (const InvalidArgument&) {
    node.fail("is not a shape");
  }
}

UnitRecord unit_from(const JsonNode& node, int world) {
  UnitRecord unit;
  unit.name = node["name"].text();
  unit.uses_per_micro_batch = node["uses_per_pass"].integer<int>(1);
  unit.trainable_cuts = cuts_from(node["trainable_cuts"], world);
  unit.frozen_cuts = cuts_from(node["frozen_cuts"], world);
  std::int64_t end[2] = {0, 0};
  for (const JsonNode& item : node["tensors"].items()) {
    TensorRecord tensor;
    tensor.name = item["name"].text();
    tensor.shape = shape_from(item["shape"], 1);
    tensor.frozen = item["frozen"].boolean();
    tensor.aliases = item["aliases"].texts();
    const int which = tensor.frozen ? 1 : 0;
    const std::int64_t most = unit.cuts(tensor.frozen).back() - tensor.shape.elements();
    tensor.offset = item["offset"].integer();
    if (tensor.offset < end[which] || tensor.offset > most) {
      item["offset"].fail(
          fmt::format("is {}, where the tensor overlaps another or leaves the buffer", tensor.offset));
    }
    end[which] = tensor.offset + tensor.shape.elements();
    unit.tensors.push_back(std::move(tensor));
  }
  return unit;
}

SectionRecord section_from(const JsonNode& node) {
  SectionRecord section;
  section.dataset = node["dataset"].text();
  section.kind = node["kind"].text();
  section.dtype = parse_data_type(node["dtype"].choice({"fp32", "bf16", "fp16"}));
  section.frozen = node["frozen"].boolean();
  return section;
}

ArrayRecord array_from(const JsonNode& node, int world) {
  ArrayRecord array;
  array.name = node["name"].text();
  try {
    array.dtype = parse_data_type(node["dtype"].text());
  } catch (const ConfigurationError& error) {
    node["dtype"].fail(error.message());
  }
  array.per_rank = node["of"].choice({"each rank", "all ranks"}) == "each rank";
  for (const JsonNode& item : node["shapes"].items()) array.shapes.push_back(shape_from(item, 0));
  if (array.shapes.size() != (array.per_rank ? static_cast<std::size_t>(world) : 1)) {
    node["shapes"].fail(fmt::format("has {} entries for {} ranks", array.shapes.size(), world));
  }
  if (!array.per_rank) {
    array.cuts = cuts_from(node["cuts"], world);
    if (array.cuts.back() != array.shapes[0].elements())
      node["cuts"].fail("does not end where the array does");
  }
  return array;
}

RunState run_from(const JsonNode& node) {
  RunState run;
  run.step = node["step"].integer(0, most_counted);
  run.applied = node["applied"].integer(0, most_counted);
  run.samples = node["samples"].integer(0, most_counted);
  run.tokens = node["tokens"].integer(0, most_counted);
  run.random = node["random"].object();
  run.loss_scaler = node["loss_scaler"].object();
  run.schedule = node["schedule"].object();
  run.optimizer = node["optimizer"].object();
  run.config = node["config"].object();
  run.user = node["user"].object();
  return run;
}

/// Each rank's sum over the units, and of each rank's bytes, is a number.
void check_sizes(const Manifest& manifest, const JsonNode& root) {
  const Layout& layout = manifest.layout;
  const auto places = static_cast<std::int64_t>(layout.sections.size() * (layout.units.size() + 1));
  if (places > most_places / layout.world) {
    root["units"].fail(fmt::format("are {}: with {} sections and {} ranks more than are read",
                                   layout.units.size(), layout.sections.size(), layout.world));
  }
  for (const bool frozen : {false, true}) {
    std::int64_t sum = 0;
    for (const UnitRecord& unit : layout.units) {
      const std::int64_t elements = unit.cuts(frozen).back();
      if (elements > most_elements - sum) {
        root["units"].fail(fmt::format("hold more than {} elements", most_elements));
      }
      sum += elements;
    }
  }
  std::int64_t bytes = manifest.master.bytes;
  for (const ShardRecord& shard : manifest.shards) {
    if (shard.file.bytes > most_counted - bytes) {
      root["shards"].fail(fmt::format("hold more than {} bytes", most_counted));
    }
    bytes += shard.file.bytes;
  }
}

void check_sections(const Layout& layout, const JsonNode& root) {
  for (std::size_t s = 0; s < layout.sections.size(); ++s) {
    const SectionRecord& section = layout.sections[s];
    for (std::size_t other = 0; other < s; ++other) {
      const SectionRecord& before = layout.sections[other];
      const bool same_kind = before.kind == section.kind && before.frozen == section.frozen;
      if (same_kind || before.dataset == section.dataset) {
        root["sections"].items()[s].fail(fmt::format("is there twice: sections[{}] is of '{}' in {} too",
                                                     other, before.kind, before.dataset));
      }
    }
  }
}

void check_shards(const Manifest& manifest, const JsonNode& root) {
  const Layout& layout = manifest.layout;
  const std::vector<JsonNode> nodes = root["shards"].items();
  if (static_cast<int>(nodes.size()) != layout.world) {
    root["shards"].fail(fmt::format("has {} entries for {} ranks", nodes.size(), layout.world));
  }
  for (int rank = 0; rank < layout.world; ++rank) {
    const ShardRecord& shard = manifest.shards[static_cast<std::size_t>(rank)];
    const JsonNode& node = nodes[static_cast<std::size_t>(rank)];
    if (shard.rank != rank) node["rank"].fail(fmt::format("is {}, not {}", shard.rank, rank));
    if (shard.file.name != shard_name(rank, layout.world)) {
      node["name"].fail(fmt::format("is '{}', not {}", shard.file.name, shard_name(rank, layout.world)));
    }
    if (shard.offsets.size() != layout.sections.size()) {
      node["offsets"].fail(
          fmt::format("has {} entries for {} sections", shard.offsets.size(), layout.sections.size()));
    }
    const auto check = [&](const char* key, const std::string& dataset, std::int64_t bytes,
                           std::int64_t offset) {
      if (bytes == 0 ? offset != -1 : offset < 0 || offset > shard.file.digested_bytes - bytes) {
        node[key].fail(fmt::format("puts {} at byte {}, outside the file", dataset, offset));
      }
    };
    for (std::size_t s = 0; s < shard.offsets.size(); ++s) {
      check("offsets", layout.sections[s].dataset,
            layout.section_elements(static_cast<int>(s), rank) * size_of(layout.sections[s].dtype),
            shard.offsets[s]);
    }
    if (shard.array_offsets.size() != layout.arrays.size()) {
      node["array_offsets"].fail(
          fmt::format("has {} entries for {} arrays", shard.array_offsets.size(), layout.arrays.size()));
    }
    for (std::size_t a = 0; a < layout.arrays.size(); ++a) {
      const ArrayRecord& array = layout.arrays[a];
      check("array_offsets", array.dataset(), array.range(rank).size() * size_of(array.dtype),
            shard.array_offsets[a]);
    }
  }
}

}  // namespace

std::string to_text(const ShardRecord& record) {
  return to_json(record).dump();
}

ShardRecord shard_record_from_text(std::string_view text, std::string_view origin) {
  return shard_from(JsonNode::read<CheckpointError>(text, origin));
}

std::string to_text(const Manifest& manifest) {
  Json units = Json::array();
  for (const UnitRecord& unit : manifest.layout.units) units.push_back(to_json(unit));
  Json sections = Json::array();
  for (const SectionRecord& section : manifest.layout.sections) sections.push_back(to_json(section));
  Json shards = Json::array();
  for (const ShardRecord& shard : manifest.shards) shards.push_back(to_json(shard));
  Json arrays = Json::array();
  for (const ArrayRecord& array : manifest.layout.arrays) arrays.push_back(to_json(array));
  Json json = {{"format", format_name},
               {"version", manifest.version},
               {"library", manifest.library},
               {"hdf5", manifest.hdf5},
               {"sequence", manifest.sequence},
               {"created", manifest.created},
               {"world", manifest.layout.world},
               {"stage", manifest.stage},
               {"numerics_fingerprint", manifest.numerics},
               {"reduction_group", manifest.reduction_group},
               {"cut", "element"},
               {"run", to_json(manifest.run)},
               {"sections", sections},
               {"units", units},
               {"master", to_json(manifest.master)},
               {"shards", shards}};
  if (!arrays.empty()) json["arrays"] = arrays;
  for (const std::uint64_t run : manifest.lineage) json["lineage"].push_back(to_hex(run));
  std::string body;  // a line for each key, so that people can read it
  for (const auto& [key, value] : json.items()) {
    body += fmt::format("{}\"{}\": {}", body.empty() ? "" : ",\n", key, value.dump());
  }
  body += "\n}\n";
  return fmt::format("{}{}{}{}", digest_prefix, to_hex(digest_of(body)), digest_suffix, body);
}

Manifest manifest_from_text(std::string_view text, std::string_view origin) {
  std::uint64_t digest = 0;
  if (text.size() < first_line || !text.starts_with(digest_prefix) ||
      !from_hex(text.substr(digest_prefix.size(), 16), digest) ||
      text.substr(first_line - digest_suffix.size(), digest_suffix.size()) != digest_suffix) {
    throw CheckpointError(
        fmt::format("{}: its first line does not hold its digest; it is damaged or no manifest", origin));
  }
  if (const std::uint64_t actual = digest_of(text.substr(first_line)); actual != digest) {
    throw CheckpointError(fmt::format("{}: it is damaged: its digest is {}, its first line says {}", origin,
                                      to_hex(actual), to_hex(digest)));
  }
  const JsonNode root = JsonNode::read<CheckpointError>(text, origin);
  if (const std::string format = root["format"].text(); format != format_name) {
    root["format"].fail(fmt::format("is '{}', not {}", format, format_name));
  }
  Manifest manifest;
  manifest.version = root["version"].integer();
  if (manifest.version != format_version) {
    root["version"].fail(
        fmt::format("is {}; this program reads version {}", manifest.version, format_version));
  }
  manifest.library = root["library"].text();
  manifest.hdf5 = root["hdf5"].text();
  manifest.sequence = root["sequence"].integer(0, most_counted);
  manifest.created = root["created"].integer(first_time, last_time);
  if (root["lineage"]) {
    for (const JsonNode& run : root["lineage"].items()) {
      if (!from_hex(run.text(), manifest.lineage.emplace_back())) {
        run.fail("is not the number of a run, 16 hexadecimal digits");
      }
    }
  }
  manifest.stage = root["stage"].integer<int>(0, 3);
  manifest.numerics = root["numerics_fingerprint"].text();
  manifest.reduction_group = root["reduction_group"].integer<int>(1);
  if (const std::string cut = root["cut"].text(); cut != "element") {
    root["cut"].fail(fmt::format("is '{}'; this program reads shards cut by 'element'", cut));
  }
  manifest.run = run_from(root["run"]);
  Layout& layout = manifest.layout;
  layout.world = root["world"].integer<int>(1, most_ranks);
  for (const JsonNode& node : root["sections"].items(0, most_sections)) {
    layout.sections.push_back(section_from(node));
  }
  check_sections(layout, root);
  for (const JsonNode& node : root["units"].items(0, most_units)) {
    layout.units.push_back(unit_from(node, layout.world));
  }
  if (root["arrays"]) {
    for (const JsonNode& node : root["arrays"].items())
      layout.arrays.push_back(array_from(node, layout.world));
  }
  manifest.master = file_from(root["master"]);
  if (manifest.master.name != master_name) {
    root["master"]["name"].fail(fmt::format("is '{}', not {}", manifest.master.name, master_name));
  }
  for (const JsonNode& node : root["shards"].items()) manifest.shards.push_back(shard_from(node));
  check_sizes(manifest, root);
  check_shards(manifest, root);
  return manifest;
}

}  // namespace tranche::checkpoint
