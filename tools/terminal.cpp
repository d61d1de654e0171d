#include "tools/terminal.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "core/printable.h"
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

void draw(std::ostream& out, std::string_view text) {
  const std::size_t begin = std::min(text.find_first_not_of('\r'), text.size());
  const std::size_t end = std::max(text.find_last_not_of('\r') + 1, begin);
  detail::write_unchanged(out, text.substr(0, begin));
  out << text.substr(begin, end - begin);
  detail::write_unchanged(out, text.substr(end));
  out.flush();
}

}  // namespace tranche::tools
