#include "offload/swap_names.h"

#include <fmt/core.h>
#include <sys/file.h>

#include <array>
#include <charconv>
#include <random>

#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

constexpr std::string_view prefix = "tranche-swap-";

std::optional<std::uint64_t> number(std::string_view text, int base) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

std::string swap_name(const ProcessIdentity& owner, int rank) {
  std::random_device random;
  const std::uint64_t draw = (std::uint64_t{random()} << 32) | random();
  return fmt::format("{}{}-{}-{:x}-{:x}-{}-{:016x}", prefix, owner.node, owner.kernel, owner.process,
                     owner.started, rank, draw);
}

std::optional<ProcessIdentity> owner_of_swap(std::string_view name) {
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  // Parsed from the end, because a node's name may contain dashes: random, rank, started, process, kernel.
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
  return ProcessIdentity{std::string(name), std::string(parts[4]), static_cast<std::int64_t>(*process),
                         *started};
}

bool lock_swap(File& file) {
  const auto native = file.native();
  return native && ::flock(native->buffered, LOCK_EX | LOCK_NB) == 0;
}

bool is_stale_swap_file(FileSystem& files, const std::string& directory, const std::string& name,
                        const ProcessIdentity& self) {
  const auto owner = owner_of_swap(name);
  if (!owner || owner->node != self.node) return false;
  if (owner->same_kernel(self)) return !is_running(*owner);
  try {
    const auto file = files.open(join_path(directory, name), OpenMode::update);
    return lock_swap(*file);
  } catch (const IoError&) {  // removed meanwhile, or another user's
    return false;
  }
}

}  // namespace tranche::detail
