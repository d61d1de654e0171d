#include "engine/data_groups.h"

#include <algorithm>
#include <string>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::detail {

namespace {

/// The name of the tensor with this number, counted over all units.
std::string name_of_tensor(const ModelSpec& model, int tensor) {
  for (const UnitSpec& unit : model.units()) {
    const auto count = static_cast<int>(unit.tensors.size());
    if (tensor < count) return unit.tensors[static_cast<std::size_t>(tensor)].name;
    tensor -= count;
  }
  return {};
}

/// The ranks of this rank's stage and replica, over which state is sharded, ordered by Mesh::state_rank() and
/// then by coordinate on `tensor`.
std::vector<int> tensor_and_shard(const Mesh& mesh, int rank) {
  std::vector<int> ranks = mesh.group({MeshAxis::shard, MeshAxis::context, MeshAxis::tensor}, rank);
  const auto order = [&](int of) {
    return std::pair(mesh.state_rank(of), mesh.coordinate(MeshAxis::tensor, of));
  };
  std::sort(ranks.begin(), ranks.end(), [&](int one, int other) { return order(one) < order(other); });
  return ranks;
}

/// The subset of these ranks with the same part of tensors which `sharers` neighbouring ranks of the axis
/// `tensor` share.
std::vector<int> ranks_that_share(const Mesh& mesh, int sharers, int rank) {
  const auto part = [&](int of) { return mesh.coordinate(MeshAxis::tensor, of) / sharers; };
  std::vector<int> ranks = tensor_and_shard(mesh, rank);
  std::erase_if(ranks, [&](int of) { return part(of) != part(rank); });
  return ranks;
}

}  // namespace

DataGroups::DataGroups(const Runtime& runtime, const Config& config, const ModelSpec& model)
    : runtime_(runtime), config_(config), model_(model) {
  add(&runtime.all(), MeshAxis::shard);
  add(&runtime.shard(), MeshAxis::shard);
  add(&runtime.of_stage(), MeshAxis::shard);
  add(runtime.replicas(), MeshAxis::replicate);
  add(runtime.pipeline(), MeshAxis::pipeline);
  add(runtime.pipeline_ends(), MeshAxis::pipeline);
  add(runtime.context(), MeshAxis::context);
  add(runtime.tensor(), MeshAxis::tensor);
  add(runtime.tensor_and_shard(), MeshAxis::tensor);
}

void DataGroups::add(Communicator* group, MeshAxis axis) {
  if (group == nullptr || std::count(groups_.begin(), groups_.end(), group) > 0) return;
  groups_.push_back(group);
  axes_.push_back(axis);
}

BufferRanks DataGroups::of(const Placement& placement, int buffer) {
  const Placement::Buffer& placed = placement.buffer(buffer);
  Communicator& world = runtime_.all();
  const bool shared = placed.sharers > 1 && placed.parts() > 1, tied = placed.stages.size() > 1;
  if (placed.sharers > 1 && !placed.empty() &&
      (tied || (shared && sharers_ && placed.sharers != sharers_size_))) {
    throw ConfigurationError(
        "tranche.mesh \"" + config_.mesh + "\": tensor " + name_of_tensor(model_, placed.tensors.front()) +
        " is shared by " +
        (tied ? "two stages of a pipeline" : "a different number of ranks than other tensors") +
        ", which the axis tensor does not support yet" +
        (config_.layout.empty() ? "" : "; leave its dimension out of tranche.layout"));
  }
  if (shared && !sharers_) {
    // Every stage makes its group in this call, even if another stage holds this buffer.
    const std::vector<int> group = ranks_that_share(placement.mesh(), placed.sharers, world.rank());
    const auto place = std::find(group.begin(), group.end(), world.rank()) - group.begin();
    sharers_ = world.simulated()
                   ? world.subgroup(group)
                   : world.split(*std::min_element(group.begin(), group.end()), static_cast<int>(place));
    sharers_size_ = placed.sharers;
    add(sharers_.get(), MeshAxis::tensor);
  }
  if (!placement.holds(buffer, world.rank())) return {};
  if (shared) return {sharers_.get(), runtime_.replicas()};
  if (placed.sharers > 1) return {runtime_.tensor_and_shard(), runtime_.replicas()};
  return {tied ? runtime_.pipeline_ends() : &runtime_.shard(), runtime_.replicas()};
}

DataGroups::MatrixRanks DataGroups::of_matrices(const Placement& placement, int buffer) {
  const Mesh& mesh = placement.mesh();
  const Placement::Buffer& placed = placement.buffer(buffer);
  Communicator& world = runtime_.all();
  const int rank = world.rank();
  const bool tied = placed.stages.size() > 1;
  const auto refuse = [&](const std::string& what, const std::string& advice) {
    throw ConfigurationError(what + name_of_tensor(model_, placed.tensors.front()) +
                             ", which its optimizer updates as a whole matrix; " + advice);
  };
  if (tied && placed.parts() > 1) {
    refuse("tranche.mesh \"" + config_.mesh +
               "\": the axis tensor cuts, and stages of the pipeline share, tensor ",
           "leave out tensor or pipeline, or choose another optimizer for it");
  }
  const bool over_replicas =
      config_.stage > 0 && config_.replicate == Replicate::parameters && mesh.size(MeshAxis::replicate) > 1;
  // Every rank knows all buffers, so that the middle stages refuse too, with the same text.
  if (tied && over_replicas) {
    refuse("tranche.replicate parameters: stages of the pipeline share tensor ",
           "write all, or leave it out");
  }
  std::vector<int> of_stage =
      mesh.group({MeshAxis::replicate, MeshAxis::shard, MeshAxis::context, MeshAxis::tensor}, rank);
  const bool over_all = over_replicas && mesh.size(MeshAxis::tensor) > 1;
  if (over_all && mesh.size(MeshAxis::pipeline) > 1 && !stage_) {  // every stage makes its own group here
    stage_ = world.subgroup(of_stage);
    add(stage_.get(), MeshAxis::shard);
  }
  if (!placement.holds(buffer, rank)) return {};
  const auto ranks_of = [&](Communicator& group, std::vector<int> in_mesh) {
    return MatrixRanks{&group, std::move(in_mesh), axis_of(group)};
  };
  if (over_all) return ranks_of(stage_ ? *stage_ : world, std::move(of_stage));
  if (over_replicas) return ranks_of(runtime_.of_stage(), std::move(of_stage));
  if (placed.parts() > 1) return ranks_of(*runtime_.tensor_and_shard(), tensor_and_shard(mesh, rank));
  if (placed.sharers > 1) return ranks_of(*runtime_.tensor_and_shard(), placement.group(buffer, rank));
  return ranks_of(tied ? *runtime_.pipeline_ends() : runtime_.shard(), placement.group(buffer, rank));
}

MeshAxis DataGroups::axis_of(const Communicator& group) const {
  return axes_[static_cast<std::size_t>(std::find(groups_.begin(), groups_.end(), &group) - groups_.begin())];
}

std::optional<DataGroups::Crossing> DataGroups::to_other_nodes(const StepTraffic& traffic) const {
  if (!std::all_of(groups_.begin(), groups_.end(), [](const auto* group) { return group->counts_nodes(); })) {
    return std::nullopt;
  }
  Crossing bytes;
  const std::vector<TrafficCount>& sent = traffic.data_of_groups();
  for (std::size_t i = 0; i < sent.size(); ++i) {
    bytes.rank += sent[i].to_other_nodes;
    // The node's other ranks are taken to be in groups which send equal amounts; plans check whether they
    // are.
    bytes.node += sent[i].node_to_other_nodes * groups_.front()->local_size() / groups_[i]->local_size();
  }
  return bytes;
}

}  // namespace tranche::detail
