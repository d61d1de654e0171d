#include "tests/fuzz/fuzz_target.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>
#include <typeinfo>

/// AddressSanitizer reads this at its start. A small file must not cause a large allocation, so one is an
/// error, as for libFuzzer with -malloc_limit_mb.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() {
  return "max_allocation_size_mb=512:allocator_may_return_null=0";
}

namespace tranche::fuzz {

namespace {

[[noreturn]] void give_up(const Target& target, const std::string& type, const char* text) {
  std::fprintf(stderr, "fuzz_%s: foreign exception: %s: %s\n", std::string(target.name).c_str(), type.c_str(),
               text);
  std::abort();
}

}  // namespace

std::vector<Target> all_targets() {
  return {adapter_config_target(), bpe_target(),
          chat_template_target(),  config_target(),
          content_target(),        end_tokens_target(),
          folder_target(),         gpt_config_target(),
          hugging_face_target(),   index_target(),
          llama_config_target(),   machine_target(),
          manifest_target(),       merges_target(),
          network_target(),        planted_target(),
          safetensors_target(),    schedule_target(),
          sentencepiece_target(),  set_target(),
          tokenizer_target(),      tokenizer_folder_target(),
          tokens_target(),         units_target()};
}

Target target_of(std::string_view program) {
  const std::string_view name = program.substr(program.rfind('/') + 1);
  std::string known;
  for (const Target& target : all_targets()) {
    if (name == "fuzz_" + std::string(target.name)) return target;
    known += " fuzz_" + std::string(target.name);
  }
  throw ConfigurationError("'" + std::string(name) + "' is not one of" + known);
}

bool accepts(const Target& target, std::string_view input) {
  try {
    target.read(input);
    return true;
  } catch (const Error& error) {
    const auto& refusals = target.refusals;
    if (std::find(refusals.begin(), refusals.end(), error.exit_status()) != refusals.end()) return false;
    give_up(target, "exit status " + std::to_string(static_cast<int>(error.exit_status())), error.what());
  } catch (const std::exception& error) {
    give_up(target, typeid(error).name(), error.what());
  }
}

std::vector<std::string> dictionary(const Target& target) {
  std::set<std::string> words{"null",
                              "true",
                              "false",
                              "{}",
                              "[]",
                              "\"\"",
                              "0",
                              "-1",
                              "2147483648",
                              "9223372036854775807",
                              "1e999",
                              "0.5",
                              "18446744073709551615"};
  for (const std::string& seed : target.seeds()) {
    for (std::size_t begin = seed.find('"'); begin != std::string::npos;) {
      const std::size_t end = seed.find('"', begin + 1);
      if (end == std::string::npos) break;
      if (end - begin < 60) words.insert(seed.substr(begin, end + 1 - begin));
      begin = seed.find('"', end + 1);
    }
  }
  return {words.begin(), words.end()};
}

void write_corpus(const Target& target, const std::string& folder) {
  std::filesystem::create_directories(folder);
  const std::vector<std::string> seeds = target.seeds();
  for (std::size_t i = 0; i < seeds.size(); ++i) {
    std::ofstream(folder + "/seed-" + std::to_string(i), std::ios::binary) << seeds[i];
  }
  std::ofstream words(folder + ".dict");
  for (const std::string& word : dictionary(target)) {
    words << '"';
    for (const char c : word) {
      char text[8];
      const auto byte = static_cast<unsigned char>(c);
      const bool plain = byte >= 32 && byte < 127 && c != '"' && c != '\\';
      std::snprintf(text, sizeof text, plain ? "%c" : "\\x%02X", byte);
      words << text;
    }
    words << "\"\n";
  }
  words.close();
  if (!words) throw ConfigurationError("cannot write " + folder + ".dict");
}

std::vector<std::string_view> split(std::string_view input, std::size_t count) {
  std::vector<std::string_view> parts(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t end = i + 1 < count ? input.find(separator) : std::string_view::npos;
    parts[i] = input.substr(0, end);
    if (end == std::string_view::npos) break;
    input.remove_prefix(end + 1);
  }
  return parts;
}

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts)
    text += (&part == &parts.front() ? "" : std::string(1, separator)) + part;
  return text;
}

void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

}  // namespace tranche::fuzz
