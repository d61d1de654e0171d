// The axes of the covering arrays, and the combinations that are excluded.

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "combinations.h"
#include "tranche/partition/mesh.h"

namespace tranche::models {
namespace {

using Value = CombinationAxis::Value;

Value dtype(const char* capability, DataType compute) {
  return {capability, [compute](Combination& c) {
            c.config.precision.compute = c.config.precision.communication = compute;
            c.config.loss_scaling = compute == DataType::float16;
            c.config.loss_scaler.initial_scale = 1024;
            c.config.loss_scaler.hysteresis = 1;
          }};
}

Value nothing(const char* capability = "") {
  return {capability, [](Combination&) {}};
}

CombinationAxis of_two(const char* name, bool changes_bits, const char* capability,
                       std::function<void(Combination&)> apply) {
  return {name, changes_bits, {nothing(), {capability, std::move(apply)}}};
}

Value optimizer(const char* capability, const char* type, bool decoupled = true) {
  return {capability, [type, decoupled](Combination& c) {
            c.config.optimizer.type = type;
            if (!decoupled) c.config.optimizer.parameters["adam_w_mode"] = 0;
            c.config.optimizer.learning_rate = c.config.optimizer.type == "SGD" ? 0.05 : 0.003;
            if (c.config.optimizer.type == "SGD") c.config.optimizer.parameters["momentum"] = 0.9;
          }};
}

Value tier(const char* capability, OffloadTier of_optimizer, double ratio = 1) {
  return {capability, [of_optimizer, ratio](Combination& c) {
            c.config.offload.optimizer = of_optimizer;
            c.config.offload.ratio = ratio;
          }};
}

Value activations(const char* capability, bool recomputed, int every, bool away) {
  return {capability, [=](Combination& c) {
            c.config.activation_checkpointing = recomputed;
            c.config.checkpoint_every = every;
            c.config.offload.activations = away;
          }};
}

Value schedule(const char* capability, const char* type, const char* parameters) {
  return {capability, [=](Combination& c) { c.config.schedule = {type, parameters}; }};
}

}  // namespace

std::vector<CombinationAxis> combination_axes() {
  std::vector<CombinationAxis> axes;
  const auto add = [&](const char* name, bool changes_bits, std::vector<Value> values) {
    axes.push_back({name, changes_bits, std::move(values)});
  };
  const auto model = [](const char* capability, Architecture architecture) -> Value {
    return {capability, [architecture](Combination& c) { c.architecture = architecture; }};
  };
  add("model", true,
      {model("gpt", Architecture::gpt), model("llama", Architecture::llama),
       model("qwen3", Architecture::qwen3)});
  axes.push_back(of_two("documents", true, "documents", [](Combination& c) { c.documents = true; }));
  axes.push_back(of_two("lengths", true, "lengths", [](Combination& c) { c.lengths = true; }));
  const auto stage = [](const char* capability, int number) -> Value {
    return {capability, [number](Combination& c) { c.config.stage = number; }};
  };
  add("stage", false, {stage("stage-0", 0), stage("stage-1", 1), stage("stage-2", 2), stage("stage-3", 3)});
  add("optimizer state", false,
      {nothing(), tier("optimizer-cpu", OffloadTier::cpu), tier("optimizer-nvme", OffloadTier::nvme),
       tier("optimizer-ratio", OffloadTier::cpu, 0.5)});
  add("parameters", false,
      {nothing(),
       {"parameters-cpu", [](Combination& c) { c.config.offload.parameters = OffloadTier::cpu; }},
       {"parameters-nvme", [](Combination& c) { c.config.offload.parameters = OffloadTier::nvme; }}});
  const auto policy = [](const char* capability, ReductionPolicy reduction) -> Value {
    return {capability, [reduction](Combination& c) { c.config.reduction = reduction; }};
  };
  add("reduction", true,
      {policy("boundary", ReductionPolicy::boundary),
       policy("micro-batch", ReductionPolicy::micro_batch),
       {"world-size-invariant", [](Combination& c) { c.config.world_size_invariant = true; }}});
  add("ranks", true,
      {{"several-ranks", [](Combination& c) { c.ranks = 3; }},
       {"one-rank", [](Combination& c) { c.ranks = 1; }},
       {"several-ranks", [](Combination& c) { c.ranks = 2; }},
       {"several-ranks", [](Combination& c) { c.ranks = 4; }}});
  add("mesh", false,
      {nothing(),
       {"replicas", [](Combination& c) { c.config.mesh = "replicate=*, shard=1"; }},
       {"replicas", [](Combination& c) { c.config.mesh = "replicate=2, shard=2"; }},
       {"copies-of-parameters", [](Combination& c) {
          c.config.mesh = "replicate=2, shard=2";
          c.config.replicate = Replicate::parameters;
        }}});
  axes.push_back(of_two("pipeline", true, "pipeline", [](Combination& c) {
    c.pipeline = 2;
    c.config.tie_sum = TieSum::by_use;
  }));
  axes.push_back(of_two("tensor", true, "tensor", [](Combination& c) {
    c.tensor = 2;
    if (c.pipeline > 1) c.ranks *= 2;  // two data ranks, as without a pipeline
  }));
  axes.push_back(of_two("context", true, "context", [](Combination& c) {
    c.context = 2;
    if (c.pipeline * c.tensor > 1) c.ranks *= 2;
  }));
  axes.push_back(of_two("nodes", false, "nodes", [](Combination& c) { c.config.debug.ranks_per_host = 2; }));
  axes.push_back(of_two("reduction group", true, "reduction-group",
                        [](Combination& c) { c.config.reduction_group = data_ranks_of(c) - 1; }));
  const auto collectives = [](const char* capability, const char* way) -> Value {
    return {capability, [way](Combination& c) { c.config.collectives = way; }};
  };
  add("collectives", false,
      {nothing(), collectives("messages", "messages"), collectives("shared", "shared")});
  add("dtype", true,
      {dtype("fp32", DataType::float32), dtype("bf16", DataType::bfloat16),
       dtype("fp16", DataType::float16)});
  axes.push_back(of_two("communication dtype", true, "communication-dtype", [](Combination& c) {
    c.config.precision.communication =
        c.config.precision.compute == DataType::bfloat16 ? DataType::float32 : DataType::bfloat16;
  }));
  add("blocks", true,
      {nothing(),
       {"quantized-gradients",
        [](Combination& c) {
          DataType& communication = c.config.precision.communication;
          if (communication == DataType::float16) communication = DataType::float32;
          c.config.quantized_gradients = true;
        }},
       {"quantized-weights", [](Combination& c) { c.config.quantized_weights = true; }}});
  axes.push_back(of_two("main gradient", true, "gradient-bf16",
                        [](Combination& c) { c.config.precision.accumulation = DataType::bfloat16; }));
  add("optimizer", true,
      {optimizer("adamw", "AdamW"),
       optimizer("adam-l2", "Adam", false),
       optimizer("sgd", "SGD"),
       optimizer("lion", "Lion"),
       optimizer("lamb", "Lamb"),
       optimizer("muon", "Muon"),
       {"own-rule", [](Combination& c) {
          c.rule = Rule::own;
          c.config.optimizer.learning_rate = 0.02;
        }}});
  add("moments", true,
      {nothing(),
       {"moments-bf16", [](Combination& c) { c.config.precision.moments = DataType::bfloat16; }},
       {"moments-block8", [](Combination& c) {
          c.config.precision.moments = DataType::block8;
          c.wide = true;
        }}});
  const auto master = [](const char* capability, MasterFormat format, bool at_random) -> Value {
    return {capability, [=](Combination& c) {
              c.config.precision.master = format;
              c.config.precision.stochastic_rounding = at_random;
            }};
  };
  add("masters", true,
      {nothing(), master("master-split", MasterFormat::split, false),
       master("master-none", MasterFormat::none, false), master("master-random", MasterFormat::none, true)});
  const auto frozen = [](Combination& c) {
    // Tensors of the embedding (of the head's unit if it is tied), some of a block, and a whole block.
    if (c.architecture == Architecture::gpt) {
      c.config.frozen = {"transformer.wpe.weight", "transformer.h.0.ln_1.*", "transformer.h.2.*"};
    } else {
      const char* const outside =
          c.architecture == Architecture::llama ? "model.embed_tokens.weight" : "model.norm.weight";
      c.config.frozen = {outside, "model.layers.0.self_attn.k_proj.*", "model.layers.2.*"};
    }
  };
  const auto lora = [](Combination& c) {
    c.config.lora = {.rank = 3, .alpha = 6, .dropout = 0.1, .targets = {"c_attn", "c_fc", "lm_head"}};
    if (c.architecture != Architecture::gpt) c.config.lora.targets = {"q_proj", "up_proj", "lm_head"};
  };
  add("frozen", true, {nothing(), {"frozen", frozen}, {"lora", lora}});
  axes.push_back(
      of_two("clipping", true, "clipping", [](Combination& c) { c.config.gradient_clipping = 0.25; }));
  // It changes no bit by itself, but needs batches whose tokens are all learned.
  axes.push_back(of_two("update", true, "as-reduced", [](Combination& c) {
    c.config.update = UpdateTime::as_reduced;
    c.whole_batches = true;
  }));
  axes.push_back(of_two("parameter groups", true, "groups", [](Combination& c) {
    const bool gpt = c.architecture == Architecture::gpt;
    ParameterGroupRule rate{
        .pattern = gpt ? "*.h.0.mlp.*" : "*.layers.0.mlp.*", .learning_rate_factor = 0.5, .decay = {}};
    rate.weight_decay = 0.1;
    ParameterGroupRule own{
        .pattern = gpt ? "*.bias" : "*layernorm.weight", .learning_rate_factor = {}, .decay = {}};
    own.learning_rate = 0.01;
    c.config.group_rules = {rate, own};
  }));
  add("schedule", true,
      {nothing(),
       schedule("schedule", "WarmupCosineLR", R"({"warmup_num_steps": 2, "total_num_steps": 6})"),
       schedule("cycled-momentum", "OneCycle",
                R"({"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 3,
                    "cycle_min_mom": 0.8, "cycle_max_mom": 0.9})"),
       {"own-schedule", [](Combination& c) { c.rates = Rates::own_schedule; }},
       {"set-rate", [](Combination& c) { c.rates = Rates::set; }}});
  const auto gradients = [](const char* capability, Gradients how) -> Value {
    return {capability, [how](Combination& c) { c.gradients = how; }};
  };
  add("gradients", true,
      {nothing(), gradients("hook", Gradients::in_hook), gradients("write-gradient", Gradients::before_step),
       gradients("skipped-step", Gradients::not_finite)});
  add("batch", true,
      {nothing(),
       {"accumulation", [](Combination& c) { c.config.accumulation_steps = 2; }},
       {"set-batch", [](Combination& c) { c.change_batch = true; }}});
  axes.push_back(of_two("dropout", true, "dropout", [](Combination& c) { c.dropout = 0.1f; }));
  axes.push_back(
      of_two("initial weights", true, "own-weights", [](Combination& c) { c.own_weights = true; }));
  add("activations", false,
      {nothing(), activations("recomputation", true, 1, false),
       activations("recomputation-groups", true, 2, false), activations("activations-cpu", true, 1, true)});
  axes.push_back(
      of_two("head", false, "vocabulary-chunk", [](Combination& c) { c.config.vocabulary_chunk = 17; }));
  axes.push_back(of_two("overlap", false, "overlap-off", [](Combination& c) { c.config.overlap = false; }));
  axes.push_back(of_two("buckets", false, "buckets", [](Combination& c) {
    c.config.depth = 3;
    c.config.reduce_bucket_elements = 1000;
    c.config.allgather_bucket_elements = 700;
    c.config.prefetch_elements = 10'000;
  }));
  add("gathers", false,
      {nothing(),
       {"gather-step", [](Combination& c) { c.config.gather_for = GatherFor::step; }},
       {"persistent", [](Combination& c) { c.config.persistent_tensor_elements = 1500; }}});
  add("memory", false,
      {nothing(),
       {"unplanned", [](Combination& c) { c.config.debug.plan_memory = false; }},
       {"poison", [](Combination& c) { c.config.debug.poison_memory = true; }}});
  axes.push_back(of_two("evaluation", false, "evaluation", [](Combination& c) { c.evaluate = true; }));
  axes.push_back(of_two("generation", false, "generation", [](Combination& c) { c.generate = true; }));
  add("saving", false,
      {nothing(),
       {"saving", [](Combination& c) { c.save_meanwhile = true; }},
       {"save-buffer", [](Combination& c) { c.save_meanwhile = c.config.save_buffer = true; }}});
  axes.push_back(of_two("stop", false, "stop", [](Combination& c) { c.stop = true; }));
  axes.push_back(of_two("trace", false, "trace",
                        [](Combination& c) { c.trace = c.config.wall_clock_breakdown = true; }));
  const auto continued = [](const char* capability, Continued how) -> Value {
    return {capability, [how](Combination& c) { c.continued = how; }};
  };
  add("continued", true,
      {nothing(), continued("load-other-stage", Continued::at_another_stage),
       continued("load-other-ranks", Continued::by_other_ranks),
       continued("load-other-dtype", Continued::in_another_dtype),
       continued("load-weights", Continued::from_weights), continued("load-partial", Continued::partially)});
  return axes;
}

bool can_meet(const CombinationAxis& a, int value, const CombinationAxis& b, int other) {
  const std::string& x = a.values[static_cast<std::size_t>(value)].capability;
  const std::string& y = b.values[static_cast<std::size_t>(other)].capability;
  const auto are = [&](const char* p, const char* q) { return (x == p && y == q) || (x == q && y == p); };
  const auto with = [&](const char* p, auto&& of) {
    return (x.starts_with(p) && of(y, b, other)) || (y.starts_with(p) && of(x, a, value));
  };
  // Refused: these need all gradients of a step, or count its tokens, before a unit can be updated. Inputs of
  // blocks in host memory are refused beside offloaded optimizer state alone.
  if (with("as-reduced", [](const std::string& key, const CombinationAxis& axis, int) {
        return key == "fp16" || key == "clipping" || key == "activations-cpu" || key == "lamb" ||
               key == "muon" || key == "own-rule" || key == "lengths" ||
               (axis.name == "gradients" && !key.empty());
      })) {
    return false;
  }
  // Refused: GPT-2 has learned positions and supports one document per row.
  if (are("gpt", "documents")) return false;
  // Refused: weights that are not sharded do not leave the device; replicas add their sums in an order of
  // their own.
  if (with("parameters-", [](const std::string& key, const CombinationAxis& axis, int) {
        return axis.name == "stage" && key != "stage-3";
      })) {
    return false;
  }
  if (are("replicas", "reduction-group")) return false;
  // With world_size_invariant the sum has one order for every number of ranks, so settings that form partial
  // sums are excluded.
  if (with("world-size-invariant", [](const std::string& key, const CombinationAxis& axis, int) {
        return (axis.name == "mesh" && !key.empty()) || key == "reduction-group" || key == "gradient-bf16" ||
               key == "set-batch";
      })) {
    return false;
  }
  // Gradients and state are sharded over the replicas, so stage 0 is excluded; new weights are exchanged on
  // the device.
  if (with("copies-of-parameters", [](const std::string& key, const CombinationAxis&, int) {
        return key == "stage-0" || key == "reduction-group" || key.starts_with("parameters-");
      })) {
    return false;
  }
  // Refused: the weights and checkpointed inputs of a pipeline stage do not leave the device.
  if (with("pipeline", [](const std::string& key, const CombinationAxis&, int) {
        return key.starts_with("parameters-") || key == "activations-cpu";
      })) {
    return false;
  }
  // Refused: ranks would have parts of blocks.
  if (are("tensor", "moments-block8")) return false;
  // A sample's gradient is a sum over the ranks of context.
  if (are("context", "world-size-invariant")) return false;
  // Two parts of each sample on two data ranks need four ranks here.
  for (const char* axis_of_sample : {"tensor", "context"}) {
    if (with(axis_of_sample, [](const std::string&, const CombinationAxis& axis, int at) {
          return axis.name == "ranks" && at != 3;
        })) {
      return false;
    }
  }
  // Two stages of two ranks need four ranks here.
  if (with("pipeline", [](const std::string&, const CombinationAxis& axis, int at) {
        return axis.name == "ranks" && at != 3;
      })) {
    return false;
  }
  // These formats need bf16 weights and one of the library's rules.
  for (const char* format : {"master-split", "master-none", "master-random"}) {
    if (are(format, "fp32") || are(format, "fp16") || are(format, "own-rule")) return false;
  }
  // Weights in fp16 are sent unchanged.
  if (are("quantized-weights", "fp16")) return false;
  // Two nodes need three or four ranks here; two replicas of two ranks need four.
  if (with("nodes", [](const std::string&, const CombinationAxis& axis, int at) {
        return axis.name == "ranks" && at != 0 && at != 3;
      })) {
    return false;
  }
  const auto halves_without_four = [](const CombinationAxis& p, int at, const CombinationAxis& q, int ranks) {
    return p.name == "mesh" && at >= 2 && q.name == "ranks" && ranks != 3;
  };
  if (halves_without_four(a, value, b, other) || halves_without_four(b, other, a, value)) return false;
  // Without effect: a program's own rule declares the dtype of its state; a single rank has no peers.
  return !are("own-rule", "moments-bf16") && !are("own-rule", "moments-block8") &&
         !are("one-rank", "messages") && !are("one-rank", "shared") && !are("one-rank", "reduction-group") &&
         !are("one-rank", "replicas");
}

namespace {

Combination start() {
  Combination c;
  c.config = plain_config(0);
  c.config.train_batch_size = 0;
  c.config.optimizer.parameters["weight_decay"] = 0.1;
  c.config.staging_bytes = std::int64_t{1} << 18;
  c.config.offload.tile_elements = 4096;
  c.config.loss_scaling = false;
  return c;
}

/// Sets the fields that depend on several values.
void complete(Combination& c) {
  if (c.ranks_of_sample() > 1) {
    // Replicas of two sharded ranks become replicas of one rank here.
    c.config.mesh = c.config.mesh.empty() ? "" : "replicate=2, ";
    if (c.pipeline > 1) c.config.mesh += "pipeline=" + std::to_string(c.pipeline) + ", ";
    c.config.mesh += "shard=*";
    if (c.context > 1) c.config.mesh += ", context=" + std::to_string(c.context);
    if (c.tensor > 1) c.config.mesh += ", tensor=" + std::to_string(c.tensor);
  }
  if (c.config.world_size_invariant) {
    // The last round is short on three ranks, and on four without accumulation.
    c.config.micro_batch_size = 1;
    c.config.train_batch_size = 10 * c.config.accumulation_steps;
    c.config.accumulation_steps = 0;
    return;
  }
  c.config.micro_batch_size = 12 / (data_ranks_of(c) * c.config.accumulation_steps);
}

/// Rows with a pipeline use its schedules in turn.
std::string schedule_of_row(const Combination& c, const test::CoveringRow& row) {
  constexpr std::array schedules{"1f1b", "zb-v", "breadth-first", "zb-h1", "afab"};
  const auto sum = static_cast<std::size_t>(std::accumulate(row.begin(), row.end(), 0));
  // A multiple of the number of stages, which interleaved needs, is rare.
  const bool fits_interleaved =
      c.config.accumulation_steps > 0 && c.config.accumulation_steps % c.pipeline == 0 && !c.change_batch;
  return fits_interleaved && sum % 2 == 0 ? "interleaved" : schedules[sum % schedules.size()];
}

}  // namespace

Combination combination_of(const std::vector<CombinationAxis>& axes, const test::CoveringRow& row) {
  Combination c = start();
  for (std::size_t i = 0; i < axes.size(); ++i) axes[i].values[static_cast<std::size_t>(row[i])].apply(c);
  complete(c);
  if (c.pipeline > 1) c.config.pipeline_schedule = schedule_of_row(c, row);
  return c;
}

Combination plain_combination_of(const std::vector<CombinationAxis>& axes, const test::CoveringRow& row) {
  const Combination whole = combination_of(axes, row);
  Combination c = start();
  for (std::size_t i = 0; i < axes.size(); ++i) {
    axes[i].values[axes[i].changes_bits ? static_cast<std::size_t>(row[i]) : 0].apply(c);
  }
  // The stages have the same sums as that many data ranks whose uses of tied tensors stay separate. Layers
  // and sequences that are divided add their parts in another order.
  const bool copies = Mesh::parse(whole.config.mesh, whole.ranks).size(MeshAxis::replicate) > 1;
  c.ranks = data_ranks_of(c) * c.context * c.tensor;
  c.pipeline = 1;
  c.config.update = UpdateTime::at_the_boundary;
  complete(c);
  c.config.overlap = false;
  c.config.debug.plan_memory = false;
  if (c.config.world_size_invariant) {
    c.ranks = c.tensor;
    return c;
  }
  // The default reduction order is that of the replicas, or without replicas that of the nodes.
  if (copies) {
    c.config.reduction_group = ranks_of_a_copy(whole);
  } else if (c.config.reduction_group == 0) {
    // The ranks of a node that have different parts of tensors belong to different sums.
    const int per_node = whole.config.debug.ranks_per_host;
    c.config.reduction_group = per_node == 0 || c.context == 1 ? per_node : std::max(1, per_node / c.tensor);
  }
  return c;
}

int data_ranks_of(const Combination& c) {
  return c.ranks / c.ranks_of_sample();
}

int ranks_of_a_copy(const Combination& c) {
  return Mesh::parse(c.config.mesh, c.ranks).state_ranks();
}

std::string text_of(const std::vector<CombinationAxis>& axes, const test::CoveringRow& row) {
  std::string text;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    const std::string& capability = axes[i].values[static_cast<std::size_t>(row[i])].capability;
    if (row[i] == 0 && axes[i].name != "stage" && axes[i].name != "dtype") continue;
    text += (text.empty() ? "" : ", ") + axes[i].name + " " + capability + "#" + std::to_string(row[i]);
  }
  return text;
}

}  // namespace tranche::models
