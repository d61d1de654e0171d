#pragma once
/// Runs a program and waits for it, with its output in a file.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tranche/training/stop_signals.h"

namespace tranche::tools {

struct ChildCommand {
  std::vector<std::string> arguments;  ///< the first is the program's path
  /// Variables that are set unless the environment already has them, so that the user's values stay.
  std::vector<std::pair<std::string, std::string>> environment;
  std::string log;     ///< file for its standard output and errors; its standard input is empty
  double timeout = 0;  ///< seconds; 0: none
};

struct ChildResult {
  int status = 0;          ///< its exit status, or 128 + the signal that ended it
  double seconds = 0;      ///< duration
  bool timed_out = false;  ///< it was ended by the time limit
  int stopped_by = 0;      ///< SIGINT or SIGTERM received by this process, which ended it
};

/// Runs it in its own process group. When the time is up or one of `signals` was received, the group gets
/// SIGTERM, and SIGKILL ten seconds later. If this process dies, the system sends it SIGTERM. `tick` is
/// called several times a second with the elapsed seconds. Throws IoError if the log cannot be written, Error
/// if the program cannot be started.
ChildResult run_child(const ChildCommand& command, training::StopSignals& signals,
                      const std::function<void(double seconds)>& tick = {});

/// Formats words for a shell, with quotes where needed.
std::string shell_line(const std::vector<std::string>& arguments);

/// The last `most` lines of a file, limited to 4000 bytes.
std::string tail_of(const std::string& path, int most);

}  // namespace tranche::tools
