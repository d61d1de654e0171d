#pragma once
/// The engine's configuration, and its parser for DeepSpeed's JSON. docs/reference/configuration.md lists
/// every key.

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/config/lora.h"
#include "tranche/config/monitor.h"
#include "tranche/config/offload.h"
#include "tranche/config/precision.h"
#include "tranche/optim/loss_scaler.h"
#include "tranche/optim/optimizer.h"
#include "tranche/optim/parameter_groups.h"
#include "tranche/optim/rules.h"
#include "tranche/optim/schedule.h"
#include "tranche/partition/mesh.h"

namespace tranche {

/// The time of gradient reduction. boundary: once a step, after each rank has accumulated its own gradients;
/// micro_batch: after every micro-batch, accumulated in the owner's shard. automatic: boundary for stages 0-1
/// and for one rank, micro_batch for stages 2-3.
enum class ReductionPolicy : std::uint8_t { automatic, boundary, micro_batch };
std::string_view name_of(ReductionPolicy policy);

/// The state of which every replica of a mesh keeps a copy, sharded within the replica. all: parameters,
/// gradients and optimizer state (HSDP, MiCS); parameters: only the parameters, while gradients and optimizer
/// state are sharded over all ranks (hpZ).
enum class Replicate : std::uint8_t { all, parameters };
std::string_view name_of(Replicate replicate);

/// How often gradients are summed over the replicas if a replica reduces each micro-batch. micro_batch: with
/// every reduction, which gives the same bits as one group of all ranks; step: once a step.
enum class ReplicaSum : std::uint8_t { micro_batch, step };
std::string_view name_of(ReplicaSum sum);
/// How the gradients of a tensor are summed if several uses of its unit read it, such as a token table that
/// is embedding and head. together: kernels add to one buffer. by_use: each use has its own gradient, which
/// is rounded when it is sent; they are added in the order of the uses. Each stage of a pipeline holds one
/// use, so pipelines always add by use; without a pipeline `by_use` gives the same bits as a pipeline.
enum class TieSum : std::uint8_t { together, by_use };
std::string_view name_of(TieSum sum);
/// How a pipeline is cut into stages: so that the largest share of the operations (balanced) or of the
/// parameters is as small as possible, with an equal number of units a stage (equal), or as in
/// Config::pipeline_begins (listed).
enum class PipelineCuts : std::uint8_t { balanced, equal, parameters, listed };
std::string_view name_of(PipelineCuts cuts);

/// How sums over the ranks of the mesh axis `tensor` are computed. rank_order: each rank computes its partial
/// sum, and the partial sums are added in fp32, in rank order. chain: each rank continues the fp32 sum of the
/// rank before it, which has the same bits as one rank, and takes as long as one rank.
enum class TensorSums : std::uint8_t { rank_order, chain };
std::string_view name_of(TensorSums sums);

/// How ranks of the mesh axis `context` exchange their parts of a sequence for attention. gather: each rank
/// gathers the keys and values of all. ulysses: an all-to-all exchanges parts of the sequence for parts of
/// the heads before attention, and another one reverses this after it.
enum class ContextExchange : std::uint8_t { gather, ulysses };
std::string_view name_of(ContextExchange exchange);

/// How long stage 3 keeps a unit gathered. use: until its handles are released; the next use gathers it
/// again. step: from its first use in a training step until the step's gradients are complete, so that a step
/// gathers it once. Evaluation and inference gather for use.
enum class GatherFor : std::uint8_t { use, step };
std::string_view name_of(GatherFor gather_for);

/// When a step updates a unit. at_the_boundary: in step(), once the ranks have agreed on the gradients.
/// as_reduced: once its gradient is complete, while the backward pass of the step's last micro-batch goes on.
/// The bits are the same. A gradient that is not finite then ends the engine, where it would be skipped at
/// the boundary.
enum class UpdateTime : std::uint8_t { at_the_boundary, as_reduced };
std::string_view name_of(UpdateTime time);

/// The optimizer's type and parameters, as read; `make_optimizer()` builds it.
struct OptimizerConfig {
  std::string type = "AdamW";  ///< a name of rule_types()
  double learning_rate = 1e-3;
  RuleParameters parameters =
      {};  ///< the other keys of optimizer.params; an absent key has the rule's default
};

struct ScheduleConfig {
  std::string type = "constant";       ///< constant, WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle
  std::string parameters_json = "{}";  ///< the keys of scheduler.params; an absent key has its default
};

struct DebugConfig {
  bool poison_memory = false;  ///< fill step memory with NaN patterns on acquire and release
  double host_link_bytes_per_second =
      0;  ///< speed limit of the CPU device's copies between device and host tier; 0: unlimited
  bool plan_memory = true;  ///< pack the step's memory after the step was recorded
  int ranks_per_host = 0;   ///< treat this many consecutive ranks as one node; 0: the actual nodes
  /// Compare the order of gathers and reductions between the ranks in every step, even if nothing is sent.
  bool compare_calls = false;
};

/// A key that was accepted without effect, and the reason.
struct IgnoredKey {
  std::string key, reason;
  bool unknown = false;  ///< not in the table of known keys: a typing error, or a key of another program
};
/// "wandb: no meaning here: ...", "unknown key 'epochs': ignored".
std::string describe(const IgnoredKey& ignored);
/// All of them in one line: their number, and the names of the unknown ones.
std::string describe(const std::vector<IgnoredKey>& ignored);

struct Config {
  // Batch arithmetic: train_batch_size = micro_batch_size * accumulation_steps * data ranks. 0: computed from
  // the others.
  std::int64_t train_batch_size = 0;
  std::int64_t micro_batch_size = 1;
  std::int64_t accumulation_steps = 1;
  /// `tranche.world_size_invariant`: the results have the same bits on every number of ranks. A step has
  /// train_batch_size / micro_batch_size micro-batches. In round m data rank r computes number m * data_ranks
  /// + r, and the gradients are added one by one in the order of these numbers. accumulation_steps is the
  /// number of rounds.
  bool world_size_invariant = false;
  /// `tranche.gradient_noise_scale`: steps measure the noise of their gradient (StepResult::noise).
  bool gradient_noise_scale = false;
  double gradient_noise_smoothing = 0.9;  ///< the factor of the old averages in each step
  /// The number of data ranks that have a micro-batch in round `micro_batch`; these are the first ones. All
  /// data ranks have one, except that with world_size_invariant fewer may have one in the last round. Results
  /// of the other ranks in that round are not used.
  int ranks_with_samples(std::int64_t micro_batch, int data_ranks) const {
    if (!world_size_invariant) return data_ranks;
    const std::int64_t left = train_batch_size / micro_batch_size - micro_batch * data_ranks;
    return left < data_ranks ? static_cast<int>(left) : data_ranks;
  }
  /// The number of micro-batches that a data rank computes in a step.
  std::int64_t micro_batches_of(int data_rank, int data_ranks) const {
    return accumulation_steps - (data_rank < ranks_with_samples(accumulation_steps - 1, data_ranks) ? 0 : 1);
  }
  /// "8 = 1 per micro-batch x 2 accumulated x 4 ranks".
  std::string batch_text(int data_ranks) const;

  /// `tranche.mesh`: the axes of the ranks, in the format of Mesh::parse(); empty: all ranks shard.
  std::string mesh;
  /// The mesh of so many ranks, and its number of ranks with different samples. Both throw like
  /// Mesh::parse().
  Mesh mesh_of(int ranks) const { return Mesh::parse(mesh, ranks); }
  int data_ranks(int ranks) const { return mesh_of(ranks).data_ranks(); }
  /// `tranche.layout`, by the name of a dimension (TensorSpec::dimensions): "whole" keeps tensors whole along
  /// it on every rank of the axis `tensor`, "tensor" cuts them. The model decides for all other dimensions.
  std::map<std::string, std::string> layout;
  bool leaves_whole(std::string_view dimension) const {
    const auto found = layout.find(std::string(dimension));
    return found != layout.end() && found->second == "whole";
  }
  Replicate replicate = Replicate::all;  ///< stages 1 to 3
  ReplicaSum replica_sum = ReplicaSum::micro_batch;
  UpdateTime update = UpdateTime::at_the_boundary;  ///< `tranche.update`
  TieSum tie_sum = TieSum::together;  ///< validate_config() sets by_use where the mesh has a pipeline
  PipelineCuts pipeline_cuts = PipelineCuts::balanced;
  std::string pipeline_cuts_key = "tranche.pipeline_cuts";  ///< the key that set it, for messages
  std::vector<int> pipeline_begins;  ///< listed: the first unit of every stage except the first
  /// `tranche.pipeline_schedule`: afab, 1f1b, interleaved, breadth-first, zb-h1 or zb-v, or the path of a
  /// file with a schedule, which every rank reads.
  std::string pipeline_schedule = "1f1b";
  int pipeline_chunks = 0;  ///< `tranche.pipeline_chunks`, on a rank; 0: as many as the schedule has
  TensorSums tensor_sums = TensorSums::rank_order;
  ContextExchange context_exchange = ContextExchange::gather;
  int pipeline_stages = 0;  ///< DeepSpeed's pipeline.stages, which the mesh must have; 0: it is not given
  int tensor_ranks = 0;     ///< the same for DeepSpeed's tensor_parallel.autotp_size
  int context_ranks = 0;    ///< the same for DeepSpeed's sequence_parallel_size
  /// The DeepSpeed key that sets how many ranks share the parameters, and its value; empty: no key does.
  std::string shard_size_key;
  int shard_size = 0;
  int stage = 0;
  ReductionPolicy reduction = ReductionPolicy::automatic;
  int reduction_group = 0;  ///< 0: ranks on rank 0's node at the first start; resumes keep it
  bool overlap = true;      ///< `overlap_comm`: run collectives concurrently with compute
  std::int64_t reduce_bucket_elements = 500'000'000;
  std::int64_t allgather_bucket_elements = 500'000'000;
  /// Stage 3 gathers the next unit ahead of its use, within `depth`. These limit further prefetching:
  std::int64_t prefetch_elements = 50'000'000;     ///< most elements gathered ahead, beyond the next unit
  std::int64_t max_live_elements = 1'000'000'000;  ///< the most elements gathered at once, in use or ahead
  /// The most units gathered at once, including the one in use. With GatherFor::step it only limits
  /// prefetching.
  int depth = 2;
  GatherFor gather_for = GatherFor::use;  ///< `tranche.gather_for`; no effect below stage 3
  /// `stage3_param_persistence_threshold`: stage 3 keeps a unit's tensors whole on every rank when each of
  /// them has at most this many elements. 0: none.
  std::int64_t persistent_tensor_elements = 0;
  /// `stage3_model_persistence_threshold`: the most elements that are kept whole; units are taken in order.
  std::int64_t persistent_model_elements = std::numeric_limits<std::int64_t>::max();

  PrecisionConfig precision;
  /// `zero_quantized_gradients`, `zero_quantized_weights`: the ranks of a shard send these as int8 blocks
  /// (tranche/kernels/quantization.h) instead of in their dtype. Quantized weights are used only in training.
  bool quantized_gradients = false, quantized_weights = false;
  /// "bf16", "int8 blocks", "fp32, weights in training int8 blocks": the dtypes of communication.
  std::string communication_text() const;
  /// "compute bf16, communication bf16, accumulation fp32, master fp32, moments fp32"
  std::string dtypes_text() const;
  bool loss_scaling = false;  ///< fp16 only
  LossScalerOptions loss_scaler;
  double gradient_clipping = 1.0;  ///< 0: off, which is also the value for JSON without this key
  std::int64_t maximum_consecutive_skips = 100;

  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  /// The length of the run, for schedules that end and whose length is not configured: `tranche.total_steps`,
  /// or set by the program from --steps before make_schedule. 0: unknown.
  std::int64_t total_steps_hint = 0;
  std::vector<ParameterGroupRule> group_rules;
  std::vector<std::string> frozen;
  LoraConfig lora;  ///< an Engine adds the adapters to its model

  std::uint64_t seed = 1234;
  std::int64_t workspace_bytes = 0;    ///< 0: kernels::default_workspace_bytes of the device
  std::int64_t staging_bytes = 0;      ///< `tranche.communication_slab`; 0: default_staging_bytes()
  double communication_timeout = 300;  ///< seconds
  bool inline_progress = false;        ///< `tranche.progress: inline`
  std::string collectives = "auto";    ///< auto, ours, messages, shared: fixed-order sums; nccl: other bits
  std::string device_transport = "auto";  ///< auto, nccl, staged or shared: transport of GPU memory
  int threads = 0;                        ///< per rank; 0: cores / ranks on the node
  std::int64_t device_memory_limit = 0;   ///< bytes; 0: none

  bool activation_checkpointing = false;
  int checkpoint_every = 1;           ///< for recomputation: blocks between saved inputs
  std::int64_t vocabulary_chunk = 0;  ///< columns of the head whose logits are in memory at once; 0: all
  OffloadConfig offload;
  bool save_buffer = false;  ///< allocate the host memory of asynchronous saves at the start
  std::int64_t steps_per_print = 0;
  bool wall_clock_breakdown = false;
  /// `tensorboard`, `csv_monitor`: for the program; an Engine ignores them.
  MonitorConfig tensorboard, csv_monitor;
  DebugConfig debug;

  /// True when the JSON of this configuration set a compute dtype, or a clipping. Earlier versions saved bf16
  /// and 1.0 if it did not.
  bool precision_given = true, clipping_given = true;

  /// Keys of the JSON that have no meaning here or are unknown. Print them once, with `notes`.
  std::vector<IgnoredKey> ignored;
  /// Lines to print once: values that were replaced by others, and differences from what DeepSpeed does.
  std::vector<std::string> notes;

  /// The policy for so many ranks, with `automatic` resolved. One rank keeps all gradients in every stage, so
  /// that reducing each micro-batch would save no memory and cost a slot.
  ReductionPolicy effective_reduction(int ranks = 2) const {
    if (reduction != ReductionPolicy::automatic) return reduction;
    return stage >= 2 && ranks > 1 ? ReductionPolicy::micro_batch : ReductionPolicy::boundary;
  }
  /// The effective configuration as JSON text, every key with its value. Parsing it gives the same Config.
  std::string to_json() const;
};

/// Reads DeepSpeed's JSON (with Tranche's own keys under "tranche"). `ranks` completes the batch arithmetic.
/// All problems are reported in one ConfigurationError, a line each: unknown keys with the closest known one,
/// values out of range, keys that cannot be honoured with the reason, batch arithmetic that does not fit. If
/// the text is not JSON as core/relaxed_json.h reads it, or gives a key twice, only this is reported, with
/// its place. `overrides` are "key.path=value" strings that replace values of the file (the program's --set);
/// a value is JSON, or else text. Unknown keys of the top level that do not resemble a known one are listed
/// in Config::ignored; with `strict` they are errors as well. Errors name the source of the text as `origin`.
Config parse_config(std::string_view json_text, int ranks, const std::vector<std::string>& overrides = {},
                    bool strict = false, const std::string& origin = "configuration");
/// Reads a file, or a pipe until its end; errors name it.
Config load_config(const std::string& path, int ranks, const std::vector<std::string>& overrides = {},
                   bool strict = false);
/// Settings of a saved run that a configuration leaves out and whose defaults have changed since.
struct EarlierDefaults {
  bool bf16 = false;      ///< the run computed in bf16; this configuration sets no dtype, now fp32 by default
  bool clipping = false;  ///< the run clipped at 1.0; this configuration sets no clipping, now off by default
  bool any() const { return bf16 || clipping; }
};
/// `saved` is the effective configuration of the run (LoadResult::config).
EarlierDefaults earlier_defaults(const Config& config, std::string_view saved);

/// Throws ConfigurationError unless the fields of a Config made in C++ fit together; completes the batch.
void validate_config(Config& config, int ranks);

/// Throws ConfigurationError when the type or a parameter is invalid.
std::unique_ptr<Optimizer> make_optimizer(const Config& config);
/// Throws ConfigurationError when the type or a parameter is invalid, or when the schedule needs the end of
/// the run and neither total_num_steps nor total_steps_hint gives it.
std::unique_ptr<Schedule> make_schedule(const Config& config);
/// A line for each part of the schedule (warm-up, cycle, decay) that a run of `steps` steps does not reach,
/// and one if the schedule ends before the run; empty if they fit. make_schedule() must accept the schedule.
std::vector<std::string> schedule_notes(const Config& config, std::int64_t steps);

/// The largest value of `threads`. A larger one is taken for a typing error; starting so many would take
/// minutes.
inline constexpr int most_threads = 1024;

/// "1024", "32MiB", "1.5 GiB", "2GB" in bytes (K, M, G, T and KiB ... are powers of 1024, KB ... of 1000).
/// Throws ConfigurationError naming the accepted forms.
std::int64_t parse_byte_size(std::string_view text);

}  // namespace tranche
