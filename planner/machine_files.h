#pragma once
/// The machine files of planner/machines/, which are part of the program: it finds them wherever it is moved
/// to.

#include <span>
#include <string_view>

namespace tranche::planner {

struct MachineFile {
  /// The name that `--machine` takes: the file's name without ".json".
  std::string_view name;
  std::string_view json;
};

/// All of them, by name in ascending order.
std::span<const MachineFile> machine_files();

}  // namespace tranche::planner
