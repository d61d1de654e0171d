#include "engine/step_boundary.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "engine/offloaded_state.h"
#include "tranche/core/error.h"
#include "tranche/kernels/reduction.h"

namespace tranche::detail {

std::vector<const FlatBuffer*> visits_of_step(const StateStore& store, const Config& config,
                                              const FlatUpdater& updater, const WholeMatrices& matrices) {
  std::vector<const FlatBuffer*> visits;
  for (const UnitState& unit : store.units()) {
    std::vector<const FlatBuffer*> of_unit;
    for (const FlatBuffer& flat : unit.buffers) {
      if (flat.trainable && !flat.whole_matrices) of_unit.push_back(&flat);
    }
    // Early updates follow the backward pass.
    const bool backward = config.update == UpdateTime::as_reduced;
    visits.insert(backward ? visits.begin() : visits.end(), of_unit.begin(), of_unit.end());
  }
  if (updater.has_sums()) {
    const std::vector<const FlatBuffer*> again = visits;
    visits.insert(visits.end(), again.begin(), again.end());
  }
  const std::vector<const FlatBuffer*> of_matrices = matrices.visits();
  visits.insert(visits.end(), of_matrices.begin(), of_matrices.end());
  return visits;
}

StepBoundary::StepBoundary(StateStore& store, const Config& config, FlatUpdater& updater,
                           WholeMatrices& matrices, Communicator& ranks, const Mesh& mesh, Device& device,
                           const StepScalars& scalars, const PieceStatistics& pieces)
    : store_(store),
      config_(config),
      updater_(updater),
      matrices_(matrices),
      ranks_(ranks),
      mesh_(mesh),
      device_(device),
      compute_(device.compute_stream()),
      scalars_(scalars),
      pieces_(pieces),
      replays_(store.trainable().size()) {}

void StepBoundary::allocate(MemoryResource& memory) {
  const std::vector<FlatBuffer*>& trainable = store_.trainable();
  const bool shares = std::any_of(trainable.begin(), trainable.end(), [&](const FlatBuffer* flat) {
    return !flat->empty() && !(store_.residency().optimizer_range(*flat) == flat->owned());
  });
  updater_.allocate(memory, shares);
  if (!updater_.replayable()) return;
  for (std::size_t i = 0; i < trainable.size(); ++i) {
    const FlatBuffer& flat = *trainable[i];
    if (flat.empty() || store_.residency().offloaded(flat) || flat.whole_matrices) continue;
    replays_[i] = device_.create_replay(flat.name + " update");
  }
}

// --- Agreement ------------------------------------------------------------------------------------------

void StepBoundary::count(StepRecord& mine, std::vector<std::int64_t>& tokens) {
  const std::vector<FlatBuffer*>& trainable = store_.trainable();
  const std::size_t count = trainable.size();
  const std::int64_t micro_batches = config_.accumulation_steps;
  for (std::size_t i = 0; i < count; ++i) {
    const FlatBuffer& flat = *trainable[i];
    // Offloaded gradients were counted when they left the device.
    if (flat.empty() || flat.optimizer_tier != OffloadTier::none) continue;
    kernels::gradient_statistics(compute_, store_.residency().gradients(flat, flat.owned()),
                                 scalars_.statistics() + i);
  }
  // On the meta device no kernel writes these, and the initial values remain: no flags, nominal tokens, and a
  // norm that is not zero.
  std::vector<double> losses(static_cast<std::size_t>(micro_batches), 0.0);
  std::vector<kernels::GradientStatistics> statistics(count);
  device_.copy_to_host(compute_, losses.data(), scalars_.losses(), micro_batches * 8);
  device_.copy_to_host(compute_, tokens.data(), scalars_.tokens(), micro_batches * 8);
  device_.copy_to_host(compute_, statistics.data(), scalars_.statistics(),
                       static_cast<std::int64_t>(count * sizeof(kernels::GradientStatistics)));
  compute_.synchronize();
  if (device_.kind() == DeviceKind::meta) mine.squares.add(1.0);

  tokens.resize(
      static_cast<std::size_t>(config_.micro_batches_of(mesh_.data_rank(ranks_.rank()), mesh_.data_ranks())));
  // The ranks of the axis `tensor` have equal sums of losses and tokens, of which the first counts its own.
  const bool counts = ranks_.simulated() || mesh_.coordinate(MeshAxis::tensor, ranks_.rank()) == 0;
  for (std::size_t m = 0; counts && m < tokens.size(); ++m) {
    mine.losses.add(losses[m]);
    if (mine.tokens >= 0) mine.tokens = tokens[m] < 0 ? tokens[m] : mine.tokens + tokens[m];
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (trainable[i]->empty()) continue;  // nothing was counted
    mine.squares += statistics[i].squares;
    if (statistics[i].first_non_finite >= 0 && mine.non_finite_buffer < 0) {
      mine.non_finite_buffer = static_cast<std::int64_t>(i);
      mine.non_finite_element = trainable[i]->owned().begin + statistics[i].first_non_finite;
    }
  }
}

void StepBoundary::hash_calls(StepRecord& mine) const {
  // All ranks make the same calls in the group of all ranks. In the groups of buffers those make the same
  // calls that hold the same buffers.
  mine.sequence_hash = ranks_.sequence_hash();
  std::vector<const Communicator*> hashed{&ranks_, nullptr};
  for (const FlatBuffer* flat : store_.trainable()) {
    for (const Communicator* of_flat :
         {static_cast<const Communicator*>(flat->group), static_cast<const Communicator*>(flat->replicas)}) {
      if (std::find(hashed.begin(), hashed.end(), of_flat) != hashed.end()) continue;
      hashed.push_back(of_flat);
      mine.group_hash += (2 * hashed.size() - 3) * of_flat->sequence_hash();
    }
  }
}

void StepBoundary::compare_calls(const std::vector<StepRecord>& records, std::int64_t step) const {
  for (std::size_t r = 0; r < records.size(); ++r) {
    const auto alike = static_cast<std::size_t>(store_.placement().class_of(static_cast<int>(r)));
    const bool differs = records[r].sequence_hash != records[0].sequence_hash;
    if (!differs && records[r].group_hash == records[alike].group_hash) continue;
    throw CommunicationError(
        mesh_.name_of_rank(static_cast<int>(r)) + " issued another sequence of collective calls than " +
        mesh_.name_of_rank(differs ? 0 : static_cast<int>(alike)) + " in step " + std::to_string(step) +
        ": gather and reduce units in the same order on all ranks");
  }
}

StepBoundary::Agreement StepBoundary::agree(StepRecord mine, std::int64_t nominal_tokens, std::int64_t step) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(config_.accumulation_steps), nominal_tokens);
  count(mine, tokens);
  hash_calls(mine);
  // One exchange has all records. In a plan no peer answers, and all ranks are assumed to have this record.
  const auto rank_count = static_cast<std::size_t>(ranks_.size());
  Agreement all;
  all.records.assign(rank_count, mine);
  std::vector<StepRecord> received(ranks_.simulated() ? 1 : rank_count, mine);
  ranks_
      .all_gather(&mine, received.data(), sizeof(StepRecord), DataType::uint8, 0, {},
                  OperationLabel{store_.call_name("step"), "agree", Traffic::control, Tier::host})
      .wait();
  if (!ranks_.simulated()) all.records = std::move(received);
  compare_calls(all.records, step);

  SquareSum squares;
  LossTotal loss;
  const StepRecord* bad = nullptr;
  for (const StepRecord& record : all.records) {
    squares += record.squares;
    loss += record.losses;
    all.tokens += record.tokens;
    if (record.non_finite_buffer >= 0 &&
        (bad == nullptr || std::pair(record.non_finite_buffer, record.non_finite_element) <
                               std::pair(bad->non_finite_buffer, bad->non_finite_element))) {
      bad = &record;
    }
  }
  // The ranks of a data rank see the same tokens, and one of them counts them.
  if (ranks_.simulated()) all.tokens = all.tokens / ranks_.size() * mesh_.data_ranks();
  all.loss_sum = loss.value();
  if (config_.gradient_noise_scale) measure_pieces(tokens, all);
  all.sum_of_squares = bad == nullptr ? squares.value() : std::numeric_limits<double>::infinity();
  if (bad != nullptr) {
    all.non_finite = place_of(*bad, static_cast<int>(bad - all.records.data()));
  }
  return all;
}

std::string StepBoundary::place_of(const StepRecord& bad, int rank) const {
  const FlatBuffer& flat = *store_.trainable()[static_cast<std::size_t>(bad.non_finite_buffer)];
  const Placement& placement = store_.placement();
  const int number = placement.buffer_of(flat.tensors.front());
  const TensorPiece piece = placement.layout(number, rank).locate(bad.non_finite_element);
  if (piece.tensor < 0) return "padding of unit " + flat.name;
  const TensorState& tensor = store_.tensor_of(flat, piece);
  std::int64_t element = piece.tensor_begin;
  const Box box =
      placement.box(flat.tensors[static_cast<std::size_t>(piece.tensor)], placement.part_of(number, rank));
  common_runs(tensor.shape, box, whole_box(tensor.shape), {element, element + 1},
              [&](const CommonRun& run) { element = run.tensor; });
  return tensor.name + " at element " + std::to_string(element);
}

void StepBoundary::measure_pieces(std::span<const std::int64_t> tokens, Agreement& all) {
  const std::vector<FlatBuffer*>& trainable = store_.trainable();
  const bool at_once = store_.residency().policy(*trainable.front()) == ReductionPolicy::boundary;
  std::vector<std::int64_t> of_piece(tokens.begin(), tokens.end());
  if (at_once) of_piece = {std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0})};
  const std::vector<SquareSum> squares =
      pieces_.sums(device_, trainable, static_cast<std::int64_t>(of_piece.size()));
  struct Pieces {
    LossTotal squares;  // over tokens
    std::int64_t count = 0;
  } mine;
  // The ranks of the axis `tensor` have equal sums, of which the first counts its own.
  const bool counts = ranks_.simulated() || mesh_.coordinate(MeshAxis::tensor, ranks_.rank()) == 0;
  for (std::size_t p = 0; counts && p < of_piece.size(); ++p) {
    if (of_piece[p] <= 0) continue;
    mine.squares.add(squares[p].value() / static_cast<double>(of_piece[p]));
    ++mine.count;
  }
  // In a plan no peer answers, and all data ranks are assumed to have this one's figures.
  std::vector<Pieces> pieces(static_cast<std::size_t>(mesh_.data_ranks()), mine);
  std::vector<Pieces> received(ranks_.simulated() ? 1 : static_cast<std::size_t>(ranks_.size()));
  ranks_
      .all_gather(&mine, received.data(), sizeof(Pieces), DataType::uint8, 0, {},
                  OperationLabel{"step", "noise", Traffic::control, Tier::host})
      .wait();
  if (!ranks_.simulated()) pieces = std::move(received);
  LossTotal sum;
  for (const Pieces& of_rank : pieces) {
    sum += of_rank.squares;
    all.pieces += of_rank.count;
  }
  all.squares_of_pieces = sum.value();
}

// --- Update ---------------------------------------------------------------------------------------------

void StepBoundary::prepare(const OptimizerStep& step) {
  OffloadedState* const offload = store_.offload();
  Stream* const host = offload != nullptr ? &offload->host() : nullptr;
  if (offload != nullptr) offload->begin_update();
  updater_.send_numbers(device_, compute_, host, step);
  if (!updater_.has_sums()) return;
  updater_.clear_sums(compute_, host);
  for (FlatBuffer* flat : store_.trainable()) {
    if (flat->empty() || flat->whole_matrices) continue;
    // State on nvme is read and written here, and again by the update: a rule may advance it in both.
    store_.visit_in_step(*flat, [&](const ShardSlice& slice) { updater_.prepare(step, *flat, slice); });
  }
  updater_.exchange_sums(device_, compute_, host, ranks_);
}

void StepBoundary::update(const OptimizerStep& step) {
  prepare(step);
  // Updates of offloaded state go on while the device updates its own.
  for (FlatBuffer* flat : store_.trainable()) {
    if (flat->optimizer_tier != OffloadTier::none && !flat->empty() && !flat->whole_matrices) {
      update_tiles(*flat, step);
    }
  }
  for (FlatBuffer* flat : store_.trainable()) update_on_device(*flat, step);
  matrices_.update(step);
  end_update();
}

void StepBoundary::finish_offloaded() {
  OffloadedState* const offload = store_.offload();
  if (offload == nullptr) return;
  if (store_.observer() != nullptr) store_.observer()->updates_issued(offload->host());
  for (FlatBuffer* flat : store_.trainable()) {
    if (flat->optimizer_tier != OffloadTier::none && !flat->whole_matrices) {
      store_.gather_updated(*flat, "step");
    }
  }
}

void StepBoundary::begin_update(const OptimizerStep& step) {
  prepare(step);
}

void StepBoundary::update(FlatBuffer& flat, const OptimizerStep& step) {
  if (flat.optimizer_tier == OffloadTier::none) return update_on_device(flat, step);
  store_.offload()->expect_update(flat);
  update_tiles(flat, step);
}

void StepBoundary::end_update() {
  if (OffloadedState* const offload = store_.offload()) offload->end_update();
  finish_offloaded();  // last, because reductions behind these gathers would wait for the updates, too
}

void StepBoundary::update_on_device(FlatBuffer& flat, const OptimizerStep& step) {
  if (flat.empty() || flat.optimizer_tier != OffloadTier::none || flat.whole_matrices) return;
  compute_.wait(
      flat.gather_done);  // peers may still read the old weights of this shard, whoever held the unit
  if (store_.residency().offloaded(flat)) return update_tiles(flat, step);
  const ShardSlice slice = store_.slice_in_step(flat);
  const auto apply = [&] { updater_.apply(step, flat, slice); };
  if (Replay* const replay = replays_[static_cast<std::size_t>(flat.trainable_index)].get()) {
    replay->run(compute_, apply);
  } else {
    apply();
  }
  if (!step.apply && store_.residency().quantizes(flat)) store_.restore_weights(flat);
  flat.shard_ready = compute_.record();
  store_.gather_updated(flat, "step");
}

void StepBoundary::update_tiles(FlatBuffer& flat, const OptimizerStep& step) {
  OffloadedState& offload = *store_.offload();
  StateObserver* const observer = updater_.has_sums() ? nullptr : store_.observer();  // saw it in prepare()
  for (std::int64_t tile = 0; tile < offload.update_tiles(flat); ++tile) {
    const ShardSlice slice = offload.open_tile(flat, tile, observer);
    if (step.apply) {
      updater_.apply(step, flat, slice, /*fresh_weights=*/true);
    } else {
      copy_master_to_weight(slice);  // a skipped step moves the same bytes, and the weights stay the same
    }
    offload.close_tile();
  }
}

std::vector<std::string> StepBoundary::replay_problems() const {
  std::vector<std::string> problems;
  for (const auto& replay : replays_) {
    if (replay && !replay->problem().empty()) problems.push_back(replay->problem());
  }
  return problems;
}

}  // namespace tranche::detail
