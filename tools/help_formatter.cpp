#include "tools/help_formatter.h"

#include <fmt/format.h>

#include <utility>

#include "tools/text_layout.h"

namespace tranche::tools {

namespace {

constexpr std::size_t text_column = 30;

}  // namespace

HelpFormatter::HelpFormatter() {
  for (const auto& [type, shown] : {std::pair("INT", "N"), std::pair("UINT", "N"), std::pair("FLOAT", "X")}) {
    label(type, shown);
  }
}

std::string HelpFormatter::make_description(const CLI::App* app) const {
  return wrapped(app->get_description(), 0, 0) + "\n\n";
}

std::string HelpFormatter::make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const {
  std::string text = Formatter::make_help(app, std::move(name), mode);
  // CLI11 2.1 writes a blank line before and after each group.
  for (std::size_t at = text.find("\n\n\n"); at != std::string::npos; at = text.find("\n\n\n", at)) {
    text.erase(at, 1);
  }
  while (text.ends_with("\n\n")) text.pop_back();
  return text;
}

std::string HelpFormatter::make_option(const CLI::Option* option, bool is_positional) const {
  std::string name = make_option_name(option, is_positional);
  if (option->get_type_size() != 0 && !is_positional) name += " " + get_label(option->get_type_name());
  std::string text = make_option_desc(option);
  if (!option->get_default_str().empty()) text += fmt::format(" [{}]", option->get_default_str());
  if (option->get_required() && !is_positional) text += " (required)";
  return two_columns(name, text, text_column);
}

std::string HelpFormatter::make_subcommand(const CLI::App* command) const {
  return two_columns(command->get_name(), command->get_description(), text_column);
}

}  // namespace tranche::tools
