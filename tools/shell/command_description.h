#pragma once
/// The command line as plain data: its commands, flags and the values that they take. Manual pages and shell
/// completion are written from it.

#include <map>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tranche::tools {

/// The values that a flag or an argument takes, as far as a shell can propose them.
struct ProposedValues {
  std::vector<std::string> words;
  bool files = false, folders = false;
  bool list = false;  ///< several values in one word, separated by commas or semicolons

  bool empty() const { return words.empty() && !files && !folders; }
  friend bool operator==(const ProposedValues&, const ProposedValues&) = default;
};

struct DescribedOption {
  std::vector<std::string> names;  ///< "-h", "--help"; the name alone if it is an argument without a flag
  std::string type;                ///< as --help shows it: "fp32|bf16|fp16"; empty: the flag takes no value
  std::string text;                ///< with its default in brackets
  std::string group;               ///< heading of --help
  bool argument = false;           ///< given by its position
  bool required = false, repeats = false;
  ProposedValues values;
};

struct DescribedCommand {
  std::string name;  ///< with the commands above it: "tranche checkpoint list"
  std::string text, footer;
  std::vector<DescribedOption> options;
  std::vector<DescribedCommand> commands;

  /// The name without those of the commands above it.
  std::string last_name() const { return name.substr(name.rfind(' ') + 1); }
};

/// The words that stand for a type of values: "PRESET" for the names of models.
using Vocabulary = std::map<std::string, std::vector<std::string>>;

/// Reads the values from a type as --help shows it. Its parts are separated by |: a part in lower case is a
/// value, a part with FILE or DIR is a path, and a part of the vocabulary stands for its words.
ProposedValues proposed_values(const std::string& type, const Vocabulary& vocabulary);

/// Describes `app` and its commands, without hidden commands and flags.
DescribedCommand describe(const CLI::App& app, const Vocabulary& vocabulary);

/// `command` and all commands below it, each before those below it.
std::vector<const DescribedCommand*> all_commands(const DescribedCommand& command);

}  // namespace tranche::tools
