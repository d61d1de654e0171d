#pragma once
/// A function with a stack of its own that can stop in the middle. Used by one OS thread at a time.

#include <cstddef>

namespace cuda_emulation {

class Fiber {
 public:
  /// Address space only: pages are taken when touched. An overrun meets a page without access. The stack
  /// begins `offset` bytes (a multiple of 16) below its top: stacks that all begin at the same place of a
  /// page would compete for the same lines of the cache.
  Fiber(std::size_t stack_bytes, std::size_t offset);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Prepares a new run of `entry(argument)`; what ran before must have ended or been abandoned.
  void start(void (*entry)(void*), void* argument);
  /// Runs until the function ends (true) or suspends (false). From outside any fiber.
  bool resume();
  /// Back to whoever resumed. From inside.
  void suspend();
  /// Forgets a suspended run. Destructors of what lies on the stack do not run.
  void abandon();

 private:
  static void run();
  void leave(bool ended);

  unsigned char* stack_ = nullptr;  // lowest usable byte
  std::size_t bytes_ = 0;
  std::size_t offset_ = 0;
  void* position_ = nullptr;        // inside, while it does not run
  void* outer_position_ = nullptr;  // of whoever resumed
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
  bool ended_ = true;
  // AddressSanitizer's view of the two stacks.
  void* fake_stack_ = nullptr;
  const void* outer_stack_ = nullptr;
  std::size_t outer_bytes_ = 0;
};

}  // namespace cuda_emulation
