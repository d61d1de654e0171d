#pragma once
/// A program that is run and waited for, its output in a file.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tranche/training/stop_signals.h"

namespace tranche::tools {

struct ChildCommand {
  std::vector<std::string> arguments;  ///< the first is the program's path
  /// Set unless the environment has them already: what a user set stays.
  std::vector<std::pair<std::string, std::string>> environment;
  std::string log;     ///< file for its standard output and errors; its standard input is empty
  double timeout = 0;  ///< seconds; 0: none
};

struct ChildResult {
  int status = 0;          ///< its exit status; 128 + the signal that ended it
  double seconds = 0;      ///< that it took
  bool timed_out = false;  ///< it was ended because of its time
  int stopped_by = 0;  ///< SIGINT or SIGTERM that this process got meanwhile, because of which it was ended
};

/// Runs it in a process group of its own, which gets SIGTERM (and SIGKILL, ten seconds later) when time is up
/// or one of `signals` came, and SIGTERM from the system when this process is no more. `tick` is called some
/// times a second with the seconds so far. Throws IoError where the log cannot be written, Error where it
/// cannot be started.
ChildResult run_child(const ChildCommand& command, training::StopSignals& signals,
                      const std::function<void(double seconds)>& tick = {});

/// For a shell: words as they are, or in quotes where needed.
std::string shell_line(const std::vector<std::string>& arguments);

/// The last lines of a file, `most` of them and not more than 4000 bytes.
std::string tail_of(const std::string& path, int most);

}  // namespace tranche::tools
