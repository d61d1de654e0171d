#include "device/memory_advice.h"

namespace tranche::detail {

namespace {

std::string_view for_device(Category category) {
  switch (category) {
    case Category::workspace:
      return "use a smaller tranche.workspace, a higher stage or more ranks";
    case Category::communication:
      return "use a smaller tranche.communication_slab, a higher stage or more ranks";
    case Category::gathered:
      return "use a smaller tranche.depth, a smaller micro-batch or more ranks";
    case Category::activations:
      return "use a smaller micro-batch, tranche.activation_checkpointing, a higher stage or more ranks";
    case Category::parameters:
    case Category::gradients:
    case Category::optimizer:
      return "use a higher stage, more ranks or zero_optimization.offload_optimizer";
    case Category::other:
      break;
  }
  return "use a smaller micro-batch, a higher stage or more ranks";
}

std::string_view for_host(Category category) {
  switch (category) {
    case Category::communication:
      return "use a smaller tranche.communication_slab or fewer ranks on this node";
    case Category::activations:
      return "use a smaller micro-batch, a larger tranche.checkpoint_every, or "
             "activation_checkpointing.cpu_checkpointing false";
    case Category::parameters:
    case Category::gradients:
    case Category::optimizer:
      return "use more ranks on more nodes, offload to nvme, or a smaller offload_optimizer.ratio";
    default:
      break;
  }
  return "use more ranks on more nodes";
}

}  // namespace

std::string_view memory_advice(Tier tier, Category category) {
  return tier == Tier::device ? for_device(category) : for_host(category);
}

}  // namespace tranche::detail
