#include "tranche/tools/terminal.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "tranche/comm/backends.h"

namespace tranche::tools {

bool people_watch_output() {
  const char* kind = std::getenv("TERM");
  if (kind == nullptr || std::string_view(kind) == "dumb") return false;
  if (::isatty(STDOUT_FILENO) == 0) return false;
  if (!started_by_mpi_launcher()) return true;
  const int launcher =
      ::open(fmt::format("/proc/{}/fd/1", ::getppid()).c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  if (launcher < 0) return false;
  const bool terminal = ::isatty(launcher) != 0;
  ::close(launcher);
  return terminal;
}

std::string printable(std::string_view text) {
  using nlohmann::json;
  const std::string quoted = json(std::string(text)).dump(-1, ' ', false, json::error_handler_t::replace);
  std::string valid = json::parse(quoted).get<std::string>();
  for (char& c : valid) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 32 && c != '\n' && c != '\t') || byte == 127) c = '?';
  }
  return valid;
}

}  // namespace tranche::tools
