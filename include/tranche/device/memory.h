#pragma once
/// Memory resources, which decorate an upstream resource, and the buffers that own memory.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace tranche {

/// The place of memory. device: the accelerator's memory (RAM on the CPU device); host: pinned RAM on cuda,
/// RAM elsewhere; nvme: the rank's swap file.
enum class Tier : std::uint8_t { device, host, nvme };
/// The purpose of memory. For every tier and instant, the categories add up to the total.
enum class Category : std::uint8_t {
  parameters,     ///< weights between gathers
  gathered,       ///< full weights of units after an all-gather
  gradients,      ///< slots that kernels add to, and main gradients
  optimizer,      ///< fp32 master weights and optimizer state
  activations,    ///< values that forward saves for backward
  communication,  ///< staging buffers, and gradients rounded for sending
  workspace,      ///< scratch memory of kernels
  other
};
inline constexpr int tier_count = 3;
inline constexpr int category_count = 8;
inline constexpr std::array<Tier, tier_count> all_tiers{Tier::device, Tier::host, Tier::nvme};
inline constexpr std::array<Category, category_count> all_categories{
    Category::parameters,  Category::gathered,      Category::gradients, Category::optimizer,
    Category::activations, Category::communication, Category::workspace, Category::other};
std::string_view name_of(Tier tier);
std::string_view name_of(Category category);

/// Every allocation starts at a multiple of this many bytes and is sized in multiples of it.
inline constexpr std::int64_t memory_alignment = 256;
/// The bytes that a request of `bytes` occupies: the next multiple of memory_alignment. Ledgers, limits and
/// packing count these.
constexpr std::int64_t aligned_bytes(std::int64_t bytes) {
  return (bytes + memory_alignment - 1) / memory_alignment * memory_alignment;
}

/// One request: bytes (>= 0; zero is legal and yields a distinct non-null address), category, and a tag that
/// names the owner ("h.3 exp_avg") in tables and errors.
struct AllocationRequest {
  std::int64_t bytes = 0;
  Category category = Category::other;
  std::string_view tag;
};

/// A thread-safe source of memory. allocate throws OutOfMemory naming the tag, the bytes and the memory held;
/// deallocate takes the same request that allocate was given and never throws.
class MemoryResource {
 public:
  virtual ~MemoryResource() = default;
  virtual Tier tier() const = 0;
  virtual void* allocate(const AllocationRequest& request) = 0;
  virtual void deallocate(void* pointer, const AllocationRequest& request) noexcept = 0;
};

/// Move-only owner of one allocation.
class Buffer {
 public:
  Buffer() = default;
  Buffer(MemoryResource& resource, std::int64_t bytes, Category category, std::string tag);
  ~Buffer() { reset(); }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer moved(std::move(other));
    swap(moved);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const noexcept { return data_; }
  std::int64_t bytes() const noexcept { return bytes_; }
  Category category() const noexcept { return category_; }
  explicit operator bool() const noexcept { return resource_ != nullptr; }
  /// Frees the memory now. The caller ensures that no work still uses it.
  void reset() noexcept;

 private:
  void swap(Buffer& other) noexcept {
    std::swap(resource_, other.resource_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(category_, other.category_);
    std::swap(tag_, other.tag_);
  }
  MemoryResource* resource_ = nullptr;
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
  Category category_ = Category::other;
  std::string tag_;
};

}  // namespace tranche
