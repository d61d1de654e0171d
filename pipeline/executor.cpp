#include "tranche/pipeline/executor.h"

#include <cstddef>
#include <exception>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"
#include "pipeline/schedule/run_order.h"
#include "pipeline/timeline.h"
#include "tranche/comm/communicator.h"
#include "tranche/core/error.h"
#include "tranche/engine/runtime.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/partition/mesh.h"

namespace tranche::pipeline {

// Note: the life of a pipeline action. engine/pipeline_order.h makes each rank's list of actions: the compute
// actions (F, B, I, W) come from schedule/generators.h or a file, schedule/lower.h adds messages, gathers and
// frees, and schedule/check.h proves that the lists are complete and cannot deadlock. schedule/run_order.h
// derives, from all lists, when a rank may end a micro-batch and reuse a sent gradient's memory. The Executor
// below runs one rank's list in order. A receive makes the compute stream wait for its message.
//
//     message received:  not posted --receive() of this or a later message of its sender--> posted
//                        posted --its receive action: the compute stream waits--> received
//     gradient sent:     sent, memory kept --action in RunOrder::taken (or at once, see there)--> released
//     chunk's weights:   requested by GATHER --the chunk's next compute action--> held --FREE--> released
//     micro-batch:       not begun --its first F, or a posted receive of its residual--> begun
//                        begun --action in RunOrder::ends--> ended
namespace {

class Executor {
 public:
  /// `forward_phase`: the phase's name for a forward pass alone; empty in training.
  Executor(Engine& engine, const RankSchedule& of_rank, const BeginWork& begin,
           std::string_view forward_phase)
      : engine_(engine),
        schedule_(*of_rank.schedule),
        order_(of_rank.order),
        begin_(begin),
        training_(forward_phase.empty()),
        forward_phase_(forward_phase),
        stage_(engine.stage()),
        stages_(engine.runtime().pipeline()),
        posted_(schedule_.ranks.size()) {
    if (TraceRecorder* const trace = engine.runtime().trace()) {
      timeline_ = std::make_unique<Timeline>(*trace, engine.runtime(), schedule_);
    }
  }

  void run() {
    const std::vector<Action>& actions = schedule_.ranks.at(static_cast<std::size_t>(stage_.stage));
    for (std::size_t i = 0; i < actions.size(); ++i) {
      if (timeline_) timeline_->begin(actions[i], engine_.compute_stream());
      run_named(actions[i], i);
      if (timeline_) timeline_->end(engine_.compute_stream());
    }
    // No receive proves that these were received, but now all stages have reached the end of the step.
    for (auto& [sent, gradient] : std::exchange(sent_gradients_, {})) gradient.give_back();
    engine_.runtime().set_place({});
    if (timeline_) timeline_->record();
    if (!open_.empty()) {
      throw LogicError("the schedule left micro-batch " + std::to_string(open_.begin()->first) + " open");
    }
  }

 private:
  using WorkOfChunk = std::shared_ptr<ChunkWork>;
  struct OpenMicroBatch {
    std::unique_ptr<MicroBatchWork> work;
    std::map<int, WorkOfChunk> chunks;  ///< by number; destroyed before `work`
  };
  /// A gradient whose memory is kept until the receiver has it.
  struct SentGradient {
    WorkOfChunk work;
    Event sent;
    void give_back() const { work->input_gradient_sent(sent); }
  };

  /// Runs the action. If it fails, the errors of all ranks name this rank, the action and the micro-batch,
  /// and the engine ends, because the other stages would wait for messages that are never sent.
  void run_named(const Action& action, std::size_t index) {
    engine_.runtime().set_place(place_of(action));
    try {
      run(action, index);
      for (const std::size_t send : order_.taken[index]) {
        const auto gradient = sent_gradients_.find(send);
        gradient->second.give_back();
        sent_gradients_.erase(gradient);
      }
      for (const std::int64_t micro_batch : order_.ends[index]) end(micro_batch);
    } catch (...) {
      engine_.break_down(std::current_exception());
      throw;
    }
  }

  /// "backward of micro-batch 5, receive from rank 4 (pipeline 2, shard 0)"
  std::string place_of(const Action& action) const {
    if (action.kind == ActionKind::gather || action.kind == ActionKind::free) {
      return "weights of chunk " + std::to_string(action.chunk);
    }
    const auto name_of_work = [&]() -> std::string {
      switch (action.kind) {
        case ActionKind::input_gradient:
          return "input gradients";
        case ActionKind::weight_gradient:
          return "weight gradients";
        case ActionKind::backward:
        case ActionKind::receive_gradient:
        case ActionKind::send_gradient:
          return "backward";
        default:
          return "forward";
      }
    };
    std::string place = training_ ? name_of_work() + " of micro-batch " + std::to_string(action.micro_batch)
                                  : std::string("forward pass");
    if (schedule_.several_chunks()) place += " on chunk " + std::to_string(action.chunk);
    if (is_message(action.kind)) {
      const bool sends = action.kind == ActionKind::send_residual || action.kind == ActionKind::send_gradient;
      place += (sends ? ", send to " : ", receive from ") + name_of_stage(peer_of(schedule_, action));
    }
    return place;
  }
  /// The name of a stage's rank in errors.
  std::string name_of_stage(int stage) const {
    const Runtime& runtime = engine_.runtime();
    const std::vector<int> ranks = runtime.mesh().group({MeshAxis::pipeline}, runtime.rank());
    return runtime.mesh().name_of_rank(ranks.at(static_cast<std::size_t>(stage)));
  }

  void run(const Action& action, std::size_t index) {
    switch (action.kind) {
      case ActionKind::receive_residual:
      case ActionKind::receive_gradient:
        receive(action);
        return;
      case ActionKind::forward: {
        if (action.chunk == 0 || !schedule_.crosses(action.chunk - 1)) begin(action);
        take_weights(action.chunk);
        ChunkWork& done = work(action);
        if (action.chunk > 0 && !schedule_.crosses(action.chunk - 1)) take_residual(action, done);
        done.forward();
        return;
      }
      case ActionKind::send_residual: {
        ChunkWork& done = work(action);
        done.output_sent(send(done.output(), action));
        return;
      }
      case ActionKind::backward:
        take_weights(action.chunk);
        work(action).backward();
        give_gradient(action);
        return;
      case ActionKind::input_gradient:
        take_weights(action.chunk);
        work(action).input_gradients();
        give_gradient(action);
        return;
      case ActionKind::weight_gradient:
        take_weights(action.chunk);
        work(action).weight_gradients();
        return;
      case ActionKind::send_gradient: {
        const WorkOfChunk& done = find(action);
        const Event sent = send(work(action).input_gradient(), action);
        if (schedule_.several_chunks()) {
          sent_gradients_.emplace(index, SentGradient{done, sent});
        } else {
          done->input_gradient_sent(sent);
        }
        return;
      }
      case ActionKind::gather:
        wanted_.insert(action.chunk);
        return;
      case ActionKind::free:
        wanted_.erase(action.chunk);
        weights_.erase(action.chunk);
        return;
    }
  }

  // --- Micro-batches and their chunks ---
  const Engine::Chunk& chunk_of(int number) const {
    for (const Engine::Chunk& chunk : stage_.chunks) {
      if (chunk.number == number) return chunk;
    }
    throw LogicError("chunk " + std::to_string(number) + " is on another stage");
  }
  void begin(const Action& action) {
    for (; begun_ <= action.micro_batch; ++begun_) open_[begun_].work = begin_(begun_);
    select(action.micro_batch);
    OpenMicroBatch& open = open_.at(action.micro_batch);
    open.chunks[action.chunk] = open.work->begin(chunk_of(action.chunk));
  }
  void select(std::int64_t micro_batch) {
    if (training_) engine_.select_micro_batch(micro_batch);
  }
  const WorkOfChunk& find(const Action& action) {
    return open_.at(action.micro_batch).chunks.at(action.chunk);
  }
  ChunkWork& work(const Action& action) {
    select(action.micro_batch);
    return *find(action);
  }
  void end(std::int64_t micro_batch) {
    select(micro_batch);
    const auto open = open_.find(micro_batch);
    open->second.chunks.clear();
    open->second.work->end();
    open_.erase(open);
  }
  /// Gathers the weights of a chunk for several micro-batches, if a GATHER preceded. A micro-batch must be
  /// open.
  void take_weights(int number) {
    if (wanted_.erase(number) == 0) return;
    const Engine::Chunk& chunk = chunk_of(number);
    std::set<int> units;
    for (int use = chunk.begin; use < chunk.end; ++use) {
      const UnitId unit = engine_.model().forward[static_cast<std::size_t>(use)].unit;
      if (units.insert(unit.index).second) weights_[number].push_back(engine_.hold(unit));
    }
  }

  // --- Between chunks of this rank ---
  void take_residual(const Action& action, ChunkWork& to) {
    ChunkWork& from = *open_.at(action.micro_batch).chunks.at(action.chunk - 1);
    const TensorView input = to.input();
    kernels::copy(engine_.compute_stream(), from.output(), input);
    from.output_sent(engine_.compute_stream().record());
  }
  void give_gradient(const Action& action) {
    if (action.chunk == 0 || schedule_.crosses(action.chunk - 1)) return;
    ChunkWork& from = work(action);
    const TensorView gradient = open_.at(action.micro_batch).chunks.at(action.chunk - 1)->output_gradient();
    kernels::copy(engine_.compute_stream(), from.input_gradient(), gradient);
    from.input_gradient_sent(engine_.compute_stream().record());
  }

  // --- Messages ---
  static bool of_residual(const Action& action) {
    return action.kind == ActionKind::send_residual || action.kind == ActionKind::receive_residual;
  }
  /// The message's name in errors and traces.
  std::string name_of_message(const Action& action) const {
    if (!training_) return "residual";
    return (of_residual(action) ? "residual of micro-batch " : "gradient of micro-batch ") +
           std::to_string(action.micro_batch);
  }
  std::string_view phase(const Action& action) const {
    return !training_ ? forward_phase_ : of_residual(action) ? "forward" : "backward";
  }
  /// Waits for a message. Receives for its sender's earlier messages are posted too, because messages between
  /// two ranks match in order.
  void receive(const Action& action) {
    const int peer = peer_of(schedule_, action);
    const std::vector<Action>& incoming = order_.incoming[static_cast<std::size_t>(peer)];
    std::size_t& posted = posted_[static_cast<std::size_t>(peer)];
    while (!received_.contains(action)) {
      const Action& next = incoming.at(posted++);
      received_.emplace(next, post(next, peer));
    }
    const auto received = received_.find(action);
    if (training_) {
      engine_.wait_for_message(received->second);
    } else {
      engine_.compute_stream().wait(received->second);
    }
    received_.erase(received);
  }
  Event post(const Action& action, int peer) {
    if (of_residual(action)) begin(action);
    ChunkWork& to = work(action);
    const TensorView into = of_residual(action) ? to.input() : to.output_gradient();
    const std::vector<Event> ready{engine_.compute_stream().record()};
    const std::string name = name_of_message(action);
    return stages_->recv(into.data, into.elements(), into.dtype, peer, ready, {name, phase(action)});
  }
  Event send(const ConstTensorView& from, const Action& action) {
    const std::vector<Event> ready{engine_.compute_stream().record()};
    const std::string name = name_of_message(action);
    return stages_->send(from.data, from.elements(), from.dtype, peer_of(schedule_, action), ready,
                         {name, phase(action)});
  }

  Engine& engine_;
  const PipelineSchedule& schedule_;
  const RunOrder& order_;
  const BeginWork& begin_;
  bool training_;
  std::string_view forward_phase_;
  Engine::StageUses stage_;
  Communicator* stages_;
  std::unique_ptr<Timeline> timeline_;  ///< null: no trace
  std::int64_t begun_ = 0;
  std::map<std::int64_t, OpenMicroBatch> open_;
  std::vector<std::size_t> posted_;   ///< by sending rank: the number of its messages whose receive is posted
  std::map<Action, Event> received_;  ///< posted, but not yet waited for
  std::map<std::size_t, SentGradient> sent_gradients_;  ///< by index of the send action
  std::set<int> wanted_;                                ///< chunks to gather at their next compute action
  std::map<int, std::vector<GatheredUnit>> weights_;    ///< by chunk
};

[[noreturn]] void refuse_backward() {
  throw LogicError("backward of a micro-batch that has a forward alone");
}

}  // namespace

TensorView ChunkWork::output_gradient() {
  refuse_backward();
}
void ChunkWork::backward() {
  refuse_backward();
}
void ChunkWork::input_gradients() {
  refuse_backward();
}
void ChunkWork::weight_gradients() {
  refuse_backward();
}
ConstTensorView ChunkWork::input_gradient() {
  refuse_backward();
}
void ChunkWork::input_gradient_sent(const Event& /*sent*/) {
  refuse_backward();
}

void run_step(Engine& engine, const BeginWork& begin) {
  Executor(engine, engine.rank_schedule(true), begin, "").run();
}

void run_forward(Engine& engine, const BeginWork& begin, std::string_view phase) {
  Executor(engine, engine.rank_schedule(false), begin, phase).run();
}

void give_to_all_stages(Engine& engine, std::span<float> values, std::string_view what) {
  Communicator* const stages = engine.runtime().pipeline();
  if (stages == nullptr) return;
  stages
      ->broadcast(values.data(), static_cast<std::int64_t>(values.size()), DataType::float32,
                  engine.stage().last_stage, {}, {what, "inference", Traffic::control, Tier::host})
      .wait();
}

}  // namespace tranche::pipeline
