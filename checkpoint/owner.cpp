// Who is saving: to tell the debris of dead saves from the work of a live one.

#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <fstream>
#include <iterator>

#include "tranche/checkpoint/folder.h"

namespace tranche::checkpoint {

namespace {

/// The 22nd field of /proc/PID/stat, in clock ticks since the machine started; empty where there is no such
/// file.
std::string start_of(std::int64_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const auto name_end = text.rfind(')');  // the second field is a name, which may hold anything
  if (name_end == std::string::npos) return {};
  std::size_t at = name_end + 1;
  if (text.compare(at, 3, " Z ") == 0) return {};  // dead, and not yet buried
  for (int field = 3; field <= 22; ++field) {
    at = text.find_first_not_of(' ', at);
    if (at == std::string::npos) return {};
    const std::size_t end = text.find(' ', at);
    if (field == 22) return text.substr(at, end - at);
    at = end;
  }
  return {};
}

}  // namespace

SaveOwner this_process() {
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  return {host.data(), getpid(), start_of(getpid())};
}

bool is_alive(const SaveOwner& owner) {
  if (owner.host != this_process().host || owner.process <= 0) return false;
  if (kill(static_cast<pid_t>(owner.process), 0) != 0 && errno == ESRCH) return false;
  return start_of(owner.process) == owner.started;
}

}  // namespace tranche::checkpoint
