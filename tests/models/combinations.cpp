// Runs the trainings of the covering arrays.

#include "combinations.h"

#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <filesystem>
#include <limits>
#include <mutex>
#include <numeric>

#include "relative_rule.h"
#include "tiny_llama.h"
#include "tranche/models/generate.h"
#include "tranche/models/llama.h"
#include "tranche/partition/mesh.h"

namespace tranche::models {
namespace {

constexpr std::int64_t short_time_steps = 4;
constexpr int first_steps = 4;  // memory is dynamic in the first, recorded in the second, planned in the
                                // others
constexpr int later_steps = 2;

/// Four parts of equal length if two ranks share the tokens.
std::int64_t time_steps_of(const Combination& c) {
  return c.context > 1 ? 8 : 7;
}

std::unique_ptr<const LanguageModel> model_of(const Combination& c) {
  if (c.architecture == Architecture::gpt) {
    GptConfig model = tiny_gpt();
    model.layers = 3;
    if (c.wide) model.width = 48;
    model.embedding_dropout = model.attention_dropout = model.residual_dropout = c.dropout;
    return std::make_unique<Gpt>(model);
  }
  LlamaConfig model = tiny_llama(c.architecture == Architecture::llama ? LlamaKind::llama : LlamaKind::qwen3);
  model.layers = 3;
  if (c.wide) model.inner = 173;
  if (c.architecture == Architecture::llama) model.key_value_heads = 1;  // ranks of a layer share it
  model.attention_dropout = c.dropout;
  return std::make_unique<Llama>(model);
}

/// The tensor whose gradient a program changes; with adapters everything else is frozen.
const char* touched_by(const Combination& c) {
  if (c.config.lora.any()) {
    return c.architecture == Architecture::gpt ? "transformer.h.1.mlp.c_fc.lora_B.weight"
                                               : "model.layers.1.mlp.up_proj.lora_B.weight";
  }
  return c.architecture == Architecture::gpt ? "transformer.h.1.mlp.c_fc.bias"
                                             : "model.layers.1.post_attention_layernorm.weight";
}

ModelSpec spec_of(const Combination& c) {
  const ModelSpec drawn = model_of(c)->spec(time_steps_of(c));
  if (!c.own_weights) return drawn;
  ModelSpec spec = drawn.without_units();
  const std::string embedding =
      c.architecture == Architecture::gpt ? "transformer.wte.weight" : "model.embed_tokens.weight";
  for (UnitSpec unit : drawn.units()) {
    for (TensorSpec& tensor : unit.tensors) {
      if (tensor.name != embedding) continue;
      tensor.initializer = Initializer::from("ripples", [](std::int64_t first, std::span<float> values) {
        for (std::size_t i = 0; i < values.size(); ++i) {
          values[i] = 0.05f * std::sin(static_cast<float>(first + static_cast<std::int64_t>(i)));
        }
      });
    }
    spec.add_unit(std::move(unit));
  }
  return spec;
}

/// Halves the learning rate in every update.
class Halving final : public Schedule {
 public:
  double learning_rate(std::int64_t step) const override { return std::ldexp(0.02, static_cast<int>(-step)); }
  std::string describe() const override { return R"({"type": "halving"})"; }
};

/// The engine that continues from the save of another one. `plain` keeps settings that change no bit at their
/// simplest values.
Combination continued_from(const Combination& before, bool plain) {
  Combination c = before;
  if (c.continued == Continued::by_other_ranks) {  // each with whole samples of its own
    c.ranks = data_ranks_of(before) == 3 ? 2 : 3;
    c.pipeline = c.tensor = c.context = 1;
    if (!c.config.world_size_invariant) {
      c.config.micro_batch_size = 12 / (c.ranks * c.config.accumulation_steps);
    }
  }
  if (c.continued == Continued::in_another_dtype) {
    PrecisionConfig& precision = c.config.precision;
    precision.compute = precision.communication = precision.compute == DataType::float32 ? DataType::bfloat16
                                                  : precision.compute == DataType::bfloat16 &&
                                                          !c.config.quantized_gradients &&
                                                          !c.config.quantized_weights
                                                      ? DataType::float16
                                                      : DataType::float32;
    c.config.loss_scaling = precision.compute == DataType::float16;
    if (c.config.loss_scaling) c.config.update = UpdateTime::at_the_boundary;
    precision.master = MasterFormat::fp32;
    precision.stochastic_rounding = false;
  }
  if (Mesh::parse(before.config.mesh, before.ranks).size(MeshAxis::replicate) > 1) {
    c.config.reduction_group = ranks_of_a_copy(before);  // replicas save, and one sharded model continues
  }
  if (before.pipeline > 1) c.config.tie_sum = TieSum::by_use;
  c.config.mesh = c.ranks_of_sample() == 1 ? "" : "shard=*";
  if (c.pipeline > 1) c.config.mesh += ", pipeline=" + std::to_string(c.pipeline);
  if (c.context > 1) c.config.mesh += ", context=" + std::to_string(c.context);
  if (c.tensor > 1) c.config.mesh += ", tensor=" + std::to_string(c.tensor);
  if (plain) return c;
  c.config.stage = (before.config.stage + 1 + static_cast<int>(c.continued)) % 4;
  OffloadConfig& offload = c.config.offload;
  offload.optimizer = offload.optimizer == OffloadTier::none  ? OffloadTier::cpu
                      : offload.optimizer == OffloadTier::cpu ? OffloadTier::nvme
                                                              : OffloadTier::none;
  offload.parameters = c.config.stage == 3 && c.pipeline == 1 ? OffloadTier::nvme : OffloadTier::none;
  return c;
}

/// Half of those with state on nvme keep a part of it in host memory.
std::int64_t part_in_host(const Combination& c) {
  return c.documents == c.evaluate ? 0 : 100'000;
}

/// One engine of a training, on one rank.
class Training {
 public:
  Training(const Combination& c, Engine& engine, CombinationOutcome& outcome)
      : c_(c), engine_(engine), outcome_(outcome), model_(model_of(c)) {
    if (c.gradients == Gradients::in_hook) {
      engine.set_gradient_hook([this](const StepResult&) {
        scale_gradient(0.5f);
        return std::string();
      });
    }
  }

  void step() {
    const Config& config = engine_.config();
    const std::int64_t first = engine_.samples();
    const bool sets_rate = c_.rates == Rates::set && engine_.steps() == 2;
    // Early updates need the rate before the last micro-batch.
    if (sets_rate && c_.config.update == UpdateTime::as_reduced) engine_.set_learning_rate(0.004);
    train_step(*model_, engine_, [&](std::int64_t m) {
      const std::int64_t block = m * mesh().data_ranks() + mesh().data_rank(engine_.runtime().rank());
      // With a pipeline several micro-batches are active at once.
      return batch(first + block * config.micro_batch_size, config.micro_batch_size, c_.pipeline > 1 ? m : 0);
    });
    if (c_.gradients == Gradients::before_step) scale_gradient(2);
    if (c_.gradients == Gradients::not_finite && engine_.steps() % 4 == 2) {
      scale_gradient(std::numeric_limits<float>::infinity());
    }
    if (sets_rate && c_.config.update == UpdateTime::at_the_boundary) engine_.set_learning_rate(0.004);
    if (c_.stop && engine_.steps() == 2 && engine_.runtime().rank() + 1 == engine_.runtime().size()) {
      engine_.request_stop();
    }
    outcome_.steps.push_back(engine_.step());
  }

  void look() {
    if (c_.evaluate) {
      engine_.begin_evaluation();
      const std::int64_t ranks = mesh().data_ranks();
      for (std::int64_t m = 0; m < 12 / ranks; ++m) {  // 12 sequences on any number of ranks
        model_->evaluate(engine_, batch(1000 + m * ranks + mesh().data_rank(engine_.runtime().rank()), 1, 0));
      }
      outcome_.evaluations.push_back(engine_.end_evaluation());
    }
    if (!c_.generate) return;
    const std::vector<std::vector<std::int32_t>> prompts{{5, 60, 0, 17, 23}, {44, 3}, {9}};
    outcome_.logits.push_back(model_->next_token_logits(engine_, prompts.front()));
    for (const models::Generation& text : models::generate(engine_, *model_, prompts, {.tokens = 3})) {
      outcome_.texts.push_back(text.tokens);
    }
  }

 private:
  const Mesh& mesh() const { return engine_.runtime().mesh(); }
  /// Valid until the next batch for the same place.
  TokenBatch batch(std::int64_t first, std::int64_t count, std::int64_t place) {
    while (static_cast<std::int64_t>(places_.size()) <= place)
      places_.emplace_back(engine_, time_steps_of(c_), !c_.whole_batches);
    auto& [data, on_device] = places_[static_cast<std::size_t>(place)];
    data.time = c_.lengths && first / count % 2 == 1 ? short_time_steps : time_steps_of(c_);
    data.draw(first, count);
    if (c_.documents) data.split();
    if (engine_.device().kind() != DeviceKind::meta) return on_device.of(data);
    TokenBatch nowhere = data.batch();
    nowhere.tokens.data = nowhere.targets.data = nullptr;
    if (c_.documents) nowhere.document_begin->data = nowhere.positions->data = nullptr;
    return nowhere;
  }
  void scale_gradient(float by) {
    std::vector<float> values = engine_.read_gradient(touched_by(c_));
    for (float& value : values) value *= by;
    if (std::isinf(by)) values[1] = by;
    engine_.write_gradient(touched_by(c_), values);
  }

  const Combination& c_;
  Engine& engine_;
  CombinationOutcome& outcome_;
  std::unique_ptr<const LanguageModel> model_;
  struct Place {
    Place(Engine& engine, std::int64_t time, bool ignored) : data(time, 61, ignored), on_device(engine) {}
    TokenData data;
    DeviceBatch on_device;
  };
  std::deque<Place> places_;
};

constexpr std::int64_t own_array_elements = 100;

void with_engine(const Combination& c, DeviceKind device, const CommunicatorFactory& factory,
                 const std::function<void(Engine&, Runtime&)>& body) {
  Config config = c.config;
  validate_config(config, c.ranks);
  RuntimeOptions options = RuntimeOptions::from(config);
  options.device = device;
  options.log_level = LogLevel::off;
  options.trace = c.trace;
  Runtime runtime(options, factory);
  EngineOptions own;
  if (c.rule == Rule::own) own.optimizer = make_relative_rule();
  if (c.rates == Rates::own_schedule) own.schedule = std::make_unique<Halving>();
  Engine engine(runtime, spec_of(c), config, std::move(own));
  body(engine, runtime);
}

/// The first engine; its state stays in `folder` if another one continues from it.
void first_engine(const Combination& c, Engine& engine, Runtime& runtime, const std::string& folder,
                  bool plain, CombinationOutcome& outcome) {
  Training training(c, engine, outcome);
  std::vector<std::int64_t> order(own_array_elements);
  std::iota(order.begin(), order.end(), 7);
  for (int step = 1; step <= first_steps; ++step) {
    training.step();
    if (step < 2) continue;
    if (step == 2 && c.save_meanwhile) {
      const ConstTensorView values{order.data(), DataType::int64, Shape{own_array_elements}};
      engine.save(folder + "/meanwhile", {.arrays = {SavedArray::whole("order", values)}});
    }
    if (step == 2 && plain) outcome.second = engine.state_digest();
    training.look();
    if (step == 2 && c.change_batch) {
      const std::int64_t micro_batches = engine.config().accumulation_steps;
      engine.set_batch(engine.config().micro_batch_size, micro_batches == 1 ? 2 : 1);
    }
  }
  for (const Tier tier : all_tiers)
    outcome.tiers[static_cast<std::size_t>(tier)] = runtime.ledger().account(tier);
  outcome.traffic = engine.traffic_report();
  (void)engine.finish_saving();
  if (engine.device().kind() == DeviceKind::meta) return;
  outcome.last = engine.state_digest();
  if (c.continued != Continued::not_at_all) engine.save(folder + "/whole", {.wait = true});
}

}  // namespace

CombinationOutcome train_combination(const Combination& combination, const CombinationPlace& place,
                                     bool plain) {
  CombinationOutcome outcome;
  std::mutex mutex;
  Combination c = combination;
  c.config.offload.nvme_path = place.folder + "/swap";
  c.config.offload.host_state = part_in_host(c);
  std::filesystem::create_directories(c.config.offload.nvme_path);
  const auto on = [&](const Combination& with,
                      const std::function<void(Engine&, Runtime&, CombinationOutcome&)>& body) {
    const auto rank_body = [&](int, const CommunicatorFactory& factory) {
      CombinationOutcome mine;
      bool first = false;
      with_engine(with, place.device, factory, [&](Engine& engine, Runtime& runtime) {
        {
          const std::lock_guard lock(mutex);
          mine = outcome;
        }
        runtime.all().barrier({"test", "combinations", Traffic::control}).wait();
        body(engine, runtime, mine);
        first = runtime.rank() == 0;
      });
      const std::lock_guard lock(mutex);
      if (first) outcome = std::move(mine);
    };
    if (place.on_ranks) {
      place.on_ranks(with.ranks, rank_body);
    } else {
      run_thread_ranks(with.ranks, rank_body);
    }
  };
  on(c, [&](Engine& engine, Runtime& runtime, CombinationOutcome& mine) {
    first_engine(c, engine, runtime, place.folder, plain, mine);
  });
  if (c.save_meanwhile) {
    Combination as_saved = c;
    as_saved.save_meanwhile = false;
    on(as_saved, [&](Engine& engine, Runtime&, CombinationOutcome& mine) {
      const LoadResult loaded = engine.load(place.folder + "/meanwhile");
      mine.saved = engine.state_digest();
      mine.array.assign(own_array_elements, 0);
      const TensorView array{mine.array.data(), DataType::int64, Shape{own_array_elements}};
      engine.load_arrays(loaded.folder, {{"order", array}});
    });
  }
  if (c.continued == Continued::not_at_all) return outcome;
  const Combination next = continued_from(c, plain);
  on(next, [&](Engine& engine, Runtime&, CombinationOutcome& mine) {
    LoadOptions options{.weights_only = c.continued == Continued::from_weights,
                        .convert_state = c.continued == Continued::in_another_dtype};
    if (c.continued == Continued::partially) {  // that tensor keeps its initial value
      options.partial = true;
      options.renames = {{touched_by(c), "another"}};
    }
    const LoadResult result = engine.load(place.folder + "/whole", options);
    EXPECT_EQ(result.differences.empty(), !options.partial);
    const kernels::Digest loaded = engine.state_digest();
    // Frozen weights have the compute dtype.
    const bool all = c.continued == Continued::at_another_stage || c.continued == Continued::by_other_ranks;
    if (all && engine.runtime().rank() == 0) {
      EXPECT_EQ(loaded, mine.last) << "what was loaded is not what was saved";
    }
    Training training(next, engine, mine);
    for (int step = 0; step < later_steps; ++step) training.step();
    training.look();
    mine.last = engine.state_digest();
  });
  return outcome;
}

CombinationOutcome plan_combination(const Combination& combination) {
  CombinationOutcome outcome;
  Combination c = combination;
  c.config.offload.nvme_path = std::filesystem::temp_directory_path().string();
  c.config.offload.host_state = part_in_host(c);
  with_engine(
      c, DeviceKind::meta,
      [&](const CommunicatorOptions& options) {
        return make_meta_communicator(0, c.ranks, c.ranks, options);
      },
      [&](Engine& engine, Runtime& runtime) {
        first_engine(c, engine, runtime, std::filesystem::temp_directory_path().string(), false, outcome);
      });
  return outcome;
}

}  // namespace tranche::models
