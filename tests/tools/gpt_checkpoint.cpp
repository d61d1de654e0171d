#include "tests/tools/gpt_checkpoint.h"

#include <fstream>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/shard_writer.h"
#include "engine/stages.h"
#include "tranche/models/gpt.h"

namespace tranche::tools::test {

models::GptConfig tiny_gpt(std::int64_t vocabulary) {
  models::GptConfig model;
  model.layers = 2;
  model.heads = 3;
  model.width = 15;
  model.inner = 31;
  model.positions = 24;
  model.vocabulary = vocabulary;
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0;
  return model;
}

RunIdentity tiny_identity(std::int64_t vocabulary) {
  RunIdentity identity;
  identity.model = std::make_shared<models::Gpt>(tiny_gpt(vocabulary));
  identity.sequence = 16;
  identity.data = "some/text.txt";
  if (vocabulary != 256) identity.tokenizer = {Tokenizer::Kind::tokens, vocabulary};
  return identity;
}

float sample_value(std::string_view kind, std::string_view tensor, std::int64_t element, int variant) {
  std::uint64_t hash = 0xcbf29ce484222325u + static_cast<std::uint64_t>(variant);
  const auto add = [&hash](std::uint64_t value) { hash = (hash ^ value) * 0x100000001b3u; };
  for (const char c : kind) add(static_cast<unsigned char>(c));
  for (const char c : tensor) add(static_cast<unsigned char>(c));
  add(static_cast<std::uint64_t>(element));
  add(hash >> 31);
  return (static_cast<float>(hash >> 40) / 16777216.0f - 0.5f) * 2.0f;
}

std::string save_gpt(const std::string& folder, const models::GptConfig& model,
                     const SampleOptions& options) {
  std::vector<checkpoint::UnitDescription> units;
  const ModelSpec spec = models::Gpt::spec(model, model.positions);
  const Mesh mesh = Mesh::parse(options.mesh, options.world);
  Config config;
  config.mesh = options.mesh;
  const detail::Stages stages = detail::divide(spec, config, mesh.size(MeshAxis::pipeline));
  std::size_t number = 0;
  for (const UnitSpec& unit : spec.units()) {
    checkpoint::UnitDescription description{unit.name, unit.uses_per_micro_batch, {}};
    for (const TensorSpec& tensor : unit.tensors) {
      description.tensors.push_back({tensor.name, tensor.shape, false, tensor.aliases});
      if (!stages.tensors.empty()) {
        description.tensors.back().stages = stages.tensors[number].stages;
        description.tensors.back().uses = stages.tensors[number++].uses;
      }
    }
    units.push_back(std::move(description));
  }
  const checkpoint::LocalStorage local;
  checkpoint::Manifest manifest;
  manifest.layout =
      checkpoint::make_layout(units, {{"exp_avg", DataType::float32}, {"exp_avg_sq", DataType::float32}},
                              DataType::float32, DataType::float32, mesh);
  checkpoint::add_arrays(manifest.layout, options.arrays);
  manifest.stage = options.stage;
  manifest.numerics = "test";
  manifest.run.step = manifest.run.applied = options.step;
  manifest.run.samples = 4 * options.step;
  manifest.run.tokens = 64 * options.step;
  manifest.run.optimizer = R"({"type": "AdamW"})";
  manifest.run.user = options.user.empty() ? tiny_identity(model.vocabulary).to_json() : options.user;
  checkpoint::RunFolder run(local, folder, 77);
  for (int rank = 0; rank < options.world; ++rank) {
    const checkpoint::ShardPlan plan(manifest.layout, rank, options.step);
    if (rank == 0) run.prepare(options.step, plan.file_bytes() * options.world);
    checkpoint::ShardWriter writer(local, plan, run.temporary(options.step));
    for (const checkpoint::SectionPiece& piece : plan.pieces()) {
      if (piece.range.empty()) continue;
      const auto& section = manifest.layout.sections[static_cast<std::size_t>(piece.section)];
      const auto& unit = manifest.layout.units[static_cast<std::size_t>(piece.unit)];
      std::vector<float> values(static_cast<std::size_t>(piece.range.size()), 0.0f);
      for (const checkpoint::PlacedTensor& placed : unit.buffers[static_cast<std::size_t>(piece.buffer)]
                                                        .instances[static_cast<std::size_t>(piece.instance)]
                                                        .tensors) {
        const checkpoint::TensorRecord& tensor = unit.tensors[static_cast<std::size_t>(placed.tensor)];
        const detail::ElementRange part =
            detail::intersect(piece.range, {placed.offset, placed.offset + tensor.shape.elements()});
        for (std::int64_t e = part.begin; e < part.end; ++e) {
          values[static_cast<std::size_t>(e - piece.range.begin)] =
              sample_value(section.kind, tensor.name, e - placed.offset, options.variant);
        }
      }
      writer.put(piece, values.data());
    }
    for (std::size_t a = 0; a < options.arrays.size(); ++a) {
      const auto array = static_cast<int>(a);
      const std::vector<std::byte> zeros(static_cast<std::size_t>(plan.array_bytes(array)));
      writer.put_array(array, zeros.data());
    }
    manifest.shards.push_back(writer.finish());
  }
  return run.commit(manifest, make_master_image(manifest.layout));
}

void flip(const std::string& path, std::int64_t byte) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(byte);
  const char value = static_cast<char>(file.get() ^ 0x10);
  file.seekp(byte);
  file.put(value);
}

}  // namespace tranche::tools::test
