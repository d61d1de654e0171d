#pragma once
/// The scalar logs' common functions for their folder and its errors. Private to report/.

#include <string>

namespace tranche::detail {

/// Creates the folder and its parents. Throws IoError.
void make_log_folder(const std::string& folder);
/// Throws IoError "'PATH' cannot be written: REASON", the reason being errno's.
[[noreturn]] void fail_to_log(const std::string& path);

}  // namespace tranche::detail
