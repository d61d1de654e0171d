#include "tools/node.h"

#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string_view>
#include <vector>

#include "tools/child.h"
#include "tranche/device/device.h"

namespace tranche::tools {

namespace {

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    // x86 has "model name", some other architectures "cpu" or "Hardware".
    if (!line.starts_with("model name") && !line.starts_with("Hardware")) continue;
    const std::size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return {};
}

bool runs(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored) && ::access(path.c_str(), X_OK) == 0;
}

}  // namespace

NodeDescription describe_node() {
  NodeDescription node;
  utsname system{};
  if (::uname(&system) == 0) {
    node.name = system.nodename;
    node.system = std::string(system.sysname) + " " + system.release + " " + system.machine;
  }
  node.cpu = processor_name();
  node.cores = usable_cores();
  node.memory_bytes = static_cast<std::int64_t>(::sysconf(_SC_PHYS_PAGES)) *
                      static_cast<std::int64_t>(::sysconf(_SC_PAGESIZE));
  return node;
}

std::string commit_at(const std::string& file) {
  const std::string folder = std::filesystem::path(file).parent_path().string();
  const std::string command =
      shell_line({"git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=12"}) + " 2>/dev/null";
  const auto close = [](std::FILE* pipe) { ::pclose(pipe); };
  const std::unique_ptr<std::FILE, decltype(close)> pipe(::popen(command.c_str(), "re"), close);
  if (!pipe) return {};
  std::array<char, 256> line{};
  if (std::fgets(line.data(), line.size(), pipe.get()) == nullptr) return {};
  std::string commit = line.data();
  while (!commit.empty() && commit.back() == '\n') commit.pop_back();
  return commit;
}

std::string fingerprint_of(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) return {};
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  std::vector<char> block(1 << 20);
  do {
    stream.read(block.data(), static_cast<std::streamsize>(block.size()));
    for (std::streamsize i = 0; i < stream.gcount(); ++i) {
      hash = (hash ^ static_cast<unsigned char>(block[static_cast<std::size_t>(i)])) * 0x100000001b3;
    }
  } while (stream);
  return fmt::format("{:016x}", hash);
}

std::string own_path() {
  std::error_code failed;
  const std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe", failed);
  return failed ? std::string() : path.string();
}

std::string find_command(const std::string& name) {
  if (name.find('/') != std::string::npos) return runs(name) ? name : std::string();
  const char* folders = std::getenv("PATH");
  std::string_view rest = folders == nullptr ? "" : folders;
  while (!rest.empty()) {
    const std::size_t colon = rest.find(':');
    const std::string path = std::string(rest.substr(0, colon)) + "/" + name;
    if (runs(path)) return path;
    rest.remove_prefix(colon == std::string_view::npos ? rest.size() : colon + 1);
  }
  return {};
}

}  // namespace tranche::tools
