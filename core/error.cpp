#include "tranche/core/error.h"

#include <new>
#include <string_view>
#include <utility>

namespace tranche {

namespace {

/// Keeps only the file's name, so that messages do not show the folder in which the tree was built.
std::string position_of(const std::source_location& where) {
  std::string_view file = where.file_name();
  if (const auto slash = file.find_last_of('/'); slash != std::string_view::npos)
    file.remove_prefix(slash + 1);
  return std::string(file) + ":" + std::to_string(where.line());
}

}  // namespace

Error::Error(std::string message, ExitStatus status, std::source_location where)
    : std::runtime_error(message),
      message_(std::move(message)),
      position_(position_of(where)),
      status_(status) {
  compose();
}

void Error::attach_rank(int rank) {
  if (rank_ >= 0 || rank < 0) return;
  rank_ = rank;
  compose();
}

void Error::compose() {
  text_ = message_ + " (" + position_ + ")";
  if (rank_ >= 0) text_ = "[rank " + std::to_string(rank_) + "] " + text_;
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return known.message();
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "unknown error";
  }
}

ExitStatus exit_status_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return known.exit_status();
  } catch (const std::bad_alloc&) {
    return ExitStatus::out_of_memory;
  } catch (...) {
    return ExitStatus::other;
  }
}

}  // namespace tranche
