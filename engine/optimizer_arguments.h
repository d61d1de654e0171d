#pragma once
/// The optimizer's numbers of a step in device memory, one set for each parameter group. Private to engine/.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tranche/device/device.h"
#include "tranche/device/memory.h"
#include "tranche/optim/optimizer.h"

namespace tranche {

class OptimizerArguments {
 public:
  /// Index of the set for these options; a new one if no tensor had them so far.
  std::size_t group_index(const GroupOptions& options);
  /// Takes memory where the optimizer's updates read such numbers; says whether they do. Those that ask for
  /// sums of a step do not.
  bool allocate(MemoryResource& memory, const Optimizer& optimizer);
  /// Sends Optimizer::write_arguments() of each group, behind what the stream was given so far.
  void send(Device& device, Stream& stream, const Optimizer& optimizer, const OptimizerStep& step);
  /// In device memory.
  const std::byte* of(std::size_t group) const {
    return static_cast<const std::byte*>(buffer_.data()) + group * static_cast<std::size_t>(stride_);
  }

 private:
  std::vector<GroupOptions> groups_;
  std::int64_t stride_ = 0;
  Buffer buffer_;
};

}  // namespace tranche
