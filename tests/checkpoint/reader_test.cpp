#include "checkpoint/reader.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>

#include "../offload/test_folder.h"
#include "checkpoint/compare.h"
#include "offload/aligned_buffer.h"
#include "sample.h"
#include "tests/core/rounds.h"
#include "tests/offload/disk_reads.h"
#include "tests/offload/watched_file_system.h"
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
  std::string newest(const std::string& run) {
    std::vector<std::string> notes;
    return newest_checkpoint(files, run, notes).path;
  }
  std::string save(int world, int variant = 0) {
    return save_sample(storage, folder / ("run" + std::to_string(world) + "-" + std::to_string(variant)),
                       sample_layout(world), 10, world % 2 == 0 ? Way::image : Way::pieces, variant);
  }
};

/// The requests with which a rank of `wanted` reads its part of a checkpoint, and the memory that they fill.
struct OwnPieces {
  std::vector<std::vector<std::byte>> memory, expected;
  std::vector<ReadRequest> requests;

  OwnPieces(const Reader& reader, const Layout& wanted, int rank) {
    const ShardPlan plan(wanted, rank, 10);
    for (const SectionPiece& piece : plan.pieces()) {
      const SectionRecord& section = wanted.sections[static_cast<std::size_t>(piece.section)];
      const UnitRecord& unit = wanted.units[static_cast<std::size_t>(piece.unit)];
      expected.push_back(sample_piece(wanted, piece));
      memory.emplace_back(expected.back().size());
      for (const PlacedTensor& placed : unit.buffers[static_cast<std::size_t>(piece.buffer)]
                                            .instances[static_cast<std::size_t>(piece.instance)]
                                            .tensors) {
        const ElementRange part =
            intersect(piece.range, {placed.offset, placed.offset + elements_of(placed.box)});
        if (part.empty()) continue;
        requests.push_back(reader.request_for(
            unit.tensors[static_cast<std::size_t>(placed.tensor)].name, section.kind,
            {part.begin - placed.offset, part.end - placed.offset}, section.dtype,
            memory.back().data() + section.bytes(part.begin - piece.range.begin), placed.box));
      }
    }
  }
};

TEST_F(ReaderTest, AnyMeshReadsWhatAnyOtherWrote) {
  std::vector<Layout> layouts;
  for (const int world : {1, 2, 3, 4, 8}) layouts.push_back(sample_layout(world));
  for (const auto& [mesh, ranks] :
       {std::pair("replicate=2, shard=*", 4), std::pair("shard=3, replicate=*", 6),
        std::pair("replicate=7", 7), std::pair("replicate=2, shard=4", 8)}) {
    layouts.push_back(sample_layout(mesh, ranks));
  }
  int point = 0;
  for (std::size_t from = 0; from < layouts.size(); ++from) {
    ASSERT_EQ(layouts[from].fault(), "");
    Reader reader(storage, save_sample(storage, folder / std::to_string(from), layouts[from], 10));
    expect_sample(reader);
    for (const Layout& to : layouts) {
      if (!test::swept(point++)) continue;
      for (int rank = 0; rank < to.world; ++rank) {
        OwnPieces own(reader, to, rank);
        reader.read(own.requests);
        EXPECT_EQ(own.memory, own.expected) << "layout " << from << " to rank " << rank << " of " << to.world;
      }
    }
  }
}

TEST_F(ReaderTest, BoxesAreReadAsWholeTensorsAndTheReverse) {
  const Layout boxed = boxed_layout();
  ASSERT_EQ(boxed.fault(), "");
  Layout whole = boxed;
  whole.world = 1;
  whole.mesh.clear();
  UnitRecord& unit = whole.units[0];
  unit.buffers = {{"trainable",
                   false,
                   {},
                   {{{{0, whole_box(unit.tensors[0].shape), 0},
                      {1, whole_box(unit.tensors[1].shape), 128},
                      {2, whole_box(unit.tensors[2].shape), 256}},
                     {{0, 0, 272, 0}}}}},
                  {"frozen", true, {}, {{{{3, whole_box(unit.tensors[3].shape), 0}}, {{0, 0, 9, 0}}}}}};
  whole.place();
  ASSERT_EQ(whole.fault(), "");
  const Layout* const layouts[] = {&boxed, &whole};
  for (const Layout* from : layouts) {
    const std::string path = save_sample(storage, folder / std::to_string(from->world), *from, 10);
    Reader reader(storage, path);
    EXPECT_EQ(reader.layout(), *from) << "by way of the manifest";
    EXPECT_THAT(reader.verify(), IsEmpty());
    expect_sample(reader);
    for (const Layout* to : layouts) {
      for (int rank = 0; rank < to->world; ++rank) {
        OwnPieces own(reader, *to, rank);
        reader.read(own.requests);
        EXPECT_EQ(own.memory, own.expected)
            << from->world << " ranks to rank " << rank << " of " << to->world;
      }
    }
  }
  Reader first(storage, newest(folder / "1")), second(storage, newest(folder / "4"));
  EXPECT_THAT(
      message_of<CheckpointError>([&] { (void)compare(first, second); }),
      HasSubstr("exp_avg_sq of tensor h.qkv is stored as q8 in blocks of 4 elements: elements 0 to 120 as "
                "fp32 need a conversion from q8 to fp32 first; whole blocks are read as uint8"));
  std::vector<std::byte> bytes(1000);
  EXPECT_THAT(message_of<CheckpointError>([&] {
                first.read_tensor("h.qkv", "exp_avg_sq", {2, 8}, DataType::uint8, bytes.data());
              }),
              HasSubstr("elements 2 to 8 as uint8 need a conversion from q8 to fp32 first"));
  EXPECT_THAT(message_of<CheckpointError>([&] {
                first.read_tensor("h.qkv", "exp_avg_sq", {0, 24}, DataType::uint8, bytes.data(),
                                  {{0, 24, 1, 24}, {2, 1, 1, 1}});
              }),
              HasSubstr("elements 2 to 3 as uint8 need a conversion"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                first.read_tensor("h.qkv", "weight", {0, 1}, DataType::float32, bytes.data(),
                                  {{0, 1, 1, 25}, {0, 1, 1, 1}});
              }),
              HasSubstr("box [0:25, 0:1] of weights of tensor h.qkv, which has shape [24, 5]"));
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
              HasSubstr("elements 0 to 1048576 of tensor wte.weight, which has 707"));
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

/// There are 2 units of 6 MB of each kind. Reading for another number of ranks reads few more bytes than are
/// needed.
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
            const std::vector<StoredRange>& ranges =
                wanted.units[static_cast<std::size_t>(u)].buffers[0].instances[0].ranges;
            const ElementRange range =
                intersect(ranges[static_cast<std::size_t>(rank)].range(), {0, 1'500'007});
            memory.emplace_back(static_cast<std::size_t>(range.size()));
            requests.push_back({s, u, range, DataType::float32, memory.back().data()});
          }
        }
        reader.read(requests);
      }
      const ReadStatistics& statistics = reader.statistics();
      EXPECT_EQ(statistics.bytes_wanted, 4 * 4 * 1'500'007);
      EXPECT_LE(static_cast<double>(statistics.bytes_read),
                1.05 * static_cast<double>(statistics.bytes_wanted))
          << from << " to " << to;
      EXPECT_GE(statistics.bytes_read, statistics.bytes_wanted);
    }
    EXPECT_THAT(Reader(storage, path).verify(), IsEmpty());
  }
}

/// A file system that records how its files are opened.
class RecordedOpens : public WatchedFileSystem {
 public:
  RecordedOpens() : WatchedFileSystem([](FileOperation, std::int64_t) {}) {}
  std::unique_ptr<detail::File> open(const std::string& path, detail::OpenMode mode,
                                     detail::Caching caching) override {
    recorded.insert(caching);
    return WatchedFileSystem::open(path, mode, caching);
  }
  std::set<detail::Caching> recorded;
};

/// Reads the columns of one of `parts` of a tensor of 1000 rows and 500 columns, and compares them.
void read_columns(Reader& reader, int part, int parts) {
  const std::int64_t count = 500 / parts;
  const Box box{{0, 1, 1000, 1}, {part * count, 1, count, 1}};
  std::vector<float> values(static_cast<std::size_t>(1000 * count));
  for (const char* const kind : {"weight", "m"}) {
    reader.read_tensor("w", kind, {0, 1000 * count}, DataType::float32, values.data(), box);
    for (const std::size_t i : {std::size_t{0}, values.size() / 3, values.size() - 1}) {
      const auto number = static_cast<std::int64_t>(i);
      ASSERT_EQ(values[i],
                sample_value(kind, "w", element_of(box, Shape{1000, 500}, number), DataType::float32));
    }
  }
}

/// The readers of a host that want different columns of a tensor load its leaves from the disk once.
TEST_F(ReaderTest, ColumnsAreReadFromTheDiskOnce) {
  const Layout layout = make_layout({{"u", 1, {{"w", Shape{1000, 500}, false, {}}}}},
                                    {{"m", DataType::float32}}, DataType::float32, DataType::float32, 1);
  const std::string path = save_sample(storage, folder / "run", layout, 1);
  RecordedOpens recorded;
  {
    const TestStorage recording(recorded);
    Reader reader(recording, path);
    recorded.recorded.clear();
    read_columns(reader, 0, 1);
    EXPECT_THAT(recorded.recorded, ElementsAre(detail::Caching::direct)) << "a whole tensor";
    read_columns(reader, 1, 4);
    EXPECT_THAT(recorded.recorded, ElementsAre(detail::Caching::shared, detail::Caching::direct));
  }
  const auto from_disk = [&](int parts) {
    test::drop_from_page_cache(path);
    const std::int64_t before = test::bytes_from_disk();
    std::int64_t read = 0;
    for (int part = 0; part < parts; ++part) {
      Reader reader(storage, path);
      read_columns(reader, part, parts);
      read += reader.statistics().bytes_read;
    }
    EXPECT_GE(read, parts * 2 * 4 * 500'000) << "each reader verifies whole leaves";
    return test::bytes_from_disk() - before;
  };
  const std::int64_t whole = from_disk(1);
  if (whole < 2 * 4 * 500'000)
    GTEST_SKIP() << folder.path() << " is on no disk whose reads /proc/self/io counts";
  for (const int parts : {4, 5}) {
    // Pages of the program itself may be read too.
    const std::int64_t least = std::min({from_disk(parts), from_disk(parts), from_disk(parts)});
    EXPECT_LE(static_cast<double>(least), 1.02 * static_cast<double>(whole)) << parts << " readers";
  }
}

/// Each rank of each mesh reads its part of a checkpoint from each other mesh.
void expect_few_bytes(const std::vector<std::pair<int, std::string>>& meshes) {
  const TestFolder folder{fast_folder()};
  const TestStorage storage(detail::posix_file_system());
  constexpr std::int64_t elements = 4'200'011;
  const auto layout_of = [](const std::pair<int, std::string>& mesh) {
    return make_layout({{"u", 1, {{"w", Shape{elements}, false, {}}}}}, {{"m", DataType::float32}},
                       DataType::float32, DataType::float32, Mesh::parse(mesh.second, mesh.first));
  };
  std::vector<float> values(elements + 4096);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 8191);
  for (const auto& from : meshes) {
    Manifest manifest;
    manifest.layout = layout_of(from);
    RunFolder run(storage, folder / "run", 1);
    run.prepare(0, 1);
    for (int rank = 0; rank < from.first; ++rank) {
      const ShardPlan plan(manifest.layout, rank, 0);
      ShardWriter writer(storage, plan, run.temporary(0));
      for (const SectionPiece& piece : plan.pieces()) writer.put(piece, values.data() + piece.range.begin);
      manifest.shards.push_back(writer.finish());
    }
    const std::string path = run.commit(manifest, make_master_image(manifest.layout));
    for (const auto& to : meshes) {
      if (to == from) continue;
      Reader reader(storage, path);
      const int shards = Mesh::parse(to.second, to.first).size(MeshAxis::shard);
      const detail::FlatLayout flat(std::vector{elements}, shards);
      for (int shard = 0; shard < shards; ++shard) {
        const ElementRange range = intersect(flat.shard_range(shard), {0, elements});
        std::vector<float> weights(static_cast<std::size_t>(range.size())), m(weights.size());
        const ReadRequest requests[] = {{0, 0, range, DataType::float32, weights.data()},
                                        {1, 0, range, DataType::float32, m.data()}};
        reader.read(requests);
        ASSERT_TRUE(std::equal(weights.begin(), weights.end(), values.begin() + range.begin));
        ASSERT_EQ(weights, m);
      }
      EXPECT_EQ(reader.statistics().bytes_wanted, 2 * 4 * elements);
      EXPECT_LE(static_cast<double>(reader.statistics().bytes_read), 1.02 * 2 * 4 * elements)
          << from.second << " of " << from.first << " to " << to.second << " of " << to.first;
    }
  }
}

TEST(MeshesRead, FewBytesMoreThanTheyNeed) {
  expect_few_bytes({{8, ""}, {8, "replicate=2, shard=*"}, {6, "shard=3, replicate=*"}, {1, ""}});
}

TEST(MeshesReadSlow, FewBytesMoreThanTheyNeed) {
  expect_few_bytes({{1, ""},
                    {2, ""},
                    {2, "replicate=2"},
                    {3, ""},
                    {4, ""},
                    {4, "replicate=2, shard=*"},
                    {4, "shard=2, replicate=*"},
                    {5, "replicate=5"},
                    {6, "shard=3, replicate=*"},
                    {6, "replicate=3, shard=*"},
                    {8, ""},
                    {8, "replicate=2, shard=*"}});
}

/// Blocks are read without a copy to memory of any alignment, in one range or in tensors that continue where
/// the previous one ends. The elements are the same, nothing beside them changes, and damage is still found.
TEST_F(ReaderTest, LargeStretchesAreReadToWhereTheyBelong) {
  const Layout layout =
      make_layout({{"u", 1, {{"v", Shape{64'000}, false, {}}, {"w", Shape{4'300'003}, false, {}}}}},
                  {{"m", DataType::bfloat16}}, DataType::float32, DataType::float32, 2);
  const ElementRange whole{0, 64'000 + 4'300'003};
  const std::int64_t buffer = layout.units[0].buffers[0].instances[0].elements();
  std::vector<std::vector<std::uint16_t>> expected;
  std::uint32_t bits = 1;
  for (const SectionRecord& section : layout.sections) {
    expected.emplace_back(static_cast<std::size_t>(buffer * size_of(section.dtype) / 2));
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
      writer.put(piece, expected[section].data() + piece.range.begin * halves);
    }
    manifest.shards.push_back(writer.finish());
  }
  const std::string path = run.commit(manifest, make_master_image(manifest.layout));
  const detail::AlignedBuffer memory(Storage(storage).memory, whole.size() * 4 + 65'536, Category::other,
                                     "target");
  auto* const first = static_cast<std::byte*>(memory.data());
  Reader reader(storage, path);
  // Adds elements of the buffer, in which the second tensor follows the first without padding.
  const auto add_range = [&](int section, ElementRange range, void* to, std::vector<ReadRequest>& requests) {
    const DataType dtype = layout.sections[static_cast<std::size_t>(section)].dtype;
    for (int tensor = 0; tensor < 2; ++tensor) {
      const ElementRange held = tensor == 0 ? ElementRange{0, 64'000} : ElementRange{64'000, whole.end};
      const ElementRange part = intersect(range, held);
      if (part.empty()) continue;
      requests.push_back({section,
                          tensor,
                          {part.begin - held.begin, part.end - held.begin},
                          dtype,
                          static_cast<std::byte*>(to) + (part.begin - range.begin) * size_of(dtype)});
    }
  };
  // The offset of element 0 of the first rank's weights in a page of its file; memory with that offset allows
  // direct transfers.
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
            add_range(section, {at, std::min(at + piece, range.end)}, target + (at - range.begin) * width,
                      requests);
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
  // Ranges that are adjacent in the file but not in memory, and the reverse: they must not be merged into one
  // range.
  std::memset(first, 0xcc, static_cast<std::size_t>(memory.bytes()));
  auto* const values = reinterpret_cast<std::uint16_t*>(first);  // two of them make one element of a weight
  std::vector<ReadRequest> apart;
  add_range(0, {0, 100'000}, values, apart);
  add_range(0, {100'000, 200'000}, values + 210'000, apart);
  add_range(0, {300'000, 400'000}, values + 410'000, apart);
  reader.read(apart);
  const std::vector<std::uint16_t>& weights = expected[0];
  EXPECT_TRUE(std::equal(values, values + 200'000, weights.begin()));
  EXPECT_TRUE(std::equal(values + 210'000, values + 410'000, weights.begin() + 200'000));
  EXPECT_TRUE(std::equal(values + 410'000, values + 610'000, weights.begin() + 600'000));
  EXPECT_EQ(values[200'000], 0xcccc);
  EXPECT_EQ(values[610'000], 0xcccc);
  // Damages a byte in the middle, in a block that is needed whole or in part.
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
    std::vector<ReadRequest> requests;
    add_range(0, range, first + 4096 + fitting, requests);
    EXPECT_THAT(message_of<CheckpointError>([&] { reader.read(requests); }),
                AllOf(HasSubstr("shard-00000-of-00002.h5 is damaged in bytes"), HasSubstr("of tensor w")));
  }
  // Elements outside of the damaged leaf can still be read.
  std::vector<float> some(100);
  std::vector<ReadRequest> beside;
  add_range(0, {element + 5000, element + 5100}, some.data(), beside);
  EXPECT_NO_THROW(reader.read(beside));
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
