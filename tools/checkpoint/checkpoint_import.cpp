// tranche checkpoint import.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <ostream>
#include <random>
#include <span>
#include <utility>

#include "checkpoint/companions.h"
#include "checkpoint/folder.h"
#include "checkpoint/shard_writer.h"
#include "engine/adapter_base.h"
#include "tools/checkpoint/adapters.h"
#include "tools/checkpoint/checkpoint_command.h"
#include "tools/checkpoint/checkpoint_source.h"
#include "tools/checkpoint/hugging_face.h"
#include "tools/checkpoint/model_files.h"
#include "tools/checkpoint/peft.h"
#include "tools/terminal.h"
#include "tools/transfer_progress.h"
#include "tranche/core/error.h"
#include "tranche/training/tokenizer.h"

namespace tranche::tools {

namespace {

/// The layout of the weights as a training run of one rank stores them, without optimizer state.
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

/// Counts weights that are infinite or NaN.
class NonFinite {
 public:
  void look_at(const std::string& tensor, std::int64_t first, std::span<const float> values) {
    seen_ += static_cast<std::int64_t>(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (std::isfinite(values[i])) continue;
      if (count_++ == 0) {
        first_ =
            fmt::format("element {} of {} ({})", first + static_cast<std::int64_t>(i), tensor, values[i]);
      }
    }
  }
  /// A line for people; empty if there are none.
  std::string note() const {
    if (count_ == 0) return {};
    return fmt::format(
        "note: {} of {} weights {} not finite, the first one {}: training and generation end with an error\n",
        count_, seen_, count_ == 1 ? "is" : "are", first_);
  }

 private:
  std::int64_t seen_ = 0, count_ = 0;
  std::string first_;
};

/// Copies all elements of the layout's weights in order, a part at a time.
class Copier {
 public:
  Copier(const Read& source, checkpoint::ShardWriter& writer, TransferProgress& progress,
         NonFinite& non_finite)
      : source_(source), writer_(writer), progress_(progress), non_finite_(non_finite), memory_(stride) {}

  /// `piece`: the weights of a whole flat buffer in the file.
  void copy(checkpoint::SectionPiece piece, const checkpoint::UnitRecord& unit) {
    std::int64_t at = 0;
    const auto& buffer = unit.buffers[static_cast<std::size_t>(piece.buffer)];
    for (const checkpoint::PlacedTensor& placed : buffer.instances.front().tensors) {
      const checkpoint::TensorRecord& tensor = unit.tensors[static_cast<std::size_t>(placed.tensor)];
      zeros(piece, {at, placed.offset});
      for (std::int64_t begin = 0; begin < tensor.shape.elements(); begin += stride) {
        const detail::ElementRange part{begin, std::min(begin + stride, tensor.shape.elements())};
        source_(tensor.name, part, memory_.data());
        non_finite_.look_at(tensor.name, part.begin,
                            std::span(memory_).first(static_cast<std::size_t>(part.size())));
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
    // Padding is shorter than the memory, because it only aligns tensors and shards.
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
  NonFinite& non_finite_;
  std::vector<float> memory_;
};

std::uint64_t draw_token() {
  std::random_device draw;
  return static_cast<std::uint64_t>(draw()) << 32 | draw();
}

void require_empty(detail::FileSystem& files, const std::string& folder) {
  const std::string within = checkpoint::enclosing_checkpoint(files, folder);
  if (!within.empty()) {
    throw CheckpointError(
        fmt::format("cannot import to {}: {} is a checkpoint; name another folder", folder, within));
  }
  if (checkpoint::list_checkpoints(files, folder).empty()) return;
  throw CheckpointError(
      fmt::format("cannot import to {}: it holds checkpoints already, of which this would be the newest; "
                  "name another folder",
                  folder));
}

/// Writes the single-rank checkpoint that the manifest describes; returns its path and a text about its size
/// and time. Reports weights that are not finite.
std::pair<std::string, std::string> write_checkpoint(checkpoint::Manifest manifest, const Read& read,
                                                     const checkpoint::Companions& companions,
                                                     const std::string& to, const Output& output) {
  const checkpoint::LocalStorage local;
  const checkpoint::ShardPlan plan(manifest.layout, 0, 0);
  checkpoint::RunFolder folder(local, to, draw_token());
  TransferProgress progress("imported", plan.payload_bytes(), output.terminal,
                            [&](std::string_view text) { draw(output.out, text); });
  folder.prepare(0, plan.file_bytes() + checkpoint::bytes_of(companions));
  std::string path;
  NonFinite non_finite;
  try {
    checkpoint::ShardWriter writer(local, plan, folder.temporary(0));
    Copier copier(read, writer, progress, non_finite);
    for (const checkpoint::SectionPiece& piece : plan.pieces()) {
      copier.copy(piece, manifest.layout.units[static_cast<std::size_t>(piece.unit)]);
    }
    manifest.shards.push_back(writer.finish());
    path = folder.commit(manifest, checkpoint::make_master_image(manifest.layout), companions);
  } catch (...) {
    folder.discard(0);
    throw;
  }
  progress.finish();
  output.out << non_finite.note();
  return {path, progress.summary()};
}

/// The base's companions, with the adapters' own configuration and, if they have one, their tokenizer.
/// `folder` is the adapters' folder.
checkpoint::Companions companions_beside(checkpoint::Companions base, checkpoint::Companions own,
                                         const std::string& folder, std::vector<std::string>& notes) {
  if (have_tokenizer(own)) {
    if (have_tokenizer(base))
      notes.push_back(fmt::format("the tokenizer of {} takes the place of the base's", folder));
    for (const checkpoint::Companion& old : files_to_export(base, /*settings=*/false))
      std::erase_if(base, [&](const auto& one) { return one.name == old.name; });
  }
  for (checkpoint::Companion& companion : own) {
    // Adapters name the folder of their base.
    if (companion.name == config_name)
      notes.push_back(fmt::format("{} of {} does not travel: the model is the base's", config_name, folder));
    if (companion.name == origin_name || companion.name == config_name) continue;
    std::erase_if(base, [&](const auto& one) { return one.name == companion.name; });
    base.push_back(std::move(companion));
  }
  return base;
}

void say(const std::vector<std::string>& notes, const Output& output) {
  for (const std::string& note : notes) output.out << "note: " << note << "\n";
}

/// Adds a line about weights in the folder that are not among those that were read.
void note_other_weights(detail::FileSystem& files, const HuggingFaceModel& source,
                        std::vector<std::string>& notes) {
  const std::string folder = source.folder();
  const std::vector<std::string>& read = source.files_read();
  const bool single = files.exists(detail::join_path(folder, "model.safetensors"));
  std::string left;
  for (const detail::DirectoryEntry& entry : files.list(folder)) {
    const std::string& name = entry.name;
    if (!name.ends_with(".safetensors") || std::find(read.begin(), read.end(), name) != read.end()) continue;
    left += (left.empty() ? "" : ", ") + name;
  }
  if (left.empty()) return;
  notes.push_back(fmt::format("weights that were not read in {}: {} ({} has those of the model)", folder,
                              left, single ? "model.safetensors" : "model.safetensors.index.json"));
}

/// Adds a line if the tokenizer among a folder's companions cannot be read.
void note_unusable_tokenizer(const checkpoint::Companions& companions, const std::string& folder,
                             std::vector<std::string>& notes) {
  if (!have_tokenizer(companions)) return;
  try {
    (void)training::load_tokenizer(folder);
  } catch (const ConfigurationError& problem) {
    notes.push_back("the tokenizer is taken as it is, but tranche cannot use it for text: " +
                    problem.message());
  }
}

/// The companions of the weights. A configuration given by --model replaces the folder's.
checkpoint::Companions companions_of(const CheckpointOptions& options, const std::string& folder,
                                     std::vector<std::string>& notes) {
  checkpoint::Companions companions = read_model_files(detail::posix_file_system(), folder, notes);
  if (options.model.empty() || checkpoint::find_companion(companions, config_name) == nullptr)
    return companions;
  std::erase_if(companions, [](const auto& one) { return one.name == config_name; });
  notes.push_back(
      fmt::format("{} of {} does not travel: the model is --model {}", config_name, folder, options.model));
  return companions;
}

/// Imports PEFT adapters beside a base, as a checkpoint that contains only adapters.
int import_peft(const CheckpointOptions& options, const Output& output) {
  if (options.partial || !options.rename.empty()) {
    throw ConfigurationError(fmt::format(
        "--partial and --rename are for the weights of a model, and {} holds PEFT adapters", options.path));
  }
  if (options.base.empty()) {
    throw ConfigurationError(
        fmt::format("{} holds PEFT adapters: give the checkpoint of the model that they belong to with "
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
  std::vector<std::string> beside;
  checkpoint::Companions own = read_model_files(files, options.path, beside);
  note_unusable_tokenizer(own, options.path, beside);
  checkpoint::Companions of_base = checkpoint::read_companions(files, base.folder(), base.manifest());
  const auto other = [&] { return other_base(own, of_base, options.path); };
  const PeftAdapters source = [&] {
    try {
      return PeftAdapters(files, options.path, *identity.model, base);
    } catch (const CheckpointError& problem) {
      const std::string text = other();
      throw CheckpointError(problem.message() + (text.empty() ? "" : "; " + text));
    }
  }();
  if (std::string text = other(); !text.empty()) notes.push_back(std::move(text));
  require_empty(files, options.to);
  checkpoint::Manifest manifest;
  Config config;
  config.lora = source.lora();
  manifest.run.config =
      nlohmann::json{{"tranche", {{"lora", nlohmann::json::parse(adapters_text(config.to_json()))}}}}.dump();
  manifest.run.user = identity.to_json();
  manifest.numerics = "imported from PEFT";
  const ModelSpec plain = identity.model->spec(identity.sequence);
  manifest.base = checkpoint::BaseRecord{
      std::filesystem::absolute(base.folder()).lexically_normal().string(), "fp32",
      detail::to_text(detail::AdapterBase(plain, base).digest(DataType::float32)), std::nullopt};
  const checkpoint::Companions companions =
      companions_beside(std::move(of_base), std::move(own), options.path, beside);
  const ModelSpec spec = spec_with_adapters(*identity.model, manifest);
  manifest.layout = layout_of(spec, [](const std::string&) { return true; });
  const auto [path, summary] = write_checkpoint(
      std::move(manifest),
      [&](const std::string& tensor, detail::ElementRange elements, void* memory) {
        source.read(tensor, elements, memory);
      },
      companions, options.to, output);
  say(notes, output);
  say(beside, output);
  say(source.notes(), output);
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
    throw ConfigurationError(fmt::format("--base is for PEFT adapters, and {} holds none: it has no {}",
                                         options.path, peft_config_name));
  }
  const HuggingFaceModel source(files, options.path, options.model, options.models,
                                {options.partial, parse_renames(options.rename)});
  require_empty(files, options.to);
  checkpoint::Manifest manifest;
  RunIdentity identity = identity_of(source.model());
  const ModelSpec spec = identity.model->spec(identity.sequence);
  manifest.layout = layout_of(spec, [&](const std::string& tensor) { return source.has(tensor); });
  manifest.numerics = "imported from " + source.dtype();
  std::vector<std::string> notes;
  const checkpoint::Companions companions = companions_of(options, source.folder(), notes);
  note_unusable_tokenizer(companions, source.folder(), notes);
  if (!options.path.ends_with(".safetensors")) note_other_weights(files, source, notes);
  if (have_tokenizer(companions))
    identity.tokenizer = {Tokenizer::Kind::tokens, identity.model->shape().vocabulary};
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
      companions, options.to, output);
  say(source.differences(), output);
  say(notes, output);
  const bool whole = parameters == spec.parameters();
  output.out << fmt::format("{}: {} parameters{} ({})\ntrain on from it with --resume-weights-only {}{}\n",
                            path, parameters,
                            whole ? "" : fmt::format(" of the model's {}", spec.parameters()), summary,
                            options.to, whole ? "" : " --partial");
  return 0;
}

}  // namespace tranche::tools
