// Optimizer states in blocks of 8 bits (tranche.moments block8) in an engine: the same bits for every tier
// and partition, plans that equal the ledger, checkpoints for any number of ranks, and conversions that must
// be requested.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/reader.h"
#include "core/block8.h"
#include "core/text_file.h"
#include "offload/file_system.h"
#include "on_ranks.h"
#include "same_bits.h"
#include "saving_fixture.h"
#include "tests/core/rounds.h"
#include "tranche/optim/rules.h"

namespace tranche::test {
namespace {

struct BlockCase {
  std::string type;
  RuleParameters parameters;
};
const std::vector<BlockCase>& block_cases() {
  static const std::vector<BlockCase> all = {{"AdamW", {{"amsgrad", 1}, {"weight_decay", 0.1}}},
                                             {"Adam", {{"adam_w_mode", 0}, {"weight_decay", 0.1}}},
                                             {"LARS", {{"trust_coefficient", 0.1}, {"weight_decay", 0.1}}},
                                             {"Lamb", {{"weight_decay", 0.1}}},
                                             {"Lion", {{"weight_decay", 0.1}}},
                                             {"Muon", {{"weight_decay", 0.1}, {"adam_lr", 0.01}}},
                                             {"RMSprop", {{"centered", 1}, {"momentum", 0.5}, {"eps", 1e-3}}},
                                             {"SGD", {{"momentum", 0.9}, {"nesterov", 1}}}};
  return all;
}

OddRun block_run(const BlockCase& rule, int ranks, DataType dtype = DataType::bfloat16) {
  OddRun run;
  run.large = true;
  run.ranks = ranks;
  run.dtype = dtype;
  run.policy = ReductionPolicy::micro_batch;
  run.accumulation = 2;
  run.steps = 3;
  run.optimizer = rule.type;
  run.parameters = rule.parameters;
  run.moments = DataType::block8;
  return run;
}

TEST(Block8States, GiveTheSameBitsOverStagesTiersAndBuckets) {
  int turn = 0;
  for (const BlockCase& rule : block_cases()) {
    const int ranks = 1 + turn % 5;
    if (!sampled(turn++, 3)) continue;
    (void)expect_the_same_everywhere(block_run(rule, ranks));
    if (HasFailure()) return;
  }
}

class Block8StatesSlow : public Saving {};

TEST_F(Block8StatesSlow, GiveTheSameBitsOverStagesTiersAndBuckets) {
  for (const BlockCase& rule : block_cases()) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
      for (const DataType dtype : {DataType::bfloat16, DataType::float32}) {
        (void)expect_the_same_everywhere(block_run(rule, ranks, dtype));
        if (HasFailure()) return;
      }
    }
  }
}

TEST(Block8States, GiveTheSameBitsOnAnyNumberOfRanksAndOnMeshes) {
  for (const char* type : {"AdamW", "Lamb"}) {
    const OddRun run = block_run({type, {{"weight_decay", 0.1}}}, 1);
    expect_the_same_on_any_ranks(run, 4);
    expect_the_same_on_meshes(run);
  }
}

// Tensors without blocks have the bits of a run with fp32 states as long as no element of a tensor with
// blocks influences them; tensors with blocks have other bits.
TEST(Block8States, AreOfLargeTensorsAlone) {
  std::vector<std::vector<float>> weights[2];
  for (const bool in_blocks : {false, true}) {
    OddRun run = block_run({"AdamW", {}}, 2);
    run.clipping = 0;
    if (!in_blocks) run.moments = DataType::float32;
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      for (int step = 0; step < 3; ++step) {
        whole_step(engine, runtime, step);
        engine.step();
      }
      for (const char* name : {"tied.a", "tied.b", "large.j", "large.h", "large.i"}) {
        std::vector<float> values = engine.read_weight(name);
        if (runtime.rank() == 0) weights[in_blocks].push_back(std::move(values));
      }
    });
  }
  for (std::size_t t = 0; t < 3; ++t) EXPECT_EQ(weights[0][t], weights[1][t]);
  for (std::size_t t = 3; t < 5; ++t) EXPECT_NE(weights[0][t], weights[1][t]);
}

TEST(Block8States, ArePlannedToTheByte) {
  for (const char* type : {"AdamW", "Muon", "SGD"}) {
    for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
      OddRun run = block_run({type, {}}, 3);
      run.stage = 2;
      run.accumulation = 1;
      run.offload.optimizer = tier;
      run.offload.tile_elements = 4096;
      run.offload.nvme_path = std::filesystem::temp_directory_path().string();
      std::vector<TierAccount> measured, planned;
      Engine::StateBytes formula;
      const auto train = [&](Engine& engine, Runtime& runtime) {
        for (int step = 0; step < 3; ++step) {
          whole_step(engine, runtime, step);
          engine.step();
        }
        if (runtime.rank() != 0) return;
        auto& into = engine.device().kind() == DeviceKind::meta ? planned : measured;
        for (const Tier of : {Tier::device, Tier::host, Tier::nvme}) {
          into.push_back(runtime.ledger().account(of));
        }
        formula = engine.state_bytes();
      };
      on_ranks(run, train);
      if (std::string(type) != "Muon") {
        // large.h and large.i begin at elements 0 and 5632, in three shards of 3584; tied.a with tied.b, and
        // large.j, are in shards of 256. The master weights are fp32.
        const std::int64_t states = std::string(type) == "AdamW" ? 2 : 1;
        const std::int64_t wanted = 3584 * 4 + states * (3584 / 256 * 260) + 2 * 256 * (4 + 4 * states);
        EXPECT_EQ(formula.optimizer, wanted) << type << ", " << name_of(tier);
        if (tier != OffloadTier::nvme) {  // the tiles of nvme end with padding
          const TierAccount& home = measured[tier == OffloadTier::none ? 0 : 1];
          const std::int64_t padding = states * (aligned_bytes(3584 / 256 * 260) - 3584 / 256 * 260);
          EXPECT_EQ(home.persistent[Category::optimizer], wanted + padding) << type << ", " << name_of(tier);
        }
      }
      const Config config = odd_config(run);
      RuntimeOptions options = RuntimeOptions::from(config);
      options.device = DeviceKind::meta;
      Runtime runtime(options,
                      [](const CommunicatorOptions& of) { return make_meta_communicator(0, 3, 3, of); });
      Engine engine(runtime, odd_model(false, true), config);
      train(engine, runtime);
      ASSERT_EQ(measured.size(), planned.size());
      for (std::size_t t = 0; t < planned.size(); ++t) {
        EXPECT_EQ(measured[t].peak, planned[t].peak) << type << ", " << name_of(tier);
        EXPECT_EQ(measured[t].persistent.bytes, planned[t].persistent.bytes) << type << ", " << name_of(tier);
      }
    }
  }
}

// Written values are read back as the nearest values of their block, which the next update uses too.
TEST(Block8States, AreReadAndWrittenAsNumbers) {
  for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
    OddRun run = block_run({"AdamW", {}}, 3);
    run.stage = 1;
    run.offload.optimizer = tier;
    run.offload.tile_elements = 4096;
    run.offload.nvme_path = std::filesystem::temp_directory_path().string();
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      EXPECT_EQ(engine.read_optimizer_state("large.i", "exp_avg"), std::vector<float>(4603, 0.0f));
      for (const auto& [state, dtype] :
           {std::pair("exp_avg", DataType::block8), std::pair("exp_avg_sq", DataType::block8_unsigned)}) {
        std::vector<float> values(4603);
        for (std::size_t i = 0; i < values.size(); ++i) {
          values[i] = static_cast<float>(i % 97) * 1e-3f * (dtype == DataType::block8 && i % 2 == 0 ? -1 : 1);
        }
        engine.write_optimizer_state("large.i", state, values);
        std::vector<std::byte> blocks(static_cast<std::size_t>(bytes_of(dtype, 4603)));
        std::vector<float> wanted(values.size());
        detail::encode_blocks8(dtype, values, blocks.data());
        detail::decode_blocks8(dtype, blocks.data(), wanted);
        EXPECT_EQ(engine.read_optimizer_state("large.i", state), wanted) << name_of(tier);
        EXPECT_NE(wanted, values);
      }
      whole_step(engine, runtime, 0);
      EXPECT_TRUE(engine.step().applied);
    });
  }
}

class Block8Checkpoints : public Saving {
 protected:
  /// Saves after two steps on the run's ranks.
  kernels::Digest save(OddRun run, const std::string& name) {
    return digest_after(run, [&](Engine& engine, Runtime& runtime) {
      for (int step = 0; step < 2; ++step) {
        whole_step(engine, runtime, step);
        engine.step();
      }
      engine.save(path(name), {.wait = true});
    });
  }
  static std::string newest(const std::string& folder) {
    std::vector<std::string> notes;
    return checkpoint::newest_checkpoint(detail::posix_file_system(), folder, notes).path;
  }
  /// The bytes of all states of all tensors.
  static std::vector<std::byte> bytes_at(const std::string& folder) {
    const checkpoint::LocalStorage local;
    checkpoint::Reader reader(local, newest(folder));
    std::vector<std::byte> all;
    for (const checkpoint::StoredTensor& tensor : reader.tensors()) {
      for (const std::string& kind : reader.kinds(tensor)) {
        const DataType dtype = reader.dtype(tensor, kind);
        const std::int64_t elements = tensor.shape.elements();
        const std::size_t begin = all.size();
        all.resize(begin + static_cast<std::size_t>(bytes_of(dtype, elements)));
        reader.read_tensor(tensor.name, kind, {0, elements}, dtype, all.data() + begin);
      }
    }
    return all;
  }
  void expect_kept(int from, int to) {
    std::filesystem::remove_all(path());
    OddRun run = block_run({"AdamW", {{"amsgrad", 1}, {"weight_decay", 0.1}}}, from);
    run.stage = 1 + from % 3;
    const kernels::Digest saved = save(run, "first");
    run.ranks = to;
    run.stage = to % 4;
    const kernels::Digest loaded = digest_after(run, [&](Engine& engine, Runtime&) {
      engine.load(path("first"));
      engine.save(path("second"), {.wait = true});
    });
    EXPECT_EQ(saved, loaded) << from << " to " << to;
    const std::vector<std::byte> bytes = bytes_at(path("first"));
    EXPECT_GT(bytes.size(), 5u * 10164);
    EXPECT_TRUE(bytes == bytes_at(path("second"))) << from << " to " << to;
  }
};

TEST_F(Block8Checkpoints, KeepEveryByteOnOtherNumbersOfRanks) {
  const int steps[] = {1, 3, 8, 2, 6, 4, 1};
  for (std::size_t i = 1; i < std::size(steps); ++i) {
    if (swept(static_cast<int>(i))) expect_kept(steps[i - 1], steps[i]);
  }
}

class Block8CheckpointsSlow : public Block8Checkpoints {};

TEST_F(Block8CheckpointsSlow, KeepEveryByteOnOtherNumbersOfRanks) {
  for (const int from : {1, 2, 3, 4, 6, 8}) {
    for (const int to : {1, 2, 3, 4, 6, 8}) expect_kept(from, to);
  }
}

// A run with one format loads the state of another format if that is requested; otherwise the error names the
// option.
TEST_F(Block8Checkpoints, OfAnotherFormatAreConvertedOnRequest) {
  struct Saved {
    DataType moments;
    std::vector<float> m, v;
  };
  std::vector<Saved> saved;
  for (const DataType moments : {DataType::float32, DataType::bfloat16, DataType::block8}) {
    OddRun run = block_run({"AdamW", {}}, 2);
    run.stage = 2;
    run.moments = moments;
    Saved& of = saved.emplace_back(Saved{moments, {}, {}});
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      whole_step(engine, runtime, 0);
      engine.step();
      engine.save(path(std::string(name_of(moments))), {.wait = true});
      std::vector<float> m = engine.read_optimizer_state("large.i", "exp_avg");
      std::vector<float> v = engine.read_optimizer_state("large.i", "exp_avg_sq");
      if (runtime.rank() == 0) std::tie(of.m, of.v) = std::pair(std::move(m), std::move(v));
    });
  }
  const checkpoint::LocalStorage local;
  checkpoint::Reader reader(local, newest(path("fp32")));
  std::byte block[block8_bytes];
  const std::string told = message_of<InvalidArgument>([&] {
    reader.read_tensor("large.i", "exp_avg", {100, 200}, DataType::block8, block);
  });
  EXPECT_NE(
      told.find("elements 100 to 200 of tensor large.i cannot be read as block8: they lie outside its "),
      std::string::npos)
      << told;
  const auto in_format = [](std::vector<float> values, DataType format, bool positive) {
    if (format == DataType::bfloat16) {
      for (float& value : values) value = to_float(to_bfloat16(value));
    } else if (format == DataType::block8) {
      const DataType dtype = positive ? DataType::block8_unsigned : DataType::block8;
      std::vector<std::byte> blocks(
          static_cast<std::size_t>(bytes_of(dtype, static_cast<std::int64_t>(values.size()))));
      detail::encode_blocks8(dtype, values, blocks.data());
      detail::decode_blocks8(dtype, blocks.data(), values);
    }
    return values;
  };
  for (const Saved& from : saved) {
    for (const DataType to : {DataType::float32, DataType::bfloat16, DataType::block8}) {
      OddRun run = block_run({"AdamW", {}}, 3);
      run.stage = 3;
      run.moments = to;
      const std::string folder = path(std::string(name_of(from.moments)));
      on_ranks(run, [&](Engine& engine, Runtime& runtime) {
        if (from.moments != to) {
          const std::string told = message_of<CheckpointError>([&] { engine.load(folder); });
          // The state of the first tensor that differs; block8 keeps fp32 for small ones.
          const auto of_first = [](DataType moments, DataType other) {
            const bool small = moments == DataType::block8 && other == DataType::bfloat16;
            return std::string(name_of(small ? DataType::float32 : moments));
          };
          const std::string what = " is in " + of_first(from.moments, to) + " in ";
          EXPECT_NE(told.find("exp_avg of tensor "), std::string::npos) << told;
          EXPECT_NE(told.find(what), std::string::npos) << told;
          EXPECT_NE(told.find(", but in " + of_first(to, from.moments) +
                              " in this run (tranche.moments); "
                              "--convert-state (LoadOptions::convert_state) converts it"),
                    std::string::npos)
              << told;
        }
        engine.load(folder, {.convert_state = from.moments != to});
        // Blocks are not encoded again: -1 has no code, so another scale would result.
        const bool same = from.moments == to;
        EXPECT_EQ(engine.read_optimizer_state("large.i", "exp_avg"),
                  same ? from.m : in_format(from.m, to, false));
        EXPECT_EQ(engine.read_optimizer_state("large.i", "exp_avg_sq"),
                  same ? from.v : in_format(from.v, to, true));
        whole_step(engine, runtime, 1);
        EXPECT_TRUE(engine.step().applied);
      });
    }
  }
}

TEST_F(Block8Checkpoints, NameTheirFormat) {
  OddRun run = block_run({"AdamW", {}}, 2);
  run.stage = 1;
  (void)save(run, "run");
  const std::string manifest = detail::read_text_file(newest(path("run")) + "/manifest.json", "manifest");
  EXPECT_NE(manifest.find("\"block8\""), std::string::npos);
  EXPECT_NE(manifest.find("\"block8_unsigned\""), std::string::npos);
}

}  // namespace
}  // namespace tranche::test
