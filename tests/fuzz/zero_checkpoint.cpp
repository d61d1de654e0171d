#include "tests/fuzz/zero_checkpoint.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "checkpoint/digest.h"
#include "checkpoint/shard_plan.h"
#include "tools/train/run_identity.h"
#include "tranche/models/gpt.h"

namespace tranche::fuzz {

using namespace checkpoint;

namespace {

constexpr std::string_view first_line = "{\"manifest_digest\": \"0123456789abcdef\",\n";
constexpr std::int64_t most_leaves = 512;

/// The leaf digests of `bytes` zero bytes, from the beginning of a block.
std::vector<std::uint64_t> zero_leaves(std::int64_t bytes) {
  static const std::array<std::byte, leaf_bytes> zeros{};
  static const std::uint64_t whole = digest_of(zeros);
  std::vector<std::uint64_t> leaves(static_cast<std::size_t>(bytes / leaf_bytes), whole);
  if (const std::int64_t rest = bytes % leaf_bytes; rest > 0) {
    leaves.push_back(digest_of(std::span(zeros).first(static_cast<std::size_t>(rest))));
  }
  return leaves;
}

void make_zero(FileRecord& file) {
  for (std::size_t b = 0; b < file.blocks.size(); ++b) {
    const std::int64_t begin = static_cast<std::int64_t>(b) * block_bytes;
    file.blocks[b] = block_digest(zero_leaves(std::min(block_bytes, file.digested_bytes - begin)));
  }
}

}  // namespace

std::string with_digest(std::string_view body) {
  std::string text(first_line);
  text.replace(text.find("0123"), 16, to_hex(digest_of(body)));
  return text.append(body);
}

std::string without_digest(std::string_view text) {
  return std::string(text.substr(first_line.size()));
}

std::vector<std::pair<std::string, MemoryFiles::Content>> zero_checkpoint(Manifest manifest) {
  std::vector<std::pair<std::string, MemoryFiles::Content>> files;
  make_zero(manifest.master);
  files.push_back({manifest.master.name, {manifest.master.bytes}});
  for (ShardRecord& shard : manifest.shards) {
    make_zero(shard.file);
    // The table of leaves is filled block by block; only a block's last leaf may be short, so a few blocks
    // are enough.
    const std::vector<std::uint64_t> leaves =
        zero_leaves(std::min(shard.file.digested_bytes, most_leaves * leaf_bytes));
    std::string table(leaves.size() * 8, '\0');
    std::memcpy(table.data(), leaves.data(), table.size());
    files.push_back({shard.file.name, {shard.file.bytes, {{shard.file.digested_bytes, table}}}});
  }
  const std::string text = to_text(manifest);
  files.push_back({std::string(manifest_name), {static_cast<std::int64_t>(text.size()), {{0, text}}}});
  return files;
}

namespace {

/// Two ranks hold alternate indices of each tensor's first dimension, also of the blocks of trainable
/// tensors.
Layout boxed(Layout layout) {
  layout.world = 2;
  layout.mesh = {{"tensor", 2}};
  for (UnitRecord& unit : layout.units) {
    for (BufferRecord& buffer : unit.buffers) {
      if (buffer.instances.empty()) continue;
      const InstanceRecord whole = buffer.instances.front();
      buffer.instances.clear();
      for (int rank = 0; rank < 2; ++rank) {
        InstanceRecord instance;
        std::int64_t end = 0;
        for (PlacedTensor placed : whole.tensors) {
          Slice& rows = placed.box.front();
          rows = {rank, 2, (rows.size() + 1 - rank) / 2, 1};
          placed.offset = end;
          end = round_up(end + elements_of(placed.box), 64);
          instance.tensors.push_back(placed);
        }
        instance.ranges = {{rank, 0, end, 0}};
        buffer.instances.push_back(instance);
      }
    }
  }
  layout.place();
  return layout;
}

}  // namespace

Manifest sample_manifest(int world, bool in_boxes) {
  models::GptConfig model;
  model.layers = model.heads = 1;
  model.width = 4;
  model.vocabulary = 256;
  model.positions = 8;
  std::vector<UnitDescription> units;
  const ModelSpec spec = models::Gpt::spec(model, model.positions);
  for (const UnitSpec& unit : spec.units()) {
    UnitDescription description{unit.name, unit.uses_per_micro_batch, {}};
    for (const TensorSpec& tensor : unit.tensors) {
      description.tensors.push_back(
          {tensor.name, tensor.shape, tensor.name == "h.0.ln_1.bias", tensor.aliases});
    }
    units.push_back(std::move(description));
  }
  tools::RunIdentity identity;
  identity.model = std::make_shared<const models::Gpt>(model);
  identity.sequence = model.positions;
  identity.data = "text.txt";
  Manifest manifest;
  Layout& layout = manifest.layout;
  layout = make_layout(units, {{"exp_avg", DataType::float32}}, DataType::float32, DataType::bfloat16, world);
  if (in_boxes) layout = boxed(layout);
  world = layout.world;
  const auto ranks = static_cast<std::size_t>(world);
  std::vector<std::int64_t> cuts(ranks + 1, 6);
  cuts.front() = 0;
  add_arrays(layout, {{"order", DataType::int64, false, {Shape{2, 3}}, ranges_between(cuts)},
                      {"left", DataType::uint8, true, std::vector<Shape>(ranks, Shape{5}), {}}});
  for (int rank = 0; rank < world; ++rank) {
    const ShardPlan plan(layout, rank, 6);
    ShardRecord shard{
        rank, {plan.file_name(), plan.file_bytes(), plan.table_offset(), {}}, plan.offsets(), {}};
    shard.file.blocks.resize(static_cast<std::size_t>(divide_round_up(plan.table_offset(), block_bytes)));
    shard.array_offsets = plan.array_offsets();
    make_zero(shard.file);
    manifest.shards.push_back(std::move(shard));
  }
  manifest.master = {std::string(master_name), 4096, 4096, {0}};
  make_zero(manifest.master);
  manifest.library = "0.1.0";
  manifest.hdf5 = hdf5_version();
  manifest.sequence = 3;
  manifest.created = 1700000000;
  manifest.stage = 2;
  manifest.numerics = "cpu";
  RunState& run = manifest.run;
  run.step = run.applied = 6;
  run.samples = 24;
  run.tokens = 192;
  run.random = R"({"seed": 42})";
  run.loss_scaler = R"({"scale": 65536.0, "clean_steps": 3, "hysteresis_left": 2})";
  run.schedule = R"({"type": "WarmupLR", "params": {"warmup_num_steps": 10}, "total_steps": 100})";
  run.optimizer = R"({"type": "AdamW"})";
  run.config = R"({"train_batch_size": 4, "bf16": {"enabled": true}, "gradient_clipping": 1.0})";
  run.user = identity.to_json();
  return manifest;
}

}  // namespace tranche::fuzz
