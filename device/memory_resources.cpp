// The decorators of memory resources.
#include "tranche/device/memory_resources.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/csv.h"
#include "device/memory_advice.h"
#include "tranche/core/error.h"

namespace tranche {

// ---- limit

LimitResource::LimitResource(MemoryResource& upstream, std::int64_t limit_bytes, const Ledger* ledger)
    : upstream_(upstream), limit_(limit_bytes), ledger_(ledger) {
  if (limit_bytes < 0) throw InvalidArgument(fmt::format("memory limit of {} bytes", limit_bytes));
}

void* LimitResource::allocate(const AllocationRequest& request) {
  if (request.bytes < 0) {
    throw InvalidArgument(fmt::format("allocation '{}' asks for {} bytes", request.tag, request.bytes));
  }
  std::int64_t held = held_.load();
  for (;;) {
    // The first test keeps the rounding from overflowing.
    if (request.bytes > limit_ - held || aligned_bytes(request.bytes) > limit_ - held) {
      const std::string doing = ledger_ != nullptr ? ledger_->doing() : "";
      throw OutOfMemory(
          fmt::format("{}{}'{}' ({}) asks for {} ({} B) of {} memory, but the limit is {} ({} B), of which "
                      "{} ({} B) are held and only {} are left; {}, or raise the limit{}{}",
                      doing, doing.empty() ? "" : ": ", request.tag, name_of(request.category),
                      format_bytes(request.bytes), request.bytes, name_of(tier()), format_bytes(limit_),
                      limit_, format_bytes(held), held, format_bytes(limit_ - held),
                      detail::memory_advice(tier(), request.category), ledger_ != nullptr ? "\n" : "",
                      ledger_ != nullptr ? ledger_->table() : ""),
          true);
    }
    if (held_.compare_exchange_weak(held, held + aligned_bytes(request.bytes))) break;
  }
  try {
    return upstream_.allocate(request);
  } catch (...) {
    held_.fetch_sub(aligned_bytes(request.bytes));
    throw;
  }
}

void LimitResource::deallocate(void* pointer, const AllocationRequest& request) noexcept {
  upstream_.deallocate(pointer, request);
  held_.fetch_sub(aligned_bytes(request.bytes));
}

// ---- track

struct TrackingResource::Impl {
  struct Entry {
    std::int64_t bytes;
    Category category;
    std::string tag;
  };
  Ledger& ledger;
  std::function<void(const std::string&)> complain;
  mutable std::mutex mutex;
  std::unordered_map<void*, Entry> live;
  std::int64_t calls = 0;
  std::int64_t mismatches = 0;

  // Building the text may run out of memory, and the callback is the user's: neither may make a free throw.
  template <typename Text>
  void report(Text text) const noexcept {
    if (!complain) return;
    try {
      complain(text());
    } catch (...) {
    }
  }
};

TrackingResource::TrackingResource(MemoryResource& upstream, Ledger& ledger,
                                   std::function<void(const std::string&)> complain)
    : upstream_(upstream), impl_(new Impl{ledger, std::move(complain), {}, {}, 0, 0}) {}

TrackingResource::~TrackingResource() {
  if (impl_->live.empty()) return;
  impl_->report([&] {
    std::vector<std::string> names;
    for (const auto& [pointer, entry] : impl_->live) {
      names.push_back(
          fmt::format("'{}' ({}, {})", entry.tag, name_of(entry.category), format_bytes(entry.bytes)));
    }
    std::sort(names.begin(), names.end());
    std::string text =
        fmt::format("{} allocations of {} memory were never freed:", names.size(), name_of(upstream_.tier()));
    for (std::size_t i = 0; i < std::min<std::size_t>(names.size(), 8); ++i) text += " " + names[i];
    return text;
  });
}

void* TrackingResource::allocate(const AllocationRequest& request) {
  void* pointer = upstream_.allocate(request);
  try {
    std::lock_guard lock(impl_->mutex);
    ++impl_->calls;
    impl_->live[pointer] = {request.bytes, request.category, std::string(request.tag)};
  } catch (...) {
    upstream_.deallocate(pointer, request);
    throw;
  }
  impl_->ledger.allocated(tier(), request.category, aligned_bytes(request.bytes), request.tag);
  return pointer;
}

void TrackingResource::take(void* pointer, const AllocationRequest* claimed) noexcept {
  Impl::Entry entry{};
  bool known = false;
  bool matches = false;
  {
    std::lock_guard lock(impl_->mutex);
    ++impl_->calls;
    if (const auto found = impl_->live.find(pointer); found != impl_->live.end()) {
      entry = std::move(found->second);
      impl_->live.erase(found);
      known = true;
      matches = claimed == nullptr || (entry.bytes == claimed->bytes && entry.category == claimed->category);
    }
    if (!matches) ++impl_->mismatches;
  }
  if (!matches) {
    impl_->report([&] {
      const std::string what = claimed == nullptr ? fmt::format("of {}", fmt::ptr(pointer))
                                                  : fmt::format("of '{}' ({}, {} B)", claimed->tag,
                                                                name_of(claimed->category), claimed->bytes);
      const std::string held = known ? fmt::format("it was allocated as '{}' ({}, {} B)", entry.tag,
                                                   name_of(entry.category), entry.bytes)
                                     : "nothing live has that address";
      return fmt::format("free {} of {} memory does not match: {}", what, name_of(tier()), held);
    });
  }
  if (!known) return;
  impl_->ledger.released(tier(), entry.category, aligned_bytes(entry.bytes), entry.tag);
  upstream_.deallocate(pointer, {entry.bytes, entry.category, entry.tag});
}

void TrackingResource::deallocate(void* pointer, const AllocationRequest& request) noexcept {
  take(pointer, &request);
}

void TrackingResource::free(void* pointer) noexcept {
  if (pointer != nullptr) take(pointer, nullptr);
}

std::int64_t TrackingResource::live() const {
  std::lock_guard lock(impl_->mutex);
  return static_cast<std::int64_t>(impl_->live.size());
}

std::int64_t TrackingResource::calls() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->calls;
}

std::int64_t TrackingResource::mismatches() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->mismatches;
}

// ---- statistics

struct StatisticsResource::Impl {
  struct Scope {
    Counter bytes;
    Counter allocations;
  };
  mutable std::mutex mutex;
  std::vector<Scope> scopes{1};

  static void add(Counter& counter, std::int64_t amount) {
    counter.current += amount;
    counter.peak = std::max(counter.peak, counter.current);
    counter.total += amount;
  }
  // A scope counts from zero, so its peak is added to the parent's count at its opening.
  static void fold(Counter& parent, const Counter& child) {
    parent.peak = std::max(parent.peak, parent.current + child.peak);
    parent.current += child.current;
    parent.total += child.total;
  }
};

StatisticsResource::StatisticsResource(MemoryResource& upstream)
    : upstream_(upstream), impl_(std::make_unique<Impl>()) {}
StatisticsResource::~StatisticsResource() = default;

void* StatisticsResource::allocate(const AllocationRequest& request) {
  void* pointer = upstream_.allocate(request);
  std::lock_guard lock(impl_->mutex);
  Impl::add(impl_->scopes.back().bytes, aligned_bytes(request.bytes));
  Impl::add(impl_->scopes.back().allocations, 1);
  return pointer;
}

void StatisticsResource::deallocate(void* pointer, const AllocationRequest& request) noexcept {
  upstream_.deallocate(pointer, request);
  std::lock_guard lock(impl_->mutex);
  impl_->scopes.back().bytes.current -= aligned_bytes(request.bytes);
  impl_->scopes.back().allocations.current -= 1;
}

StatisticsResource::Counter StatisticsResource::bytes() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->scopes.back().bytes;
}

StatisticsResource::Counter StatisticsResource::allocations() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->scopes.back().allocations;
}

void StatisticsResource::push() {
  std::lock_guard lock(impl_->mutex);
  impl_->scopes.emplace_back();
}

StatisticsResource::Counter StatisticsResource::pop() {
  std::lock_guard lock(impl_->mutex);
  if (impl_->scopes.size() == 1) throw LogicError("statistics scope closed, but none is open");
  const Impl::Scope scope = impl_->scopes.back();
  impl_->scopes.pop_back();
  Impl::fold(impl_->scopes.back().bytes, scope.bytes);
  Impl::fold(impl_->scopes.back().allocations, scope.allocations);
  return scope.bytes;
}

// ---- log

namespace {

std::string log_line(std::string_view action, Tier tier, const AllocationRequest& request,
                     const void* pointer) {
  return fmt::format("{:.6f},{},{},{},{},{},{}", detail::seconds_now(), action, name_of(tier),
                     name_of(request.category), detail::csv_field(request.tag), request.bytes,
                     fmt::ptr(pointer));
}

}  // namespace

LoggingResource::LoggingResource(MemoryResource& upstream, std::function<void(const std::string&)> sink)
    : upstream_(upstream), sink_(std::move(sink)) {}

void* LoggingResource::allocate(const AllocationRequest& request) {
  void* pointer = nullptr;
  try {
    pointer = upstream_.allocate(request);
  } catch (...) {
    sink_(log_line("allocate failed", tier(), request, nullptr));
    throw;
  }
  sink_(log_line("allocate", tier(), request, pointer));
  return pointer;
}

void LoggingResource::deallocate(void* pointer, const AllocationRequest& request) noexcept {
  try {
    sink_(log_line("deallocate", tier(), request, pointer));
  } catch (...) {  // a lost line must not lose the memory
  }
  upstream_.deallocate(pointer, request);
}

}  // namespace tranche
