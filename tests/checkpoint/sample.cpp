#include "sample.h"

#include <gtest/gtest.h>

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

namespace {

Layout layout_on(const Mesh& mesh) {
  return make_layout(sample_units(), {{"exp_avg", DataType::float32}, {"exp_avg_sq", DataType::bfloat16}},
                     DataType::float32, DataType::bfloat16, mesh);
}

}  // namespace

Layout sample_layout(int world) {
  return layout_on(Mesh(world));
}

Layout sample_layout(const std::string& mesh, int ranks) {
  return layout_on(Mesh::parse(mesh, ranks));
}

Layout boxed_layout() {
  Layout layout;
  layout.world = 4;
  layout.mesh = {{"shard", 2}, {"tensor", 2}};
  const Shape fused{24, 5}, out{7, 16};
  UnitRecord unit{"h", 1, {}, {}};
  unit.tensors = {{"h.qkv", fused, false, {"h.alias"}},
                  {"h.out", out, false, {}},
                  {"h.ln", Shape{13}, false, {}},
                  {"h.mask", Shape{9}, true, {}}};
  BufferRecord split{"split", false, {"shard"}, {}};
  for (int t = 0; t < 2; ++t) {
    // A rank has the rows of one head each of queries, keys and values, and columns of the output.
    const Box heads{{4 * t, 8, 3, 4}, {0, 5, 1, 5}}, columns{{0, 7, 1, 7}, {8 * t, 8, 1, 8}};
    split.instances.push_back({{{0, heads, 0}, {1, columns, 64}}, {{t, 0, 52, 0}, {2 + t, 52, 128, 0}}});
  }
  const BufferRecord alike{
      "alike",
      false,
      {"shard", "tensor"},
      {{{{2, whole_box(Shape{13}), 0}}, {{2, 0, 4, 0}, {0, 4, 8, 0}, {1, 8, 12, 0}, {3, 12, 16, 0}}}}};
  const BufferRecord frozen{
      "frozen", true, {"shard", "tensor"}, {{{{3, whole_box(Shape{9}), 0}}, {{1, 0, 7, 0}, {3, 7, 9, 0}}}}};
  unit.buffers = {split, alike, frozen};
  layout.units = {unit};
  layout.sections = {{"weights", "weight", DataType::float32, false},
                     {"frozen", "weight", DataType::bfloat16, true},
                     {"state/exp_avg", "exp_avg", DataType::bfloat16, false},
                     {"state/exp_avg_sq", "exp_avg_sq", DataType::uint8, false, {"q8", 4, 6}}};
  layout.place();
  return layout;
}

std::int64_t element_of(const Box& box, const Shape& shape, std::int64_t number) {
  std::int64_t element = 0, row = 1;
  for (std::size_t a = box.size(); a-- > 0;) {
    element += box[a].index(number % box[a].size()) * row;
    number /= box[a].size();
    row *= shape.extents()[a];
  }
  return element;
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

std::byte sample_byte(std::string_view kind, std::string_view tensor, std::int64_t block, std::int64_t byte,
                      int variant) {
  const float value = sample_value(kind, tensor, block * 64 + byte, DataType::float32, variant);
  return static_cast<std::byte>(static_cast<int>((value + 0.5f) * 255));
}

std::vector<std::byte> sample_piece(const Layout& layout, const SectionPiece& piece, int variant) {
  const SectionRecord& kept = layout.sections[static_cast<std::size_t>(piece.section)];
  const UnitRecord& unit = layout.units[static_cast<std::size_t>(piece.unit)];
  const InstanceRecord& instance = unit.buffers[static_cast<std::size_t>(piece.buffer)]
                                       .instances[static_cast<std::size_t>(piece.instance)];
  const detail::ElementRange range = piece.range;
  std::vector<std::byte> bytes(static_cast<std::size_t>(kept.bytes(range.size())));
  for (const PlacedTensor& placed : instance.tensors) {
    const TensorRecord& tensor = unit.tensors[static_cast<std::size_t>(placed.tensor)];
    const detail::ElementRange part =
        detail::intersect({placed.offset, placed.offset + elements_of(placed.box)}, range);
    const std::int64_t block = kept.block.elements;
    for (std::int64_t e = part.begin; e < part.end; e += block) {
      const std::int64_t element = element_of(placed.box, tensor.shape, e - placed.offset);
      std::byte* const to = bytes.data() + kept.bytes(e - range.begin);
      if (block > 1) {
        for (std::int64_t b = 0; b < kept.block.bytes; ++b) {
          to[b] = sample_byte(kept.kind, tensor.name, element / block, b, variant);
        }
        continue;
      }
      const float value = sample_value(kept.kind, tensor.name, element, kept.dtype, variant);
      convert(DataType::float32, &value, kept.dtype, to, 1);
    }
  }
  return bytes;
}

void expect_sample(Reader& reader, int variant) {
  for (const StoredTensor& tensor : reader.tensors()) {
    const std::int64_t elements = tensor.shape.elements();
    for (const std::string& kind : reader.kinds(tensor)) {
      const auto section = static_cast<std::size_t>(reader.layout().find_section(kind, tensor.frozen));
      const BlockFormat& block = reader.layout().sections[section].block;
      if (!block.name.empty()) {
        const std::int64_t blocks = divide_round_up(elements, block.elements);
        std::vector<std::byte> bytes(static_cast<std::size_t>(blocks * block.bytes));
        reader.read_tensor(tensor.name, kind, {0, elements}, DataType::uint8, bytes.data());
        for (std::int64_t b = 0; b < blocks * block.bytes; ++b) {
          ASSERT_EQ(bytes[static_cast<std::size_t>(b)],
                    sample_byte(kind, tensor.name, b / block.bytes, b % block.bytes, variant))
              << kind << " of " << tensor.name << " byte " << b;
        }
        continue;
      }
      std::vector<float> values(static_cast<std::size_t>(elements));
      reader.read_tensor(tensor.name, kind, {0, elements}, DataType::float32, values.data());
      for (std::int64_t e = 0; e < elements; ++e) {
        ASSERT_EQ(values[static_cast<std::size_t>(e)],
                  sample_value(kind, tensor.name, e, reader.dtype(tensor, kind), variant))
            << kind << " of " << tensor.name << " element " << e;
      }
    }
  }
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
    const auto bytes = sample_piece(plan.layout(), piece, variant);
    if (way == Way::image) {
      std::memcpy(memory + plan.offset_of(piece), bytes.data(), bytes.size());
    } else {
      writer.put(piece, bytes.data());
    }
  }
  if (way == Way::image) writer.write_image({memory, static_cast<std::size_t>(plan.file_bytes())});
  return writer.finish();
}

std::string save_sample(Storage storage, RunFolder& run, const Layout& layout, std::int64_t step, Way way,
                        int variant, const std::string& user) {
  Manifest manifest;
  manifest.layout = layout;
  manifest.stage = 2;
  manifest.numerics = "cpu test";
  manifest.run = sample_run(step);
  if (!user.empty()) manifest.run.user = user;
  for (int rank = 0; rank < layout.world; ++rank) {
    const ShardPlan plan(layout, rank, step);
    if (rank == 0) run.prepare(step, plan.file_bytes() * layout.world);
    const ShardRecord record = write_sample_shard(storage, plan, run.temporary(step), way, variant);
    manifest.shards.push_back(shard_record_from_text(to_text(record), "a rank's record"));
  }
  return run.commit(manifest, make_master_image(manifest.layout), {{"tokenizer.json", "{\"sample\": true}"}});
}

std::string save_sample(Storage storage, const std::string& parent, const Layout& layout, std::int64_t step,
                        Way way, int variant) {
  RunFolder run(storage, parent, 0x1234);
  return save_sample(storage, run, layout, step, way, variant);
}

}  // namespace tranche::testing
