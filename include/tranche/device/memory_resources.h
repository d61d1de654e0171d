#pragma once
/// The memory resources: upstreams (host, meta) and decorators (limit, track, statistics, log, poison).

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "tranche/device/ledger.h"
#include "tranche/device/memory.h"

namespace tranche {

class Device;

/// Process memory from the operating system, page-aligned for large requests.
std::unique_ptr<MemoryResource> make_host_resource(Tier tier);
/// Returns addresses that must never be accessed; never fails. For planning.
std::unique_ptr<MemoryResource> make_meta_resource(Tier tier);

/// Refuses a request that would exceed `limit_bytes` before asking upstream. The OutOfMemory text names the
/// rank's phase and unit, the tag, the bytes asked, the limit, and the ledger's table.
class LimitResource : public MemoryResource {
 public:
  LimitResource(MemoryResource& upstream, std::int64_t limit_bytes, const Ledger* ledger);
  Tier tier() const override { return upstream_.tier(); }
  void* allocate(const AllocationRequest& request) override;
  void deallocate(void* pointer, const AllocationRequest& request) noexcept override;
  /// Counts bytes that were allocated elsewhere against the limit, permanently. Never refuses.
  void hold(std::int64_t bytes) noexcept { held_.fetch_add(bytes); }

 private:
  MemoryResource& upstream_;
  std::int64_t limit_;
  std::atomic<std::int64_t> held_{0};
  const Ledger* ledger_;
};

/// Tracks every allocation in a Ledger and keeps the table of live ones. A free that does not match is
/// counted and reported through `complain`: a free of an unknown address is dropped, a wrong size or category
/// is corrected from the table. Allocations still live at destruction are reported too. An allocation is
/// recorded after upstream made it, and erased before upstream frees it.
class TrackingResource : public MemoryResource {
 public:
  TrackingResource(MemoryResource& upstream, Ledger& ledger,
                   std::function<void(const std::string& complaint)> complain = {});
  ~TrackingResource() override;
  Tier tier() const override { return upstream_.tier(); }
  void* allocate(const AllocationRequest& request) override;
  void deallocate(void* pointer, const AllocationRequest& request) noexcept override;
  /// Frees an allocation by its address alone, for allocators of other libraries, which do not pass sizes.
  /// From any thread. No-op for nullptr; an address that is not live is counted and reported as above.
  void free(void* pointer) noexcept;
  /// Number of live allocations.
  std::int64_t live() const;
  /// The number of calls so far (allocate + deallocate); a step that makes none leaves it unchanged.
  std::int64_t calls() const;
  /// Frees that did not match an allocation.
  std::int64_t mismatches() const;

 private:
  struct Impl;
  /// Frees the allocation at `pointer`; `claimed` is the request that the caller passed (null: none).
  void take(void* pointer, const AllocationRequest* claimed) noexcept;
  MemoryResource& upstream_;
  std::unique_ptr<Impl> impl_;
};

/// Counts bytes and calls (current, peak and total) in nested scopes; a scope's peak is folded into its
/// parent.
class StatisticsResource : public MemoryResource {
 public:
  struct Counter {
    std::int64_t current = 0, peak = 0, total = 0;
  };
  explicit StatisticsResource(MemoryResource& upstream);
  ~StatisticsResource() override;
  Tier tier() const override { return upstream_.tier(); }
  void* allocate(const AllocationRequest& request) override;
  void deallocate(void* pointer, const AllocationRequest& request) noexcept override;
  Counter bytes() const;
  Counter allocations() const;
  void push();
  /// Ends the innermost scope and returns its byte counter; throws LogicError when none is open.
  Counter pop();

 private:
  struct Impl;
  MemoryResource& upstream_;
  std::unique_ptr<Impl> impl_;
};

/// Writes one CSV line per call, failed ones included: seconds,action,tier,category,tag,bytes,address.
class LoggingResource : public MemoryResource {
 public:
  LoggingResource(MemoryResource& upstream, std::function<void(const std::string& line)> sink);
  Tier tier() const override { return upstream_.tier(); }
  void* allocate(const AllocationRequest& request) override;
  void deallocate(void* pointer, const AllocationRequest& request) noexcept override;

 private:
  MemoryResource& upstream_;
  std::function<void(const std::string&)> sink_;
};

/// Fills memory with poison_byte and returns when that is done. It throws nothing.
using PoisonFill = std::function<void(void* pointer, std::int64_t bytes)>;
/// The byte of the poison pattern: every floating-point format reads it as NaN.
inline constexpr unsigned char poison_byte = 0xff;
/// The fill for memory of Tier::device: by the host where it may access that memory, else by `device` on a
/// separate stream, for which the host waits. Thread-safe. Destroy it before the device.
PoisonFill make_poison_fill(Device& device);

/// Fills memory with NaN patterns (0xff bytes) when it is allocated and when it is freed, so that a read of
/// stale or uninitialised memory changes results. For tests (`tranche.debug.poison_memory`).
class PoisonResource : public MemoryResource {
 public:
  /// For memory that the host may access.
  explicit PoisonResource(MemoryResource& upstream);
  PoisonResource(MemoryResource& upstream, PoisonFill fill);
  Tier tier() const override { return upstream_.tier(); }
  void* allocate(const AllocationRequest& request) override;
  void deallocate(void* pointer, const AllocationRequest& request) noexcept override;

 private:
  MemoryResource& upstream_;
  PoisonFill fill_;
};

}  // namespace tranche
