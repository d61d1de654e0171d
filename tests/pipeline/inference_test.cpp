// Evaluation, logits and generation on the stages of a pipeline equal those of one rank, for every mesh.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/models/tiny_llama.h"
#include "tests/models/training_fixture.h"
#include "tranche/core/error.h"
#include "tranche/models/generate.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/models/llama.h"
#include "tranche/pipeline/executor.h"

namespace tranche::models {
namespace {

using models::generate;
using models::Generation;
using models::GenerationOptions;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

using Tokens = std::vector<std::int32_t>;
using Prompts = std::vector<Tokens>;

std::unique_ptr<LanguageModel> four_blocks(bool llama) {
  if (llama) {
    LlamaConfig config = tiny_llama(LlamaKind::llama);
    config.layers = 4;
    config.positions = 16;
    return std::make_unique<Llama>(config);
  }
  GptConfig config = tiny_gpt();
  config.layers = 4;
  return std::make_unique<Gpt>(config);
}

Config config_of(const std::string& mesh, DataType dtype, int stage) {
  Config config = plain_config(1);
  config.train_batch_size = 0;
  config.micro_batch_size = 1;
  config.precision.compute = config.precision.communication = dtype;
  config.loss_scaling = dtype == DataType::float16;
  config.stage = stage;
  config.mesh = mesh;
  return config;
}

/// A mesh and the number of its ranks.
struct Job {
  std::string mesh;
  int ranks = 1;
};
const Job one_rank;
const std::array<Job, 4> jobs{
    {{"pipeline=2", 2}, {"pipeline=4", 4}, {"pipeline=2, shard=2", 4}, {"replicate=2, pipeline=2", 4}}};

/// Prompts of different lengths, one longer than the models' 16 positions.
Prompts ragged_prompts() {
  return {{5, 17, 60}, {1}, {9, 9, 2, 4, 40, 3, 8}, {60, 0}, {3, 14, 15, 9,  26, 53, 58, 9,  7, 9,
                                                              3, 23, 8,  46, 26, 43, 38, 32, 7, 9}};
}

/// The results of `body` on all ranks.
template <class Result>
std::vector<Result> on_each(const Job& job, const LanguageModel& model, Config config,
                            const std::function<Result(Engine&)>& body) {
  std::vector<Result> all(static_cast<std::size_t>(job.ranks));
  config.mesh = job.mesh;
  on_ranks(job.ranks, model.spec(8), config,
           [&](Engine& engine) { all[static_cast<std::size_t>(engine.runtime().rank())] = body(engine); });
  return all;
}

/// The result of `body`, which must be equal on all ranks.
template <class Result>
Result agreed(const Job& job, const LanguageModel& model, const Config& config,
              const std::function<Result(Engine&)>& body) {
  const std::vector<Result> all = on_each<Result>(job, model, config, body);
  for (const Result& other : all) EXPECT_EQ(other, all.front()) << job.mesh;
  return all.front();
}

/// The logits of a whole text, of a prompt that fills a row of a cache, and of the tokens after it.
std::vector<std::vector<float>> all_logits(Engine& engine, const LanguageModel& model) {
  write_adapters(engine);
  std::vector<std::vector<float>> logits;
  for (const Tokens& prompt : ragged_prompts()) logits.push_back(model.next_token_logits(engine, prompt));
  KeyValueCache cache(engine, model, 2, 16);
  for (std::int64_t row = 0; row < 2; ++row) {
    logits.push_back(model.prefill(engine, cache, row, ragged_prompts()[static_cast<std::size_t>(row)]));
  }
  for (std::int32_t step = 0; step < 4; ++step) {
    logits.push_back(model.decode(engine, cache, Tokens{7 * step, 60 - step}));
  }
  return logits;
}

/// Greedy texts that exceed the positions, drawn ones in several rounds, and texts without a cache.
std::vector<Tokens> all_texts(Engine& engine, const LanguageModel& model) {
  write_adapters(engine);
  GenerationOptions options;
  std::vector<Tokens> texts;
  const auto add = [&] {
    for (const Generation& text : generate(engine, model, ragged_prompts(), options)) {
      texts.push_back(text.tokens);
    }
  };
  options = {.tokens = 15, .sampling = {.temperature = 0}};
  add();
  options = {.tokens = 8,
             .context = 12,
             .max_batch = 2,
             .sampling = {.temperature = 1, .top_k = 40, .top_p = 0.9, .seed = 5}};
  add();
  options = {.tokens = 3, .sampling = {.temperature = 1, .seed = 6}, .cache = false};
  add();
  return texts;
}

TEST(PipelineInference, LogitsAndTextsAreThoseOfOneRank) {
  for (const bool llama : {false, true}) {
    const auto model = four_blocks(llama);
    for (const DataType dtype : {DataType::float32, DataType::bfloat16, DataType::float16}) {
      Config config = config_of("", dtype, 0);
      if (!llama) config.lora = {.rank = 2, .alpha = 4, .targets = {"c_attn", "c_fc", "lm_head"}};
      using Seen = std::pair<std::vector<std::vector<float>>, std::vector<Tokens>>;
      const auto seen = [&](Engine& engine) {
        return Seen{all_logits(engine, *model), all_texts(engine, *model)};
      };
      const Seen wanted = agreed<Seen>(one_rank, *model, config, seen);
      int number = 0;
      for (const Job& job : jobs) {
        for (const int stage : {0, 1, 2, 3}) {
          // At stages 0 to 2 weights are whole. fp16, and stages 1 and 2, are tested on one mesh each.
          const bool other = dtype == DataType::float16 || stage == 1 || stage == 2;
          if (other && number++ % 5 != 0) continue;
          SCOPED_TRACE(model->architecture() + " " + job.mesh + ", ZeRO stage " + std::to_string(stage) +
                       ", " + std::string(name_of(dtype)));
          config.stage = stage;
          EXPECT_EQ(agreed<Seen>(job, *model, config, seen), wanted);
        }
      }
    }
  }
}

TEST(PipelineInference, LogitsOfTheLastStageAloneAreNotSent) {
  const auto model = four_blocks(true);
  const auto sizes = on_each<std::vector<std::size_t>>(
      {"pipeline=2", 2}, *model, config_of("", DataType::float32, 0), [&](Engine& engine) {
        KeyValueCache cache(engine, *model, 1, 16);
        constexpr auto where = LogitsOn::last_stage;
        return std::vector<std::size_t>{model->next_token_logits(engine, Tokens{1}, where).size(),
                                        model->prefill(engine, cache, 0, Tokens{1, 2}, where).size(),
                                        model->decode(engine, cache, Tokens{3}, where).size()};
      });
  EXPECT_EQ(sizes[0], (std::vector<std::size_t>{0, 0, 0}));
  EXPECT_EQ(sizes[1], (std::vector<std::size_t>{61, 61, 61}));
}

TEST(PipelineInference, ACacheHoldsTheBlocksOfItsStage) {
  const auto model = four_blocks(false);
  Config config = config_of("", DataType::bfloat16, 0);
  config.pipeline_cuts = PipelineCuts::listed;
  config.pipeline_begins = {1, 2, 5};  // the embedding alone, one block, three blocks, the head alone
  const auto bytes = on_each<std::int64_t>({"pipeline=4", 4}, *model, config, [&](Engine& engine) {
    Runtime& runtime = engine.runtime();
    const auto held = [&] {
      return runtime.ledger().account(Tier::device).persistent[Category::activations];
    };
    const std::int64_t before = held();
    const KeyValueCache cache(engine, *model, 3, 10);
    EXPECT_EQ(held() - before, aligned_bytes(cache.bytes())) << runtime.rank();
    if (runtime.rank() == 1) {
      (void)cache.keys(0, 0, 3);
      try {
        (void)cache.values(1, 0, 3);
        ADD_FAILURE() << "block 1 is on the next stage";
      } catch (const InvalidArgument& error) {
        EXPECT_EQ(error.message(), "block 1 is not in the key-value cache of this rank, which has blocks 0");
      }
    }
    return cache.bytes();
  });
  const std::int64_t block = 2 * 3 * 10 * 24 * 2;  // keys and values of 3 rows of 10 tokens, in 2 bytes
  EXPECT_EQ(bytes, (std::vector<std::int64_t>{0, block, 3 * block, 0}));
  EXPECT_EQ(KeyValueCache::bytes(*model, DataType::bfloat16, 3, 10), 4 * block);
}

// Each token is reported once, on the first stage of the data rank that generates the text.
TEST(PipelineInference, TextsEndEachByItself) {
  const auto model = four_blocks(true);
  GenerationOptions options{.tokens = 15, .sampling = {.temperature = 2, .seed = 3}};
  const Config config = config_of("", DataType::float32, 3);
  const auto whole = agreed<std::vector<Tokens>>(one_rank, *model, config, [&](Engine& engine) {
    std::vector<Tokens> texts;
    for (const Generation& text : generate(engine, *model, ragged_prompts(), options))
      texts.push_back(text.tokens);
    return texts;
  });
  options.end_tokens = {whole[1][4]};
  using Ends = std::vector<std::pair<Tokens, Generation::End>>;
  Ends wanted;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const auto at = std::find(whole[i].begin(), whole[i].end(), whole[1][4]);
    wanted.emplace_back(Tokens(whole[i].begin(), at),
                        at == whole[i].end() ? Generation::End::length : Generation::End::end_token);
    if (i == 3) wanted[i] = {Tokens(whole[i].begin(), whole[i].begin() + 2), Generation::End::stopped};
  }
  EXPECT_EQ(wanted[1].second, Generation::End::end_token);
  EXPECT_EQ(wanted[3].second, Generation::End::stopped);
  std::vector<Job> all(jobs.begin(), jobs.end());
  all.push_back({"shard=4, pipeline=2", 8});  // three data ranks have one of five prompts each, and later
                                              // none
  for (const Job& job : all) {
    std::mutex mutex;
    std::map<std::int64_t, Tokens> told;
    const auto found = agreed<Ends>(job, *model, config, [&](Engine& engine) {
      GenerationOptions own = options;
      own.on_token = [&](std::int64_t prompt, std::int32_t token) {
        EXPECT_TRUE(engine.stage().first());
        const std::lock_guard lock(mutex);
        told[prompt].push_back(token);
        return told[prompt].size() == 2 && prompt == 3;
      };
      Ends ends;
      for (const Generation& text : generate(engine, *model, ragged_prompts(), own))
        ends.emplace_back(text.tokens, text.end);
      return ends;
    });
    EXPECT_EQ(found, wanted) << job.mesh;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_EQ(told[static_cast<std::int64_t>(i)], wanted[i].first) << job.mesh << ", text " << i;
    }
  }
}

TEST(PipelineInference, LogitsThatAreNotFiniteNameTheWeightOnAllStages) {
  const auto model = four_blocks(false);
  for (const auto& [tensor, element] :
       {std::pair("transformer.wpe.weight", 4 * 24), std::pair("transformer.ln_f.weight", 3)}) {
    const std::string text = agreed<std::string>(
        {"pipeline=2, shard=2", 4}, *model, config_of("", DataType::float32, 3), [&](Engine& engine) {
          std::vector<float> weight = engine.read_weight(tensor);
          weight[static_cast<std::size_t>(element)] = std::numeric_limits<float>::infinity();
          engine.write_weight(tensor, weight);
          try {
            (void)generate(engine, *model, Prompts{{1, 2}, {1, 2, 3, 4, 5}, {3}}, {.tokens = 2});
          } catch (const NumericalError& error) {
            return error.message();
          }
          return std::string("nothing was thrown");
        });
    EXPECT_THAT(text, AllOf(HasSubstr("generate: the logits behind prompt "),
                            HasSubstr("the first weight that is not finite is element " +
                                      std::to_string(element) + " of " + tensor)));
  }
}

/// The message of the error of each rank. As in the program, an error is reported before unwinding.
std::vector<std::string> messages(const Job& job, const LanguageModel& model,
                                  const std::function<void(Engine&)>& body) {
  std::vector<std::string> told(static_cast<std::size_t>(job.ranks));
  try {
    (void)on_each<bool>(job, model, config_of("", DataType::float32, 0), [&](Engine& engine) {
      std::string& mine = told[static_cast<std::size_t>(engine.runtime().rank())];
      try {
        body(engine);
        mine = "nothing was thrown";
      } catch (const std::exception& error) {
        mine = error.what();
        engine.fail(std::current_exception());
        throw;
      }
      return true;
    });
  } catch (const std::exception&) {
  }
  return told;
}

TEST(PipelineInference, AnErrorOnOneStageEndsAllAndIsNamed) {
  const auto model = four_blocks(true);
  std::atomic<int> ended = 0;
  const std::vector<std::string> of_token = messages({"shard=1, pipeline=4", 4}, *model, [&](Engine& engine) {
    GenerationOptions options{.tokens = 9};
    int tokens = 0;
    options.on_token = [&](std::int64_t, std::int32_t) -> bool {
      if (++tokens == 5) throw InvalidArgument("told to fail");
      return false;
    };
    try {
      (void)generate(engine, *model, ragged_prompts(), options);
    } catch (...) {
      // The others end although this error has not been reported yet.
      ++ended;
      for (int i = 0; i < 20000 && ended < 4; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_EQ(ended, 4);
      throw;
    }
  });
  // A peer may receive the failure in either broadcast: of the stop, or of the token before it.
  EXPECT_THAT(of_token[0], HasSubstr("told to fail"));
  for (std::size_t rank = 1; rank < 4; ++rank) {
    EXPECT_THAT(of_token[rank], AnyOf(HasSubstr("broadcast of unit stops in generation: rank 0 failed: "),
                                      HasSubstr("broadcast of unit tokens in generation: rank 0 failed: ")));
    EXPECT_THAT(of_token[rank], HasSubstr("told to fail"));
  }
  // One stage cannot begin a pass in the middle of others.
  const std::vector<std::string> of_pass = messages({"pipeline=2, shard=2", 4}, *model, [&](Engine& engine) {
    KeyValueCache cache(engine, *model, 1, 16);
    (void)model->prefill(engine, cache, 0, Tokens{1, 2, 3});
    for (std::int32_t step = 0; step < 3; ++step) {
      const bool wrong = engine.runtime().rank() == 1 && step == 1;  // first stage of data rank 1
      (void)model->decode(engine, cache, Tokens{wrong ? 61 : step});
    }
    (void)engine.weights_digest();
  });
  EXPECT_THAT(of_pass[1], HasSubstr("token 61 is not in the vocabulary of 61"));
  const std::string cause =
      " in inference: rank 1 (pipeline 0, shard 1) failed: token 61 is not in the vocabulary of 61";
  EXPECT_THAT(of_pass[3], AnyOf(HasSubstr("recv of unit residual" + cause),
                                HasSubstr("broadcast of unit logits" + cause)));
}

TEST(PipelineInference, AForwardAloneHasNoBackward) {
  class Forward : public pipeline::ChunkWork {
   public:
    TensorView input() override { return {}; }
    void forward() override {}
    ConstTensorView output() override { return {}; }
    void output_sent(const Event&) override {}
  } work;
  const auto expect_refused = [](const auto& call) {
    try {
      call();
      ADD_FAILURE() << "there is none";
    } catch (const LogicError& error) {
      EXPECT_EQ(error.message(), "backward of a micro-batch that has a forward alone");
    }
  };
  expect_refused([&] { (void)work.output_gradient(); });
  expect_refused([&] { work.backward(); });
  expect_refused([&] { work.input_gradients(); });
  expect_refused([&] { work.weight_gradients(); });
  expect_refused([&] { (void)work.input_gradient(); });
  expect_refused([&] { work.input_gradient_sent({}); });
}

// An evaluation uses a forward-only schedule: any number of batches of any size, independent of a step.
TEST(PipelineInference, EvaluatesBatchesOfAnySize) {
  for (const bool llama : {false, true}) {
    const auto model = four_blocks(llama);
    const auto evaluated = [&](Engine& engine) {
      std::vector<double> losses;
      const Mesh& mesh = engine.runtime().mesh();
      for (const int batches : {1, 7}) {
        engine.begin_evaluation();
        std::int64_t first = 0;
        for (int batch = 0; batch < batches; ++batch) {
          // Each of two data ranks has half of the rows.
          const std::int64_t rows = 2 * (1 + 5 * batch % 4), mine = rows / mesh.data_ranks();
          TokenData data(3 + 4 * batch % 13, model->shape().vocabulary, true);
          data.draw(first + mesh.data_rank(engine.runtime().rank()) * mine, mine);
          model->evaluate(engine, data.batch());
          first += rows;
        }
        const EvaluationResult result = engine.end_evaluation();
        losses.push_back(result.loss);
        losses.push_back(static_cast<double>(result.tokens));
      }
      return losses;
    };
    for (const auto& [with, without] :
         {std::pair(Job{"pipeline=3", 3}, one_rank), std::pair(Job{"pipeline=2, shard=2", 4}, Job{"", 2})}) {
      for (const int stage : {0, 3}) {
        const Config config = config_of("", DataType::bfloat16, stage);
        EXPECT_EQ(agreed<std::vector<double>>(with, *model, config, evaluated),
                  agreed<std::vector<double>>(without, *model, config, evaluated))
            << model->architecture() << ", ZeRO stage " << stage;
      }
    }
  }
}

}  // namespace
}  // namespace tranche::models
