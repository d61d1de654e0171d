#include "device/process_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace tranche::detail {

namespace {

/// Parses "RssAnon:\t    1234 kB" into bytes; 0 when there is no such line.
std::int64_t bytes_of(std::string_view text, std::string_view key) {
  const std::size_t line = text.find(key);
  if (line == std::string_view::npos) return 0;
  const std::size_t digits = text.find_first_of("0123456789\n", line + key.size());
  std::int64_t kibibytes = 0;
  if (digits != std::string_view::npos) {
    std::from_chars(text.data() + digits, text.data() + text.size(), kibibytes);
  }
  return kibibytes * 1024;
}

constexpr std::int64_t unbounded = std::numeric_limits<std::int64_t>::max();

/// The number that follows `key` at the beginning of a line.
std::optional<std::int64_t> number_after(std::string_view text, std::string_view key) {
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    if (!line.starts_with(key)) continue;
    line.remove_prefix(key.size());
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
    std::int64_t number = 0;
    const auto read = std::from_chars(line.data(), line.data() + line.size(), number);
    if (read.ec == std::errc::result_out_of_range) return unbounded;
    if (read.ec == std::errc() && number >= 0) return number;
  }
  return std::nullopt;
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  return text.str();
}

/// The path of the process's control group: in version 2 if `controller` is empty, else that of version 1's
/// controller. Lines of /proc/self/cgroup are "number:controllers:path".
std::optional<std::string> group_path(std::string_view groups, std::string_view controller) {
  for (std::size_t begin = 0; begin < groups.size();) {
    const std::size_t end = std::min(groups.find('\n', begin), groups.size());
    const std::string_view line = groups.substr(begin, end - begin);
    begin = end + 1;
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string_view::npos ? first : line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    const std::string controllers = "," + std::string(line.substr(first + 1, second - first - 1)) + ",";
    if (controllers.find("," + std::string(controller) + ",") == std::string::npos) continue;
    return std::string(line.substr(second + 1));
  }
  return std::nullopt;
}

struct GroupFiles {
  const char *limit, *used;
};

/// The least that a group and its ancestors leave. In a container the path may be the host's; then only the
/// mounted root exists.
std::int64_t left_in_groups(const std::string& mount, std::string path, const GroupFiles& files) {
  std::int64_t least = unbounded;
  for (;;) {
    while (path.ends_with('/')) path.pop_back();
    const std::string folder = mount + path + "/";
    least = std::min(least, parse_group_memory(text_of(folder + files.limit), text_of(folder + files.used),
                                               text_of(folder + "memory.stat")));
    if (path.empty()) return least;
    path.resize(std::min(path.rfind('/'), path.size()));
    if (path.find('/') == std::string::npos) path.clear();
  }
}

}  // namespace

std::int64_t parse_available_memory(std::string_view meminfo) {
  const auto bytes = [&](std::string_view key) -> std::optional<std::int64_t> {
    const auto kibibytes = number_after(meminfo, key);
    return kibibytes ? std::optional(*kibibytes * 1024) : std::nullopt;
  };
  if (const auto available = bytes("MemAvailable:")) return *available;
  const auto free = bytes("MemFree:");
  return free ? *free + bytes("Buffers:").value_or(0) + bytes("Cached:").value_or(0) : unbounded;
}

std::int64_t parse_group_memory(std::string_view limit, std::string_view used, std::string_view statistics) {
  const auto most = number_after(limit, "");
  // Version 1 expresses "no limit" as the largest number of pages.
  if (!most || *most >= unbounded / 2) return unbounded;
  // The kernel drops these file pages before it refuses memory. Version 1 counts child groups under "total_".
  auto droppable = number_after(statistics, "total_inactive_file ");
  if (!droppable) droppable = number_after(statistics, "inactive_file ");
  const std::int64_t taken = number_after(used, "").value_or(0) - droppable.value_or(0);
  return std::clamp<std::int64_t>(*most - std::max<std::int64_t>(taken, 0), 0, *most);
}

AvailableMemory available_memory(const std::string& root) {
  const std::string base = root.ends_with('/') ? root : root + "/";
  const std::int64_t machine = parse_available_memory(text_of(base + "proc/meminfo"));
  std::int64_t group = unbounded;
  const std::string groups = text_of(base + "proc/self/cgroup");
  if (const auto path = group_path(groups, "")) {
    // If both versions are mounted, version 2 is beside the controllers of version 1.
    for (const char* mount : {"sys/fs/cgroup", "sys/fs/cgroup/unified"}) {
      group = std::min(group, left_in_groups(base + mount, *path, {"memory.max", "memory.current"}));
    }
  }
  if (const auto path = group_path(groups, "memory")) {
    group = std::min(group, left_in_groups(base + "sys/fs/cgroup/memory", *path,
                                           {"memory.limit_in_bytes", "memory.usage_in_bytes"}));
  }
  return {std::min(machine, group), group < machine};
}

ProcessMemory parse_process_status(std::string_view text) {
  return {bytes_of(text, "RssAnon:"), bytes_of(text, "RssFile:"), bytes_of(text, "RssShmem:")};
}

ProcessMemory process_memory() {
  // This function must not allocate, because it is called between steps, whose memory is being recorded.
  const int file = ::open("/proc/self/status", O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  std::array<char, 8192> text;
  std::size_t size = 0;
  while (size < text.size()) {
    const auto got = ::read(file, text.data() + size, text.size() - size);
    if (got <= 0) break;
    size += static_cast<std::size_t>(got);
  }
  ::close(file);
  return parse_process_status({text.data(), size});
}

}  // namespace tranche::detail
