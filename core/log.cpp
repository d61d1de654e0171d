#include "tranche/core/log.h"

#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <mutex>
#include <set>
#include <utility>

#include "core/printable.h"

namespace tranche {

namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return spdlog::level::debug;
    case LogLevel::info:
      return spdlog::level::info;
    case LogLevel::warning:
      return spdlog::level::warn;
    case LogLevel::error:
      return spdlog::level::err;
    case LogLevel::off:
      break;
  }
  return spdlog::level::off;
}

LogLevel from_spdlog(spdlog::level::level_enum level) {
  switch (level) {
    case spdlog::level::trace:
    case spdlog::level::debug:
      return LogLevel::debug;
    case spdlog::level::info:
      return LogLevel::info;
    case spdlog::level::warn:
      return LogLevel::warning;
    default:
      return LogLevel::error;
  }
}

/// Hands messages, without any decoration, to a function; one at a time.
class FunctionSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit FunctionSink(std::function<void(LogLevel, std::string_view)> function)
      : function_(std::move(function)) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    function_(from_spdlog(message.level), {message.payload.data(), message.payload.size()});
  }
  void flush_() override {}

  std::function<void(LogLevel, std::string_view)> function_;
};

/// Writes to standard error, which may be a terminal. Messages are made printable, because they may hold
/// names of files from anywhere.
class PrintableErrorSink final : public spdlog::sinks::stderr_sink_mt {
 public:
  void log(const spdlog::details::log_msg& message) override {
    const std::string text = detail::printable({message.payload.data(), message.payload.size()});
    spdlog::details::log_msg shown = message;
    shown.payload = spdlog::string_view_t(text.data(), text.size());
    spdlog::sinks::stderr_sink_mt::log(shown);
  }
};

}  // namespace

struct Logger::Impl {
  Impl(int rank_number, LogLevel level, spdlog::sink_ptr sink)
      : rank(rank_number), logger("tranche", std::move(sink)) {
    logger.set_level(to_spdlog(level));
    // Every message is flushed, so that none is lost in a buffer when the process crashes.
    logger.flush_on(spdlog::level::trace);
  }

  int rank;
  spdlog::logger logger;  // not in spdlog's registry
  std::mutex mutex;
  std::set<std::string, std::less<>> said;
};

Logger::Logger(int rank, LogLevel level) {
  auto sink = std::make_shared<PrintableErrorSink>();
  const std::string front = rank < 0 ? "" : "[rank " + std::to_string(rank) + "] ";
  sink->set_formatter(std::make_unique<spdlog::pattern_formatter>(front + "[%H:%M:%S] [%l] %v"));
  impl_ = std::make_shared<Impl>(rank, level, std::move(sink));
}

Logger::Logger(int rank, LogLevel level, std::function<void(LogLevel, std::string_view)> sink)
    : impl_(std::make_shared<Impl>(rank, level, std::make_shared<FunctionSink>(std::move(sink)))) {}

void Logger::log(LogLevel level, std::string_view message) const {
  if (level == LogLevel::off) return;
  impl_->logger.log(to_spdlog(level), spdlog::string_view_t(message.data(), message.size()));
}

void Logger::once(const std::string& key, LogLevel level, std::string_view message) const {
  {
    const std::lock_guard lock(impl_->mutex);
    if (!impl_->said.insert(key).second) return;
  }
  log(level, message);
}

int Logger::rank() const noexcept {
  return impl_->rank;
}

}  // namespace tranche
