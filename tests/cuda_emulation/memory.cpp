// Accounting of emulated memory, and the address space of the GPUs.
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "tests/cuda_emulation/control.h"
#include "tests/cuda_emulation/grid.h"
#include "tests/cuda_emulation/state.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace cuda_emulation {
namespace {

constexpr std::size_t page_bytes = 4096;
constexpr std::size_t address_space_bytes = std::size_t{8} << 40;
constexpr std::size_t huge_page_bytes = 2 << 20;
constexpr std::size_t poisoned_bytes = 32 << 20;  // poisoned bytes of each allocation; more would be slow
constexpr unsigned char tail_byte = 0xa5;
constexpr std::int64_t allocation_granule = 512;
/// The bytes that a context uses on a real GPU, so that accounting that ignores them fails.
constexpr std::int64_t context_bytes = 32 << 20;

std::size_t round_up(std::size_t bytes, std::size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

struct Memory {
  std::mutex mutex;
  std::map<std::uintptr_t, Allocation> allocations;
  unsigned char* space = nullptr;  // a reservation of address_space_bytes
  std::size_t used_space = 0;
  std::multimap<std::size_t, void*> recycled;  // freed reservations by size
  int users = 0;                               // operations in progress that need device memory
  bool protect = environment("TRANCHE_EMULATION_PROTECT", 1) != 0;
  std::map<int, std::int64_t> in_use;
  struct sigaction previous {};
};

Memory& memory() {
  static Memory& instance = *new Memory;
  return instance;
}

std::uintptr_t number(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address);
}

void write_text(const std::string& text) {
  if (::write(STDERR_FILENO, text.data(), text.size()) < 0) return;
}

// Prints which side made the access, then lets the fault happen. In general that is not safe in a signal
// handler, but the faulting code is not part of the allocator.
void explain_fault(int signal, siginfo_t* info, void* context) {
  Memory& m = memory();
  const auto* address = static_cast<unsigned char*>(info->si_addr);
  const BlockRunner* runner = BlockRunner::active();
  const bool ours = m.space != nullptr && address >= m.space && address < m.space + address_space_bytes;
  if (ours && runner == nullptr) {
    write_text(fmt::format("cuda_emulation: host code touched device memory, or freed memory, at {}\n",
                           info->si_addr));
  }
  if (runner != nullptr && current_thread != nullptr) {
    write_text(
        fmt::format("cuda_emulation: {}: access to {}, which is no live allocation "
                    "(TRANCHE_EMULATION_SEED={})\n",
                    runner->describe_current(), info->si_addr, seed()));
  }
  if ((m.previous.sa_flags & SA_SIGINFO) != 0 && m.previous.sa_sigaction != nullptr) {
    m.previous.sa_sigaction(signal, info, context);
    return;
  }
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  sigaction(signal, &standard, nullptr);  // the instruction then faults again
}

void set_access(Memory& m, const Allocation& allocation) {
  if (allocation.kind != MemoryKind::device || !m.protect) return;
  mprotect(allocation.data, round_up(allocation.bytes, page_bytes),
           m.users > 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void* reserve_locked(Memory& m, std::size_t bytes, std::size_t alignment) {
  if (m.space == nullptr) {
    void* space =
        mmap(nullptr, address_space_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) return nullptr;
    m.space = static_cast<unsigned char*>(space);
    struct sigaction handler {};
    handler.sa_sigaction = &explain_fault;
    handler.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGSEGV, &handler, &m.previous);
  }
  if (m.used_space > address_space_bytes / 2) {
    if (const auto found = m.recycled.find(bytes); found != m.recycled.end()) {
      if (void* address = found->second; number(address) % alignment == 0) {
        m.recycled.erase(found);
        return address;
      }
    }
  }
  const std::uintptr_t begin = round_up(number(m.space) + m.used_space, alignment);
  const std::size_t end =
      begin - number(m.space) + round_up(bytes, page_bytes) + page_bytes;  // with a guard page
  if (end > address_space_bytes) return nullptr;
  m.used_space = end;
  return reinterpret_cast<void*>(begin);
}

}  // namespace

DeviceAccess::DeviceAccess() {
  Memory& m = memory();
  std::lock_guard lock(m.mutex);
  if (m.users++ > 0) return;
  for (const auto& [begin, allocation] : m.allocations) set_access(m, allocation);
}

DeviceAccess::~DeviceAccess() {
  Memory& m = memory();
  std::lock_guard lock(m.mutex);
  if (--m.users > 0) return;
  for (const auto& [begin, allocation] : m.allocations) set_access(m, allocation);
}

bool protects_device_memory() {
  return memory().protect;
}

void* reserve_addresses(std::size_t bytes, std::size_t alignment) {
  std::lock_guard lock(memory().mutex);
  return reserve_locked(memory(), bytes, alignment);
}

void recycle_addresses(void* address, std::size_t bytes) {
  std::lock_guard lock(memory().mutex);
  memory().recycled.emplace(bytes, address);
}

void close_addresses(void* address, std::size_t bytes) {
  mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void poison(void* data, std::size_t bytes) {
  std::memset(data, 0xff, std::min(bytes, poisoned_bytes));
}

std::int64_t bytes_in_use(int device) {
  std::lock_guard lock(memory().mutex);
  return memory().in_use[device] + context_bytes;
}

bool take_bytes(int device, std::int64_t bytes) {
  std::lock_guard lock(memory().mutex);
  std::int64_t& in_use = memory().in_use[device];
  if (bytes > total_memory() - context_bytes - in_use) return false;
  in_use += bytes;
  return true;
}

void give_bytes(int device, std::int64_t bytes) {
  std::lock_guard lock(memory().mutex);
  memory().in_use[device] -= bytes;
}

void add_allocation(const Allocation& allocation) {
  std::lock_guard lock(memory().mutex);
  memory().allocations[number(allocation.data)] = allocation;
  set_access(memory(), allocation);
}

bool remove_allocation(const void* data) {
  std::lock_guard lock(memory().mutex);
  return memory().allocations.erase(number(data)) > 0;
}

void* allocate_device(int device, std::size_t bytes) {
  const auto charged = static_cast<std::int64_t>(round_up(bytes, allocation_granule));
  if (bytes > address_space_bytes || !take_bytes(device, charged)) return nullptr;
  auto* data = static_cast<unsigned char*>(
      reserve_addresses(bytes, bytes >= huge_page_bytes ? huge_page_bytes : page_bytes));
  const std::size_t mapped = round_up(bytes, page_bytes);
  if (data == nullptr || mprotect(data, mapped, PROT_READ | PROT_WRITE) != 0) {
    give_bytes(device, charged);
    return nullptr;
  }
  if (bytes >= huge_page_bytes)
    madvise(data, mapped, MADV_HUGEPAGE);  // cheaper to touch, protect and unprotect
  poison(data, bytes);
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(data + bytes, mapped - bytes);
#else
  std::memset(data + bytes, tail_byte, mapped - bytes);
#endif
  add_allocation({data, bytes, MemoryKind::device, device, false});
  count_allocation();
  return data;
}

void* allocate_host(std::size_t bytes) {
  const std::size_t mapped = round_up(bytes, page_bytes);
  auto* all = static_cast<unsigned char*>(
      mmap(nullptr, mapped + page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (all == MAP_FAILED) return nullptr;
  mprotect(all + mapped, page_bytes, PROT_NONE);
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(all + bytes, mapped - bytes);
#else
  std::memset(all + bytes, tail_byte, mapped - bytes);
#endif
  add_allocation({all, bytes, MemoryKind::host, 0, false});
  count_allocation();
  return all;
}

bool release(void* data, MemoryKind kind) {
  Allocation allocation;
  if (!find(data, allocation) || allocation.data != data || allocation.kind != kind || allocation.mapped) {
    return false;
  }
  const std::size_t mapped = round_up(allocation.bytes, page_bytes);
  {
    const DeviceAccess access;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(allocation.data, mapped);
#else
    for (std::size_t i = allocation.bytes; i < mapped; ++i) {
      if (allocation.data[i] == tail_byte) continue;
      fail_device(allocation.device, cudaErrorIllegalAddress,
                  fmt::format("something wrote {} bytes beyond the end of an allocation of {} bytes",
                              i - allocation.bytes + 1, allocation.bytes));
      break;
    }
#endif
    remove_allocation(data);
  }
  if (kind == MemoryKind::host) {
    munmap(allocation.data, mapped + page_bytes);
    return true;
  }
  close_addresses(allocation.data, mapped);  // the addresses stay reserved, so that a late access faults
  give_bytes(allocation.device, static_cast<std::int64_t>(round_up(allocation.bytes, allocation_granule)));
  return true;
}

bool find(const void* address, Allocation& found) {
  Memory& m = memory();
  std::lock_guard lock(m.mutex);
  auto next = m.allocations.upper_bound(number(address));
  if (next == m.allocations.begin()) return false;
  const Allocation& allocation = std::prev(next)->second;
  if (number(address) >= number(allocation.data) + allocation.bytes) return false;
  found = allocation;
  return true;
}

std::string complaint_about(const void* address, std::size_t bytes, bool device_side) {
  const char* side = device_side ? "device" : "host";
  const auto* begin = static_cast<const unsigned char*>(address);
  const auto* const end = begin + bytes;
  while (begin < end) {  // adjacent mappings form one range
    Allocation allocation;
    const bool known = find(begin, allocation);
    if (!known && !device_side) {
      const Memory& m = memory();
      const bool in_space = m.space != nullptr && begin >= m.space && begin < m.space + address_space_bytes;
      return in_space || begin == nullptr ? fmt::format("{} is no host memory", fmt::ptr(begin))
                                          : std::string();
    }
    if (!known) return fmt::format("{} lies in no live device allocation", fmt::ptr(begin));
    if ((allocation.kind == MemoryKind::device) != device_side) {
      return fmt::format("{} is not {} memory", fmt::ptr(begin), side);
    }
    if (end > allocation.data + allocation.bytes && !allocation.mapped) {
      return fmt::format("{} bytes from {} run {} bytes beyond the end of its allocation of {} bytes", bytes,
                         fmt::ptr(address), end - (allocation.data + allocation.bytes), allocation.bytes);
    }
    begin = allocation.data + allocation.bytes;
  }
  return {};
}

LiveMemory live_device_memory(int device) {
  Memory& m = memory();
  std::lock_guard lock(m.mutex);
  LiveMemory live;
  for (const auto& [begin, allocation] : m.allocations) {
    if (allocation.kind != MemoryKind::device || allocation.device != device) continue;
    ++live.allocations;
    live.bytes += static_cast<std::int64_t>(allocation.bytes);
  }
  return live;
}

void peek(void* to, const void* device, std::int64_t bytes) {
  const DeviceAccess access;
  std::memcpy(to, device, static_cast<std::size_t>(bytes));
}

}  // namespace cuda_emulation
