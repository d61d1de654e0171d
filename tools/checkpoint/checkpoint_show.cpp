// tranche checkpoint show.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>

#include "core/json.h"
#include "tools/checkpoint/adapters.h"
#include "tools/checkpoint/checkpoint_command.h"
#include "tools/checkpoint/checkpoint_source.h"
#include "tranche/device/ledger.h"

namespace tranche::tools {

using checkpoint::Layout;
using checkpoint::Manifest;
using checkpoint::Reader;
using checkpoint::StoredTensor;
using nlohmann::ordered_json;

namespace {

using detail::ElementRange;

/// Elements of a tensor, or of a box of it, in a rank's file.
struct Part {
  int rank = 0;
  ElementRange elements;
  const checkpoint::Box* box = nullptr;  ///< null: the whole tensor
};

const checkpoint::TensorRecord& record_of(const Layout& layout, const StoredTensor& tensor) {
  return layout.units[static_cast<std::size_t>(tensor.unit)].tensors[static_cast<std::size_t>(tensor.index)];
}

std::vector<Part> parts_of(const Layout& layout, const StoredTensor& tensor) {
  std::vector<Part> parts;
  for (const checkpoint::BufferRecord& buffer : layout.units[static_cast<std::size_t>(tensor.unit)].buffers) {
    for (const checkpoint::InstanceRecord& instance : buffer.instances) {
      for (const checkpoint::PlacedTensor& placed : instance.tensors) {
        if (placed.tensor != tensor.index) continue;
        const std::int64_t elements = elements_of(placed.box);
        const bool whole = elements == tensor.shape.elements();
        for (const checkpoint::StoredRange& range : instance.ranges) {
          const ElementRange part =
              detail::intersect(range.range(), {placed.offset, placed.offset + elements});
          if (part.empty()) continue;
          parts.push_back({range.rank,
                           {part.begin - placed.offset, part.end - placed.offset},
                           whole ? nullptr : &placed.box});
        }
      }
    }
  }
  return parts;
}

/// "3", "0-2"
std::string ranks_text(const std::vector<Part>& parts) {
  const auto by_rank = [](const Part& a, const Part& b) { return a.rank < b.rank; };
  const auto [least, most] = std::minmax_element(parts.begin(), parts.end(), by_rank);
  const int first = least->rank, last = most->rank;
  return first == last ? fmt::format("{}", first) : fmt::format("{}-{}", first, last);
}

/// The part of a checkpoint that the ranks of one pipeline stage saved.
struct StageContents {
  std::vector<int> ranks;
  std::vector<int> units;   ///< units with a tensor on this stage, ascending
  std::vector<bool> whole;  ///< for each of them: no other stage has a tensor of the unit
};

/// The coordinate of a rank on the mesh's axis `pipeline`.
int stage_of(const Layout& layout, int rank) {
  int stride = 1;
  for (auto axis = layout.mesh.rbegin(); axis != layout.mesh.rend(); ++axis) {
    if (axis->name == name_of(MeshAxis::pipeline)) return rank / stride % axis->size;
    stride *= axis->size;
  }
  return 0;
}

/// The contents of each stage, in order; empty without a pipeline.
std::vector<StageContents> stages_of(const Layout& layout) {
  const int count = layout.axis(MeshAxis::pipeline);
  if (count == 1) return {};
  std::vector<StageContents> stages(static_cast<std::size_t>(count));
  for (int rank = 0; rank < layout.world; ++rank) {
    stages[static_cast<std::size_t>(stage_of(layout, rank))].ranks.push_back(rank);
  }
  for (std::size_t u = 0; u < layout.units.size(); ++u) {
    std::set<int> of_unit;
    for (const checkpoint::BufferRecord& buffer : layout.units[u].buffers) {
      for (const checkpoint::InstanceRecord& instance : buffer.instances) {
        for (const checkpoint::StoredRange& range : instance.ranges)
          of_unit.insert(stage_of(layout, range.rank));
      }
    }
    for (const int stage : of_unit) {
      stages[static_cast<std::size_t>(stage)].units.push_back(static_cast<int>(u));
      stages[static_cast<std::size_t>(stage)].whole.push_back(of_unit.size() == 1);
    }
  }
  return stages;
}

/// "ranks 0, 1: a part of embedding, h.0 to h.2"
std::string describe(const StageContents& stage, const Layout& layout) {
  std::string text;
  for (std::size_t i = 0; i < stage.units.size();) {
    std::size_t end = i + 1;
    while (stage.whole[i] && end < stage.units.size() && stage.whole[end] &&
           stage.units[end] == stage.units[end - 1] + 1) {
      ++end;
    }
    const auto name = [&](std::size_t at) {
      return layout.units[static_cast<std::size_t>(stage.units[at])].name;
    };
    text += fmt::format("{}{}{}{}", text.empty() ? "" : ", ", stage.whole[i] ? "" : "a part of ", name(i),
                        end - i > 1 ? " to " + name(end - 1) : "");
    i = end;
  }
  return fmt::format("rank{} {}: {}", stage.ranks.size() == 1 ? "" : "s", fmt::join(stage.ranks, ", "), text);
}

ordered_json json_of(const StageContents& stage, const Layout& layout) {
  ordered_json units = ordered_json::array(), parts = ordered_json::array();
  for (std::size_t i = 0; i < stage.units.size(); ++i) {
    (stage.whole[i] ? units : parts).push_back(layout.units[static_cast<std::size_t>(stage.units[i])].name);
  }
  return {{"ranks", stage.ranks}, {"units", units}, {"parts_of_units", parts}};
}

/// Statistics of the numbers of one kind of a tensor.
struct Values {
  double smallest = std::numeric_limits<double>::infinity(), largest = -smallest;
  double sum = 0, squares = 0;
  std::int64_t finite = 0, others = 0;
  std::vector<float> first;
};

Values values_of(Reader& reader, const StoredTensor& tensor, const std::string& kind) {
  constexpr std::int64_t stride = std::int64_t{1} << 20;
  constexpr std::size_t shown = 6;
  const std::int64_t elements = tensor.shape.elements();
  std::vector<float> memory(static_cast<std::size_t>(std::min(stride, elements)));
  Values values;
  for (std::int64_t at = 0; at < elements; at += stride) {
    const ElementRange range{at, std::min(at + stride, elements)};
    reader.read_tensor(tensor.name, kind, range, DataType::float32, memory.data());
    for (std::size_t i = 0; i < static_cast<std::size_t>(range.size()); ++i) {
      const double value = memory[i];
      if (values.first.size() < shown) values.first.push_back(memory[i]);
      if (!std::isfinite(value)) {
        ++values.others;
        continue;
      }
      ++values.finite;
      values.smallest = std::min(values.smallest, value);
      values.largest = std::max(values.largest, value);
      values.sum += value;
      values.squares += value * value;
    }
  }
  return values;
}

std::string describe(const Values& values, std::int64_t elements) {
  std::string text = fmt::format("{}{}", fmt::join(values.first, " "),
                                 static_cast<std::int64_t>(values.first.size()) < elements ? " ..." : "");
  if (values.finite > 0) {
    const auto n = static_cast<double>(values.finite);
    text += fmt::format("; from {:g} to {:g}, mean {:g}, root mean square {:g}", values.smallest,
                        values.largest, values.sum / n, std::sqrt(values.squares / n));
  }
  if (values.others > 0) text += fmt::format("; {} not finite", values.others);
  return text;
}

ordered_json json_of(const Reader& reader, const StoredTensor& tensor) {
  const Layout& layout = reader.layout();
  ordered_json kinds = ordered_json::object(), shards = ordered_json::array();
  for (const std::string& kind : reader.kinds(tensor)) kinds[kind] = name_of(reader.dtype(tensor, kind));
  for (const Part& part : parts_of(layout, tensor)) {
    shards.push_back({{"rank", part.rank}, {"begin", part.elements.begin}, {"end", part.elements.end}});
    if (part.box == nullptr) continue;
    for (const checkpoint::Slice& slice : *part.box) {
      shards.back()["box"].push_back({slice.start, slice.stride, slice.count, slice.block});
    }
  }
  const auto extents = tensor.shape.extents();
  return {{"name", tensor.name},
          {"aliases", record_of(layout, tensor).aliases},
          {"unit", layout.units[static_cast<std::size_t>(tensor.unit)].name},
          {"shape", std::vector<std::int64_t>(extents.begin(), extents.end())},
          {"frozen", tensor.frozen},
          {"kinds", kinds},
          {"shards", shards}};
}

ordered_json json_of(const Layout& layout, const checkpoint::ArrayRecord& array) {
  ordered_json shapes = ordered_json::array(), shards = ordered_json::array();
  for (const Shape& shape : array.shapes) {
    shapes.push_back(std::vector<std::int64_t>(shape.extents().begin(), shape.extents().end()));
  }
  for (int rank = 0; rank < layout.world; ++rank) {
    const ElementRange range = array.range(rank);
    if (!range.empty()) shards.push_back({{"rank", rank}, {"begin", range.begin}, {"end", range.end}});
  }
  return {{"name", array.name},
          {"dtype", name_of(array.dtype)},
          {"of", array.per_rank ? "each rank" : "all ranks"},
          {"shapes", shapes},
          {"shards", shards}};
}

ordered_json json_of(const Reader& reader) {
  const Manifest& manifest = reader.manifest();
  ordered_json mesh = ordered_json::object();
  for (const checkpoint::AxisRecord& axis : manifest.layout.mesh) mesh[axis.name] = axis.size;
  const auto object = [](const std::string& text) { return detail::parse_json(text); };
  ordered_json json = {{"path", reader.folder()},
                       {"step", manifest.run.step},
                       {"applied", manifest.run.applied},
                       {"samples", manifest.run.samples},
                       {"tokens", manifest.run.tokens},
                       {"sequence", manifest.sequence},
                       {"created", manifest.created},
                       {"library", manifest.library},
                       {"hdf5", manifest.hdf5},
                       {"version", fmt::format("{}.{}", manifest.version, manifest.minor)},
                       {"world", manifest.layout.world},
                       {"mesh", mesh},
                       {"stage", manifest.stage},
                       {"reduction_group", manifest.reduction_group},
                       {"numerics_fingerprint", manifest.numerics},
                       {"bytes", manifest.bytes()},
                       {"optimizer", object(manifest.run.optimizer)},
                       {"schedule", object(manifest.run.schedule)},
                       {"loss_scaler", object(manifest.run.loss_scaler)},
                       {"random", object(manifest.run.random)},
                       {"user", object(manifest.run.user)},
                       {"config", object(manifest.run.config)}};
  for (const StageContents& stage : stages_of(manifest.layout)) {
    json["pipeline_stages"].push_back(json_of(stage, manifest.layout));
  }
  for (const checkpoint::FileRecord& companion : manifest.companions)
    json["companions"].push_back({{"name", companion.name}, {"bytes", companion.bytes}});
  if (manifest.run.skipped > 0) json["skipped"] = manifest.run.skipped;
  if (manifest.run.in_doubt) json["in_doubt"] = true;
  if (const auto& base = manifest.base) {
    json["base"] = {{"folder", base->folder}, {"dtype", base->dtype}, {"digest", base->digest}};
    if (base->seed) json["base"]["seed"] = *base->seed;
  }
  return json;
}

void print_run(std::ostream& out, const Reader& reader, const models::ModelRegistry& models) {
  const Manifest& manifest = reader.manifest();
  const checkpoint::RunState& run = manifest.run;
  const auto row = [&out](std::string_view name, const std::string& value) {
    out << fmt::format("  {:<14} {}\n", name, value);
  };
  out << reader.folder() << "\n";
  row("step", fmt::format("{} ({} updates applied{})", run.step, run.applied,
                          run.in_doubt ? "; in doubt: the weights may be ruined" : ""));
  row("consumed", fmt::format("{} samples, {} tokens", run.samples, run.tokens));
  row("saved", fmt::format("{} UTC, sequence {}, by tranche {} with HDF5 {}", format_time(manifest.created),
                           manifest.sequence, manifest.library, manifest.hdf5));
  row("by", fmt::format("{} at stage {}, reduction group {}", manifest.layout.saved_by(), manifest.stage,
                        manifest.reduction_group));
  const std::vector<StageContents> stages = stages_of(manifest.layout);
  for (std::size_t s = 0; s < stages.size(); ++s) {
    row(s == 0 ? "pipeline" : "", fmt::format("stage {}, {}", s, describe(stages[s], manifest.layout)));
  }
  if (const auto& base = manifest.base) {
    row("base", fmt::format("{}{}{}", base->folder.empty() ? "drawn from the seed" : base->folder,
                            base->dtype.empty() ? "" : ", in " + base->dtype,
                            base->digest.empty() ? "" : ", digest " + base->digest));
  }
  if (const LoraConfig lora = adapters_of(manifest); lora.any()) row("adapters", tools::describe(lora));
  row("size", fmt::format("{} in {} files", format_bytes(manifest.bytes()),
                          manifest.shards.size() + 1 + manifest.companions.size()));
  if (!manifest.companions.empty()) {
    std::vector<std::string> names;
    for (const checkpoint::FileRecord& companion : manifest.companions) names.push_back(companion.name);
    row("carries", fmt::format("{}", fmt::join(names, ", ")));
  }
  if (RunIdentity::wrote(run.user)) {
    const RunIdentity identity = RunIdentity::from_json(run.user, reader.folder(), models);
    row("model", identity.model->describe());
    row("trained on", fmt::format("sequences of {} {}{}", identity.sequence, describe(identity.tokenizer),
                                  identity.data.empty() ? "" : " of " + identity.data));
  } else if (run.user != "{}") {
    row("user", run.user);
  }
  for (const auto& [name, text] :
       {std::pair("optimizer", &run.optimizer), std::pair("schedule", &run.schedule),
        std::pair("loss scaler", &run.loss_scaler), std::pair("random", &run.random)}) {
    if (*text != "{}") row(name, *text);
  }
  if (!manifest.numerics.empty()) row("numerics", manifest.numerics);
}

void print_table(std::ostream& out, const Reader& reader) {
  std::size_t name_width = 6, shape_width = 5;
  std::int64_t parameters = 0;
  for (const StoredTensor& tensor : reader.tensors()) {
    name_width = std::max(name_width, tensor.name.size());
    shape_width = std::max(shape_width, tensor.shape.to_string().size());
    parameters += tensor.shape.elements();
  }
  out << fmt::format("\n{:<{}}  {:<{}}  {:>12}  {:<7}  {:<6}  {}\n", "tensor", name_width, "shape",
                     shape_width, "elements", "ranks", "weight", "optimizer state");
  for (const StoredTensor& tensor : reader.tensors()) {
    std::string weight, states;
    for (const std::string& kind : reader.kinds(tensor)) {
      const std::string_view dtype = name_of(reader.dtype(tensor, kind));
      if (kind == "weight") {
        weight = dtype;
      } else {
        states += fmt::format("{}{} {}", states.empty() ? "" : ", ", kind, dtype);
      }
    }
    if (states.empty()) states = tensor.frozen ? "frozen" : "none";
    const auto& aliases = record_of(reader.layout(), tensor).aliases;
    out << fmt::format("{:<{}}  {:<{}}  {:>12}  {:<7}  {:<6}  {}{}\n", tensor.name, name_width,
                       tensor.shape.to_string(), shape_width, tensor.shape.elements(),
                       ranks_text(parts_of(reader.layout(), tensor)), weight, states,
                       aliases.empty() ? "" : fmt::format("; also {}", fmt::join(aliases, ", ")));
  }
  out << fmt::format("{} tensors, {} elements\n", reader.tensors().size(), parameters);
}

/// Prints the program's own arrays, if there are any.
void print_arrays(std::ostream& out, const Layout& layout) {
  if (layout.arrays.empty()) return;
  std::size_t width = 5;
  for (const checkpoint::ArrayRecord& array : layout.arrays) width = std::max(width, array.name.size());
  out << fmt::format("\n{:<{}}  {:<6}  {:<9}  {}\n", "array", width, "dtype", "of", "shape");
  for (const checkpoint::ArrayRecord& array : layout.arrays) {
    std::string shapes = array.shapes.front().to_string();
    const bool alike = std::all_of(array.shapes.begin(), array.shapes.end(),
                                   [&](const Shape& shape) { return shape == array.shapes.front(); });
    for (std::size_t r = 1; r < array.shapes.size() && !alike; ++r)
      shapes += " " + array.shapes[r].to_string();
    out << fmt::format("{:<{}}  {:<6}  {:<9}  {}\n", array.name, width, name_of(array.dtype),
                       array.per_rank ? "each rank" : "all ranks", shapes);
  }
}

void print_tensor(std::ostream& out, Reader& reader, const StoredTensor& tensor) {
  const Layout& layout = reader.layout();
  const auto& aliases = record_of(layout, tensor).aliases;
  out << fmt::format("{} {} of unit {}{}{}\n", tensor.name, tensor.shape.to_string(),
                     layout.units[static_cast<std::size_t>(tensor.unit)].name,
                     tensor.frozen ? ", frozen" : "",
                     aliases.empty() ? "" : fmt::format(", also {}", fmt::join(aliases, ", ")));
  for (const Part& part : parts_of(layout, tensor)) {
    out << fmt::format("  rank {:<5} elements {} to {}{} in {}\n", part.rank, part.elements.begin,
                       part.elements.end - 1, part.box == nullptr ? "" : " of box " + to_string(*part.box),
                       reader.manifest().shards[static_cast<std::size_t>(part.rank)].file.name);
  }
  for (const std::string& kind : reader.kinds(tensor)) {
    out << fmt::format("  {} ({}): {}\n", kind, name_of(reader.dtype(tensor, kind)),
                       describe(values_of(reader, tensor, kind), tensor.shape.elements()));
  }
}

}  // namespace

int checkpoint_show(const CheckpointOptions& options, const Output& output) {
  const checkpoint::LocalStorage local;
  Reader reader(local, chosen_checkpoint(detail::posix_file_system(), options.path, output));
  const StoredTensor* only = options.tensor.empty() ? nullptr : &reader.tensor(options.tensor);
  if (options.json) {
    ordered_json json = json_of(reader);
    json["tensors"] = ordered_json::array();
    for (const StoredTensor& tensor : reader.tensors()) {
      if (only == nullptr || only == &tensor) json["tensors"].push_back(json_of(reader, tensor));
    }
    json["arrays"] = ordered_json::array();
    for (const checkpoint::ArrayRecord& array : reader.layout().arrays) {
      json["arrays"].push_back(json_of(reader.layout(), array));
    }
    output.out << json.dump(2, ' ', false, ordered_json::error_handler_t::replace) << "\n";
  } else if (only != nullptr) {
    print_tensor(output.out, reader, *only);
  } else {
    print_run(output.out, reader, options.models);
    print_table(output.out, reader);
    print_arrays(output.out, reader.layout());
  }
  return 0;
}

}  // namespace tranche::tools
