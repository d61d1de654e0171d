#include "checkpoint/companions.h"

#include <gmock/gmock.h>

#include <functional>

#include "../offload/test_folder.h"
#include "checkpoint/folder.h"
#include "checkpoint/reader.h"
#include "checkpoint/shard_plan.h"
#include "sample.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {
namespace {

using namespace tranche::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

class CompanionsTest : public ::testing::Test {
 protected:
  std::string beside(const std::string& name) const {
    return detail::join_path(detail::join_path(folder / "run", std::string(companion_folder)), name);
  }
  void write(const std::string& path, const std::string& content) {
    files.open(path, detail::OpenMode::create_or_truncate)
        ->write(0, content.data(), static_cast<std::int64_t>(content.size()));
  }
  /// Writes the companions and returns a manifest with their records.
  Manifest written(const Companions& companions) {
    files.create_directories(folder / "run");
    Manifest manifest;
    manifest.companions = write_companions(files, folder / "run", companions);
    return manifest;
  }
  /// Saves a checkpoint with the companions and returns its path.
  std::string saved(const Companions& companions) {
    RunFolder run(storage, folder / "saves", 0x1234);
    Manifest manifest;
    manifest.layout = sample_layout(1);
    manifest.numerics = "cpu test";
    manifest.run = sample_run(1);
    const ShardPlan plan(manifest.layout, 0, 1);
    run.prepare(1, plan.file_bytes());
    manifest.shards.push_back(write_sample_shard(storage, plan, run.temporary(1), Way::image, 0));
    return run.commit(manifest, make_master_image(manifest.layout), companions);
  }
  detail::FileSystem& files = detail::posix_file_system();
  TestFolder folder{fast_folder()};
  TestStorage storage{files};
};

TEST_F(CompanionsTest, AreReadAsTheyWereWritten) {
  const Companions companions{
      {"tokenizer.json", std::string(5'000'000, 'x')}, {"merges.txt", std::string("a\0b", 3)}, {"empty", ""}};
  const Manifest manifest = written(companions);
  EXPECT_EQ(read_companions(files, folder / "run", manifest), companions);
  EXPECT_EQ(bytes_of(companions), 5'000'003);
  EXPECT_EQ(find_companion(companions, "merges.txt")->bytes.size(), 3u);
  EXPECT_EQ(find_companion(companions, "merges"), nullptr);
}

TEST_F(CompanionsTest, DamageIsNamed) {
  const Manifest manifest = written({{"tokenizer.json", "abc"}});
  write(beside("tokenizer.json"), "abd");
  EXPECT_THAT(
      message_of<CheckpointError>([&] { read_companions(files, folder / "run", manifest); }),
      AllOf(HasSubstr("companions/tokenizer.json is damaged"), HasSubstr("cannot load from checkpoint")));
  files.remove(beside("tokenizer.json"));
  EXPECT_THAT(message_of<CheckpointError>([&] { read_companions(files, folder / "run", manifest); }),
              HasSubstr("No such file"));
}

TEST_F(CompanionsTest, NamesAndSizesAreBounded) {
  for (const char* name : {"", ".hidden", "..", "a/b", "a b", "a\nb"}) {
    EXPECT_NE(problem_of_companion_name(name), "") << name;
    EXPECT_THAT(message_of<CheckpointError>([&] { written({{name, ""}}); }), HasSubstr("the name '"));
  }
  EXPECT_NE(problem_of_companion_name(std::string(65, 'a')), "");
  EXPECT_EQ(problem_of_companion_name("chat_template.jinja"), "");
  EXPECT_THAT(message_of<CheckpointError>([&] { written(Companions(33)); }),
              HasSubstr("33 files are to travel"));
  EXPECT_THAT(message_of<CheckpointError>([&] {
                written({{"a", std::string(static_cast<std::size_t>(companion_limit) + 1, 'x')}});
              }),
              HasSubstr("a file that travels with the weights has at most 67108864"));
}

TEST_F(CompanionsTest, BelongToTheirCheckpoint) {
  const std::string path = saved({{"tokenizer.json", "abc"}});
  const Manifest manifest = open_manifest(files, path);
  ASSERT_EQ(manifest.companions.size(), 1u);
  EXPECT_EQ(manifest_from_text(to_text(manifest), "m"), manifest);
  EXPECT_TRUE(verify(storage, path, true).empty());
  const std::string file = path + "/companions/tokenizer.json";
  write(file, "abd");
  const std::vector<Damage> damage = verify(storage, path, true);
  ASSERT_EQ(damage.size(), 1u);
  EXPECT_EQ(describe(damage[0]),
            "companions/tokenizer.json, bytes 0 to 2: a file that travels with the weights");
  write(file, "abcd");
  EXPECT_THAT(message_of<CheckpointError>([&] { open_manifest(files, path); }),
              HasSubstr("tokenizer.json has 4 bytes; the manifest says 3: it is damaged"));
}

TEST_F(CompanionsTest, AManifestsNamesLeadNowhereElse) {
  const std::string path = saved({{"tokenizer.json", "abc"}, {"b", "c"}});
  const auto refusal = [&](const std::function<void(std::vector<FileRecord>&)>& change) {
    Manifest manifest = open_manifest(files, path);
    change(manifest.companions);
    return message_of<CheckpointError>([&] { manifest_from_text(to_text(manifest), "m"); });
  };
  EXPECT_THAT(refusal([](auto& all) { all[0].name = "a/../secret"; }),
              HasSubstr("companions[0].name 'a/../secret' is not of letters"));
  EXPECT_THAT(refusal([](auto& all) { all[1].name = all[0].name; }),
              HasSubstr("companions[1].name 'tokenizer.json' is there twice"));
  EXPECT_THAT(refusal([](auto& all) { all[0].bytes = companion_limit + 1; }),
              HasSubstr("companions[0].bytes is 67108865"));
  EXPECT_THAT(refusal([](auto& all) { all.resize(33, all[0]); }), HasSubstr("companions"));
}

}  // namespace
}  // namespace tranche::checkpoint
