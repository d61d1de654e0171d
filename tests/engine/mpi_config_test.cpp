// Ranks that a launcher started read a configuration. If one rank cannot read its file, every rank throws
// an error that names that rank.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "tests/comm/mpi_main.h"
#include "tests/core/error_text.h"
#include "tranche/config/config.h"
#include "tranche/engine/runtime.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

TEST(MpiRuntime, FromConfigIsReadForTheRanksThatThereAre) {
  const int ranks = world().size();
  const Runtime runtime = Runtime::from_config(
      R"({"train_micro_batch_size_per_gpu": 3, "tranche": {"threads": 1, "communication_timeout": 77}})");
  EXPECT_EQ(runtime.size(), ranks);
  EXPECT_EQ(runtime.config().train_batch_size, 3 * ranks);
  EXPECT_EQ(runtime.config().communication_timeout, 77);
  EXPECT_NO_THROW(runtime.check(runtime.config()));
}

TEST(MpiRuntime, AFileThatOneRankCannotReadIsNamedOnAll) {
  const int rank = world().rank();
  const std::string path = ::testing::TempDir() + "mpi_config_" + std::to_string(::getppid()) + "_" +
                           std::to_string(rank) + ".json";
  if (rank != 1) std::ofstream(path) << "{}";
  const std::string text = message_of<ConfigurationError>([&] { (void)Runtime::from_config(path); });
  EXPECT_THAT(text, HasSubstr("rank 1: configuration file '"));
  EXPECT_THAT(text, HasSubstr("_1.json' cannot be read: No such file"));
  if (rank != 1) std::remove(path.c_str());
  EXPECT_EQ(message_of<ConfigurationError>([] { (void)Runtime::from_config("none.json"); }),
            "configuration file 'none.json' cannot be read: No such file or directory")
      << "what all of them meet is nobody's in particular";
}

}  // namespace
}  // namespace tranche::test
