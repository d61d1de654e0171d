#pragma once
/// The end of an engine by an error: what the peers are told, and what every later call throws. Private to
/// engine/.

#include <exception>
#include <string>

#include "tranche/engine/runtime.h"

namespace tranche::detail {

/// An engine that an error has ended stays in the state that it was in.
class Breakdown {
 public:
  /// It outlives this.
  explicit Breakdown(const Runtime& runtime) : runtime_(runtime) {}

  /// Tells the peers, whom this rank cannot follow any more after an error in the middle of a sequence of
  /// collectives. Does nothing in an engine that has ended.
  void end(const std::exception_ptr& error) noexcept;
  /// The same for an error that the peers know.
  void end_untold(std::exception_ptr error) noexcept { error_ = std::move(error); }
  /// The same for an exception that is unwinding, of which nothing is known but where: the peers wait for the
  /// cause a moment (Communicator::post_unwinding). A rank alone has nobody to tell.
  void end_by_unwinding(const std::string& where) noexcept;

  bool ended() const { return error_ != nullptr; }
  void throw_if_ended() const {
    if (error_) std::rethrow_exception(error_);
  }
  /// True while an exception is ending the engine.
  bool unwinding() const { return std::uncaught_exceptions() > exceptions_; }
  /// Misuse (LogicError, InvalidArgument) and NumericalError leave an engine usable, and so does
  /// CheckpointError, which all ranks throw.
  static bool stays_usable(const std::exception_ptr& error);

 private:
  const Runtime& runtime_;
  std::exception_ptr error_;
  int exceptions_ = std::uncaught_exceptions();  ///< in flight when the engine was made
};

}  // namespace tranche::detail
