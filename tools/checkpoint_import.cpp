// tranche checkpoint import.

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <ostream>
#include <random>
#include <utility>

#include "checkpoint/folder.h"
#include "checkpoint/shard_writer.h"
#include "tools/adapters.h"
#include "tools/checkpoint_command.h"
#include "tools/checkpoint_source.h"
#include "tools/hugging_face.h"
#include "tools/peft.h"
#include "tools/terminal.h"
#include "tools/transfer_progress.h"
#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

/// Weights as a training run of one rank keeps them; no optimizer state.
checkpoint::Layout layout_of(const ModelSpec& spec,
                             const std::function<bool(const std::string& tensor)>& has) {
  std::vector<checkpoint::UnitDescription> units;
  for (const UnitSpec& unit : spec.units()) {
    checkpoint::UnitDescription description{unit.name, unit.uses_per_micro_batch, {}};
    for (const TensorSpec& tensor : unit.tensors) {
      if (!has(tensor.name)) continue;
      description.tensors.push_back({tensor.name, tensor.shape, false, tensor.aliases});
    }
    if (!description.tensors.empty()) units.push_back(std::move(description));
  }
  return checkpoint::make_layout(units, {}, DataType::float32, DataType::float32, 1);
}

/// Writes elements of a tensor to fp32 memory.
using Read = std::function<void(const std::string& tensor, detail::ElementRange elements, void* memory)>;

/// All elements of the layout's weights, in order and in pieces.
class Copier {
 public:
  Copier(const Read& source, checkpoint::ShardWriter& writer, TransferProgress& progress)
      : source_(source), writer_(writer), progress_(progress), memory_(stride) {}

  /// `piece`: the weights of a whole flat buffer.
  void copy(checkpoint::SectionPiece piece, const checkpoint::UnitRecord& unit) {
    std::int64_t at = 0;
    const auto& buffer = unit.buffers[static_cast<std::size_t>(piece.buffer)];
    for (const checkpoint::PlacedTensor& placed : buffer.instances.front().tensors) {
      const checkpoint::TensorRecord& tensor = unit.tensors[static_cast<std::size_t>(placed.tensor)];
      zeros(piece, {at, placed.offset});
      for (std::int64_t begin = 0; begin < tensor.shape.elements(); begin += stride) {
        const detail::ElementRange part{begin, std::min(begin + stride, tensor.shape.elements())};
        source_(tensor.name, part, memory_.data());
        put(piece, {placed.offset + part.begin, placed.offset + part.end});
      }
      at = placed.offset + tensor.shape.elements();
    }
    zeros(piece, {at, buffer.instances.front().elements()});
  }

 private:
  static constexpr std::int64_t stride = std::int64_t{1} << 20;

  void zeros(const checkpoint::SectionPiece& piece, detail::ElementRange range) {
    if (range.empty()) return;
    // Padding is shorter than the memory: it only aligns tensors and shards.
    std::fill_n(memory_.begin(), range.size(), 0.0f);
    put(piece, range);
  }
  void put(checkpoint::SectionPiece piece, detail::ElementRange range) {
    piece.range = range;
    writer_.put(piece, memory_.data());
    progress_.add(range.size() * static_cast<std::int64_t>(sizeof(float)));
  }

  const Read& source_;
  checkpoint::ShardWriter& writer_;
  TransferProgress& progress_;
  std::vector<float> memory_;
};

std::uint64_t draw_token() {
  std::random_device draw;
  return static_cast<std::uint64_t>(draw()) << 32 | draw();
}

void require_empty(detail::FileSystem& files, const std::string& folder) {
  if (checkpoint::list_checkpoints(files, folder).empty()) return;
  throw CheckpointError(
      fmt::format("cannot import to {}: it holds checkpoints already, of which this would be the newest; "
                  "name another folder",
                  folder));
}

/// Writes the checkpoint of one rank that the manifest describes; its path, and what it took.
std::pair<std::string, std::string> write_checkpoint(checkpoint::Manifest manifest, const Read& read,
                                                     const std::string& to, const Output& output) {
  const checkpoint::LocalStorage local;
  const checkpoint::ShardPlan plan(manifest.layout, 0, 0);
  checkpoint::RunFolder folder(local, to, draw_token());
  TransferProgress progress("imported", plan.payload_bytes(), output.terminal,
                            [&](std::string_view text) { draw(output.out, text); });
  folder.prepare(0, plan.file_bytes());
  std::string path;
  try {
    checkpoint::ShardWriter writer(local, plan, folder.temporary(0));
    Copier copier(read, writer, progress);
    for (const checkpoint::SectionPiece& piece : plan.pieces()) {
      copier.copy(piece, manifest.layout.units[static_cast<std::size_t>(piece.unit)]);
    }
    manifest.shards.push_back(writer.finish());
    path = folder.commit(manifest);
  } catch (...) {
    folder.discard(0);
    throw;
  }
  progress.finish();
  return {path, progress.summary()};
}

/// Adapters of PEFT's beside a base, as a checkpoint of adapters alone.
int import_peft(const CheckpointOptions& options, const Output& output) {
  if (options.partial || !options.rename.empty()) {
    throw ConfigurationError(fmt::format(
        "--partial and --rename are of a model's weights, and {} holds adapters of PEFT's", options.path));
  }
  if (options.base.empty()) {
    throw ConfigurationError(
        fmt::format("{} holds adapters of PEFT's: give the checkpoint of the model that they belong to with "
                    "--base",
                    options.path));
  }
  const checkpoint::LocalStorage local;
  detail::FileSystem& files = detail::posix_file_system();
  std::vector<std::string> notes;
  checkpoint::Reader base(local, find_checkpoint(files, options.base, notes));
  RunIdentity identity = identity_of(base.manifest(), base.folder(), options.model, options.models);
  require_tensors(*identity.model, "its own 'user'", base);
  if (base.manifest().base) {
    throw CheckpointError(base.folder() + " holds adapters alone; give --base a whole model");
  }
  const PeftAdapters source(files, options.path, *identity.model, base);
  require_empty(files, options.to);
  checkpoint::Manifest manifest;
  Config config;
  config.lora = source.lora();
  manifest.run.config =
      nlohmann::json{{"tranche", {{"lora", nlohmann::json::parse(adapters_text(config.to_json()))}}}}.dump();
  manifest.run.user = identity.to_json();
  manifest.numerics = "imported from PEFT";
  manifest.base = checkpoint::BaseRecord{std::filesystem::absolute(base.folder()).lexically_normal().string(),
                                         "fp32", ""};
  const ModelSpec spec = spec_with_adapters(*identity.model, manifest);
  manifest.layout = layout_of(spec, [](const std::string&) { return true; });
  const auto [path, summary] = write_checkpoint(
      std::move(manifest),
      [&](const std::string& tensor, detail::ElementRange elements, void* memory) {
        source.read(tensor, elements, memory);
      },
      options.to, output);
  output.out << fmt::format(
      "{}: adapters of {}: {} parameters ({})\ntrain on from it with "
      "--resume-weights-only {}\n",
      path, describe(source.lora()), spec.parameters(), summary, options.to);
  return 0;
}

}  // namespace

int checkpoint_import(const CheckpointOptions& options, const Output& output) {
  detail::FileSystem& files = detail::posix_file_system();
  if (is_peft(files, options.path)) return import_peft(options, output);
  if (!options.base.empty()) {
    throw ConfigurationError(fmt::format("--base is of adapters of PEFT's, and {} holds none ({})",
                                         options.path, peft_config_name));
  }
  const HuggingFaceModel source(files, options.path, options.model, options.models,
                                {options.partial, parse_renames(options.rename)});
  require_empty(files, options.to);
  checkpoint::Manifest manifest;
  const RunIdentity identity = identity_of(source.model());
  const ModelSpec spec = identity.model->spec(identity.sequence);
  manifest.layout = layout_of(spec, [&](const std::string& tensor) { return source.has(tensor); });
  manifest.numerics = "imported from " + source.dtype();
  manifest.run.user = identity.to_json();
  std::int64_t parameters = 0;
  for (const checkpoint::UnitRecord& unit : manifest.layout.units) {
    for (const checkpoint::TensorRecord& tensor : unit.tensors) parameters += tensor.shape.elements();
  }
  const auto [path, summary] = write_checkpoint(
      std::move(manifest),
      [&](const std::string& tensor, detail::ElementRange elements, void* memory) {
        source.read(tensor, elements, DataType::float32, memory);
      },
      options.to, output);
  for (const std::string& line : source.differences()) output.out << line << "\n";
  const bool whole = parameters == spec.parameters();
  output.out << fmt::format("{}: {} parameters{} ({})\ntrain on from it with --resume-weights-only {}{}\n",
                            path, parameters,
                            whole ? "" : fmt::format(" of the model's {}", spec.parameters()), summary,
                            options.to, whole ? "" : " --partial");
  return 0;
}

}  // namespace tranche::tools
