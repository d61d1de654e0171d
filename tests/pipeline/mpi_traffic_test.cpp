// Drawn meshes under mpirun: the data that leaves the process for each rank, counted independently through
// MPI's profiling interface, equals the formula of each axis and the library's meter. Rows with the axis
// `tensor` have the bits of thread ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/schedule/pipeline_schedule.h"
#include "tests/comm/mpi_main.h"
#include "tests/comm/profiling_count.h"
#include "tests/core/sweep.h"
#include "tests/models/training_fixture.h"
#include "tranche/comm/backends.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

constexpr std::int64_t time_steps = 9;
constexpr int steps = 2;

struct Drawn {
  std::shared_ptr<const LanguageModel> model;
  Config config;
  std::int64_t time = time_steps;
};

std::vector<int> divisors_of(int number) {
  std::vector<int> divisors;
  for (int n = 1; n <= number; ++n) {
    if (number % n == 0) divisors.push_back(n);
  }
  return divisors;
}

/// A mesh of `ranks` with the axis tensor and its axes in any order, and the other settings that determine
/// traffic. Neither inner width nor vocabulary is divisible, and the Llama has two heads of keys and values.
Drawn draw_cut(std::uint64_t number, int ranks) {
  const RandomKey key{97, RandomPurpose::test, 12};
  std::uint64_t counter = number * 64;
  const auto pick = [&](std::size_t n) { return random_bits(key, counter++) % n; };
  Drawn drawn;
  if (pick(2) == 0 || ranks % 2 != 0) {
    GptConfig gpt = tiny_gpt();
    gpt.layers = 4;
    gpt.heads = 12;
    gpt.inner = 50;
    gpt.attention_dropout = gpt.residual_dropout = 0.1f;
    drawn.model = std::make_shared<Gpt>(gpt);
  } else {
    LlamaConfig llama = LlamaConfig::preset("qwen3-nano");
    llama.tied = pick(2) == 0;
    llama.layers = 4;
    llama.heads = 8;
    llama.vocabulary = 61;
    llama.inner = 37;
    llama.positions = 16;
    drawn.model = std::make_shared<Llama>(llama);
  }
  const bool gpt = drawn.model->architecture() == "GPT2LMHeadModel";
  std::vector<int> parts;
  for (const int n : divisors_of(ranks)) {
    if (n > 1 && (gpt ? 12 % n == 0 : 8 % n == 0)) parts.push_back(n);
  }
  const int tensor = parts[pick(parts.size())];
  const std::vector<int> stages = divisors_of(ranks / tensor);
  const int pipeline = stages[pick(stages.size())];
  const std::vector<int> copies = divisors_of(ranks / tensor / pipeline);
  const int replicas = pick(2) == 0 ? 1 : copies[pick(copies.size())];
  std::vector<std::string> axes{"tensor=" + std::to_string(tensor)};
  const auto insert = [&](const char* name, int size) {
    axes.insert(axes.begin() + static_cast<std::ptrdiff_t>(pick(axes.size() + 1)),
                name + std::to_string(size));
  };
  insert("pipeline=", pipeline);
  insert("shard=", ranks / tensor / pipeline / replicas);
  insert("replicate=", replicas);
  Config& config = drawn.config;
  config = plain_config(1);
  config.mesh = axes[0] + ", " + axes[1] + ", " + axes[2] + ", " + axes[3];
  config.train_batch_size = 0;
  config.micro_batch_size = 1 + static_cast<std::int64_t>(pick(3));
  config.accumulation_steps = 1 + static_cast<std::int64_t>(pick(3));
  config.stage = static_cast<int>(number % 4);  // every stage equally often
  config.reduction = pick(2) == 0 ? ReductionPolicy::boundary : ReductionPolicy::micro_batch;
  config.gather_for = pick(3) == 0 ? GatherFor::step : GatherFor::use;
  config.gradient_clipping = 0.5;
  config.precision.compute = config.precision.communication =
      pick(2) == 0 ? DataType::float32 : DataType::bfloat16;
  if (replicas > 1 && config.stage > 0 && pick(2) == 0) config.replicate = Replicate::parameters;
  if (replicas > 1 && pick(2) == 0) config.replica_sum = ReplicaSum::step;
  config.optimizer.type = pick(3) == 0 ? "Lamb" : "AdamW";
  config.activation_checkpointing = pick(2) == 0;
  config.checkpoint_every = 1 + static_cast<int>(pick(2));
  config.vocabulary_chunk = pick(2) == 0 ? 20 : 0;
  const std::size_t trained = pick(4);
  if (trained == 0) config.frozen = {gpt ? "transformer.w?e.weight" : "model.embed_tokens.weight"};
  if (trained == 1) config.lora = {.rank = 2, .alpha = 4, .dropout = 0.1};
  config.quantized_gradients = pick(5) == 0;
  config.quantized_weights = pick(5) == 0;
  if (pipeline > 1) {
    // A rank has two chunks if the six units are enough for them.
    config.pipeline_schedule =
        std::array{
            "1f1b", "afab", "zb-h1", "zb-v", "interleaved", "breadth-first"}[number %
                                                                             (2 * pipeline <= 6 ? 6 : 3)];
    if (config.pipeline_schedule == "interleaved") config.accumulation_steps = pipeline;
  }
  config.overlap = false;
  config.collectives = "messages";
  return drawn;
}

/// A mesh of `ranks` with a pipeline and its axes in any order, and the other settings that determine
/// traffic.
Drawn draw(std::uint64_t number, int ranks) {
  const RandomKey key{97, RandomPurpose::test, 8};
  std::uint64_t counter = number * 64;
  const auto pick = [&](std::size_t n) { return random_bits(key, counter++) % n; };
  Drawn drawn;
  if (pick(2) == 0) {
    GptConfig gpt = tiny_gpt();
    gpt.layers = 6;
    drawn.model = std::make_shared<Gpt>(gpt);
  } else {
    LlamaConfig llama = LlamaConfig::preset("qwen3-nano");
    llama.tied = pick(2) == 0;
    llama.layers = 6;
    llama.vocabulary = 61;
    llama.positions = 16;
    drawn.model = std::make_shared<Llama>(llama);
  }
  std::vector<int> stages;
  for (int n = 2; n <= ranks; ++n) {
    if (ranks % n == 0) stages.push_back(n);
  }
  const int pipeline = stages[pick(stages.size())], data_ranks = ranks / pipeline;
  const std::vector<int> divisors = divisors_of(data_ranks);
  const int replicas = divisors[pick(divisors.size())];
  std::vector<std::string> axes{"pipeline=" + std::to_string(pipeline)};
  axes.insert(axes.begin() + static_cast<std::ptrdiff_t>(pick(2)),
              "shard=" + std::to_string(data_ranks / replicas));
  axes.insert(axes.begin() + static_cast<std::ptrdiff_t>(pick(3)), "replicate=" + std::to_string(replicas));
  Config& config = drawn.config;
  config = plain_config(1);
  config.mesh = axes[0] + ", " + axes[1] + ", " + axes[2];
  config.train_batch_size = 0;
  config.micro_batch_size = 1 + static_cast<std::int64_t>(pick(2));
  config.accumulation_steps = 1 + static_cast<std::int64_t>(pick(4));
  config.stage = static_cast<int>(number % 4);  // every stage equally often
  config.reduction = pick(2) == 0 ? ReductionPolicy::boundary : ReductionPolicy::micro_batch;
  config.gather_for = pick(3) == 0 ? GatherFor::step : GatherFor::use;
  config.precision.compute = config.precision.communication =
      pick(2) == 0 ? DataType::float32 : DataType::bfloat16;
  if (replicas > 1 && config.stage > 0 && pick(2) == 0) config.replicate = Replicate::parameters;
  if (replicas > 1 && pick(2) == 0) config.replica_sum = ReplicaSum::step;
  config.quantized_gradients = pick(4) == 0;
  config.quantized_weights = pick(4) == 0;
  if (pick(4) == 0) config.optimizer.type = "Muon";
  config.pipeline_cuts = pick(2) == 0 ? PipelineCuts::balanced : PipelineCuts::equal;
  // A rank has two chunks if the eight units are enough for them.
  const bool two_chunks = 2 * pipeline <= 8;
  config.pipeline_schedule =
      std::array{"1f1b", "afab", "zb-h1", "zb-v", "interleaved", "breadth-first"}[pick(two_chunks ? 6 : 3)];
  if (config.pipeline_schedule == "interleaved") config.accumulation_steps = pipeline;
  config.overlap = false;           // gathers after the step are complete when it ends
  config.collectives = "messages";  // MPI does not see reads of another rank's memory
  return drawn;
}

/// A mesh of `ranks` with the axis context, and with any other axes or only shard.
Drawn draw_context(std::uint64_t number, int ranks) {
  const RandomKey key{97, RandomPurpose::test, 15};
  std::uint64_t counter = number * 64;
  const auto pick = [&](std::size_t n) { return random_bits(key, counter++) % n; };
  std::vector<int> sizes;
  for (const int n : divisors_of(ranks)) {
    if (n > 1 && n <= 4) sizes.push_back(n);
  }
  const int context = sizes[pick(sizes.size())], rest = ranks / context;
  const std::size_t others = rest == 1 ? 2 : pick(3);
  Drawn drawn = others == 0 ? draw(number, rest) : draw_cut(number, others == 1 ? rest : context);
  Config& config = drawn.config;
  if (others == 2) {
    config.mesh = "shard=" + std::to_string(rest);
    config.pipeline_schedule = "1f1b";
    config.replicate = Replicate::all;
    config.replica_sum = ReplicaSum::micro_batch;
  }
  const std::string axis = "context=" + std::to_string(context);
  config.mesh = pick(2) == 0 ? axis + ", " + config.mesh : config.mesh + ", " + axis;
  drawn.time = 6 + static_cast<std::int64_t>(pick(7));  // padding in some
  drawn.time = std::max<std::int64_t>(drawn.time, 2 * context);
  const bool twelve_heads = drawn.model->architecture() == "GPT2LMHeadModel" && others > 0;
  const int parts = config.mesh_of(ranks).size(MeshAxis::tensor);
  if (twelve_heads && 12 / parts % context == 0 && pick(2) == 0) {
    config.context_exchange = ContextExchange::ulysses;
  }
  return drawn;
}

/// The report's figures for one axis.
struct Along {
  std::int64_t elements = 0, bytes = 0, formula_elements = 0, formula_bytes = 0;
};

Along along(const Engine& engine, MeshAxis axis) {
  const auto report = nlohmann::json::parse(engine.traffic_report());
  for (const auto& each : report["by_axis"]) {
    if (each["axis"] == name_of(axis)) {
      return {each["elements"], each["bytes"], each["formula_elements"], each["formula_bytes"]};
    }
  }
  return {};
}

void add_to(std::vector<std::int64_t>& bytes, const std::vector<int>& group, int rank, std::int64_t sent) {
  for (const int peer : group) {
    if (peer != rank)
      bytes[static_cast<std::size_t>(peer)] += sent / (static_cast<std::int64_t>(group.size()) - 1);
  }
}

/// Tokens of a micro-batch that a rank computes.
std::int64_t tokens_of_rank(const Engine& engine) {
  return engine.config().micro_batch_size *
         engine.model().tokens_of_rank(engine.runtime().mesh().size(MeshAxis::context));
}

/// The bytes of rows that this rank sends to each other rank of the axis tensor in a step, by the table in
/// docs/guides/tensor.md: 8 for a block, 2 for inputs that are gathered again, 3 or 4 with recomputation, 2
/// for the embedding unless it is frozen, 2 for the head, and its numbers of the softmax.
std::int64_t bytes_of_rows(const Engine& engine) {
  const Config& config = engine.config();
  const ModelSpec& model = engine.model();
  const auto blocks = static_cast<int>(model.forward.size()) - 2;
  const std::int64_t tokens = tokens_of_rank(engine);
  const std::int64_t rows = divide_round_up(tokens, engine.runtime().mesh().size(MeshAxis::tensor));
  const bool frozen = engine.frozen(model.units().front().tensors.front().name);
  std::int64_t messages = 0, numbers = 0;
  for (const Engine::Chunk& chunk : engine.stage().chunks) {
    if (chunk.first()) messages += frozen ? 1 : 2;
    if (chunk.last()) messages += 2, numbers += 3 * tokens;
    const int last = std::min(chunk.end - 1, blocks) - 1;
    for (int block = std::max(chunk.begin - 1, 0); block <= last; ++block) {
      messages += 8 + 2;
      if (!config.activation_checkpointing) continue;
      messages += (block + 1) % config.checkpoint_every == 0 || block == last ? 3 : 4;
    }
  }
  return config.accumulation_steps *
         (messages * rows * model.residual_width * size_of(config.precision.compute) +
          numbers * size_of(DataType::float32));
}

/// The formula's bytes for each rank. The ranks of a group get equal parts, except for messages to
/// neighbouring stages. The formula does not contain how Muon's matrices are distributed over the ranks of a
/// stage.
std::vector<std::int64_t> expected_bytes(const Engine& engine) {
  const Runtime& runtime = engine.runtime();
  const Mesh& mesh = runtime.mesh();
  const int rank = runtime.rank(), stages = mesh.size(MeshAxis::pipeline),
            stage = mesh.coordinate(MeshAxis::pipeline, rank);
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(runtime.size()));
  add_to(bytes, mesh.group({MeshAxis::shard, MeshAxis::context}, rank), rank,
         along(engine, MeshAxis::shard).formula_bytes);
  add_to(bytes, mesh.group({MeshAxis::context}, rank), rank, along(engine, MeshAxis::context).formula_bytes);
  add_to(bytes, mesh.group({MeshAxis::replicate}, rank), rank,
         along(engine, MeshAxis::replicate).formula_bytes);
  // One message for each cut between chunks of different ranks, for each direction and micro-batch: rows of
  // the residual in the compute dtype.
  const Config& config = engine.config();
  const int parts = mesh.size(MeshAxis::tensor);
  const std::int64_t message = divide_round_up(tokens_of_rank(engine), parts) *
                               engine.model().residual_width * size_of(config.precision.compute);
  const std::vector<int> line = mesh.group({MeshAxis::pipeline}, rank);
  std::int64_t ends = along(engine, MeshAxis::pipeline).formula_bytes;
  const pipeline::PipelineSchedule schedule =
      stages > 1 ? engine.pipeline_schedule() : pipeline::PipelineSchedule();
  const auto sends_to = [&](int chunk) {
    const int other = schedule.rank_of_chunk[static_cast<std::size_t>(chunk)];
    bytes[static_cast<std::size_t>(line[static_cast<std::size_t>(other)])] +=
        config.accumulation_steps * message;
    ends -= config.accumulation_steps * message;
  };
  for (int chunk = 0; chunk + 1 < schedule.chunks(); ++chunk) {
    if (!schedule.crosses(chunk)) continue;
    if (schedule.rank_of_chunk[static_cast<std::size_t>(chunk)] == stage) sends_to(chunk + 1);
    if (schedule.rank_of_chunk[static_cast<std::size_t>(chunk) + 1] == stage) sends_to(chunk);
  }
  if (parts > 1) {  // rows, and sums of whole tensors
    const std::int64_t rows = bytes_of_rows(engine);
    add_to(bytes, mesh.group({MeshAxis::tensor}, rank), rank, (parts - 1) * rows);
    add_to(bytes, mesh.group({MeshAxis::shard, MeshAxis::context, MeshAxis::tensor}, rank), rank,
           along(engine, MeshAxis::tensor).formula_bytes - (parts - 1) * rows);
  }
  // The rest belongs to tensors that both ends read, which the shards of both ends share.
  std::vector<int> both;
  for (const int other : mesh.group({MeshAxis::pipeline, MeshAxis::shard, MeshAxis::context}, rank)) {
    const int of = mesh.coordinate(MeshAxis::pipeline, other);
    if (of == 0 || of == stages - 1) both.push_back(other);
  }
  if (stage == 0 || stage == stages - 1) {
    add_to(bytes, both, rank, ends);
  } else {
    EXPECT_EQ(ends, 0) << "a stage between the ends has no tied tensor";
  }
  return bytes;
}

/// True if neighbouring ranks of the axis tensor share heads of keys and values.
bool shares_heads(const LanguageModel& model, const Mesh& mesh) {
  return model.architecture() != "GPT2LMHeadModel" && mesh.size(MeshAxis::tensor) > 2;
}

void expect_what_mpi_sends(std::uint64_t number, Drawn drawn) {
  Communicator& comm = test::world();
  const int ranks = comm.size(), rank = comm.rank();
  Config& config = drawn.config;
  validate_config(config, ranks);
  const std::string line =
      "draw " + std::to_string(number) + ": " + drawn.model->architecture() + ", " + config.to_json();
  Runtime runtime(RuntimeOptions::from(config),
                  [](const CommunicatorOptions& options) { return make_mpi_communicator(options); });
  Engine engine(runtime, drawn.model->spec(drawn.time), config);
  const Mesh& mesh = runtime.mesh();
  const bool whole = config.optimizer.type == "Muon";
  const auto control = [&] { return runtime.all().meter().total(Traffic::control).bytes; };
  std::vector<TokenData> places(static_cast<std::size_t>(config.accumulation_steps),
                                TokenData(drawn.time, drawn.model->shape().vocabulary, true));
  for (int step = 0; step < steps; ++step) {
    runtime.all().barrier({"", "", Traffic::control}).wait();
    std::vector<std::int64_t> before;
    for (int peer = 0; peer < ranks; ++peer) before.push_back(test::profiled_bytes_sent_to(peer));
    const std::int64_t agreed = control(), collectives = test::profiled_collectives();
    train_step(*drawn.model, engine, [&](std::int64_t m) {
      TokenData& data = places[static_cast<std::size_t>(m)];
      data.draw(((step * config.accumulation_steps + m) * mesh.data_ranks() + mesh.data_rank(rank)) *
                    config.micro_batch_size,
                config.micro_batch_size);
      return data.batch();
    });
    (void)engine.step();
    runtime.all().barrier({"", "", Traffic::control}).wait();
    const std::int64_t control_of_peer = (control() - agreed) / (ranks - 1);
    EXPECT_EQ(test::profiled_collectives(), collectives) << line;
    std::int64_t elements = 0, bytes = 0;
    for (int a = 0; a < mesh_axes; ++a) {
      const auto axis = static_cast<MeshAxis>(a);
      const Along sent = along(engine, axis);
      EXPECT_EQ(sent.elements, sent.formula_elements) << name_of(axis) << " " << line;
      EXPECT_EQ(sent.bytes, sent.formula_bytes) << name_of(axis) << " " << line;
      elements += sent.elements;
      bytes += sent.bytes;
    }
    for (const MeshAxis axis : {MeshAxis::pipeline, MeshAxis::context, MeshAxis::tensor}) {
      EXPECT_EQ(along(engine, axis).elements > 0, mesh.size(axis) > 1) << name_of(axis) << " " << line;
    }
    std::vector<std::int64_t> counted;
    for (int peer = 0; peer < ranks; ++peer) {
      const std::int64_t sent = test::profiled_bytes_sent_to(peer) - before[static_cast<std::size_t>(peer)];
      counted.push_back(peer == rank ? 0 : sent - control_of_peer);
    }
    const std::int64_t all = std::accumulate(counted.begin(), counted.end(), std::int64_t{0});
    EXPECT_EQ(all, bytes) << line << " step " << step;
    if (config.precision.compute == DataType::float32 && !config.quantized_gradients &&
        !config.quantized_weights && !whole) {
      EXPECT_EQ(all, elements * size_of(DataType::float32)) << line << " step " << step;
    }
    std::vector<std::int64_t> expected = expected_bytes(engine);
    if (whole) {  // matrices are sent to their owners, which are ranks of this stage, so only its other peers
                  // are compared
      for (const int peer : mesh.group({MeshAxis::replicate, MeshAxis::shard, MeshAxis::context}, rank)) {
        counted[static_cast<std::size_t>(peer)] = expected[static_cast<std::size_t>(peer)] = 0;
      }
    }
    // Sums of shared heads are sent to fewer ranks than those of whole tensors, and the formula adds both.
    // Among the ranks of tensor x shard only the total above is compared then.
    if (shares_heads(*drawn.model, mesh)) {
      for (const int peer : mesh.group({MeshAxis::shard, MeshAxis::context, MeshAxis::tensor}, rank)) {
        counted[static_cast<std::size_t>(peer)] = expected[static_cast<std::size_t>(peer)] = 0;
      }
    }
    EXPECT_EQ(counted, expected) << line << " step " << step;
  }
}

// 40 meshes, distributed over the numbers of ranks with which this program runs (CMakeLists.txt).
TEST(MpiTraffic, AlongEachAxisOfDrawnMeshesIsTheFormula) {
  const int ranks = test::world().size();
  const std::uint64_t count = ranks == 3 ? 4 : 12, first = static_cast<std::uint64_t>(ranks) * 100;
  const test::Sweep cases = test::sweep({first, count});
  test::AxesMet axes;
  for (std::uint64_t number = cases.first; number < cases.end(); ++number) {
    const Config config = draw(number, ranks).config;
    const Mesh mesh = config.mesh_of(ranks);
    axes.meet("stages", mesh.size(MeshAxis::pipeline));
    axes.meet("replicas", mesh.size(MeshAxis::replicate));
    axes.meet("shards", mesh.size(MeshAxis::shard));
    axes.meet("stage", config.stage);
    axes.meet("reduction", config.reduction);
    axes.meet("compute", config.precision.compute);
    axes.meet("optimizer", config.optimizer.type);
  }
  if (ranks == 8) {
    axes.expect("stages", {2, 4, 8});
    axes.expect("replicas", {1, 2});
    axes.expect("shards", {1, 2});
    axes.expect("stage", {0, 1, 2, 3});
    axes.expect("reduction", {ReductionPolicy::boundary, ReductionPolicy::micro_batch});
    axes.expect("compute", {DataType::float32, DataType::bfloat16});
    axes.expect<std::string>("optimizer", {"AdamW", "Muon"});
  }
  for (const std::uint64_t number : test::rounds(cases)) expect_what_mpi_sends(number, draw(number, ranks));
}

// 40 more meshes, which cut layers.
TEST(MpiTraffic, AlongTheAxisTensorOfDrawnMeshesIsTheFormula) {
  const int ranks = test::world().size();
  const std::uint64_t count = ranks == 3 ? 4 : 12, first = static_cast<std::uint64_t>(ranks) * 100;
  const test::Sweep cases = test::sweep({first, count});
  test::AxesMet axes;
  for (std::uint64_t number = cases.first; number < cases.end(); ++number) {
    const Drawn drawn = draw_cut(number, ranks);
    const Mesh mesh = drawn.config.mesh_of(ranks);
    axes.meet("parts", mesh.size(MeshAxis::tensor));
    axes.meet("stages", mesh.size(MeshAxis::pipeline));
    axes.meet("shards", mesh.size(MeshAxis::shard));
    axes.meet("stage", drawn.config.stage);
    axes.meet("recomputation", drawn.config.activation_checkpointing);
    axes.meet("adapters", drawn.config.lora.any());
    axes.meet("frozen", !drawn.config.frozen.empty());
    axes.meet("model", drawn.model->architecture());
    axes.meet("shared heads", shares_heads(*drawn.model, mesh));
  }
  if (ranks == 8) {
    axes.expect("parts", {2, 4, 8});
    axes.expect("stages", {1, 2});
    axes.expect("shards", {1, 2});
    axes.expect("stage", {0, 1, 2, 3});
    for (const char* axis : {"recomputation", "adapters", "frozen"}) axes.expect(axis, {false, true});
    axes.expect("shared heads", {false, true});
    axes.expect<std::string>("model", {"GPT2LMHeadModel", "Qwen3ForCausalLM"});
  }
  for (const std::uint64_t number : test::rounds(cases)) {
    expect_what_mpi_sends(number, draw_cut(number, ranks));
  }
}

// 20 more meshes, which cut sequences.
TEST(MpiTraffic, AlongTheAxisContextOfDrawnMeshesIsTheFormula) {
  const int ranks = test::world().size();
  const std::uint64_t count = ranks == 3 ? 2 : 6, first = static_cast<std::uint64_t>(ranks) * 100;
  const test::Sweep cases = test::sweep({first, count});
  test::AxesMet axes;
  for (std::uint64_t number = cases.first; number < cases.end(); ++number) {
    const Config config = draw_context(number, ranks).config;
    const Mesh mesh = config.mesh_of(ranks);
    axes.meet("exchange", config.context_exchange);
    axes.meet("parts", mesh.size(MeshAxis::context));
    axes.meet("stages", mesh.size(MeshAxis::pipeline) > 1);
    axes.meet("tensor", mesh.size(MeshAxis::tensor) > 1);
    axes.meet("shards", mesh.size(MeshAxis::shard) > 1);
  }
  if (ranks == 8) {
    axes.expect("parts", {2, 4});
    axes.expect("exchange", {ContextExchange::gather, ContextExchange::ulysses});
    for (const char* axis : {"stages", "tensor", "shards"}) axes.expect(axis, {false, true});
  }
  for (const std::uint64_t number : test::rounds(cases)) {
    expect_what_mpi_sends(number, draw_context(number, ranks));
  }
}

/// The bits of a training, of an evaluation and of a text.
struct Bits {
  kernels::Digest state, weights;
  std::vector<double> losses, norms;
  std::vector<float> logits;
  friend bool operator==(const Bits&, const Bits&) = default;
};

Bits bits_of(Engine& engine, const LanguageModel& model) {
  const Config& config = engine.config();
  const Mesh& mesh = engine.runtime().mesh();
  const std::int64_t data_rank = mesh.data_rank(engine.runtime().rank());
  std::vector<TokenData> places(static_cast<std::size_t>(config.accumulation_steps),
                                TokenData(time_steps, model.shape().vocabulary, true));
  Bits bits;
  for (int step = 0; step < steps; ++step) {
    train_step(model, engine, [&](std::int64_t m) {
      TokenData& data = places[static_cast<std::size_t>(m)];
      data.draw(
          ((step * config.accumulation_steps + m) * mesh.data_ranks() + data_rank) * config.micro_batch_size,
          config.micro_batch_size);
      return data.batch();
    });
    const StepResult result = engine.step();
    bits.losses.push_back(result.loss);
    bits.norms.push_back(result.gradient_norm);
  }
  engine.begin_evaluation();
  places[0].draw(1000 + data_rank, 1);
  model.evaluate(engine, places[0].batch());
  bits.losses.push_back(engine.end_evaluation().loss);
  bits.logits = model.next_token_logits(engine, std::vector<std::int32_t>{5, 60, 0, 17});
  bits.state = engine.state_digest();
  bits.weights = engine.weights_digest();
  return bits;
}

// 24 rows, distributed over the numbers of ranks with which this program runs.
TEST(MpiRows, WithTheAxisTensorHaveTheBitsOfThreadRanks) {
  Communicator& world = test::world();
  const int ranks = world.size();
  const test::Sweep cases = test::sweep({static_cast<std::uint64_t>(ranks) * 100 + 50, 6});
  for (const std::uint64_t number : test::rounds(cases)) {
    Drawn drawn = draw_cut(number, ranks);
    Config& config = drawn.config;
    const std::string line =
        "draw " + std::to_string(number) + ": " + drawn.model->architecture() + ", " + config.to_json();
    Bits expected;
    if (world.rank() == 0) {
      std::mutex mutex;
      on_ranks(ranks, drawn.model->spec(time_steps), config, [&](Engine& engine) {
        Bits bits = bits_of(engine, *drawn.model);
        const std::lock_guard lock(mutex);
        if (engine.runtime().rank() == 0) expected = std::move(bits);
      });
    }
    world.barrier({"", "thread ranks", Traffic::control}).wait();
    validate_config(config, ranks);
    config.overlap = number % 2 == 0;
    config.collectives = number % 3 == 0 ? "messages" : "auto";
    Runtime runtime(RuntimeOptions::from(config),
                    [](const CommunicatorOptions& options) { return make_mpi_communicator(options); });
    Engine engine(runtime, drawn.model->spec(time_steps), config);
    const Bits found = bits_of(engine, *drawn.model);
    if (world.rank() == 0) {
      EXPECT_TRUE(found == expected) << line;
      EXPECT_EQ(found.losses, expected.losses) << line;
      EXPECT_EQ(found.norms, expected.norms) << line;
    }
  }
}

}  // namespace
}  // namespace tranche::models
