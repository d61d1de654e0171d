#pragma once
/// The machine that a result was measured on.

#include <cstdint>
#include <string>

namespace tranche::tools {

struct NodeDescription {
  std::string name;    ///< of the node
  std::string cpu;     ///< "AMD EPYC 9654 96-Core Processor"; empty where the system does not say
  std::string system;  ///< "Linux 6.1.0 x86_64"
  int cores = 1;       ///< that this process may run on
  std::int64_t memory_bytes = 0;
};
NodeDescription describe_node();

/// The commit of the working tree that a file lies in, as `git describe --always --dirty` has it; empty where
/// there is none, or no git.
std::string commit_at(const std::string& file);

/// A hash of a file's bytes as hexadecimal digits; equal for equal files. Empty where it cannot be read.
std::string fingerprint_of(const std::string& file);

/// Path of this program's file.
std::string own_path();
/// The path at which a command is found in PATH; empty: nowhere. Paths are looked at as they are.
std::string find_command(const std::string& name);

}  // namespace tranche::tools
