#include "tools/tokenize.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <ostream>

#include "tools/files.h"
#include "tools/terminal.h"
#include "tools/train/run.h"
#include "tools/transfer_progress.h"
#include "tranche/config/config.h"
#include "tranche/core/error.h"
#include "tranche/device/device.h"
#include "tranche/training/tokenize.h"

namespace tranche::tools {

void add_chat_flags(CLI::App& app, std::string& chat, std::string& date) {
  app.add_option(
         "--chat-template", chat,
         "how the messages of conversations are written: by a built-in template, which has to write what "
         "the tokenizer's own writes; by the tokenizer's own; or by a file of Jinja (default: the "
         "tokenizer's own)")
      ->type_name("chatml|llama3|mistral|qwen|own|FILE.jinja");
  app.add_option("--chat-date", date, "the day that templates take as today's, such as 2026-11-27")
      ->type_name("YYYY-MM-DD");
}

CLI::App* add_tokenize_command(CLI::App& program, TokenizeFlags& flags) {
  CLI::App* app = program.add_subcommand("tokenize", "writes text and JSON lines as a file of tokens");
  app->add_option("--data", flags.data,
                  "text file, JSON lines, or a pattern like 'data/*.jsonl'; may be repeated")
      ->type_name("FILE")
      ->required()
      ->take_all()
      ->allow_extra_args(false);
  app->add_option(
         "--data-format", flags.format,
         "of --data: text, a document a file; JSON lines, a document a line (auto: as its bytes tell)")
      ->type_name("auto|text|jsonl")
      ->capture_default_str();
  app->add_option(
         "--tokenizer", flags.tokenizer,
         "folder with tokenizer.json, tokenizer.model, or vocab.json and merges.txt (default: bytes)")
      ->type_name("DIR");
  app->add_option(
         "--out", flags.out,
         "tokens.safetensors, with the ends of documents and the tokens that are learned; or tokens.bin, "
         "as llm.c writes it")
      ->type_name("FILE")
      ->required();
  add_chat_flags(*app, flags.chat, flags.date);
  app->add_flag("--no-special", flags.no_special,
                "no tokens around documents, such as the one that ends them");
  app->add_option("--threads", flags.threads, "(default: the node's cores)");
  app->footer(R"(Example:
  tranche tokenize --data 'corpus/*.jsonl' --tokenizer llama-3/ --out corpus.safetensors
      # the same line goes on where it was stopped)");
  return app;
}

namespace {

std::string files(std::int64_t count) {
  return fmt::format("{} file{}", count, count == 1 ? "" : "s");
}

}  // namespace

int run_tokenize(const Options& options, const Output& output) {
  const TokenizeFlags& flags = options.tokenize;
  Launch launch(output.errors, options.flags);
  return launch.agree([&] {
    if (launch.rank() != 0) return;
    if (flags.threads && (*flags.threads < 1 || *flags.threads > most_threads)) {
      throw ConfigurationError(
          fmt::format("--threads is {}, but must be between 1 and {}", *flags.threads, most_threads));
    }
    training::TokenizeOptions how;
    std::int64_t bytes = 0;
    for (const std::string& pattern : flags.data) {
      for (const std::string& file : training::expand_pattern(pattern)) {
        std::error_code none;
        const auto size = std::filesystem::file_size(file, none);
        if (!none) bytes += static_cast<std::int64_t>(size);
        how.inputs.push_back(file);
      }
    }
    how.output = flags.out;
    std::vector<NamedFile> read;
    for (const std::string& file : how.inputs) read.push_back({"--data", file});
    require_apart({{"--out", how.output}}, read);
    how.format = training::parse_text_format(flags.format, "--data-format");
    how.chat = training::chat_format(flags.chat, flags.tokenizer, flags.date);
    how.needs_conversations = !flags.chat.empty();
    how.special = !flags.no_special;
    how.threads = static_cast<int>(flags.threads.value_or(usable_cores()));
    if (!flags.tokenizer.empty()) how.tokenizer_digest = training::tokenizer_digest(flags.tokenizer);
    const auto tokenizer =
        flags.tokenizer.empty() ? training::make_byte_tokenizer() : training::load_tokenizer(flags.tokenizer);
    TransferProgress progress("tokenized", bytes, output.terminal,
                              [&](std::string_view text) { draw(output.out, text); });
    how.note = [&](const std::string& note) { output.out << "note: " << note << "\n" << std::flush; };
    for (const std::string& note : options.notes) how.note(note);
    how.progress = [&](std::int64_t more) { progress.add(more); };
    const training::TokenizeSummary summary = training::tokenize_files(*tokenizer, how);
    progress.finish();
    output.out << fmt::format("{}: {} tokens of {} documents, {} of them learned; {}\n", flags.out,
                              summary.tokens, summary.documents, summary.targets, progress.summary());
    output.out << fmt::format("read {} of text and {} of JSON lines, with {} conversations\n",
                              files(summary.texts), files(summary.json_lines), summary.conversations);
    if (summary.reused > 0) {
      output.out << fmt::format("{} of {} parts were there already\n", summary.reused, summary.parts);
    }
  });
}

}  // namespace tranche::tools
