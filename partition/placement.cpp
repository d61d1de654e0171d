#include "partition/placement.h"

#include <algorithm>
#include <string>
#include <tuple>
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
  const int last_stage = mesh.size(MeshAxis::pipeline) - 1, tensor_ranks = mesh.size(MeshAxis::tensor);
  const auto sharers_of = [&](const TensorFacts& tensor) {
    return tensor.cut.whole() ? tensor_ranks : sharers(grains_of(tensor.shape, tensor.cut), tensor_ranks);
  };
  std::vector<std::int64_t> sizes;
  std::size_t t = 0;
  for (int unit = 0; unit < units; ++unit) {
    first_buffer_.push_back(static_cast<int>(buffers_.size()));
    std::vector<std::tuple<std::vector<int>, std::vector<int>, int>> sets;  // stages, uses and sharers
    std::vector<std::vector<int>> members;                                  // tensors by set and kind
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
      const std::tuple own(tensor.stages, tensor.uses, sharers_of(tensor));
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
      sets = {{{0}, {}, tensor_ranks}};
      members.resize(kinds);
    }
    for (std::size_t b = 0; b < members.size(); ++b) {
      const std::size_t kind = b % kinds;
      const bool frozen = kind == kinds - 1;
      const auto& [stages, uses, sharers] = sets[b / kinds];
      Buffer buffer{
          unit, frozen, frozen ? 0 : static_cast<int>(kind), stages, uses, sharers, std::move(members[b]),
          {}};
      for (int part = 0; part < tensor_ranks / sharers; ++part) {
        sizes.clear();
        for (const int member : buffer.tensors) {
          const TensorFacts& tensor = tensors_[static_cast<std::size_t>(member)];
          sizes.push_back(elements_of(slice_of(tensor.shape, tensor.cut, part * sharers, tensor_ranks)));
        }
        buffer.layouts.emplace_back(
            sizes, mesh.state_ranks() * static_cast<int>(stages.size()) * sharers,
            mesh.size(MeshAxis::replicate),
            !frozen && block_classes[kind] ? block_alignment_elements : tensor_alignment_elements);
      }
      buffers_.push_back(std::move(buffer));
    }
  }
  first_buffer_.push_back(static_cast<int>(buffers_.size()));
  if (t < tensors_.size()) {
    throw InvalidArgument("tensor " + std::to_string(t) + " is of unit " + std::to_string(tensors_[t].unit) +
                          " of " + std::to_string(units) + ", which does not follow the tensors before it");
  }
}

Box Placement::box(int tensor, int part) const {
  const TensorFacts& facts = this->tensor(tensor);
  return slice_of(facts.shape, facts.cut, part * buffer(buffer_of(tensor)).sharers,
                  mesh_.size(MeshAxis::tensor));
}

std::int64_t Placement::Buffer::padded_elements() const {
  std::int64_t elements = 0;
  for (const FlatLayout& layout : layouts) elements += layout.padded_elements();
  return elements;
}

int Placement::part_of(int buffer, int rank) const {
  return mesh_.coordinate(MeshAxis::tensor, rank) / this->buffer(buffer).sharers;
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
  const auto alike = [&](int other) {
    return mesh_.coordinate(MeshAxis::pipeline, other) == mesh_.coordinate(MeshAxis::pipeline, rank) &&
           mesh_.coordinate(MeshAxis::tensor, other) == mesh_.coordinate(MeshAxis::tensor, rank);
  };
  int first = 0;
  while (!alike(first)) ++first;
  return first;
}

int Placement::shard_of(int buffer, int rank) const {
  if (!holds(buffer, rank)) {
    throw InvalidArgument(mesh_.name_of_rank(rank) + " does not hold buffer " + std::to_string(buffer));
  }
  const std::vector<int>& stages = this->buffer(buffer).stages;
  const auto stage =
      std::lower_bound(stages.begin(), stages.end(), mesh_.coordinate(MeshAxis::pipeline, rank)) -
      stages.begin();
  const int sharers = this->buffer(buffer).sharers;
  return (mesh_.state_rank(rank) * static_cast<int>(stages.size()) + static_cast<int>(stage)) * sharers +
         mesh_.coordinate(MeshAxis::tensor, rank) % sharers;
}

std::vector<int> Placement::group(int buffer, int rank) const {
  std::vector<int> ranks(static_cast<std::size_t>(layout(buffer, rank).ranks()));
  (void)shard_of(buffer, rank);
  for (const int other :
       mesh_.group({MeshAxis::pipeline, MeshAxis::shard, MeshAxis::context, MeshAxis::tensor}, rank)) {
    if (holds(buffer, other) && part_of(buffer, other) == part_of(buffer, rank))
      ranks[static_cast<std::size_t>(shard_of(buffer, other))] = other;
  }
  return ranks;
}

std::vector<int> Placement::replicas(int buffer, int rank) const {
  (void)shard_of(buffer, rank);
  return mesh_.group({MeshAxis::replicate}, rank);
}

ElementRange Placement::shard(int buffer, int rank) const {
  return layout(buffer, rank).shard_range(shard_of(buffer, rank));
}

ElementRange Placement::owned(int buffer, int rank) const {
  return owned_part(shard(buffer, rank), mesh_.coordinate(MeshAxis::replicate, rank),
                    mesh_.size(MeshAxis::replicate));
}

std::vector<int> Placement::owners(int buffer, int part) const {
  int holder = 0;
  while (!holds(buffer, holder) || part_of(buffer, holder) != part) ++holder;
  std::vector<int> ranks;
  for (const int shard : group(buffer, holder)) {
    for (const int owner : replicas(buffer, shard)) ranks.push_back(owner);
  }
  return ranks;
}

std::int64_t Placement::padded_elements() const {
  std::int64_t elements = 0;
  for (const Buffer& buffer : buffers_) elements += buffer.padded_elements();
  return elements;
}

}  // namespace tranche::detail
