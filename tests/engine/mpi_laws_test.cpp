// Law 1 and exact traffic under mpirun. A covering set of configurations has the bits of thread ranks. The
// data that leaves the process, counted independently through MPI's profiling interface, equals the formula.

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "odd_model.h"
#include "same_bits.h"
#include "tests/comm/mpi_main.h"
#include "tests/comm/profiling_count.h"

namespace tranche::test {
namespace {

/// Twelve runs that cover every pair of (stage, dtype), (stage, policy), (dtype, accumulation) and more.
std::vector<OddRun> covering_set(int ranks) {
  const DataType fp32 = DataType::float32, bf16 = DataType::bfloat16, fp16 = DataType::float16;
  const ReductionPolicy boundary = ReductionPolicy::boundary, micro_batch = ReductionPolicy::micro_batch;
  std::vector<OddRun> runs;
  const auto add = [&](int stage, DataType dtype, ReductionPolicy policy, std::int64_t accumulation,
                       auto&& change) {
    OddRun run;
    run.ranks = ranks;
    run.stage = stage;
    run.dtype = dtype;
    run.policy = policy;
    run.accumulation = accumulation;
    change(run);
    runs.push_back(run);
  };
  add(0, fp32, boundary, 1, [](OddRun&) {});
  add(0, bf16, micro_batch, 4, [](OddRun& r) { r.reduce_bucket = 700; });
  add(0, fp16, boundary, 4, [](OddRun& r) { r.overlap = false; });
  add(1, fp32, micro_batch, 4, [](OddRun& r) { r.poison = true; });
  add(1, bf16, boundary, 1, [](OddRun& r) { r.gather_bucket = 300; });
  add(1, fp16, micro_batch, 1, [](OddRun& r) { r.reduction_group = 2; });
  add(2, fp32, boundary, 4, [](OddRun& r) { r.optimizer = "SGD"; });
  add(2, bf16, micro_batch, 4, [](OddRun& r) { r.overlap = false; });
  add(2, fp16, micro_batch, 1, [](OddRun& r) { r.accumulation_dtype = DataType::bfloat16; });
  add(3, fp32, micro_batch, 1, [](OddRun& r) { r.depth = 1; });
  add(3, bf16, boundary, 4, [](OddRun& r) { r.depth = 4, r.reduction_group = 3; });
  add(3, fp16, micro_batch, 4, [](OddRun& r) { r.depth = 3, r.reduce_bucket = 257, r.gather_bucket = 999; });
  return runs;
}

/// This process's rank of the run; expects that it sends as much as the formula says.
OddResult own_rank_of(const OddRun& run) {
  const int rank = world().rank();
  OddResult mine(run.ranks);
  std::mutex mutex;
  train_odd_rank(
      run, rank, [](const CommunicatorOptions& options) { return make_mpi_communicator(options); }, mine,
      mutex);
  const auto r = static_cast<std::size_t>(rank);
  EXPECT_EQ(mine.wire_elements[r], mine.formula_elements[r]) << run.to_string();
  EXPECT_EQ(mine.wire_bytes[r], mine.formula_bytes[r]) << run.to_string();
  return mine;
}

TEST(MpiLaws, CoveringSetGivesTheBitsOfThreadRanks) {
  Communicator& comm = world();
  for (const OddRun& run : covering_set(comm.size())) {
    const OddResult mine = own_rank_of(run);
    if (comm.rank() != 0) continue;
    OddRun plain = run;  // the same arithmetic with the simplest settings
    plain.stage = 0;
    plain.overlap = false;
    plain.plan_memory = false;
    if (plain.reduction_group == 0) plain.reduction_group = comm.local_size();
    const OddResult expected = train_odd(plain);
    EXPECT_EQ(mine.weights, expected.weights) << run.to_string();
    EXPECT_EQ(mine.state, expected.state) << run.to_string();
    for (std::size_t s = 0; s < expected.steps.size(); ++s) {
      EXPECT_EQ(mine.steps[s].loss, expected.steps[s].loss) << run.to_string();
      EXPECT_EQ(mine.steps[s].gradient_norm, expected.steps[s].gradient_norm) << run.to_string();
    }
  }
}

TEST(MpiLaws, DeclaredHostsGiveTheBitsOfOneHost) {
  // Five ranks as three and two, four as two and two, three as two and one.
  Communicator& comm = world();
  if (comm.size() < 3) return;
  const int ranks_per_host = (comm.size() + 1) / 2;
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const char* collectives : {"messages", "shared"}) {
        OddRun run;
        run.ranks = comm.size();
        run.stage = stage;
        run.dtype = dtype;
        run.accumulation = 2;
        run.steps = 3;
        run.collectives = collectives;
        run.ranks_per_host = ranks_per_host;
        if (stage == 1)
          run.reduction_group = 2;  // groups that span both nodes, if the nodes have 3 and 2
                                    // ranks
        const OddResult mine = own_rank_of(run);
        if (comm.rank() != 0) continue;
        OddRun one = run;
        one.ranks_per_host = 0;
        one.collectives = "messages";
        if (one.reduction_group == 0) one.reduction_group = ranks_per_host;
        const OddResult expected = train_odd(one);
        EXPECT_EQ(mine.weights, expected.weights) << run.to_string();
        EXPECT_EQ(mine.state, expected.state) << run.to_string();
      }
    }
  }
}

TEST(MpiLaws, HybridShardingHasTheBitsOfOneShardedModel) {
  Communicator& comm = world();
  for (int shards = 1; shards < comm.size(); ++shards) {
    if (comm.size() % shards != 0) continue;
    for (int stage = 0; stage <= 3; ++stage) {
      for (const char* collectives : {"messages", "shared"}) {
        OddRun run;
        run.ranks = comm.size();
        run.stage = stage;
        run.policy = ReductionPolicy::micro_batch;
        run.accumulation = 2;
        run.steps = 3;
        run.collectives = collectives;
        run.reduction_group = shards;
        OddRun flat = run;
        run.mesh = "replicate=*, shard=" + std::to_string(shards);
        const OddResult mine = own_rank_of(run);
        if (comm.rank() == 0) expect_same(train_odd(flat), mine, run);
        if (stage == 0) continue;
        run.replicate = Replicate::parameters;
        const OddResult over_all = own_rank_of(run);
        if (comm.rank() == 0) expect_same(mine, over_all, run);
      }
    }
  }
}

TEST(MpiLaws, BlocksOfInt8GiveTheBitsOfThreadRanksAndTheBytesOfTheFormula) {
  Communicator& comm = world();
  int point = 0;
  for (const char* collectives : {"messages", "shared"}) {
    for (const auto& [gradients, weights] :
         {std::pair(true, false), std::pair(false, true), std::pair(true, true)}) {
      for (int stage = 0; stage <= 3; ++stage, ++point) {
        OddRun run;
        run.ranks = comm.size();
        run.stage = stage;
        run.dtype = point % 2 == 0 ? DataType::bfloat16 : DataType::float32;
        run.policy = point % 3 == 0 ? ReductionPolicy::boundary : ReductionPolicy::micro_batch;
        run.accumulation = 2;
        run.steps = 3;
        run.quantized_gradients = gradients;
        run.quantized_weights = weights;
        run.collectives = collectives;
        run.reduce_bucket = point % 4 == 1 ? 700 : 500'000'000;
        run.ranks_per_host = point % 5 == 2 ? 2 : 0;
        run.reduction_group = comm.size();
        const OddResult mine = own_rank_of(run);
        if (comm.rank() != 0) continue;
        OddRun plain = run;
        plain.stage = 0;
        plain.overlap = false;
        plain.ranks_per_host = 0;
        expect_same(train_odd(plain), mine, run);
      }
    }
  }
}

TEST(MpiLaws, ProfilingInterfaceCountsWhatTheFormulaSays) {
  Communicator& comm = world();
  for (int stage = 0; stage <= 3; ++stage) {
    for (const auto& [optimizer, policy, quantized] :
         {std::tuple("AdamW", ReductionPolicy::boundary, false),
          std::tuple("AdamW", ReductionPolicy::micro_batch, false),
          std::tuple("Muon", ReductionPolicy::boundary, false),
          std::tuple("Muon", ReductionPolicy::micro_batch, false),
          std::tuple("AdamW", ReductionPolicy::boundary, true),
          std::tuple("Muon", ReductionPolicy::micro_batch, true)}) {
      OddRun run;
      run.ranks = comm.size();
      run.stage = stage;
      run.policy = policy;
      run.accumulation = 3;
      run.optimizer = optimizer;
      run.quantized_gradients = run.quantized_weights = quantized;
      run.overlap = !quantized;  // blocks are read back on a separate stream, for which no barrier waits
      run.frozen = false;
      run.collectives = "messages";  // MPI does not see reads of another rank's memory
      const Config config = odd_config(run);
      Runtime runtime(RuntimeOptions::from(config),
                      [](const CommunicatorOptions& options) { return make_mpi_communicator(options); });
      Engine engine(runtime, odd_model(), config);
      for (int step = 0; step < 3; ++step) {
        runtime.shard().barrier({"", "", Traffic::control}).wait();
        const std::int64_t before = profiled_bytes_sent();
        const std::int64_t control = runtime.shard().meter().total(Traffic::control).bytes;
        for (std::int64_t m = 0; m < run.accumulation; ++m) {
          odd_micro_batch(engine, ((step * 3 + m) * run.ranks + comm.rank()) * 3, 3);
        }
        engine.step();
        runtime.shard().barrier({"", "", Traffic::control}).wait();
        const std::int64_t control_bytes = runtime.shard().meter().total(Traffic::control).bytes - control;
        EXPECT_EQ(profiled_bytes_sent() - before - control_bytes, engine.formula_traffic_bytes())
            << run.to_string() << " step " << step;
      }
    }
  }
}

/// Bytes of data along an axis, according to the report.
std::int64_t sent_along(Engine& engine, MeshAxis axis, const char* key) {
  const auto report = nlohmann::json::parse(engine.traffic_report());
  for (const auto& each : report["by_axis"]) {
    if (each["axis"] == name_of(axis)) return each[key].get<std::int64_t>();
  }
  return 0;
}

TEST(MpiLaws, ProfilingInterfaceCountsWhatGoesAlongEachAxis) {
  Communicator& comm = world();
  const int ranks = comm.size();
  // Forward and backward gather within a replica, even if replicas share gradients and optimizer state (hpZ).
  for (const auto& [mesh, replicate] :
       {std::pair("shard=*", Replicate::all), std::pair("replicate=*, shard=1", Replicate::all),
        std::pair("replicate=*, shard=2", Replicate::all), std::pair("shard=2, replicate=*", Replicate::all),
        std::pair("replicate=*, shard=2", Replicate::parameters),
        std::pair("shard=2, replicate=*", Replicate::parameters)}) {
    if (ranks % 2 != 0 && std::string_view(mesh).find("shard=2") != std::string_view::npos) continue;
    for (int stage = replicate == Replicate::all ? 0 : 1; stage <= 3; ++stage) {
      for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
        OddRun run;
        run.ranks = ranks;
        run.stage = stage;
        run.policy = policy;
        run.dtype = DataType::bfloat16;
        run.accumulation = 3;
        run.frozen = false;
        run.mesh = mesh;
        run.replicate = replicate;
        run.overlap = false;  // gathers after the step are complete when it ends
        // Nodes of two ranks, each with a replica: only traffic along `replicate` leaves a node.
        if (std::string_view(mesh) == "replicate=*, shard=2") run.ranks_per_host = 2;
        run.collectives = "messages";  // MPI does not see reads of another rank's memory
        const Config config = odd_config(run);
        Runtime runtime(RuntimeOptions::from(config),
                        [](const CommunicatorOptions& options) { return make_mpi_communicator(options); });
        Engine engine(runtime, odd_model(), config);
        const auto control = [](const Communicator& group) {
          return group.meter().total(Traffic::control).bytes;
        };
        for (int step = 0; step < 3; ++step) {
          runtime.all().barrier({"", "", Traffic::control}).wait();
          std::vector<std::int64_t> before;
          for (int peer = 0; peer < ranks; ++peer) before.push_back(profiled_bytes_sent_to(peer));
          const std::int64_t agreed = control(runtime.all());
          for (std::int64_t m = 0; m < run.accumulation; ++m) {
            odd_micro_batch(engine, ((step * 3 + m) * run.ranks + comm.rank()) * 3, 3);
          }
          engine.step();
          runtime.all().barrier({"", "", Traffic::control}).wait();
          const std::int64_t control_of_peer = (control(runtime.all()) - agreed) / (ranks - 1);
          for (int peer = 0; peer < ranks; ++peer) {
            if (peer == comm.rank()) continue;
            std::int64_t expected = control_of_peer;
            for (const MeshAxis axis : {MeshAxis::replicate, MeshAxis::shard}) {
              const std::vector<int> group = runtime.mesh().group({axis}, comm.rank());
              const std::int64_t formula = sent_along(engine, axis, "formula_bytes");
              EXPECT_EQ(sent_along(engine, axis, "bytes"), formula) << run.to_string();
              if (std::find(group.begin(), group.end(), peer) == group.end()) continue;
              expected += formula / (static_cast<std::int64_t>(group.size()) - 1);
            }
            EXPECT_EQ(profiled_bytes_sent_to(peer) - before[static_cast<std::size_t>(peer)], expected)
                << run.to_string() << " step " << step << " rank " << peer;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tranche::test
