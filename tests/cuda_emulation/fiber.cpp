#include "tests/cuda_emulation/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__x86_64__)
// Saves the registers that the ABI requires a callee to preserve, swaps the stack pointers, and restores
// them. swapcontext() would also ask the kernel for the signal mask each time, which takes longer than the
// rest of a switch.
extern "C" void tranche_emulation_switch(void** save, void* load);
asm(R"(
.text
.type tranche_emulation_switch,@function
.globl tranche_emulation_switch
tranche_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tranche_emulation_switch,.-tranche_emulation_switch
)");
#endif

namespace cuda_emulation {
namespace {

constinit thread_local Fiber* starting = nullptr;

#if !defined(__x86_64__)
void switch_stacks(void** save, void* load) {
  swapcontext(static_cast<ucontext_t*>(*save), static_cast<ucontext_t*>(load));
}
#endif

}  // namespace

Fiber::Fiber(std::size_t stack_bytes, std::size_t offset) : offset_(offset) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  bytes_ = (stack_bytes + page - 1) / page * page;
  void* all = mmap(nullptr, bytes_ + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) throw std::bad_alloc();
  stack_ = static_cast<unsigned char*>(all) + page;
  if (mprotect(stack_, bytes_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
#if !defined(__x86_64__)
  position_ = new ucontext_t;
  outer_position_ = new ucontext_t;
#endif
}

Fiber::~Fiber() {
  abandon();
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  munmap(stack_ - page, bytes_ + page);
#if !defined(__x86_64__)
  delete static_cast<ucontext_t*>(position_);
  delete static_cast<ucontext_t*>(outer_position_);
#endif
}

void Fiber::start(void (*entry)(void*), void* argument) {
  entry_ = entry;
  argument_ = argument;
  ended_ = false;
  fake_stack_ = nullptr;
#if defined(__x86_64__)
  auto* top = reinterpret_cast<std::uintptr_t*>(stack_ + bytes_ - offset_);
  top[-1] = 0;  // return address of run()
  top[-2] = reinterpret_cast<std::uintptr_t>(&Fiber::run);
  for (int saved = 3; saved <= 8; ++saved) top[-saved] = 0;
  position_ = top - 8;
#else
  auto* context = static_cast<ucontext_t*>(position_);
  getcontext(context);
  context->uc_stack.ss_sp = stack_;
  context->uc_stack.ss_size = bytes_ - offset_;
  context->uc_link = nullptr;
  makecontext(context, &Fiber::run, 0);
#endif
}

bool Fiber::resume() {
  starting = this;
#if defined(__SANITIZE_ADDRESS__)
  void* outer_fake = nullptr;
  __sanitizer_start_switch_fiber(&outer_fake, stack_, bytes_);
#endif
#if defined(__x86_64__)
  tranche_emulation_switch(&outer_position_, position_);
#else
  switch_stacks(&outer_position_, position_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(outer_fake, nullptr, nullptr);
#endif
  return ended_;
}

void Fiber::leave([[maybe_unused]] bool ended) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(ended ? nullptr : &fake_stack_, outer_stack_, outer_bytes_);
#endif
#if defined(__x86_64__)
  tranche_emulation_switch(&position_, outer_position_);
#else
  switch_stacks(&position_, outer_position_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, &outer_stack_, &outer_bytes_);
#endif
}

void Fiber::suspend() {
  leave(false);
}

void Fiber::run() {
  Fiber* self = starting;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &self->outer_stack_, &self->outer_bytes_);
#endif
  self->entry_(self->argument_);
  self->ended_ = true;
  self->leave(true);
  std::abort();  // a fiber that has ended was resumed
}

void Fiber::abandon() {
  ended_ = true;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack_, bytes_);  // frames that never returned left their red zones
#endif
}

}  // namespace cuda_emulation
