#include "core/process.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <optional>
#include <string_view>

namespace tranche::detail {
namespace {

std::string content_of(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// The start time of a process, in ticks since the boot; nullopt when there is no such process, or it is a
/// zombie.
std::optional<std::uint64_t> start_of(std::int64_t process) {
  const std::string status = content_of("/proc/" + std::to_string(process) + "/stat");
  // The second field is the program's name in parentheses, which may contain any character; the start time is
  // the 22nd field.
  std::size_t at = status.rfind(')');
  if (at == std::string::npos || status.compare(at, 4, ") Z ") == 0) return std::nullopt;
  for (int field = 2; field < 22; ++field) {
    at = status.find(' ', at + 1);
    if (at == std::string::npos) return std::nullopt;
  }
  std::uint64_t ticks = 0;
  const char* begin = status.data() + at + 1;
  if (std::from_chars(begin, status.data() + status.size(), ticks).ec != std::errc{}) return std::nullopt;
  return ticks;
}

// FNV-1a has the same value in every build; std::hash need not.
std::string hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(hash));
  return digits.data();
}

}  // namespace

ProcessIdentity this_process() {
  ProcessIdentity identity;
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  identity.node = host[0] == '\0' ? "unknown" : host.data();
  // The identity becomes part of file names.
  std::replace(identity.node.begin(), identity.node.end(), '/', '_');
  std::array<char, 64> container{};  // "pid:[4026531836]"
  if (::readlink("/proc/self/ns/pid", container.data(), container.size() - 1) < 0) container[0] = '\0';
  identity.kernel = hash_of(content_of("/proc/sys/kernel/random/boot_id") + container.data());
  identity.process = ::getpid();
  identity.started = start_of(identity.process).value_or(0);
  return identity;
}

bool is_running(const ProcessIdentity& identity) {
  return identity.process > 0 && identity.same_kernel(this_process()) &&
         start_of(identity.process) == identity.started;
}

}  // namespace tranche::detail
