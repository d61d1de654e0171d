#include "tranche/pipeline/executor.h"

#include <cstddef>
#include <exception>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pipeline/schedule/schedule.h"
#include "pipeline/timeline.h"
#include "tranche/comm/communicator.h"
#include "tranche/core/error.h"
#include "tranche/engine/runtime.h"
#include "tranche/partition/mesh.h"

namespace tranche::pipeline {

namespace {

class Executor {
 public:
  /// `forward_phase`: the phase of a forward alone; empty in training.
  Executor(Engine& engine, const BeginWork& begin, std::string_view forward_phase)
      : engine_(engine),
        begin_(begin),
        training_(forward_phase.empty()),
        forward_phase_(forward_phase),
        stage_(engine.stage()),
        stages_(engine.runtime().pipeline()) {
    if (stages_ == nullptr) throw LogicError("a schedule of a pipeline on a mesh without one");
    if (TraceRecorder* const trace = engine.runtime().trace()) {
      timeline_ = std::make_unique<Timeline>(*trace, engine.runtime(), stage_);
    }
  }

  void run(const std::vector<Action>& actions) {
    for (const Action& action : actions) {
      if (timeline_) timeline_->begin(action, engine_.compute_stream());
      run_named(action);
      if (timeline_) timeline_->end(engine_.compute_stream());
    }
    engine_.runtime().set_place({});
    if (timeline_) timeline_->record();
    if (!open_.empty()) {
      throw LogicError("the schedule left micro-batch " + std::to_string(open_.begin()->first) + " open");
    }
  }

 private:
  /// Runs the action. When it fails, the texts of all ranks name this rank, the action and the micro-batch,
  /// and the engine has ended: what the other stages wait for will not come.
  void run_named(const Action& action) {
    engine_.runtime().set_place(place_of(action));
    try {
      run(action);
    } catch (...) {
      engine_.break_down(std::current_exception());
      throw;
    }
  }

  /// "backward of micro-batch 5, receive from rank 4 (pipeline 2, shard 0)"
  std::string place_of(const Action& action) const {
    const bool backward = action.kind == ActionKind::receive_gradient ||
                          action.kind == ActionKind::backward || action.kind == ActionKind::send_gradient;
    const std::string work = !training_
                                 ? std::string("forward pass")
                                 : (backward ? "backward of micro-batch " : "forward of micro-batch ") +
                                       std::to_string(action.micro_batch);
    switch (action.kind) {
      case ActionKind::receive_residual:
        return work + ", receive from " + neighbour(-1);
      case ActionKind::receive_gradient:
        return work + ", receive from " + neighbour(1);
      case ActionKind::send_residual:
        return work + ", send to " + neighbour(1);
      case ActionKind::send_gradient:
        return work + ", send to " + neighbour(-1);
      case ActionKind::forward:
      case ActionKind::backward:
        break;
    }
    return work;
  }
  /// The rank of the stage that lies so many behind this one, as errors name it.
  std::string neighbour(int behind) const {
    const Runtime& runtime = engine_.runtime();
    const std::vector<int> ranks = runtime.mesh().group({MeshAxis::pipeline}, runtime.rank());
    return runtime.mesh().name_of_rank(ranks.at(static_cast<std::size_t>(stage_.stage + behind)));
  }

  void run(const Action& action) {
    switch (action.kind) {
      case ActionKind::receive_residual:
        receive(begin(action).input(), stage_.stage - 1, action);
        return;
      case ActionKind::forward:
        (stage_.first() ? begin(action) : work(action)).forward();
        if (!training_ && stage_.last()) end(action);
        return;
      case ActionKind::send_residual: {
        StageWork& done = work(action);
        done.output_sent(send(done.output(), stage_.stage + 1, action));
        if (!training_) end(action);
        return;
      }
      case ActionKind::receive_gradient:
        receive(work(action).output_gradient(), stage_.stage + 1, action);
        return;
      case ActionKind::backward:
        work(action).backward();
        if (stage_.first()) end(action);
        return;
      case ActionKind::send_gradient: {
        StageWork& done = work(action);
        done.input_gradient_sent(send(done.input_gradient(), stage_.stage - 1, action));
        end(action);
        return;
      }
    }
  }

  StageWork& begin(const Action& action) {
    std::unique_ptr<StageWork>& work = open_[action.micro_batch];
    work = begin_(action.micro_batch);
    return *work;
  }
  StageWork& work(const Action& action) {
    if (training_) engine_.select_micro_batch(action.micro_batch);
    return *open_.at(action.micro_batch);
  }
  void end(const Action& action) {
    work(action).end();
    open_.erase(action.micro_batch);
  }

  static bool of_residual(const Action& action) {
    return action.kind == ActionKind::send_residual || action.kind == ActionKind::receive_residual;
  }
  /// In errors and traces.
  std::string name_of_message(const Action& action) const {
    if (!training_) return "residual";
    return (of_residual(action) ? "residual of micro-batch " : "gradient of micro-batch ") +
           std::to_string(action.micro_batch);
  }
  std::string_view phase(const Action& action) const {
    return !training_ ? forward_phase_ : of_residual(action) ? "forward" : "backward";
  }
  void receive(const TensorView& into, int from, const Action& action) {
    Stream& compute = engine_.compute_stream();
    const std::vector<Event> ready{compute.record()};
    const std::string name = name_of_message(action);
    const Event received =
        stages_->recv(into.data, into.elements(), into.dtype, from, ready, {name, phase(action)});
    if (training_) {
      engine_.wait_for_message(received);
    } else {
      compute.wait(received);
    }
  }
  Event send(const ConstTensorView& from, int to, const Action& action) {
    const std::vector<Event> ready{engine_.compute_stream().record()};
    const std::string name = name_of_message(action);
    return stages_->send(from.data, from.elements(), from.dtype, to, ready, {name, phase(action)});
  }

  Engine& engine_;
  const BeginWork& begin_;
  bool training_;
  std::string_view forward_phase_;
  Engine::StageUses stage_;
  Communicator* stages_;
  std::unique_ptr<Timeline> timeline_;  ///< null: nothing is traced
  std::map<std::int64_t, std::unique_ptr<StageWork>> open_;
};

[[noreturn]] void refuse_backward() {
  throw LogicError("backward of a micro-batch that has a forward alone");
}

}  // namespace

TensorView StageWork::output_gradient() {
  refuse_backward();
}
void StageWork::backward() {
  refuse_backward();
}
ConstTensorView StageWork::input_gradient() {
  refuse_backward();
}
void StageWork::input_gradient_sent(const Event& /*sent*/) {
  refuse_backward();
}

void run_step(Engine& engine, const BeginWork& begin) {
  const Engine::StageUses stage = engine.stage();
  const ScheduleKind kind = engine.config().pipeline_schedule == PipelineSchedule::afab
                                ? ScheduleKind::afab
                                : ScheduleKind::one_f_one_b;
  Executor(engine, begin, "")
      .run(actions_of(kind, stage.stages, engine.config().accumulation_steps, stage.stage));
}

void run_forward(Engine& engine, const BeginWork& begin, std::string_view phase) {
  const Engine::StageUses stage = engine.stage();
  Executor(engine, begin, phase).run(actions_of(ScheduleKind::forward_alone, stage.stages, 1, stage.stage));
}

void give_to_all_stages(Engine& engine, std::span<float> values, std::string_view what) {
  Communicator* const stages = engine.runtime().pipeline();
  if (stages == nullptr) return;
  stages
      ->broadcast(values.data(), static_cast<std::int64_t>(values.size()), DataType::float32,
                  stages->size() - 1, {}, {what, "inference", Traffic::control, Tier::host})
      .wait();
}

}  // namespace tranche::pipeline
