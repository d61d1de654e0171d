#include "device/cuda/cuda_memory.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string_view>

#include "device/memory_advice.h"
#include "device/range_placer.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"
#include "tranche/device/ledger.h"

namespace tranche::cuda {
namespace {

void check_request(const AllocationRequest& request) {
  if (request.bytes < 0) {
    throw InvalidArgument(fmt::format("allocation '{}' asks for {} bytes", request.tag, request.bytes));
  }
}

[[noreturn]] void refuse(const AllocationRequest& request, const GpuMemory::Held& held,
                         std::string_view call) {
  std::size_t free = 0;
  std::size_t total = 0;
  const bool known = cudaMemGetInfo(&free, &total) == cudaSuccess;
  if (!known) cudaGetLastError();
  throw OutOfMemory(
      fmt::format("'{}' ({}) asks for {} ({} B) of device memory, which {} refused: {}, and this rank holds "
                  "{} ({} B), {} of it given out; {}",
                  request.tag, name_of(request.category), format_bytes(request.bytes), request.bytes, call,
                  known ? fmt::format("the GPU has {}, of which {} ({} B) are free",
                                      format_bytes(static_cast<std::int64_t>(total)),
                                      format_bytes(static_cast<std::int64_t>(free)), free)
                        : "the GPU does not say what is free",
                  format_bytes(held.mapped), held.mapped, format_bytes(held.placed),
                  detail::memory_advice(Tier::device, request.category)));
}

void check_driver(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  throw DeviceError(fmt::format("{} failed with the driver's error {}", call, static_cast<int>(result)));
}

// The pages of one range of addresses of the GPU.
class GpuPages : public detail::PageSource {
 public:
  GpuPages(std::shared_ptr<CudaState> state, const DriverFunctions& driver)
      : state_(std::move(state)), driver_(driver) {
    state_->make_current();
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties_.location.id = state_->gpu();
    // A file-descriptor handle lets NCCL share registered buffers with other processes, and network cards
    // access them.
    if (attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)) {
      properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    }
    if (attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)) {
      properties_.allocFlags.gpuDirectRDMACapable = 1;
    }
    std::size_t granularity = 0;
    check_driver(driver_.get_granularity(&granularity, &properties_, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                 "cuMemGetAllocationGranularity");
    page_ = std::max<std::int64_t>(static_cast<std::int64_t>(granularity), std::int64_t{2} << 20);
    std::size_t free = 0;
    std::size_t total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    pages_ = divide_round_up(2 * static_cast<std::int64_t>(total), page_);
    check_driver(driver_.address_reserve(&base_, static_cast<std::size_t>(pages_ * page_),
                                         static_cast<std::size_t>(page_), 0, 0),
                 "cuMemAddressReserve");
  }
  ~GpuPages() override {
    state_->make_current_quietly();
    driver_.address_free(base_, static_cast<std::size_t>(pages_ * page_));
  }

  std::int64_t page_bytes() const override { return page_; }
  std::int64_t pages() const override { return pages_; }
  char* address(std::int64_t offset) const noexcept {
    return reinterpret_cast<char*>(static_cast<std::uintptr_t>(base_)) + offset;
  }

  bool map(std::int64_t first, std::int64_t count) override {
    state_->make_current();
    const auto bytes = static_cast<std::size_t>(count * page_);
    const CUdeviceptr at = base_ + static_cast<CUdeviceptr>(first * page_);
    CUmemGenericAllocationHandle handle = 0;
    CUresult result = driver_.create(&handle, bytes, &properties_, 0);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) return false;
    if (result != CUDA_SUCCESS && shareable()) {
      // Some systems (containers) refuse shareable memory; plain memory works too.
      properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
      properties_.allocFlags.gpuDirectRDMACapable = 0;
      result = driver_.create(&handle, bytes, &properties_, 0);
      if (result == CUDA_ERROR_OUT_OF_MEMORY) return false;
    }
    check_driver(result, "cuMemCreate");
    result = driver_.map(at, bytes, 0, handle, 0);
    // The mapping keeps the memory alive; unmapping then frees it.
    driver_.release(handle);
    check_driver(result, "cuMemMap");
    CUmemAccessDesc access{};
    access.location = properties_.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (result = driver_.set_access(at, bytes, &access, 1); result != CUDA_SUCCESS) {
      driver_.unmap(at, bytes);
      if (result == CUDA_ERROR_OUT_OF_MEMORY) return false;
      check_driver(result, "cuMemSetAccess");
    }
    return true;
  }

  void unmap(std::int64_t first, std::int64_t count) noexcept override {
    state_->make_current_quietly();
    driver_.unmap(base_ + static_cast<CUdeviceptr>(first * page_), static_cast<std::size_t>(count * page_));
  }

 private:
  bool attribute(CUdevice_attribute name) const {
    int value = 0;
    return driver_.device_get_attribute != nullptr &&
           driver_.device_get_attribute(&value, name, state_->gpu()) == CUDA_SUCCESS && value != 0;
  }
  bool shareable() const {
    return properties_.requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE ||
           properties_.allocFlags.gpuDirectRDMACapable != 0;
  }

  std::shared_ptr<CudaState> state_;
  DriverFunctions driver_;
  CUmemAllocationProp properties_{};
  CUdeviceptr base_ = 0;
  std::int64_t page_ = 0;
  std::int64_t pages_ = 0;
};

class MappedMemory : public GpuMemory {
 public:
  MappedMemory(std::shared_ptr<CudaState> state, const DriverFunctions& driver)
      : pages_(std::move(state), driver), placer_(pages_) {}

  void* allocate(const AllocationRequest& request) override {
    check_request(request);
    std::lock_guard lock(mutex_);
    const bool whole_piece = request.category == Category::communication;
    const std::optional<std::int64_t> offset = placer_.place(request.bytes, whole_piece);
    if (!offset) refuse(request, {placer_.mapped_bytes(), placer_.placed_bytes()}, "the driver");
    return pages_.address(*offset);
  }
  void deallocate(void* pointer, const AllocationRequest& request) noexcept override {
    std::lock_guard lock(mutex_);
    placer_.free(static_cast<char*>(pointer) - pages_.address(0), request.bytes);
  }
  Held held() const override {
    std::lock_guard lock(mutex_);
    return {placer_.mapped_bytes(), placer_.placed_bytes()};
  }
  void release_unused() noexcept override {
    std::lock_guard lock(mutex_);
    placer_.trim();
  }

 private:
  mutable std::mutex mutex_;
  GpuPages pages_;
  detail::RangePlacer placer_;
};

class PlainMemory : public GpuMemory {
 public:
  PlainMemory(std::shared_ptr<CudaState> state, bool exact) : state_(std::move(state)), exact_(exact) {}

  void* allocate(const AllocationRequest& request) override {
    check_request(request);
    state_->make_current();
    const std::int64_t bytes = taken(request);
    void* pointer = nullptr;
    const cudaError_t error = cudaMalloc(&pointer, static_cast<std::size_t>(bytes));
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      const std::int64_t held = held_.load();
      refuse(request, {held, held}, "cudaMalloc");
    }
    check(error, "cudaMalloc", request.tag);
    held_.fetch_add(bytes);
    return pointer;
  }
  void deallocate(void* pointer, const AllocationRequest& request) noexcept override {
    state_->make_current_quietly();
    cudaFree(pointer);
    held_.fetch_sub(taken(request));
  }
  Held held() const override { return {held_.load(), held_.load()}; }
  void release_unused() noexcept override {}

 private:
  std::int64_t taken(const AllocationRequest& request) const {
    if (exact_) return std::max<std::int64_t>(1, request.bytes);
    constexpr std::int64_t largest = std::int64_t{1} << 60;  // keeps the rounding from overflowing
    return std::max(memory_alignment, aligned_bytes(std::min(request.bytes, largest)));
  }
  std::shared_ptr<CudaState> state_;
  bool exact_;
  std::atomic<std::int64_t> held_{0};
};

}  // namespace

std::unique_ptr<GpuMemory> make_mapped_memory(std::shared_ptr<CudaState> state,
                                              const DriverFunctions& driver) {
  if (!driver.has_mapping(state->gpu())) return nullptr;
  return std::make_unique<MappedMemory>(std::move(state), driver);
}

std::unique_ptr<GpuMemory> make_plain_memory(std::shared_ptr<CudaState> state, bool exact) {
  return std::make_unique<PlainMemory>(std::move(state), exact);
}

bool wants_plain_memory() {
  const char* const text = std::getenv("TRANCHE_PLAIN_DEVICE_MEMORY");
  const std::string_view value = text != nullptr ? text : "0";
  if (value == "1") return true;
  if (value.empty() || value == "0") return false;
  throw ConfigurationError(fmt::format(
      "TRANCHE_PLAIN_DEVICE_MEMORY is '{}': give 1 for an allocation of CUDA for every tensor, or 0", value));
}

}  // namespace tranche::cuda
