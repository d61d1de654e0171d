#include "checkpoint/format.h"

#include <gmock/gmock.h>

#include <fstream>
#include <functional>
#include <iterator>

#include "checkpoint/digest.h"
#include "sample.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using tranche::test::nothing_thrown;
using tranche::testing::boxed_layout;
using tranche::testing::message_of;
using tranche::testing::sample_layout;
using tranche::testing::sample_run;

TEST(CheckpointNames, AreFixedAndReadBack) {
  EXPECT_EQ(step_name(12), "step-00000012");
  EXPECT_EQ(step_name(1234567890), "step-1234567890");
  EXPECT_EQ(shard_name(1, 3), "shard-00001-of-00003.h5");
  for (const std::int64_t step : {0, 1, 99999999, 100000000})
    EXPECT_EQ(parse_step_name(step_name(step)), step);
  for (const char* other : {"", "step-", "step-1", "step-0000001x", "step-00000012.tmp", "step-000000012",
                            "latest", "step-99999999999999999999"}) {
    EXPECT_EQ(parse_step_name(other), -1) << other;
  }
  EXPECT_THAT(message_of<InvalidArgument>([] { step_name(-1); }), HasSubstr("a checkpoint of step -1"));
  EXPECT_THAT(message_of<InvalidArgument>([] { shard_name(3, 3); }), HasSubstr("rank 3 of 3"));
}

TEST(CheckpointDigest, IsXxh3OfLeavesAndOfTheirDigests) {
  // XXH3-64 with seed 0, as printed by its authors' program (xxhsum -H3).
  EXPECT_EQ(to_hex(digest_of(std::string_view(""))), "2d06800538d394c2");
  EXPECT_EQ(to_hex(digest_of(std::string_view("a"))), "e6c632b61e964e1f");
  std::vector<std::byte> file(static_cast<std::size_t>(block_bytes + leaf_bytes + 5), std::byte{3});
  const auto blocks = block_digests(file);
  ASSERT_EQ(blocks.size(), 2u);
  const std::uint64_t last[2] = {digest_of(std::span(file).first(leaf_bytes)),
                                 digest_of(std::span(file).first(5))};
  EXPECT_EQ(blocks[1], digest_of(std::as_bytes(std::span(last))));
  EXPECT_TRUE(block_digests({}).empty());
  std::uint64_t value = 0;
  EXPECT_TRUE(from_hex("00000000000000ff", value));
  EXPECT_EQ(value, 255u);
  for (const char* bad : {"", "ff", "00000000000000FF", "00000000000000fg", "00000000000000ff0"}) {
    EXPECT_FALSE(from_hex(bad, value)) << bad;
  }
}

TEST(CheckpointLayout, FollowsFlatLayout) {
  const Layout layout = sample_layout(3);
  ASSERT_EQ(layout.sections.size(), 4u);
  EXPECT_EQ(layout.sections[0].dataset, "weights");
  EXPECT_EQ(layout.sections[1].dataset, "frozen");
  EXPECT_EQ(layout.sections[3].dataset, "state/exp_avg_sq");
  const UnitRecord& unit = layout.units[1];
  const detail::FlatLayout trainable(std::vector<std::int64_t>{935, 3, 1}, 3);
  const InstanceRecord& instance = unit.buffers[0].instances[0];
  EXPECT_EQ(instance.tensors[1].offset, trainable.tensor_offset(1));
  EXPECT_EQ(instance.tensors[2].offset, trainable.tensor_offset(2));
  EXPECT_EQ(unit.buffers[1].instances[0].tensors[0].offset, 0) << "frozen tensors have their own buffer";
  EXPECT_EQ(instance.ranges,
            (std::vector<StoredRange>{{0, 0, 512, 256}, {1, 512, 1024, 256}, {2, 1024, 1536, 256}}));
  EXPECT_TRUE(layout.units[2].buffers[0].instances.empty());
  EXPECT_EQ(layout.find_section("weight", true), 1);
  EXPECT_EQ(layout.find_section("exp_avg", true), -1);
  EXPECT_EQ(layout.section_elements(1, 0), 256 * 3);
}

TEST(CheckpointLayout, ReplicasTakeTurnsWithinAShard) {
  const Layout layout = make_layout({{"u", 1, {{"w", Shape{300}, false, {}}}}}, {}, DataType::float32,
                                    DataType::float32, Mesh::parse("shard=2, replicate=3", 6));
  EXPECT_EQ(layout.mesh, (std::vector<AxisRecord>{{"shard", 2}, {"replicate", 3}}));
  EXPECT_EQ(layout.axis(MeshAxis::replicate), 3);
  EXPECT_EQ(layout.axis(MeshAxis::tensor), 1);
  EXPECT_EQ(layout.units[0].buffers[0].instances[0].ranges, (std::vector<StoredRange>{{0, 0, 256, 0},
                                                                                      {1, 256, 512, 0},
                                                                                      {2, 512, 768, 0},
                                                                                      {3, 768, 1024, 0},
                                                                                      {4, 1024, 1280, 0},
                                                                                      {5, 1280, 1536, 0}}));
}

TEST(CheckpointLayout, RefusesNamesThatCannotBe) {
  const auto with = [](std::vector<TensorDescription> tensors, std::vector<StateDescription> states = {}) {
    return message_of<InvalidArgument>([&] {
      make_layout({{"u", 1, tensors}}, states, DataType::float32, DataType::float32, 2);
    });
  };
  const Shape two{2};
  EXPECT_THAT(with({{"a", two, false, {}}, {"a", two, false, {}}}), HasSubstr("tensor 'a' is there twice"));
  EXPECT_THAT(with({{"a", two, false, {"a"}}}), HasSubstr("alias 'a' is there twice"));
  EXPECT_THAT(with({{"a", two, false, {}}}, {{"weight", DataType::float32}}),
              HasSubstr("optimizer state 'weight' is there twice"));
  EXPECT_THAT(with({{"a", two, false, {}}}, {{"m", DataType::int64}}),
              HasSubstr("optimizer state m of int64"));
  for (const char* name : {"", "/a", "a/", "a//b", ".", "a/../b"}) {
    EXPECT_THAT(with({{name, two, false, {}}}), HasSubstr("cannot be shown as a path in an HDF5 file"))
        << name;
  }
  // A name may begin with another one, but not with another one and '/', in whatever order they come.
  const auto together = [&](const char* one, const char* other) {
    return with({{one, two, false, {}}, {other, two, false, {}}});
  };
  EXPECT_EQ(together("a/b", "a/c"), nothing_thrown);
  EXPECT_EQ(together("a", "ab/c"), nothing_thrown);
  EXPECT_EQ(together("a", "a.b"), nothing_thrown);
  for (const auto& [one, other] : {std::pair{"a", "a/b"}, std::pair{"a/b", "a"}}) {
    EXPECT_EQ(
        together(one, other),
        "the tensor names 'a' and 'a/b' do not fit into one HDF5 file, where 'a' would be both a dataset "
        "and a group; rename one of them");
  }
  EXPECT_THAT(together("a/b/c/d", "a/b"), HasSubstr("names 'a/b' and 'a/b/c/d' do not fit"));
  // Each class of states has a group of its own.
  EXPECT_EQ(with({{"a", two, false, {}}}, {{"m", DataType::float32}, {"m", DataType::float32, 1}}),
            nothing_thrown);
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                make_layout({{"u", 1, {}}, {"u", 1, {}}}, {}, DataType::float32, DataType::float32, 2);
              }),
              HasSubstr("unit 'u' is there twice"));
}

Manifest sample_manifest(int world) {
  Manifest manifest;
  manifest.library = "0.2.0";
  manifest.hdf5 = "1.10.8";
  manifest.sequence = 3;
  manifest.created = 1'700'000'000;
  manifest.lineage = {0xfedcba9876543210u, 1};
  manifest.branches = {0, 9};
  manifest.stage = 3;
  manifest.numerics = "cpu avx2";
  manifest.reduction_group = 4;
  manifest.layout = sample_layout(world);
  manifest.run = sample_run(12);
  manifest.run.gradient_noise = R"({"variance":0.1,"squares":-0.001})";
  for (int rank = 0; rank < world; ++rank) {
    const ShardPlan plan(manifest.layout, rank, 12);
    manifest.shards.push_back(
        {rank,
         {plan.file_name(), plan.file_bytes(), plan.table_offset(), {0xfedcba9876543210u}},
         plan.offsets(),
         plan.array_offsets()});
  }
  manifest.master = {"model.h5", 5, 5, {1}};
  return manifest;
}

TEST(CheckpointManifest, ReadsBackWhatWasWritten) {
  for (const int world : {1, 3, 8}) {
    const Manifest manifest = sample_manifest(world);
    Manifest back = manifest_from_text(to_text(manifest), "m");
    EXPECT_EQ(back.run.user, R"({"note":"café"})");
    back.run.user = manifest.run.user;  // equal except for spelling
    EXPECT_EQ(back, manifest);
    EXPECT_EQ(back.bytes(), manifest.shards[0].file.bytes * world + 5);
  }
}

TEST(CheckpointManifest, ShardRecordsTravelAsText) {
  const ShardRecord record = sample_manifest(2).shards[1];
  EXPECT_EQ(shard_record_from_text(to_text(record), "x"), record);
  EXPECT_THAT(message_of<CheckpointError>([] { shard_record_from_text("{}", "rank 1's record"); }),
              HasSubstr("rank 1's record: rank is missing"));
  EXPECT_THAT(message_of<CheckpointError>([] { shard_record_from_text("{", "rank 1's record"); }),
              HasSubstr("rank 1's record is not JSON: line 1, column 2"));
}

/// The manifest with one occurrence of `from` replaced by `to`, and with a correct digest.
std::string edited(const std::string& from, const std::string& to) {
  std::string text = to_text(sample_manifest(2));
  const std::size_t body = text.find('\n') + 1;
  const std::size_t at = text.find(from, body);
  if (at == std::string::npos) throw LogicError("no " + from);
  text.replace(at, from.size(), to);
  const std::string digest = to_hex(digest_of(std::string_view(text).substr(body)));
  return text.replace(text.find(": \"") + 3, 16, digest);
}

TEST(CheckpointManifest, SaysWhichKeyIsWrong) {
  struct Case {
    const char* from;
    const char* to;
    const char* complaint;
  };
  const Case cases[] = {
      {"\"version\": 2", "\"version\": 3",
       "version is 3.0; this program reads version 1 and versions up to 2.1: a newer release of it has to"},
      {"\"minor\": 0", "\"minor\": 2", "version is 2.2; this program reads"},
      {"\"version\": 2", "\"version\": 0", "version is 0.0; this program reads"},
      {"\"version\"", "\"revision\"", "version is missing"},
      {"\"format\": \"tranche", "\"format\": \"branche",
       "format is 'branche-checkpoint', not tranche-checkpoint"},
      {"\"stage\": 3", "\"stage\": 4", "stage is 4, which cannot be"},
      {"\"stage\": 3", "\"stage\": \"3\"", "stage is not an integer"},
      {"\"world\": 2", "\"world\": 3", "the sizes of its mesh do not multiply to its number of ranks"},
      {"\"size\":2", "\"size\":4", "the sizes of its mesh do not multiply to its number of ranks"},
      {"\"size\":2", "\"size\":0", "mesh[0].size is 0, which cannot be"},
      {"\"group\":[\"shard\"]", "\"group\":[\"tensor\"]",
       "unit 'embedding': buffer 'trainable' is spread over 'tensor', which is no axis of the mesh"},
      {"\"step\":12", "\"step\":1.5", "run.step is not an integer"},
      {"\"step\":12", "\"step\":99999999999999999999", "run.step is not an integer"},
      {"\"user\":{\"note\":\"café\"}", "\"user\":7", "run.user is not an object"},
      {"\"dtype\":\"bf16\"", "\"dtype\":\"bf8\"",
       "sections[1].dtype is 'bf8'; known are fp32, bf16 and fp16"},
      {"\"frozen\":true", "\"frozen\":1", "sections[1].frozen is neither true nor false"},
      {"\"shape\":[101,7]", "\"shape\":[101,0]", "units[0].tensors[0].shape is not a shape"},
      {"\"shape\":[101,7]", "\"shape\":[101,\"7\"]", "units[0].tensors[0].shape[1] is not an integer"},
      {"\"shape\":[101,7]", "\"shape\":[101,700]",
       "unit 'embedding': buffer 'trainable', instance 0: tensor wte.weight begins at element 0, where it "
       "overlaps another or leaves the buffer"},
      {"\"tensor\":0,\"offset\":0", "\"tensor\":5,\"offset\":0",
       "units[0].buffers[0].instances[0].tensors[0].tensor is 5, which cannot be"},
      {"\"tensor\":0,\"offset\":0", "\"tensor\":1,\"offset\":0", "tensor wpe.weight is frozen"},
      {"\"tensor\":0,\"offset\":0", "\"tensor\":0,\"offset\":0,\"box\":[[0,101,1,101]]",
       "a box of tensor wte.weight does not lie in its shape [101, 7]"},
      {"\"tensor\":0,\"offset\":0", "\"tensor\":0,\"offset\":0,\"box\":[[0,101,1,101],[0,4,2,4]]",
       "a box of tensor wte.weight does not lie in its shape [101, 7]"},
      {"\"tensor\":0,\"offset\":0", "\"tensor\":0,\"offset\":0,\"box\":[[0,101,1,101],[0,2,3,1]]",
       "tensor wte.weight: only 303 of 707 elements are stored"},
      {"\"tensor\":0,\"offset\":0", "\"tensor\":0,\"offset\":0,\"box\":[[0,101,1]]",
       "tensors[0].box[0] is not start, stride, count and block"},
      {"\"ranges\":[[0,0,", "\"ranges\":[[0,1,",
       "range 0 holds elements 1 to 512, but has to begin at element 0 and not be empty"},
      {"\"ranges\":[[0,0,", "\"ranges\":[[7,0,", "range 0 is stored by rank 7 of 2"},
      {"\"ranges\":[[0,0,", "\"ranges\":[[0,0,0],[0,0,",
       "range 0 holds elements 0 to 0, but has to begin at element 0 and not be empty"},
      {"\"ranges\":[[0,0,", "\"ranges\":[[0,0],[0,0,", "ranges[0] is not a rank and two elements"},
      {"\"aliases\":[\"lm_head.weight\"]", "\"aliases\":{}", "units[0].tensors[0].aliases is not an array"},
      {"\"name\":\"wte.weight\"", "\"name\":[]", "units[0].tensors[0].name is not a string"},
      {"shard-00001-of-00002.h5", "../00001-of-00002.h5",
       "shards[1].name is '../00001-of-00002.h5', not shard-00001"},
      {"\"rank\":1", "\"rank\":0", "shards[1].rank is 0, not 1"},
      {"fedcba9876543210", "fedcba987654321", "shards[0].blocks[0] is not a digest of 16 hexadecimal digits"},
      {"\"blocks\":[\"fedcba9876543210\"]", "\"blocks\":[]", "shards[0].blocks has 0 digests"},
      {"\"offsets\":[", "\"offsets\":[0,", "shards[0].offsets has 5 entries for 4 sections"},
      {"\"offsets\":[", "\"offsets\":[9", "outside the file"},
      {"model.h5", "other.h5", "master.name is 'other.h5', not model.h5"},
      {"\"fedcba9876543210\",\"0000000000000001\"", "\"fedcba9876543210\",\"000000000000000x\"",
       "lineage[1] is not the number of a run, 16 hexadecimal digits"},
      {"\"branches\": [0,9]", "\"branches\": [0]", "branches has 1 entries for 2 runs of lineage"},
      {"\"branches\": [0,9]", "\"branches\": [0,-1]", "branches[1] is -1, which cannot be"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(message_of<CheckpointError>(
                    [&] { manifest_from_text(edited(c.from, c.to), "folder/manifest.json"); }),
                AllOf(HasSubstr("folder/manifest.json"), HasSubstr(c.complaint)))
        << c.from << " -> " << c.to;
  }
  EXPECT_NO_THROW(manifest_from_text(edited("\"stage\": 3", "\"later\": 1,\"stage\": 3"), "m"))
      << "keys of later versions are left alone";
}

TEST(CheckpointManifest, HasAShardForEachRankAndNotTooManyBytes) {
  const auto refused = [](const std::function<void(Manifest&)>& change) {
    Manifest manifest = sample_manifest(2);
    change(manifest);
    return message_of<CheckpointError>([&] { (void)manifest_from_text(to_text(manifest), "m"); });
  };
  EXPECT_EQ(refused([](Manifest&) {}), test::nothing_thrown);
  EXPECT_THAT(refused([](Manifest& m) { m.shards.pop_back(); }),
              HasSubstr("shards has 1 entries for 2 ranks"));
  EXPECT_THAT(refused([](Manifest& m) {
                for (ShardRecord& shard : m.shards) shard.file.bytes = (std::int64_t{1} << 62) - 1;
              }),
              HasSubstr("shards hold more than 4611686018427387903 bytes"));
}

TEST(CheckpointManifest, KeepsStateClassesApart) {
  Manifest manifest = sample_manifest(2);
  const std::vector<UnitDescription> units{{"u",
                                            1,
                                            {{"vector", Shape{5}, false, {}, 0},
                                             {"matrix", Shape{20, 20}, false, {}, 1},
                                             {"fixed", Shape{3}, true, {}}}}};
  manifest.layout = make_layout(
      units, {{"m", DataType::float32, 0}, {"v", DataType::bfloat16, 0}, {"m", DataType::float32, 1}},
      DataType::float32, DataType::bfloat16, 2);
  const Layout& layout = manifest.layout;
  ASSERT_EQ(layout.fault(), "");
  std::vector<std::string> datasets;
  for (const SectionRecord& section : layout.sections) datasets.push_back(section.dataset);
  EXPECT_EQ(datasets,
            (std::vector<std::string>{"weights", "weights_1", "frozen", "state/m", "state/v", "state_1/m"}));
  EXPECT_EQ(layout.find_section("m", false, 1), 5);
  EXPECT_EQ(layout.find_section("v", false, 1), -1);
  EXPECT_EQ(layout.section_elements(0, 0), 256);
  EXPECT_EQ(layout.section_elements(5, 1), 256);
  EXPECT_EQ(layout.section_elements(2, 0), 256);
  for (int rank = 0; rank < 2; ++rank) {
    const ShardPlan plan(layout, rank, 1);
    manifest.shards[static_cast<std::size_t>(rank)].offsets = plan.offsets();
    manifest.shards[static_cast<std::size_t>(rank)].file.digested_bytes = plan.table_offset();
    manifest.shards[static_cast<std::size_t>(rank)].file.bytes = plan.file_bytes();
  }
  const std::string text = to_text(manifest);
  EXPECT_THAT(text, HasSubstr("\"minor\": 1,"));
  const Manifest back = manifest_from_text(text, "m");
  EXPECT_EQ(back.layout, layout);
  EXPECT_EQ(back.minor, 1);
  const auto refused = [&](std::size_t section, bool frozen, int state_class) {
    Manifest bad = manifest;
    bad.layout.sections[section].frozen = frozen;
    bad.layout.sections[section].state_class = state_class;
    return message_of<CheckpointError>([&] { (void)manifest_from_text(to_text(bad), "m"); });
  };
  EXPECT_THAT(refused(5, true, 1), HasSubstr("state_class is of frozen tensors, which have no state"));
  EXPECT_THAT(refused(5, false, 16), HasSubstr("state_class is 16, which cannot be"));
  EXPECT_THAT(refused(5, false, 0), HasSubstr("is there twice: sections[3] is of 'm'"));
  Layout bad = layout;
  bad.units[0].tensors[1].state_class = 0;
  EXPECT_EQ(bad.fault(), "unit 'u': buffer 'trainable 1', instance 0: tensor matrix is of state class 0");
}

TEST(CheckpointManifest, OfTheFirstVersionIsCheckedToo) {
  std::ifstream file(TRANCHE_FIXTURES "/version-1/step-00000007/manifest.json");
  const std::string first{std::istreambuf_iterator<char>(file), {}};
  const auto refused = [&](const std::string& from, const std::string& to) {
    std::string text = first;
    const std::size_t body = text.find('\n') + 1, at = text.find(from, body);
    if (at == std::string::npos) throw LogicError("no " + from);
    text.replace(at, from.size(), to);
    const std::string digest = to_hex(digest_of(std::string_view(text).substr(body)));
    text.replace(text.find(": \"") + 3, 16, digest);
    return message_of<CheckpointError>([&] { (void)manifest_from_text(text, "m"); });
  };
  const std::string largest = "9223372036854775807", cuts = "\"trainable_cuts\":[0,";
  EXPECT_EQ(refused("\"stage\": 2", "\"stage\": 2"), test::nothing_thrown);
  for (const std::string& bad : {"0," + largest + ",", std::string("-1,"), largest + ",1,"}) {
    EXPECT_THAT(refused(cuts, cuts + bad),
                HasSubstr("units[0].trainable_cuts does not cut a buffer from 0 on"));
  }
  EXPECT_THAT(refused("\"world\": 3", "\"world\": 2"),
              HasSubstr("does not cut a buffer from 0 on into 2 shards"));
  EXPECT_THAT(refused("\"cut\": \"element\"", "\"cut\": \"block\""), HasSubstr("cut is 'block'"));
  EXPECT_THAT(refused("\"offset\":0", "\"offset\":-1"),
              HasSubstr("units[0].tensors[0].offset is -1, which cannot be"));
  EXPECT_THAT(
      refused("\"shape\":[101,7]", "\"shape\":[101,700]"),
      HasSubstr("tensor wte.weight begins at element 0, where it overlaps another or leaves the buffer"));
}

// Each of these manifests has a correct digest.
TEST(CheckpointManifest, RefusesNumbersAndCountsThatCannotBe) {
  const std::string largest = "9223372036854775807", units = "\"units\": [";
  std::string sections, empty_units;
  for (int i = 0; i < 65; ++i) {
    sections += R"({"dataset":"s/)" + std::to_string(i) + R"(","kind":")" + std::to_string(i) +
                R"(","dtype":"fp32","frozen":false},)";
  }
  const std::string repeated = R"({"name":"u0","uses_per_pass":1,"tensors":[],"buffers":[]},)";
  for (int i = 0; i < (1 << 17); ++i) empty_units += repeated;
  const std::string wide =
      R"({"name":"w","uses_per_pass":1,"tensors":[],"buffers":[{"name":"b","frozen":false,)"
      R"("group":[],"instances":[{"tensors":[],"ranges":[[0,0,1000000000000000000]]}]}]},)";
  const std::string numbers[][3] = {
      {"\"sequence\": 3", "\"sequence\": " + largest, "sequence is " + largest + ", which cannot be"},
      {"\"created\": 1700000000", "\"created\": 4611686018427387904", "created is 4611686018427387904"},
      {"\"tokens\":", "\"tokens\":" + largest + ",\"t\":", "run.tokens is " + largest},
      {"\"ranges\":[[0,0,", "\"ranges\":[[0,0," + largest + "]],\"x\":[[0,0,",
       "units hold more than 11529215046068"},
      {"\"bytes\":", "\"bytes\":" + largest + ",\"b\":", "bytes is " + largest},
      {units, units + wide + wide, "units hold more than 1152921504606846975 elements"},
      {units, units + empty_units, "units has 131076 entries; at most 131072 are read"},
      {"\"sections\": [", "\"sections\": [" + sections, "sections has 69 entries; at most 64 are read"},
      {R"("dataset":"state/exp_avg_sq","kind":"exp_avg_sq")",
       R"("dataset":"state/exp_avg_sq","kind":"exp_avg")", "is there twice: sections["},
      {R"("dataset":"state/exp_avg_sq")", R"("dataset":"state/exp_avg")", "is there twice: sections["},
      {"\"config\":{", "\"config\":{\"deep\":" + std::string(100, '[') + std::string(100, ']') + ",",
       "blocks are nested deeper than 64"},
      {"\"config\":{", "\"config\":{\"large\":1e999,", "is not JSON: line"},
  };
  for (const auto& [from, to, complaint] : numbers) {
    EXPECT_THAT(message_of<CheckpointError>([&] { manifest_from_text(edited(from, to), "m"); }),
                AllOf(StartsWith("m"), HasSubstr(complaint)))
        << from;
  }
}

TEST(CheckpointManifest, ABoxedLayoutReadsBack) {
  Manifest manifest = sample_manifest(1);
  manifest.layout = boxed_layout();
  manifest.shards.clear();
  for (int rank = 0; rank < 4; ++rank) {
    const ShardPlan plan(manifest.layout, rank, 12);
    manifest.shards.push_back(
        {rank, {plan.file_name(), plan.file_bytes(), plan.table_offset(), {1}}, plan.offsets(), {}});
  }
  Manifest back = manifest_from_text(to_text(manifest), "m");
  back.run.user = manifest.run.user;
  EXPECT_EQ(back, manifest);
  const auto refused = [&](const std::function<void(Layout&)>& change) {
    Manifest bad = manifest;
    change(bad.layout);
    return message_of<CheckpointError>([&] { (void)manifest_from_text(to_text(bad), "m"); });
  };
  const auto split = [](Layout& layout) -> BufferRecord& { return layout.units[0].buffers[0]; };
  EXPECT_EQ(refused([](Layout&) {}), test::nothing_thrown);
  EXPECT_THAT(refused([&](Layout& l) { split(l).instances[1].tensors[0].box[0].start = 0; }),
              HasSubstr("unit 'h': tensor h.qkv: boxes [0:20 by 8 of 4, 0:5] and [0:20 by 8 of 4, 0:5] have "
                        "elements in common"));
  EXPECT_THAT(refused([&](Layout& l) { split(l).instances.pop_back(); }),
              HasSubstr("tensor h.qkv: only 60 of 120 elements are stored"));
  EXPECT_THAT(refused([&](Layout& l) { split(l).instances.push_back(split(l).instances[0]); }),
              HasSubstr("tensor h.qkv is stored more than once"));
  EXPECT_THAT(
      refused([&](Layout& l) {
        split(l).instances[0].ranges[0].end = split(l).instances[0].ranges[1].begin = 51;
      }),
      HasSubstr("buffer 'split', instance 0: elements 0 to 51 are not whole blocks of 4; to cut exp_avg_sq "
                "elsewhere, convert it from q8 to fp32 first"));
  EXPECT_THAT(refused([&](Layout& l) {
                split(l).instances[0].tensors[1].box[1] = {0, 6, 1, 6};
                split(l).instances[1].tensors[1].box[1] = {6, 10, 1, 10};
              }),
              HasSubstr("box [0:7, 0:6] of tensor h.out, at element 64, is not whole blocks of 4; to cut"));
  EXPECT_THAT(refused([&](Layout& l) {
                l.sections[2].block = {"odd", 3, 1};
                l.sections[2].dtype = DataType::uint8;
              }),
              HasSubstr("have blocks of 3 and 4, of which none divides the other"));
}

TEST(CheckpointManifest, NoticesEveryFlippedByteAndEveryTruncation) {
  const std::string text = to_text(sample_manifest(1));
  for (std::size_t at = 0; at < text.size(); ++at) {
    std::string flipped = text;
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << (at % 8)));
    EXPECT_THROW(manifest_from_text(flipped, "m"), CheckpointError) << at;
    EXPECT_THROW(manifest_from_text(text.substr(0, at), "m"), CheckpointError) << at;
  }
}

TEST(CheckpointManifest, RefusesTextsThatAreNoObjects) {
  Manifest manifest = sample_manifest(1);
  manifest.run.config = "[1]";
  EXPECT_THAT(message_of<InvalidArgument>([&] { to_text(manifest); }),
              HasSubstr("'config' of a checkpoint is not a JSON object: [1]"));
  manifest.run.config = "{";
  EXPECT_THROW(to_text(manifest), InvalidArgument);
  manifest.run.config = "{}";
  manifest.run.user = "{\"a\":\"" + std::string(user_limit, 'x') + "\"}";
  EXPECT_THAT(message_of<InvalidArgument>([&] { to_text(manifest); }),
              HasSubstr("keep larger things in a file"));
}

TEST(CheckpointLibrary, SaysWhichHdf5ItIs) {
  EXPECT_THAT(hdf5_version(), ::testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
}

}  // namespace
}  // namespace tranche::checkpoint
