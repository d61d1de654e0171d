#pragma once
/// The texts of errors, for tests that read them.

#include <string>
#include <type_traits>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::test {

/// The text of message_of for a call that throws nothing.
inline constexpr const char* nothing_thrown = "nothing was thrown";

/// The text of the E that `call` throws, an Error's without position and rank; nothing_thrown when it throws
/// nothing. Another error passes through and fails the test.
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
