// tranche checkpoint import.

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <ostream>
#include <random>

#include "checkpoint/folder.h"
#include "checkpoint/shard_writer.h"
#include "tools/checkpoint_command.h"
#include "tools/checkpoint_source.h"
#include "tools/hugging_face.h"
#include "tools/terminal.h"
#include "tools/transfer_progress.h"
#include "tranche/core/error.h"
#include "tranche/models/gpt.h"

namespace tranche::tools {

namespace {

/// Weights as a training run of one rank keeps them; no optimizer state.
checkpoint::Layout layout_of(const models::GptConfig& model) {
  std::vector<checkpoint::UnitDescription> units;
  const ModelSpec spec = models::Gpt::spec(model, model.positions);
  for (const UnitSpec& unit : spec.units()) {
    checkpoint::UnitDescription description{unit.name, unit.uses_per_micro_batch, {}};
    for (const TensorSpec& tensor : unit.tensors) {
      description.tensors.push_back({tensor.name, tensor.shape, false, tensor.aliases});
    }
    units.push_back(std::move(description));
  }
  return checkpoint::make_layout(units, {}, DataType::float32, DataType::float32, 1);
}

/// All elements of the layout's weights, in order and in pieces.
class Copier {
 public:
  Copier(const HuggingFaceModel& source, int weights, checkpoint::ShardWriter& writer,
         TransferProgress& progress)
      : source_(source), weights_(weights), writer_(writer), progress_(progress), piece_(stride) {}

  void unit(int index, const checkpoint::UnitRecord& unit) {
    std::int64_t at = 0;
    for (const checkpoint::TensorRecord& tensor : unit.tensors) {
      zeros(index, {at, tensor.offset});
      for (std::int64_t begin = 0; begin < tensor.shape.elements(); begin += stride) {
        const detail::ElementRange part{begin, std::min(begin + stride, tensor.shape.elements())};
        source_.read(tensor.name, part, DataType::float32, piece_.data());
        put(index, {tensor.offset + part.begin, tensor.offset + part.end});
      }
      at = tensor.offset + tensor.shape.elements();
    }
    zeros(index, {at, unit.trainable_cuts.back()});
  }

 private:
  static constexpr std::int64_t stride = std::int64_t{1} << 20;

  void zeros(int unit, detail::ElementRange range) {
    if (range.empty()) return;
    // Padding is shorter than a piece: it only aligns tensors and shards.
    std::fill_n(piece_.begin(), range.size(), 0.0f);
    put(unit, range);
  }
  void put(int unit, detail::ElementRange range) {
    writer_.put(weights_, unit, range, piece_.data());
    progress_.add(range.size() * static_cast<std::int64_t>(sizeof(float)));
  }

  const HuggingFaceModel& source_;
  int weights_;  ///< section
  checkpoint::ShardWriter& writer_;
  TransferProgress& progress_;
  std::vector<float> piece_;
};

std::uint64_t draw_token() {
  std::random_device draw;
  return static_cast<std::uint64_t>(draw()) << 32 | draw();
}

}  // namespace

int checkpoint_import(const CheckpointOptions& options, const Output& output) {
  const checkpoint::LocalStorage local;
  detail::FileSystem& files = detail::posix_file_system();
  const HuggingFaceModel source(files, options.path, options.model);
  if (!checkpoint::list_checkpoints(files, options.to).empty()) {
    throw CheckpointError(
        fmt::format("cannot import to {}: it holds checkpoints already, of which this would be the newest; "
                    "name another folder",
                    options.to));
  }
  checkpoint::Manifest manifest;
  manifest.layout = layout_of(source.config());
  RunIdentity identity;
  identity.model = source.config();
  identity.sequence = source.config().positions;
  if (source.config().vocabulary != 256)
    identity.tokenizer = {Tokenizer::Kind::tokens, source.config().vocabulary};
  manifest.numerics = "imported from " + source.dtype();
  manifest.run.user = identity.to_json();

  const checkpoint::ShardPlan plan(manifest.layout, 0, 0);
  checkpoint::RunFolder folder(local, options.to, draw_token());
  TransferProgress progress("imported", plan.payload_bytes(), output.terminal,
                            [&](std::string_view text) { draw(output.out, text); });
  folder.prepare(0, plan.file_bytes());
  std::string path;
  try {
    checkpoint::ShardWriter writer(local, plan, folder.temporary(0));
    Copier copier(source, manifest.layout.find_section("weight", false), writer, progress);
    for (std::size_t u = 0; u < manifest.layout.units.size(); ++u) {
      copier.unit(static_cast<int>(u), manifest.layout.units[u]);
    }
    manifest.shards.push_back(writer.finish());
    path = folder.commit(manifest);
  } catch (...) {
    folder.discard(0);
    throw;
  }
  progress.finish();
  output.out << fmt::format("{}: {} parameters ({})\ntrain on from it with --resume-weights-only {}\n", path,
                            source.config().parameters(), progress.summary(), options.to);
  return 0;
}

}  // namespace tranche::tools
