#pragma once
/// Logging for people (standard error by default) without global state: a Logger is passed to each component
/// that logs.

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace tranche {

enum class LogLevel { debug, info, warning, error, off };

/// Thread-safe; cheap to copy (shares its sink). Backed by spdlog.
class Logger {
 public:
  /// Logs to standard error with the rank in front of every line, as printable() text.
  explicit Logger(int rank = 0, LogLevel level = LogLevel::info);
  /// Logs into a function, which gets the bare message, one at a time; for tests and embedding programs. The
  /// function must not log through the same Logger.
  Logger(int rank, LogLevel level, std::function<void(LogLevel, std::string_view)> sink);

  void log(LogLevel level, std::string_view message) const;
  void debug(std::string_view message) const { log(LogLevel::debug, message); }
  void info(std::string_view message) const { log(LogLevel::info, message); }
  void warning(std::string_view message) const { log(LogLevel::warning, message); }
  void error(std::string_view message) const { log(LogLevel::error, message); }
  /// Logs a message once per Logger and key, however often it is called.
  void once(const std::string& key, LogLevel level, std::string_view message) const;
  int rank() const noexcept;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace tranche
