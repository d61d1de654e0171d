#include <gmock/gmock.h>

#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "tests/tools/temporary.h"
#include "tools/arguments.h"
#include "tools/shell/command_description.h"
#include "tools/shell/man_page.h"
#include "tranche/core/error.h"

namespace tranche::tools {
namespace {

using test::message_of;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

std::string text_of(const std::vector<std::string>& arguments) {
  return parse_arguments(arguments).text;
}

/// A command as its --help shows it.
struct Shown {
  std::vector<std::string> path;   ///< "checkpoint", "list"
  std::vector<std::string> flags;  ///< "--json"
};

void read_help(const std::vector<std::string>& path, std::vector<Shown>& all) {
  std::vector<std::string> arguments = path;
  arguments.emplace_back("--help");
  Shown shown{path, {}};
  std::vector<std::string> below;
  std::istringstream lines(text_of(arguments));
  static const std::regex flag("^  (?:-h,)?(--[a-z-]+).*"), command("^  ([a-z]+) .*");
  bool commands = false;
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (!line.starts_with(' ')) commands = line == "Subcommands:";
    if (std::regex_match(line, match, flag)) shown.flags.push_back(match[1]);
    if (commands && std::regex_match(line, match, command)) below.push_back(match[1]);
  }
  all.push_back(shown);
  for (const std::string& name : below) {
    std::vector<std::string> longer = path;
    longer.push_back(name);
    read_help(longer, all);
  }
}

std::vector<Shown> all_of_help() {
  std::vector<Shown> all;
  read_help({}, all);
  return all;
}

std::string joined(const std::vector<std::string>& words, const char* separator) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : separator) + word;
  return text;
}

/// The text from `begin` to before the next `end`; empty if there is no `begin`.
std::string section(const std::string& text, const std::string& begin, const std::string& end) {
  const std::size_t at = text.find(begin);
  if (at == std::string::npos) return {};
  return text.substr(at, text.find(end, at + begin.size()) - at);
}

TEST(Shell, EveryFlagOfEveryCommandIsInThePagesAndCompletions) {
  const auto commands = all_of_help();
  std::size_t flags = 0;
  const std::string bash = text_of({"completion", "bash"}), zsh = text_of({"completion", "zsh"}),
                    fish = text_of({"completion", "fish"});
  for (const Shown& command : commands) {
    const std::string spaced = joined(command.path, " "),
                      name = spaced.empty() ? "tranche" : "tranche " + spaced;
    std::string upper = name;
    for (char& c : upper) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    std::string page = text_of({"man", command.path.empty() ? "tranche" : "tranche-" + command.path[0]});
    if (command.path.size() > 1) page = section(page, "\n.SH " + upper + "\n", "\n.SH ");
    const std::string in_bash = section(bash, "        '" + name + "')\n", ";;\n");
    std::string function = "\n_tranche_" + (spaced.empty() ? "commands" : joined(command.path, "_"));
    const std::string in_zsh = section(zsh, function + "() {\n", "\n}\n");
    for (const std::string& flag : command.flags) {
      ++flags;
      const std::string where = name + " " + flag;
      std::string in_roff;
      for (const char c : flag) in_roff += c == '-' ? std::string("\\-") : std::string(1, c);
      EXPECT_THAT(page, HasSubstr("\\fB" + in_roff + "\\fR")) << where;
      EXPECT_THAT(in_bash, HasSubstr(" '" + flag + "'")) << where;
      EXPECT_TRUE(in_zsh.find("'" + flag + "[") != std::string::npos ||
                  in_zsh.find(flag + "=[") != std::string::npos)
          << where;
      EXPECT_TRUE(std::regex_search(
          fish, std::regex("__tranche_at '" + spaced + "'\"[^\n]* -l " + flag.substr(2) + " ")))
          << where;
    }
  }
  EXPECT_GT(commands.size(), 18u);  // all commands of the help were found
  EXPECT_GT(flags, 200u);
}

TEST(Shell, PagesHaveTheTextsOfTheHelp) {
  const std::string page = text_of({"man", "tranche-train"});
  EXPECT_THAT(page, HasSubstr(".TH TRANCHE\\-TRAIN 1 \"\" \"tranche "));
  EXPECT_THAT(page,
              HasSubstr(".SS ZeRO and offload\n.TP\n\\fB\\-\\-stage\\fR \\fI0|1|2|3\\fR\nZeRO stage\n"));
  EXPECT_THAT(page, HasSubstr("preset or Hugging Face config.json [gpt\\-mini]"));
  EXPECT_THAT(page, HasSubstr(".SH EXAMPLES\n.EX\n  tranche train \\-\\-data my.txt"));
  EXPECT_THAT(page, HasSubstr("\\e\n"));  // a command that continues on the next line
  EXPECT_THAT(page, Not(HasSubstr("debug\\-fail")));
  const std::string whole = text_of({"man"});
  EXPECT_THAT(whole, HasSubstr(".SH EXIT STATUS\n.EX\n  0 success"));
  EXPECT_THAT(whole, HasSubstr(".TP\n\\fBtranche\\-plan\\fR(1)\nmemory, traffic"));
  EXPECT_THAT(whole, Not(HasSubstr("tranche\\-man")));
  const std::string checkpoint = text_of({"man", "tranche-checkpoint"});
  EXPECT_THAT(
      checkpoint,
      HasSubstr("\\fBtranche checkpoint diff\\fR [\\fIOPTION\\fR]... \\fIfirst\\fR \\fIsecond\\fR\n"));
  EXPECT_THAT(checkpoint, HasSubstr("[\\fIOPTION\\fR]... \\fIpath\\fR \\fB\\-\\-to\\fR \\fIDIR\\fR"));
  std::string names;
  for (const Shown& command : all_of_help()) {
    if (command.path.size() < 2)
      names += joined({"tranche", joined(command.path, "")}, command.path.empty() ? "" : "-") + "\n";
  }
  EXPECT_EQ(text_of({"man", "--list"}), names);
}

TEST(Shell, RefusesWhatIsNotThere) {
  const auto error_of = [](const std::vector<std::string>& arguments) {
    return message_of<ConfigurationError>([&] { parse_arguments(arguments); });
  };
  EXPECT_EQ(error_of({"completion", "tcsh"}),
            "there is no completion for 'tcsh', but for bash, zsh and fish");
  EXPECT_THAT(error_of({"completion"}), HasSubstr("shell is missing"));
  EXPECT_THAT(error_of({"completion", "bash", "--json"}), HasSubstr("unknown flag --json"));
  EXPECT_THAT(error_of({"man", "tranche-trin"}),
              HasSubstr("'tranche-trin' is no manual page; there are tranche, tranche-train, "));
}

TEST(Shell, TypesSayWhatIsProposed) {
  const Vocabulary vocabulary{{"AXES", {"shard=", "tensor="}}, {"PRESET", {"gpt2"}}};
  const auto words = [&](const char* type) { return proposed_values(type, vocabulary).words; };
  EXPECT_THAT(words("fp32|bf16|fp16"), ElementsAre("fp32", "bf16", "fp16"));
  EXPECT_THAT(words("0|1"), ElementsAre("0", "1"));
  EXPECT_THAT(words("PRESET|FILE"), ElementsAre("gpt2"));
  EXPECT_TRUE(proposed_values("PRESET|FILE", vocabulary).files);
  EXPECT_TRUE(proposed_values("[NAME=]FILE", vocabulary).files);
  EXPECT_TRUE(proposed_values("latest|best|DIR", vocabulary).folders);
  EXPECT_THAT(words("AXES|search"), ElementsAre("shard=", "tensor=", "search"));
  EXPECT_THAT(words("AXES;AXES..."), ElementsAre("shard=", "tensor="));
  EXPECT_TRUE(proposed_values("AXES|search", vocabulary).list);
  EXPECT_TRUE(proposed_values("N,N...", vocabulary).list);
  for (const char* type : {"", "N", "X", "TEXT", "N,N...", "TIME,...", "YYYY-MM-DD", "SIZE"})
    EXPECT_TRUE(proposed_values(type, vocabulary).empty()) << type;
}

TEST(Shell, RoffTakesNoTextForARequest) {
  const DescribedCommand program{"tranche", "a text", "Notes:\n  .first\n'second", {}, {}};
  const std::string page = man_page(program, "tranche", "1");
  EXPECT_THAT(page, HasSubstr("\n  .first\n"));  // roff's requests begin at the margin
  EXPECT_THAT(page, HasSubstr("\n\\&'second\n"));
}

}  // namespace
}  // namespace tranche::tools
