#pragma once
/// The layout of --help.

#include <CLI/CLI.hpp>
#include <string>

namespace tranche::tools {

/// Formats flags in their groups, with a column of names and types and a column of wrapped texts; defaults
/// follow the text in brackets.
class HelpFormatter final : public CLI::Formatter {
 public:
  HelpFormatter();
  std::string make_description(const CLI::App* app) const override;
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
};

}  // namespace tranche::tools
