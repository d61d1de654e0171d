#pragma once
/// `tranche tokenize`.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tranche::tools {

struct Options;
struct Output;

struct TokenizeFlags {
  std::vector<std::string> data;  ///< files and patterns
  std::string tokenizer;          ///< folder; empty: bytes
  std::string out;
  std::string format = "auto";  ///< as in training::parse_text_format()
  std::string chat;             ///< name or file of a template
  std::string date;             ///< today's date in templates
  bool no_special = false;
  std::optional<std::int64_t> threads;
};

/// Adds --chat-template and --chat-date, which other commands have too.
void add_chat_flags(CLI::App& app, std::string& chat, std::string& date);
/// Adds the subcommand. `flags` must outlive parsing.
CLI::App* add_tokenize_command(CLI::App& program, TokenizeFlags& flags);
/// Returns the exit status. Under mpirun only rank 0 works.
int run_tokenize(const Options& options, const Output& output);

}  // namespace tranche::tools
