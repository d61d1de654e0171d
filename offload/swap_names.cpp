#include "tranche/offload/swap_names.h"

#include <fmt/core.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "tranche/core/error.h"

namespace tranche {
namespace {

constexpr std::string_view prefix = "tranche-swap-";

std::string content_of(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// When the process was started, in ticks since the boot; nullopt when there is no such process.
std::optional<std::uint64_t> start_of(std::int64_t process) {
  const std::string status = content_of(fmt::format("/proc/{}/stat", process));
  // The second field is the program's name in parentheses, in which anything may stand; this is the 22nd.
  std::size_t at = status.rfind(')');
  if (at == std::string::npos) return std::nullopt;
  for (int field = 2; field < 22; ++field) {
    at = status.find(' ', at + 1);
    if (at == std::string::npos) return std::nullopt;
  }
  std::uint64_t ticks = 0;
  const char* begin = status.data() + at + 1;
  if (std::from_chars(begin, status.data() + status.size(), ticks).ec != std::errc{}) return std::nullopt;
  return ticks;
}

// FNV-1a: the same in every build, which std::hash need not be.
std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

std::optional<std::uint64_t> number(std::string_view text, int base) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

SwapOwner swap_owner() {
  SwapOwner owner;
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  owner.host = host[0] == '\0' ? "unknown" : host.data();
  for (char& c : owner.host) c = c == '/' ? '_' : c;
  std::array<char, 64> container{};  // "pid:[4026531836]"
  if (::readlink("/proc/self/ns/pid", container.data(), container.size() - 1) < 0) container[0] = '\0';
  owner.kernel =
      fmt::format("{:016x}", hash_of(content_of("/proc/sys/kernel/random/boot_id") + container.data()));
  owner.process = ::getpid();
  owner.started = start_of(owner.process).value_or(0);
  return owner;
}

std::string swap_name(const SwapOwner& owner, int rank) {
  std::random_device random;
  const std::uint64_t draw = (std::uint64_t{random()} << 32) | random();
  return fmt::format("{}{}-{}-{:x}-{:x}-{}-{:016x}", prefix, owner.host, owner.kernel, owner.process,
                     owner.started, rank, draw);
}

std::optional<SwapOwner> owner_of_swap(std::string_view name) {
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  // From the end, as there may be dashes in a host's name: random, rank, started, process, kernel.
  std::array<std::string_view, 5> parts;
  for (std::string_view& part : parts) {
    const std::size_t dash = name.rfind('-');
    if (dash == std::string_view::npos) return std::nullopt;
    part = name.substr(dash + 1);
    name = name.substr(0, dash);
  }
  const auto started = number(parts[2], 16), process = number(parts[3], 16);
  const bool all = number(parts[0], 16) && number(parts[1], 10) && started && process &&
                   number(parts[4], 16) && parts[4].size() == 16 && !name.empty();
  if (!all) return std::nullopt;
  return SwapOwner{std::string(name), std::string(parts[4]), static_cast<std::int64_t>(*process), *started};
}

bool lock_swap(File& file) {
  const auto native = file.native();
  return native && ::flock(native->buffered, LOCK_EX | LOCK_NB) == 0;
}

bool is_swap_debris(FileSystem& files, const std::string& directory, const std::string& name,
                    const SwapOwner& self) {
  const auto owner = owner_of_swap(name);
  if (!owner || owner->host != self.host) return false;
  if (owner->kernel == self.kernel) return start_of(owner->process) != owner->started;
  try {
    const auto file = files.open(join_path(directory, name), OpenMode::update);
    return lock_swap(*file);
  } catch (const IoError&) {  // gone by now, or another user's
    return false;
  }
}

}  // namespace tranche
