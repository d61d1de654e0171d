#pragma once
/// The machine on which a result was measured.

#include <cstdint>
#include <string>

namespace tranche::tools {

struct NodeDescription {
  std::string name;    ///< of the node
  std::string cpu;     ///< "AMD EPYC 9654 96-Core Processor"; empty if unknown
  std::string system;  ///< "Linux 6.1.0 x86_64"
  int cores = 1;       ///< on which this process may run
  std::int64_t memory_bytes = 0;
};
NodeDescription describe_node();

/// The commit of the working tree that contains a file, as printed by `git describe --always --dirty`; empty
/// if there is none, or no git.
std::string commit_at(const std::string& file);

/// A hash of a file's bytes as hexadecimal digits; equal for equal files. Empty if it cannot be read.
std::string fingerprint_of(const std::string& file);

/// The path of this program's executable.
std::string own_path();
/// The path at which PATH contains a command; empty if there is none. A path is checked directly.
std::string find_command(const std::string& name);

}  // namespace tranche::tools
