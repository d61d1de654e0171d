// The manifest and a shard's record as JSON.

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/companions.h"
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
/// The limit for numbers that only grow by addition: far beyond any run, and far from overflow.
constexpr std::int64_t most_counted = INT64_MAX / 2;
constexpr std::size_t most_sections = 64;
constexpr std::size_t most_units = 1 << 17;
constexpr int most_ranks = 1 << 20;
/// The limit for the elements and for the bytes of a block of quantised state.
constexpr std::int64_t most_block = std::int64_t{1} << 20;
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

Json to_json(const std::vector<StoredRange>& ranges) {
  Json json = Json::array();
  for (const StoredRange& range : ranges) json.push_back({range.rank, range.begin, range.end});
  return json;
}

Json to_json(const BufferRecord& buffer, const UnitRecord& unit) {
  Json instances = Json::array();
  for (const InstanceRecord& instance : buffer.instances) {
    Json tensors = Json::array();
    for (const PlacedTensor& placed : instance.tensors) {
      Json one = {{"tensor", placed.tensor}, {"offset", placed.offset}};
      if (placed.box != whole_box(unit.tensors[static_cast<std::size_t>(placed.tensor)].shape)) {
        for (const Slice& slice : placed.box) {
          one["box"].push_back({slice.start, slice.stride, slice.count, slice.block});
        }
      }
      tensors.push_back(std::move(one));
    }
    instances.push_back({{"tensors", tensors}, {"ranges", to_json(instance.ranges)}});
  }
  Json json = {
      {"name", buffer.name}, {"frozen", buffer.frozen}, {"group", buffer.group}, {"instances", instances}};
  if (buffer.state_class != 0) json["state_class"] = buffer.state_class;
  return json;
}

Json to_json(const UnitRecord& unit) {
  Json tensors = Json::array(), buffers = Json::array();
  for (const TensorRecord& tensor : unit.tensors) {
    tensors.push_back({{"name", tensor.name},
                       {"shape", extents_of(tensor.shape)},
                       {"frozen", tensor.frozen},
                       {"aliases", tensor.aliases}});
  }
  for (const BufferRecord& buffer : unit.buffers) buffers.push_back(to_json(buffer, unit));
  return {{"name", unit.name},
          {"uses_per_pass", unit.uses_per_micro_batch},
          {"tensors", tensors},
          {"buffers", buffers}};
}

Json to_json(const SectionRecord& section) {
  Json json = {{"dataset", section.dataset},
               {"kind", section.kind},
               {"dtype", std::string(name_of(section.dtype))},
               {"frozen", section.frozen}};
  if (section.state_class != 0) json["state_class"] = section.state_class;
  if (const BlockFormat& block = section.block; !block.name.empty()) {
    json["block"] = {{"format", block.name}, {"elements", block.elements}, {"bytes", block.bytes}};
  }
  return json;
}

Json to_json(const ArrayRecord& array) {
  Json json = {{"name", array.name},
               {"dtype", std::string(name_of(array.dtype))},
               {"of", array.per_rank ? "each rank" : "all ranks"},
               {"shapes", Json::array()}};
  for (const Shape& shape : array.shapes) json["shapes"].push_back(extents_of(shape));
  if (!array.per_rank) json["ranges"] = to_json(array.ranges);
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
  Json json = {{"step", run.step},
               {"applied", run.applied},
               {"samples", run.samples},
               {"tokens", run.tokens},
               {"random", object_text(run.random, "random")},
               {"loss_scaler", object_text(run.loss_scaler, "loss_scaler")},
               {"schedule", object_text(run.schedule, "schedule")},
               {"optimizer", object_text(run.optimizer, "optimizer")},
               {"config", object_text(run.config, "config")},
               {"user", object_text(run.user, "user")}};
  if (run.skipped > 0) json["skipped"] = run.skipped;
  if (run.in_doubt) json["in_doubt"] = true;
  if (run.gradient_noise != "{}") json["gradient_noise"] = object_text(run.gradient_noise, "gradient_noise");
  return json;
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

std::vector<FileRecord> companions_from(const JsonNode& node) {
  std::vector<FileRecord> companions;
  for (const JsonNode& item : node.items(0, most_companions)) {
    FileRecord file = file_from(item);
    if (const std::string problem = problem_of_companion_name(file.name); !problem.empty())
      item["name"].fail(fmt::format("'{}' {}", file.name, problem));
    for (const FileRecord& before : companions) {
      if (before.name == file.name) item["name"].fail(fmt::format("'{}' is there twice", file.name));
    }
    if (file.bytes > companion_limit || file.digested_bytes != file.bytes)
      item["bytes"].fail(fmt::format("is {}: it has at most {}, all digested", file.bytes, companion_limit));
    companions.push_back(std::move(file));
  }
  return companions;
}

/// Version 1: rank r stores elements [cuts[r], cuts[r + 1]).
std::vector<StoredRange> ranges_from_cuts(const JsonNode& node, int world) {
  const std::vector<std::int64_t> cuts = node.integers();
  if (cuts.size() != static_cast<std::size_t>(world) + 1 || cuts.front() != 0 ||
      !std::is_sorted(cuts.begin(), cuts.end())) {
    node.fail(fmt::format("does not cut a buffer from 0 on into {} shards", world));
  }
  return ranges_between(cuts);
}

std::vector<StoredRange> ranges_from(const JsonNode& node) {
  std::vector<StoredRange> ranges;
  for (const JsonNode& item : node.items()) {
    const std::vector<std::int64_t> numbers = item.integers(0);
    if (numbers.size() != 3 || numbers[0] >= most_ranks) item.fail("is not a rank and two elements");
    ranges.push_back({static_cast<int>(numbers[0]), numbers[1], numbers[2], 0});
  }
  return ranges;
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

TensorRecord tensor_from(const JsonNode& node) {
  return {node["name"].text(), shape_from(node["shape"], 1), node["frozen"].boolean(),
          node["aliases"].texts()};
}

/// Version 1: two buffers, each over all ranks, with whole tensors.
void buffers_from_cuts(const JsonNode& node, const Layout& layout, UnitRecord& unit) {
  for (const bool frozen : {false, true}) {
    BufferRecord& buffer = unit.buffers.emplace_back();
    buffer.name = frozen ? "frozen" : "trainable";
    buffer.frozen = frozen;
    for (const AxisRecord& axis : layout.mesh) buffer.group.push_back(axis.name);
    InstanceRecord instance;
    instance.ranges = ranges_from_cuts(node[buffer.name + "_cuts"], layout.world);
    const std::vector<JsonNode> tensors = node["tensors"].items();
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      if (unit.tensors[t].frozen != frozen) continue;
      instance.tensors.push_back(
          {static_cast<int>(t), whole_box(unit.tensors[t].shape), tensors[t]["offset"].integer(0)});
    }
    if (!instance.ranges.empty() || !instance.tensors.empty())
      buffer.instances.push_back(std::move(instance));
  }
}

Box box_from(const JsonNode& node) {
  Box box;
  for (const JsonNode& item : node.items(0, Shape::max_rank)) {
    const std::vector<std::int64_t> numbers = item.integers(0);
    if (numbers.size() != 4) item.fail("is not start, stride, count and block");
    box.push_back({numbers[0], numbers[1], numbers[2], numbers[3]});
  }
  return box;
}

int state_class_from(const JsonNode& node) {
  if (!node["state_class"]) return 0;
  if (node["frozen"].boolean()) node["state_class"].fail("is of frozen tensors, which have no state");
  return node["state_class"].integer<int>(0, most_state_classes - 1);
}

BufferRecord buffer_from(const JsonNode& node, const UnitRecord& unit) {
  BufferRecord buffer{node["name"].text(), node["frozen"].boolean(), node["group"].texts(), {}};
  buffer.state_class = state_class_from(node);
  for (const JsonNode& item : node["instances"].items()) {
    InstanceRecord& instance = buffer.instances.emplace_back();
    instance.ranges = ranges_from(item["ranges"]);
    for (const JsonNode& placed : item["tensors"].items()) {
      const int most = static_cast<int>(unit.tensors.size()) - 1;
      const int tensor = placed["tensor"].integer<int>(0, std::max(0, most));
      if (most < 0) placed["tensor"].fail("is of a unit without tensors");
      instance.tensors.push_back({tensor,
                                  placed["box"]
                                      ? box_from(placed["box"])
                                      : whole_box(unit.tensors[static_cast<std::size_t>(tensor)].shape),
                                  placed["offset"].integer(0)});
    }
  }
  return buffer;
}

UnitRecord unit_from(const JsonNode& node, const Layout& layout, std::int64_t version) {
  UnitRecord unit;
  unit.name = node["name"].text();
  unit.uses_per_micro_batch = node["uses_per_pass"].integer<int>(1);
  for (const JsonNode& item : node["tensors"].items()) unit.tensors.push_back(tensor_from(item));
  if (version == 1) {
    buffers_from_cuts(node, layout, unit);
  } else {
    for (const JsonNode& item : node["buffers"].items()) unit.buffers.push_back(buffer_from(item, unit));
    for (const BufferRecord& buffer : unit.buffers) {
      for (const InstanceRecord& instance : buffer.instances) {
        for (const PlacedTensor& placed : instance.tensors) {
          unit.tensors[static_cast<std::size_t>(placed.tensor)].state_class = buffer.state_class;
        }
      }
    }
  }
  return unit;
}

SectionRecord section_from(const JsonNode& node) {
  SectionRecord section;
  section.dataset = node["dataset"].text();
  section.kind = node["kind"].text();
  if (const JsonNode block = node["block"]) {
    section.dtype = parse_data_type(node["dtype"].choice({"uint8"}));
    section.block = {block["format"].name(), block["elements"].integer(1, most_block),
                     block["bytes"].integer(1, most_block)};
  } else {
    section.dtype = parse_data_type(node["dtype"].choice({"fp32", "bf16", "fp16"}));
  }
  section.frozen = node["frozen"].boolean();
  section.state_class = state_class_from(node);
  return section;
}

ArrayRecord array_from(const JsonNode& node, int world, std::int64_t version) {
  ArrayRecord array;
  array.name = node["name"].text();
  try {
    array.dtype = parse_data_type(node["dtype"].text());
  } catch (const ConfigurationError& error) {
    node["dtype"].fail(error.message());
  }
  array.per_rank = node["of"].choice({"each rank", "all ranks"}) == "each rank";
  for (const JsonNode& item : node["shapes"].items()) array.shapes.push_back(shape_from(item, 0));
  if (!array.per_rank) {
    array.ranges = version == 1 ? ranges_from_cuts(node["cuts"], world) : ranges_from(node["ranges"]);
  }
  return array;
}

RunState run_from(const JsonNode& node) {
  RunState run;
  run.step = node["step"].integer(0, most_counted);
  run.applied = node["applied"].integer(0, most_counted);
  run.samples = node["samples"].integer(0, most_counted);
  run.tokens = node["tokens"].integer(0, most_counted);
  run.skipped = node["skipped"].integer_or(0, 0, most_counted);
  run.in_doubt = node["in_doubt"] ? node["in_doubt"].boolean() : false;
  if (node["gradient_noise"]) run.gradient_noise = node["gradient_noise"].object();
  run.random = node["random"].object();
  run.loss_scaler = node["loss_scaler"].object();
  run.schedule = node["schedule"].object();
  run.optimizer = node["optimizer"].object();
  run.config = node["config"].object();
  run.user = node["user"].object();
  return run;
}

/// Checks that the sum of the files' bytes does not overflow.
void check_sizes(const Manifest& manifest, const JsonNode& root) {
  std::int64_t bytes = manifest.master.bytes;
  // The sum cannot overflow here: the master file has at most most_counted bytes, half of the largest number,
  // and companions are small.
  for (const FileRecord& companion : manifest.companions) bytes += companion.bytes;
  for (const ShardRecord& shard : manifest.shards) {
    if (bytes > most_counted || shard.file.bytes > most_counted - bytes) {
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
      const bool same_kind = before.kind == section.kind && before.kind_of() == section.kind_of();
      if (same_kind || before.dataset == section.dataset) {
        root["sections"].items()[s].fail(fmt::format("is there twice: sections[{}] is of '{}' in {} too",
                                                     other, before.kind, before.dataset));
      }
    }
  }
}

/// The bytes of a section's elements. If blocks would overflow, it returns a number larger than any file.
std::int64_t bytes_of(const SectionRecord& section, std::int64_t elements) {
  const bool much = elements / section.block.elements > most_counted / most_block;
  return much && !section.block.name.empty() ? most_counted : section.bytes(elements);
}

void check_shards(const Manifest& manifest, const JsonNode& root) {
  const Layout& layout = manifest.layout;
  const std::vector<JsonNode> nodes = root["shards"].items();
  if (static_cast<int>(nodes.size()) != layout.world) {
    root["shards"].fail(fmt::format("has {} entries for {} ranks", nodes.size(), layout.world));
  }
  const auto check = [&](std::size_t rank, const char* key, const std::string& dataset, std::int64_t bytes,
                         std::int64_t offset) {
    if (bytes == 0 ? offset != -1
                   : offset < 0 || offset > manifest.shards[rank].file.digested_bytes - bytes) {
      nodes[rank][key].fail(fmt::format("puts {} at byte {}, outside the file", dataset, offset));
    }
  };
  for (std::size_t rank = 0; rank < nodes.size(); ++rank) {
    const ShardRecord& shard = manifest.shards[rank];
    const JsonNode& node = nodes[rank];
    const std::string name = shard_name(static_cast<int>(rank), layout.world);
    if (shard.rank != static_cast<int>(rank))
      node["rank"].fail(fmt::format("is {}, not {}", shard.rank, rank));
    if (shard.file.name != name) node["name"].fail(fmt::format("is '{}', not {}", shard.file.name, name));
    if (shard.offsets.size() != layout.sections.size()) {
      node["offsets"].fail(
          fmt::format("has {} entries for {} sections", shard.offsets.size(), layout.sections.size()));
    }
    if (shard.array_offsets.size() != layout.arrays.size()) {
      node["array_offsets"].fail(
          fmt::format("has {} entries for {} arrays", shard.array_offsets.size(), layout.arrays.size()));
    }
    for (std::size_t s = 0; s < shard.offsets.size(); ++s) {
      const std::int64_t elements = layout.section_elements(static_cast<int>(s), static_cast<int>(rank));
      check(rank, "offsets", layout.sections[s].dataset, bytes_of(layout.sections[s], elements),
            shard.offsets[s]);
    }
  }
  for (std::size_t a = 0; a < layout.arrays.size(); ++a) {
    const ArrayRecord& array = layout.arrays[a];
    std::vector<std::int64_t> elements(nodes.size());
    for (const StoredRange& range : array.ranges) {
      elements[static_cast<std::size_t>(range.rank)] = range.range().size();
    }
    for (std::size_t rank = 0; rank < nodes.size(); ++rank) {
      if (array.per_rank) elements[rank] = array.shapes[rank].elements();
      check(rank, "array_offsets", array.dataset(), elements[rank] * size_of(array.dtype),
            manifest.shards[rank].array_offsets[a]);
    }
  }
}

/// Version 1 had one axis. It was always cut by element.
void read_mesh(const JsonNode& root, std::int64_t version, Layout& layout) {
  if (version == 1) {
    if (const std::string cut = root["cut"].text(); cut != "element") {
      root["cut"].fail(fmt::format("is '{}'; this program reads shards cut by 'element'", cut));
    }
    if (layout.world > 1) layout.mesh.push_back({std::string(name_of(MeshAxis::shard)), layout.world});
    return;
  }
  for (const JsonNode& item : root["mesh"].items()) {
    layout.mesh.push_back({item["axis"].name(), item["size"].integer<int>(1)});
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
  Json mesh = Json::array();
  for (const AxisRecord& axis : manifest.layout.mesh)
    mesh.push_back({{"axis", axis.name}, {"size", axis.size}});
  Json json = {{"format", format_name},
               {"version", format_version},
               {"minor", manifest.layout.state_classes() > 1 ? format_minor : 0},
               {"library", manifest.library},
               {"hdf5", manifest.hdf5},
               {"sequence", manifest.sequence},
               {"created", manifest.created},
               {"world", manifest.layout.world},
               {"mesh", mesh},
               {"stage", manifest.stage},
               {"numerics_fingerprint", manifest.numerics},
               {"reduction_group", manifest.reduction_group},
               {"run", to_json(manifest.run)},
               {"sections", sections},
               {"units", units},
               {"master", to_json(manifest.master)},
               {"shards", shards}};
  if (!arrays.empty()) json["arrays"] = arrays;
  for (const FileRecord& companion : manifest.companions) json["companions"].push_back(to_json(companion));
  if (const auto& base = manifest.base) {
    json["base"] = {{"folder", base->folder}, {"dtype", base->dtype}, {"digest", base->digest}};
    if (base->seed) json["base"]["seed"] = *base->seed;
  }
  for (const std::uint64_t run : manifest.lineage) json["lineage"].push_back(to_hex(run));
  if (!manifest.branches.empty()) json["branches"] = manifest.branches;
  std::string body;  // one line for each key, for readability
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
  manifest.minor = manifest.version == 1 ? 0 : root["minor"].integer_or(0, 0);
  if (manifest.version < 1 || manifest.version > format_version ||
      (manifest.version == format_version && manifest.minor > format_minor)) {
    root["version"].fail(
        fmt::format("is {}.{}; this program reads version 1 and versions up to {}.{}: a newer "
                    "release of it has to read this one",
                    manifest.version, manifest.minor, format_version, format_minor));
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
  if (const JsonNode branches = root["branches"]) {
    for (const JsonNode& applied : branches.items()) {
      manifest.branches.push_back(applied.integer(0, most_counted));
    }
    if (manifest.branches.size() != manifest.lineage.size()) {
      branches.fail(fmt::format("has {} entries for {} runs of lineage", manifest.branches.size(),
                                manifest.lineage.size()));
    }
  }
  if (const JsonNode base = root["base"]) {
    manifest.base = BaseRecord{
        base["folder"].text(), base["dtype"].choice({"fp32", "bf16", "fp16", ""}), base["digest"].text(), {}};
    if (base["seed"]) manifest.base->seed = base["seed"].integer();
  }
  manifest.stage = root["stage"].integer<int>(0, 3);
  manifest.numerics = root["numerics_fingerprint"].text();
  manifest.reduction_group = root["reduction_group"].integer<int>(1);
  manifest.run = run_from(root["run"]);
  Layout& layout = manifest.layout;
  layout.world = root["world"].integer<int>(1, most_ranks);
  read_mesh(root, manifest.version, layout);
  for (const JsonNode& node : root["sections"].items(0, most_sections)) {
    layout.sections.push_back(section_from(node));
  }
  check_sections(layout, root);
  for (const JsonNode& node : root["units"].items(0, most_units)) {
    layout.units.push_back(unit_from(node, layout, manifest.version));
  }
  if (root["arrays"]) {
    for (const JsonNode& node : root["arrays"].items())
      layout.arrays.push_back(array_from(node, layout.world, manifest.version));
  }
  if (const std::string fault = layout.fault(); !fault.empty()) {
    throw CheckpointError(fmt::format("{}: {}", origin, fault));
  }
  layout.place();
  manifest.master = file_from(root["master"]);
  if (manifest.master.name != master_name) {
    root["master"]["name"].fail(fmt::format("is '{}', not {}", manifest.master.name, master_name));
  }
  for (const JsonNode& node : root["shards"].items()) manifest.shards.push_back(shard_from(node));
  if (root["companions"]) manifest.companions = companions_from(root["companions"]);
  check_sizes(manifest, root);
  check_shards(manifest, root);
  return manifest;
}

}  // namespace tranche::checkpoint
