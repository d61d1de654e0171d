#include "sample.h"

#include <cstring>
#include <filesystem>

#include "checkpoint/convert.h"
#include "tranche/core/random.h"

namespace tranche::testing {

using namespace checkpoint;

TestStorage::TestStorage(detail::FileSystem& files)
    : files_(files),
      io_(detail::make_block_io({detail::BlockIoEngine::threads, std::int64_t{1} << 20, 1, {}})),
      memory_(make_host_resource(Tier::host)) {}

std::vector<UnitDescription> sample_units() {
  return {
      {"embedding",
       2,
       {{"wte.weight", Shape{101, 7}, false, {"lm_head.weight"}}, {"wpe.weight", Shape{13, 7}, true, {}}}},
      {"h.0",
       1,
       {{"h.0.w", Shape{17, 5, 11}, false, {}},
        {"h.0.b", Shape{3}, false, {}},
        {"h.0.scale", Shape{}, false, {}},
        {"h.0.mask", Shape{31}, true, {}}}},
      {"frozen", 1, {{"f.a", Shape{523}, true, {}}, {"f.b", Shape{2, 2}, true, {}}}},
      {"tail", 1, {{"tail.w", Shape{1009}, false, {}}}}};
}

Layout sample_layout(int world) {
  return make_layout(sample_units(), {{"exp_avg", DataType::float32}, {"exp_avg_sq", DataType::bfloat16}},
                     DataType::float32, DataType::bfloat16, world);
}

float sample_value(std::string_view kind, std::string_view tensor, std::int64_t element, DataType dtype,
                   int variant) {
  std::uint64_t subject = 1469598103934665603u + static_cast<std::uint64_t>(variant);
  for (const std::string_view part : {kind, tensor}) {
    for (const char c : part) subject = (subject ^ static_cast<unsigned char>(c)) * 1099511628211u;
  }
  const float value =
      random_uniform({7, RandomPurpose::test, subject}, static_cast<std::uint64_t>(element)) - 0.5f;
  return dtype == DataType::bfloat16 ? to_float(to_bfloat16(value)) : value;
}

std::vector<std::byte> sample_shard(const Layout& layout, int section, int unit, detail::ElementRange range,
                                    int variant) {
  const SectionRecord& kept = layout.sections[static_cast<std::size_t>(section)];
  std::vector<std::byte> bytes(static_cast<std::size_t>(range.size() * size_of(kept.dtype)));
  for (const TensorRecord& tensor : layout.units[static_cast<std::size_t>(unit)].tensors) {
    if (tensor.frozen != kept.frozen) continue;
    const detail::ElementRange part =
        detail::intersect({tensor.offset, tensor.offset + tensor.shape.elements()}, range);
    for (std::int64_t e = part.begin; e < part.end; ++e) {
      const float value = sample_value(kept.kind, tensor.name, e - tensor.offset, kept.dtype, variant);
      convert(DataType::float32, &value, kept.dtype, bytes.data() + (e - range.begin) * size_of(kept.dtype),
              1);
    }
  }
  return bytes;
}

RunState sample_run(std::int64_t step) {
  RunState run;
  run.step = step;
  run.applied = step - 1;
  run.samples = step * 8;
  run.tokens = step * 8 * 1024;
  run.random = R"({"seed":42})";
  run.loss_scaler = R"({"scale":65536.0,"clean_steps":3,"hysteresis_left":2})";
  run.schedule = R"({"step":5})";
  run.optimizer = R"({"name":"adam","beta1":0.9})";
  run.config = R"({"train_batch_size":8})";
  run.user = R"({"note":"caf\u00e9"})";
  return run;
}

std::string fast_folder() {
  const std::string memory = "/dev/shm";
  std::error_code ignored;
  const bool there =
      std::filesystem::space(memory, ignored).available > (std::uintmax_t{1} << 28) && !ignored;
  return there ? memory + "/tranche" : std::filesystem::read_symlink("/proc/self/exe").parent_path().string();
}

ShardRecord write_sample_shard(Storage storage, const ShardPlan& plan, const std::string& folder, Way way,
                               int variant) {
  ShardWriter writer(storage, plan, folder);
  detail::AlignedBuffer image;
  if (way == Way::image)
    image = detail::AlignedBuffer(storage.memory, plan.file_bytes(), Category::other, "image");
  auto* memory = static_cast<std::byte*>(image.data());
  if (memory != nullptr) std::memset(memory, 0xee, static_cast<std::size_t>(plan.file_bytes()));
  for (const SectionPiece& piece : plan.pieces()) {
    const auto bytes = sample_shard(plan.layout(), piece.section, piece.unit, piece.range, variant);
    if (way == Way::image) {
      std::memcpy(memory + plan.offset_of(piece.section, piece.unit, piece.range), bytes.data(),
                  bytes.size());
    } else {
      writer.put(piece.section, piece.unit, piece.range, bytes.data());
    }
  }
  if (way == Way::image) writer.write_image({memory, static_cast<std::size_t>(plan.file_bytes())});
  return writer.finish();
}

std::string save_sample(Storage storage, RunFolder& run, const Layout& layout, std::int64_t step, Way way,
                        int variant) {
  Manifest manifest;
  manifest.layout = layout;
  manifest.stage = 2;
  manifest.numerics = "cpu test";
  manifest.run = sample_run(step);
  for (int rank = 0; rank < layout.world; ++rank) {
    const ShardPlan plan(layout, rank, step);
    if (rank == 0) run.prepare(step, plan.file_bytes() * layout.world);
    const ShardRecord record = write_sample_shard(storage, plan, run.temporary(step), way, variant);
    manifest.shards.push_back(shard_record_from_text(to_text(record), "a rank's record"));
  }
  return run.commit(manifest);
}

std::string save_sample(Storage storage, const std::string& parent, const Layout& layout, std::int64_t step,
                        Way way, int variant) {
  RunFolder run(storage, parent, 0x1234);
  return save_sample(storage, run, layout, step, way, variant);
}

}  // namespace tranche::testing
