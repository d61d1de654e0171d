#pragma once
/// Files and folders of other programs, and what to do with them.

#include <string>

#include "checkpoint/storage.h"

namespace tranche::checkpoint {

/// A text about a folder without checkpoints that is another program's, which begins with "; "; empty if
/// nothing tells one.
std::string other_program_in(detail::FileSystem& files, const std::string& folder);

/// The advice on a path from which no safetensors file can be read, which begins with "; ": a folder that
/// does not hold the file, or a file that has another format or does not exist. Empty if there is none.
std::string advice_on_import(detail::FileSystem& files, const std::string& path);

}  // namespace tranche::checkpoint
