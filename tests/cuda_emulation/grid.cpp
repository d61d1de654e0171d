#include "tests/cuda_emulation/grid.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <exception>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace cuda_emulation {

constinit thread_local Thread* current_thread = nullptr;

namespace {

constinit thread_local BlockRunner* active_runner = nullptr;

constexpr std::size_t most_shared_bytes = 227 * 1024;
constexpr std::size_t red_zone_bytes = 1024;
constexpr unsigned char red_zone_byte = 0xa5;
// AddressSanitizer's red zones and unoptimised code make stack frames of kernels several times larger.
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t fiber_stack_bytes = 512 * 1024;
#else
constexpr std::size_t fiber_stack_bytes = 128 * 1024;
#endif

std::string text(const dim3& d) {
  return fmt::format("({},{},{})", d.x, d.y, d.z);
}
std::string text(const uint3& d) {
  return fmt::format("({},{},{})", d.x, d.y, d.z);
}

}  // namespace

std::string refusal(const Kernel& kernel) {
  const auto threads = std::uint64_t{kernel.block.x} * kernel.block.y * kernel.block.z;
  if (kernel.grid.x == 0 || kernel.grid.y == 0 || kernel.grid.z == 0 || threads == 0) {
    return fmt::format("grid {} and block {} must not have a zero", text(kernel.grid), text(kernel.block));
  }
  if (kernel.grid.x > 0x7fffffffu || kernel.grid.y > 65535 || kernel.grid.z > 65535) {
    return fmt::format("grid {} is over the limit of (2147483647,65535,65535)", text(kernel.grid));
  }
  if (kernel.block.x > 1024 || kernel.block.y > 1024 || kernel.block.z > 64 || threads > 1024) {
    return fmt::format("block {} is over the limit of 1024 threads, (1024,1024,64)", text(kernel.block));
  }
  if (kernel.shared_bytes > most_shared_bytes) {
    return fmt::format("{} bytes of dynamic shared memory are over the limit of {}", kernel.shared_bytes,
                       most_shared_bytes);
  }
  return {};
}

BlockRunner::BlockRunner() {
  const std::size_t bytes = most_shared_bytes + 2 * red_zone_bytes;
  shared_block_ = static_cast<unsigned char*>(std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024));
  if (shared_block_ == nullptr) throw std::bad_alloc();
  shared_ = shared_block_ + red_zone_bytes;
}

BlockRunner::~BlockRunner() {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(shared_block_, most_shared_bytes + 2 * red_zone_bytes);
#endif
  std::free(shared_block_);
}

BlockRunner* BlockRunner::active() {
  return active_runner;
}

void BlockRunner::prepare(const Kernel& kernel) {
  kernel_ = &kernel;
  failure_.clear();
  const auto count = static_cast<std::size_t>(kernel.block.x) * kernel.block.y * kernel.block.z;
  threads_.resize(count);
  warps_.resize((count + 31) / 32);
  for (std::size_t i = 0; i < count; ++i) {
    RunningThread& thread = threads_[i];
    const auto number = static_cast<std::uint32_t>(i);
    thread.number = number;
    thread.index = {number % kernel.block.x, number / kernel.block.x % kernel.block.y,
                    number / kernel.block.x / kernel.block.y};
    thread.block_size = kernel.block;
    thread.grid_size = kernel.grid;
    thread.fiber = nullptr;
  }
  for (std::size_t i = 0; i < warps_.size(); ++i) {
    warps_[i].first = static_cast<std::uint32_t>(32 * i);
    warps_[i].end = static_cast<std::uint32_t>(std::min(32 * (i + 1), count));
  }
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(shared_, most_shared_bytes);
  __asan_poison_memory_region(shared_block_, red_zone_bytes);
  __asan_poison_memory_region(shared_ + kernel.shared_bytes,
                              most_shared_bytes + red_zone_bytes - kernel.shared_bytes);
#else
  std::memset(shared_block_, red_zone_byte, red_zone_bytes);
  std::memset(shared_ + kernel.shared_bytes, red_zone_byte, red_zone_bytes);
#endif
}

std::string BlockRunner::run(const Kernel& kernel, std::uint64_t seed) {
  shuffler_ = Shuffler(seed);
  prepare(kernel);
  active_runner = this;
  const auto blocks = std::uint64_t{kernel.grid.x} * kernel.grid.y * kernel.grid.z;
  constexpr std::uint64_t most_shuffled = 1 << 16;
  std::vector<std::uint32_t> order;
  if (blocks <= most_shuffled) {
    order.resize(blocks);
    for (std::uint32_t i = 0; i < blocks; ++i) order[i] = i;
    shuffler_.shuffle(order);
  }
  for (std::uint64_t i = 0; i < blocks && failure_.empty(); ++i) {
    const std::uint64_t number = order.empty() ? i : order[i];
    const auto x = static_cast<unsigned>(number % kernel.grid.x);
    const auto y = static_cast<unsigned>(number / kernel.grid.x % kernel.grid.y);
    const auto z = static_cast<unsigned>(number / kernel.grid.x / kernel.grid.y);
    run_block({x, y, z});
  }
  active_runner = nullptr;
  current_thread = nullptr;
  kernel_ = nullptr;
  return failure_;
}

void BlockRunner::run_block(uint3 block) {
  std::memset(shared_, 0xff, kernel_->shared_bytes);
  for (const SharedVariable& variable : static_shared_) std::memset(variable.data, 0xff, variable.bytes);
  at_barrier_ = returned_ = 0;
  for (RunningThread& thread : threads_) {
    thread.block = block;
    thread.state = ThreadState::ready;
    thread.copies.clear();
    thread.groups.clear();
  }
  active_.clear();
  for (std::uint32_t i = 0; i < warps_.size(); ++i) {
    Warp& warp = warps_[i];
    warp.ready.clear();
    warp.waiting = 0;
    for (std::uint32_t thread = warp.first; thread < warp.end; ++thread) warp.ready.push_back(thread);
    active_.push_back(i);
  }
  while (failure_.empty()) {
    // One warp runs for a while, usually to its next barrier, so that its stacks stay in the cache.
    while (!active_.empty() && failure_.empty()) {
      const std::uint32_t choice = shuffler_.below(static_cast<std::uint32_t>(active_.size()));
      Warp& warp = warps_[active_[choice]];
      do {
        run_round(warp);
      } while (!warp.ready.empty() && failure_.empty() && shuffler_.below(16) != 0);
      if (warp.ready.empty()) {
        active_[choice] = active_.back();
        active_.pop_back();
      }
    }
    if (!failure_.empty() || returned_ == threads_.size()) break;
    if (!release_barrier()) break;
  }
  if (failure_.empty()) {
    check_red_zones(block);
  } else {
    for (RunningThread& thread : threads_) {
      if (thread.fiber == nullptr) continue;
      thread.fiber->abandon();
      free_.push_back(thread.fiber);
      thread.fiber = nullptr;
    }
  }
}

void BlockRunner::run_round(Warp& warp) {
  round_.swap(warp.ready);
  warp.ready.clear();
  shuffler_.shuffle(round_);
  for (const std::uint32_t number : round_) {
    step(threads_[number]);
    if (!failure_.empty()) return;
  }
}

void BlockRunner::step(RunningThread& thread) {
  current_thread = &thread;
  if (thread.fiber == nullptr) {
    thread.fiber = take_fiber();
    thread.fiber->start(&BlockRunner::thread_main, this);
  }
  if (thread.fiber->resume()) {
    free_.push_back(thread.fiber);
    thread.fiber = nullptr;
    if (!failure_.empty()) return;
    complete_copies(thread, 0);
    thread.state = ThreadState::returned;
    ++returned_;
  }
}

void BlockRunner::thread_main(void* runner) {
  auto* self = static_cast<BlockRunner*>(runner);
  try {
    self->kernel_->body();
  } catch (const std::exception& error) {
    self->report(self->current(), fmt::format("an exception left the kernel: {}", error.what()), Where());
  }
}

Fiber* BlockRunner::take_fiber() {
  if (free_.empty()) {
    const std::size_t offset = fibers_.size() * 13 * 64 % (fiber_stack_bytes / 8);
    fibers_.push_back(std::make_unique<Fiber>(fiber_stack_bytes, offset));
    free_.push_back(fibers_.back().get());
  }
  Fiber* fiber = free_.back();
  free_.pop_back();
  return fiber;
}

int BlockRunner::wait_at_barrier(Predicate combine, bool predicate, const Where& where) {
  RunningThread& thread = current();
  thread.state = ThreadState::at_barrier;
  thread.waits_in = "__syncthreads";
  thread.where = where;
  thread.combine = combine;
  thread.predicate = predicate;
  ++at_barrier_;
  thread.fiber->suspend();
  return thread.combined;
}

bool BlockRunner::release_barrier() {
  if (at_barrier_ != threads_.size()) {
    diagnose_stall();
    return false;
  }
  const RunningThread& first = threads_.front();
  int yes = 0;
  for (const RunningThread& thread : threads_) {
    if (thread.where.line() != first.where.line() || thread.combine != first.combine ||
        std::strcmp(thread.where.file_name(), first.where.file_name()) != 0) {
      report(thread,
             fmt::format("divergent barrier: it waits here, and thread {} at {}:{}", text(first.index),
                         first.where.file_name(), first.where.line()),
             thread.where);
      return false;
    }
    yes += thread.predicate ? 1 : 0;
  }
  int combined = yes;
  if (first.combine == Predicate::any) combined = yes > 0;
  if (first.combine == Predicate::all) combined = yes == static_cast<int>(threads_.size());
  for (RunningThread& thread : threads_) {
    thread.combined = combined;
    thread.state = ThreadState::ready;
  }
  at_barrier_ = 0;
  for (std::uint32_t i = 0; i < warps_.size(); ++i) {
    for (std::uint32_t number = warps_[i].first; number < warps_[i].end; ++number) {
      warps_[i].ready.push_back(number);
    }
    active_.push_back(i);
  }
  return true;
}

// No thread can continue. The diagnostic names one that waits in a warp collective, else one at the barrier.
void BlockRunner::diagnose_stall() {
  for (const RunningThread& thread : threads_) {
    if (thread.state != ThreadState::in_warp) continue;
    const std::uint32_t first = thread.number / 32 * 32;
    std::string missing;
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      if ((thread.mask >> lane & 1) == 0) continue;
      if (first + lane >= threads_.size()) {
        missing += fmt::format(" lane {} (not in the block)", lane);
        continue;
      }
      const RunningThread& other = threads_[first + lane];
      if (other.state == ThreadState::returned) {
        missing += fmt::format(" lane {} (has returned)", lane);
      } else if (other.state == ThreadState::at_barrier) {
        missing += fmt::format(" lane {} (at the barrier of line {})", lane, other.where.line());
      } else if (other.mask != thread.mask || std::strcmp(other.waits_in, thread.waits_in) != 0) {
        missing += fmt::format(" lane {} (in {} of line {} with mask {:#010x})", lane, other.waits_in,
                               other.where.line(), other.mask);
      }
    }
    report(thread,
           fmt::format("{} with mask {:#010x} waits for lanes that do not come:{}", thread.waits_in,
                       thread.mask, missing),
           thread.where);
    return;
  }
  for (const RunningThread& thread : threads_) {
    if (thread.state != ThreadState::at_barrier) continue;
    std::string example;
    for (const RunningThread& other : threads_) {
      if (other.state == ThreadState::returned) {
        example = fmt::format("thread {} has returned", text(other.index));
        break;
      }
    }
    report(thread,
           fmt::format("divergent barrier: {} of {} threads reached it; {}", at_barrier_, threads_.size(),
                       example),
           thread.where);
    return;
  }
}

void BlockRunner::wait_in_warp(const char* name, unsigned mask, Exchange exchange, void* payload,
                               const Where& where) {
  RunningThread& thread = current();
  thread.waits_in = name;
  thread.where = where;
  thread.mask = mask;
  thread.exchange = exchange;
  thread.payload = payload;
  if ((mask >> (thread.number & 31) & 1) == 0) {
    fail(fmt::format("{} with mask {:#010x}, which does not name the calling lane {}", name, mask,
                     thread.number & 31),
         where);
  }
  thread.state = ThreadState::in_warp;
  if (!complete_collective(thread)) thread.fiber->suspend();
}

// The last lane that arrives performs the exchange, makes the others ready and continues.
bool BlockRunner::complete_collective(RunningThread& last) {
  Warp& warp = warps_[last.number / 32];
  if (++warp.waiting < __builtin_popcount(last.mask)) return false;
  void* payloads[32] = {};
  const std::uint32_t lanes = warp.end - warp.first;
  if (lanes < 32 && last.mask >> lanes != 0) return false;
  for (std::uint32_t lane = 0; lane < lanes; ++lane) {
    if ((last.mask >> lane & 1) == 0) continue;
    const RunningThread& other = threads_[warp.first + lane];
    if (other.state != ThreadState::in_warp || other.mask != last.mask || other.exchange != last.exchange ||
        std::strcmp(other.waits_in, last.waits_in) != 0) {
      return false;
    }
    payloads[lane] = other.payload;
  }
  last.exchange(payloads, last.mask);
  for (std::uint32_t lane = 0; lane < lanes; ++lane) {
    if ((last.mask >> lane & 1) == 0) continue;
    RunningThread& other = threads_[warp.first + lane];
    other.state = ThreadState::ready;
    --warp.waiting;
    if (&other != &last) warp.ready.push_back(other.number);
  }
  return true;
}

void BlockRunner::check_red_zones([[maybe_unused]] uint3 block) {
#if !defined(__SANITIZE_ADDRESS__)
  const auto touched = [](const unsigned char* begin) {
    return std::any_of(begin, begin + red_zone_bytes,
                       [](unsigned char byte) { return byte != red_zone_byte; });
  };
  const bool before = touched(shared_block_);
  if (before || touched(shared_ + kernel_->shared_bytes)) {
    failure_ = fmt::format("kernel '{}', block {}: wrote {} its {} bytes of dynamic shared memory",
                           kernel_->name, text(block), before ? "before" : "beyond", kernel_->shared_bytes);
  }
#endif
}

std::string BlockRunner::place(const RunningThread& thread) const {
  return fmt::format("kernel '{}', block {} of {}, thread {} of {}", kernel_->name, text(thread.block),
                     text(kernel_->grid), text(thread.index), text(kernel_->block));
}

std::string BlockRunner::describe_current() const {
  return place(*static_cast<RunningThread*>(current_thread));
}

void BlockRunner::report(const RunningThread& thread, const std::string& what, const Where& where) {
  if (!failure_.empty()) return;
  failure_ = fmt::format("{}: {}", place(thread), what);
  if (where.line() != 0) failure_ += fmt::format(" ({}:{})", where.file_name(), where.line());
}

void BlockRunner::fail(std::string what, const Where& where) {
  report(current(), what, where);
  {
    std::string released;  // destructors of objects on this stack do not run any more
    what.swap(released);
  }
  current().fiber->suspend();  // the fiber is abandoned here
  std::abort();
}

}  // namespace cuda_emulation
