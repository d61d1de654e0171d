// Compares plans with runs: every byte of every category, and every element sent.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "tests/core/error_text.h"
#include "tests/core/rounds.h"
#include "tests/core/sweep.h"
#include "tests/tools/program_fixture.h"
#include "tranche/comm/backends.h"
#include "tranche/core/random.h"
#include "tranche/models/gpt.h"
#include "tranche/models/llama.h"
#include "tranche/optim/rules.h"
#include "tranche/planner/planner.h"
#include "tranche/training/batch_feeder.h"

namespace tranche::planner {
namespace {

using namespace tools;  // for the program, which runs what is planned

using nlohmann::json;

struct Measured {
  std::array<TierAccount, tier_count> tiers;
  Engine::StateBytes state;
  std::string traffic, memory;
  std::int64_t formula = 0;
  WorkCount work;
  OffloadTraffic offload;
};

/// The bytes that each rank of a real run of `request` holds and sends, on thread ranks.
std::vector<Measured> measure(const PlanRequest& request) {
  std::vector<Measured> all(static_cast<std::size_t>(request.ranks));
  run_thread_ranks(request.ranks, [&](int rank, const CommunicatorFactory& factory) {
    Config config = request.config;
    validate_config(config, request.ranks);
    RuntimeOptions options = RuntimeOptions::from(config);
    options.threads = 1;
    options.log_level = LogLevel::off;
    Runtime runtime(options, factory);
    Engine engine(runtime, request.model.spec(request.sequence), config);
    const training::BatchShape shape{config.micro_batch_size, config.accumulation_steps,
                                     runtime.mesh().data_ranks()};
    const training::BatchFeeder feeder(engine, request.model.language->shape().vocabulary, shape,
                                       request.sequence, request.documents);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(shape.micro_batch * request.sequence), 1);
    const std::vector<std::int64_t> samples(static_cast<std::size_t>(shape.micro_batch), 0);
    const std::vector<std::int32_t> places(tokens.size(), 0);
    const auto lengths = static_cast<std::int64_t>(std::max<std::size_t>(request.lengths.size(), 1));
    // Data ranks other than the planned one begin at another length of the round.
    const Mesh& mesh = runtime.mesh();
    const int data_rank = mesh.data_rank(rank);
    auto next = static_cast<std::size_t>(mesh.data_rank(request.rank) == data_rank ? 0 : data_rank);
    const auto batch = [&] {
      const std::int64_t length =
          request.lengths.empty() ? request.sequence : request.lengths[next++ % request.lengths.size()];
      const Shape extents{shape.micro_batch, length};
      const ConstTensorView view{tokens.data(), DataType::int32, extents};
      models::TokenBatch result{view, view, samples};
      if (request.documents) {
        result.document_begin = result.positions = ConstTensorView(places.data(), DataType::int32, extents);
      }
      return result;
    };
    WorkCount before;
    OffloadTraffic offload;
    const std::int64_t steps = request.lengths.empty() ? 4 : 3 * lengths;
    for (std::int64_t step = 0; step < steps; ++step) {
      before = engine.compute_stream().work();
      models::train_step(*request.model.language, engine, [&](std::int64_t) { return batch(); });
      offload = engine.step().offload_traffic;
    }
    const WorkCount after = engine.compute_stream().work();
    const std::string traffic = engine.traffic_report();
    engine.begin_evaluation();
    for (std::int64_t pass = 0; pass < steps; ++pass) request.model.language->evaluate(engine, batch());
    (void)engine.end_evaluation();
    (void)engine.weights_digest();
    (void)engine.state_digest();
    Measured& measured = all[static_cast<std::size_t>(rank)];
    measured.memory = engine.memory_report();
    for (const Tier tier : all_tiers) {
      measured.tiers[static_cast<std::size_t>(tier)] = runtime.ledger().account(tier);
    }
    measured.state = engine.state_bytes();
    measured.traffic = traffic;
    measured.offload = offload;
    measured.formula = engine.formula_traffic_elements();
    measured.work = {after.kernels - before.kernels,
                     after.floating_point_operations - before.floating_point_operations,
                     after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written};
  });
  return all;
}

/// Draws everything on which memory depends.
PlanRequest draw(std::uint64_t number) {
  const RandomKey key{97, RandomPurpose::test, 5};
  std::uint64_t counter = number * 64;
  const auto pick = [&](std::uint32_t n) { return static_cast<int>(random_bits(key, counter++) % n); };
  PlanRequest request;
  models::GptConfig gpt = models::GptConfig::preset("gpt-nano");
  gpt.heads = 1 + pick(3);
  gpt.width = gpt.heads * (3 + pick(6));
  gpt.layers = 1 + pick(4);
  gpt.vocabulary = 31 + pick(60);
  gpt.positions = 9;
  gpt.inner = pick(2) == 0 ? 0 : 11 + pick(30);
  gpt.residual_dropout = pick(2) == 0 ? 0.0f : 0.1f;
  request.model.name = "drawn";
  request.model.language = std::make_shared<models::Gpt>(gpt);
  request.sequence = 2 + pick(8);
  request.ranks = 1 + pick(8);
  request.rank = pick(static_cast<std::uint32_t>(request.ranks));
  request.ranks_per_node = pick(2) == 0 ? 0 : request.ranks;
  Config& config = request.config;
  config.stage = pick(4);
  config.micro_batch_size = 1 + pick(3);
  config.accumulation_steps = 1 + pick(3);
  config.reduction = std::array{ReductionPolicy::automatic, ReductionPolicy::boundary,
                                ReductionPolicy::micro_batch}[static_cast<std::size_t>(pick(3))];
  PrecisionConfig& precision = config.precision;
  precision.compute = pick(3) == 0   ? DataType::float32
                      : pick(2) == 0 ? DataType::bfloat16
                                     : DataType::float16;
  precision.communication = pick(3) == 0 ? DataType::float32 : precision.compute;
  precision.accumulation = pick(2) == 0 ? DataType::float32 : DataType::bfloat16;
  precision.moments =
      std::array{DataType::float32, DataType::bfloat16, DataType::block8}[static_cast<std::size_t>(pick(3))];
  config.loss_scaling = precision.compute == DataType::float16;
  if (pick(4) == 0) config.optimizer.type = "SGD";
  if (config.optimizer.type == "SGD") precision.moments = DataType::float32;  // otherwise it is refused
  config.activation_checkpointing = pick(2) == 0;
  config.checkpoint_every = 1 + pick(3);
  config.vocabulary_chunk = pick(2) == 0 ? 0 : 7 + pick(40);
  config.overlap = pick(4) != 0;
  config.depth = 1 + pick(3);
  config.prefetch_elements = pick(3) == 0 ? 500 : 50'000'000;
  config.gather_for = pick(3) == 0 ? GatherFor::step : GatherFor::use;
  if (pick(3) == 0) config.persistent_tensor_elements = 20 * (1 + pick(60));
  config.reduce_bucket_elements = pick(2) == 0 ? 1024 : 500'000'000;
  config.allgather_bucket_elements = pick(2) == 0 ? 1024 : 500'000'000;
  if (pick(3) == 0) config.frozen = {"transformer.wte.weight", "*ln_1*"};
  config.workspace_bytes = std::int64_t{8} << 20;
  config.staging_bytes = std::int64_t{64} << 10;
  // Half of the draws offload something.
  OffloadConfig& offload = config.offload;
  const std::array tiers{OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme};
  if (pick(2) == 0) offload.optimizer = tiers[static_cast<std::size_t>(pick(3))];
  if (pick(2) == 0 && config.stage == 3) offload.parameters = tiers[static_cast<std::size_t>(pick(3))];
  offload.activations = config.activation_checkpointing && pick(2) == 0;
  offload.ratio = pick(3) == 0 ? pick(5) / 4.0 : 1;
  offload.tile_elements = 4096 * (1 + pick(3));
  offload.tile_buffers = 3 + pick(3);
  offload.parameter_buffers = 2 + pick(3);
  offload.host_state = pick(2) == 0 ? 0 : 4096 * pick(200);
  offload.nvme_path = std::filesystem::temp_directory_path().string();
  // A third of the draws have replicas of the state, if the number of ranks is divisible.
  const int shards = 1 + pick(4);
  if (pick(3) == 0 && request.ranks > 1 && request.ranks % shards == 0) {
    config.mesh = (pick(2) == 0 ? "replicate=*, shard=" : "shard=") + std::to_string(shards);
    if (config.mesh.starts_with("shard")) config.mesh += ", replicate=*";
    if (pick(2) == 0 && config.stage > 0 && offload.parameters == OffloadTier::none) {
      config.replicate = Replicate::parameters;
    }
    if (pick(2) == 0 && precision.accumulation == DataType::float32) config.replica_sum = ReplicaSum::step;
  }
  return request;
}

void expect_equal(const std::map<std::string, TrafficCount>& planned, const json& measured,
                  const std::string& line) {
  std::size_t operations = 0;
  for (const auto& [name, count] : measured.items()) {
    if (name == "control" || !count.is_object()) continue;
    ++operations;
    ASSERT_TRUE(planned.count(name)) << name << " " << line;
    EXPECT_EQ(planned.at(name).calls, count["calls"].get<std::int64_t>()) << name << " " << line;
    EXPECT_EQ(planned.at(name).elements, count["elements"].get<std::int64_t>()) << name << " " << line;
    EXPECT_EQ(planned.at(name).bytes, count["bytes"].get<std::int64_t>()) << name << " " << line;
  }
  EXPECT_EQ(planned.size(), operations) << line;
}

void expect_plan_is_measured(std::uint64_t number, const PlanRequest& request, const Measured& run) {
  const PlanResult plan = plan_run(request);
  const std::string line = "draw " + std::to_string(number) + ": rank " + std::to_string(request.rank) +
                           " of " + std::to_string(request.ranks) + ", model " +
                           request.model.language->to_json() + ", config " + plan.config;
  for (const Tier tier : all_tiers) {
    const TierAccount& planned = plan.tier(tier);
    const TierAccount& measured = run.tiers[static_cast<std::size_t>(tier)];
    EXPECT_EQ(planned.peak, measured.peak) << line;
    EXPECT_EQ(planned.category_peak.bytes, measured.category_peak.bytes) << line;
    EXPECT_EQ(planned.persistent.bytes, measured.persistent.bytes) << line;
    EXPECT_EQ(planned.at_peak.bytes, measured.at_peak.bytes) << line;
    EXPECT_EQ(planned.peak_phase, measured.peak_phase) << line;
  }
  // A report has the maximum over ranks. Ranks are equal unless they begin at different lengths, own matrices
  // that they update whole, or have different parts of the model.
  const bool whole = find_rule(request.config.optimizer.type)->rule->whole_matrices;
  const Mesh mesh = request.config.mesh_of(request.ranks);
  const bool alike = mesh.size(MeshAxis::pipeline) == 1 && mesh.size(MeshAxis::tensor) == 1;
  if (request.lengths.empty() && !whole && alike) {
    EXPECT_EQ(plan.memory, run.memory) << line;
  }
  EXPECT_EQ(plan.state.parameters, run.state.parameters) << line;
  EXPECT_EQ(plan.state.gradients, run.state.gradients) << line;
  EXPECT_EQ(plan.state.optimizer, run.state.optimizer) << line;
  EXPECT_EQ(plan.state.padding, run.state.padding) << line;
  const json traffic = json::parse(run.traffic);
  expect_equal(plan.data, traffic, line);
  expect_equal(plan.control, traffic["control"], line);
  EXPECT_EQ(plan.formula_elements, run.formula) << line;
  // The formula of layers' messages is for whole sequences.
  const bool formula_holds =
      request.lengths.empty() || mesh.ranks() == mesh.size(MeshAxis::replicate) * mesh.size(MeshAxis::shard);
  std::int64_t bytes = 0;
  for (const auto& [operation, count] : plan.data) bytes += count.bytes;
  if (formula_holds) {
    EXPECT_EQ(traffic["formula_bytes"], bytes) << line;
  }
  // On each axis the plan's count equals the run's, and both equal the formula.
  std::size_t axes = 0;
  for (const json& sent : traffic["by_axis"]) {
    ++axes;
    for (const auto& [axis, planned] : plan.axes) {
      if (sent["axis"] != name_of(axis)) continue;
      EXPECT_EQ(sent["elements"], planned.elements) << line;
      EXPECT_EQ(sent["bytes"], planned.bytes) << line;
      if (!formula_holds) continue;
      EXPECT_EQ(sent["formula_elements"], planned.elements) << line;
      EXPECT_EQ(planned.formula_bytes, planned.bytes) << line;
    }
  }
  EXPECT_EQ(plan.axes.size(), axes) << line;
  EXPECT_EQ(plan.work, run.work) << line;
  EXPECT_EQ(plan.offload_bytes.to_host, run.offload.to_host) << line;
  EXPECT_EQ(plan.offload_bytes.from_host, run.offload.from_host) << line;
  EXPECT_EQ(plan.offload_bytes.nvme_read, run.offload.nvme_read) << line;
  EXPECT_EQ(plan.offload_bytes.nvme_written, run.offload.nvme_written) << line;
  // The plan computes its seconds from the same bytes as the run. Exceptions: the disk's bytes are rounded up
  // for each tensor and tile, and the seconds are for the whole sequence, without messages of matrices.
  if (request.lengths.empty() && !whole) {
    EXPECT_EQ(plan.offload.bytes.to_host, run.offload.to_host) << line;
    EXPECT_EQ(plan.offload.bytes.from_host, run.offload.from_host) << line;
  }
  EXPECT_LE(plan.offload.bytes.nvme_read, run.offload.nvme_read) << line;
  EXPECT_LE(plan.offload.bytes.nvme_written, run.offload.nvme_written) << line;
  EXPECT_EQ(plan.offload.bytes.nvme_written > 0, run.offload.nvme_written > 0) << line;
}

void expect_plan_is_measured(std::uint64_t number, const PlanRequest& request) {
  expect_plan_is_measured(number, request, measure(request).at(static_cast<std::size_t>(request.rank)));
}

void expect_plans_are_measured(const tranche::test::Sweep& cases) {
  for (const std::uint64_t number : tranche::test::rounds(cases)) {
    expect_plan_is_measured(number, draw(number));
    if (testing::Test::HasFailure()) return;
  }
}

/// Changes the draw to a model that supports documents, with alternating lengths.
PlanRequest draw_lengths(std::uint64_t number) {
  const RandomKey key{97, RandomPurpose::test, 6};
  std::uint64_t counter = number * 64;
  const auto pick = [&](std::uint32_t n) { return static_cast<int>(random_bits(key, counter++) % n); };
  PlanRequest request = draw(1000 + number);
  request.documents = pick(2) == 0;
  if (request.documents) {
    models::LlamaConfig llama = models::LlamaConfig::preset("qwen3-nano");
    llama.layers = 1 + pick(3);
    llama.vocabulary = 61;
    llama.positions = 9;
    request.model.language = std::make_shared<models::Llama>(llama);
    if (!request.config.frozen.empty()) request.config.frozen = {"*norm*"};
  }
  request.sequence = 9;
  if (pick(4) != 0) {
    for (int i = 0; i < 4; ++i) request.lengths.push_back(1 + pick(9));
  }
  return request;
}

/// Changes the draw to a mesh with a pipeline, without settings that it refuses.
PlanRequest draw_stages(std::uint64_t number) {
  const RandomKey key{97, RandomPurpose::test, 7};
  std::uint64_t counter = number * 64;
  const auto pick = [&](std::uint32_t n) { return static_cast<int>(random_bits(key, counter++) % n); };
  PlanRequest request = draw(2000 + number);
  Config& config = request.config;
  const int most = static_cast<int>(request.model.language->shape().layers) + 2;
  const int stages = std::min(2 + pick(3), most), shards = 1 + pick(2), replicas = pick(3) == 0 ? 2 : 1;
  request.ranks = stages * shards * replicas;
  request.rank = pick(static_cast<std::uint32_t>(request.ranks));
  request.ranks_per_node = 0;
  const std::string pipeline = "pipeline=" + std::to_string(stages),
                    rest = "shard=" + std::to_string(shards) + ", replicate=" + std::to_string(replicas);
  config.mesh = pick(2) == 0 ? pipeline + ", " + rest : rest + ", " + pipeline;
  config.replicate =
      replicas > 1 && config.stage > 0 && pick(2) == 0 ? Replicate::parameters : Replicate::all;
  config.replica_sum = replicas > 1 && config.precision.accumulation == DataType::float32 && pick(2) == 0
                           ? ReplicaSum::step
                           : ReplicaSum::micro_batch;
  config.offload.parameters = OffloadTier::none;
  config.offload.activations = false;
  config.accumulation_steps = 1 + pick(6);
  if (config.precision.compute != DataType::float16 && config.precision.communication != DataType::float16) {
    config.quantized_gradients = pick(4) == 0;
    config.quantized_weights = pick(4) == 0;
  }
  if (pick(5) == 0 && config.precision.moments == DataType::float32) config.optimizer.type = "Muon";
  config.pipeline_cuts = pick(2) == 0 ? PipelineCuts::balanced : PipelineCuts::equal;
  config.pipeline_schedule = pick(2) == 0 ? "1f1b" : "afab";
  return request;
}

TEST(PlanIsMeasured, EveryRankOfAPipeline) {
  for (const std::uint64_t number : tranche::test::rounds(tranche::test::sweep({0, 40}))) {
    PlanRequest request = draw_stages(number);
    const std::vector<Measured> runs = measure(request);
    for (request.rank = 0; request.rank < request.ranks; ++request.rank) {
      expect_plan_is_measured(number, request, runs[static_cast<std::size_t>(request.rank)]);
      if (testing::Test::HasFailure()) return;
    }
  }
}

/// Changes the draw to a mesh with the axis tensor, without settings that it refuses.
PlanRequest draw_parts(std::uint64_t number, std::int64_t positions = 9) {
  const RandomKey key{97, RandomPurpose::test, 13};
  std::uint64_t counter = number * 64;
  const auto pick = [&](std::uint32_t n) { return static_cast<int>(random_bits(key, counter++) % n); };
  PlanRequest request = draw(3000 + number);
  Config& config = request.config;
  int parts = 1, stages = 1, shards = 1, replicas = 1;
  if (pick(2) == 0) {
    models::GptConfig gpt = models::GptConfig::preset("gpt-nano");
    gpt.heads = 12;
    gpt.width = 36;
    gpt.layers = 1 + pick(4);
    gpt.vocabulary = 31 + pick(60);
    gpt.positions = positions;
    gpt.inner = 11 + pick(30);
    gpt.residual_dropout = gpt.attention_dropout = pick(2) == 0 ? 0.0f : 0.1f;
    request.model.language = std::make_shared<models::Gpt>(gpt);
    if (!config.frozen.empty()) {
      config.frozen = pick(2) == 0 ? std::vector<std::string>{"*c_attn*", "*ln_1*"}
                                   : std::vector<std::string>{"transformer.w?e.weight"};
    }
    parts = std::array{2, 3, 4, 6}[static_cast<std::size_t>(pick(4))];
  } else {
    models::LlamaConfig llama = models::LlamaConfig::preset("qwen3-nano");
    llama.layers = 1 + pick(4);
    llama.heads = 8;
    llama.key_value_heads = 2;
    llama.tied = pick(2) == 0;
    llama.vocabulary = 31 + pick(60);
    llama.inner = 11 + pick(30);
    llama.positions = positions;
    request.model.language = std::make_shared<models::Llama>(llama);
    if (!config.frozen.empty()) {
      config.frozen = pick(2) == 0 ? std::vector<std::string>{"*k_proj*", "*layernorm*"}
                                   : std::vector<std::string>{"model.embed_tokens.weight"};
    }
    parts = std::array{2, 4, 8}[static_cast<std::size_t>(pick(3))];
  }
  const int most = static_cast<int>(request.model.language->shape().layers) + 2;
  do {
    stages = 1 + pick(2), shards = 1 + pick(3), replicas = 1 + pick(2);
  } while (parts * stages * shards * replicas > 8 || stages > most);
  request.ranks = parts * stages * shards * replicas;
  request.rank = 0;
  request.ranks_per_node = 0;
  std::vector<std::string> axes{"tensor=" + std::to_string(parts)};
  const auto insert = [&](const char* name, int size) {
    axes.insert(axes.begin() + pick(static_cast<std::uint32_t>(axes.size()) + 1),
                name + std::to_string(size));
  };
  insert("shard=", shards);
  insert("pipeline=", stages);
  insert("replicate=", replicas);
  config.mesh = axes[0] + ", " + axes[1] + ", " + axes[2] + ", " + axes[3];
  config.replicate =
      replicas > 1 && config.stage > 0 && pick(2) == 0 ? Replicate::parameters : Replicate::all;
  config.replica_sum = replicas > 1 && config.precision.accumulation == DataType::float32 && pick(2) == 0
                           ? ReplicaSum::step
                           : ReplicaSum::micro_batch;
  if (config.stage == 3 && pick(2) == 0) {
    config.offload.parameters = pick(2) == 0 ? OffloadTier::cpu : OffloadTier::nvme;
  }
  if (stages > 1) config.offload.activations = false;
  if (stages > 1 || config.replicate == Replicate::parameters) config.offload.parameters = OffloadTier::none;
  if (config.precision.moments == DataType::block8) config.precision.moments = DataType::bfloat16;
  if (config.frozen.empty() && pick(3) == 0) {
    config.lora = {.rank = 1 + pick(4), .alpha = 4, .dropout = pick(2) == 0 ? 0 : 0.1};
  }
  if (config.precision.compute != DataType::float16 && config.precision.communication != DataType::float16) {
    config.quantized_gradients = pick(4) == 0;
    config.quantized_weights = pick(4) == 0;
  }
  // The noise needs several gradients that are not added.
  config.gradient_noise_scale =
      stages == 1 && pick(2) == 0 &&
      (shards * replicas > 1 ||
       (config.accumulation_steps > 1 && config.effective_reduction(1) == ReductionPolicy::micro_batch));
  return request;
}

/// Changes the draw to a mesh with the axis context, with or without the axis tensor.
PlanRequest draw_sequences(std::uint64_t number) {
  const RandomKey key{97, RandomPurpose::test, 16};
  std::uint64_t counter = number * 64;
  const auto pick = [&](std::uint32_t n) { return static_cast<int>(random_bits(key, counter++) % n); };
  const int context = 2 + pick(3);
  const bool cut = pick(2) == 0;
  std::uint64_t other = 1000 * (number + 1);
  PlanRequest request = draw_parts(other, 24);
  const auto ranks_of = [&] {
    const int parts = request.config.mesh_of(request.ranks).size(MeshAxis::tensor);
    return request.ranks / (cut ? 1 : parts) * context;
  };
  while (ranks_of() > 8) request = draw_parts(++other, 24);
  Config& config = request.config;
  config.gradient_noise_scale = false;  // refused, because a rank has only a part of each sample's gradient
  const std::string tensor = "tensor=" + std::to_string(config.mesh_of(request.ranks).size(MeshAxis::tensor));
  request.ranks = ranks_of();
  if (!cut) config.mesh.replace(config.mesh.find(tensor), tensor.size(), "tensor=1");
  const std::string axis = "context=" + std::to_string(context);
  config.mesh = pick(2) == 0 ? axis + ", " + config.mesh : config.mesh + ", " + axis;
  const int parts = config.mesh_of(request.ranks).size(MeshAxis::tensor);
  const bool gpt = request.model.language->architecture() == "GPT2LMHeadModel";
  const bool heads_divide = gpt ? 12 / parts % context == 0 : parts == 1 && context == 2;
  if (heads_divide && pick(2) == 0) config.context_exchange = ContextExchange::ulysses;
  request.sequence = 2 * context * (1 + pick(3));
  request.documents = !gpt && pick(2) == 0;
  if (pick(3) == 0) {
    for (int i = 0; i < 3; ++i) {
      request.lengths.push_back(1 + pick(static_cast<std::uint32_t>(request.sequence)));
    }
  }
  // Some sequences need padding. The longest has no more tokens than the table of positions.
  if (request.sequence > 2 * context && pick(2) == 0)
    request.sequence -= 1 + pick(2 * static_cast<std::uint32_t>(context) - 1);
  for (std::int64_t& length : request.lengths) length = std::min(length, request.sequence);
  return request;
}

/// Changes the draw to a mesh with a pipeline and any schedule, with several chunks per rank if the schedule
/// has them.
PlanRequest draw_schedule(std::uint64_t number) {
  const RandomKey key{97, RandomPurpose::test, 11};
  std::uint64_t counter = number * 64;
  const auto pick = [&](std::uint32_t n) { return static_cast<int>(random_bits(key, counter++) % n); };
  PlanRequest request = draw_stages(500 + number);
  Config& config = request.config;
  models::LlamaConfig llama = models::LlamaConfig::preset("qwen3-nano");
  llama.layers = 10 + pick(3);
  llama.tied = pick(2) == 0;
  llama.vocabulary = 61;
  llama.positions = 9;
  request.model.language = std::make_shared<models::Llama>(llama);
  request.sequence = 9;
  if (!config.frozen.empty()) config.frozen = {"*norm*"};
  config.pipeline_schedule = std::array{
      "1f1b", "afab", "interleaved", "breadth-first", "zb-h1", "zb-v"}[static_cast<std::size_t>(pick(6))];
  const int stages = config.mesh_of(request.ranks).size(MeshAxis::pipeline);
  if (config.pipeline_schedule == "interleaved") config.accumulation_steps = stages * (1 + pick(2));
  if (config.pipeline_schedule == "interleaved" || config.pipeline_schedule == "breadth-first") {
    config.pipeline_chunks = 1 + pick(3);
  }
  return request;
}

TEST(PlanIsMeasured, EveryRankOfAMeshThatCutsLayers) {
  const tranche::test::Sweep cases = tranche::test::sweep({0, 40});
  tranche::test::AxesMet axes;
  for (std::uint64_t number = cases.first; number < cases.end(); ++number) {
    const PlanRequest request = draw_parts(number);
    const Mesh mesh = request.config.mesh_of(request.ranks);
    axes.meet("parts", mesh.size(MeshAxis::tensor));
    axes.meet("stages", mesh.size(MeshAxis::pipeline));
    axes.meet("shards", mesh.size(MeshAxis::shard));
    axes.meet("replicas", mesh.size(MeshAxis::replicate));
    axes.meet("stage", request.config.stage);
    axes.meet("parameters", request.config.offload.parameters);
    axes.meet("frozen", !request.config.frozen.empty());
    axes.meet("adapters", request.config.lora.any());
    axes.meet("noise", request.config.gradient_noise_scale);
  }
  axes.expect("parts", {2, 3, 4, 6, 8});
  axes.expect("stages", {1, 2});
  axes.expect("shards", {1, 2, 3});
  axes.expect("replicas", {1, 2});
  axes.expect("stage", {0, 1, 2, 3});
  axes.expect("parameters", {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme});
  axes.expect("frozen", {false, true});
  axes.expect("adapters", {false, true});
  axes.expect("noise", {false, true});
  for (const std::uint64_t number : tranche::test::rounds(cases)) {
    PlanRequest request = draw_parts(number);
    const std::vector<Measured> runs = measure(request);
    for (request.rank = 0; request.rank < request.ranks; ++request.rank) {
      expect_plan_is_measured(number, request, runs[static_cast<std::size_t>(request.rank)]);
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(PlanIsMeasured, EveryRankOfAMeshThatCutsSequences) {
  const tranche::test::Sweep cases = tranche::test::sweep({0, 40});
  tranche::test::AxesMet axes;
  for (std::uint64_t number = cases.first; number < cases.end(); ++number) {
    const PlanRequest request = draw_sequences(number);
    const Mesh mesh = request.config.mesh_of(request.ranks);
    axes.meet("parts", mesh.size(MeshAxis::context));
    axes.meet("stages", mesh.size(MeshAxis::pipeline));
    axes.meet("tensor", mesh.size(MeshAxis::tensor) > 1);
    axes.meet("shards", mesh.size(MeshAxis::shard) > 1);
    axes.meet("replicas", mesh.size(MeshAxis::replicate) > 1);
    axes.meet("stage", request.config.stage);
    axes.meet("documents", request.documents);
    axes.meet("exchange", request.config.context_exchange);
    axes.meet("lengths", !request.lengths.empty());
    axes.meet("padding", request.sequence % (2 * mesh.size(MeshAxis::context)) != 0);
  }
  axes.expect("parts", {2, 3, 4});
  axes.expect("stages", {1, 2});
  for (const char* axis : {"tensor", "shards", "replicas", "documents", "lengths", "padding"}) {
    axes.expect(axis, {false, true});
  }
  axes.expect("stage", {0, 1, 2, 3});
  axes.expect("exchange", {ContextExchange::gather, ContextExchange::ulysses});
  for (const std::uint64_t number : tranche::test::rounds(cases)) {
    PlanRequest request = draw_sequences(number);
    const std::vector<Measured> runs = measure(request);
    const Mesh mesh = request.config.mesh_of(request.ranks);
    for (request.rank = 0; request.rank < request.ranks; ++request.rank) {
      // Other data ranks begin at other lengths.
      if (!request.lengths.empty() && mesh.data_rank(request.rank) != 0) continue;
      expect_plan_is_measured(number, request, runs[static_cast<std::size_t>(request.rank)]);
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(PlanIsMeasured, EveryRankUnderEverySchedule) {
  const tranche::test::Sweep cases = tranche::test::sweep({0, 40});
  tranche::test::AxesMet axes;
  for (std::uint64_t number = cases.first; number < cases.end(); ++number) {
    const Config config = draw_schedule(number).config;
    axes.meet("schedule", config.pipeline_schedule);
    axes.meet("ZeRO", config.stage);
    axes.meet("checkpointing", config.activation_checkpointing);
  }
  axes.expect<std::string>("schedule", {"1f1b", "afab", "interleaved", "breadth-first", "zb-h1", "zb-v"});
  axes.expect("ZeRO", {0, 1, 2, 3});
  axes.expect("checkpointing", {false, true});
  for (const std::uint64_t number : tranche::test::rounds(cases)) {
    PlanRequest request = draw_schedule(number);
    SCOPED_TRACE(request.config.pipeline_schedule + ", " + std::to_string(request.config.pipeline_chunks));
    const std::vector<Measured> runs = measure(request);
    for (request.rank = 0; request.rank < request.ranks; ++request.rank) {
      expect_plan_is_measured(number, request, runs[static_cast<std::size_t>(request.rank)]);
      if (testing::Test::HasFailure()) return;
    }
  }
}

// Layers that are cut, under each schedule in turn.
TEST(PlanIsMeasured, EveryRankOfCutLayersUnderEverySchedule) {
  constexpr std::array names{"1f1b", "afab", "interleaved", "breadth-first", "zb-h1", "zb-v"};
  for (const std::uint64_t number : tranche::test::rounds(tranche::test::sweep({0, names.size()}))) {
    std::uint64_t drawn = 50 * number;
    PlanRequest request = draw_parts(drawn);
    while (request.config.mesh_of(request.ranks).size(MeshAxis::pipeline) == 1 ||
           request.model.language->shape().layers < 2) {
      request = draw_parts(++drawn);
    }
    request.config.pipeline_schedule = names[number % names.size()];
    request.config.accumulation_steps = 4;
    const std::vector<Measured> runs = measure(request);
    for (request.rank = 0; request.rank < request.ranks; ++request.rank) {
      expect_plan_is_measured(drawn, request, runs[static_cast<std::size_t>(request.rank)]);
      if (testing::Test::HasFailure()) return;
    }
  }
}

// Alternating lengths, and buffers of documents: the ledger after as many rounds equals the plan.
TEST(PlanIsMeasured, LengthsInTurnAndDocuments) {
  for (const std::uint64_t number : tranche::test::rounds(tranche::test::sweep({0, 25}))) {
    expect_plan_is_measured(number, draw_lengths(number));
    if (testing::Test::HasFailure()) return;
  }
}

TEST(PlanIsMeasured, DocumentsTakeEightBytesATokenAndLengthsAreChecked) {
  PlanRequest request = draw_lengths(0);
  for (std::uint64_t number = 1; !request.documents; ++number) request = draw_lengths(number);
  request.lengths = {};
  PlanRequest without = request;
  without.documents = false;
  const auto other = [](const PlanRequest& of) {
    return plan_run(of).tier(Tier::device).persistent[Category::other];
  };
  EXPECT_EQ(other(request) - other(without),
            2 * aligned_bytes(4 * request.config.micro_batch_size * request.sequence));
  request.lengths = {4, 10};
  EXPECT_THAT(tranche::test::message_of<ConfigurationError>([&] { (void)plan_run(request); }),
              testing::HasSubstr("a length of 10 is planned, which is not in 1..9, the sequence"));
}

/// Draws any rule with any format of its states and master weights. A new format is one line here.
PlanRequest draw_rule(std::uint64_t number) {
  const RandomKey key{97, RandomPurpose::test, 7};
  std::uint64_t counter = number * 64;
  const auto pick = [&](std::size_t n) { return random_bits(key, counter++) % n; };
  PlanRequest request = draw(2000 + number);
  Config& config = request.config;
  const std::vector<RuleType>& types = rule_types();
  const RuleType& type = types[pick(types.size())];
  config.optimizer = {std::string(type.name), 1e-3, {}};
  for (const RuleOption& option : type.rule->options) {  // options that add states
    if (option.name == "momentum" || option.name == "amsgrad" || option.name == "centered") {
      if (pick(2) == 0)
        config.optimizer.parameters[std::string(option.name)] = option.name == "momentum" ? 0.5 : 1.0;
    }
  }
  const bool may_be_reduced =
      type.name != "Adagrad" && !(type.name == "SGD" && config.optimizer.parameters.empty());
  PrecisionConfig& precision = config.precision;
  precision.moments =
      std::array{DataType::float32, DataType::bfloat16, DataType::block8}[may_be_reduced ? pick(3) : 0];
  precision.master = std::array{MasterFormat::fp32, MasterFormat::split, MasterFormat::none}[pick(3)];
  precision.stochastic_rounding = precision.master == MasterFormat::none && pick(2) == 0;
  if (precision.master != MasterFormat::fp32 && precision.compute != DataType::bfloat16) {
    precision.compute = DataType::bfloat16;
    config.loss_scaling = false;
  }
  return request;
}

void expect_rules_are_measured(const tranche::test::Sweep& cases) {
  for (const std::uint64_t number : tranche::test::rounds(cases)) {
    SCOPED_TRACE("draw_rule(" + std::to_string(number) + ")");
    expect_plan_is_measured(number, draw_rule(number));
    if (testing::Test::HasFailure()) return;
  }
}

// 200 draws, 180 of them slow.
TEST(PlanOfARule, IsMeasuredToTheByte) {
  tranche::test::AxesMet axes;
  for (std::uint64_t number = 0; number < 200; ++number) {
    const Config config = draw_rule(number).config;
    axes.meet("rule", config.optimizer.type);
    axes.meet("rule in format", config.optimizer.type + " " + std::string(name_of(config.precision.moments)));
    axes.meet("master on tier", std::string(name_of(config.precision.master)) + " " +
                                    std::string(name_of(config.offload.optimizer)));
    axes.meet("stochastic rounding", config.precision.stochastic_rounding);
    axes.meet("rule on tier", config.optimizer.type + " " + std::string(name_of(config.offload.optimizer)));
    axes.meet("mesh", !config.mesh.empty());
    axes.meet("stage", config.stage);
  }
  for (const RuleType& type : rule_types()) {
    const std::string name(type.name);
    axes.expect<std::string>("rule", {name});
    if (name != "Adagrad") axes.expect<std::string>("rule in format", {name + " bf16", name + " block8"});
    for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
      axes.expect<std::string>("rule on tier", {name + " " + std::string(name_of(tier))});
    }
  }
  for (const char* master : {"fp32", "split", "none"}) {
    for (const char* tier : {"none", "cpu", "nvme"}) {
      axes.expect<std::string>("master on tier", {std::string(master) + " " + tier});
    }
  }
  axes.expect("stochastic rounding", {false, true});
  axes.expect("mesh", {false, true});
  axes.expect("stage", {0, 1, 2, 3});
  expect_rules_are_measured(tranche::test::sweep({0, 20}));
}

class PlanOfARuleSlow : public testing::TestWithParam<std::uint64_t> {};
TEST_P(PlanOfARuleSlow, IsMeasuredToTheByte) {
  expect_rules_are_measured(tranche::test::sweep({20 + 60 * GetParam(), 60}));
}
INSTANTIATE_TEST_SUITE_P(Draws, PlanOfARuleSlow, testing::Values(0, 1, 2));

// 200 draws, 150 of them slow, in parts that can run separately.
TEST(PlanIsMeasured, ToTheByte) {
  const auto cases = tranche::test::sweep({0, 50});
  tranche::test::AxesMet axes;
  for (std::uint64_t number = cases.first; number < cases.end(); ++number) {
    const PlanRequest request = draw(number);
    axes.meet("ranks", request.ranks);
    axes.meet("stage", request.config.stage);
    axes.meet("reduction", request.config.reduction);
    axes.meet("compute", request.config.precision.compute);
    axes.meet("wire", request.config.precision.communication);
    axes.meet("accumulation", request.config.precision.accumulation);
    axes.meet("moments", request.config.precision.moments);
    axes.meet("optimizer", request.config.optimizer.type);
    axes.meet("gathered for", name_of(request.config.gather_for));
    axes.meet("checkpointing", request.config.activation_checkpointing);
    axes.meet("offloaded optimizer", request.config.offload.optimizer);
    axes.meet("offloaded parameters", request.config.offload.parameters);
    axes.meet("offloaded activations", request.config.offload.activations);
  }
  axes.expect("ranks", {1, 2, 3, 4, 5, 6, 7, 8});
  axes.expect("stage", {0, 1, 2, 3});
  axes.expect("reduction",
              {ReductionPolicy::automatic, ReductionPolicy::boundary, ReductionPolicy::micro_batch});
  for (const char* axis : {"compute", "wire"}) {
    axes.expect(axis, {DataType::float32, DataType::bfloat16, DataType::float16});
  }
  axes.expect("accumulation", {DataType::float32, DataType::bfloat16});
  axes.expect("moments", {DataType::float32, DataType::bfloat16, DataType::block8});
  axes.expect<std::string>("optimizer", {"AdamW", "SGD"});
  axes.expect<std::string>("gathered for", {"use", "step"});
  for (const char* axis : {"checkpointing", "offloaded activations"}) axes.expect(axis, {false, true});
  for (const char* axis : {"offloaded optimizer", "offloaded parameters"}) {
    axes.expect(axis, {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme});
  }
  expect_plans_are_measured(cases);
}

class PlanIsMeasuredSlow : public testing::TestWithParam<std::uint64_t> {};
TEST_P(PlanIsMeasuredSlow, ToTheByte) {
  expect_plans_are_measured(tranche::test::sweep({50 * GetParam(), 50}));
}
INSTANTIATE_TEST_SUITE_P(Draws, PlanIsMeasuredSlow, testing::Values(1, 2, 3));

// The same through the program: compares the report of a run with the plan of its flags.
TEST(PlanOfTheProgram, EqualsTheReport) {
  const tools::test::TemporaryFolder folder;
  const std::vector<std::vector<std::string>> drawn{
      {"--stage", "0"},
      {"--stage", "3", "--dtype", "fp32", "--micro-batch", "2"},
      {"--stage", "2", "--accumulate", "3", "--set", "tranche.activation_checkpointing=true"},
      {"--dtype", "fp16", "--set", "tranche.vocabulary_chunk=100", "--set", "optimizer.type=\"SGD\""},
      {"--offload-optimizer", "cpu", "--offload-ratio", "0.5"},
      {"--stage", "3", "--accumulate", "2", "--offload-optimizer", "nvme", "--offload-param", "nvme",
       "--nvme-path", folder.path(""), "--host-state", "0"},
      {"--stage", "3", "--offload-optimizer", "nvme", "--offload-param", "nvme", "--nvme-path",
       folder.path(""), "--host-state", "200000"},
      // With these flags all state fits into free memory.
      {"--stage", "3", "--offload-optimizer", "nvme", "--offload-param", "nvme", "--nvme-path",
       folder.path("")},
      {"--offload-optimizer", "nvme", "--nvme-path", folder.path(""), "--host-memory", "1MiB"}};
  for (const std::vector<std::string>& flags : drawn) {
    const std::string report = folder.path("r.json");
    std::vector<std::string> more = flags;
    more.insert(more.end(), {"--report", report});
    ASSERT_EQ(tools::test::run(tools::test::tiny_train(folder, more)).status, 0);
    std::vector<std::string> plan{"plan", "--model", "gpt-nano", "--sequence",
                                  "16",   "--json",  "--set",    "tranche.workspace=8MiB"};
    plan.insert(plan.end(), flags.begin(), flags.end());
    const tools::test::ProgramResult result = tools::test::run(plan);
    ASSERT_EQ(result.status, 0) << result.errors;
    const json planned = json::parse(result.out), measured = json::parse(tools::test::read_file(report));
    for (const char* key : {"memory", "traffic", "model"}) {
      EXPECT_EQ(planned[key], measured[key]) << key << " of " << testing::PrintToString(flags);
    }
    EXPECT_EQ(planned["offload_bytes"], measured["steps"].back()["offload_bytes"])
        << testing::PrintToString(flags);
  }
}

}  // namespace
}  // namespace tranche::planner
