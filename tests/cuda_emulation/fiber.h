#pragma once
/// A function with its own stack that can suspend itself. One OS thread at a time uses it.

#include <cstddef>

namespace cuda_emulation {

class Fiber {
 public:
  /// Reserves address space; pages are allocated when touched. Below the stack is a page without access,
  /// which catches an overflow. The stack begins `offset` bytes (a multiple of 16) below its top, because
  /// stacks that all begin at the same offset in a page compete for the same cache lines.
  Fiber(std::size_t stack_bytes, std::size_t offset);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Prepares a new run of `entry(argument)`; the previous one must have ended or been abandoned.
  void start(void (*entry)(void*), void* argument);
  /// Runs until the function ends (true) or suspends (false). Call it outside of any fiber.
  bool resume();
  /// Returns to the caller of resume(). Call it inside the fiber.
  void suspend();
  /// Abandons a suspended run; destructors of objects on its stack do not run.
  void abandon();

 private:
  static void run();
  void leave(bool ended);

  unsigned char* stack_ = nullptr;  // lowest usable byte
  std::size_t bytes_ = 0;
  std::size_t offset_ = 0;
  void* position_ = nullptr;        // inside the fiber, while it does not run
  void* outer_position_ = nullptr;  // position of the caller of resume()
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
  bool ended_ = true;
  // The two stacks as AddressSanitizer sees them.
  void* fake_stack_ = nullptr;
  const void* outer_stack_ = nullptr;
  std::size_t outer_bytes_ = 0;
};

}  // namespace cuda_emulation
