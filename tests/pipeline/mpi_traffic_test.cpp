// Drawn meshes under mpirun: what leaves the process for each rank, counted by an independent layer of MPI's
// profiling interface, is the formula of each axis and what the library's meter says.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
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
};

/// A mesh of `ranks` with a pipeline, its axes in any order, and what else decides over traffic.
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
  std::vector<int> divisors;
  for (int n = 1; n <= data_ranks; ++n) {
    if (data_ranks % n == 0) divisors.push_back(n);
  }
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
  config.stage = static_cast<int>(number % 4);  // each as often as the others
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
  // Two chunks on a rank where the eight units are enough for them.
  const bool two_chunks = 2 * pipeline <= 8;
  config.pipeline_schedule =
      std::array{"1f1b", "afab", "zb-h1", "zb-v", "interleaved", "breadth-first"}[pick(two_chunks ? 6 : 3)];
  if (config.pipeline_schedule == "interleaved") config.accumulation_steps = pipeline;
  config.overlap = false;           // gathers behind the step are over when it ends
  config.collectives = "messages";  // what ranks read in each other's memory never comes to MPI
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

/// The bytes that the formula has for each rank. The ranks of a group get equal parts, except for messages to
/// neighbouring stages; how Muon's matrices are divided among the ranks of a stage is not known here.
std::vector<std::int64_t> expected_bytes(const Engine& engine) {
  const Runtime& runtime = engine.runtime();
  const Mesh& mesh = runtime.mesh();
  const int rank = runtime.rank(), stages = mesh.size(MeshAxis::pipeline),
            stage = mesh.coordinate(MeshAxis::pipeline, rank);
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(runtime.size()));
  add_to(bytes, mesh.group({MeshAxis::shard}, rank), rank, along(engine, MeshAxis::shard).formula_bytes);
  add_to(bytes, mesh.group({MeshAxis::replicate}, rank), rank,
         along(engine, MeshAxis::replicate).formula_bytes);
  // One message for each cut between chunks of different ranks, direction and micro-batch: rows of the
  // residual in the compute dtype.
  const Config& config = engine.config();
  const std::int64_t message = config.micro_batch_size * time_steps * engine.model().residual_width *
                               size_of(config.precision.compute);
  const std::vector<int> line = mesh.group({MeshAxis::pipeline}, rank);
  std::int64_t ends = along(engine, MeshAxis::pipeline).formula_bytes;
  const pipeline::PipelineSchedule& schedule = engine.pipeline_schedule();
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
  // The rest is of tensors that both ends read, which the shards of both ends share.
  std::vector<int> both;
  for (const int other : mesh.group({MeshAxis::pipeline, MeshAxis::shard}, rank)) {
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

void expect_what_mpi_sends(std::uint64_t number) {
  Communicator& comm = test::world();
  const int ranks = comm.size(), rank = comm.rank();
  Drawn drawn = draw(number, ranks);
  Config& config = drawn.config;
  validate_config(config, ranks);
  const std::string line =
      "draw " + std::to_string(number) + ": " + drawn.model->architecture() + ", " + config.to_json();
  Runtime runtime(RuntimeOptions::from(config),
                  [](const CommunicatorOptions& options) { return make_mpi_communicator(options); });
  Engine engine(runtime, drawn.model->spec(time_steps), config);
  const Mesh& mesh = runtime.mesh();
  const bool whole = config.optimizer.type == "Muon";
  const auto control = [&] { return runtime.all().meter().total(Traffic::control).bytes; };
  std::vector<TokenData> places(static_cast<std::size_t>(config.accumulation_steps),
                                TokenData(time_steps, drawn.model->shape().vocabulary, true));
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
    for (const MeshAxis axis : {MeshAxis::replicate, MeshAxis::pipeline, MeshAxis::shard}) {
      const Along sent = along(engine, axis);
      EXPECT_EQ(sent.elements, sent.formula_elements) << name_of(axis) << " " << line;
      EXPECT_EQ(sent.bytes, sent.formula_bytes) << name_of(axis) << " " << line;
      elements += sent.elements;
      bytes += sent.bytes;
    }
    EXPECT_GT(along(engine, MeshAxis::pipeline).elements, 0) << line;
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
    if (whole) {  // matrices go to their owners, which are ranks of this stage: its other peers are compared
      for (const int peer : mesh.group({MeshAxis::replicate, MeshAxis::shard}, rank)) {
        counted[static_cast<std::size_t>(peer)] = expected[static_cast<std::size_t>(peer)] = 0;
      }
    }
    EXPECT_EQ(counted, expected) << line << " step " << step;
  }
}

// 40 meshes over the numbers of ranks that this program is run with (CMakeLists.txt).
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
  for (const std::uint64_t number : test::rounds(cases)) expect_what_mpi_sends(number);
}

}  // namespace
}  // namespace tranche::models
