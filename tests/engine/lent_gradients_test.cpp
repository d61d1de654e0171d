// The last tiles of an update lie in the host memory of gradients that earlier updates have used. Their
// writes wait for the next backward pass, whose gradients wait for the memory. No bit changes.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>

#include "odd_model.h"
#include "on_ranks.h"
#include "tests/core/rounds.h"
#include "tests/offload/faulty_file_system.h"
#include "tests/offload/watched_file_system.h"

namespace tranche::test {
namespace {

using tranche::testing::FaultyFileSystem;
using tranche::testing::FileOperation;
using tranche::testing::WatchedFileSystem;

constexpr int unit_count = 8;
constexpr std::int64_t unit_elements = 32'768, tile_elements = 4096;
constexpr int tiles = unit_count * static_cast<int>(unit_elements / tile_elements);

ModelSpec model_of_equal_units() {
  ModelSpec spec;
  for (int i = 0; i < unit_count; ++i) {
    const std::string name = "unit" + std::to_string(i);
    spec.add_unit({name, {{name + ".w", Shape{unit_elements}, Initializer::normal(0.1f)}}, 1});
  }
  return spec;
}

OddRun run_of(OffloadTier tier, int ranks, const std::string& optimizer = "AdamW") {
  OddRun run;
  run.ranks = ranks;
  run.optimizer = optimizer;
  run.stage = ranks > 1 ? 2 : 0;
  run.frozen = false;
  run.dtype = DataType::bfloat16;
  run.policy = ReductionPolicy::micro_batch;
  run.offload.optimizer = tier;
  run.offload.tile_elements = tile_elements;
  run.offload.tile_buffers = 3;
  run.offload.io_engine = "threads";
  run.offload.nvme_path = std::filesystem::temp_directory_path().string();
  return run;
}

void on_equal_units(const OddRun& run, detail::FileSystem* files,
                    const std::function<void(Engine&, Runtime&)>& body) {
  run_thread_ranks(run.ranks, [&](int, const CommunicatorFactory& factory) {
    const Config config = odd_config(run);
    RuntimeOptions options = RuntimeOptions::from(config);
    options.log_level = LogLevel::off;
    options.files = files;
    Runtime runtime(options, factory);
    Engine engine(runtime, model_of_equal_units(), config);
    body(engine, runtime);
  });
}

void one_step(Engine& engine, Runtime& runtime, const std::string& poison,
              const std::function<void()>& between = {}) {
  engine.begin_micro_batch();
  OddMicroBatch micro_batch(engine, 2 * (engine.steps() * runtime.size() + runtime.rank()), 2);
  for (int unit = 0; unit < unit_count; ++unit) micro_batch.forward(unit);
  if (between) between();
  for (int unit = unit_count - 1; unit >= 0; --unit) micro_batch.backward(unit, 1.0f, poison);
  micro_batch.end();
}

kernels::Digest trained(const OddRun& run, detail::FileSystem* files) {
  kernels::Digest digest;
  on_equal_units(run, files, [&](Engine& engine, Runtime& runtime) {
    for (const char* poison : {"", "", "unit3.w", ""}) {
      one_step(engine, runtime, poison);
      EXPECT_EQ(engine.step().applied, *poison == 0);
    }
    const kernels::Digest mine = engine.state_digest();
    if (runtime.rank() == 0) digest = mine;
  });
  return digest;
}

TEST(LentGradients, ASlowDiskChangesNoBit) {
  int point = 0;
  for (const int ranks : {1, 2}) {
    for (const char* optimizer : {"AdamW", "Lamb"}) {  // Lamb reads its state twice a step
      if (!sampled(point++, 3)) continue;
      const kernels::Digest expected = trained(run_of(OffloadTier::none, ranks, optimizer), nullptr);
      FaultyFileSystem files(detail::posix_file_system());
      files.inject(
          {.operation = FileOperation::write, .nth = 1, .times = -1, .delay = std::chrono::milliseconds(1)});
      EXPECT_EQ(trained(run_of(OffloadTier::nvme, ranks, optimizer), &files), expected) << optimizer;
    }
  }
}

// Tiles beyond the own buffers of the ring are read, updated and used by the next forward pass while no write
// can end.
TEST(LentGradients, TheForwardPassDoesNotWaitForTheLastWrites) {
  std::atomic<int> written = 0, held = 0;
  std::atomic<bool> counting = false, over = false, late = false;
  WatchedFileSystem files([&](FileOperation operation, std::int64_t) {
    if (!counting || operation != FileOperation::write || ++written <= tiles - 8) return;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    ++held;
    while (!over && !late) {
      if (std::chrono::steady_clock::now() > end) late = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    --held;
  });
  on_equal_units(run_of(OffloadTier::nvme, 1), &files, [&](Engine& engine, Runtime& runtime) {
    for (int step = 0; step < 3; ++step) {
      one_step(engine, runtime, "",
               [&] { over = true; });              // the forward pass has had the weights of all units
      while (held > 0) std::this_thread::yield();  // or a write would wait for the next forward pass
      written = 0;
      over = false;
      counting = step < 2;
      EXPECT_TRUE(engine.step().applied);
    }
    (void)engine.state_digest();
  });
  EXPECT_FALSE(late) << "the update of the last tiles waited for writes";
}

}  // namespace
}  // namespace tranche::test
