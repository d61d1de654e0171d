// What benches share: command lines and figures.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tranche/bench/figures.h"
#include "tranche/bench/flags.h"
#include "tranche/core/error.h"

namespace tranche::bench {
namespace {

using ::testing::HasSubstr;

struct Settings {
  std::string directory = ".";
  std::int64_t bytes = 7;
  int repeats = 5;
};

Settings parsed(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "bench");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  Settings settings;
  parse_flags(static_cast<int>(argv.size()), argv.data(),
              {text_flag("--dir", settings.directory), number_flag("--mib", settings.bytes, 20),
               number_flag("--repeats", settings.repeats)});
  return settings;
}

std::string refusal(const std::vector<std::string>& arguments) {
  try {
    parsed(arguments);
  } catch (const ConfigurationError& error) {
    return error.message();
  }
  return "no error";
}

TEST(BenchFlags, SetWhatTheyName) {
  const Settings nothing = parsed({});
  EXPECT_EQ(nothing.directory, ".");
  EXPECT_EQ(nothing.bytes, 7);
  EXPECT_EQ(nothing.repeats, 5);
  const Settings all = parsed({"--repeats", "3", "--dir", "--mib", "--mib", "5", "--repeats", "4"});
  EXPECT_EQ(all.directory, "--mib") << "the word behind a flag is its value, whatever it looks like";
  EXPECT_EQ(all.bytes, 5 << 20);
  EXPECT_EQ(all.repeats, 4) << "the last one counts";
}

TEST(BenchFlags, RefuseWhatTheyDoNotKnow) {
  EXPECT_THAT(refusal({"--mib", "5", "--rounds", "3"}), HasSubstr("unknown flag '--rounds'"));
  EXPECT_THAT(refusal({"--mib", "5", "--dir"}), HasSubstr("'--dir' needs a value, or is unknown"));
}

TEST(BenchFlags, ErrorsBecomeTheProgramsStatus) {
  EXPECT_EQ(run_program("bench", [] {}), 0);
  EXPECT_EQ(run_program("bench", [] { throw ConfigurationError("no such thing"); }),
            static_cast<int>(ExitStatus::configuration));
}

TEST(BenchFigures, MediansAndQuantiles) {
  EXPECT_EQ(median({}), 0);
  EXPECT_EQ(median({4}), 4);
  EXPECT_EQ(median({9, 1, 5}), 5);
  EXPECT_EQ(median({9, 1, 5, 3}), 4);
  const std::vector<double> values{50, 10, 40, 20, 30};
  EXPECT_EQ(quantile(values, 0), 10);
  EXPECT_EQ(quantile(values, 0.25), 20);
  EXPECT_EQ(quantile(values, 0.5), 30);
  EXPECT_EQ(quantile(values, 0.75), 40);
  EXPECT_EQ(quantile(values, 1), 50);
  EXPECT_EQ(quantile({10, 20}, 0.5), 20) << "the nearest, and of two the larger";
}

TEST(BenchFigures, DifferencesOfBothClocks) {
  const Seconds spent = Seconds{3, 2} - Seconds{1, 0.5};
  EXPECT_EQ(spent.wall, 2);
  EXPECT_EQ(spent.processor, 1.5);
}

}  // namespace
}  // namespace tranche::bench
