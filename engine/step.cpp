// The boundary of a step: wait for G, agree on norm and flags, update where the state lives, gather weights.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

#include "core/clock.h"
#include "engine/gathering.h"
#include "engine/offloading.h"
#include "engine/saving.h"
#include "tranche/kernels/elementwise.h"

namespace tranche {

UpdateMemory Engine::Impl::device_memory(const FlatState& flat, ElementRange range) const {
  UpdateMemory memory_of;
  memory_of.range = range;
  memory_of.gradient = residency.gradients_at(flat, range.begin);
  memory_of.master = residency.master_at(flat, range.begin);
  for (std::size_t s = 0; s < state_tensors.size(); ++s) {
    memory_of.state.push_back(residency.state_at(flat, s, state_tensors[s].dtype, range.begin));
  }
  if (flat.master) {
    memory_of.weight = residency.parameters_at(flat, range.begin);
  }
  return memory_of;
}

std::vector<BoundaryRecord> Engine::Impl::agree(std::vector<double>& unit_sums, double& total_squares,
                                                const OptimizerStep& step) {
  const std::size_t unit_count = units.size();
  const std::int64_t micro_batches = config.accumulation_steps;
  const double* losses = scalars.losses();
  const std::int64_t* token_counts = scalars.tokens();
  kernels::GradientStatistics* statistics = scalars.statistics();

  for (std::size_t u = 0; u < unit_count; ++u) {
    FlatState& flat = units[u].trainable;
    if (flat.optimizer_tier != OffloadTier::none) continue;  // taken when G left
    kernels::GradientStatistics* target = statistics + u;
    kernels::gradient_statistics(
        compute,
        {residency.gradients_shard(flat), config.precision.accumulation, Shape{flat.layout.shard_elements()}},
        target, {workspace_buffer.data(), workspace_buffer.bytes()});
  }
  // Defaults stay in place where no kernel writes (the meta device): norm one, clean flags, nominal tokens.
  std::vector<double> host_losses(static_cast<std::size_t>(micro_batches), 0.0);
  std::vector<std::int64_t> host_tokens(static_cast<std::size_t>(micro_batches),
                                        config.micro_batch_size * model.tokens_per_sample);
  std::vector<kernels::GradientStatistics> host_statistics(unit_count);
  host_statistics[0].sum_of_squares = 1.0 / ranks;
  Device& device = runtime.device();
  device.copy_to_host(compute, host_losses.data(), losses, micro_batches * 8);
  device.copy_to_host(compute, host_tokens.data(), token_counts, micro_batches * 8);
  device.copy_to_host(compute, host_statistics.data(), statistics,
                      static_cast<std::int64_t>(unit_count * sizeof(kernels::GradientStatistics)));
  compute.synchronize();

  BoundaryRecord mine;
  for (std::int64_t m = 0; m < micro_batches; ++m) {
    mine.loss_sum += host_losses[static_cast<std::size_t>(m)];
    mine.tokens += host_tokens[static_cast<std::size_t>(m)];
  }
  unit_sums.resize(unit_count);
  for (std::size_t u = 0; u < unit_count; ++u) {
    unit_sums[u] = host_statistics[u].sum_of_squares;
    if (host_statistics[u].first_non_finite >= 0 && mine.non_finite_unit < 0) {
      mine.non_finite_unit = static_cast<std::int64_t>(u);
      mine.non_finite_element =
          units[u].trainable.layout.shard_range(rank).begin + host_statistics[u].first_non_finite;
    }
  }
  mine.sequence_hash = shard.sequence_hash();
  mine.save_at_rest = saving->at_rest() ? 1 : 0;
  mine.stop_requested = stop_wanted.load(std::memory_order_relaxed) ? 1 : 0;
  mine.learning_rate = step.learning_rate;
  mine.momentum = step.momentum;
  mine.has_hook = gradient_hook ? 1 : 0;

  // One exchange carries everything: [sums of squares per unit][record]. Without peers that answer (a plan)
  // every rank is taken to say what this one says.
  const std::size_t blob = unit_count * sizeof(double) + sizeof(BoundaryRecord);
  const auto rank_count = static_cast<std::size_t>(ranks);
  std::vector<std::byte> sent(blob);
  std::memcpy(sent.data(), unit_sums.data(), unit_count * sizeof(double));
  std::memcpy(sent.data() + unit_count * sizeof(double), &mine, sizeof(mine));
  const std::size_t stride = shard.simulated() ? 0 : blob;  // one for all of them, however many
  std::vector<std::byte> received(blob + stride * (rank_count - 1));
  for (std::size_t at = 0; at < received.size(); at += blob) {
    std::memcpy(received.data() + at, sent.data(), blob);
  }
  shard
      .all_gather(sent.data(), received.data(), static_cast<std::int64_t>(blob), DataType::uint8, 0, {},
                  OperationLabel{"step", "agree", Traffic::control, Tier::host})
      .wait();

  const auto value = [&](std::size_t r, std::size_t index) {
    double number;
    std::memcpy(&number, received.data() + stride * r + index * sizeof(double), sizeof(number));
    return number;
  };
  total_squares = 0;
  for (std::size_t u = 0; u < unit_count; ++u) {
    for (std::size_t r = 0; r < rank_count; ++r) total_squares += value(r, u);
  }
  std::vector<BoundaryRecord> records(rank_count);
  for (std::size_t r = 0; r < rank_count; ++r) {
    std::memcpy(&records[r], received.data() + stride * r + unit_count * sizeof(double),
                sizeof(BoundaryRecord));
    if (records[r].sequence_hash != records[0].sequence_hash) {
      throw CommunicationError(
          "rank " + std::to_string(r) + " issued another sequence of collective calls than rank 0 in step " +
          std::to_string(steps_done + 1) + ": gather and reduce units in the same order on all ranks");
    }
  }
  check_rule(records);
  return records;
}

void Engine::Impl::prepare_update(const OptimizerStep& step) {
  Stream* const host = offload ? offload->host.get() : nullptr;
  updater->send_numbers(runtime.device(), compute, host, step);
  if (!updater->has_sums()) return;
  updater->clear_sums(compute, host);
  for (UnitState& unit : units) {
    FlatState& flat = unit.trainable;
    if (flat.layout.padded_elements() == 0) continue;
    const bool on_host = flat.optimizer_tier != OffloadTier::none;
    if (on_host) host->wait(flat.gradients_home);
    FlatPart kept{flat.layout, flat.tensors, device_memory(flat, residency.optimizer_range(flat)), on_host};
    if (on_host) kept.memory.gradient = static_cast<std::byte*>(flat.host_gradients.data());
    updater->prepare(on_host ? *host : compute, step, kept, flat.layout.shard_range(rank));
  }
  updater->exchange_sums(runtime.device(), compute, host, shard);
}

StepResult Engine::Impl::finish_step() {
  require(!in_micro_batch, "step() inside a micro-batch; call end_micro_batch() first");
  require(!in_evaluation, "step() inside an evaluation; call end_evaluation() first");
  require(!hook_scale, "step() inside the gradient hook");
  require(in_step && micro_batch == config.accumulation_steps,
          "step() after " + std::to_string(micro_batch) + " of " + std::to_string(config.accumulation_steps) +
              " micro-batches");
  set_phase("step");
  end_pass();  // refuses while the model still holds memory of the step: before anything has changed
  for (UnitState& unit : units) {
    exposed.wait_for(unit.reduced, Exposed::reduce);
    if (unit.trainable.optimizer_tier != OffloadTier::none) {
      exposed.wait_for(unit.trainable.gradients_home, Exposed::offload);
    }
  }
  const Event gradients_arrived = compute.record();
  const double issued = seconds_now();

  StepResult result;
  result.step = steps_done + 1;
  result.loss_scale = scaler.scale();
  OptimizerStep optimizer_step = next_update();
  result.learning_rate = optimizer_step.learning_rate;
  std::vector<double> unit_sums;
  double total_squares = 0;
  const std::vector<BoundaryRecord> records = agree(unit_sums, total_squares, optimizer_step);
  // A device has passed the point by now: agree() has synchronized.
  const double arrived = gradients_arrived.state() ? gradients_arrived.passed_at() : issued;

  double loss = 0;
  const BoundaryRecord* bad = nullptr;
  for (const BoundaryRecord& record : records) {
    loss += record.loss_sum;
    result.tokens += record.tokens;
    if (record.non_finite_unit >= 0 &&
        (bad == nullptr || std::pair(record.non_finite_unit, record.non_finite_element) <
                               std::pair(bad->non_finite_unit, bad->non_finite_element))) {
      bad = &record;
    }
  }
  // G is loss_scale * 2^-k times the gradient of the summed loss; the mean divides by the tokens seen.
  const double unscale = result.tokens > 0 ? std::ldexp(1.0, loss_exponent) /
                                                 (scaler.scale() * static_cast<double>(result.tokens))
                                           : 0.0;
  result.loss = result.tokens > 0 ? loss / static_cast<double>(result.tokens) : 0.0;
  result.gradient_norm = std::sqrt(total_squares) * unscale;
  if (bad != nullptr) {
    const UnitState& unit = units[static_cast<std::size_t>(bad->non_finite_unit)];
    const TensorPiece piece = unit.trainable.layout.locate(bad->non_finite_element);
    const std::string where =
        piece.tensor < 0 ? "padding of unit " + unit.name
                         : tensors[static_cast<std::size_t>(
                                       unit.trainable.tensors[static_cast<std::size_t>(piece.tensor)])]
                                   .name +
                               " at element " + std::to_string(piece.tensor_begin);
    result.skipped_because = "gradient of " + where + " is not finite";
  } else if (result.tokens <= 0) {
    result.skipped_because = "the step saw no tokens";
  } else if (!std::isfinite(result.gradient_norm)) {
    result.skipped_because = "the gradient norm is not finite";
  }
  result.applied = result.skipped_because.empty();
  if (config.gradient_clipping > 0 && result.applied && result.gradient_norm > config.gradient_clipping) {
    result.clip_coefficient = config.gradient_clipping / (result.gradient_norm + 1e-6);
  }
  optimizer_step.gradient_scale = static_cast<float>(unscale * result.clip_coefficient);
  bool by_hook = false;
  if (result.applied) {
    const std::string reason = ask_gradient_hook(result, optimizer_step);
    by_hook = !reason.empty();
    if (by_hook) {
      result.applied = false;
      result.skipped_because = "the gradient hook: " + reason;
    }
  }
  optimizer_step.apply = result.applied;

  // A skipped step issues the same work, masked: memory and traffic never depend on data.
  prepare_update(optimizer_step);
  // Updates of offloaded state go on while the device updates its own.
  if (offload) offload->update(optimizer_step);
  for (UnitState& unit : units) update_unit(unit, optimizer_step);
  for (UnitState& unit : units) {
    if (unit.trainable.optimizer_tier != OffloadTier::none) gather_updated(unit);
  }

  // The scaler may give up; that is told once the step is closed. A step without tokens says nothing of the
  // scale.
  std::exception_ptr gave_up;
  if (config.loss_scaling && result.tokens > 0) {
    try {
      scaler.update(!result.applied && !by_hook);
    } catch (const NumericalError&) {
      gave_up = std::current_exception();
    }
  }
  applied_steps += result.applied ? 1 : 0;
  consecutive_skips = result.applied || by_hook ? 0 : consecutive_skips + 1;
  ++steps_done;
  samples_done += config.train_batch_size;
  tokens_done += result.tokens;
  ++train_passes;
  micro_batch = 0;
  in_step = false;
  for (UnitState& unit : units) unit.accumulated = false;

  exposed.settle();
  std::tie(result.forward_seconds, result.backward_seconds) = pass_times.take();
  result.exposed_gather_seconds = exposed.take(Exposed::gather);
  result.exposed_reduce_seconds = exposed.take(Exposed::reduce);
  result.exposed_offload_seconds = exposed.take(Exposed::offload);
  if (offload) offload->report(result);
  recorded_gather_elements = std::exchange(gathering->step_elements, 0);
  traffic.end(shard.meter());
  if (train_passes == 2) {
    // The layout of the step is settled: what the first two passes took beside it goes back.
    runtime.device().release_unused();
    for (const UnitState& unit : units) {
      if (unit.update && !unit.update->problem().empty()) runtime.log().warning(unit.update->problem());
    }
  }
  saving->look_after(records, result);
  const double now = seconds_now();
  result.seconds = now - step_started;
  result.between_seconds = between_steps;
  result.update_seconds = now - (std::isfinite(arrived) ? arrived : issued);
  step_ended = now;
  set_phase("idle");
  const bool too_many = consecutive_skips >= config.maximum_consecutive_skips;
  if ((gave_up || too_many) && !result.saved.empty() && rank == 0) {
    runtime.log().info("the checkpoint " + result.saved + " is complete");  // the result does not get through
  }
  if (gave_up) std::rethrow_exception(gave_up);
  if (too_many) {
    throw NumericalError(
        std::to_string(consecutive_skips) + " steps in a row were skipped; the last because " +
        result.skipped_because +
        ". Lower the learning rate, check the data, or raise tranche.maximum_consecutive_skips");
  }
  return result;
}

void Engine::Impl::update_unit(UnitState& unit, const OptimizerStep& step) {
  FlatState& flat = unit.trainable;
  if (flat.layout.tensors() == 0 || flat.optimizer_tier != OffloadTier::none) return;
  compute.wait(flat.filled);  // peers read the old weights of this shard, also of units that nobody held
  const ElementRange kept = residency.optimizer_range(flat);
  UpdateMemory all = device_memory(flat, kept);
  if (residency.offloaded(unit)) {
    offload->update_stretch(unit, {kept, all.master, all.state, &compute, false}, step);
    return;
  }
  const FlatPart part{flat.layout, flat.tensors, std::move(all)};
  if (unit.update) {
    unit.update->run(compute, [&] { updater->apply(compute, step, part); });
  } else {
    updater->apply(compute, step, part);
  }
  unit.shard_ready = compute.record();
  gather_updated(unit);
}

}  // namespace tranche
