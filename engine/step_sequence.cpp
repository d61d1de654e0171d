#include "engine/step_sequence.h"

#include <exception>
#include <limits>
#include <utility>
#include <vector>

#include "engine/offloaded_state.h"
#include "tranche/core/error.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::detail {

StepSequence::StepSequence(const Runtime& runtime, const Config& config, const ModelSpec& model,
                           const Parts& parts, Breakdown& breakdown)
    : runtime_(runtime),
      config_(config),
      model_(model),
      parts_(parts),
      breakdown_(breakdown),
      compute_(runtime.device().compute_stream()),
      micro_batches_(parts.store.units().size()),
      early_(parts.store, parts.boundary, parts.gatherer, parts.recorder.exposed(), breakdown, config) {}

// --- Micro-batches --------------------------------------------------------------------------------------

std::int64_t StepSequence::open(const Shape& shape, std::span<const std::int64_t> samples, bool beside) {
  require(!in_inference(),
          "begin_micro_batch() inside an inference scope, which is one pass without micro-batches");
  require(!micro_batches_.any_open() || (beside && in_step()), "begin_micro_batch() inside a micro-batch");
  if (in_evaluation()) return open_for_evaluation(shape, samples);
  if (const auto given = static_cast<std::int64_t>(samples.size()); given > config_.micro_batch_size) {
    throw InvalidArgument("begin_micro_batch() got " + std::to_string(given) +
                          " samples; a micro-batch has " + std::to_string(config_.micro_batch_size) +
                          " (train_micro_batch_size_per_gpu)");
  }
  const std::int64_t number = micro_batches_.begun();
  const bool last = number + 1 == config_.accumulation_steps;
  require(number < config_.accumulation_steps, "begin_micro_batch() after the step's " +
                                                   std::to_string(config_.accumulation_steps) +
                                                   " micro-batches; call step()");
  OffloadedState* const offload = parts_.store.offload();
  if (!in_step()) {
    parts_.store.set_weights_for(/*training=*/true);
    parts_.recorder.begin_pass(Program::train, shape);
    state_ = State::training;
    one_sequence_ = beside;
    parts_.recorder.begin_step(parts_.groups.all());
    if (offload != nullptr) offload->begin_report();
  } else {
    parts_.recorder.next_micro_batch(shape);
  }
  if (last && offload != nullptr) offload->begin_update();
  parts_.reducer.begin_micro_batch(number);
  if (!parts_.gatherer.in_sequence()) {
    parts_.gatherer.begin_sequence(Program::train, !one_sequence_ && !last);
  }
  if (config_.wall_clock_breakdown && !micro_batches_.any_open()) parts_.recorder.pass_times().begin();
  set_phase("forward");
  return micro_batches_.open(samples);
}

std::int64_t StepSequence::open_for_evaluation(const Shape& shape, std::span<const std::int64_t> samples) {
  // A pass ends when the next one begins, so that the memory of the loss may outlive end_micro_batch().
  if (parts_.recorder.pass_open()) parts_.recorder.end_pass();
  parts_.recorder.begin_pass(Program::evaluate, shape);
  micro_batches_.restart();
  parts_.gatherer.begin_sequence(Program::evaluate, false);
  set_phase("evaluate");
  return micro_batches_.open(samples);
}

void StepSequence::select(std::int64_t number) {
  require(micro_batches_.is_open(number),
          "select_micro_batch(" + std::to_string(number) + "), which is not open");
  micro_batches_.select(number);
}

void StepSequence::require_let_go(std::int64_t micro_batch) {
  if (const int unit = micro_batches_.first_held(micro_batch); unit >= 0) {
    throw LogicError("end_micro_batch() while unit " + name_of_unit(unit) + " is still held");
  }
  if (in_evaluation()) return;
  const std::string held = parts_.reducer.held(micro_batch);
  require(held.empty(), "end_micro_batch() while gradients of unit " + held + " are still held");
  const std::string missing = failure_.empty() ? parts_.reducer.missing(micro_batch) : failure_;
  if (missing.empty()) return;
  // The peers wait in this unit's reduction, so they must be notified.
  breakdown_.end(std::make_exception_ptr(LogicError(missing)));
  breakdown_.throw_if_ended();
}

void StepSequence::close(const ConstTensorView& loss_sum, const ConstTensorView& token_count) {
  require(!in_inference(), "end_micro_batch() inside an inference scope, which has no loss");
  require(micro_batches_.any_open(), "end_micro_batch() without begin_micro_batch()");
  const std::int64_t micro_batch = micro_batches_.current();
  require_let_go(micro_batch);
  if (loss_sum.dtype != DataType::float64 || token_count.dtype != DataType::int64 ||
      loss_sum.elements() != 1 || token_count.elements() != 1) {
    throw InvalidArgument("end_micro_batch() wants one fp64 loss sum and one int64 token count, got " +
                          std::string(name_of(loss_sum.dtype)) + loss_sum.shape.to_string() + " and " +
                          std::string(name_of(token_count.dtype)) + token_count.shape.to_string());
  }
  const bool in_memory = runtime_.device().kind() != DeviceKind::meta;
  if (in_memory && (loss_sum.data == nullptr || token_count.data == nullptr)) {
    throw InvalidArgument(std::string("end_micro_batch() got a null pointer as ") +
                          (loss_sum.data == nullptr ? "the loss sum" : "the token count"));
  }
  kernels::copy(compute_, loss_sum, {parts_.scalars.losses() + micro_batch, DataType::float64, Shape{1}});
  kernels::copy(compute_, token_count, {parts_.scalars.tokens() + micro_batch, DataType::int64, Shape{1}});
  micro_batches_.close(micro_batch);
  if (in_evaluation()) {
    parts_.gatherer.end_sequence();
    add_evaluated();
    return;
  }
  if (!one_sequence_ || complete()) parts_.gatherer.end_sequence();
  if (config_.wall_clock_breakdown && !micro_batches_.any_open()) parts_.recorder.pass_times().end();
  parts_.reducer.end_micro_batch(micro_batch, micro_batch + 1 == config_.accumulation_steps);
  early_.issue(/*submitted=*/false);
}

void StepSequence::end_step() {
  micro_batches_.restart();
  state_ = State::idle;
  parts_.reducer.begin_step();
  early_.end_step();
  note_dropped_plans();
}

void StepSequence::abandon_step() noexcept {
  if (!in_step() || breakdown_.ended()) return;
  try {
    parts_.store.await_collectives();
    compute_.synchronize();
    micro_batches_.restart();
    parts_.reducer.abandon_step();
    parts_.gatherer.end_step();
    parts_.gatherer.abandon_sequence();
    early_.end_step();
    parts_.recorder.abandon_pass(Program::train);
    parts_.recorder.clear_times();
    (void)parts_.gatherer.take_quantized_elements();
    (void)parts_.gatherer.take_gathered_elements();
    failure_.clear();
    state_ = State::idle;
    set_phase("idle");
  } catch (...) {
    breakdown_.end(std::current_exception());
  }
}

// --- Forward only ---------------------------------------------------------------------------------------

void StepSequence::begin_evaluation() {
  require(!in_step(), "begin_evaluation() inside a step; evaluate between step() and the next micro-batch");
  require(!in_evaluation(), "begin_evaluation() inside an evaluation");
  parts_.store.set_weights_for(/*training=*/false);
  state_ = State::evaluating;
  evaluated_ = {};
}

void StepSequence::add_evaluated() {
  double loss = 0;
  std::int64_t count = config_.train_batch_size * model_.tokens_per_sample;
  runtime_.device().copy_to_host(compute_, &loss, parts_.scalars.losses(), sizeof(loss));
  runtime_.device().copy_to_host(compute_, &count, parts_.scalars.tokens(), sizeof(count));
  compute_.synchronize();
  if (count < 0) throw InvalidArgument(negative_count(count));
  evaluated_.loss.add(loss);
  evaluated_.tokens += count;
}

EvaluationResult StepSequence::end_evaluation() {
  require(state_ == State::evaluating && !micro_batches_.any_open(),
          "end_evaluation() without begin_evaluation(), or inside a micro-batch");
  if (parts_.recorder.pass_open()) parts_.recorder.end_pass();
  // The ranks of the axis `tensor` have equal sums, so only the first one counts them.
  const Communicator* const tensor = runtime_.tensor();
  const bool counts =
      runtime_.device().kind() == DeviceKind::meta || tensor == nullptr || tensor->rank() == 0;
  const Evaluated mine = counts ? evaluated_ : Evaluated{};
  std::vector<Evaluated> all(static_cast<std::size_t>(runtime_.size()), mine);
  runtime_.all()
      .all_gather(&mine, all.data(), sizeof(Evaluated), DataType::uint8, 0, {},
                  OperationLabel{parts_.store.call_name("evaluation"), "agree", Traffic::control, Tier::host})
      .wait();
  EvaluationResult result;
  LossTotal loss;
  for (const Evaluated& share : all) {
    loss += share.loss;
    result.tokens += share.tokens;
  }
  result.loss = result.tokens > 0 ? loss.value() / static_cast<double>(result.tokens)
                                  : std::numeric_limits<double>::quiet_NaN();
  micro_batches_.restart();
  parts_.recorder.clear_times();
  end_forward();
  return result;
}

void StepSequence::begin_inference(const Shape& shape) {
  require(!in_step(), "an inference scope inside a step; open it between step() and the next micro-batch");
  require(!in_inference(), "an inference scope inside another; one is one pass");
  require(!in_evaluation(), "an inference scope inside an evaluation; call end_evaluation() first");
  parts_.store.set_weights_for(/*training=*/false);
  state_ = State::inferring;
  parts_.recorder.begin_pass(Program::infer, shape);
  parts_.gatherer.begin_sequence(Program::infer, false);
  set_phase("inference");
}

void StepSequence::end_inference(bool unwinding) noexcept {
  std::string held;
  try {
    for (std::size_t u = 0; u < parts_.store.units().size(); ++u) {
      if (parts_.gatherer.holders(static_cast<int>(u)) > 0) {
        held = "unit " + parts_.store.units()[u].name + " is still held";
      }
    }
    if (!unwinding && !breakdown_.ended() && held.empty()) {
      parts_.gatherer.end_sequence();
      parts_.recorder.end_pass();
    }
  } catch (const LogicError& error) {
    held = error.message();
  } catch (...) {
    breakdown_.end(std::current_exception());  // the caller is a destructor, so the next call throws it
  }
  if (parts_.recorder.pass_open()) {
    parts_.gatherer.abandon_sequence();
    parts_.recorder.abandon_pass(Program::infer);
    if (!unwinding && !breakdown_.ended()) runtime_.log().warning("an inference scope ended early: " + held);
  }
  parts_.recorder.exposed().clear();
  end_forward();
}

void StepSequence::end_forward() {
  state_ = State::idle;
  (void)parts_.gatherer.take_gathered_elements();
  note_dropped_plans();
  set_phase("idle");
}

void StepSequence::note_dropped_plans() {
  if (parts_.arena.dropped() == 0 || std::exchange(dropped_plans_noted_, true)) return;
  runtime_.log().info(
      "passes of many shapes need different buffers: the least recently used memory plan was dropped, "
      "because only " +
      std::to_string(StepArena::most_shapes) +
      " shapes are remembered; a pass that needs it again plans its memory anew (reported once)");
}

// --- Handles --------------------------------------------------------------------------------------------

void StepSequence::acquire(int unit, bool of_micro_batch) {
  const std::string& name = name_of_unit(unit);
  require(in_pass(), "gather(" + name + ") outside a micro-batch");
  require(!early_.updated(unit),
          "gather(" + name +
              ") behind its gradients of the step's last micro-batch: with tranche.update: "
              "as_reduced its weights are those of the next step");
  // Backward begins with the first gradients of the micro-batch, and includes recomputation.
  const bool backward = !in_evaluation() && parts_.reducer.backward_begun(micro_batches_.current());
  set_phase(in_evaluation() ? "evaluate" : backward ? "backward" : "forward", name);
  parts_.gatherer.acquire(unit);
  if (of_micro_batch && !in_inference()) micro_batches_.hold(micro_batches_.current(), unit);
  note_call(unit, false);
}

void StepSequence::note_call(int unit, bool reduces) {
  if (!config_.debug.compare_calls || in_evaluation()) return;
  const auto call = static_cast<std::uint64_t>(unit) * 2 + (reduces ? 1 : 0);
  calls_ = (calls_ ^ (call + 1)) * 1099511628211ull;  // FNV-1a
}

void StepSequence::release(std::int64_t micro_batch, int unit, bool unwinding) noexcept {
  using Ahead = ParameterGatherer::Ahead;
  try {
    micro_batches_.let_go(micro_batch, unit);
    parts_.gatherer.release(unit, unwinding ? Ahead::later : breakdown_.ended() ? Ahead::never : Ahead::now);
    if (!unwinding && !breakdown_.ended()) early_.issue(/*submitted=*/false);
  } catch (...) {
    // A handle's release must not throw; the next call does.
    breakdown_.end(std::current_exception());
  }
}

void StepSequence::require_ascending(std::int64_t micro_batch, int unit, int submitted,
                                     std::string_view call) const {
  const std::int64_t earlier = parts_.reducer.first_owing(micro_batch, unit, submitted);
  if (earlier < 0) return;
  throw LogicError(std::string(call) + "(" + name_of_unit(unit) + ") of micro-batch " +
                   std::to_string(micro_batch) + " before micro-batch " + std::to_string(earlier) +
                   " has submitted its own: a unit takes gradients in ascending micro-batches");
}

void StepSequence::require_first(int unit) const {
  require(in_pass() && !in_evaluation(),
          "gradients(" + name_of_unit(unit) + ") outside a training micro-batch");
  const std::int64_t micro_batch = micro_batches_.current();
  parts_.reducer.check_open(micro_batch, unit);
  require_ascending(micro_batch, unit, parts_.reducer.begun(micro_batch, unit), "gradients");
}

void StepSequence::open_gradients(int unit) {
  const std::string& name = name_of_unit(unit);
  require(in_pass() && !in_evaluation(), "gradients(" + name + ") outside a training micro-batch");
  const std::int64_t micro_batch = micro_batches_.current();
  parts_.reducer.check_open(micro_batch, unit);
  set_phase("backward", name);
  if (config_.wall_clock_breakdown) parts_.recorder.pass_times().turn();
  parts_.reducer.open(micro_batch, unit);
}

void StepSequence::require_turn(std::int64_t micro_batch, int unit) const {
  require_ascending(micro_batch, unit, parts_.reducer.begun(micro_batch, unit) - 1, "reduce");
}

void StepSequence::submit_gradients(std::int64_t micro_batch, int unit) {
  parts_.reducer.submit(micro_batch, unit, /*last=*/micro_batch + 1 == config_.accumulation_steps);
  early_.issue(/*submitted=*/true);
  note_call(unit, true);
}

void StepSequence::drop_gradients(std::int64_t micro_batch, int unit, bool unwinding) noexcept {
  const std::string& name = name_of_unit(unit);
  parts_.reducer.drop(micro_batch, unit);
  // The peers are, or will be, in this unit's reduction, so they are notified before the exception is
  // handled.
  if (unwinding) breakdown_.end_by_unwinding("while it held the gradients of unit " + name);
  try {
    failure_ = "gradients of unit " + name + " were dropped in micro-batch " + std::to_string(micro_batch) +
               " without reduce()";
  } catch (...) {
    failure_.clear();
  }
}

}  // namespace tranche::detail
