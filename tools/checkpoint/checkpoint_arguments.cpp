#include "tools/checkpoint/checkpoint_arguments.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>

#include "checkpoint/renames.h"
#include "tools/flag_values.h"
#include "tools/tokenize.h"
#include "tranche/config/config.h"
#include "tranche/core/error.h"
#include "tranche/training/tokenize.h"

namespace tranche::tools {

CLI::App* add_checkpoint_command(CLI::App& program, CheckpointOptions& options) {
  CLI::App* command = program.add_subcommand(
      "checkpoint", "list, verify, show, export, import or diff checkpoints (one process, no device)");
  command->require_subcommand(0, 1);
  const auto add = [&](const char* name, const char* what, CheckpointAction action) {
    CLI::App* app = command->add_subcommand(name, what);
    app->allow_extras()->prefix_command(false);
    app->callback([&options, action] { options.action = action; });
    return app;
  };
  const auto json = [&](CLI::App* app) { app->add_flag("--json", options.json, "as JSON"); };
  const char* path = "a checkpoint, or a run's folder of them, whose newest complete one is taken";

  CLI::App* list = add("list", "the checkpoints in a run's folder, newest first", CheckpointAction::list);
  list->add_option("folder", options.path, "a run's folder of checkpoints")->type_name("DIR")->required();
  json(list);

  CLI::App* verify = add("verify", "read every byte and name what is damaged; status 4 when something is",
                         CheckpointAction::verify);
  verify->add_option("path", options.path, "a checkpoint, or a run's folder: all that are in it")
      ->type_name("DIR")
      ->required();
  json(verify);

  CLI::App* show = add("show", "what is in a checkpoint: the run's state, tensors, shapes, dtypes, shards",
                       CheckpointAction::show);
  show->add_option("path", options.path, path)->type_name("DIR")->required();
  show->add_option("--tensor", options.tensor,
                   "only this tensor, with the ranges of its shards and its values")
      ->type_name("NAME");
  json(show);

  CLI::App* to = add("export", "write the weights as a folder that Hugging Face's transformers opens",
                     CheckpointAction::export_folder);
  to->add_option("path", options.path, path)->type_name("DIR")->required();
  to->add_option("--to", options.to, "folder to write")->type_name("DIR")->required();
  to->add_option("--dtype", options.dtype, "of the weights")->type_name("fp32|bf16")->capture_default_str();
  to->add_option("--model", options.model, "preset or config.json, where the checkpoint does not say it")
      ->type_name("PRESET|FILE");

  const char* base = "checkpoint, or run's folder, of the base that adapters belong to";
  to->add_option("--base", options.base, fmt::format("{} (default: where it was)", base))->type_name("DIR");
  to->add_flag("--peft", options.peft, "adapters alone, in PEFT's format (default: merged into the weights)");

  CLI::App* from = add("import", "make a checkpoint (step 0) from a folder of Hugging Face's transformers",
                       CheckpointAction::import_folder);
  from->add_option("path", options.path, "folder with safetensors and config.json, or with PEFT adapters")
      ->type_name("DIR")
      ->required();
  from->add_option("--base", options.base, fmt::format("{}: for PEFT adapters", base))->type_name("DIR");
  from->add_option("--to", options.to, "a run's folder, without checkpoints so far")
      ->type_name("DIR")
      ->required();
  from->add_option("--model", options.model, "preset or config.json instead of the folder's own")
      ->type_name("PRESET|FILE");
  from->add_flag("--partial", options.partial,
                 "take the tensors that the model has too; a line for each that is missing or passed over");
  from->add_option(
          "--rename", options.rename,
          "name of a tensor in the folder and of one that transformers' model has, one * in both standing "
          "for the same text; may be given several times")
      ->type_name("OLD=NEW")
      ->take_all()
      ->allow_extra_args(false);

  CLI::App* diff =
      add("diff", "compare two checkpoints by value, of any numbers of ranks; status 1 when they differ",
          CheckpointAction::diff);
  diff->add_option("first", options.path, path)->type_name("DIR")->required();
  diff->add_option("second", options.second, "the same")->type_name("DIR")->required();
  json(diff);
  return command;
}

CLI::App* add_generate_command(CLI::App& program, GenerateOptions& options) {
  CLI::App* app =
      program.add_subcommand("generate", "write text from a checkpoint or a folder of Hugging Face's");
  app->add_option("--from", options.from,
                  "a checkpoint, a run's folder (the newest complete one), or a folder with safetensors and "
                  "config.json")
      ->type_name("DIR")
      ->required();
  app->add_option("--prompt", options.prompts, "text to go on from; may be given several times")
      ->type_name("TEXT")
      ->take_all()
      ->allow_extra_args(false);
  app->add_option(
         "--prompts", options.prompts_file,
         "file of prompts, one a line; of JSON lines the \"prompt\" or the \"messages\" of each object")
      ->type_name("FILE");
  app->add_option("--prompts-format", options.prompts_format, "of --prompts (auto: as its bytes tell)")
      ->type_name("auto|text|jsonl")
      ->capture_default_str();
  app->add_option("--prompt-tokens", options.prompt_tokens,
                  "numbers to go on from, like 1,2,3; numbers are printed; may be given several times")
      ->type_name("N,N...")
      ->take_all()
      ->allow_extra_args(false);
  add_chat_flags(*app, options.chat, options.date);
  app->add_option("--tokens", options.tokens, "tokens to write")->capture_default_str();
  app->add_option("--temperature", options.temperature, "of the draws; 0: always the likeliest token")
      ->capture_default_str();
  app->add_flag("--greedy", options.greedy, "always the likeliest token, as --temperature 0");
  app->add_option("--top-k", options.top_k, "draw among this many likeliest tokens (default: all)");
  app->add_option("--top-p", options.top_p,
                  "draw among the likeliest tokens that have this probability together")
      ->capture_default_str();
  app->add_option("--stop", options.stop, "end behind this text; may be given several times")
      ->type_name("TEXT")
      ->take_all()
      ->allow_extra_args(false);
  app->add_option("--seed", options.seed, "of the draws")->capture_default_str();
  app->add_option("--max-batch", options.max_batch,
                  "prompts that a rank works on at once, which bounds the memory of keys and values")
      ->capture_default_str();
  app->add_flag_callback(
      "--no-cache", [&options] { options.cache = false; }, "compute the whole text again for each token");
  app->add_flag("--json", options.json, "a JSON object a prompt: index, prompt, text, tokens, end");
  app->add_option("--model", options.model, "preset or config.json, where --from does not say it")
      ->type_name("PRESET|FILE");
  app->add_option("--base", options.base, "base of a checkpoint of adapters (default: where it was)")
      ->type_name("DIR");
  app->add_option("--tokenizer", options.tokenizer,
                  "folder with tokenizer.json, tokenizer.model, or vocab.json and merges.txt (default: "
                  "--from, where it "
                  "holds one; else bytes)")
      ->type_name("DIR");
  app->add_option("--dtype", options.dtype, "compute dtype")
      ->type_name("fp32|bf16|fp16")
      ->capture_default_str();
  app->add_option("--stage", options.stage, "under mpirun: 3 shards the weights over the ranks")
      ->type_name("0|1|2|3")
      ->capture_default_str();
  app->add_option("--mesh", options.mesh,
                  "under mpirun: axes of the ranks, like 'pipeline=2, shard=*' (default: all ranks shard)")
      ->type_name("AXES");
  app->add_option("--threads", options.threads, "of a rank (default: the node's cores over its ranks)");
  return app;
}

DataType export_dtype(const CheckpointOptions& options) {
  return dtype_of_flag(options.dtype, {DataType::float32, DataType::bfloat16});
}

void check(const CheckpointOptions& options) {
  (void)export_dtype(options);
  (void)parse_renames(options.rename);
}

void check(const GenerateOptions& options) {
  const auto refuse = [](const char* flag, auto value, const char* why) {
    throw ConfigurationError(fmt::format("{} is {}, but {}", flag, value, why));
  };
  if (options.tokens < 1) refuse("--tokens", options.tokens, "must be at least 1");
  if (!(options.temperature >= 0)) refuse("--temperature", options.temperature, "must not be negative");
  if (options.top_k < 0) refuse("--top-k", options.top_k, "must not be negative");
  if (!(options.top_p > 0 && options.top_p <= 1))
    refuse("--top-p", options.top_p, "must be above 0 and at most 1");
  for (const std::string& text : options.stop) {
    if (text.empty()) throw ConfigurationError("--stop is empty; give it the text to end behind");
  }
  if (!options.stop.empty() && !options.prompt_tokens.empty()) {
    throw ConfigurationError("--stop is a text, but --prompt-tokens are numbers; give a --prompt");
  }
  if (!options.chat.empty() && options.prompts_file.empty()) {
    throw ConfigurationError(
        "--chat-template writes the messages of --prompts FILE.jsonl, and none is given");
  }
  (void)training::parse_text_format(options.prompts_format, "--prompts-format");
  if (options.prompts_format != "auto" && options.prompts_file.empty())
    throw ConfigurationError("--prompts-format is of --prompts FILE, and none is given");
  if (options.seed < 0) refuse("--seed", options.seed, "must not be negative");
  if (options.max_batch < 1) refuse("--max-batch", options.max_batch, "must be at least 1");
  if (options.stage < 0 || options.stage > 3) refuse("--stage", options.stage, "must be 0 to 3");
  if (options.threads && (*options.threads < 1 || *options.threads > most_threads)) {
    throw ConfigurationError(
        fmt::format("--threads is {}, but must be between 1 and {}", *options.threads, most_threads));
  }
  (void)dtype_of_flag(options.dtype);
  const int kinds = static_cast<int>(!options.prompts.empty()) +
                    static_cast<int>(!options.prompts_file.empty()) +
                    static_cast<int>(!options.prompt_tokens.empty());
  if (kinds != 1)
    throw ConfigurationError(
        "give a --prompt, --prompts with a file, or --prompt-tokens like 1,2,3: one of the three");
  for (const std::string& prompt : options.prompts) {
    if (prompt.empty())
      throw ConfigurationError("the --prompt is empty; give it at least one character to go on from");
  }
  for (const std::string& prompt : options.prompt_tokens) (void)parse_tokens(prompt);
}

std::vector<std::pair<std::string, std::string>> parse_renames(const std::vector<std::string>& texts) {
  std::vector<std::pair<std::string, std::string>> renames;
  for (const std::string& text : texts) {
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos) {
      throw ConfigurationError(fmt::format("--rename '{}' is not OLD=NEW, the names of a tensor", text));
    }
    renames.emplace_back(text.substr(0, equals), text.substr(equals + 1));
  }
  try {
    (void)checkpoint::Renames(renames);
  } catch (const InvalidArgument& problem) {
    throw ConfigurationError("--" + problem.message());
  }
  return renames;
}

std::vector<std::int32_t> parse_tokens(const std::string& text) {
  std::vector<std::int32_t> tokens;
  const char* at = text.data();
  const char* end = at + text.size();
  for (;;) {
    while (at < end && *at == ' ') ++at;
    std::int32_t token = 0;
    const auto [stop, problem] = std::from_chars(at, end, token);
    at = stop;
    while (at < end && *at == ' ') ++at;
    if (problem != std::errc() || token < 0 || (at < end && *at != ','))
      throw ConfigurationError(fmt::format("--prompt-tokens '{}' is not a list of numbers like 1,2,3", text));
    tokens.push_back(token);
    if (at == end) return tokens;
    ++at;
  }
}

}  // namespace tranche::tools
