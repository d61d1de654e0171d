#include "checkpoint/shard_writer.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "../offload/faulty_file_system.h"
#include "../offload/test_folder.h"
#include "checkpoint/digest.h"
#include "sample.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {
namespace {

using namespace tranche::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

class ShardWriterTest : public ::testing::Test {
 protected:
  detail::FileSystem& files = detail::posix_file_system();
  TestFolder folder;
  TestStorage storage{files};
};

TEST_F(ShardWriterTest, PiecesInAnyOrderGiveTheBytesOfAnImage) {
  for (const int world : {1, 3, 8}) {
    const Layout layout = sample_layout(world);
    for (int rank = 0; rank < world; ++rank) {
      const ShardPlan plan(layout, rank, 5);
      const ShardRecord image = write_sample_shard(storage, plan, folder / "image", Way::image);
      const std::string expected = files.read_file((folder / "image") + "/" + plan.file_name());
      EXPECT_EQ(static_cast<std::int64_t>(expected.size()), plan.file_bytes());
      EXPECT_EQ(write_sample_shard(storage, plan, folder / "pieces", Way::pieces), image);
      EXPECT_EQ(files.read_file((folder / "pieces") + "/" + plan.file_name()), expected);

      std::vector<SectionPiece> parts;
      for (const SectionPiece& piece : plan.pieces()) {
        for (std::int64_t at = piece.range.begin; at < piece.range.end; at += 37) {
          parts.push_back(piece);
          parts.back().range = {at, std::min(at + 37, piece.range.end)};
        }
      }
      std::mt19937 random(static_cast<unsigned>(world * 100 + rank));
      std::shuffle(parts.begin(), parts.end(), random);
      ShardWriter writer(storage, plan, folder / "shuffled");
      for (const SectionPiece& part : parts) {
        writer.put(part, sample_piece(layout, part).data());
      }
      EXPECT_EQ(writer.finish(), image);
      EXPECT_EQ(files.read_file((folder / "shuffled") + "/" + plan.file_name()), expected);
    }
  }
}

TEST_F(ShardWriterTest, DigestsAreThoseOfTheFile) {
  const ShardPlan plan(sample_layout(2), 1, 5);
  const ShardRecord record = write_sample_shard(storage, plan, folder / "a", Way::image);
  const std::string file = files.read_file((folder / "a") + "/" + plan.file_name());
  const auto bytes = std::as_bytes(std::span(file));
  const auto covered = bytes.first(static_cast<std::size_t>(plan.table_offset()));
  EXPECT_EQ(record.file.blocks, block_digests(covered));
  std::vector<std::uint64_t> leaves(static_cast<std::size_t>(plan.leaves()));
  leaf_digests(covered, leaves.data());
  EXPECT_EQ(std::memcmp(bytes.data() + plan.table_offset(), leaves.data(), leaves.size() * 8), 0);
}

TEST_F(ShardWriterTest, AnEmptyRankAndAnEmptyModelStillHaveAFile) {
  const Layout nothing = make_layout({{"u", 1, {}}}, {}, DataType::float32, DataType::float32, 2);
  const ShardPlan plan(nothing, 1, 5);
  EXPECT_EQ(plan.payload_bytes(), 0);
  const ShardRecord image = write_sample_shard(storage, plan, folder / "a", Way::image);
  EXPECT_EQ(write_sample_shard(storage, plan, folder / "b", Way::pieces), image);
  EXPECT_EQ(files.read_file((folder / "a") + "/" + plan.file_name()).substr(1, 3), "HDF");
}

/// 24 MB per rank: the time and memory of a plan and a writer for a model of some size.
TEST_F(ShardWriterTest, LargeFilesHaveLittleOverheadAndTakeLittleMemory) {
  const Layout layout = make_layout(
      {{"a", 1, {{"a.w", Shape{1'000'003}, false, {}}}}, {"b", 1, {{"b.w", Shape{1'000'003}, false, {}}}}},
      {{"m", DataType::float32}, {"v", DataType::float32}}, DataType::float32, DataType::float32, 1);
  const ShardPlan plan(layout, 0, 5);
  EXPECT_LE(static_cast<double>(plan.file_bytes()), 1.0015 * static_cast<double>(plan.payload_bytes()));
  const auto image = [&] {
    detail::AlignedBuffer buffer(Storage(storage).memory, plan.file_bytes(), Category::other, "image");
    auto* memory = static_cast<std::byte*>(buffer.data());
    for (const SectionPiece& piece : plan.pieces()) {
      std::vector<float> values(static_cast<std::size_t>(piece.range.size()));
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<float>(i % 1021) + static_cast<float>(piece.section);
      std::memcpy(memory + plan.offset_of(piece), values.data(), values.size() * 4);
    }
    ShardWriter writer(storage, plan, folder / "image");
    writer.write_image({memory, static_cast<std::size_t>(plan.file_bytes())});
    return writer.finish();
  }();
  EXPECT_EQ(image.file.blocks.size(), 6u);
  ShardWriter writer(storage, plan, folder / "pieces");
  // Writes each tile with all of its states, like an update.
  for (int unit = 0; unit < 2; ++unit) {
    const std::int64_t elements = layout.units[0].buffers[0].instances[0].elements();
    for (std::int64_t at = 0; at < elements; at += 65536) {
      for (int section = 0; section < 3; ++section) {
        const detail::ElementRange range{at, std::min(at + 65536, elements)};
        std::vector<float> values(static_cast<std::size_t>(range.size()));
        for (std::size_t i = 0; i < values.size(); ++i) {
          values[i] =
              static_cast<float>((static_cast<std::size_t>(at) + i) % 1021) + static_cast<float>(section);
        }
        writer.put({section, unit, 0, 0, range}, values.data());
      }
    }
  }
  EXPECT_EQ(writer.finish(), image);
  EXPECT_LE(writer.staging_bytes(),
            std::min(10 * (block_bytes + 4096), ShardWriter::most_staging_bytes(plan)));
}

TEST_F(ShardWriterTest, BlocksTakeNoMoreThanIsSaid) {
  const Layout layout = make_layout({{"a", 1, {{"a.w", Shape{6'200'003}, false, {}}}}},
                                    {{"m", DataType::float32}}, DataType::float32, DataType::float32, 1);
  const ShardPlan plan(layout, 0, 5);
  const std::int64_t most = ShardWriter::most_staging_bytes(plan);
  EXPECT_LT(most, plan.file_bytes());
  ShardWriter writer(storage, plan, folder / "pieces");
  const std::int64_t elements = layout.units[0].buffers[0].instances[0].elements();
  const std::vector<float> values(1 << 19, 1.0f);
  for (std::int64_t at = 0; at < elements; at += 1 << 19) {
    for (int section = 0; section < 2; ++section) {
      writer.put({section, 0, 0, 0, {at, std::min<std::int64_t>(at + (1 << 19), elements)}}, values.data());
    }
  }
  (void)writer.finish();
  EXPECT_LE(writer.staging_bytes(), most);
}

TEST(ShardPlanOverhead, IsAThousandthAtMost) {
  // GPT-2 124M over 8 ranks, by its layout alone.
  std::vector<UnitDescription> units{{"embedding", 2, {{"wte", Shape{50257, 768}, false, {}}}}};
  for (int layer = 0; layer < 12; ++layer) {
    units.push_back({"h." + std::to_string(layer),
                     1,
                     {{"w" + std::to_string(layer), Shape{768 * 12 + 13, 768}, false, {}}}});
  }
  const Layout layout = make_layout(units, {{"m", DataType::float32}, {"v", DataType::float32}},
                                    DataType::float32, DataType::float32, 8);
  std::int64_t bytes = 0;
  std::int64_t payload = 0;
  for (int rank = 0; rank < 8; ++rank) {
    const ShardPlan plan(layout, rank, 1);
    bytes += plan.file_bytes();
    payload += plan.payload_bytes();
  }
  EXPECT_LE(static_cast<double>(bytes), 1.001 * static_cast<double>(payload));
}

TEST_F(ShardWriterTest, SaysWhatWasGivenTwiceOrNever) {
  const Layout layout = sample_layout(2);
  const ShardPlan plan(layout, 1, 5);
  std::vector<std::byte> bytes(static_cast<std::size_t>(plan.file_bytes()));
  ShardWriter writer(storage, plan, folder / "a");
  const detail::ElementRange range = plan.pieces().front().range;
  EXPECT_THAT(
      message_of<LogicError>([&] { writer.finish(); }),
      AllOf(HasSubstr("shard-00001-of-00002.h5 was never given element " + std::to_string(range.begin)),
            HasSubstr("of weights of unit embedding")));
  writer.put({0, 0, 0, 0, {range.begin, range.begin + 7}}, bytes.data());
  EXPECT_THAT(message_of<LogicError>([&] {
                writer.put({0, 0, 0, 0, {range.begin + 6, range.begin + 8}}, bytes.data());
              }),
              HasSubstr("of weights of unit embedding are given twice"));
  EXPECT_THAT(message_of<LogicError>([&] { writer.finish(); }),
              HasSubstr("never given element " + std::to_string(range.begin + 7)));
  EXPECT_THAT(
      message_of<InvalidArgument>([&] {
        writer.put({0, 0, 0, 0, {0, 7}}, bytes.data());
      }),
      HasSubstr("elements 0 to 7 of section 0, unit 0, buffer 0, instance 0: rank 1 of 2 does not store"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                writer.put({9, 0, 0, 0, {0, 7}}, bytes.data());
              }),
              HasSubstr("section 9"));
  EXPECT_THAT(message_of<LogicError>([&] { writer.write_image(bytes); }),
              HasSubstr("after pieces of it were given"));
  ShardWriter other(storage, plan, folder / "b");
  EXPECT_THAT(message_of<InvalidArgument>([&] { other.write_image({}); }),
              HasSubstr("on a multiple of 4096"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { ShardPlan(layout, 2, 5); }),
              HasSubstr("a shard for rank 2 of 2"));
}

TEST_F(ShardWriterTest, SaysHowMuchIsNeededAndFree) {
  FaultyFileSystem full(files);
  full.set_free_bytes(1000);
  const TestStorage small(full);
  const ShardPlan plan(sample_layout(2), 1, 5);
  EXPECT_THAT(
      message_of<CheckpointError>([&] { ShardWriter(small, plan, folder / "a"); }),
      AllOf(HasSubstr("cannot write checkpoint file"), HasSubstr("shard-00001-of-00002.h5"),
            HasSubstr("it needs " + std::to_string(plan.file_bytes()) + " bytes, but only 1000 are free")));
}

}  // namespace
}  // namespace tranche::checkpoint
