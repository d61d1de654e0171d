// tranche.host_state: state that is asked for on nvme stays in host memory as far as it fits, and tiles are
// read ahead into what is left. No bit changes, every byte is planned, a save takes such state tile by tile.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "../offload/faulty_file_system.h"
#include "engine/offload_share.h"
#include "offload_saving_fixture.h"
#include "same_bits.h"
#include "tests/core/rounds.h"
#include "tranche/core/random.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using tranche::testing::FaultyFileSystem;
using tranche::testing::FileOperation;

class HostState : public OffloadSaving {
 protected:
  OddRun run_of(int ranks, bool weights) const {
    OddRun run =
        setup(ranks, weights ? 3 : 2, OffloadTier::nvme, weights ? OffloadTier::nvme : OffloadTier::none);
    return run;
  }
  /// The bytes of a rank's state. Among them are those that are requested on nvme, and the part of these that
  /// stays in host memory.
  static Engine::StateBytes bytes_of_state(const OddRun& run) {
    Engine::StateBytes bytes;
    on_tiled_ranks(run, [&](Engine& engine, Runtime& runtime) {
      if (runtime.rank() == 0) bytes = engine.state_bytes();
    });
    return bytes;
  }
  /// The state after three steps, of which the second is skipped; at least one tile is read in each.
  static kernels::Digest trained(const OddRun& run, bool expect_disk) {
    kernels::Digest digest;
    on_tiled_ranks(run, [&](Engine& engine, Runtime& runtime) {
      for (const char* poison : {"", "prime.c", ""}) {
        const StepResult step = one_step(engine, runtime, poison);
        EXPECT_EQ(step.applied, *poison == 0);
        EXPECT_EQ(step.offload_traffic.nvme_read > 0, expect_disk) << run.offload.host_state;
      }
      const kernels::Digest mine = engine.state_digest();
      if (runtime.rank() == 0) digest = mine;
    });
    return digest;
  }
};

TEST_F(HostState, WholeBuffersStayInOrderWhileBytesLast) {
  OffloadConfig offload;
  offload.optimizer = OffloadTier::nvme;
  const auto homes = [&](std::int64_t bytes) {
    offload.host_state = bytes;
    return detail::HostHomes(offload);
  };
  detail::HostHomes none = homes(-1);  // `auto`, before a number has replaced it
  EXPECT_FALSE(none.take_state(1));
  detail::HostHomes some = homes(100);
  EXPECT_TRUE(some.take_weights(10, 40));
  EXPECT_FALSE(some.take_state(61));
  EXPECT_TRUE(some.take_state(60)) << "a smaller one behind takes the rest";
  EXPECT_FALSE(some.take_state(1));
  offload.most_weights_in_host = 15;
  detail::HostHomes few = homes(100);
  EXPECT_TRUE(few.take_weights(10, 20));
  EXPECT_FALSE(few.take_weights(10, 20)) << "beyond max_in_cpu";
  EXPECT_TRUE(few.take_weights(5, 10));
  EXPECT_TRUE(few.take_state(70));
  offload.optimizer = OffloadTier::cpu;
  EXPECT_FALSE(homes(100).take_state(1)) << "nothing is asked for on nvme";
}

TEST_F(HostState, NoBudgetChangesABit) {
  int point = 0;
  for (const int ranks : {1, 2}) {
    for (const bool weights : {false, true}) {
      OddRun run = run_of(ranks, weights);
      const std::int64_t all = bytes_of_state(run).asked_on_nvme;
      ASSERT_GT(all, 0);
      OddRun never = run;
      never.offload = {};
      const kernels::Digest expected = trained(never, false);
      // Host memory for no state, for one more tile in the ring, for half of the state, for all but one unit,
      // for all, and for more.
      for (const std::int64_t bytes :
           {std::int64_t{0}, std::int64_t{60'000}, all / 2, all - 1, all, 2 * all}) {
        for (const bool overlap : {true, false}) {
          if (!swept(point++, 3)) continue;
          run.offload.host_state = bytes;
          run.overlap = overlap;
          run.offload.tile_buffers = 3 + point % 3;
          run.offload.parameter_buffers = 2 + point % 2;
          EXPECT_EQ(trained(run, bytes < all), expected) << run.to_string() << " " << bytes;
          const Engine::StateBytes state = bytes_of_state(run);
          EXPECT_EQ(state.asked_on_nvme, all);
          EXPECT_LE(state.stay_in_host, bytes);
          EXPECT_EQ(state.stay_in_host == all, bytes >= all);
        }
      }
    }
  }
}

TEST_F(HostState, EveryRuleAndFormatOfStateHasTheBitsOfTheDevice) {
  OddRun run;
  run.dtype = DataType::bfloat16;
  run.stage = 3;
  const auto expect_equal = [&](const std::string& what) {
    OddRun never = run;
    const OddResult expected = train_odd(never);
    OddRun other = run;
    other.offload = setup(1, 3, OffloadTier::nvme, OffloadTier::nvme).offload;
    for (const std::int64_t bytes : {10'000, 25'000, 1'000'000}) {
      other.offload.host_state = bytes;
      expect_same(expected, train_odd(other), other, Skips::as_expected);
      if (HasFailure()) FAIL() << what;
    }
  };
  for (const char* rule : {"AdamW", "Lamb", "LARS", "Muon", "SGD", "Lion"}) {
    run.optimizer = rule;
    expect_equal(rule);
  }
  run.optimizer = "AdamW";
  for (const MasterFormat master : {MasterFormat::split, MasterFormat::none}) {
    run.master = master;
    expect_equal("master");
  }
  run.master = MasterFormat::fp32;
  run.moments = DataType::bfloat16;
  expect_equal("bf16 moments");
  run.large = true;
  run.moments = DataType::block8;
  expect_equal("block8 moments");
}

TEST_F(HostState, NoDepthOfReadingAheadChangesABit) {
  for (const char* rule : {"Lamb", "Muon"}) {
    OddRun run = run_of(2, true);
    run.optimizer = rule;
    OddRun never = run;
    never.offload = {};
    const kernels::Digest expected = trained(never, false);
    for (const int buffers : {3, 4, 64}) {
      for (const bool overlap : {true, false}) {
        run.offload.tile_buffers = buffers;
        run.overlap = overlap;
        run.offload.host_state = buffers == 4 ? 200'000 : 0;
        run.link_bytes_per_second = buffers == 64 ? 3e7 : 0;  // gradients arrive behind the agreement
        EXPECT_EQ(trained(run, true), expected) << rule << " " << buffers;
      }
    }
  }
}

TEST_F(HostState, FortyDrawnBudgetsAreWhatIsPlanned) {
  const RandomKey key{47, RandomPurpose::test, 0};
  std::uint64_t draw = 0;
  const auto pick = [&](std::uint32_t n) { return static_cast<int>(random_bits(key, draw++) % n); };
  int partly = 0;
  for (int i = 0; i < 40; ++i) {
    const bool weights = pick(2) == 0;
    OddRun run;
    run.ranks = 1 + pick(3);
    run.stage = weights ? 3 : pick(4);
    run.dtype = pick(2) == 0 ? DataType::bfloat16 : DataType::float32;
    run.accumulation = 1 + pick(2);
    run.offload = setup(1, 3, OffloadTier::nvme, weights ? OffloadTier::nvme : OffloadTier::none).offload;
    run.offload.ratio = pick(4) == 0 ? 0.7 : 1;
    run.offload.host_state = 256 * pick(160);
    if (weights && pick(3) == 0) run.offload.most_weights_in_host = 256 * pick(8);
    run.optimizer = std::array{"AdamW", "Lamb", "AdamW", "Muon"}[static_cast<std::size_t>(i % 4)];
    const OddResult measured = train_odd(run);
    run.device = DeviceKind::meta;
    const OddResult planned = train_odd(run);
    const auto expect_books = [&](const TierAccount& plan, const TierAccount& run_has, const char* tier) {
      EXPECT_EQ(plan.peak, run_has.peak) << tier << " " << run.to_string();
      EXPECT_EQ(plan.category_peak.bytes, run_has.category_peak.bytes) << tier << " " << run.to_string();
      EXPECT_EQ(plan.persistent.bytes, run_has.persistent.bytes) << tier << " " << run.to_string();
    };
    expect_books(planned.accounts[0], measured.accounts[0], "device");
    expect_books(planned.host_accounts[0], measured.host_accounts[0], "host");
    expect_books(planned.nvme_accounts[0], measured.nvme_accounts[0], "nvme");
    const OffloadTraffic plan = planned.steps.back().offload_traffic,
                         moved = measured.steps.back().offload_traffic;
    EXPECT_EQ(plan.to_host, moved.to_host);
    EXPECT_EQ(plan.from_host, moved.from_host);
    EXPECT_EQ(plan.nvme_read, moved.nvme_read);
    EXPECT_EQ(plan.nvme_written, moved.nvme_written);
    const Engine::StateBytes& state = measured.state_bytes[0];
    EXPECT_LE(state.stay_in_host, run.offload.host_state);
    partly += state.stay_in_host > 0 && state.stay_in_host < state.asked_on_nvme ? 1 : 0;
    if (HasFailure()) return;
  }
  EXPECT_GT(partly, 15) << "draws that keep a part";
}

/// Elements of a unit's flat buffer of trained or frozen tensors on one rank.
std::int64_t padded_elements(const UnitSpec& unit, bool frozen) {
  std::int64_t elements = 0;
  for (const TensorSpec& tensor : unit.tensors) {
    if ((tensor.name == odd_frozen_tensor) == frozen) elements += (tensor.shape.elements() + 63) / 64 * 64;
  }
  return (elements + 255) / 256 * 256;
}

TEST_F(HostState, AHomeAndAReadAheadBufferTakeWhatTheBudgetSays) {
  // The unit "wider" has 12297 + 8197 elements; "wide" 8269; what is left of the budget is tiles.
  OddRun run = run_of(1, false);
  std::int64_t stays = 0;
  const auto host_peak = [&](std::int64_t bytes) {
    run.offload.host_state = bytes;
    std::int64_t peak = 0;
    on_tiled_ranks(run, [&](Engine& engine, Runtime& runtime) {
      (void)one_step(engine, runtime);
      peak = runtime.ledger().account(Tier::host).peak;
      stays = engine.state_bytes().stay_in_host;
    });
    return peak;
  };
  const std::int64_t before = host_peak(0);
  constexpr std::int64_t tile = 3 * 4096 * 4;
  // All but the two large units stay; beside them one more tile fits.
  std::int64_t small = 0;
  const ModelSpec model = tiled_model();
  for (const UnitSpec& unit : model.units()) {
    const std::int64_t elements = padded_elements(unit, false);
    if (elements < 4096) small += 12 * elements;
  }
  EXPECT_EQ(host_peak(small), before + small);
  EXPECT_EQ(stays, small);
  EXPECT_LT(host_peak(small - 1), before + small);
  EXPECT_LT(stays, small - 1);
  EXPECT_EQ(host_peak(small + tile), before + small) << "a buffer takes a little more than a tile";
  EXPECT_EQ(host_peak(small + tile + 4096), before + small + tile + 4096);
  EXPECT_EQ(stays, small);
}

TEST_F(HostState, AllWeightsStayInTheirBytesAndNotInOneLess) {
  OddRun run = run_of(1, true);
  std::int64_t weights = 0, last = 0;
  const ModelSpec model = tiled_model();
  for (const UnitSpec& unit : model.units()) {
    for (const bool frozen : {false, true}) {
      const std::int64_t bytes = 2 * padded_elements(unit, frozen);  // bf16
      weights += bytes;
      if (bytes > 0) last = bytes;
    }
  }
  const auto stays = [&](std::int64_t bytes) {
    run.offload.host_state = bytes;
    return bytes_of_state(run).stay_in_host;
  };
  EXPECT_EQ(stays(weights), weights);
  EXPECT_EQ(stays(weights - 1), weights - last);
}

TEST_F(HostState, NoMoreIsReadAheadThanTheBudgetAllows) {
  std::int64_t weights = 0;
  const ModelSpec model = tiled_model();
  for (const UnitSpec& unit : model.units()) {
    for (const bool frozen : {false, true}) weights += 2 * padded_elements(unit, frozen);
  }
  // Neither a budget of nothing nor one that weights use up leaves a buffer beyond buffer_count.
  for (const bool all_weights : {false, true}) {
    OddRun run = run_of(1, all_weights);
    run.offload.host_state = all_weights ? weights : 0;
    FaultyFileSystem files(detail::posix_file_system());
    on_tiled_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          const std::int64_t begun = files.count(FileOperation::read);
          whole_step(engine, runtime, 0);
          for (int ms = 0; files.count(FileOperation::read) < begun + 3 && ms < 20'000; ++ms) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
          std::this_thread::sleep_for(std::chrono::milliseconds(50));  // one more would be here by then
          EXPECT_EQ(files.count(FileOperation::read), begun + run.offload.tile_buffers) << all_weights;
          (void)engine.step();
        },
        &files);
  }
}

TEST_F(HostState, EveryRuleTakesBuffersToReadAhead) {
  for (const char* optimizer : {"AdamW", "Lamb", "LARS", "Muon"}) {
    OddRun run = run_of(1, false);
    run.optimizer = optimizer;
    std::int64_t peak = 0, stays = 0;
    const auto measure = [&](std::int64_t bytes) {
      run.offload.host_state = bytes;
      on_tiled_ranks(run, [&](Engine& engine, Runtime& runtime) {
        (void)one_step(engine, runtime);
        peak = runtime.ledger().account(Tier::host).peak;
        stays = engine.state_bytes().stay_in_host;
      });
    };
    measure(0);
    const std::int64_t before = peak;
    measure(200'000);
    EXPECT_GT(stays, 0) << optimizer;
    EXPECT_LT(stays, 200'000) << optimizer;
    EXPECT_GT(peak, before + stays) << optimizer;
    EXPECT_LE(peak, before + 200'000) << optimizer;
  }
}

// The first visit of a rule with sums, or of whole matrices, takes what was read ahead; the second one reads
// what the first wrote.
TEST_F(HostState, EveryRuleReadsAheadOnceBeforeItsUpdate) {
  // Tiles of the model; Muon's two matrices have tiles of their own, and AdamW's tensors beside them.
  constexpr std::int64_t tiles = 14, matrices = 2;
  struct Case {
    const char* optimizer;
    std::int64_t ahead, behind;  // reads before step(), and in it
  };
  for (const Case& c : {Case{"AdamW", tiles, 0}, Case{"Lamb", tiles, tiles}, Case{"LARS", tiles, tiles},
                        Case{"Muon", tiles + matrices, matrices}}) {
    OddRun run = run_of(1, false);
    run.optimizer = c.optimizer;
    run.offload.tile_buffers = 64;
    FaultyFileSystem files(detail::posix_file_system());
    on_tiled_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          const auto reads_are = [&](std::int64_t expected) {
            for (int ms = 0; files.count(FileOperation::read) < expected && ms < 20'000; ++ms) {
              std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            EXPECT_EQ(files.count(FileOperation::read), expected) << c.optimizer;
          };
          std::int64_t expected = files.count(FileOperation::read);
          for (int step = 0; step < 2; ++step) {
            whole_step(engine, runtime, step);
            reads_are(expected += c.ahead);
            const StepResult result = engine.step();
            reads_are(expected += c.behind);
            EXPECT_EQ(result.offload_traffic.nvme_read, result.offload_traffic.nvme_written);
          }
        },
        &files);
  }
}

TEST_F(HostState, ASaveTakesStateThatStaysTileByTile) {
  int number = 0;
  // LAMB visits its state before the update, and hands it over then.
  for (const auto& [optimizer, weights] :
       {std::pair("AdamW", false), std::pair("AdamW", true), std::pair("Lamb", false)}) {
    for (const std::int64_t bytes : {std::int64_t{60'000}, std::int64_t{150'000}, std::int64_t{10'000'000}}) {
      const std::string folder = path("saves" + std::to_string(number));
      if (!sampled(number++, 4)) continue;
      OddRun run = run_of(2, weights);
      run.optimizer = optimizer;
      const std::vector<kernels::Digest> expected = undisturbed(run, 4, 2);
      run.offload.host_state = bytes;
      const auto snapshot_peak = [&](const Runtime& runtime) {
        return runtime.ledger().account(Tier::host).category_peak[Category::other];
      };
      const auto saved_from = [&](std::int64_t host_state) {  // the memory that the save's copy takes
        OddRun saving = run;
        saving.offload.host_state = host_state;
        std::int64_t peak = 0;
        on_tiled_ranks(saving, [&](Engine& engine, Runtime& runtime) {
          engine.save(folder + "-memory-" + std::to_string(host_state), {.wait = true});
          if (runtime.rank() == 0) peak = snapshot_peak(runtime);
        });
        return peak;
      };
      EXPECT_EQ(saved_from(bytes), saved_from(0)) << "it does not grow with what stays";
      on_tiled_ranks(run, [&](Engine& engine, Runtime& runtime) {
        (void)one_step(engine, runtime);
        engine.save(folder);
        EXPECT_TRUE(one_step(engine, runtime).applied);
        engine.save(folder);
        EXPECT_FALSE(one_step(engine, runtime, "prime.c").applied);
        engine.save(folder);
        (void)engine.finish_saving();  // hands over the tiles that no step has handed over
        (void)one_step(engine, runtime);
        EXPECT_EQ(engine.state_digest(), expected[4]);
      });
      EXPECT_EQ(stored(run, folder + "/step-00000001"), expected[1]);
      EXPECT_EQ(stored(run, folder + "/step-00000002"), expected[2]);
      EXPECT_EQ(stored(run, folder + "/step-00000003"), expected[2]);
      // A run with another budget continues from this checkpoint.
      OddRun other = run;
      other.offload.host_state = bytes == 60'000 ? 10'000'000 : 0;
      on_tiled_ranks(other, [&](Engine& engine, Runtime& runtime) {
        engine.load(folder + "/step-00000003");
        EXPECT_EQ(engine.state_digest(), expected[2]);
        (void)one_step(engine, runtime);
        EXPECT_EQ(engine.state_digest(), expected[4]);
        engine.save(folder);
        (void)engine.finish_saving();
      });
      if (HasFailure()) return;
    }
  }
}

TEST_F(HostState, WritingStateThatASaveStillOwesWaitsForIt) {
  OddRun run = run_of(1, true);
  run.offload.host_state = 10'000'000;
  const std::vector<kernels::Digest> expected = undisturbed(run, 1);
  on_tiled_ranks(run, [&](Engine& engine, Runtime& runtime) {
    (void)one_step(engine, runtime);
    engine.save(path("saves"));
    std::vector<float> values = engine.read_weight("prime.c");
    for (float& value : values) value += 1;
    engine.write_weight("prime.c", values);
    (void)engine.finish_saving();
    EXPECT_NE(engine.state_digest(), expected[1]);
  });
  EXPECT_EQ(stored(run, path("saves") + "/step-00000001"), expected[1]);
}

TEST_F(HostState, AFailureOfAReadAheadIsNamedAndEndsTheRun) {
  struct Case {
    const char* optimizer;
    UpdateTime update = UpdateTime::at_the_boundary;
  };
  for (const Case& c : {Case{"AdamW"}, Case{"Lamb"}, Case{"Muon"}, Case{"AdamW", UpdateTime::as_reduced}}) {
    OddRun run = run_of(1, false);
    run.optimizer = c.optimizer;
    run.clipping = 0;
    const std::string folder = path(std::string("before") + c.optimizer + std::string(name_of(c.update)));
    const kernels::Digest expected = undisturbed(run, 1)[1];
    run.update = c.update;
    run.offload.host_state = 200'000;  // small units stay, and a large one passes with tiles read ahead
    FaultyFileSystem files(detail::posix_file_system());
    std::string first;
    on_tiled_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          (void)one_step(engine, runtime);
          engine.save(folder, {.wait = true});
          // Reads of the next step begin with its micro-batch: the first that fails is ahead of the update.
          files.inject({.operation = FileOperation::read, .nth = 1, .times = -1, .code = EIO});
          try {
            for (int step = 0; step < 2; ++step) (void)one_step(engine, runtime);
            (void)engine.state_digest();
          } catch (const IoError& error) {
            first = error.message();
          }
          files.clear();
        },
        &files);
    EXPECT_THAT(first, AllOf(HasSubstr("read of bytes"), HasSubstr("Input/output error"))) << c.optimizer;
    run.clipping = 1;  // of a run that reads it at the boundary
    run.update = UpdateTime::at_the_boundary;
    EXPECT_EQ(stored(run, folder + "/step-00000001"), expected) << c.optimizer;
  }
}

TEST_F(HostState, AFullDiskIsNamedAndLosesNothing) {
  OddRun run = run_of(1, true);
  const std::int64_t all = bytes_of_state(run).asked_on_nvme;
  OddRun never = run;
  never.offload = {};
  const kernels::Digest expected = trained(never, false);
  FaultyFileSystem files(detail::posix_file_system());
  const auto starts = [&] {
    kernels::Digest digest;
    on_tiled_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          for (const char* poison : {"", "prime.c", ""}) (void)one_step(engine, runtime, poison);
          digest = engine.state_digest();
        },
        &files);
    return digest;
  };
  // State that stays in host memory takes no room on the disk.
  files.set_free_bytes(20'000);
  EXPECT_THAT(message_of<Error>(starts), AllOf(HasSubstr("the nvme tier"), HasSubstr("19.53 KiB (20000 B)"),
                                               HasSubstr(run.offload.nvme_path)));
  run.offload.host_state = all;
  EXPECT_EQ(starts(), expected);
  // A disk that fills up under the tiles that are written behind those read ahead.
  files.set_free_bytes(std::int64_t{1} << 40);
  run.offload.host_state = 200'000;
  std::string first;
  on_tiled_ranks(
      run,
      [&](Engine& engine, Runtime& runtime) {
        (void)one_step(engine, runtime);
        engine.save(path("before"), {.wait = true});
        files.inject({.operation = FileOperation::write,
                      .nth = 1,
                      .times = -1,
                      .code = ENOSPC,
                      .path_contains = "nvme"});
        try {
          for (int step = 0; step < 2; ++step) (void)one_step(engine, runtime);
          (void)engine.state_digest();
        } catch (const IoError& error) {
          first = error.message();
        }
        files.clear();
      },
      &files);
  EXPECT_THAT(first, AllOf(HasSubstr("write of bytes"), HasSubstr("No space left on device")));
  EXPECT_EQ(stored(run, path("before") + "/step-00000001"), undisturbed(run, 1)[1]);
}

TEST_F(HostState, ASlowDiskIsWaitedForAndToldOf) {
  OddRun run = run_of(1, true);
  OddRun never = run;
  never.offload = {};
  const kernels::Digest expected = trained(never, false);
  constexpr int milliseconds = 3;
  for (const std::int64_t bytes : {0, 100'000, 250'000}) {
    run.offload.host_state = bytes;
    FaultyFileSystem files(detail::posix_file_system());
    kernels::Digest digest;
    on_tiled_ranks(
        run,
        [&](Engine& engine, Runtime& runtime) {
          files.inject({.operation = FileOperation::read,
                        .nth = 1,
                        .times = -1,
                        .delay = std::chrono::milliseconds(milliseconds)});
          double busy = 0;
          for (const char* poison : {"", "prime.c", ""}) {
            const StepResult step = one_step(engine, runtime, poison);
            EXPECT_GT(step.offload_traffic.nvme_read, 0);
            busy += step.offload.disk;
          }
          EXPECT_GE(busy, 2 * milliseconds / 1000.0) << "two whole steps have passed";
          digest = engine.state_digest();
          files.clear();
        },
        &files);
    EXPECT_EQ(digest, expected) << bytes;
  }
}

TEST_F(HostState, TheStartSaysWhatStaysAndWhy) {
  OddRun run = run_of(1, true);
  const auto summary = [&] {
    std::string text;
    on_tiled_ranks(run, [&](Engine& engine, Runtime&) { text = engine.summary(); });
    return text;
  };
  EXPECT_THAT(summary(), Not(HasSubstr("asked for on nvme"))) << "auto that nobody replaced is 0, as before";
  run.offload.host_state = 10'000'000;
  EXPECT_THAT(summary(),
              HasSubstr(" of state that is asked for on nvme stay in host memory: tranche.host_state is "
                        "9.54 MiB\n"));
  run.offload.host_state = 0;
  run.offload.host_state_reason = ", because auto found nothing";
  EXPECT_THAT(summary(), HasSubstr("0 B of "));
  EXPECT_THAT(summary(), HasSubstr("tranche.host_state is 0 B, because auto found nothing\n"));
}

}  // namespace
}  // namespace tranche::test
