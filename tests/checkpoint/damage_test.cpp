// Expects that damage anywhere in a run's folder is found and located.

#include <gmock/gmock.h>

#include <sys/stat.h>

#include <cstring>
#include <random>

#include "../offload/test_folder.h"
#include "checkpoint/digest.h"
#include "checkpoint/reader.h"
#include "sample.h"
#include "tests/core/rounds.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {
namespace {

using detail::join_path;
using detail::OpenMode;
using detail::posix_file_system;
using namespace tranche::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

/// Checkpoints of three ranks, and of four whose tensors are cut into boxes.
class DamageTest : public ::testing::TestWithParam<bool> {
 protected:
  detail::FileSystem& files = posix_file_system();
  TestFolder folder{fast_folder()};
  TestStorage storage{files};
  const std::string run = folder / "run";
  const Layout layout = GetParam() ? boxed_layout() : sample_layout(3);
  const std::string path = save_sample(storage, run, layout, 10);

  std::vector<std::string> all_files() const {
    std::vector<std::string> names{"latest"};
    for (const auto& entry : posix_file_system().list(path)) {
      if (!entry.is_directory) names.push_back("step-00000010/" + entry.name);
    }
    for (const auto& entry : posix_file_system().list(join_path(path, std::string(companion_folder))))
      names.push_back("step-00000010/companions/" + entry.name);
    return names;
  }
  void write(const std::string& name, const std::string& content) {
    files.open(join_path(run, name), OpenMode::create_or_truncate)
        ->write(0, content.data(), static_cast<std::int64_t>(content.size()));
  }
  /// The places that verification reports, as one text.
  std::string found() {
    std::string text;
    for (const Damage& damage : verify(storage, run, true)) text += describe(damage) + "\n";
    return text;
  }
  /// Reads everything by name; returns the text of the error, or "".
  std::string load() {
    try {
      Reader reader(storage, path);
      std::vector<float> values(2000);
      for (const StoredTensor& tensor : reader.tensors()) {
        for (const std::string& kind : reader.kinds(tensor)) {
          const DataType stored = reader.dtype(tensor, kind);
          reader.read_tensor(tensor.name, kind, {0, tensor.shape.elements()},
                             stored == DataType::uint8 ? stored : DataType::float32, values.data());
        }
      }
    } catch (const CheckpointError& problem) {
      return problem.message();
    }
    return {};
  }
};

TEST_P(DamageTest, NothingIsFoundWhereNothingIs) {
  EXPECT_EQ(found(), "");
  EXPECT_EQ(load(), "");
  EXPECT_THAT(verify(storage, run, false), IsEmpty());
  EXPECT_THAT(verify(storage, path, true), IsEmpty());
  EXPECT_THAT(all_files(), SizeIs(static_cast<std::size_t>(layout.world) + 4));
}

// An archive can contain both. A reader would wait for ever for a pipe without a writer, and a file larger
// than memory would end the program before its first line is checked.
TEST_P(DamageTest, PipesAndHugeFilesAreToldAtOnce) {
  std::vector<std::string> notes;
  for (const std::string& name : {join_path(path, std::string(manifest_name)), join_path(run, "latest")}) {
    const std::string content = files.read_file(name);
    files.open(name, OpenMode::update)->truncate(std::int64_t{6} << 30);
    EXPECT_THAT(found(), HasSubstr("'" + name + "' failed: it has 6442450944 B, and such a file has"));
    files.remove(name);
    ASSERT_EQ(::mkfifo(name.c_str(), 0600), 0);
    EXPECT_THAT(found(), HasSubstr("'" + name + "' failed: it is a pipe, a socket or a device"));
    if (name.ends_with("latest")) {  // that file is not needed
      EXPECT_EQ(newest_checkpoint(files, run, notes).path, path);
      EXPECT_THAT(notes.back(), AllOf(HasSubstr("'" + name + "' failed: it is a pipe"),
                                      HasSubstr("it is not needed: the folders themselves are looked at")));
    } else {
      EXPECT_THAT(message_of<CheckpointError>([&] { newest_checkpoint(files, run, notes); }),
                  HasSubstr("'" + name + "' failed: it is a pipe"));
    }
    files.remove(name);
    files.replace_file(name, content);
  }
  EXPECT_EQ(found(), "");
}

TEST_P(DamageTest, EveryFlippedByteIsFoundAndItsFileNamed) {
  const Manifest manifest = open_manifest(files, path);
  std::mt19937 random(20);
  int flips = 0;
  for (const std::string& name : all_files()) {
    const std::string content = files.read_file(join_path(run, name));
    // The first bytes of each file, for which the manifest has a separate digest; then digests of leaves;
    // then any bytes.
    std::vector<std::size_t> places;
    for (std::size_t at = 0; at < 48; ++at) places.push_back(at % content.size());
    for (const ShardRecord& shard : manifest.shards) {
      if (!name.ends_with(shard.file.name)) continue;
      const auto leaves = static_cast<std::size_t>(divide_round_up(shard.file.digested_bytes, leaf_bytes));
      for (std::size_t at = 0; at < leaves * 8 + 2; ++at) {
        places.push_back(static_cast<std::size_t>(shard.file.digested_bytes) + at);
      }
    }
    while (places.size() < 150) places.push_back(random() % content.size());
    for (const std::size_t at : places) {
      const int bit = static_cast<int>(random() % 8);
      if (!test::swept(flips++)) continue;
      std::string damaged = content;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
      {
        const auto file = files.open(join_path(run, name), OpenMode::update);
        file->write(static_cast<std::int64_t>(at), &damaged[at], 1);
      }
      ASSERT_THAT(found(), HasSubstr(name.substr(name.rfind('/') + 1))) << "byte " << at << " of " << name;
      const auto file = files.open(join_path(run, name), OpenMode::update);
      file->write(static_cast<std::int64_t>(at), &content[at], 1);
    }
  }
  EXPECT_EQ(found(), "");
  EXPECT_GE(flips, 900);
}

/// Data and its digests are replaced together, for example by bytes of an older file. The manifest's digest
/// reveals it.
TEST_P(DamageTest, ALeafWhoseDigestFitsIsRefusedAllTheSame) {
  const Manifest manifest = open_manifest(files, path);
  const FileRecord& shard = manifest.shards[1].file;
  const std::string name = "step-00000010/" + shard.name;
  std::string content = files.read_file(join_path(run, name));
  content[static_cast<std::size_t>(manifest.shards[1].offsets[0])] ^= 1;
  const auto bytes = std::as_bytes(std::span(content)).first(static_cast<std::size_t>(shard.digested_bytes));
  std::vector<std::uint64_t> leaves(
      static_cast<std::size_t>(divide_round_up(shard.digested_bytes, leaf_bytes)));
  leaf_digests(bytes, leaves.data());
  std::memcpy(content.data() + shard.digested_bytes, leaves.data(), leaves.size() * 8);
  write(name, content);
  EXPECT_THAT(found(), AllOf(HasSubstr(shard.name), HasSubstr("and their digests")));
  EXPECT_THAT(load(), AllOf(HasSubstr(shard.name + " is damaged: its digests of bytes 0 to"),
                            HasSubstr("are not those that were written")));
}

TEST_P(DamageTest, EveryTruncatedFileIsFound) {
  for (const std::string& name : all_files()) {
    const std::string content = files.read_file(join_path(run, name));
    const std::size_t lengths[] = {0, 1, content.size() / 2, content.size() - 1};
    for (const std::size_t length : lengths) {
      write(name, content.substr(0, length));
      const std::string short_name = name.substr(name.rfind('/') + 1);
      ASSERT_THAT(found(), HasSubstr(short_name)) << length << " of " << content.size();
      if (name != "latest") {
        ASSERT_THAT(load(), HasSubstr(short_name)) << length << " of " << content.size();
      }
    }
    write(name, content + "x");
    EXPECT_THAT(found(), HasSubstr(name.substr(name.rfind('/') + 1))) << "longer";
    files.remove(join_path(run, name));
    EXPECT_THAT(found(), HasSubstr(name.substr(name.rfind('/') + 1))) << "missing";
    write(name, content);
  }
  EXPECT_EQ(found(), "");
}

/// Changes one byte in every leaf of a payload. The error names the file, the tensor and its elements.
TEST_P(DamageTest, DamagedTensorsAreNamedAndNeverLoaded) {
  for (int rank = 0; rank < layout.world; ++rank) {
    const ShardPlan plan(layout, rank, 10);
    const std::string name = "step-00000010/" + plan.file_name();
    const std::string content = files.read_file(join_path(run, name));
    for (const SectionPiece& piece : plan.pieces()) {
      const SectionRecord& section = layout.sections[static_cast<std::size_t>(piece.section)];
      const UnitRecord& unit = layout.units[static_cast<std::size_t>(piece.unit)];
      const InstanceRecord& instance = unit.buffers[static_cast<std::size_t>(piece.buffer)]
                                           .instances[static_cast<std::size_t>(piece.instance)];
      for (const PlacedTensor& placed : instance.tensors) {
        const TensorRecord& tensor = unit.tensors[static_cast<std::size_t>(placed.tensor)];
        const detail::ElementRange part =
            detail::intersect({placed.offset, placed.offset + elements_of(placed.box)}, piece.range);
        if (part.empty()) continue;
        std::string damaged = content;
        SectionPiece first = piece;
        first.range = {part.begin, part.begin + section.block.elements};
        const auto at = static_cast<std::size_t>(plan.offset_of(first));
        damaged[at] = static_cast<char>(damaged[at] ^ 16);
        write(name, damaged);
        const std::string text = found();
        EXPECT_THAT(
            text, AllOf(HasSubstr(plan.file_name()), HasSubstr(section.kind + " of tensor " + tensor.name)));
        EXPECT_THAT(load(), AllOf(HasSubstr("cannot load from checkpoint"),
                                  HasSubstr(plan.file_name() + " is damaged in bytes"),
                                  HasSubstr(section.kind + " of tensor ")));
      }
    }
    write(name, content);
  }
  EXPECT_EQ(load(), "");
}

TEST_P(DamageTest, ElementRangesAreExact) {
  // A tensor of 40,000 elements of 4 bytes has leaves of 4096 elements; the first dataset's offset shifts
  // them.
  const std::string large = save_sample(
      storage, folder / "large",
      make_layout({{"u", 1, {{"w", Shape{40'000}, false, {}}}}}, {}, DataType::float32, DataType::float32, 1),
      1);
  const Manifest manifest = open_manifest(files, large);
  const std::int64_t offset = manifest.shards[0].offsets[0];
  const std::string name = large + "/" + manifest.shards[0].file.name;
  const std::int64_t element = 30'000;
  const std::int64_t byte = offset + element * 4 + 2;
  std::string content = files.read_file(name);
  content[static_cast<std::size_t>(byte)] = static_cast<char>(content[static_cast<std::size_t>(byte)] ^ 1);
  files.open(name, OpenMode::update)->write(0, content.data(), static_cast<std::int64_t>(content.size()));
  const std::int64_t leaf = byte / leaf_bytes * leaf_bytes;
  const std::int64_t first = (leaf - offset) / 4;
  const std::string expected =
      "elements " + std::to_string(first) + " to " + std::to_string(first + 4095) + " of weight of tensor w";
  Reader reader(storage, large);
  const auto damage = reader.verify();
  ASSERT_EQ(damage.size(), 1u);
  EXPECT_EQ(damage[0].begin, leaf);
  EXPECT_EQ(damage[0].end, leaf + leaf_bytes);
  EXPECT_EQ(damage[0].what, expected);
  std::vector<float> values(40'000);
  EXPECT_NO_THROW(reader.read_tensor("w", "weight", {0, first}, DataType::float32, values.data()));
  EXPECT_NO_THROW(
      reader.read_tensor("w", "weight", {first + 4096, 40'000}, DataType::float32, values.data()));
  EXPECT_THAT(
      message_of<CheckpointError>([&] {
        reader.read_tensor("w", "weight", {first + 4095, first + 4096}, DataType::float32, values.data());
      }),
      HasSubstr(expected));
}

TEST_P(DamageTest, AFolderWithoutCheckpointsSaysSo) {
  EXPECT_THAT(describe(verify(storage, folder / "nothing", true).at(0)),
              HasSubstr("there is no checkpoint here"));
  std::vector<std::string> notes;
  EXPECT_THAT(message_of<CheckpointError>([&] { newest_checkpoint(files, folder / "nothing", notes); }),
              HasSubstr("there is no complete checkpoint in"));
}

TEST_P(DamageTest, ATornNewerOneIsPassedOverAndReported) {
  const std::string newer = save_sample(storage, run, sample_layout(2), 11);
  std::vector<std::string> notes;
  EXPECT_EQ(newest_checkpoint(files, run, notes).path, newer);
  EXPECT_THAT(notes, IsEmpty());
  files.open(newer + "/shard-00001-of-00002.h5", OpenMode::update)->truncate(4096);
  EXPECT_EQ(newest_checkpoint(files, run, notes).path, path);
  ASSERT_THAT(notes, SizeIs(2));
  EXPECT_THAT(notes[0], AllOf(HasSubstr("passed over"), HasSubstr("shard-00001-of-00002.h5 has 4096 bytes"),
                              HasSubstr("it is truncated")));
  EXPECT_THAT(notes[1],
              HasSubstr("latest names step-00000011, but the newest complete checkpoint is step-00000010"));
  write("latest", "step-00000011 0123456789abcdef\n");
  notes.clear();
  EXPECT_EQ(newest_checkpoint(files, run, notes).path, path);
  EXPECT_THAT(notes.at(1), HasSubstr("latest is damaged; it is not needed"));
}

INSTANTIATE_TEST_SUITE_P(Layouts, DamageTest, ::testing::Bool());

}  // namespace
}  // namespace tranche::checkpoint
