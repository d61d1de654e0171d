// fixtures/version-1 was written by the first release of the format and never changes. Every later release
// must read it.

#include <gmock/gmock.h>

#include "checkpoint/reader.h"
#include "sample.h"

namespace tranche::checkpoint {
namespace {

using namespace tranche::testing;

TEST(CheckpointFixture, TheFirstVersionIsReadForEver) {
  const TestStorage storage(detail::posix_file_system());
  std::vector<std::string> notes;
  const Listed newest = newest_checkpoint(detail::posix_file_system(), TRANCHE_FIXTURES "/version-1", notes);
  EXPECT_THAT(notes, ::testing::IsEmpty());
  Reader reader(storage, newest.path);
  EXPECT_THAT(reader.verify(), ::testing::IsEmpty());
  const Manifest& manifest = reader.manifest();
  EXPECT_EQ(manifest.version, 1);
  EXPECT_EQ(manifest.layout, sample_layout(3));
  EXPECT_EQ(manifest.stage, 2);
  EXPECT_EQ(manifest.numerics, "cpu test");
  RunState run = manifest.run;
  EXPECT_EQ(run.user, R"({"note":"café"})");
  run.user = sample_run(7).user;
  EXPECT_EQ(run, sample_run(7));
  expect_sample(reader);
}

TEST(CheckpointFixture, VersionTwoIsReadForEver) {
  const TestStorage storage(detail::posix_file_system());
  for (const auto& [name, layout] :
       {std::pair("hybrid", sample_layout("replicate=2, shard=*", 4)), std::pair("boxed", boxed_layout())}) {
    std::vector<std::string> notes;
    const Listed newest = newest_checkpoint(detail::posix_file_system(),
                                            TRANCHE_FIXTURES "/version-2/" + std::string(name), notes);
    EXPECT_THAT(notes, ::testing::IsEmpty());
    Reader reader(storage, newest.path);
    EXPECT_THAT(reader.verify(), ::testing::IsEmpty());
    EXPECT_EQ(reader.manifest().version, 2);
    EXPECT_EQ(reader.manifest().minor, 0);
    EXPECT_EQ(reader.layout(), layout);
    expect_sample(reader);
  }
}

}  // namespace
}  // namespace tranche::checkpoint
