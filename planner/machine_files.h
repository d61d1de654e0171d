#pragma once
/// The machine files of planner/machines/, which are compiled into the program, so that it finds them
/// wherever it is installed.

#include <span>
#include <string_view>

namespace tranche::planner {

struct MachineFile {
  /// The name that `--machine` takes: the file's name without ".json".
  std::string_view name;
  std::string_view json;
};

/// All machine files, in ascending order of their names.
std::span<const MachineFile> machine_files();

}  // namespace tranche::planner
