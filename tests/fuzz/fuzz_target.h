#pragma once
/// Readers of untrusted bytes in the form in which fuzzers call them. README.md explains how to add one.

#include <string>
#include <string_view>
#include <vector>

#include "tranche/core/error.h"

namespace tranche::fuzz {

/// A reader to be fuzzed. Its program is fuzz_NAME.
struct Target {
  std::string_view name;
  /// Gives `input` to the reader and uses its result. Throws what the reader throws, and std::logic_error
  /// (see require()) if two results contradict each other.
  void (*read)(std::string_view input);
  /// Inputs to start from, made by the library's own writers if there are any. The reader accepts the first.
  std::vector<std::string> (*seeds)();
  /// Exit statuses of the errors with which the reader may refuse an input.
  std::vector<ExitStatus> refusals;
};

Target adapter_config_target();
Target bpe_target();
Target chat_template_target();
Target merges_target();
Target config_target();
Target content_target();
Target set_target();
Target end_tokens_target();
Target folder_target();
Target gpt_config_target();
Target hugging_face_target();
Target index_target();
Target llama_config_target();
Target machine_target();
Target manifest_target();
Target network_target();
Target planted_target();
Target safetensors_target();
Target schedule_target();
Target sentencepiece_target();
Target tokenizer_target();
Target tokenizer_folder_target();
Target tokens_target();
Target units_target();

/// All of the above, by name.
std::vector<Target> all_targets();
/// The target of a program's path ("build/fuzz_manifest"). Throws ConfigurationError listing the names.
Target target_of(std::string_view program);

/// Calls the reader. Returns true if it accepted the input and false if it refused it with one of `refusals`.
/// Every other exception is a finding: it is written to standard error and the process aborts.
bool accepts(const Target& target, std::string_view input);

/// Words for mutations: the quoted strings of the seeds, and values that are difficult for JSON readers.
std::vector<std::string> dictionary(const Target& target);
/// Creates a folder and writes the seeds into it, and the dictionary beside it as FOLDER.dict, both in
/// libFuzzer's format.
void write_corpus(const Target& target, const std::string& folder);

/// Separates the parts of inputs that represent several files; no JSON text contains it.
inline constexpr char separator = '\x1e';
/// The first `count` parts of an input. Missing parts are empty, and the last one is the whole remainder.
std::vector<std::string_view> split(std::string_view input, std::size_t count);
/// The reverse.
std::string join(const std::vector<std::string>& parts);
/// Throws std::logic_error unless `holds`.
void require(bool holds, const char* what);

}  // namespace tranche::fuzz
