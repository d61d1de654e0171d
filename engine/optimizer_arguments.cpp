#include "engine/optimizer_arguments.h"

#include <algorithm>

namespace tranche {

std::size_t OptimizerArguments::group_index(const GroupOptions& options) {
  const auto known = std::find(groups_.begin(), groups_.end(), options);
  const auto index = static_cast<std::size_t>(known - groups_.begin());
  if (known == groups_.end()) groups_.push_back(options);
  return index;
}

bool OptimizerArguments::allocate(MemoryResource& memory, const Optimizer& optimizer) {
  stride_ = optimizer.statistics_per_tensor() > 0 ? 0 : aligned_bytes(optimizer.argument_bytes());
  const std::int64_t bytes = static_cast<std::int64_t>(groups_.size()) * stride_;
  if (bytes == 0) return false;
  buffer_ = Buffer(memory, bytes, Category::other, "optimizer arguments");
  return true;
}

void OptimizerArguments::send(Device& device, Stream& stream, const Optimizer& optimizer,
                              const OptimizerStep& step) {
  const auto stride = static_cast<std::size_t>(stride_);
  if (stride == 0) return;
  std::vector<std::byte> arguments(groups_.size() * stride);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    optimizer.write_arguments(step, groups_[g], arguments.data() + g * stride);
  }
  device.copy_from_host(stream, buffer_.data(), arguments.data(),
                        static_cast<std::int64_t>(arguments.size()));
}

}  // namespace tranche
