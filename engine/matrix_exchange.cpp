#include "engine/matrix_exchange.h"

#include <algorithm>
#include <span>
#include <utility>

#include "partition/matrix_plan.h"

namespace tranche::detail {

namespace {

ElementRange tensor_range(const FlatLayout& layout, int tensor) {
  const std::int64_t begin = layout.tensor_offset(tensor);
  return {begin, begin + layout.tensor_elements(tensor)};
}

class Planner {
 public:
  Planner(const StateStore& store, const FlatUpdater& updater, const Optimizer& optimizer)
      : store_(store), updater_(updater), optimizer_(optimizer) {}

  MatrixPlan run(const MatrixRanksOf& ranks_of) {
    const Placement& placement = store_.placement();
    for (FlatBuffer* flat : store_.trainable()) {
      if (!flat->whole_matrices || flat->tensors.empty()) continue;
      MatrixExchange exchange;
      exchange.flat = flat;
      exchange.buffer = placement.buffer_of(flat->tensors.front());
      exchange.ranks = ranks_of(placement, exchange.buffer);
      if (flat->empty()) continue;
      exchange.cut = placement.buffer(exchange.buffer).parts() > 1;
      exchange.everywhere = store_.residency().whole_optimizer(*flat);
      plan_.exchanges.push_back(std::move(exchange));
    }
    // All buffers of a group have one plan.
    std::vector<Communicator*> planned;
    for (const MatrixExchange& exchange : plan_.exchanges) {
      if (std::find(planned.begin(), planned.end(), &exchange.group()) != planned.end()) continue;
      planned.push_back(&exchange.group());
    }
    for (Communicator* const group : planned) plan_group(*group);
    return std::move(plan_);
  }

 private:
  int part_of(const MatrixExchange& exchange, int rank) const {
    return store_.placement().part_of(exchange.buffer,
                                      exchange.ranks.in_mesh[static_cast<std::size_t>(rank)]);
  }

  const FlatLayout& layout_of(const MatrixExchange& exchange, int part) const {
    return store_.placement().buffer(exchange.buffer).layout(part);
  }

  /// The elements of its part of the buffer that a rank of the exchange's group sends.
  ElementRange brought_by(const MatrixExchange& exchange, int rank) const {
    const int number = exchange.ranks.in_mesh[static_cast<std::size_t>(rank)];
    const Placement& placement = store_.placement();
    if (exchange.cut && exchange.everywhere) {
      return {0, placement.layout(exchange.buffer, number).padded_elements()};
    }
    return store_.residency().over_replicas(*exchange.flat) ? placement.owned(exchange.buffer, number)
                                                            : placement.shard(exchange.buffer, number);
  }

  /// If several ranks keep the same part, the owner sends it, or the next such rank after the owner.
  bool gives(const MatrixExchange& exchange, int rank, int owner) const {
    if (!(exchange.cut && exchange.everywhere)) return true;
    const int part = part_of(exchange, rank), ranks = exchange.group().size();
    int giver = owner;
    while (part_of(exchange, giver) != part) giver = (giver + 1) % ranks;
    return giver == rank;
  }

  void plan_group(Communicator& group) {
    const int ranks = group.size();
    std::vector<MatrixJob> jobs;
    for (const MatrixExchange& exchange : plan_.exchanges) {
      if (&exchange.group() != &group) continue;
      const FlatBuffer& flat = *exchange.flat;
      for (int t = 0; t < flat.layout.tensors(); ++t) {
        MatrixJob& job = jobs.emplace_back();
        job.operations =
            optimizer_.whole_work(updater_.facts(flat.tensors[static_cast<std::size_t>(t)])).operations;
        for (int r = 0; r < ranks; ++r) {
          const FlatLayout& layout = layout_of(exchange, part_of(exchange, r));
          job.held.push_back(intersect(tensor_range(layout, t), brought_by(exchange, r)).size());
        }
      }
    }
    const std::vector<int> owners = plan_matrices(jobs, ranks);
    plan_.load_ratio = std::max(plan_.load_ratio, matrix_load_ratio(jobs, owners, ranks));
    auto owner = owners.begin();
    for (MatrixExchange& exchange : plan_.exchanges) {
      if (&exchange.group() != &group) continue;
      const std::span<const int> own{owner, owner + exchange.flat->layout.tensors()};
      owner += exchange.flat->layout.tensors();
      plan_messages(exchange, own);
      plan_owned(exchange, own);
    }
  }

  /// Plans the messages to the matrices' owners, with the elements that this rank keeps.
  void plan_messages(MatrixExchange& exchange, std::span<const int> owners) {
    const FlatBuffer& flat = *exchange.flat;
    const ElementRange kept = store_.residency().optimizer_range(flat);
    for (int r = 0; r < exchange.group().size(); ++r) {
      RankElements& message = exchange.messages.emplace_back();
      message.first = exchange.message_elements;
      for (int t = 0; t < flat.layout.tensors(); ++t) {
        if (owners[static_cast<std::size_t>(t)] != r) continue;
        const ElementRange range = intersect(tensor_range(flat.layout, t), kept);
        if (range.empty()) continue;
        exchange.pieces.push_back({range, exchange.message_elements});
        exchange.message_elements += range.size();
        exchange.largest_piece = std::max(exchange.largest_piece, range.size());
      }
      message.count = exchange.message_elements - message.first;
      exchange.given.push_back(gives(exchange, exchange.group().rank(), r) ? message : RankElements());
    }
  }

  /// Plans the matrices that this rank owns, and their parts from each rank.
  void plan_owned(MatrixExchange& exchange, std::span<const int> owners) {
    const FlatBuffer& flat = *exchange.flat;
    const Placement& placement = store_.placement();
    const int own = exchange.group().rank();
    exchange.matrices.resize(static_cast<std::size_t>(exchange.group().size()));
    // If all ranks keep everything, the matrices are contiguous in the message.
    const std::int64_t first =
        exchange.all_have_all() ? exchange.messages[static_cast<std::size_t>(own)].first : 0;
    for (int t = 0; t < flat.layout.tensors(); ++t) {
      if (owners[static_cast<std::size_t>(t)] != own) continue;
      const int tensor = flat.tensors[static_cast<std::size_t>(t)];
      const TrainableTensor& facts = updater_.facts(tensor);
      exchange.owned.push_back({tensor, facts.shape.elements(), {}});
      exchange.scratch_bytes = std::max(exchange.scratch_bytes, optimizer_.whole_work(facts).scratch_bytes);
      if (exchange.cut) exchange.largest_matrix = std::max(exchange.largest_matrix, facts.shape.elements());
    }
    // Parts are the outer loop: the elements of one rank, over all matrices, are contiguous here as in its
    // buffer.
    for (int part = 0; part < placement.buffer(exchange.buffer).parts(); ++part) {
      auto matrix = exchange.owned.begin();
      for (int t = 0; t < flat.layout.tensors(); ++t) {
        if (owners[static_cast<std::size_t>(t)] != own) continue;
        const ElementRange range = tensor_range(layout_of(exchange, part), t);
        matrix->parts.push_back({first + exchange.owned_elements, placement.box(matrix->tensor, part)});
        ++matrix;
        for (int r = 0; r < exchange.group().size(); ++r) {
          if (part_of(exchange, r) != part) continue;
          const ElementRange brought = intersect(range, brought_by(exchange, r));
          if (brought.empty()) continue;
          RankElements& from = exchange.matrices[static_cast<std::size_t>(r)];
          if (from.count == 0) from.first = exchange.owned_elements + brought.begin - range.begin;
          from.count += brought.size();
        }
        exchange.owned_elements += range.size();
      }
    }
    for (int r = 0; r < exchange.group().size(); ++r) {
      exchange.received.push_back(gives(exchange, r, own) ? exchange.matrices[static_cast<std::size_t>(r)]
                                                          : RankElements());
    }
  }

  const StateStore& store_;
  const FlatUpdater& updater_;
  const Optimizer& optimizer_;
  MatrixPlan plan_;
};

}  // namespace

std::int64_t MatrixExchange::elements_sent() const {
  if (all_have_all()) return owned_elements * (group().size() - 1);
  std::int64_t elements = 0;
  for (int r = 0; r < group().size(); ++r) {
    if (r == group().rank()) continue;
    elements += given[static_cast<std::size_t>(r)].count + matrices[static_cast<std::size_t>(r)].count;
  }
  return elements;
}

MatrixPlan plan_exchanges(const StateStore& store, const FlatUpdater& updater, const Optimizer& optimizer,
                          const MatrixRanksOf& ranks_of) {
  return Planner(store, updater, optimizer).run(ranks_of);
}

}  // namespace tranche::detail
