#include "tools/shell/command_description.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <set>

namespace tranche::tools {

namespace {

bool is_value(const std::string& part) {
  return !part.empty() && part != "..." &&
         std::none_of(part.begin(), part.end(), [](unsigned char c) { return std::isupper(c) != 0; });
}

/// The type of a value in the help's words; CLI11 has names of its own for numbers.
std::string shown_type(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  if (option.get_items_expected_max() == 0) return {};
  return type == "INT" || type == "UINT" ? "N" : type == "FLOAT" ? "X" : type;
}

DescribedOption describe(const CLI::Option& option, const Vocabulary& vocabulary) {
  DescribedOption described;
  described.argument = option.get_positional();
  if (described.argument) {
    described.names = {option.get_name(true)};
  } else {
    for (const std::string& name : option.get_snames()) described.names.push_back("-" + name);
    for (const std::string& name : option.get_lnames()) described.names.push_back("--" + name);
  }
  described.type = shown_type(option);
  described.text = option.get_description();
  if (!option.get_default_str().empty()) described.text += fmt::format(" [{}]", option.get_default_str());
  described.group = option.get_group();
  described.required = option.get_required();
  described.repeats = option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
  described.values = proposed_values(described.type, vocabulary);
  return described;
}

DescribedCommand describe(const CLI::App& app, const Vocabulary& vocabulary, const std::string& above) {
  DescribedCommand command;
  command.name = above + app.get_name();
  command.text = app.get_description();
  // Commands inherit the text; it stays where it was written.
  const bool inherited = app.get_parent() != nullptr && app.get_parent()->get_footer() == app.get_footer();
  command.footer = inherited ? "" : app.get_footer();
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_group().empty()) command.options.push_back(describe(*option, vocabulary));
  }
  for (const CLI::App* below : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!below->get_group().empty())
      command.commands.push_back(describe(*below, vocabulary, command.name + " "));
  }
  return command;
}

}  // namespace

ProposedValues proposed_values(const std::string& type, const Vocabulary& vocabulary) {
  ProposedValues values;
  values.list = type.find("...") != std::string::npos;
  std::set<std::string> seen;
  for (std::size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = type.find_first_of("|,;", begin);
    const std::string part = type.substr(begin, end == std::string::npos ? end : end - begin);
    if (const std::string name = part.substr(0, part.find("...")); !seen.insert(name).second) continue;
    if (const auto known = vocabulary.find(part); known != vocabulary.end()) {
      values.words.insert(values.words.end(), known->second.begin(), known->second.end());
      values.list = values.list || part == "AXES";
    } else if (part.find("FILE") != std::string::npos) {
      values.files = true;
    } else if (part == "DIR") {
      values.folders = true;
    } else if (is_value(part)) {
      values.words.push_back(part);
    }
  }
  return values;
}

DescribedCommand describe(const CLI::App& app, const Vocabulary& vocabulary) {
  return describe(app, vocabulary, "");
}

std::vector<const DescribedCommand*> all_commands(const DescribedCommand& command) {
  std::vector<const DescribedCommand*> all{&command};
  for (const DescribedCommand& below : command.commands) {
    const auto inner = all_commands(below);
    all.insert(all.end(), inner.begin(), inner.end());
  }
  return all;
}

}  // namespace tranche::tools
