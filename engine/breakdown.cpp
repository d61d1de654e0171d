#include "engine/breakdown.h"

#include "tranche/core/error.h"

namespace tranche::detail {

void Breakdown::end(const std::exception_ptr& error) noexcept {
  if (ended()) return;
  error_ = error;
  try {
    std::rethrow_exception(error);
  } catch (const CommunicationError&) {
    // The peers notice it by their own failed calls, or the program reports it (Runtime::fail).
  } catch (...) {
    const std::string& place = runtime_.place();
    runtime_.all().post_failure((place.empty() ? "" : place + ": ") + message_of(error),
                                exit_status_of(error), 2.0);
  }
}

void Breakdown::end_by_unwinding(const std::string& where) noexcept {
  if (ended() || runtime_.size() == 1) return;
  try {
    const std::string what = "an exception unwound it " + where;
    error_ = std::make_exception_ptr(LogicError("the engine has ended: " + what));
    runtime_.all().post_unwinding(what, 2.0);
  } catch (...) {
    runtime_.all().post_unwinding("an exception unwound it", 2.0);
  }
}

bool Breakdown::stays_usable(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const LogicError&) {
    return true;
  } catch (const InvalidArgument&) {
    return true;
  } catch (const NumericalError&) {
    return true;
  } catch (const CheckpointError&) {
    return true;  // all ranks have agreed on it
  } catch (...) {
    return false;
  }
}

}  // namespace tranche::detail
