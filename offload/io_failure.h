#pragma once
/// The text of a failed file operation, in one format everywhere.

#include <cstdint>
#include <source_location>
#include <string>
#include <string_view>

namespace tranche::detail {

struct IoFailure {
  std::string operation;     ///< "write", "sync", "rename to b" ...
  std::string path;          ///< the file; for lack of space, the folder whose file system is full
  int code = 0;              ///< errno; 0: the file ended too early
  std::int64_t offset = -1;  ///< -1 when there is no byte range
  std::int64_t bytes = 0;    ///< of the range, or wanted in total
};

/// "write of bytes 4096 to 8191 (4096 B) of 'a' failed: No space left on device; ...what to do".
std::string describe(const IoFailure& failure);
/// Throws IoError with that text. The source position is the caller's.
[[noreturn]] void throw_io_error(const IoFailure& failure,
                                 std::source_location where = std::source_location::current());

}  // namespace tranche::detail
