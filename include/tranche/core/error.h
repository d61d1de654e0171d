#pragma once
/// Typed errors. Every error carries the source position that raised it, and the rank once a caller that
/// knows the rank has attached it; `exit_status()` is the exit status of the `tranche` program.

#include <exception>
#include <source_location>
#include <stdexcept>
#include <string>
#include <utility>

namespace tranche {

/// Exit statuses that the library's errors map to. They are part of the program's interface, which adds 7 (a
/// study is incomplete) and 8 (storage fails).
enum class ExitStatus : int {
  success = 0,
  other = 1,
  configuration = 2,
  out_of_memory = 3,
  checkpoint = 4,
  communication = 5,
  numerical = 6,
};

/// Base of every error thrown by the library. `what()` reads "[rank R] message (file:line)".
class Error : public std::runtime_error {
 public:
  explicit Error(std::string message, ExitStatus status = ExitStatus::other,
                 std::source_location where = std::source_location::current());

  const char* what() const noexcept override { return text_.c_str(); }
  /// The message alone, without rank and position.
  const std::string& message() const noexcept { return message_; }
  ExitStatus exit_status() const noexcept { return status_; }
  /// Rank that raised the error; -1 when no caller has attached it.
  int rank() const noexcept { return rank_; }
  /// Base name of the source file and the line, "file.cpp:12".
  const std::string& position() const noexcept { return position_; }
  /// Attaches the rank unless one is attached already.
  void attach_rank(int rank);

 private:
  void compose();
  std::string message_;
  std::string position_;
  std::string text_;
  ExitStatus status_;
  int rank_ = -1;
};

/// An argument is invalid whatever the state of the object (shape, dtype, range).
class InvalidArgument : public Error {
 public:
  explicit InvalidArgument(std::string message, std::source_location where = std::source_location::current())
      : Error(std::move(message), ExitStatus::other, where) {}
};

/// Calls came in an order that the contract forbids (reduce twice, step inside a micro-batch ...).
class LogicError : public Error {
 public:
  explicit LogicError(std::string message, std::source_location where = std::source_location::current())
      : Error(std::move(message), ExitStatus::other, where) {}
};

/// Configuration, flags, model or data files cannot be honoured. Exit status 2.
class ConfigurationError : public Error {
 public:
  explicit ConfigurationError(std::string message,
                              std::source_location where = std::source_location::current())
      : Error(std::move(message), ExitStatus::configuration, where) {}
};

/// This build does not contain a backend; the text names the CMake option that adds it. Exit status 2.
class NotCompiled : public Error {
 public:
  explicit NotCompiled(const std::string& backend, const std::string& option,
                       std::source_location where = std::source_location::current())
      : Error(backend + " is not part of this build; configure with -D" + option + "=ON",
              ExitStatus::configuration, where) {}
};

/// A tier cannot hold a requested allocation. Exit status 3.
class OutOfMemory : public Error {
 public:
  explicit OutOfMemory(std::string message, std::source_location where = std::source_location::current())
      : Error(std::move(message), ExitStatus::out_of_memory, where) {}
  /// `of_budget` is true when a configured limit refused the request; false when the system or a device had
  /// no memory.
  OutOfMemory(std::string message, bool of_budget,
              std::source_location where = std::source_location::current())
      : Error(std::move(message), ExitStatus::out_of_memory, where), of_budget_(of_budget) {}
  bool of_budget() const noexcept { return of_budget_; }

 private:
  bool of_budget_ = false;
};

/// The operating system failed an operation on a file; the text names operation, file, byte range, reason and
/// remedy. Exit status 1. A caller that knows the purpose of the file rethrows it (as CheckpointError for a
/// checkpoint).
class IoError : public Error {
 public:
  IoError(std::string message, int code, std::source_location where = std::source_location::current())
      : Error(std::move(message), ExitStatus::other, where), code_(code) {}
  /// The system's error number (errno); 0 when the file ended too early.
  int code() const noexcept { return code_; }

 private:
  int code_;
};

/// A call of a device's runtime failed, or work that was issued earlier. The text names the call and the
/// runtime's error.
class DeviceError : public Error {
 public:
  explicit DeviceError(std::string message, std::source_location where = std::source_location::current())
      : Error(std::move(message), ExitStatus::other, where) {}
};

/// A checkpoint is damaged, incomplete or does not fit. Exit status 4.
class CheckpointError : public Error {
 public:
  explicit CheckpointError(std::string message, std::source_location where = std::source_location::current())
      : Error(std::move(message), ExitStatus::checkpoint, where) {}
};

/// A collective failed or timed out (exit status 5), or a peer reported a failure (the exit status of that
/// failure).
class CommunicationError : public Error {
 public:
  explicit CommunicationError(std::string message,
                              std::source_location where = std::source_location::current())
      : Error(std::move(message), ExitStatus::communication, where) {}

 protected:
  CommunicationError(std::string message, ExitStatus status, std::source_location where)
      : Error(std::move(message), status, where) {}
};

/// Training cannot go on for numerical reasons (too many skipped steps in a row ...). Exit status 6.
class NumericalError : public Error {
 public:
  explicit NumericalError(std::string message, std::source_location where = std::source_location::current())
      : Error(std::move(message), ExitStatus::numerical, where) {}
};

/// Text of any exception, without rank and position.
std::string message_of(const std::exception_ptr& error);
/// Exit status of any exception: `out_of_memory` for std::bad_alloc, `other` for exceptions of other
/// libraries.
ExitStatus exit_status_of(const std::exception_ptr& error);

}  // namespace tranche
