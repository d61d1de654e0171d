#pragma once
/// Starting threads of the library's own.

#include <functional>
#include <thread>

namespace tranche::detail {

/// A thread that takes no signals: they are for the program's own.
std::thread start_quiet_thread(std::function<void()> body);

}  // namespace tranche::detail
