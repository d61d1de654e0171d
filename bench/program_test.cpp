// Tests the common parts of benches: command lines and statistics.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "bench/figures.h"
#include "bench/flags.h"
#include "tranche/core/error.h"

namespace tranche::bench {
namespace {

using ::testing::HasSubstr;

struct Settings {
  std::string directory = ".";
  std::int64_t bytes = 7;
  int repeats = 5;
  double seconds = 0.5;
  std::string clock = "wall";
};

Settings parsed(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "bench");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  Settings settings;
  parse_flags(static_cast<int>(argv.size()), argv.data(),
              {text_flag("--dir", settings.directory), number_flag("--mib", settings.bytes, 20),
               number_flag("--repeats", settings.repeats), number_flag("--seconds", settings.seconds),
               choice_flag("--clock", settings.clock, {"wall", "processor"})});
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
  const Settings equals = parsed({"--dir=a=b", "--seconds=0.25", "--clock", "processor"});
  EXPECT_EQ(equals.directory, "a=b");
  EXPECT_EQ(equals.seconds, 0.25);
  EXPECT_EQ(equals.clock, "processor");
}

TEST(BenchFlags, RefuseWhatTheyDoNotKnow) {
  EXPECT_EQ(refusal({"--mib", "5", "--elephants", "3"}), "unknown flag --elephants; --help lists the flags");
  EXPECT_EQ(refusal({"--mbi", "5"}), "unknown flag --mbi (did you mean --mib?); --help lists the flags");
  EXPECT_EQ(refusal({"--repeat=5"}),
            "unknown flag --repeat (did you mean --repeats?); --help lists the flags");
  EXPECT_EQ(refusal({"--repeat"}), "unknown flag --repeat (did you mean --repeats?); --help lists the flags");
  EXPECT_EQ(refusal({"5"}), "'5' is no flag; values stand behind their flags, and --help lists those");
  EXPECT_EQ(refusal({"--mib", "5", "--dir"}), "--dir needs a value behind it");
}

TEST(BenchFlags, RefuseValuesThatAreNone) {
  EXPECT_EQ(refusal({"--repeats", "many"}), "--repeats 'many' is no whole number from 0 to 2147483647");
  EXPECT_EQ(refusal({"--repeats", "3x"}), "--repeats '3x' is no whole number from 0 to 2147483647");
  EXPECT_EQ(refusal({"--repeats", ""}), "--repeats '' is no whole number from 0 to 2147483647");
  EXPECT_EQ(refusal({"--repeats", "-1"}), "--repeats '-1' is no whole number from 0 to 2147483647");
  EXPECT_EQ(refusal({"--repeats", "3000000000"}),
            "--repeats '3000000000' is no whole number from 0 to 2147483647");
  EXPECT_EQ(refusal({"--mib", "8796093022208"}),
            "--mib '8796093022208' is no whole number from 0 to 8796093022207");
  EXPECT_THAT(refusal({"--seconds", "nan"}), HasSubstr("--seconds 'nan' is no number from 0 to"));
  EXPECT_THAT(refusal({"--seconds", "inf"}), HasSubstr("--seconds 'inf' is no number from 0 to"));
  EXPECT_EQ(refusal({"--clock", "walls"}), "--clock 'walls' is not one of wall, processor");
}

TEST(BenchFlags, HelpNamesEveryFlag) {
  try {
    parsed({"--mib", "5", "--help"});
    ADD_FAILURE() << "no help";
  } catch (const HelpAsked& help) {
    EXPECT_EQ(help.text,
              "flags, each with a value; bench/README.md and the program's source say more\n"
              "  --dir\n  --mib\n  --repeats\n  --seconds\n  --clock one of wall, processor\n");
  }
  EXPECT_EQ(run_program("bench", [] { throw HelpAsked{"flags\n"}; }), 0);
}

TEST(BenchFlags, ListsAreSplitAtCommas) {
  EXPECT_EQ(comma_list("a,bc,d"), (std::vector<std::string>{"a", "bc", "d"}));
  EXPECT_EQ(comma_list("a,,"), (std::vector<std::string>{"a", "", ""}));
  EXPECT_EQ(comma_list(""), (std::vector<std::string>{""}));
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
