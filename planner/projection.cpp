// The projection of recorded work: how project() derives the time of a step. Five files have a part.
//
//   record_steps.cpp  runs one rank, or one rank of each pipeline stage, on the meta device. A WorkRecorder
//                     writes down each kernel, copy, disk transfer, collective and message, with its stream
//                     (a lane), its sizes, and the earlier work for which it waits.
//   work_cost.cpp     takes the seconds of this work from the machine's file, and its claims on cores.
//   step_graph.cpp    turns the work of all recorded ranks into one graph of tasks, and links each send to
//                     its receive, and the ranks of a collective to each other.
//   simulation.cpp    runs the graph. A lane runs one task at a time; tasks that together claim more of a
//                     resource than there is slow each other down.
//   this file         finds in the last simulated step what the compute stream did and for what it waited.
//
// Two steps settle memory and order, three are recorded, and the last is evaluated. A step of many
// micro-batches is extrapolated from simulations of fewer, once these show a steady state (whole_step()).
#include "tranche/planner/projection.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "pipeline/schedule/generators.h"
#include "planner/planned_run.h"
#include "planner/record_steps.h"
#include "planner/simulation.h"
#include "planner/step_graph.h"
#include "planner/work_cost.h"
#include "tranche/core/error.h"
#include "tranche/partition/mesh.h"

namespace tranche::planner {

namespace {

using detail::RecordedWork;
using detail::WorkKind;

/// Steps that are simulated. The last one is evaluated; the earlier ones bring the streams to a steady state.
constexpr int simulated_steps = 3;
/// Micro-batches for each stage of a pipeline in the smallest of the simulations that are extrapolated.
constexpr std::int64_t least_micro_batches = 2;
/// The share by which the seconds of a micro-batch may differ between two intervals for an extrapolation.
constexpr double intervals_agree = 0.01;
/// A pipeline is extrapolated to so many times the simulated micro-batches at most: a wait that is used up
/// only behind them does not show.
constexpr std::int64_t farthest = 8;

enum class Role { compute, gather, reduce, message, offload, other };

const char* role_text(Role role) {
  switch (role) {
    case Role::gather:
      return "gather";
    case Role::reduce:
      return "reduce";
    case Role::message:
      return "message";
    case Role::offload:
      return "offload";
    case Role::compute:
      return "compute";
    case Role::other:
      break;
  }
  return "other";
}

Role role_of(const RecordedWork* work, const std::string& lane) {
  if (work == nullptr) return Role::other;
  switch (work->kind) {
    case WorkKind::collective:
      if (work->detail == "step" || work->full_bytes == 0) return Role::other;
      // These two exchanges reduce gradients as well: int8 blocks of gradients, and matrices that an
      // optimizer updates whole.
      return work->name == "reduce_scatter" || work->name == "all_to_all" ? Role::reduce
             : work->name == "all_gather"                                 ? Role::gather
                                                                          : Role::other;
    case WorkKind::kernel:
      return lane == "host update" || lane == "to host" ? Role::offload : Role::compute;
    case WorkKind::copy_to_host:
    case WorkKind::copy_from_host:
      return lane == "to host" || lane == "from host" ? Role::offload : Role::other;
    case WorkKind::disk_read:
    case WorkKind::disk_write:
      return Role::offload;
    case WorkKind::send:
    case WorkKind::receive:
      return Role::message;
    case WorkKind::join:
    case WorkKind::mark:
      break;
  }
  return Role::other;
}

/// Evaluates the last step of a simulated run from the view of one of its ranks.
class Analysis {
 public:
  /// `place`: the rank's place in the graph.
  Analysis(const StepGraph& graph, const std::vector<SimulatedSpan>& spans, int place)
      : graph_(graph), spans_(spans), place_(place) {
    bool behind = false;
    for (std::size_t i = 0; i < graph.tasks.size(); ++i) {
      const RecordedWork* work = graph.work[i];
      behind_boundary_.push_back(behind);
      if (graph.place[i] != place || work == nullptr || work->kind != WorkKind::mark) continue;
      behind = work->name == boundary_mark;
      if (work->name == end_mark) {
        begin_ = end_;
        begin_task_ = end_task_;
        end_ = spans[i].end;
        end_task_ = static_cast<int>(i);
      }
    }
  }

  double seconds() const { return end_ - begin_; }

  /// Bytes that a node sends in the last step for gathers, reductions and messages.
  double node_bytes() const {
    double bytes = 0;
    for (int i = begin_task_ + 1; i < end_task_; ++i) {
      const Role of = role(i);
      if (of == Role::gather || of == Role::reduce || of == Role::message)
        bytes += graph_.node_bytes[static_cast<std::size_t>(i)];
    }
    return bytes;
  }

  StepBreakdown breakdown() const {
    StepBreakdown step;
    double at = begin_;
    for (std::size_t i = 0; i < graph_.tasks.size(); ++i) {
      if (graph_.tasks[i].lane != graph_.compute_lane[static_cast<std::size_t>(place_)]) continue;
      const SimulatedSpan& span = spans_[i];
      const double from = std::max(span.begin, at), to = std::min(span.end, end_);
      if (span.end <= begin_ || span.begin >= end_) continue;
      if (from > at) wait(step, at, from, span.cause);
      at = std::max(at, to);
      if (to <= from) continue;
      if (role(static_cast<int>(i)) != Role::compute) {
        step.other += to - from;
        continue;
      }
      const double launch = std::min(graph_.launch[i], to - from);
      step.other += launch;
      (behind_boundary_[i] ? step.optimizer : step.compute) += to - from - launch;
    }
    if (at < end_) wait(step, at, end_, spans_[static_cast<std::size_t>(end_task_)].cause);
    return step;
  }

  std::vector<std::pair<std::string, double>> critical_path() const {
    std::map<std::string, double> seconds;
    double until = end_;
    for (int i = end_task_; i >= 0 && until > begin_; i = spans_[static_cast<std::size_t>(i)].cause) {
      const SimulatedSpan& span = spans_[static_cast<std::size_t>(i)];
      const double from = std::max(span.begin, begin_);
      if (until > from) seconds[name(i)] += until - from;
      until = std::min(until, from);
    }
    std::vector<std::pair<std::string, double>> path(seconds.begin(), seconds.end());
    std::stable_sort(path.begin(), path.end(),
                     [](const auto& a, const auto& b) { return a.second > b.second; });
    return path;
  }

  void record(TraceRecorder& trace) const {
    for (std::size_t i = 0; i < graph_.tasks.size(); ++i) {
      const SimulatedSpan& span = spans_[i];
      if (span.end <= begin_ || span.begin >= end_ || span.end <= span.begin) continue;
      const auto place = static_cast<std::size_t>(graph_.place[i]);
      std::string lane = lane_name(static_cast<int>(i));
      if (graph_.tasks[i].lane == graph_.compute_lane[place]) lane = "compute";
      if (graph_.compute_lane.size() > 1) lane = fmt::format("stage {} {}", place, lane);
      trace.span(lane, name(static_cast<int>(i)), std::max(span.begin, begin_) - begin_,
                 std::min(span.end, end_) - begin_);
    }
  }

 private:
  const std::string& lane_name(int task) const {
    return graph_.lanes[static_cast<std::size_t>(graph_.tasks[static_cast<std::size_t>(task)].lane)];
  }
  Role role(int task) const { return role_of(graph_.work[static_cast<std::size_t>(task)], lane_name(task)); }
  std::string name(int task) const {
    const RecordedWork* work = graph_.work[static_cast<std::size_t>(task)];
    if (work == nullptr) return "launch";
    if (work->kind == WorkKind::kernel) return work->name;
    const Role of = role(task);
    if (work->kind == WorkKind::collective && of == Role::other) return work->name + " (control)";
    if (work->name.empty() || of == Role::message) return role_text(of);
    return work->name;
  }

  /// False for work of other stages only; the compute stream waits for that through a message.
  bool takes_part(int task) const {
    const auto at = static_cast<std::size_t>(task);
    if (graph_.place[at] == place_) return true;
    const RecordedWork* work = graph_.work[at];
    if (work == nullptr || work->kind != WorkKind::collective) return false;
    const std::vector<int>& members = *work->members;
    return std::find(members.begin(), members.end(), graph_.ranks[static_cast<std::size_t>(place_)]) !=
           members.end();
  }

  /// Attributes the time from `from` to `to`, in which the compute stream waits for the task `cause`, to the
  /// roles of the tasks that fill it.
  void wait(StepBreakdown& step, double from, double to, int cause) const {
    while (cause >= 0 && to > from) {
      const SimulatedSpan& span = spans_[static_cast<std::size_t>(cause)];
      const double begin = std::max(from, span.begin);
      if (span.end < to) step.other += to - span.end;
      const double end = std::min(to, span.end);
      if (end > begin) add(step, takes_part(cause) ? role(cause) : Role::message, end - begin);
      to = std::min(to, begin);
      cause = span.cause;
    }
    if (to > from) step.other += to - from;
  }
  static void add(StepBreakdown& step, Role role, double seconds) {
    switch (role) {
      case Role::gather:
        step.exposed_gather += seconds;
        return;
      case Role::reduce:
        step.exposed_reduce += seconds;
        return;
      case Role::message:
        step.exposed_message += seconds;
        return;
      case Role::offload:
        step.exposed_offload += seconds;
        return;
      case Role::compute:
      case Role::other:
        break;
    }
    step.other += seconds;
  }

  const StepGraph& graph_;
  const std::vector<SimulatedSpan>& spans_;
  int place_;
  double begin_ = 0, end_ = 0;
  std::vector<bool> behind_boundary_;  ///< by task: true if Engine::step() issued it
  int begin_task_ = -1, end_task_ = -1;
};

struct Simulated {
  StepBreakdown step;
  std::vector<StepBreakdown> of_stages;  ///< the same step from the view of each simulated rank
  double node_bytes = 0;
  std::vector<std::pair<std::string, double>> critical_path;
  std::vector<std::string> notes;
};

Simulated simulate_step(const ProjectionRequest& request, TraceRecorder* trace) {
  Config config = request.plan.config;
  validate_config(config, request.plan.ranks);
  WorkCost costs(request, config);
  // One rank of each stage of the pipeline, or the request's rank alone.
  std::vector<RecordedRank> ranks;
  int own = 0;
  for (const int rank : config.mesh_of(request.plan.ranks).group({MeshAxis::pipeline}, request.plan.rank)) {
    PlanRequest plan = request.plan;
    plan.rank = rank;
    if (rank == request.plan.rank) own = static_cast<int>(ranks.size());
    ranks.push_back({rank, record_steps(plan, simulated_steps)});
  }
  const StepGraph graph = graph_of(ranks, costs);
  const std::vector<SimulatedSpan> spans = simulate(graph.tasks, graph.ordered, graph.capacities);
  const Analysis analysis(graph, spans, own);
  if (trace != nullptr) analysis.record(*trace);
  Simulated simulated;
  for (int place = 0; place < static_cast<int>(ranks.size()); ++place) {
    simulated.of_stages.push_back(Analysis(graph, spans, place).breakdown());
  }
  simulated.step = simulated.of_stages[static_cast<std::size_t>(own)];
  simulated.node_bytes = analysis.node_bytes();
  simulated.critical_path = analysis.critical_path();
  simulated.notes = {costs.notes().begin(), costs.notes().end()};
  return simulated;
}

/// The request with another number of micro-batches and of ranks.
ProjectionRequest with(const ProjectionRequest& request, std::int64_t micro_batches, int ranks) {
  ProjectionRequest changed = request;
  Config effective = request.plan.config;
  validate_config(effective, request.plan.ranks);
  // Neither the order of a sum nor a short last round changes the time of a step, so both keys are reset.
  changed.plan.config.reduction = effective.reduction;
  changed.plan.config.world_size_invariant = false;
  changed.plan.config.micro_batch_size = effective.micro_batch_size;
  changed.plan.config.accumulation_steps = micro_batches;
  if (ranks != request.plan.ranks) {
    changed.plan.ranks = ranks;
    changed.plan.rank = 0;
    // The mesh and DeepSpeed's keys for its axes are those of several ranks.
    changed.plan.config.mesh.clear();
    changed.plan.config.tensor_ranks = changed.plan.config.context_ranks = 0;
    changed.plan.config.pipeline_stages = changed.plan.config.shard_size = 0;
    changed.plan.config.layout.clear();
    changed.plan.config.context_exchange = ContextExchange::gather;
  }
  changed.plan.config.train_batch_size =
      effective.micro_batch_size * micro_batches * changed.plan.config.data_ranks(ranks);
  return changed;
}

StepBreakdown sum(const StepBreakdown& a, const StepBreakdown& b, double times) {
  return {a.compute + times * b.compute,
          a.exposed_gather + times * b.exposed_gather,
          a.exposed_reduce + times * b.exposed_reduce,
          a.exposed_message + times * b.exposed_message,
          a.exposed_offload + times * b.exposed_offload,
          a.optimizer + times * b.optimizer,
          a.other + times * b.other};
}

/// The part of a step, or of a difference of two, that takes the least time.
double least_part(const StepBreakdown& step) {
  return std::min({step.compute, step.exposed_gather, step.exposed_reduce, step.exposed_message,
                   step.exposed_offload, step.optimizer, step.other});
}

/// The step with `more` more micro-batches than `most`, if a steady state is reached: each stage spends equal
/// seconds on a micro-batch in both intervals, and no part of them shrinks. `few`, `fewer` and `most` differ
/// by `interval` and twice as many micro-batches. While communication is hidden behind more and more
/// computing, the waiting for it shrinks on one of the stages, and a micro-batch adds less than it will
/// later.
std::optional<Simulated> extrapolated(const Simulated& few, const Simulated& fewer, const Simulated& most,
                                      std::int64_t interval, std::int64_t more) {
  const auto slope = [&](const StepBreakdown& after, const StepBreakdown& before, std::int64_t between) {
    const double share = 1 / static_cast<double>(between);
    return sum(sum({}, after, share), before, -share);
  };
  for (std::size_t stage = 0; stage < most.of_stages.size(); ++stage) {
    const StepBreakdown before = slope(fewer.of_stages[stage], few.of_stages[stage], interval);
    const StepBreakdown after = slope(most.of_stages[stage], fewer.of_stages[stage], 2 * interval);
    const double tolerance = intervals_agree * after.total();
    if (std::abs(after.total() - before.total()) > tolerance || least_part(before) < -tolerance ||
        least_part(after) < -tolerance) {
      return std::nullopt;
    }
  }
  Simulated whole = most;
  whole.step = sum(most.step, slope(most.step, fewer.step, 2 * interval), static_cast<double>(more));
  whole.node_bytes +=
      static_cast<double>(more) * (most.node_bytes - fewer.node_bytes) / static_cast<double>(2 * interval);
  if (least_part(whole.step) < 0) return std::nullopt;
  return whole;
}

/// The time of a whole step. If it has many micro-batches, it is extrapolated from fewer. Twice as many are
/// simulated until that is possible, or all where that costs less.
Simulated whole_step(const ProjectionRequest& request, TraceRecorder* trace) {
  Config config = request.plan.config;
  validate_config(config, request.plan.ranks);
  const std::int64_t micro_batches = config.accumulation_steps;
  const std::int64_t stages = config.mesh_of(request.plan.ranks).size(MeshAxis::pipeline);
  const auto simulated = [&](std::int64_t number, TraceRecorder* into = nullptr) {
    return simulate_step(with(request, number, request.plan.ranks), into);
  };
  // A schedule from a file has a fixed number of micro-batches; the schedule interleaved needs a multiple of
  // the number of stages.
  const bool any_number = stages == 1 || pipeline::find_schedule(config.pipeline_schedule) != nullptr;
  const std::int64_t rest = micro_batches % stages;
  std::int64_t interval = least_micro_batches * stages;
  if (!any_number || 7 * interval + 3 * rest >= micro_batches) return simulated(micro_batches, trace);
  while (stages > 1 && farthest * 4 * interval < micro_batches) interval *= 2;
  Simulated few = simulated(interval + rest), fewer = simulated(2 * interval + rest);
  for (; 4 * interval + rest < micro_batches; interval *= 2) {
    const std::int64_t run = 4 * interval + rest;
    Simulated most = simulated(run);
    if (auto whole = extrapolated(few, fewer, most, interval, micro_batches - run)) {
      if (trace != nullptr) (void)simulated(run, trace);
      whole->notes.push_back(fmt::format("{} micro-batches from the simulation of {}, {} and {}",
                                         micro_batches, interval + rest, 2 * interval + rest, run));
      return *whole;
    }
    few = std::exchange(fewer, std::move(most));
  }
  return simulated(micro_batches, trace);
}

/// Throws ConfigurationError where the machine has no figures for the request.
void require_projectable(const ProjectionRequest& request) {
  if (!request.plan.model.language) {
    throw ConfigurationError(
        fmt::format("--machine: {} is a list of units, of whose kernels nothing is known; the step time of "
                    "a language model can be projected",
                    request.plan.model.name));
  }
  if (request.plan.device != request.machine.device) {
    throw ConfigurationError(
        fmt::format("--device {}, but {} is a machine whose ranks compute on {}; give --device {}",
                    name_of(request.plan.device), request.machine.name, name_of(request.machine.device),
                    name_of(request.machine.device)));
  }
}

}  // namespace

StepBreakdown project_step(const ProjectionRequest& request) {
  require_projectable(request);
  return whole_step(request, nullptr).step;
}

Projection project(const ProjectionRequest& request, TraceRecorder* trace) {
  require_projectable(request);
  Config config = request.plan.config;
  validate_config(config, request.plan.ranks);
  Simulated simulated = whole_step(request, trace);
  Projection projection;
  projection.step = simulated.step;
  projection.node_bytes = simulated.node_bytes;
  projection.critical_path = std::move(simulated.critical_path);
  projection.notes = std::move(simulated.notes);
  const std::int64_t sequence = request.plan.model.sequence_or_longest(request.plan.sequence);
  projection.tokens_per_second =
      static_cast<double>(config.train_batch_size * sequence) / projection.step.total();
  if (request.plan.ranks > 1) {
    // The same rank alone, with the same share of its node and without communication.
    ProjectionRequest alone = with(request, config.accumulation_steps, 1);
    const int on_node = request.plan.ranks_per_node > 0 ? request.plan.ranks_per_node : request.plan.ranks;
    alone.sharing = std::min(on_node, request.plan.ranks);
    const StepBreakdown step = whole_step(alone, nullptr).step;
    // Ranks of the axes `context`, `tensor` and `pipeline` share the samples of one data rank.
    const Mesh mesh = config.mesh_of(request.plan.ranks);
    projection.efficiency = step.total() / projection.step.total() / mesh.size(MeshAxis::tensor) /
                            mesh.size(MeshAxis::context) / mesh.size(MeshAxis::pipeline);
    projection.alone_optimizer = step.optimizer;
  }
  return projection;
}

}  // namespace tranche::planner
