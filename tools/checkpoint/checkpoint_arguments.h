#pragma once
/// The command lines of `tranche checkpoint ...` and `tranche generate`.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tranche/models/model_registry.h"

namespace CLI {
class App;
}

namespace tranche::tools {

enum class CheckpointAction : std::uint8_t { none, list, verify, show, export_folder, import_folder, diff };

struct CheckpointOptions {
  CheckpointAction action = CheckpointAction::none;
  std::string path;    ///< a checkpoint, a run's folder, or a folder to import
  std::string second;  ///< the second one of diff
  std::string to;      ///< the folder to write
  std::string tensor;  ///< show: only this one
  models::ModelRegistry models;
  std::string model;  ///< preset or config.json, if the checkpoint or folder has none
  std::string base;   ///< base of the adapters, if it was moved
  bool peft = false;  ///< export: adapters in PEFT's format
  std::string dtype = "fp32";
  bool partial = false;             ///< import: only the tensors that the model has too
  std::vector<std::string> rename;  ///< import: "OLD=NEW"
  bool json = false;
};

struct GenerateOptions {
  std::string from;  ///< a checkpoint, a run's folder, or a Hugging Face folder
  models::ModelRegistry models;
  std::string model;      ///< as in CheckpointOptions
  std::string base;       ///< as in CheckpointOptions
  std::string tokenizer;  ///< a folder for training::load_tokenizer()
  std::vector<std::string> prompts;
  std::string prompts_file;                ///< one prompt per line, or JSON lines with "prompt" or "messages"
  std::string prompts_format = "auto";     ///< as in training::parse_text_format()
  std::vector<std::string> prompt_tokens;  ///< "1,2,3" each
  std::string chat;                        ///< name or file of the template for messages
  std::string date;                        ///< today's date in templates
  std::int64_t tokens = 200;
  double temperature = 0.8;
  bool greedy = false;
  std::int64_t top_k = 0;  ///< 0: all
  double top_p = 1;
  std::vector<std::string> stop;  ///< texts that end generation
  std::int64_t seed = 1234;
  std::int64_t max_batch = 8;  ///< prompts per rank at the same time
  bool cache = true;
  bool json = false;
  std::string dtype = "fp32";
  std::int64_t stage = 0;
  std::string mesh;  ///< axes of the ranks; empty: all shard
  std::optional<std::int64_t> threads;
};

/// Adds the subcommand and its own subcommands. `options` must outlive parsing.
CLI::App* add_checkpoint_command(CLI::App& program, CheckpointOptions& options);
CLI::App* add_generate_command(CLI::App& program, GenerateOptions& options);

/// The dtype of an export's weights. Throws ConfigurationError for one that is not written.
DataType export_dtype(const CheckpointOptions& options);

/// Throws ConfigurationError for values that were parsed but are invalid.
void check(const CheckpointOptions& options);
void check(const GenerateOptions& options);

/// Parses "OLD=NEW" into names; throws ConfigurationError for other texts, and for names that
/// LoadOptions::renames does not allow.
std::vector<std::pair<std::string, std::string>> parse_renames(const std::vector<std::string>& texts);

/// Parses "1,2,3"; throws ConfigurationError naming the text that is not a number.
std::vector<std::int32_t> parse_tokens(const std::string& text);

}  // namespace tranche::tools
