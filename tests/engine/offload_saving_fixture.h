#pragma once
/// Helpers for tests of saves from the nvme tier.

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "on_ranks.h"
#include "saving_fixture.h"

namespace tranche::test {

/// The odd model, then units of several tiles of which half fit on the device, then one unit that fits again.
inline ModelSpec tiled_model() {
  ModelSpec spec = odd_model();
  spec.add_unit({"wide", {{"wide.h", Shape{2 * 4096 + 77}, Initializer::normal(0.1f)}}, 1});
  spec.add_unit({"wider",
                 {{"wider.i", Shape{3, 4099}, Initializer::normal(0.1f)},
                  {"wider.j", Shape{2 * 4096 + 5}, Initializer::normal(0.1f)}},
                 1});
  spec.add_unit({"late", {{"late.k", Shape{500}, Initializer::normal(0.1f)}}, 1});
  return spec;
}

class OffloadSaving : public Saving {
 protected:
  OddRun setup(int ranks, int stage, OffloadTier optimizer = OffloadTier::nvme,
               OffloadTier parameters = OffloadTier::none) const {
    OddRun run;
    run.ranks = ranks;
    run.stage = stage;
    run.dtype = DataType::bfloat16;
    run.policy = ReductionPolicy::micro_batch;
    run.offload.optimizer = optimizer;
    run.offload.parameters = parameters;
    run.offload.tile_elements = 4096;
    run.offload.tile_buffers = 3;
    run.offload.nvme_path = path("nvme");
    std::filesystem::create_directories(run.offload.nvme_path);
    return run;
  }
  static void on_tiled_ranks(const OddRun& run, const std::function<void(Engine&, Runtime&)>& body,
                             detail::FileSystem* files = nullptr, bool save_buffer = false) {
    CommonStart start(run.ranks);
    run_thread_ranks(run.ranks, [&](int, const CommunicatorFactory& factory) {
      CommonStart::Rank started(start);
      Config config = odd_config(run);
      config.save_buffer = save_buffer;
      RuntimeOptions options = RuntimeOptions::from(config);
      options.device = run.device;
      options.log_level = LogLevel::off;
      options.files = files;
      Runtime runtime(options, factory);
      Engine engine(runtime, tiled_model(), config);
      started.await_others();
      body(engine, runtime);
    });
  }
  static StepResult one_step(Engine& engine, Runtime& runtime, const std::string& poison = {}) {
    whole_step(engine, runtime, engine.steps(), poison);
    return engine.step();
  }
  /// Digests of the state after 0, 1 ... steps of a run that never saves; step `poisoned` is skipped.
  static std::vector<kernels::Digest> undisturbed(OddRun run, int steps, int poisoned = -1) {
    std::vector<kernels::Digest> digests;
    run.offload = {};
    on_tiled_ranks(run, [&](Engine& engine, Runtime& runtime) {
      for (int step = 0; step <= steps; ++step) {
        const kernels::Digest digest = engine.state_digest();
        if (runtime.rank() == 0) digests.push_back(digest);
        if (step < steps) (void)one_step(engine, runtime, step == poisoned ? "prime.c" : "");
      }
    });
    return digests;
  }
  static kernels::Digest stored(OddRun run, const std::string& from) {
    kernels::Digest digest;
    run.offload = {};
    on_tiled_ranks(run, [&](Engine& engine, Runtime& runtime) {
      engine.load(from);
      const kernels::Digest mine = engine.state_digest();
      if (runtime.rank() == 0) digest = mine;
    });
    return digest;
  }
};

}  // namespace tranche::test
