#pragma once
/// The texts of errors, for tests that read them.

#include <string>
#include <type_traits>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::test {

/// The result of message_of if the call throws nothing.
inline constexpr const char* nothing_thrown = "nothing was thrown";

/// The text of the E that `call` throws, without position and rank for an Error; nothing_thrown if it throws
/// nothing. Other exceptions propagate and fail the test.
template <typename E, typename Call>
std::string message_of(Call&& call) {
  try {
    std::forward<Call>(call)();
  } catch (const E& error) {
    if constexpr (std::is_base_of_v<Error, E>) {
      return error.message();
    } else {
      return error.what();
    }
  }
  return nothing_thrown;
}

}  // namespace tranche::test
