#include "checkpoint/reader.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "../offload/test_folder.h"
#include "checkpoint/compare.h"
#include "offload/aligned_buffer.h"
#include "sample.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {
namespace {

using detail::ElementRange;
using detail::intersect;
using namespace tranche::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ReaderTest : public ::testing::Test {
 protected:
  detail::FileSystem& files = detail::posix_file_system();
  TestFolder folder;
  TestStorage storage{files};
  std::string save(int world, int variant = 0) {
    return save_sample(storage, folder / ("run" + std::to_string(world) + "-" + std::to_string(variant)),
                       sample_layout(world), 10, world % 2 == 0 ? Way::image : Way::pieces, variant);
  }
};

TEST_F(ReaderTest, AnyNumberOfRanksReadsWhatAnyOtherWrote) {
  for (const int from : {1, 2, 3, 4, 8}) {
    Reader reader(storage, save(from));
    for (const int to : {1, 2, 3, 4, 8}) {
      const Layout wanted = sample_layout(to);
      for (int rank = 0; rank < to; ++rank) {
        std::vector<ReadRequest> requests;
        std::vector<std::vector<std::byte>> memory;
        std::vector<std::vector<std::byte>> expected;
        for (int s = 0; s < static_cast<int>(wanted.sections.size()); ++s) {
          for (int u = 0; u < static_cast<int>(wanted.units.size()); ++u) {
            // The elements of this rank under its own layout, without padding that the other may not have.
            ElementRange range = wanted.shard_range(s, u, rank);
            const auto& cuts = reader.layout().units[static_cast<std::size_t>(u)].cuts(
                wanted.sections[static_cast<std::size_t>(s)].frozen);
            range = intersect(range, {0, cuts.back()});
            if (range.empty()) continue;
            expected.push_back(sample_shard(wanted, s, u, range));
            memory.emplace_back(expected.back().size(), std::byte{0xcc});
            requests.push_back({s, u, range, wanted.sections[static_cast<std::size_t>(s)].dtype, nullptr});
          }
        }
        for (std::size_t i = 0; i < requests.size(); ++i) requests[i].memory = memory[i].data();
        reader.read(requests);
        EXPECT_EQ(memory, expected) << from << " ranks to rank " << rank << " of " << to;
      }
    }
  }
}

TEST_F(ReaderTest, ReadsTensorsByNameInAnyDtype) {
  Reader reader(storage, save(3));
  std::size_t read = 0;
  for (const StoredTensor& tensor : reader.tensors()) {
    const std::int64_t elements = tensor.shape.elements();
    for (const std::string& kind : reader.kinds(tensor)) {
      const DataType dtype = reader.dtype(tensor, kind);
      for (const ElementRange range :
           {ElementRange{0, elements}, {elements / 3, elements}, {0, 1}, {elements, elements}}) {
        std::vector<float> values(static_cast<std::size_t>(range.size()) + 1, -7.0f);
        reader.read_tensor(tensor.name, kind, range, DataType::float32, values.data());
        std::vector<std::uint16_t> halves(values.size());
        reader.read_tensor(tensor.name, kind, range, DataType::bfloat16, halves.data());
        for (std::int64_t e = range.begin; e < range.end; ++e) {
          const float expected = sample_value(kind, tensor.name, e, dtype);
          const auto at = static_cast<std::size_t>(e - range.begin);
          ASSERT_EQ(values[at], expected) << kind << " of " << tensor.name << " element " << e;
          ASSERT_EQ(halves[at], to_bfloat16(expected).bits);
        }
        EXPECT_EQ(values.back(), -7.0f) << "memory after the last element";
      }
      ++read;
    }
  }
  EXPECT_EQ(read, 3u * 5u + 4u);
  EXPECT_EQ(reader.find("lm_head.weight"), reader.find("wte.weight")) << "tied tensors have one storage";
  EXPECT_THAT(reader.kinds(reader.tensor("f.a")), ElementsAre("weight"));
  EXPECT_EQ(reader.dtype(reader.tensor("f.a"), "weight"), DataType::bfloat16);
}

TEST_F(ReaderTest, SaysWhatIsNotThere) {
  const std::string path = save(2);
  Reader reader(storage, path);
  float value = 0;
  const auto read = [&](const char* name, const char* kind, ElementRange range) {
    return [&reader, &value, name, kind, range] {
      reader.read_tensor(name, kind, range, DataType::float32, &value);
    };
  };
  EXPECT_THAT(message_of<CheckpointError>(read("h.0.v", "weight", {0, 1})),
              AllOf(HasSubstr(path), HasSubstr("has no tensor 'h.0.v'; the closest match is 'h.0.w'")));
  EXPECT_THAT(message_of<CheckpointError>(read("h.0.w", "momentum", {0, 1})),
              HasSubstr("keeps no 'momentum' of tensor h.0.w; it keeps weight, exp_avg, exp_avg_sq"));
  EXPECT_THAT(message_of<CheckpointError>(read("f.a", "exp_avg", {0, 1})),
              HasSubstr("keeps no 'exp_avg' of frozen tensor f.a; it keeps weight"));
  EXPECT_THAT(message_of<InvalidArgument>(read("h.0.b", "weight", {0, 4})),
              HasSubstr("elements 0 to 4 of tensor h.0.b, which has 3"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                reader.read({0, 0, {0, 1 << 20}, DataType::float32, &value});
              }),
              HasSubstr("of weights of unit embedding: its buffer has"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                reader.read({7, 0, {0, 1}, DataType::float32, &value});
              }),
              HasSubstr("section 7"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                reader.read({0, 0, {0, 1}, DataType::int64, &value});
              }),
              HasSubstr("do not convert fp32 to int64"));
  EXPECT_THAT(message_of<CheckpointError>([&] { Reader(storage, folder / "nowhere"); }),
              HasSubstr("no complete checkpoint in"));
}

/// 2 units of 6 MB a kind: reading under another number of ranks takes few bytes more than are wanted.
TEST_F(ReaderTest, ReadsOnlyTheBytesThatAreNeeded) {
  const auto layout_of = [](int world) {
    return make_layout(
        {{"a", 1, {{"a.w", Shape{1'500'007}, false, {}}}}, {"b", 1, {{"b.w", Shape{1'500'007}, false, {}}}}},
        {{"m", DataType::float32}}, DataType::float32, DataType::float32, world);
  };
  for (const int from : {1, 3}) {
    const std::string path = save_sample(storage, folder / std::to_string(from), layout_of(from), 4);
    for (const int to : {1, 2, 4}) {
      const Layout wanted = layout_of(to);
      Reader reader(storage, path);
      for (int rank = 0; rank < to; ++rank) {
        std::vector<std::vector<float>> memory;
        std::vector<ReadRequest> requests;
        for (int s = 0; s < 2; ++s) {
          for (int u = 0; u < 2; ++u) {
            const auto& cuts = reader.layout().units[0].trainable_cuts;
            const ElementRange range = intersect(wanted.shard_range(s, u, rank), {0, cuts.back()});
            memory.emplace_back(static_cast<std::size_t>(range.size()));
            requests.push_back({s, u, range, DataType::float32, memory.back().data()});
          }
        }
        reader.read(requests);
      }
      const ReadStatistics& statistics = reader.statistics();
      EXPECT_EQ(statistics.bytes_wanted / 4 / 4, std::min(wanted.units[0].trainable_cuts.back(),
                                                          reader.layout().units[0].trainable_cuts.back()));
      EXPECT_LE(static_cast<double>(statistics.bytes_read),
                1.05 * static_cast<double>(statistics.bytes_wanted))
          << from << " to " << to;
      EXPECT_GE(statistics.bytes_read, statistics.bytes_wanted);
    }
    EXPECT_THAT(Reader(storage, path).verify(), IsEmpty());
  }
}

/// Blocks that are read without a copy, to memory of any alignment, in one stretch or in tensors that go on
/// where the one before ends: the same elements, nothing beside them, and damage is found all the same.
TEST_F(ReaderTest, LargeStretchesAreReadToWhereTheyBelong) {
  const Layout layout =
      make_layout({{"u", 1, {{"v", Shape{64'000}, false, {}}, {"w", Shape{4'300'003}, false, {}}}}},
                  {{"m", DataType::bfloat16}}, DataType::float32, DataType::float32, 2);
  const ElementRange whole{0, layout.units[0].trainable_cuts.back()};
  std::vector<std::vector<std::uint16_t>> expected;
  std::uint32_t bits = 1;
  for (const SectionRecord& section : layout.sections) {
    expected.emplace_back(static_cast<std::size_t>(whole.size() * size_of(section.dtype) / 2));
    for (auto& half : expected.back()) {
      bits = bits * 1664525u + 1013904223u;
      half = static_cast<std::uint16_t>(bits >> 16);
    }
  }
  RunFolder run(storage, folder / "run", 1);
  Manifest manifest;
  manifest.layout = layout;
  for (int rank = 0; rank < 2; ++rank) {
    const ShardPlan plan(layout, rank, 0);
    if (rank == 0) run.prepare(0, 1);
    ShardWriter writer(storage, plan, run.temporary(0));
    for (const SectionPiece& piece : plan.pieces()) {
      const auto section = static_cast<std::size_t>(piece.section);
      const std::int64_t halves = size_of(layout.sections[section].dtype) / 2;
      writer.put(piece.section, 0, piece.range, expected[section].data() + piece.range.begin * halves);
    }
    manifest.shards.push_back(writer.finish());
  }
  const std::string path = run.commit(manifest);
  const detail::AlignedBuffer memory(Storage(storage).memory, whole.size() * 4 + 65'536, Category::other,
                                     "target");
  auto* const first = static_cast<std::byte*>(memory.data());
  Reader reader(storage, path);
  // The place of element 0 of the first rank's weights in a page of its file: with it direct transfers fit.
  const std::int64_t fitting = reader.manifest().shards[0].offsets[0] % detail::io_alignment;
  for (const std::int64_t place : {fitting, fitting + 512, fitting + 256, std::int64_t{2}}) {
    for (int section = 0; section < 2; ++section) {
      const DataType dtype = layout.sections[static_cast<std::size_t>(section)].dtype;
      const std::int64_t width = size_of(dtype);
      for (const ElementRange range : {whole, ElementRange{1, whole.end - 1}, {1'000'003, 1'500'009}}) {
        for (const std::int64_t piece : {whole.size(), std::int64_t{64'000}}) {
          std::memset(first, 0xcc, static_cast<std::size_t>(memory.bytes()));
          std::byte* const target = first + 4096 + place + range.begin * width % 4096;
          std::vector<ReadRequest> requests;
          for (std::int64_t at = range.begin; at < range.end; at += piece) {
            requests.push_back({section,
                                0,
                                {at, std::min(at + piece, range.end)},
                                dtype,
                                target + (at - range.begin) * width});
          }
          reader.read(requests);
          const auto bytes = static_cast<std::size_t>(range.size() * width);
          ASSERT_EQ(std::memcmp(target,
                                expected[static_cast<std::size_t>(section)].data() + range.begin * width / 2,
                                bytes),
                    0)
              << "section " << section << ", memory at " << place << ", from " << range.begin
              << " in pieces of " << piece;
          const auto touched = [](std::byte byte) { return byte != std::byte{0xcc}; };
          ASSERT_TRUE(std::none_of(first, target, touched));
          ASSERT_TRUE(std::none_of(target + bytes, target + bytes + 8192, touched));
        }
      }
    }
  }
  // Neighbours in the file that go apart in memory, and the reverse: neither is one stretch.
  std::memset(first, 0xcc, static_cast<std::size_t>(memory.bytes()));
  auto* const values = reinterpret_cast<std::uint16_t*>(first);  // two of them are one of a weight
  const ReadRequest apart[] = {{0, 0, {0, 100'000}, DataType::float32, values},
                               {0, 0, {100'000, 200'000}, DataType::float32, values + 210'000},
                               {0, 0, {300'000, 400'000}, DataType::float32, values + 410'000}};
  reader.read(apart);
  const std::vector<std::uint16_t>& weights = expected[0];
  EXPECT_TRUE(std::equal(values, values + 200'000, weights.begin()));
  EXPECT_TRUE(std::equal(values + 210'000, values + 410'000, weights.begin() + 200'000));
  EXPECT_TRUE(std::equal(values + 410'000, values + 610'000, weights.begin() + 600'000));
  EXPECT_EQ(values[200'000], 0xcccc);
  EXPECT_EQ(values[610'000], 0xcccc);
  // A byte in the middle, in a block that is wanted whole or in part.
  const std::int64_t element = 1'500'000;
  const std::string shard = path + "/" + reader.manifest().shards[0].file.name;
  const std::int64_t byte = reader.manifest().shards[0].offsets[0] + element * 4;
  const auto file = files.open(shard, detail::OpenMode::update);
  char bad = 0;
  file->read(byte, &bad, 1);
  bad = static_cast<char>(bad ^ 4);
  file->write(byte, &bad, 1);
  file->sync();
  for (const ElementRange range : {whole, ElementRange{1'400'003, 1'600'000}}) {
    const ReadRequest request{0, 0, range, DataType::float32, first + 4096 + fitting};
    EXPECT_THAT(message_of<CheckpointError>([&] { reader.read(request); }),
                AllOf(HasSubstr("shard-00000-of-00002.h5 is damaged in bytes"), HasSubstr("of tensor w")));
  }
  // Elements that do not need the damaged leaf are still read.
  std::vector<float> some(100);
  EXPECT_NO_THROW(reader.read({0, 0, {element + 5000, element + 5100}, DataType::float32, some.data()}));
}

TEST_F(ReaderTest, ComparesByValueWhateverTheRanks) {
  Reader first(storage, save(3));
  Reader second(storage, save(8));
  const Comparison same = compare(first, second);
  EXPECT_TRUE(same.equal());
  EXPECT_EQ(same.compared, 3 * 5 + 4);

  Reader other(storage, save(2, 1));
  const Comparison different = compare(first, other);
  EXPECT_EQ(different.differences.size(), 19u);
  const TensorDifference& one = different.differences.front();
  EXPECT_EQ(one.tensor, "wte.weight");
  EXPECT_EQ(one.first, 0);
  EXPECT_EQ(one.first_in_first, sample_value("weight", "wte.weight", 0, DataType::float32, 0));
  EXPECT_EQ(one.first_in_second, sample_value("weight", "wte.weight", 0, DataType::float32, 1));
  EXPECT_GT(one.largest, 0.5);
}

TEST_F(ReaderTest, ComparisonNamesWhatOnlyOneHas) {
  const auto small = [&](const char* name, Shape shape, std::vector<StateDescription> states,
                         const char* where) {
    return save_sample(storage, folder / where,
                       make_layout({{"u", 1, {{"same", Shape{5}, false, {}}, {name, shape, false, {}}}}},
                                   states, DataType::float32, DataType::float32, 2),
                       1);
  };
  Reader a(storage, small("x", Shape{4}, {{"m", DataType::float32}}, "a"));
  Reader b(storage, small("x", Shape{2, 2}, {}, "b"));
  Reader c(storage, small("y", Shape{4}, {}, "c"));
  const auto lines = [](const Comparison& comparison) {
    std::vector<std::string> lines;
    for (const auto& difference : comparison.differences) lines.push_back(describe(difference));
    return lines;
  };
  EXPECT_THAT(lines(compare(a, b)),
              ElementsAre("m of same: only in the first", "weight of x: its shapes differ",
                          "m of x: only in the first"));
  EXPECT_THAT(lines(compare(b, c)),
              ElementsAre("weight of x: only in the first", "weight of y: only in the second"));
  TensorDifference one{"w", "exp_avg", TensorDifference::What::values, 1, 0.5, 7, 1, 1.5};
  EXPECT_EQ(describe(one),
            "exp_avg of w: 1 element differs, by at most 0.5; the first is element 7: 1 and 1.5");
}

}  // namespace
}  // namespace tranche::checkpoint
