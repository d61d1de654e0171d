#pragma once
/// Starts the library's own threads.

#include <functional>
#include <thread>

namespace tranche::detail {

/// Starts a thread that receives no signals, so that they go to the program's own threads.
std::thread start_quiet_thread(std::function<void()> body);

}  // namespace tranche::detail
