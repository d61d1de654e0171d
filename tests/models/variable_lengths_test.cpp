// Batches whose lengths change between micro-batches: memory, plans and bits.

#include <gtest/gtest.h>

#include "memory_draw.h"
#include "tests/core/rounds.h"
#include "tests/core/sweep.h"
#include "tiny_llama.h"

namespace tranche::models {
namespace {

constexpr std::int64_t lengths[] = {8, 3, 24, 13};
constexpr int rounds = 4;

GptConfig small_gpt() {
  GptConfig config = GptConfig::preset("gpt-nano");
  config.layers = 3;
  config.heads = 2;
  config.width = 16;
  config.vocabulary = 53;
  config.positions = 24;
  config.residual_dropout = 0.1f;
  return config;
}

/// Micro-batches of chosen lengths whose data stays at the same address; on meta without data.
class Batches {
 public:
  Batches(Engine& engine, const LanguageModel& model)
      : engine_(engine),
        model_(model),
        samples_(static_cast<std::size_t>(engine.config().micro_batch_size)) {}
  TokenBatch of(std::int64_t length) {
    if (engine_.device().kind() == DeviceKind::meta) {
      const TensorView none{nullptr, DataType::int32, {engine_.config().micro_batch_size, length}};
      return {none, none, samples_};
    }
    auto found = data_.find(length);
    if (found == data_.end()) {
      found = data_.try_emplace(length, length, model_.shape().vocabulary, true).first;
      found->second.draw(100 * engine_.runtime().rank(), engine_.config().micro_batch_size);
    }
    return found->second.batch();
  }

 private:
  Engine& engine_;
  const LanguageModel& model_;
  std::vector<std::int64_t> samples_;
  std::map<std::int64_t, TokenData> data_;
};

/// A round trains, evaluates and continues each of the four lengths; ranks and micro-batches begin at
/// different ones. `after` is called at the end of each.
void train_rounds(Engine& engine, const LanguageModel& model, int rank, bool infer,
                  const std::function<void(int round)>& after) {
  Batches batches(engine, model);
  const auto length = [&](std::int64_t at) { return lengths[at % 4]; };
  const std::vector<std::int32_t> prompt(24, 1);
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < 4; ++i) {
      for (std::int64_t m = 0; m < engine.config().accumulation_steps; ++m) {
        model.forward_backward(engine, batches.of(length(i + m + rank)));
      }
      (void)engine.step();
    }
    engine.begin_evaluation();
    for (int i = 0; i < 4; ++i) model.evaluate(engine, batches.of(length(i + rank)));
    (void)engine.end_evaluation();
    for (int i = 0; infer && i < 4; ++i) {
      (void)model.next_token_logits(engine, std::span(prompt).first(static_cast<std::size_t>(length(i))));
    }
    after(round);
  }
}

struct Case {
  const char* name;
  int ranks;
  std::function<void(Config&)> adjust;
};

std::vector<Case> cases() {
  const auto offloaded = [](Config& config) {
    config.stage = 3;
    config.offload.optimizer = config.offload.parameters = OffloadTier::cpu;
    config.offload.tile_elements = 4096;
  };
  return {
      {"stage 0", 1, [](Config&) {}},
      {"stage 0, M = 2", 2, [](Config& config) { config.accumulation_steps = 2; }},
      {"stage 1, bf16, M = 3", 2,
       [](Config& config) {
         config.stage = 1;
         config.accumulation_steps = 3;
         config.precision.compute = config.precision.communication = DataType::bfloat16;
       }},
      {"stage 2, poison", 2,
       [](Config& config) {
         config.stage = 2;
         config.debug.poison_memory = true;
       }},
      {"stage 3, on the host", 2, offloaded},
      {"stage 3, on the host, M = 2, activations too", 2,
       [offloaded](Config& config) {
         offloaded(config);
         config.accumulation_steps = 2;
         config.activation_checkpointing = config.offload.activations = true;
         config.checkpoint_every = 2;
       }},
      {"stage 3, gathered for the step, M = 2, chunks, poison", 2,
       [](Config& config) {
         config.stage = 3;
         config.gather_for = GatherFor::step;
         config.accumulation_steps = 2;
         config.vocabulary_chunk = 20;
         config.debug.poison_memory = true;
       }},
  };
}

Config config_of(const Case& each) {
  Config config = plain_config(0);
  config.train_batch_size = 0;
  config.micro_batch_size = 2;
  each.adjust(config);
  return config;
}

TEST(VariableLengths, ShapesSeenBeforeMakeNoMemoryCall) {
  const Gpt gpt(small_gpt());
  const Llama llama(tiny_llama(LlamaKind::qwen3));
  for (const LanguageModel* model :
       {static_cast<const LanguageModel*>(&gpt), static_cast<const LanguageModel*>(&llama)}) {
    for (const Case& each : cases()) {
      SCOPED_TRACE(model->architecture() + ", " + each.name);
      on_ranks(each.ranks, model->spec(24), config_of(each), [&](Engine& engine) {
        Runtime& runtime = engine.runtime();
        std::int64_t device = 0, host = 0, packings = 0;
        train_rounds(engine, *model, runtime.rank(), true, [&](int round) {
          if (round == 1) packings = engine.step_memory().packings;
          if (round >= 2) {
            EXPECT_EQ(runtime.memory_calls(), device) << "round " << round << " rank " << runtime.rank();
            EXPECT_EQ(runtime.memory_calls(Tier::host), host) << "round " << round;
            EXPECT_EQ(engine.step_memory().packings, packings);
          }
          device = runtime.memory_calls();
          host = runtime.memory_calls(Tier::host);
        });
        EXPECT_GT(packings, 3) << "three kinds of passes, and lengths beyond the first";
      });
    }
  }
}

/// The ledger of every tier, for one line of a failure.
std::string ledger_text(const Runtime& runtime) {
  std::string text;
  for (const Tier tier : all_tiers) {
    const TierAccount account = runtime.ledger().account(tier);
    text +=
        fmt::format("{}: now {}, peak {}, categories", name_of(tier), account.current.total(), account.peak);
    for (const std::int64_t bytes : account.category_peak.bytes) text += fmt::format(" {}", bytes);
    text += "\n";
  }
  return text;
}

std::vector<std::string> ledgers(const MemoryCase& drawn, bool planned) {
  const auto model = drawn.language_model();
  std::vector<std::string> result;
  const auto body = [&](Engine& engine) {
    const int rank = engine.runtime().rank();
    train_rounds(engine, *model, rank, false, [&](int) {
      if (rank == drawn.rank) result.push_back(ledger_text(engine.runtime()));
    });
  };
  if (!planned) {
    on_ranks(drawn.ranks, model->spec(24), drawn.config, body);
    return result;
  }
  Config config = drawn.config;
  validate_config(config, drawn.ranks);
  RuntimeOptions options = RuntimeOptions::from(config);
  options.device = DeviceKind::meta;
  options.log_level = LogLevel::off;
  Runtime runtime(options, [&](const CommunicatorOptions& o) {
    return make_meta_communicator(drawn.rank, drawn.ranks, drawn.ranks, o);
  });
  Engine engine(runtime, model->spec(24), config);
  body(engine);
  return result;
}

MemoryCase drawn_case(std::uint64_t index) {
  Draw draw(77, index);
  MemoryCase drawn;
  if (draw.flip()) {
    drawn.llama =
        tiny_llama(draw.of({LlamaKind::llama, LlamaKind::mistral, LlamaKind::qwen2, LlamaKind::qwen3}));
  } else {
    drawn.model = small_gpt();
  }
  draw_configuration(draw, {drawn.llama ? "*input_layernorm*" : "*ln_1*"}, drawn);
  return drawn;
}

TEST(VariableLengths, PlansHoldToTheByteAfterEachRound) {
  for (const std::uint64_t index : test::rounds(test::sweep({0, 30}))) {
    const MemoryCase drawn = drawn_case(index);
    EXPECT_EQ(ledgers(drawn, true), ledgers(drawn, false))
        << "drawn_case(" << index << "): " << drawn.to_string();
  }
}

TEST(VariableLengths, BitsAreThoseOfMemoryThatIsNotPlanned) {
  const Gpt model(small_gpt());
  for (const Case& each : cases()) {
    SCOPED_TRACE(each.name);
    kernels::Digest digests[2];
    for (const bool plan : {false, true}) {
      Config config = config_of(each);
      config.debug.plan_memory = plan;
      on_ranks(each.ranks, model.spec(24), config, [&](Engine& engine) {
        train_rounds(engine, model, engine.runtime().rank(), true, [](int) {});
        const kernels::Digest mine = engine.state_digest();
        if (engine.runtime().rank() == 0) digests[plan ? 1 : 0] = mine;
      });
    }
    EXPECT_EQ(digests[0], digests[1]);
  }
}

// The scale of the loss gradient uses the nominal tokens; the step divides by the tokens that existed.
TEST(VariableLengths, ShorterBatchesTrainAsIfTheEngineWereMadeForThem) {
  const Gpt model(small_gpt());
  kernels::Digest digests[2];
  for (const bool nominal : {false, true}) {
    on_ranks(1, model.spec(nominal ? 24 : 3), config_of(cases().front()), [&](Engine& engine) {
      Batches batches(engine, model);
      for (int step = 0; step < 3; ++step) {
        model.forward_backward(engine, batches.of(3));
        EXPECT_LT(engine.step().tokens, 2 * 3) << "some targets are ignored";
      }
      digests[nominal ? 1 : 0] = engine.state_digest();
    });
  }
  EXPECT_EQ(digests[0], digests[1]);
}

}  // namespace
}  // namespace tranche::models
