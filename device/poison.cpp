// Poison: a byte pattern that makes reads of stale memory visible in tests.
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "tranche/device/device.h"
#include "tranche/device/memory_resources.h"

namespace tranche {
namespace {

void fill_by_host(void* pointer, std::int64_t bytes) {
  std::memset(pointer, poison_byte, static_cast<std::size_t>(bytes));
}

struct DeviceFill {
  explicit DeviceFill(Device& filled) : device(filled), stream(filled.create_inline_stream("poison", 1)) {}
  Device& device;
  std::unique_ptr<Stream> stream;
  std::mutex mutex;
};

}  // namespace

PoisonFill make_poison_fill(Device& device) {
  if (device.host_accessible()) return fill_by_host;
  auto fill = std::make_shared<DeviceFill>(device);
  return [fill](void* pointer, std::int64_t bytes) {
    std::lock_guard lock(fill->mutex);
    try {
      fill->device.fill_bytes(*fill->stream, pointer, poison_byte, bytes);
      fill->stream->synchronize();
    } catch (...) {  // a failed device reports to those who wait for its work
    }
  };
}

PoisonResource::PoisonResource(MemoryResource& upstream) : PoisonResource(upstream, fill_by_host) {}

PoisonResource::PoisonResource(MemoryResource& upstream, PoisonFill fill)
    : upstream_(upstream), fill_(std::move(fill)) {}

void* PoisonResource::allocate(const AllocationRequest& request) {
  void* pointer = upstream_.allocate(request);
  fill_(pointer, request.bytes);
  return pointer;
}

void PoisonResource::deallocate(void* pointer, const AllocationRequest& request) noexcept {
  fill_(pointer, request.bytes);
  upstream_.deallocate(pointer, request);
}

}  // namespace tranche
