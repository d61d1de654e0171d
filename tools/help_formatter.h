#pragma once
/// The layout of --help.

#include <CLI/CLI.hpp>
#include <string>

namespace tranche::tools {

/// Flags in their groups, one column of names and types, one of texts that are wrapped; defaults in brackets
/// behind the text.
class HelpFormatter final : public CLI::Formatter {
 public:
  HelpFormatter();
  std::string make_description(const CLI::App* app) const override;
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
};

}  // namespace tranche::tools
