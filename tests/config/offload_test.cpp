// Offloaded state: the keys that request it, and combinations that are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/config/every_note.h"
#include "tranche/config/config.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

/// Keys that would cause notes if they were missing.
const std::string given = R"("bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"},
  "gradient_clipping": 1, "optimizer": {"type": "AdamW"})";

/// Reads the keys above with the overrides.
Config read(const std::vector<std::string>& overrides) {
  return parse_config("{" + given + "}", 2, overrides);
}

std::string problems(const std::vector<std::string>& overrides) {
  try {
    read(overrides);
  } catch (const ConfigurationError& error) {
    EXPECT_EQ(error.exit_status(), ExitStatus::configuration);
    return error.message();
  }
  return "nothing was thrown";
}

/// The problems of a Config that code has built.
template <typename Change>
std::string problems_of(Change change) {
  Config config;
  change(config);
  try {
    validate_config(config, 2);
  } catch (const ConfigurationError& error) {
    return error.message();
  }
  return "nothing was thrown";
}

void expect_round_trip(const Config& config) {
  const std::string text = config.to_json();
  Config again;
  ASSERT_NO_THROW(again = parse_config(text, 2)) << text;
  EXPECT_EQ(again.to_json(), text);
  EXPECT_THAT(test::every_note(again), IsEmpty());
}

TEST(ConfigOffload, NothingMovesUnlessAskedFor) {
  const Config config = read({});
  EXPECT_FALSE(config.offload.any());
  EXPECT_FALSE(config.offload.uses_nvme());
  EXPECT_EQ(config.offload.ratio, 1);
  EXPECT_EQ(config.offload.tile_elements, 1 << 20);
  EXPECT_EQ(config.offload.tile_buffers, 4);
  EXPECT_EQ(config.offload.parameter_buffers, 3);
  EXPECT_EQ(config.offload.io_engine, "automatic");
  EXPECT_EQ(config.offload.io_block_bytes, 0);
  EXPECT_EQ(config.offload.io_depth, 0);
  EXPECT_EQ(config.offload.host_memory_limit, 0);
  EXPECT_EQ(config.offload.nvme_limit, 0);
  EXPECT_EQ(config.debug.host_link_bytes_per_second, 0);
  expect_round_trip(config);
}

const std::string everything = "{" + given + R"(,
  "zero_optimization": {"stage": 3, "sub_group_size": 1e9,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch/a", "ratio": 0.25, "buffer_count": 5},
    "offload_param": {"device": "cpu", "nvme_path": "/scratch/a", "buffer_count": 7}},
  "activation_checkpointing": {"cpu_checkpointing": true},
  "aio": {"block_size": 2097152, "queue_depth": 32},
  "tranche": {"activation_checkpointing": true, "offload_tile": 65536, "io_engine": "threads",
    "host_memory": "3GiB", "nvme_space": "1TiB", "debug": {"host_link_bandwidth": "2GB"}}})";

TEST(ConfigOffload, EveryFieldIsReadAndWritten) {
  const Config config = parse_config(everything, 2);
  const OffloadConfig& offload = config.offload;
  EXPECT_EQ(offload.optimizer, OffloadTier::nvme);
  EXPECT_EQ(offload.parameters, OffloadTier::cpu);
  EXPECT_EQ(offload.nvme_path, "/scratch/a");
  EXPECT_EQ(offload.ratio, 0.25);
  EXPECT_EQ(offload.tile_buffers, 5);
  EXPECT_EQ(offload.parameter_buffers, 7);
  EXPECT_TRUE(offload.activations);
  EXPECT_EQ(offload.tile_elements, 65536);
  EXPECT_EQ(offload.io_engine, "threads");
  EXPECT_EQ(offload.io_block_bytes, 2 << 20);
  EXPECT_EQ(offload.io_depth, 32);
  EXPECT_EQ(offload.host_memory_limit, std::int64_t{3} << 30);
  EXPECT_EQ(offload.nvme_limit, std::int64_t{1} << 40);
  EXPECT_EQ(config.debug.host_link_bytes_per_second, 2e9);
  EXPECT_THAT(test::every_note(config), IsEmpty());
  expect_round_trip(config);
  const Config again = parse_config(config.to_json(), 2);
  EXPECT_EQ(again.offload.optimizer, OffloadTier::nvme);
  EXPECT_EQ(again.offload.parameters, OffloadTier::cpu);
  EXPECT_EQ(again.offload.nvme_path, "/scratch/a");
  EXPECT_EQ(again.offload.ratio, 0.25);
  EXPECT_EQ(again.offload.tile_buffers, 5);
  EXPECT_EQ(again.offload.parameter_buffers, 7);
  EXPECT_TRUE(again.offload.activations);
  EXPECT_EQ(again.offload.tile_elements, 65536);
  EXPECT_EQ(again.offload.io_engine, "threads");
  EXPECT_EQ(again.offload.io_block_bytes, 2 << 20);
  EXPECT_EQ(again.offload.io_depth, 32);
  EXPECT_EQ(again.offload.host_memory_limit, std::int64_t{3} << 30);
  EXPECT_EQ(again.offload.nvme_limit, std::int64_t{1} << 40);
  EXPECT_EQ(again.debug.host_link_bytes_per_second, 2e9);
}

TEST(ConfigOffload, TheBlocksOfDeepSpeedsTutorialsAreRead) {
  const Config config = parse_config("{" + given + R"(, "zero_optimization": {"stage": 3,
      "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 4,
        "fast_init": false, "pipeline_read": true, "pipeline_write": true},
      "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 5,
        "buffer_size": 1e8, "max_in_cpu": 1e9}},
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "intra_op_parallelism": 1,
      "single_submit": false, "overlap_events": true, "use_gds": false}})",
                                     2);
  EXPECT_TRUE(config.offload.uses_nvme());
  EXPECT_EQ(config.offload.io_block_bytes, 262144);
  EXPECT_EQ(config.offload.parameter_buffers, 5);
  EXPECT_EQ(config.offload.most_weights_in_host, 1'000'000'000);
  EXPECT_EQ(config.offload.host_state, -1) << "auto, until a program knows what is free";
  EXPECT_THAT(test::every_note(config), ::testing::SizeIs(10));
  EXPECT_THAT(test::every_note(config), ::testing::Each(HasSubstr(": no meaning here: ")));
  EXPECT_THAT(test::every_note(config),
              Contains(HasSubstr("offload_param.buffer_size: no meaning here: a buffer is as large as the "
                                 "largest unit's shard")));
}

TEST(ConfigOffload, HostMemoryForStateOnNvmeIsBytesOrAuto) {
  const auto with = [](const std::string& host_state) {
    return parse_config("{" + given + R"(, "zero_optimization": {"stage": 3,
      "offload_param": {"device": "nvme", "nvme_path": "/n", "max_in_cpu": 7}},
      "tranche": {"host_state": )" +
                            host_state + "}}",
                        2);
  };
  EXPECT_EQ(with("\"2MiB\"").offload.host_state_bytes(), 2 << 20);
  EXPECT_EQ(with("0").offload.host_state, 0);
  EXPECT_EQ(with("\"auto\"").offload.host_state, -1);
  EXPECT_EQ(with("\"auto\"").offload.host_state_bytes(), 0);
  expect_round_trip(with("4096"));
  const Config again = parse_config(with("4096").to_json(), 2);
  EXPECT_EQ(again.offload.host_state, 4096);
  EXPECT_EQ(again.offload.most_weights_in_host, 7);
  EXPECT_EQ(parse_config(with("\"auto\"").to_json(), 2).offload.host_state, -1);
  EXPECT_THAT(read({}).to_json(), ::testing::Not(HasSubstr("host_state"))) << "as versions without it wrote";
  EXPECT_THAT(problems({"tranche.host_state=-2"}), HasSubstr("tranche.host_state"));
  EXPECT_THAT(problems({"zero_optimization.offload_param.max_in_cpu=-1"}),
              HasSubstr("zero_optimization.offload_param.max_in_cpu: -1 is not at least 0"));
}

TEST(ConfigOffload, HuggingFacesAutoIsTheDefault) {
  const Config config =
      parse_config("{" + given + R"(, "zero_optimization": {"stage": 3, "sub_group_size": "auto",
      "offload_optimizer": {"device": "auto", "nvme_path": "auto", "ratio": "auto", "buffer_count": "auto"},
      "offload_param": {"device": "auto", "nvme_path": "auto", "buffer_count": "auto"}},
    "aio": {"block_size": "auto", "queue_depth": "auto"}, "tranche": {"io_engine": "auto"}})",
                   2);
  EXPECT_EQ(config.to_json(), read({"zero_optimization.stage=3"}).to_json());
  EXPECT_THAT(test::every_note(config), IsEmpty());
}

TEST(ConfigOffload, TheOlderBooleansMeanHostMemory) {
  const Config config =
      read({"zero_optimization.stage=3", "zero_optimization.cpu_offload=true",
            "zero_optimization.cpu_offload_param=true", "zero_optimization.cpu_offload_use_pin_memory=true"});
  EXPECT_EQ(config.offload.optimizer, OffloadTier::cpu);
  EXPECT_EQ(config.offload.parameters, OffloadTier::cpu);
  EXPECT_THAT(
      test::every_note(config),
      ElementsAre(StartsWith("zero_optimization.cpu_offload_use_pin_memory: no meaning here"),
                  "zero_optimization.cpu_offload: taken as zero_optimization.offload_optimizer.device: "
                  "\"cpu\", its present name",
                  "zero_optimization.cpu_offload_param: taken as zero_optimization.offload_param.device: "
                  "\"cpu\", its present name"));
  expect_round_trip(config);
  const Config off =
      read({"zero_optimization.cpu_offload=false", "zero_optimization.offload_optimizer.device=nvme",
            "zero_optimization.offload_optimizer.nvme_path=/d"});
  EXPECT_EQ(off.offload.optimizer, OffloadTier::nvme);
  EXPECT_THAT(test::every_note(off), IsEmpty());
  EXPECT_EQ(read({"zero_optimization.cpu_offload=true", "zero_optimization.offload_optimizer.device=cpu"})
                .offload.optimizer,
            OffloadTier::cpu);
  EXPECT_THAT(
      problems({"zero_optimization.cpu_offload=true", "zero_optimization.offload_optimizer.device=none"}),
      HasSubstr("zero_optimization.cpu_offload: true asks for cpu, but "
                "zero_optimization.offload_optimizer.device says none; write the second only"));
}

TEST(ConfigOffload, TheOptimizerMovesInEveryStageParametersInTheThird) {
  for (const char* stage : {"0", "1", "2", "3"}) {
    const std::string key = std::string("zero_optimization.stage=") + stage;
    EXPECT_EQ(read({key, "zero_optimization.offload_optimizer.device=cpu"}).offload.optimizer,
              OffloadTier::cpu);
    if (std::string(stage) == "3") continue;
    const Config without = read({key, "zero_optimization.offload_param.device=cpu"});
    EXPECT_EQ(without.offload.parameters, OffloadTier::none);
    EXPECT_THAT(test::every_note(without),
                Contains(std::string("zero_optimization.offload_param.device: cpu has no effect: at stage ") +
                         stage + " every rank has all weights; they leave the device at stage 3"));
    EXPECT_EQ(problems({key, "zero_optimization.cpu_offload_param=true"}), "nothing was thrown");
    EXPECT_EQ(problems({key, "zero_optimization.offload_param.device=nvme",
                        "zero_optimization.offload_param.nvme_path=/a",
                        "zero_optimization.offload_optimizer.device=nvme",
                        "zero_optimization.offload_optimizer.nvme_path=/b"}),
              "nothing was thrown")
        << "a path that is not used is no second one";
  }
  EXPECT_EQ(
      read({"zero_optimization.stage=3", "zero_optimization.offload_param.device=cpu"}).offload.parameters,
      OffloadTier::cpu);
  EXPECT_THAT(problems_of([](Config& config) {
                config.stage = 2;
                config.offload.parameters = OffloadTier::cpu;
              }),
              HasSubstr("offload_param.device: cpu needs zero_optimization.stage 3"));
}

TEST(ConfigOffload, NvmeNeedsOneFolder) {
  EXPECT_EQ(problems({"zero_optimization.offload_optimizer.device=nvme"}),
            "configuration: zero_optimization.offload_optimizer.device: nvme needs "
            "zero_optimization.offload_optimizer.nvme_path, a folder on the disk for swap files");
  EXPECT_THAT(problems({"zero_optimization.stage=3", "zero_optimization.offload_param.device=nvme"}),
              HasSubstr("nvme needs zero_optimization.offload_param.nvme_path, a folder"));
  EXPECT_THAT(problems_of([](Config& config) { config.offload.optimizer = OffloadTier::nvme; }),
              HasSubstr("nvme needs zero_optimization.offload_optimizer.nvme_path"));
  EXPECT_THAT(problems({"zero_optimization.offload_optimizer.device=nvme",
                        "zero_optimization.offload_optimizer.nvme_path=/a",
                        "zero_optimization.offload_param.nvme_path=/b"}),
              HasSubstr("zero_optimization.offload_optimizer.nvme_path is '/a' and "
                        "zero_optimization.offload_param.nvme_path is '/b'; a rank has one swap file"));
  // The path of either block applies to both.
  const Config other = read(
      {"zero_optimization.offload_optimizer.device=nvme", "zero_optimization.offload_param.nvme_path=/b"});
  EXPECT_EQ(other.offload.nvme_path, "/b");
  expect_round_trip(other);
  // A folder alone requests no offloading.
  EXPECT_FALSE(read({"zero_optimization.offload_param.nvme_path=/b"}).offload.any());
  EXPECT_THAT(problems({"zero_optimization.offload_optimizer.device=disk"}),
              HasSubstr("zero_optimization.offload_optimizer.device: 'disk' is not one of none, cpu, nvme"));
  EXPECT_THAT(problems({"zero_optimization.offload_param.device=gpu"}),
              HasSubstr("zero_optimization.offload_param.device: 'gpu' is not one of none, cpu, nvme"));
}

TEST(ConfigOffload, TheRatioIsAShare) {
  for (const char* wrong : {"-0.1", "1.5"}) {
    EXPECT_THAT(problems({std::string("zero_optimization.offload_optimizer.ratio=") + wrong}),
                HasSubstr(std::string("zero_optimization.offload_optimizer.ratio: ") + wrong +
                          " is not between 0 and 1"));
  }
  EXPECT_THAT(
      problems_of([](Config& config) { config.offload.ratio = std::numeric_limits<double>::quiet_NaN(); }),
      HasSubstr("offload_optimizer.ratio: nan is not between 0 and 1"));
  // Nothing moves, so that no folder is required.
  const Config none = read(
      {"zero_optimization.offload_optimizer.device=nvme", "zero_optimization.offload_optimizer.ratio=0"});
  EXPECT_EQ(none.offload.optimizer, OffloadTier::none);
  EXPECT_FALSE(none.offload.any());
  expect_round_trip(none);
  Config made;
  made.offload.optimizer = OffloadTier::cpu;
  made.offload.ratio = 0;
  validate_config(made, 1);
  EXPECT_EQ(made.offload.optimizer, OffloadTier::none);
}

TEST(ConfigOffload, TilesAreWholeBlocks) {
  for (const char* wrong : {"0", "-4096", "5000", "2147483648"}) {
    EXPECT_THAT(problems({std::string("tranche.offload_tile=") + wrong}),
                HasSubstr(std::string("tranche.offload_tile: ") + wrong +
                          " is not a multiple of 4096 between 4096 and 1073741824"));
  }
  EXPECT_EQ(read({"tranche.offload_tile=4096"}).offload.tile_elements, 4096);
  EXPECT_THAT(problems_of([](Config& config) { config.offload.tile_elements = 1000; }),
              HasSubstr("tranche.offload_tile: 1000 is not a multiple"));
}

TEST(ConfigOffload, ASubGroupBoundsTheTile) {
  const auto tile = [](const std::string& bound, const std::string& own) {
    const Config config = read({"zero_optimization.sub_group_size=" + bound, "tranche.offload_tile=" + own});
    expect_round_trip(config);
    return config.offload.tile_elements;
  };
  EXPECT_EQ(tile("1e9", "1048576"), 1048576);
  EXPECT_EQ(tile("1e6", "1048576"), 999424) << "244 times 4096";
  EXPECT_EQ(tile("1048576", "2097152"), 1048576);
  EXPECT_EQ(tile("1e6", "8192"), 8192);
  EXPECT_EQ(tile("100", "8192"), 4096);
  EXPECT_EQ(tile("0", "2097152"), 2097152);
  EXPECT_THAT(read({"zero_optimization.sub_group_size=0"}).notes,
              Contains("zero_optimization.sub_group_size: 0 is taken as 1000000000, the default"));
  EXPECT_THAT(problems({"zero_optimization.sub_group_size=-1"}),
              HasSubstr("zero_optimization.sub_group_size: -1 is not at least 1"));
}

TEST(ConfigOffload, Buffers) {
  EXPECT_THAT(problems({"zero_optimization.offload_optimizer.buffer_count=2"}),
              HasSubstr("zero_optimization.offload_optimizer.buffer_count: 2 is not between 3 and 64"));
  EXPECT_THAT(problems({"zero_optimization.offload_optimizer.buffer_count=65"}),
              HasSubstr("65 is not between 3 and 64"));
  EXPECT_THAT(problems({"zero_optimization.offload_param.buffer_count=1"}),
              HasSubstr("zero_optimization.offload_param.buffer_count: 1 is not between 2 and 64"));
  EXPECT_THAT(problems({"zero_optimization.offload_param.buffer_count=1e12"}),
              HasSubstr("zero_optimization.offload_param.buffer_count: 1000000000000 is out of range"));
  EXPECT_EQ(read({"zero_optimization.offload_optimizer.buffer_count=3"}).offload.tile_buffers, 3);
  EXPECT_EQ(read({"zero_optimization.offload_param.buffer_count=64"}).offload.parameter_buffers, 64);
}

TEST(ConfigOffload, ActivationsMoveOnlyWhereTheyAreKept) {
  const Config alone = read({"activation_checkpointing.cpu_checkpointing=true"});
  EXPECT_FALSE(alone.offload.activations);
  EXPECT_THAT(alone.notes,
              Contains("activation_checkpointing.cpu_checkpointing: true has no effect: it moves what "
                       "activation checkpointing keeps, which tranche.activation_checkpointing switches on"));
  EXPECT_THAT(
      problems_of([](Config& made) { made.offload.activations = true; }),
      HasSubstr("activation_checkpointing.cpu_checkpointing moves what activation checkpointing keeps; "
                "set tranche.activation_checkpointing to true too"));
  const Config config =
      read({"activation_checkpointing.cpu_checkpointing=true", "tranche.activation_checkpointing=true"});
  EXPECT_TRUE(config.offload.activations);
  EXPECT_TRUE(config.offload.any());
  EXPECT_FALSE(config.offload.uses_nvme());
}

TEST(ConfigOffload, SizesOfTransfers) {
  for (const char* wrong : {"1000", "2048", "5000", "2147483648"}) {
    EXPECT_THAT(problems({std::string("aio.block_size=") + wrong}),
                HasSubstr(std::string("aio.block_size: ") + wrong +
                          " is neither 0 (calibrated) nor a multiple of 4096 bytes up to 1073741824"));
  }
  EXPECT_EQ(read({"aio.block_size=1MiB"}).offload.io_block_bytes, 1 << 20);
  EXPECT_EQ(read({"aio.block_size=0", "aio.queue_depth=0"}).offload.io_block_bytes, 0);
  for (const char* wrong : {"-1", "1025"}) {
    EXPECT_THAT(problems({std::string("aio.queue_depth=") + wrong}),
                HasSubstr(std::string("aio.queue_depth: ") + wrong +
                          " is neither 0 (calibrated) nor between 1 and 1024"));
  }
  EXPECT_EQ(read({"aio.queue_depth=1024"}).offload.io_depth, 1024);
  EXPECT_THAT(problems({"tranche.io_engine=libaio"}),
              HasSubstr("tranche.io_engine: 'libaio' is not one of automatic, uring, threads"));
  EXPECT_THAT(problems({"aio.use_gds=true"}),
              HasSubstr("aio.use_gds: true cannot be honoured: transfers between disks and GPUs"));
  EXPECT_THAT(problems({"zero_optimization.offload_optimizer.super_offload=true"}),
              HasSubstr("super_offload: true cannot be honoured"));
}

TEST(ConfigOffload, Budgets) {
  EXPECT_THAT(problems({"tranche.host_memory=plenty"}), HasSubstr("tranche.host_memory: expected a size"));
  EXPECT_THAT(problems({"tranche.host_memory=-1"}), HasSubstr("tranche.host_memory: -1 is not at least 0"));
  EXPECT_THAT(problems({"tranche.nvme_space=-5"}), HasSubstr("tranche.nvme_space: -5 is not at least 0"));
  EXPECT_THAT(problems({"tranche.debug.host_link_bandwidth=-1"}),
              HasSubstr("tranche.debug.host_link_bandwidth: -1 is neither 0 (no bound) nor whole bytes"));
  EXPECT_THAT(problems_of([](Config& config) { config.debug.host_link_bytes_per_second = 0.5; }),
              HasSubstr("tranche.debug.host_link_bandwidth: 0.5 is neither"));
  EXPECT_EQ(read({"tranche.debug.host_link_bandwidth=1.5e9"}).debug.host_link_bytes_per_second, 1.5e9);
}

TEST(ConfigOffload, OtherDtypesMayMoveToo) {
  EXPECT_NO_THROW(
      read({"zero_optimization.offload_optimizer.device=cpu", "tranche.moments=bf16", "bf16.enabled=false"}));
}

TEST(ConfigOffload, AFolderThatOnlyAShellWouldFindIsRefused) {
  const auto text = [](const std::string& key, const std::string& path) {
    return key + ": no shell replaces ~ in '" + path +
           "', so that it would be a folder of that name; write the whole path, or ./" + path +
           " if that is meant";
  };
  EXPECT_THAT(
      problems({"zero_optimization.offload_optimizer={\"device\": \"nvme\", \"nvme_path\": \"~/swap\"}"}),
      HasSubstr(text("zero_optimization.offload_optimizer.nvme_path", "~/swap")));
  EXPECT_THAT(problems({"tensorboard={\"enabled\": true, \"output_path\": \"~\"}"}),
              HasSubstr(text("tensorboard.output_path", "~")));
  EXPECT_THAT(problems({"csv_monitor={\"enabled\": true, \"output_path\": \"~/logs\"}"}),
              HasSubstr(text("csv_monitor.output_path", "~/logs")));
  EXPECT_NO_THROW(read({"csv_monitor={\"enabled\": true, \"output_path\": \"./~/logs\"}"}));
}

TEST(ConfigOffload, ProblemsAreToldTogether) {
  EXPECT_THAT(problems({"zero_optimization.offload_optimizer.device=nvme",
                        "zero_optimization.offload_param.device=cp", "tranche.offload_tile=1",
                        "zero_optimization.offload_param.buffer_count=1"}),
              AllOf(HasSubstr("configuration has 4 problems"), Not(HasSubstr("unknown"))));
}

}  // namespace
}  // namespace tranche
