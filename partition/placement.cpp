#include "partition/placement.h"

#include <algorithm>
#include <string>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::detail {

ElementRange owned_part(ElementRange shard, int replica, int replicas) {
  const std::int64_t part = shard.size() / replicas;
  return {shard.begin + replica * part, shard.begin + (replica + 1) * part};
}

Placement::Placement(const Mesh& mesh, int units, std::vector<TensorFacts> tensors,
                     const std::vector<bool>& block_classes)
    : mesh_(mesh), classes_(static_cast<int>(block_classes.size())), tensors_(std::move(tensors)) {
  const int last_stage = mesh.size(MeshAxis::pipeline) - 1;
  std::vector<std::int64_t> sizes;
  std::size_t t = 0;
  for (int unit = 0; unit < units; ++unit) {
    first_buffer_.push_back(static_cast<int>(buffers_.size()));
    std::vector<std::pair<std::vector<int>, std::vector<int>>> sets;  // stages and uses, as they appear
    std::vector<std::vector<int>> members;                            // tensors by set and kind
    const auto kinds = static_cast<std::size_t>(classes_) + 1;
    for (; t < tensors_.size() && tensors_[t].unit == unit; ++t) {
      TensorFacts& tensor = tensors_[t];
      if (tensor.stages.empty()) tensor.stages = {0};
      if (tensor.stages.front() < 0 || tensor.stages.back() > last_stage ||
          (!tensor.frozen && (tensor.state_class < 0 || tensor.state_class >= classes_))) {
        throw InvalidArgument("tensor " + std::to_string(t) + " is of state class " +
                              std::to_string(tensor.state_class) + " of " + std::to_string(classes_) +
                              " and of stages " + std::to_string(tensor.stages.front()) + " to " +
                              std::to_string(tensor.stages.back()) + " of " + std::to_string(last_stage + 1));
      }
      const std::pair own(tensor.stages, tensor.uses);
      const auto found = std::find(sets.begin(), sets.end(), own);
      const auto set = static_cast<std::size_t>(found - sets.begin());
      if (found == sets.end()) {
        sets.push_back(own);
        members.resize(members.size() + kinds);
      }
      const std::size_t kind = tensor.frozen ? kinds - 1 : static_cast<std::size_t>(tensor.state_class);
      std::vector<int>& others = members[set * kinds + kind];
      places_.push_back(
          {first_buffer_.back() + static_cast<int>(set * kinds + kind), static_cast<int>(others.size())});
      others.push_back(static_cast<int>(t));
    }
    if (sets.empty()) {
      sets = {{{0}, {}}};
      members.resize(kinds);
    }
    for (std::size_t b = 0; b < members.size(); ++b) {
      const std::size_t kind = b % kinds;
      const bool frozen = kind == kinds - 1;
      const auto& [stages, uses] = sets[b / kinds];
      sizes.clear();
      for (const int member : members[b]) {
        sizes.push_back(tensors_[static_cast<std::size_t>(member)].shape.elements());
      }
      FlatLayout layout(
          sizes, mesh.size(MeshAxis::shard) * static_cast<int>(stages.size()), mesh.size(MeshAxis::replicate),
          !frozen && block_classes[kind] ? block_alignment_elements : tensor_alignment_elements);
      buffers_.push_back({unit, frozen, frozen ? 0 : static_cast<int>(kind), stages, uses,
                          std::move(members[b]), std::move(layout)});
    }
  }
  first_buffer_.push_back(static_cast<int>(buffers_.size()));
  if (t < tensors_.size()) {
    throw InvalidArgument("tensor " + std::to_string(t) + " is of unit " + std::to_string(tensors_[t].unit) +
                          " of " + std::to_string(units) + ", which does not follow the tensors before it");
  }
}

Box Placement::box(int tensor) const {
  return whole_box(this->tensor(tensor).shape);
}

std::span<const Placement::Buffer> Placement::buffers_of_unit(int unit) const {
  const int first = first_buffer(unit);
  return std::span(buffers_).subspan(static_cast<std::size_t>(first),
                                     static_cast<std::size_t>(first_buffer(unit + 1) - first));
}

bool Placement::holds(int buffer, int rank) const {
  const std::vector<int>& stages = this->buffer(buffer).stages;
  return std::binary_search(stages.begin(), stages.end(), mesh_.coordinate(MeshAxis::pipeline, rank));
}

int Placement::class_of(int rank) const {
  const int stage = mesh_.coordinate(MeshAxis::pipeline, rank);
  for (int other = 0; other < rank; ++other) {
    if (mesh_.coordinate(MeshAxis::pipeline, other) == stage) return other;
  }
  return rank;
}

int Placement::shard_of(int buffer, int rank) const {
  if (!holds(buffer, rank)) {
    throw InvalidArgument(mesh_.name_of_rank(rank) + " does not hold buffer " + std::to_string(buffer));
  }
  const std::vector<int>& stages = this->buffer(buffer).stages;
  const auto stage =
      std::lower_bound(stages.begin(), stages.end(), mesh_.coordinate(MeshAxis::pipeline, rank)) -
      stages.begin();
  return mesh_.coordinate(MeshAxis::shard, rank) * static_cast<int>(stages.size()) + static_cast<int>(stage);
}

std::vector<int> Placement::group(int buffer, int rank) const {
  std::vector<int> ranks(static_cast<std::size_t>(this->buffer(buffer).layout.ranks()));
  (void)shard_of(buffer, rank);
  for (const int other : mesh_.group({MeshAxis::pipeline, MeshAxis::shard}, rank)) {
    if (holds(buffer, other)) ranks[static_cast<std::size_t>(shard_of(buffer, other))] = other;
  }
  return ranks;
}

std::vector<int> Placement::replicas(int buffer, int rank) const {
  (void)shard_of(buffer, rank);
  return mesh_.group({MeshAxis::replicate}, rank);
}

ElementRange Placement::shard(int buffer, int rank) const {
  return this->buffer(buffer).layout.shard_range(shard_of(buffer, rank));
}

ElementRange Placement::owned(int buffer, int rank) const {
  return owned_part(shard(buffer, rank), mesh_.coordinate(MeshAxis::replicate, rank),
                    mesh_.size(MeshAxis::replicate));
}

std::vector<int> Placement::owners(int buffer) const {
  int holder = 0;
  while (!holds(buffer, holder)) ++holder;
  std::vector<int> ranks;
  for (const int shard : group(buffer, holder)) {
    for (const int owner : replicas(buffer, shard)) ranks.push_back(owner);
  }
  return ranks;
}

std::int64_t Placement::padded_elements() const {
  std::int64_t elements = 0;
  for (const Buffer& buffer : buffers_) elements += buffer.layout.padded_elements();
  return elements;
}

}  // namespace tranche::detail
