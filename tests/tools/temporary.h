#pragma once
/// A folder that is removed with the test, and files in it.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace tranche::tools::test {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tranche-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string path(const std::string& name) const { return (path_ / name).string(); }
  std::string write(const std::string& name, const std::string& content) const {
    std::ofstream(path(name), std::ios::binary) << content;
    return path(name);
  }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      found.push_back(entry.path().filename().string());
    }
    return found;
  }

 private:
  std::filesystem::path path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// uint16 tokens in nanoGPT's format.
inline std::string nanogpt_tokens(const std::vector<std::uint16_t>& tokens) {
  return {reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2};
}

/// The same in llm.c's format.
inline std::string llmc_tokens(const std::vector<std::uint16_t>& tokens, std::int32_t version = 1) {
  std::vector<std::int32_t> header(256, 0);
  header[0] = 20240520;
  header[1] = version;
  header[2] = static_cast<std::int32_t>(tokens.size());
  return std::string(reinterpret_cast<const char*>(header.data()), 1024) + nanogpt_tokens(tokens);
}

/// A text with some structure: lines of words.
inline std::string some_text(std::size_t bytes) {
  const std::vector<std::string> words{"the", "cat", "sat", "on", "a", "mat", "and", "saw", "seven", "rats"};
  std::string text;
  for (std::size_t i = 0; text.size() < bytes; ++i) {
    text += words[(i * i + i / 7) % words.size()];
    text += i % 9 == 8 ? '\n' : ' ';
  }
  text.resize(bytes);
  return text;
}

/// The message of the Error that `call` throws; empty if it throws none.
template <typename Error, typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return {};
}

}  // namespace tranche::tools::test
