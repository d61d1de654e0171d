#pragma once
/// The logs of scalars share their folder and its errors. Private to report/.

#include <string>

namespace tranche::detail {

/// Makes the folder and those above it. Throws IoError.
void make_log_folder(const std::string& folder);
/// Throws IoError "'PATH' cannot be written: REASON", the reason being errno's.
[[noreturn]] void fail_to_log(const std::string& path);

}  // namespace tranche::detail
