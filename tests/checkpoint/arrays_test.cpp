// The program's own arrays beside a model's state: stored, found again, verified.

#include <gmock/gmock.h>

#include <cstring>
#include <numeric>

#include "../offload/test_folder.h"
#include "checkpoint/reader.h"
#include "sample.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {
namespace {

using detail::ElementRange;
using detail::join_path;
using namespace tranche::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int world = 3;

/// The value of byte `at` of an array, counted in the whole array or in a rank's own.
std::byte byte_of(const ArrayRecord& array, int rank, std::int64_t at) {
  const std::int64_t of = array.per_rank ? rank + 1 : 0;
  return static_cast<std::byte>((at * 37 + of * 101 + static_cast<std::int64_t>(array.name.size())) % 251);
}

/// Adds arrays of every dtype, some smaller than a leaf and some larger than a block; some ranks hold nothing
/// of some of them.
Layout layout_with_arrays() {
  Layout layout = sample_layout(world);
  std::vector<ArrayRecord> arrays{
      {"count", DataType::int64, false, {Shape{}}, ranges_between({0, 1, 1, 1})},
      {"average/of.weights",
       DataType::float32,
       false,
       {Shape{7, 401, 601}},
       ranges_between({0, 300001, 300001, 1687007})},
      {"half", DataType::float16, false, {Shape{77}}, ranges_between({0, 11, 33, 77})},
      {"brain", DataType::bfloat16, false, {Shape{5, 5}}, ranges_between({0, 0, 0, 25})},
      {"double", DataType::float64, false, {Shape{3000}}, ranges_between({0, 1000, 2000, 3000})},
      {"random", DataType::uint8, true, {Shape{5}, Shape{0}, Shape{16385}}, {}},
      {"draws", DataType::int32, true, {Shape{2, 3}, Shape{2, 3}, Shape{2, 3}}, {}},
      {"words", DataType::uint16, true, {Shape{1}, Shape{2}, Shape{3}}, {}}};
  for (int i = 0; i < 40; ++i) {  // the file's own structure grows with their number
    arrays.push_back({"many/" + std::string(static_cast<std::size_t>(3 * i), 'x') + std::to_string(i),
                      DataType::int32,
                      false,
                      {Shape{9}},
                      ranges_between({0, 3, 6, 9})});
  }
  add_arrays(layout, std::move(arrays));
  return layout;
}

std::vector<std::byte> bytes_of(const ArrayRecord& array, int rank, ElementRange range) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(range.size() * size_of(array.dtype)));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = byte_of(array, rank, range.begin * size_of(array.dtype) + static_cast<std::int64_t>(i));
  }
  return bytes;
}

std::string save(Storage storage, const std::string& parent, const Layout& layout, Way way) {
  RunFolder run(storage, parent, 0x1234);
  Manifest manifest;
  manifest.layout = layout;
  manifest.run = sample_run(5);
  for (int rank = 0; rank < world; ++rank) {
    const ShardPlan plan(layout, rank, 5);
    if (rank == 0) run.prepare(5, plan.file_bytes() * world);
    ShardWriter writer(storage, plan, run.temporary(5));
    detail::AlignedBuffer image(storage.memory, plan.file_bytes(), Category::other, "image");
    auto* memory = static_cast<std::byte*>(image.data());
    std::memset(memory, 0xee, static_cast<std::size_t>(plan.file_bytes()));
    for (const SectionPiece& piece : plan.pieces()) {
      const auto bytes = sample_piece(layout, piece);
      std::memcpy(memory + plan.offset_of(piece), bytes.data(), bytes.size());
      if (way == Way::pieces) writer.put(piece, bytes.data());
    }
    for (std::size_t a = 0; a < layout.arrays.size(); ++a) {
      const auto bytes = bytes_of(layout.arrays[a], rank, layout.arrays[a].range(rank));
      EXPECT_EQ(plan.array_offsets()[a] < 0, bytes.empty());
      if (bytes.empty()) continue;
      std::memcpy(memory + plan.array_offsets()[a], bytes.data(), bytes.size());
      if (way == Way::pieces) writer.put_array(static_cast<int>(a), bytes.data());
    }
    if (way == Way::image) writer.write_image({memory, static_cast<std::size_t>(plan.file_bytes())});
    manifest.shards.push_back(shard_record_from_text(to_text(writer.finish()), "a rank's record"));
  }
  return run.commit(manifest, make_master_image(manifest.layout));
}

class ArraysTest : public ::testing::Test {
 protected:
  detail::FileSystem& files = detail::posix_file_system();
  TestFolder folder{fast_folder()};
  TestStorage storage{files};
  const Layout layout = layout_with_arrays();

  void flip(const std::string& path, const std::string& name, std::int64_t at) {
    std::string text = files.read_file(join_path(path, name));
    text[static_cast<std::size_t>(at)] = static_cast<char>(text[static_cast<std::size_t>(at)] ^ 1);
    files.open(join_path(path, name), detail::OpenMode::create_or_truncate)
        ->write(0, text.data(), static_cast<std::int64_t>(text.size()));
  }
};

TEST_F(ArraysTest, AreReadBackInAnyRanges) {
  std::vector<std::string> shards;
  for (const Way way : {Way::image, Way::pieces}) {
    const std::string path = save(storage, folder / (way == Way::image ? "image" : "pieces"), layout, way);
    EXPECT_THAT(verify(storage, path, true), SizeIs(0));
    Reader reader(storage, path);
    EXPECT_EQ(reader.layout(), layout) << "by way of the manifest";
    for (const ArrayRecord& array : layout.arrays) {
      for (int rank = 0; rank < (array.per_rank ? world : 1); ++rank) {
        const std::int64_t elements = array.shape(rank).elements();
        for (const ElementRange range :
             {ElementRange{0, elements}, ElementRange{elements / 3, elements - elements / 5},
              ElementRange{elements, elements}}) {
          std::vector<std::byte> bytes(static_cast<std::size_t>(range.size() * size_of(array.dtype)));
          reader.read_array(reader.array(array.name), rank, range, bytes.data());
          EXPECT_TRUE(bytes == bytes_of(array, rank, range)) << array.name << " of rank " << rank;
        }
      }
    }
    std::vector<float> weights(2000);  // the model's tensor in the same checkpoint
    for (const StoredTensor& tensor : reader.tensors()) {
      reader.read_tensor(tensor.name, "weight", {0, tensor.shape.elements()}, DataType::float32,
                         weights.data());
      EXPECT_EQ(weights[0], sample_value("weight", tensor.name, 0, reader.dtype(tensor, "weight")));
    }
    shards.push_back(files.read_file(join_path(path, shard_name(2, world))));
  }
  EXPECT_TRUE(shards[0] == shards[1]) << "the same bytes, written at once or piece by piece";
}

TEST_F(ArraysTest, ADamagedByteIsNamed) {
  const std::string path = save(storage, folder / "run", layout, Way::image);
  const Manifest manifest = open_manifest(files, path);
  // Element 301234 of 'average/of.weights' is rank 2's element 1233; byte 16384 is in rank 2's own array.
  flip(path, shard_name(2, world), manifest.shards[2].array_offsets[1] + 1233 * 4 + 1);
  flip(path, shard_name(2, world), manifest.shards[2].array_offsets[5] + 16384);
  std::string found;
  for (const Damage& damage : verify(storage, path, true)) found += describe(damage) + "\n";
  EXPECT_THAT(found, AllOf(HasSubstr("shard-00002-of-00003.h5, bytes "),
                           HasSubstr("of array average/of.weights"), HasSubstr("of array random of rank 2")));
  Reader reader(storage, path);
  std::vector<float> values(100);
  const ArrayRecord& average = reader.array("average/of.weights");
  EXPECT_THAT(message_of<CheckpointError>([&] {
                reader.read_array(average, 0, {301230, 301330}, values.data());
              }),
              AllOf(HasSubstr("is damaged in bytes"), HasSubstr("of array average/of.weights")));
  EXPECT_NO_THROW(reader.read_array(average, 0, {0, 100}, values.data()));
}

TEST_F(ArraysTest, WhatIsNotThereIsRefused) {
  const std::string path = save(storage, folder / "run", layout, Way::image);
  Reader reader(storage, path);
  EXPECT_THAT(message_of<CheckpointError>([&] { (void)reader.array("randon"); }),
              HasSubstr("has no array 'randon'; the closest match is 'random'"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                reader.read_array(reader.array("half"), 0, {70, 78}, nullptr);
              }),
              HasSubstr("elements 70 to 78 of array half"));
  const std::string bare = save_sample(storage, folder / "bare", sample_layout(2), 3);
  EXPECT_THAT(message_of<CheckpointError>([&] { (void)Reader(storage, bare).array("random"); }),
              HasSubstr("has no array 'random', nor any other"));
  EXPECT_EQ(files.read_file(join_path(bare, std::string(manifest_name))).find("array"), std::string::npos)
      << "a checkpoint without arrays is as it always was";
}

TEST_F(ArraysTest, WriterWantsEachOnce) {
  const ShardPlan plan(layout, 0, 5);
  ShardWriter writer(storage, plan, folder / "w");
  for (const SectionPiece& piece : plan.pieces()) {
    writer.put(piece, sample_piece(layout, piece).data());
  }
  const std::int64_t count = 7;
  writer.put_array(0, &count);
  EXPECT_THAT(message_of<LogicError>([&] { writer.put_array(0, &count); }),
              HasSubstr("elements of array count are given twice"));
  EXPECT_THAT(message_of<LogicError>([&] { (void)writer.finish(); }),
              HasSubstr("was never given array average/of.weights"));
}

TEST(ArrayRecords, MustFitTheRanks) {
  const auto add = [](std::vector<ArrayRecord> arrays) {
    return message_of<InvalidArgument>([&] {
      Layout layout = sample_layout(2);
      add_arrays(layout, std::move(arrays));
    });
  };
  const ArrayRecord good{"a", DataType::int32, false, {Shape{4}}, ranges_between({0, 2, 4})};
  EXPECT_EQ(add({good}), test::nothing_thrown);
  EXPECT_THAT(add({good, good}), HasSubstr("array 'a' is there twice"));
  for (const std::vector<StoredRange>& ranges : std::vector<std::vector<StoredRange>>{{{0, 0, 3}},
                                                                                      {{0, 0, 2}, {2, 2, 4}},
                                                                                      {{0, 0, 5}, {1, 5, 4}},
                                                                                      {{0, 1, 4}},
                                                                                      {{0, 0, 2}, {0, 2, 4}},
                                                                                      {}}) {
    ArrayRecord bad = good;
    bad.ranges = ranges;
    EXPECT_THAT(add({bad}), HasSubstr("array 'a' does not have the shapes or ranges of 2 ranks"));
  }
  EXPECT_THAT(add({{"a", DataType::int32, true, {Shape{4}}, {}}}), HasSubstr("does not have the shapes"));
  EXPECT_THAT(add({{"a", DataType::block8, true, {Shape{256}, Shape{256}}, {}}}),
              HasSubstr("array 'a' is in block8, which is a format of optimizer states alone"));
  EXPECT_THAT(add({{"a//b", DataType::int32, true, {Shape{4}, Shape{4}}, {}}}),
              HasSubstr("array 'a//b' cannot be"));
}

TEST_F(ArraysTest, AManifestThatContradictsItselfIsRefused) {
  const std::string path = save(storage, folder / "run", layout, Way::image);
  const Manifest good = open_manifest(files, path);
  const auto refused = [&](const std::function<void(Manifest&)>& change) {
    Manifest bad = good;
    change(bad);
    return message_of<CheckpointError>([&] { (void)manifest_from_text(to_text(bad), "m"); });
  };
  EXPECT_EQ(refused([](Manifest&) {}), test::nothing_thrown);
  EXPECT_THAT(refused([](Manifest& m) { m.layout.arrays[2].ranges[2].end = 70; }),
              HasSubstr("m: array 'half': its ranges end at element 70 of 77"));
  EXPECT_THAT(refused([](Manifest& m) { m.layout.arrays[2].ranges[1].rank = 0; }),
              HasSubstr("m: array 'half': rank 0 stores two ranges of it"));
  EXPECT_THAT(refused([](Manifest& m) { m.layout.arrays[2].ranges[1].begin = 10; }),
              HasSubstr("m: array 'half': range 1 holds elements 10 to 33, but has to begin at element 11 "
                        "and not be empty"));
  EXPECT_THAT(refused([](Manifest& m) { m.layout.arrays[6].shapes.pop_back(); }),
              HasSubstr("m: array 'draws': it has 2 shapes"));
  EXPECT_THAT(refused([](Manifest& m) { m.shards[1].array_offsets[2] = 1 << 30; }),
              HasSubstr("shards[1].array_offsets puts arrays/half at byte 1073741824, outside the file"));
  EXPECT_THAT(refused([](Manifest& m) { m.shards[1].array_offsets.pop_back(); }),
              HasSubstr("shards[1].array_offsets has 47 entries for 48 arrays"));
}

}  // namespace
}  // namespace tranche::checkpoint
