#pragma once
/// Runs a kernel's blocks one after another, with a fiber for each thread of a block (see cuda_emulation.h).

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/cuda_emulation/cuda_emulation.h"
#include "tests/cuda_emulation/fiber.h"
#include "tests/cuda_emulation/static_shared.h"

namespace cuda_emulation {

struct Kernel {
  std::string name;
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;
  std::function<void()> body;
};

/// The reason why such a launch is refused; empty if it is not.
std::string refusal(const Kernel& kernel);

/// A small and fast random number generator, sufficient for the order of threads.
class Shuffler {
 public:
  explicit Shuffler(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567) {}
  std::uint32_t below(std::uint32_t bound) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>((state_ >> 32) * bound >> 32);
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) {
      std::swap(items[i - 1], items[below(static_cast<std::uint32_t>(i))]);
    }
  }

 private:
  std::uint64_t state_;
};

enum class ThreadState : std::uint8_t { ready, in_warp, at_barrier, returned };

struct Copy {
  void* to;
  const void* from;  // null: zeros
};

struct RunningThread : Thread {
  ThreadState state = ThreadState::ready;
  std::uint32_t number = 0;
  Fiber* fiber = nullptr;
  // The function in which the thread waits.
  const char* waits_in = nullptr;
  Where where;
  unsigned mask = 0;
  Exchange exchange = nullptr;
  void* payload = nullptr;
  Predicate combine = Predicate::none;
  bool predicate = false;
  int combined = 0;
  // cp.async: copies in issue order, and the end index of each committed group.
  std::vector<Copy> copies;
  std::vector<std::size_t> groups;
};

/// Runs kernels; each host thread that runs kernels has one. Keeps the fibers and the shared memory.
class BlockRunner {
 public:
  BlockRunner();
  ~BlockRunner();

  /// Runs the whole grid; returns the diagnostic of the first error, or an empty text.
  std::string run(const Kernel& kernel, std::uint64_t seed);
  /// The runner whose kernel runs on this host thread; null outside of kernels.
  static BlockRunner* active();

  void* dynamic_shared() { return shared_; }
  void wait_in_warp(const char* name, unsigned mask, Exchange exchange, void* payload, const Where& where);
  int wait_at_barrier(Predicate combine, bool predicate, const Where& where);
  [[noreturn]] void fail(std::string what, const Where& where);
  RunningThread& current() { return *static_cast<RunningThread*>(current_thread); }
  /// For example "kernel 'x', block (0,0,0), thread (3,0,0)".
  std::string describe_current() const;

 private:
  struct Warp {
    std::vector<std::uint32_t> ready;
    std::uint32_t first = 0;  // its threads are [first, end)
    std::uint32_t end = 0;
    int waiting = 0;  // lanes that wait in collectives
  };

  void prepare(const Kernel& kernel);
  void run_block(uint3 block);
  void run_round(Warp& warp);
  void step(RunningThread& thread);
  bool release_barrier();
  void diagnose_stall();
  bool complete_collective(RunningThread& last);
  void check_red_zones(uint3 block);
  std::string place(const RunningThread& thread) const;
  void report(const RunningThread& thread, const std::string& what, const Where& where);
  Fiber* take_fiber();
  static void thread_main(void* runner);

  const Kernel* kernel_ = nullptr;
  std::vector<RunningThread> threads_;
  std::vector<Warp> warps_;
  std::vector<std::uint32_t> active_, round_;
  std::uint32_t at_barrier_ = 0, returned_ = 0;
  Shuffler shuffler_{0};
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> free_;
  unsigned char* shared_block_ = nullptr;
  unsigned char* shared_ = nullptr;
  std::vector<SharedVariable> static_shared_ = shared_variables_of_this_thread();
  std::string failure_;
};

/// Performs the copies of all cp.async groups except the newest `pending`.
void complete_copies(RunningThread& thread, std::size_t pending);

}  // namespace cuda_emulation
