#include "tranche/device/memory.h"

namespace tranche {

std::string_view name_of(Tier tier) {
  switch (tier) {
    case Tier::device:
      return "device";
    case Tier::host:
      return "host";
    case Tier::nvme:
      return "nvme";
  }
  return "unknown";
}

std::string_view name_of(Category category) {
  switch (category) {
    case Category::parameters:
      return "parameters";
    case Category::gathered:
      return "gathered";
    case Category::gradients:
      return "gradients";
    case Category::optimizer:
      return "optimizer";
    case Category::activations:
      return "activations";
    case Category::communication:
      return "communication";
    case Category::workspace:
      return "workspace";
    case Category::other:
      return "other";
  }
  return "unknown";
}

Buffer::Buffer(MemoryResource& resource, std::int64_t bytes, Category category, std::string tag)
    : data_(resource.allocate({bytes, category, tag})),
      bytes_(bytes),
      category_(category),
      tag_(std::move(tag)) {
  resource_ = &resource;
}

void Buffer::reset() noexcept {
  if (resource_ == nullptr) return;
  resource_->deallocate(data_, {bytes_, category_, tag_});
  resource_ = nullptr;
  data_ = nullptr;
  bytes_ = 0;
  category_ = Category::other;
  tag_.clear();
}

}  // namespace tranche
