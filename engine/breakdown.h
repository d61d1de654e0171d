#pragma once
/// Ends an engine after an error: notifies the peers and makes every later call throw the error. Private to
/// engine/.

#include <exception>
#include <string>

#include "tranche/engine/runtime.h"

namespace tranche::detail {

/// The error that ended an engine, if any. The engine then stays in the state that it was in.
class Breakdown {
 public:
  /// `runtime` must outlive this.
  explicit Breakdown(const Runtime& runtime) : runtime_(runtime) {}

  /// Reports the error to the peers, because after an error in the middle of a sequence of collectives this
  /// rank can no longer follow them. Does nothing if the engine has already ended.
  void end(const std::exception_ptr& error) noexcept;
  /// Ends the engine with an error that the peers already know.
  void end_untold(std::exception_ptr error) noexcept { error_ = std::move(error); }
  /// Ends the engine because an unknown exception is unwinding. The peers are sent only `where`, and wait a
  /// moment for the cause (Communicator::post_unwinding). Without peers nothing is sent.
  void end_by_unwinding(const std::string& where) noexcept;

  bool ended() const { return error_ != nullptr; }
  void throw_if_ended() const {
    if (error_) std::rethrow_exception(error_);
  }
  /// True while an exception that was thrown after the engine's construction is unwinding.
  bool unwinding() const { return std::uncaught_exceptions() > exceptions_; }
  /// True for errors that leave an engine usable: misuse (LogicError, InvalidArgument), NumericalError, and
  /// CheckpointError, which all ranks throw.
  static bool stays_usable(const std::exception_ptr& error);

 private:
  const Runtime& runtime_;
  std::exception_ptr error_;
  int exceptions_ = std::uncaught_exceptions();  ///< exceptions in flight when the engine was made
};

}  // namespace tranche::detail
