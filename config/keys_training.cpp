#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "config/keys.h"
#include "tranche/optim/rules.h"

namespace tranche::detail {
namespace {

using enum ValueKind;

// clang-format off
constexpr ConfigKey keys[] = {
    // Batch, steps, clipping.
    automatic("train_batch_size", integer, "derived", "samples of a step over all ranks"),
    automatic("train_micro_batch_size_per_gpu", integer, "derived, else 1",
              "samples of a micro-batch on one rank"),
    automatic("gradient_accumulation_steps", integer, "derived, else 1", "micro-batches of a step"),
    automatic("gradient_clipping", number, "0", "largest global gradient norm; 0 is off, auto is 1.0"),
    automatic("steps_per_print", integer, "null",
              "steps between progress lines; null leaves it to the program"),
    honoured("wall_clock_breakdown", boolean, "false", "a line of times with each progress line; forward and backward in the report"),
    automatic("communication_data_type", text, "the compute dtype",
              "dtype of gradients between ranks: fp32, bf16 or fp16"),
    block_of("data_types", "dtypes"),
    automatic("data_types.grad_accum_dtype", text, "\"fp32\"", "dtype of the reduced gradient: fp32 or bf16"),
    refused("data_types.param_dtype", "null",
            "the dtype of parameters follows from bf16.enabled and fp16.enabled"),
    refused("data_types.buffer_dtype", "null", "models keep no buffers beside their parameters"),

    // Precision.
    block_of("bf16", "bf16 training"),
    automatic("bf16.enabled", boolean, "false", "compute in bf16; neither this nor fp16 is fp32; auto is true unless fp16 is on"),
    no_meaning("bf16.immediate_grad_update", "gradients are always added to the accumulator at once"),
    no_meaning("bf16.check_grad_overflow", "gradients are checked in every dtype and stage"),
    refused("bf16.bf16_master_weights_and_grads", "false",
            "set tranche.master to \"none\" and data_types.grad_accum_dtype to \"bf16\" instead"),
    refused("bf16.bf16_optimizer_states", "false", "set tranche.moments to \"bf16\" instead"),
    block_of("bfloat16", "older name of bf16"),
    automatic("bfloat16.enabled", boolean, "false", "older name of bf16.enabled"),
    block_of("fp16", "fp16 training with loss scaling"),
    automatic("fp16.enabled", boolean, "false", "compute in fp16"),
    automatic("fp16.loss_scale", number, "0", "fixed loss scale; 0 is dynamic"),
    automatic("fp16.initial_scale_power", integer, "16", "the dynamic scale starts at 2 to this power"),
    automatic("fp16.loss_scale_window", integer, "1000", "clean steps after which the scale doubles"),
    automatic("fp16.hysteresis", integer, "2", "overflows until the scale halves"),
    automatic("fp16.consecutive_hysteresis", boolean, "false", "every clean step refills the hysteresis"),
    automatic("fp16.min_loss_scale", number, "1", "an overflow at this scale ends the run"),
    no_meaning("fp16.auto_cast", "models read token numbers, which need no cast"),
    no_meaning("fp16.fused_mode", "there is one fused update"),
    refused("fp16.fp16_master_weights_and_grads", "false", "with fp16 weights master weights are fp32"),

    // Optimizer.
    block_of("optimizer", "the update rule"),
    honoured("optimizer.type", text, "\"AdamW\"", "one of the optimizers below, in any case of letters"),
    no_meaning("optimizer.legacy_fusion", "there is one fused update"),
    block_of("optimizer.params", "its parameters"),
    no_meaning("optimizer.params.torch_adam", "there is one Adam, bit-equal on every device; without weight_decay it is 0 (in PyTorch 0.01)"),
    no_meaning("optimizer.params.fused", "the update is always fused"),
    no_meaning("optimizer.params.foreach", "the update is always fused"),
    no_meaning("optimizer.params.set_grad_none", "gradients are freed by the engine"),
    refused("optimizer.params.bias_correction", "true", "moments are always bias-corrected"),
    refused("optimizer.params.eps_inside_sqrt", "false", "eps is added to the root"),
    refused("optimizer.params.maximize", "false", "losses are minimised"),
    refused("optimizer.params.max_grad_norm", "0", "write gradient_clipping at the top level instead"),

    // Scheduler.
    block_of("scheduler", "the learning rate over the steps"),
    honoured("scheduler.type", text, "\"constant\"",
             "constant, WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, WSD or InverseSquareRoot"),
    block_of("scheduler.params", "its parameters"),
    automatic("scheduler.params.warmup_min_lr", number, "0", "WarmupLR, WarmupDecayLR"),
    automatic("scheduler.params.warmup_max_lr", number, "the optimizer's lr", "WarmupLR, WarmupDecayLR"),
    automatic("scheduler.params.warmup_num_steps", integer, "1000",
              "WarmupLR, WarmupDecayLR, WarmupCosineLR"),
    automatic("scheduler.params.warmup_type", text, "\"log\"", "log or linear; the same three"),
    automatic("scheduler.params.total_num_steps", integer, "the steps of the run",
              "WarmupDecayLR, WarmupCosineLR"),
    automatic("scheduler.params.warmup_min_ratio", number, "0", "WarmupCosineLR"),
    automatic("scheduler.params.cos_min_ratio", number, "0.0001", "WarmupCosineLR"),
    honoured("scheduler.params.cycle_min_lr", number, "required", "OneCycle"),
    honoured("scheduler.params.cycle_max_lr", number, "required", "OneCycle"),
    honoured("scheduler.params.decay_lr_rate", number, "0", "OneCycle"),
    honoured("scheduler.params.cycle_first_step_size", integer, "2000", "OneCycle"),
    honoured("scheduler.params.cycle_second_step_size", integer, "the first's", "OneCycle"),
    honoured("scheduler.params.cycle_first_stair_count", integer, "0", "OneCycle"),
    honoured("scheduler.params.cycle_second_stair_count", integer, "the first's", "OneCycle"),
    honoured("scheduler.params.decay_step_size", integer, "0", "OneCycle"),
    honoured("scheduler.params.cycle_momentum", boolean, "true",
             "OneCycle: cycles Adam's beta1; beta2 stays the optimizer's"),
    honoured("scheduler.params.cycle_min_mom", number, "0.8", "OneCycle"),
    honoured("scheduler.params.cycle_max_mom", number, "0.9", "OneCycle"),
    honoured("scheduler.params.decay_mom_rate", number, "0", "OneCycle"),
    honoured("scheduler.params.lr_range_test_min_lr", number, "0.001", "LRRangeTest: the first rate"),
    honoured("scheduler.params.lr_range_test_step_size", integer, "2000", "LRRangeTest: steps of an interval"),
    honoured("scheduler.params.lr_range_test_step_rate", number, "1", "LRRangeTest: the first rate's multiple that an interval adds"),
    honoured("scheduler.params.lr_range_test_staircase", boolean, "false", "LRRangeTest: once an interval instead of every step"),
    honoured("scheduler.params.num_warmup_steps", integer, "0", "WSD, InverseSquareRoot: steps of linear warm-up"),
    honoured("scheduler.params.num_stable_steps", integer, "what the others leave of the run", "WSD: steps at the full rate"),
    honoured("scheduler.params.num_decay_steps", integer, "required", "WSD: steps of decay"),
    honoured("scheduler.params.min_lr_ratio", number, "0", "WSD: the share of the rate after the decay"),
    honoured("scheduler.params.decay_type", text, "\"cosine\"", "WSD: cosine, linear or 1-sqrt"),
    honoured("scheduler.params.timescale", integer, "num_warmup_steps, else 10000", "InverseSquareRoot: the rate is that of sqrt(timescale / step), shifted so that it begins at the full rate"),
    refused("scheduler.params.last_batch_iteration", "-1", "the step to go on from is the checkpoint's"),

    // ZeRO: what is honoured.
    block_of("zero_optimization", "what is sharded and how it moves"),
    honoured("zero_optimization.stage", integer, "0",
             "0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters are sharded"),
    automatic("zero_optimization.overlap_comm", boolean, "true",
              "collectives behind compute; never changes a bit"),
    automatic("zero_optimization.reduce_bucket_size", integer, "500000000", "elements reduced at once"),
    automatic("zero_optimization.allgather_bucket_size", integer, "500000000", "elements gathered at once"),
    automatic("zero_optimization.stage3_prefetch_bucket_size", integer, "50000000",
              "elements prefetched in stage 3 beyond the next unit, which always is where tranche.depth is above 1"),
    automatic("zero_optimization.prefetch_bucket_size", integer, "50000000",
              "other name of stage3_prefetch_bucket_size"),
    automatic("zero_optimization.stage3_max_live_parameters", integer, "1000000000",
              "elements gathered at once in stage 3; bounds what is prefetched beyond the next unit"),
    automatic("zero_optimization.max_live_parameters", integer, "1000000000",
              "other name of stage3_max_live_parameters"),
    automatic("zero_optimization.stage3_param_persistence_threshold", integer, "0",
              "a unit's tensors stay whole on every rank in stage 3 where each has at most so many elements; 0 is none"),
    automatic("zero_optimization.param_persistence_threshold", integer, "0",
              "other name of stage3_param_persistence_threshold"),
    automatic("zero_optimization.stage3_model_persistence_threshold", integer, "9223372036854775807",
              "most elements that stay whole so, in the order of units"),
    automatic("zero_optimization.model_persistence_threshold", integer, "9223372036854775807",
              "other name of stage3_model_persistence_threshold"),

    // Tranche's own.
    block_of("tranche", "what DeepSpeed's schema has no key for"),
    automatic("tranche.reduction", text, "\"auto\"",
              "when gradients are reduced: boundary, micro_batch, or auto (boundary for stages 0-1 and one rank)"),
    honoured("tranche.world_size_invariant", boolean, "false",
             "the same bits for every number of ranks: train_batch_size / train_micro_batch_size_per_gpu micro-batches a step, added up one by one"),
    honoured("tranche.gradient_noise_scale", boolean, "false",
             "steps report the noise of their gradient as a batch size (McCandlish et al., 2018); takes at least two micro-batches or ranks that are reduced apart"),
    honoured("tranche.gradient_noise_smoothing", number, "0.9", "what a step leaves of the averages whose ratio is reported; in 0..1, 0: each step by itself"),
    honoured("tranche.mesh", text, "\"shard=*\"",
             "axes of the ranks with their sizes, slowest first: replicate (copies of the sharded state), pipeline (stages of layers) and shard; * takes the rest"),
    honoured("tranche.replicate", text, "\"all\"",
             "what each replica of the mesh has a copy of: all (HSDP, MiCS), or parameters, where gradients and optimizer state are sharded over all ranks (hpZ; stages 1-3)"),
    honoured("tranche.replica_sum", text, "\"micro_batch\"",
             "when replicas add up gradients that are reduced each micro_batch: then too, or once a step (other bits)"),
    honoured("tranche.tie_sum", text, "\"together\"",
             "how the gradients of a tensor with several uses (a tied token table) are added: together, or by_use: "
             "each use's is rounded by itself and they are added in order, which a mesh with a pipeline always does"),
    honoured("tranche.pipeline_cuts", any, "\"balanced\"",
             "where a pipeline cuts the model: balanced (the least largest share of the operations), parameters (the "
             "same of the parameters), equal (as many units a stage), or a list with the number of the first unit of each stage but the first; the embedding "
             "is 0, the head the last"),
    honoured("tranche.pipeline_schedule", text, "\"1f1b\"",
             "the order of a pipeline's work: 1f1b (one forward, one backward; as many micro-batches are open as there "
             "are stages), or afab (all forward, all backward, as GPipe has it)"),
    automatic("tranche.reduction_group", integer, "ranks on a node",
              "ranks in the inner groups of the fixed-order sum; recorded in checkpoints; 0 is auto"),
    automatic("tranche.depth", integer, "2", "units gathered at once in stage 3, the one in use included"),
    honoured("tranche.gather_for", text, "\"use\"",
             "use: stage 3 frees a unit after each use and gathers it again; step: it stays from its first use in a "
             "step to the step's end, gathered once"),
    honoured("tranche.communication_timeout", number, "300", "seconds until a collective counts as hung"),
    honoured("tranche.progress", text, "\"thread\"",
             "thread: one thread a rank makes all MPI calls; inline: the caller's thread does"),
    automatic("tranche.threads", integer, "cores / ranks", "compute threads of a rank; 0 is auto, which is at most SLURM_CPUS_PER_TASK"),
    honoured("tranche.device_memory", size, "null", "most bytes of device memory a rank may take"),
    honoured("tranche.host_memory", size, "null",
             "most bytes of host memory that a rank may take for what it offloads, saves and sends"),
    honoured("tranche.nvme_space", size, "null", "most bytes of a rank's swap file"),
    automatic("tranche.offload_tile", integer, "1048576",
              "elements of offloaded state that are updated at a time, a multiple of 4096"),
    automatic("tranche.io_engine", text, "\"automatic\"",
              "automatic: io_uring, or threads where the kernel refuses it; uring; threads"),
    honoured("tranche.workspace", size, "8MiB, on GPUs 32MiB", "workspace of kernels; 0 is the default"),
    honoured("tranche.communication_slab", size, "8MiB, more beyond 4096 ranks",
             "communication buffers of a communicator; 0 is the default"),
    honoured("tranche.seed", integer, "1234", "of initial weights, data order and dropout"),
    honoured("tranche.frozen", texts, "[]", "name patterns (* and ?) of tensors that are not trained"),
    block_of("tranche.lora", "low-rank adapters beside linear layers; all else is frozen (docs/guides/fine-tuning.md)"),
    honoured("tranche.lora.rank", integer, "0", "of the adapters; 0 is none"),
    honoured("tranche.lora.alpha", number, "the rank", "what an adapter adds is multiplied by alpha / rank"),
    honoured("tranche.lora.dropout", number, "0", "of the adapters' inputs"),
    honoured("tranche.lora.targets", texts, "[\"all-linear\"]",
             "names of linear layers or their ends (q_proj), with * and ?; all-linear is all but the head"),
    honoured("tranche.lora.rslora", boolean, "false", "multiply by alpha / sqrt(rank) instead"),
    honoured("tranche.lora.save_base", boolean, "false", "checkpoints hold the frozen weights too"),
    refused("tranche.lora.use_dora", "false", "DoRA (weight-decomposed adapters) is not part of this version"),
    refused("tranche.lora.load_in_4bit", "false",
            "QLoRA (a base in 4 bits) is not part of this version: the frozen base is kept in the compute dtype; "
            "shard it (stage 3) or offload it (offload_param)"),
    refused("tranche.lora.load_in_8bit", "false",
            "QLoRA (a base in 8 bits) is not part of this version: the frozen base is kept in the compute dtype; "
            "shard it (stage 3) or offload it (offload_param)"),
    refused("tranche.lora.quantization", "null",
            "QLoRA (a quantised base) is not part of this version: the frozen base is kept in the compute dtype; "
            "shard it (stage 3) or offload it (offload_param)"),
    honoured("tranche.decay", texts, "[]", "name patterns of tensors that decay; before parameter_groups"),
    honoured("tranche.no_decay", texts, "[]", "name patterns of tensors that do not decay; after decay"),
    honoured("tranche.parameter_groups", any, "[]",
             "list of rules; later ones win. Without a rule tensors with "
             "fewer than two dimensions do not decay"),
    honoured("tranche.parameter_groups[].pattern", text, "required", "name pattern"),
    honoured("tranche.parameter_groups[].learning_rate_factor", number, "1", "multiplies the learning rate"),
    honoured("tranche.parameter_groups[].decay", boolean, "by dimensions", "whether weight decay applies"),
    honoured("tranche.parameter_groups[].weight_decay", number, "the optimizer's",
             "weight decay of these tensors, which then decay whatever their dimensions"),
    honoured("tranche.parameter_groups[].learning_rate", number, "the schedule's",
             "learning rate of these tensors in every step, in place of the schedule's; the factor multiplies it too"),
    honoured("tranche.parameter_groups[].betas", numbers, "the optimizer's",
             "of rules that have betas; also in place of a beta1 that OneCycle cycles"),
    honoured("tranche.parameter_groups[].eps", number, "the optimizer's", "of rules that have eps"),
    automatic("tranche.collectives", text, "\"auto\"",
              "auto or ours: the fixed-order sum; messages, shared: the same bits, and ranks of a node send each other "
              "data or read each other's memory (auto takes the quicker by size); nccl: NCCL reduces, and promise 1 "
              "(equal bits) rests; GPUs only"),
    automatic("tranche.device_transport", text, "\"auto\"",
              "how GPU memory travels: nccl (one rank a GPU), staged (through host memory), shared (threads of one "
              "process); auto takes the quickest that serves all ranks"),
    honoured("tranche.maximum_consecutive_skips", integer, "100", "skipped steps in a row that end the run"),
    honoured("tranche.activation_checkpointing", boolean, "false",
             "keep block inputs only, compute blocks again"),
    honoured("tranche.checkpoint_every", integer, "1", "blocks between kept inputs; up to tranche.depth of them stay gathered from recomputation to backward"),
    honoured("tranche.vocabulary_chunk", integer, "0", "columns of the head whose logits exist at once, in blocks of 4096; 0 is all"),
    honoured("tranche.moments", text, "\"fp32\"", "format of an optimizer's states: fp32, bf16, or block8 (8 bits in blocks of 256 with a scale; tensors below 4096 elements in fp32)"),
    honoured("tranche.master", text, "\"fp32\"", "format of master weights in bf16 training: fp32; split, which keeps beside a bf16 weight the 16 bits that make the fp32 number; or none"),
    honoured("tranche.stochastic_rounding", boolean, "false",
             "with tranche.master none: updated weights are rounded up or down at random, so that the mean is exact"),
    honoured("tranche.save_buffer", boolean, "false",
             "take the host memory of asynchronous saves at the start, not at the first save"),
    honoured("tranche.total_steps", integer, "the program's --steps",
             "length of the run for schedules that end"),
    block_of("tranche.debug", "for finding faults"),
    honoured("tranche.debug.poison_memory", boolean, "false",
             "fill step memory with NaN when acquired and released"),
    honoured("tranche.debug.host_link_bandwidth", size, "0",
             "bytes per second between device and host tier on the CPU device; 0 is no bound"),
    honoured("tranche.debug.plan_memory", boolean, "true", "pack the step's buffers after it was recorded"),
    honoured("tranche.debug.ranks_per_host", integer, "0",
             "so many consecutive ranks are taken to share a node, and others not; 0 is as they do"),
    honoured("tranche.debug.compare_calls", boolean, "false",
             "compare the order of the ranks' gathers and reductions in every step; stages 0 to 2 allow any, as they send nothing for a gather, and stage 3 does not"),
};
// clang-format on

}  // namespace

namespace {

std::string default_of(const RuleOption& option) {
  switch (option.kind) {
    case RuleOption::Kind::flag:
      return option.first != 0 ? "true" : "false";
    case RuleOption::Kind::pair:
      return fmt::format("[{}, {}]", option.first, option.second);
    case RuleOption::Kind::choice:
      return fmt::format("\"{}\"", option.choices.front());
    case RuleOption::Kind::number:
      break;
  }
  return std::isfinite(option.first) ? fmt::format("{}", option.first) : "none";
}

/// A key of optimizer.params as the rules that have it say it.
struct RuleKey {
  std::string path, default_value, text;
  RuleOption::Kind kind = RuleOption::Kind::number;
};

/// The types of a rule, as "AdamW, Adam".
std::string types_of(const UpdateRule& rule) {
  return fmt::format("{}", fmt::join(rule.types, ", "));
}

std::deque<RuleKey> keys_of_rules() {
  std::deque<RuleKey> keys;
  std::set<const UpdateRule*> seen;
  RuleKey& rate = keys.emplace_back();
  rate.path = "optimizer.params.lr";
  rate.default_value = "0.001";
  rate.text = "learning rate where no schedule sets it";
  for (const RuleType& type : rule_types()) {
    const UpdateRule& rule = *type.rule;
    if (!seen.insert(&rule).second) continue;
    if (rule.learning_rate != 0.001) {
      rate.text += fmt::format("; {} in {}", rule.learning_rate, types_of(rule));
    }
    for (const RuleOption& option : rule.options) {
      const std::string path = "optimizer.params." + std::string(option.name);
      const auto known =
          std::find_if(keys.begin(), keys.end(), [&](const RuleKey& key) { return key.path == path; });
      const bool first = known == keys.end();
      RuleKey& key = first ? keys.emplace_back() : *known;
      const std::string own = default_of(option);
      if (first) {
        key.path = path;
        key.default_value = own;
        key.kind = option.kind;
      }
      key.text += fmt::format("{}{}{}: {}", first ? "" : "; ", types_of(rule),
                              own == key.default_value ? "" : " (" + own + ")", option.meaning);
    }
  }
  return keys;
}

}  // namespace

std::span<const ConfigKey> training_keys() {
  static const std::deque<RuleKey> rules = keys_of_rules();
  static const std::vector<ConfigKey> all = [] {
    std::vector<ConfigKey> result;
    for (const ConfigKey& key : keys) {
      result.push_back(key);
      if (key.path != "optimizer.params") continue;
      for (const RuleKey& of_rule : rules) {
        const ValueKind kind = of_rule.kind == RuleOption::Kind::flag     ? boolean
                               : of_rule.kind == RuleOption::Kind::pair   ? numbers
                               : of_rule.kind == RuleOption::Kind::choice ? text
                                                                          : number;
        // Hugging Face writes "auto" for these.
        constexpr std::string_view automatic_names[] = {"lr", "betas", "eps", "weight_decay", "momentum"};
        const std::string_view name = std::string_view(of_rule.path).substr(of_rule.path.rfind('.') + 1);
        const bool may_be_auto = std::find(std::begin(automatic_names), std::end(automatic_names), name) !=
                                 std::end(automatic_names);
        result.push_back(may_be_auto ? automatic(of_rule.path, kind, of_rule.default_value, of_rule.text)
                                     : honoured(of_rule.path, kind, of_rule.default_value, of_rule.text));
      }
    }
    return result;
  }();
  return all;
}

}  // namespace tranche::detail
