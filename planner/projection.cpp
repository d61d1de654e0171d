#include "tranche/planner/projection.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "planner/collective_cost.h"
#include "planner/planned_run.h"
#include "planner/record_steps.h"
#include "planner/simulation.h"
#include "tranche/core/error.h"

namespace tranche::planner {

namespace {

using detail::GemmShape;
using detail::RecordedWork;
using detail::WorkKind;
using detail::WorkRecorder;

/// Steps that are simulated: those before the last fill the pipeline that it then finds.
constexpr int simulated_steps = 3;
/// A step of more micro-batches costs as many times more of what lies between the third and the fourth.
constexpr std::int64_t most_micro_batches = 4;

enum Resource { cores, disk_resource, resources };

enum class Role { compute, gather, reduce, offload, other };

const char* role_text(Role role) {
  switch (role) {
    case Role::gather:
      return "gather";
    case Role::reduce:
      return "reduce";
    case Role::offload:
      return "offload";
    case Role::compute:
      return "compute";
    case Role::other:
      break;
  }
  return "other";
}

/// Recorded work in seconds of the machine.
class Costs {
 public:
  Costs(const ProjectionRequest& request, const Config& config)
      : machine_(request.machine),
        config_(config),
        ranks_(request.plan.ranks),
        ranks_per_node_(request.plan.ranks_per_node > 0
                            ? std::min(request.plan.ranks_per_node, request.plan.ranks)
                            : request.plan.ranks),
        network_(request.network ? *request.network : request.machine.network.value_or(LinkRate{})),
        sharing_(request.sharing > 0 ? request.sharing : ranks_per_node_),
        share_(machine_.share(sharing_)) {
    const int threads = config.threads > 0 ? config.threads : std::max(1, machine_.cores / sharing_);
    on_cpu_ = machine_.device == DeviceKind::cpu;
    if (on_cpu_) {
      const double cores_each = static_cast<double>(machine_.cores) / sharing_;
      cores_ = std::max(1.0, cores_each);
      threads_ = std::min(static_cast<double>(threads), cores_);
      // Fewer cores than a measured share had: its rates in proportion.
      slower_ = share_.threads / std::min(threads_, cores_each);
      if (slower_ != 1) {
        notes_.insert(fmt::format("rates of {} threads taken in proportion for {:g} on each of {} ranks",
                                  share_.threads, threads_, sharing_));
      }
    }
    if (request.plan.ranks > ranks_per_node_ && !request.network && !machine_.network) {
      throw ConfigurationError(
          fmt::format("{} ranks, {} on a node, need --network RATE,LATENCY: the machine file of {} has no "
                      "network between nodes",
                      request.plan.ranks, ranks_per_node_, machine_.name));
    }
  }

  /// Bytes of data that the rank's node sends to others for a collective.
  double node_bytes(const RecordedWork& work) const {
    if (work.kind != WorkKind::collective || work.ranks < 2) return 0;
    const auto [operation, inside, groups] = placed(work);
    return crossing_bytes(machine_, operation, work.ranks, inside, static_cast<int>(size_of(work.dtype)),
                          work.full_bytes, config_.collectives == "nccl", groups,
                          config_.collectives == "messages");
  }

  double core_capacity() const { return on_cpu_ ? cores_ : 1; }
  double launch() const { return share_.launch_seconds; }
  const std::set<std::string>& notes() const { return notes_; }

  /// Seconds of a task beside its launch; the resources that it claims go to `claims`.
  double seconds(const RecordedWork& work, const std::string& lane, std::vector<Claim>& claims) {
    switch (work.kind) {
      case WorkKind::kernel:
        if (on_cpu_) claims.push_back({cores, threads_});
        if (lane == "host update" && !on_cpu_) return bytes(work) / machine_.host_bytes_per_second;
        return kernel_seconds(work) * slower_;
      case WorkKind::copy_to_host:
      case WorkKind::copy_from_host:
        return copy_seconds(work, lane, claims);
      case WorkKind::collective:
        return collective(work, claims);
      case WorkKind::disk_read:
      case WorkKind::disk_write:
        return disk_seconds(work, claims);
      case WorkKind::join:
      case WorkKind::mark:
        break;
    }
    return 0;
  }

 private:
  static double bytes(const RecordedWork& work) { return work.bytes_read + work.bytes_written; }

  const ProductTable& product_table(const GemmShape& product) const {
    const std::string layout = product.transpose_a ? "tn" : product.transpose_b ? "nt" : "nn";
    const ProductTable* any = nullptr;
    for (const ProductTable& table : share_.products) {
      if (table.dtype != product.dtype) continue;
      if (table.layout == layout) return table;
      any = &table;
    }
    if (any == nullptr) {
      throw ConfigurationError(fmt::format("the machine file of {} has no rates of {} products",
                                           machine_.name, name_of(product.dtype)));
    }
    return *any;
  }

  double kernel_seconds(const RecordedWork& work) {
    double seconds = 0;
    const GemmShape& product = work.gemm;
    if (product.m > 0) {
      const double m = static_cast<double>(product.m), n = static_cast<double>(product.n),
                   k = static_cast<double>(product.k);
      seconds = 2 * m * n * k / product_table(product).rate(m, n, k);
      if (work.name == "matmul") return seconds;
    }
    for (const KernelTable& table : share_.kernels) {
      if (table.name != work.name || table.dtype != config_.precision.compute) continue;
      return seconds + table.time.seconds(table.by == "operations" ? work.operations : bytes(work));
    }
    if (machine_.measured()) {
      notes_.insert(fmt::format("kernel {} was not measured: taken at the speed of memory", work.name));
    }
    // Bandwidth, or the rate of large products where the kernel is made of such (attention).
    const double moved = (product.m > 0 ? work.bytes_written : bytes(work)) / share_.memory_bytes_per_second;
    if (product.m > 0) return seconds + moved;
    double fastest = 0;
    for (const ProductTable& table : share_.products) {
      if (table.dtype == config_.precision.compute) fastest = std::max(fastest, table.rates.back());
    }
    return std::max(moved, fastest > 0 ? work.operations / fastest : 0.0);
  }

  double copy_seconds(const RecordedWork& work, const std::string& lane, std::vector<Claim>& claims) {
    const bool link = lane == "to host" || lane == "from host";
    if (!link && on_cpu_) return work.bytes_written / share_.memory_bytes_per_second;
    double rate = machine_.host_link.bytes_per_second;
    const double memory = work.bytes_written / rate;
    if (on_cpu_ && config_.debug.host_link_bytes_per_second > 0) {
      rate = std::min(rate, config_.debug.host_link_bytes_per_second);
    }
    const double seconds = machine_.host_link.latency_seconds + work.bytes_written / rate;
    if (on_cpu_) claims.push_back({cores, std::min(1.0, memory / seconds)});
    return seconds;
  }

  struct Placed {
    std::string operation;
    int inside;  ///< ranks of the group on a node
    int groups;  ///< that do the same at the same time on it
  };
  Placed placed(const RecordedWork& work) const {
    const bool all = work.ranks == ranks_;
    const int inside = all ? std::min(ranks_per_node_, work.ranks) : work.ranks_on_node;
    // Barriers are small. The other ranks of the node are in groups of their own.
    return {work.name == "barrier" ? "all_gather" : work.name, inside,
            all ? 1 : std::max(1, ranks_per_node_ / inside)};
  }

  double collective(const RecordedWork& work, std::vector<Claim>& claims) {
    if (work.ranks < 2) return 0;
    const auto element = static_cast<int>(size_of(work.dtype));
    const auto [operation, inside, groups] = placed(work);
    if (on_cpu_) {
      if (const CollectiveTable* table = nearest_table(machine_, operation, inside, element)) {
        claims.push_back({cores, std::min(table->cores, 1.0)});
        if (table->ranks != inside) {
          notes_.insert(
              fmt::format("{} of {} ranks on a node extrapolated from {}", operation, inside, table->ranks));
        }
      }
    }
    return collective_seconds(machine_, network_, operation, work.ranks, inside, element, work.full_bytes,
                              config_.collectives == "nccl", groups, config_.collectives == "messages");
  }

  double disk_seconds(const RecordedWork& work, std::vector<Claim>& claims) const {
    if (!machine_.disk) {
      throw ConfigurationError(
          fmt::format("offload to nvme, but the machine file of {} has no disk; calibrate with --dir DIR",
                      machine_.name));
    }
    if (bytes(work) == 0) return 0;
    claims.push_back({disk_resource, 1});
    const bool read = work.kind == WorkKind::disk_read && machine_.disk_read_bytes_per_second > 0;
    return machine_.disk->latency_seconds +
           bytes(work) / (read ? machine_.disk_read_bytes_per_second : machine_.disk->bytes_per_second);
  }

  const Machine& machine_;
  const Config& config_;
  int ranks_;
  int ranks_per_node_;
  LinkRate network_;
  int sharing_;
  const ComputeShare& share_;
  bool on_cpu_ = true;
  double cores_ = 1, threads_ = 1, slower_ = 1;
  std::set<std::string> notes_;
};

/// A graph of tasks from recorded work, and what each of them is.
struct Graph {
  std::vector<SimulatedTask> tasks;
  std::vector<const RecordedWork*> work;  ///< by task; null: a launch
  std::vector<double> launch;             ///< by task: seconds of it that only start a kernel
  std::vector<double> node_bytes;         ///< by task: data that the node sends to others
  std::vector<bool> ordered;
  int compute_lane = 0;
};

Graph graph_of(const WorkRecorder& recorder, Costs& costs) {
  Graph graph;
  const auto& lanes = recorder.lanes();
  for (const detail::RecordedLane& lane : lanes) graph.ordered.push_back(lane.ordered);
  if (!recorder.inline_compute()) {
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      if (lanes[i].name == "compute") graph.compute_lane = static_cast<int>(i);
    }
  }
  std::vector<int> task_of(recorder.work().size(), -1);
  bool begun = false;
  for (std::size_t i = 0; i < recorder.work().size(); ++i) {
    const RecordedWork& work = recorder.work()[i];
    begun |= work.kind == WorkKind::mark;
    if (!begun) continue;  // the settled part has passed
    SimulatedTask task;
    task.lane = work.lane;
    for (const int before : work.after) {
      if (task_of[static_cast<std::size_t>(before)] >= 0) {
        task.after.push_back(task_of[static_cast<std::size_t>(before)]);
      }
    }
    task.seconds = costs.seconds(work, lanes[static_cast<std::size_t>(work.lane)].name, task.claims);
    double launch = 0;
    if (work.kind == WorkKind::kernel) {
      launch = costs.launch();
      if (recorder.inline_compute() || work.lane != graph.compute_lane) {
        task.seconds += launch;
      } else {
        // The host issues it first, and runs ahead of the device.
        SimulatedTask issue;
        issue.lane = WorkRecorder::host_lane;
        issue.seconds = launch;
        launch = 0;
        task.after.push_back(static_cast<int>(graph.tasks.size()));
        graph.tasks.push_back(std::move(issue));
        graph.work.push_back(nullptr);
        graph.launch.push_back(0);
        graph.node_bytes.push_back(0);
      }
    }
    task_of[i] = static_cast<int>(graph.tasks.size());
    graph.tasks.push_back(std::move(task));
    graph.work.push_back(&work);
    graph.launch.push_back(launch);
    graph.node_bytes.push_back(costs.node_bytes(work));
  }
  return graph;
}

Role role_of(const RecordedWork* work, const std::string& lane) {
  if (work == nullptr) return Role::other;
  switch (work->kind) {
    case WorkKind::collective:
      if (work->detail == "step" || work->full_bytes == 0) return Role::other;
      // Gradients as int8 blocks, and matrices that an optimizer updates whole, go from every rank to every
      // other.
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
    case WorkKind::join:
    case WorkKind::mark:
      break;
  }
  return Role::other;
}

/// The last step of a simulated run, taken apart.
class Analysis {
 public:
  Analysis(const WorkRecorder& recorder, const Graph& graph, const std::vector<SimulatedSpan>& spans)
      : recorder_(recorder), graph_(graph), spans_(spans) {
    bool behind = false;
    for (std::size_t i = 0; i < graph.tasks.size(); ++i) {
      const RecordedWork* work = graph.work[i];
      behind_boundary_.push_back(behind);
      if (work == nullptr || work->kind != WorkKind::mark) continue;
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

  /// Bytes that a node sends for the gathers and reductions of the last step.
  double node_bytes() const {
    double bytes = 0;
    for (int i = begin_task_ + 1; i < end_task_; ++i) {
      const Role of = role(i);
      if (of == Role::gather || of == Role::reduce) bytes += graph_.node_bytes[static_cast<std::size_t>(i)];
    }
    return bytes;
  }

  StepBreakdown breakdown() const {
    StepBreakdown step;
    double at = begin_;
    for (std::size_t i = 0; i < graph_.tasks.size(); ++i) {
      if (graph_.tasks[i].lane != graph_.compute_lane) continue;
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
      const std::string lane = lane_name(static_cast<int>(i));
      trace.span(lane == "host" && recorder_.inline_compute() ? "compute" : lane, name(static_cast<int>(i)),
                 std::max(span.begin, begin_) - begin_, std::min(span.end, end_) - begin_);
    }
  }

 private:
  const std::string& lane_name(int task) const {
    return recorder_.lanes()[static_cast<std::size_t>(graph_.tasks[static_cast<std::size_t>(task)].lane)]
        .name;
  }
  Role role(int task) const { return role_of(graph_.work[static_cast<std::size_t>(task)], lane_name(task)); }
  std::string name(int task) const {
    const RecordedWork* work = graph_.work[static_cast<std::size_t>(task)];
    if (work == nullptr) return "launch";
    if (work->kind == WorkKind::kernel) return work->name;
    const Role of = role(task);
    if (work->kind == WorkKind::collective && of == Role::other) return work->name + " (control)";
    if (work->name.empty()) return role_text(of);
    return work->name;
  }

  /// The stream that computes stands still from `from` to `to`, for work that ends with `cause`.
  void wait(StepBreakdown& step, double from, double to, int cause) const {
    while (cause >= 0 && to > from) {
      const SimulatedSpan& span = spans_[static_cast<std::size_t>(cause)];
      const double begin = std::max(from, span.begin);
      if (span.end < to) step.other += to - span.end;
      const double end = std::min(to, span.end);
      if (end > begin) add(step, role(cause), end - begin);
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
      case Role::offload:
        step.exposed_offload += seconds;
        return;
      case Role::compute:
      case Role::other:
        break;
    }
    step.other += seconds;
  }

  const WorkRecorder& recorder_;
  const Graph& graph_;
  const std::vector<SimulatedSpan>& spans_;
  double begin_ = 0, end_ = 0;
  std::vector<bool> behind_boundary_;  ///< by task: issued by Engine::step()
  int begin_task_ = -1, end_task_ = -1;
};

struct Simulated {
  StepBreakdown step;
  double node_bytes = 0;
  std::vector<std::pair<std::string, double>> critical_path;
  std::vector<std::string> notes;
};

Simulated simulate_step(const ProjectionRequest& request, TraceRecorder* trace) {
  Config config = request.plan.config;
  validate_config(config, request.plan.ranks);
  Costs costs(request, config);
  const std::shared_ptr<WorkRecorder> recorder = record_steps(request.plan, simulated_steps);
  const Graph graph = graph_of(*recorder, costs);
  std::vector<double> capacities(resources, 1.0);
  capacities[cores] = costs.core_capacity();
  const std::vector<SimulatedSpan> spans = simulate(graph.tasks, graph.ordered, capacities);
  const Analysis analysis(*recorder, graph, spans);
  if (trace != nullptr) analysis.record(*trace);
  return {analysis.breakdown(),
          analysis.node_bytes(),
          analysis.critical_path(),
          {costs.notes().begin(), costs.notes().end()}};
}

/// The same with another number of micro-batches, and of ranks.
ProjectionRequest with(const ProjectionRequest& request, std::int64_t micro_batches, int ranks) {
  ProjectionRequest changed = request;
  Config effective = request.plan.config;
  validate_config(effective, request.plan.ranks);
  // The order of a sum takes no time, and a last round that is short as much as a full one.
  changed.plan.config.reduction = effective.reduction;
  changed.plan.config.world_size_invariant = false;
  changed.plan.config.micro_batch_size = effective.micro_batch_size;
  changed.plan.config.accumulation_steps = micro_batches;
  if (ranks != request.plan.ranks) {
    changed.plan.ranks = ranks;
    changed.plan.rank = 0;
    // The mesh is for the others, and so are DeepSpeed's keys for its axes.
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
          a.exposed_offload + times * b.exposed_offload,
          a.optimizer + times * b.optimizer,
          a.other + times * b.other};
}

/// Whole steps, however many micro-batches they have.
Simulated whole_step(const ProjectionRequest& request, TraceRecorder* trace) {
  Config config = request.plan.config;
  validate_config(config, request.plan.ranks);
  const std::int64_t micro_batches = config.accumulation_steps;
  const std::int64_t run = std::min(micro_batches, most_micro_batches);
  Simulated simulated = simulate_step(with(request, run, request.plan.ranks), trace);
  if (micro_batches > run) {
    const Simulated fewer = simulate_step(with(request, run - 1, request.plan.ranks), nullptr);
    const StepBreakdown one = sum(simulated.step, fewer.step, -1);
    const auto more = static_cast<double>(micro_batches - run);
    simulated.step = sum(simulated.step, one, more);
    simulated.node_bytes += more * (simulated.node_bytes - fewer.node_bytes);
    simulated.notes.push_back(
        fmt::format("{} micro-batches from the simulation of {} and {}", micro_batches, run, run - 1));
  }
  return simulated;
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
    // The same rank with the same share of its node, and nobody to talk to.
    ProjectionRequest alone = with(request, config.accumulation_steps, 1);
    const int on_node = request.plan.ranks_per_node > 0 ? request.plan.ranks_per_node : request.plan.ranks;
    alone.sharing = std::min(on_node, request.plan.ranks);
    const StepBreakdown step = whole_step(alone, nullptr).step;
    // Ranks of the axes `context` and `tensor` share the samples of one data rank.
    const Mesh mesh = config.mesh_of(request.plan.ranks);
    projection.efficiency =
        step.total() / projection.step.total() / mesh.size(MeshAxis::tensor) / mesh.size(MeshAxis::context);
    projection.alone_optimizer = step.optimizer;
  }
  return projection;
}

}  // namespace tranche::planner
