#include "tools/files.h"

#include <gmock/gmock.h>

#include "tests/tools/temporary.h"
#include "tranche/core/error.h"

namespace tranche::tools {
namespace {

using test::message_of;
using test::TemporaryFolder;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(Files, RequireWritableSaysSoBeforeAndLeavesNothing) {
  const TemporaryFolder folder;
  require_writable("", "--report");
  require_writable(folder.path("r.json"), "--report");
  EXPECT_THAT(folder.names(), IsEmpty());
  require_writable("/dev/null", "--report");
  EXPECT_THAT(message_of<ConfigurationError>([&] { require_writable(folder.path("x/r.json"), "--report"); }),
              HasSubstr("--report '"));
}

TEST(Files, AnOutputTakesThePlaceOfNoOtherFile) {
  const TemporaryFolder folder;
  const std::string config = folder.write("c.json", "{}"), report = folder.path("r.json");
  std::filesystem::create_symlink(config, folder.path("link"));
  const auto refused = [&](const std::vector<NamedFile>& written) {
    return message_of<ConfigurationError>([&] {
      require_apart(written, {{"--config", config}, {"--machine", ""}});
    });
  };
  EXPECT_EQ(refused({{"--report", report}, {"--trace", ""}, {"--metrics", ""}}), "");
  EXPECT_EQ(
      refused({{"--report", folder.path("./c.json")}}),
      "--report '" + folder.path("./c.json") + "' would replace the file that --config reads; name another");
  EXPECT_THAT(refused({{"--trace", folder.path("link")}}), HasSubstr("link' would replace the file that"));
  EXPECT_EQ(refused({{"--report", report}, {"--trace", folder.path("x/../r.json")}}),
            "--report '" + report + "' and --trace '" + folder.path("x/../r.json") +
                "' are one file; name another for one of them");
  EXPECT_EQ(refused({{"--report", "/dev/null"}, {"--trace", "/dev/null"}}), "") << "nothing is kept there";
}

TEST(Files, AProbeShowsWhetherRanksShareAFolder) {
  const TemporaryFolder folder;
  const std::string path = folder.path("a/b");
  place_probe(path, "--dir", 7);
  require_probe(path, "--dir", 7, 1);
  EXPECT_THAT(message_of<CheckpointError>([&] { require_probe(path, "--dir", 8, 1); }),
              AllOf(HasSubstr("--dir '" + path + "': rank 1 does not see there what rank 0 wrote"),
                    HasSubstr("all nodes share")));
  remove_probe(path, 7);
  remove_probe(path, 7);  // gone already
  EXPECT_TRUE(std::filesystem::is_empty(path));
  const std::string file = folder.write("file", "x");
  EXPECT_THAT(
      message_of<CheckpointError>([&] { place_probe(file, "--dir", 7); }),
      AllOf(HasSubstr("--dir '" + file + "' cannot be written"), HasSubstr("nothing was trained yet")));
}

TEST(Files, ProbesOfRunsThatWereEndedInTheMiddleGo) {
  const TemporaryFolder folder;
  folder.write(".probe-0000000000000001", "");
  folder.write(".probe-0000000000000001.3", "");
  folder.write("latest", "step-1");
  place_probe(folder.path("."), "--dir", 7);
  clear_probes(folder.path("."), 7);
  EXPECT_THAT(folder.names(), testing::UnorderedElementsAre(".probe-0000000000000007", "latest"));
}

}  // namespace
}  // namespace tranche::tools
