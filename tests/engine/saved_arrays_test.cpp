// A program's own arrays: saved with a checkpoint, and loaded by other numbers of ranks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <mutex>
#include <numeric>

#include "checkpoint/folder.h"
#include "checkpoint/reader.h"
#include "on_ranks.h"
#include "saving_fixture.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

OddRun run_on(int ranks, int stage = 0) {
  OddRun run;
  run.ranks = ranks;
  run.stage = stage;
  return run;
}

ConstTensorView view_of(const std::vector<double>& values) {
  return {values.data(), DataType::float64, Shape{static_cast<std::int64_t>(values.size())}};
}
TensorView view_of(std::vector<double>& values) {
  return {values.data(), DataType::float64, Shape{static_cast<std::int64_t>(values.size())}};
}

/// A rank's part of a table of `elements`. Parts are uneven: rank r has r + 1 of every ranks (ranks + 1) / 2
/// elements.
detail::ElementRange part_of(int rank, int ranks, std::int64_t elements) {
  const std::int64_t all = ranks * (ranks + 1) / 2;
  return {elements * (rank * (rank + 1) / 2) / all, elements * ((rank + 1) * (rank + 2) / 2) / all};
}

constexpr std::int64_t table_elements = 100003;

/// The arrays of a run on rank `rank` of `ranks`, with their memory.
struct OwnState {
  std::vector<double> mean, table;
  std::vector<std::int64_t> random;
  std::vector<SavedArray> arrays;

  OwnState(int rank, int ranks) : mean(301), random(static_cast<std::size_t>(2 + rank)) {
    std::iota(mean.begin(), mean.end(), 0.5);
    const detail::ElementRange part = part_of(rank, ranks, table_elements);
    table.resize(static_cast<std::size_t>(part.size()));
    std::iota(table.begin(), table.end(), 10.0 + static_cast<double>(part.begin));
    std::iota(random.begin(), random.end(), 1000 * rank);
    arrays = {SavedArray::whole("mean", view_of(std::as_const(mean))),
              SavedArray::part("table", Shape{table_elements}, part.begin, view_of(std::as_const(table))),
              SavedArray::of_rank("random", {random.data(), DataType::int64,
                                             Shape{static_cast<std::int64_t>(random.size())}})};
  }
};

TEST_F(Saving, ArraysOfAllRanksAreGivenToAnyNumberOfThem) {
  for (const auto& [n, stage] : {std::pair{1, 1}, std::pair{2, 3}, std::pair{3, 0}}) {
    const std::string folder = path(std::to_string(n));
    on_ranks(run_on(n, stage), [&](Engine& engine, Runtime& runtime) {
      OwnState own(runtime.rank(), n);
      engine.save(folder, {.arrays = own.arrays});
      for (double& value : own.table) value = -1;  // an asynchronous save has its own copy
      for (double& value : own.mean) value = -1;
      engine.finish_saving();
    });
    for (const int m : {1, 2, 3, 4}) {
      SCOPED_TRACE(std::to_string(n) + " ranks -> " + std::to_string(m));
      on_ranks(run_on(m, 2), [&](Engine& engine, Runtime& runtime) {
        const LoadResult loaded = engine.load(folder);
        ASSERT_EQ(loaded.arrays.size(), 3u);
        EXPECT_EQ(loaded.arrays[1].name, "table");
        EXPECT_EQ(loaded.arrays[1].dtype, DataType::float64);
        EXPECT_EQ(loaded.arrays[1].shape, Shape{table_elements});
        EXPECT_TRUE(loaded.arrays[2].per_rank);
        const detail::ElementRange part = part_of(runtime.rank(), m, table_elements);
        std::vector<double> mean(301), table(static_cast<std::size_t>(part.size()));
        engine.load_arrays(loaded.folder, {{"table", view_of(table), part.begin}, {"mean", view_of(mean)}});
        std::vector<double> all(301);
        std::iota(all.begin(), all.end(), 0.5);
        EXPECT_EQ(mean, all);
        std::int64_t wrong = 0;
        for (std::size_t i = 0; i < table.size(); ++i) {
          wrong += table[i] != 10.0 + static_cast<double>(part.begin) + static_cast<double>(i) ? 1 : 0;
        }
        EXPECT_EQ(wrong, 0);
        const std::string note = "per-rank arrays (random) were saved with world size " + std::to_string(n) +
                                 " and cannot be loaded with world size " + std::to_string(m);
        EXPECT_EQ(std::count(loaded.notes.begin(), loaded.notes.end(), note), n == m ? 0 : 1);
        std::vector<std::int64_t> random(static_cast<std::size_t>(2 + runtime.rank()));
        const std::vector<ArrayTarget> own{
            {"random", {random.data(), DataType::int64, Shape{static_cast<std::int64_t>(random.size())}}}};
        if (n == m) {
          EXPECT_EQ(loaded.arrays[2].shape, Shape{2 + runtime.rank()});
          engine.load_arrays(loaded.folder, own);
          EXPECT_EQ(random.back(), 1000 * runtime.rank() + 1 + runtime.rank());
        } else {
          EXPECT_THAT(message_of<CheckpointError>([&] { engine.load_arrays(loaded.folder, own); }),
                      AllOf(HasSubstr("array 'random' of "),
                            HasSubstr("is stored per rank, with world size " + std::to_string(n) +
                                      ": it cannot be loaded with world size " + std::to_string(m))));
        }
      });
    }
  }
}

TEST_F(Saving, ArraysAreSavedBesideStateOnNvme) {
  OddRun run = run_on(2, 2);
  run.offload.optimizer = OffloadTier::nvme;
  run.offload.nvme_path = path("swap");
  std::filesystem::create_directories(run.offload.nvme_path);
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    const OwnState own(runtime.rank(), 2);
    engine.save(path("run"), {.wait = true, .arrays = own.arrays});
    const kernels::Digest before = engine.state_digest();
    const LoadResult loaded = engine.load(path("run"));
    EXPECT_EQ(engine.state_digest(), before);
    std::vector<double> table(own.table.size());
    engine.load_arrays(loaded.folder,
                       {{"table", view_of(table), part_of(runtime.rank(), 2, table_elements).begin}});
    EXPECT_EQ(table, own.table);
  });
}

TEST_F(Saving, ArraysThatDoNotFitTogetherAreRefusedOnAllRanks) {
  std::mutex mutex;
  const auto refused = [&](const std::function<void(int rank, std::vector<SavedArray>&)>& change) {
    std::vector<std::string> texts(2);
    on_ranks(run_on(2), [&](Engine& engine, Runtime& runtime) {
      OwnState own(runtime.rank(), 2);
      change(runtime.rank(), own.arrays);
      const std::string text =
          message_of<InvalidArgument>([&] { engine.save(path("run"), {.arrays = own.arrays}); });
      engine.begin_evaluation();  // the engine still works
      engine.end_evaluation();
      const std::lock_guard lock(mutex);
      texts[static_cast<std::size_t>(runtime.rank())] = text;
    });
    EXPECT_EQ(texts[0], texts[1]);
    return texts[0];
  };
  EXPECT_THAT(
      refused([](int rank, auto& arrays) {
        if (rank == 1) arrays.pop_back();
      }),
      HasSubstr("rank 1 gives nothing where rank 0 gives 'random' (of each rank, int64): all ranks give"));
  EXPECT_THAT(
      refused([](int rank, auto& arrays) {
        if (rank == 1) arrays[0].name = "mode";
      }),
      HasSubstr("rank 1 gives 'mode' (whole, fp64 [301]) where rank 0 gives 'mean' (whole, fp64 [301])"));
  static const std::vector<double> others(301, 3.0);
  EXPECT_THAT(refused([](int rank, auto& arrays) {
                if (rank == 1) arrays[0] = SavedArray::whole("mean", view_of(others));
              }),
              HasSubstr("rank 1 gives other values of 'mean' (whole, fp64 [301]) than rank 0"));
  EXPECT_THAT(refused([](int rank, auto& arrays) { arrays[1].first += rank; }),
              HasSubstr("rank 1 gives 'table', which has 66669 elements from 33335 on of 100003"));
  EXPECT_THAT(
      refused([](int rank, auto& arrays) {
        if (rank == 1) arrays[1].first -= 1;
      }),
      HasSubstr("rank 1 gives 'table' (a part of, fp64 [100003]) from element 33333 on, and the ranks "
                "before it end at 33334"));
  EXPECT_THAT(refused([](int rank, auto& arrays) {
                if (rank == 1) arrays[1].values.shape = Shape{66668};
              }),
              HasSubstr("rank 1 ends its part of 'table' at element 100002 of 100003"));
  EXPECT_THAT(refused([](int rank, auto& arrays) {
                if (rank == 0) arrays[0].values.data = nullptr;
              }),
              HasSubstr("rank 0 gives 'mean', which has no memory"));
  EXPECT_THAT(refused([](int, auto& arrays) { arrays[0].name = "random"; }),
              HasSubstr("array 'random' is there twice"));
  const auto renamed = [&](const std::string& name, bool on_both = false) {
    return refused([&](int rank, auto& arrays) {
      if (rank == 1 || on_both) arrays[0].name = name;
    });
  };
  EXPECT_THAT(renamed("temp\xe9rature"),
              HasSubstr("rank 1 gives 'temp\\xe9rature', which is not UTF-8, as names in a checkpoint are"));
  EXPECT_THAT(renamed(std::string("a\0b", 3)), HasSubstr("rank 1 gives 'a\\x00b', which has a NUL byte"));
  EXPECT_THAT(renamed(std::string(1025, 'x')),
              HasSubstr("xxx...', which has 1025 bytes; names in a checkpoint have at most 1024"));
  EXPECT_THAT(renamed("../x"), HasSubstr("rank 1 gives '../x', which cannot be shown as a path in an HDF5"));
  EXPECT_THAT(renamed("table/x", true),
              HasSubstr("the array names 'table' and 'table/x' do not fit into one HDF5 file"));
}

TEST_F(Saving, WhatACheckpointDoesNotHoldOfArraysIsNamed) {
  on_ranks(run_on(2), [&](Engine& engine, Runtime& runtime) {
    const OwnState own(runtime.rank(), 2);
    engine.save(path("run"), {.wait = true, .arrays = own.arrays});
    const std::string folder = engine.load(path("run")).folder;
    std::vector<double> memory(10);
    std::vector<float> single(10);
    const auto text = [&](const std::vector<ArrayTarget>& targets) {
      return message_of<CheckpointError>([&] { engine.load_arrays(folder, targets); });
    };
    EXPECT_THAT(text({{"tables", view_of(memory)}}),
                HasSubstr("has no array 'tables'; the closest match is 'table'"));
    EXPECT_THAT(text({{"mean", {single.data(), DataType::float32, Shape{10}}}}),
                HasSubstr("is fp64, asked for as fp32"));
    EXPECT_THAT(text({{"mean", view_of(memory), 292}}),
                HasSubstr("has 301 elements, but the load wants 10 from element 292 on"));
    // An error of one rank is an error on all.
    EXPECT_THAT(text(runtime.rank() == 1 ? std::vector<ArrayTarget>{{"none", view_of(memory)}}
                                         : std::vector<ArrayTarget>{}),
                HasSubstr("rank 1: checkpoint "));
  });
  const auto manifest = checkpoint::open_manifest(detail::posix_file_system(), path("run/step-00000000"));
  std::fstream file(path("run/step-00000000/shard-00001-of-00002.h5"),
                    std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(manifest.shards[1].array_offsets[1] + 4321);
  file.put('!');
  file.close();
  on_ranks(run_on(1), [&](Engine& engine, Runtime&) {
    const LoadResult loaded = engine.load(path("run"));
    std::vector<double> memory(static_cast<std::size_t>(table_elements));
    EXPECT_THAT(message_of<CheckpointError>([&] {
                  engine.load_arrays(loaded.folder, {{"table", view_of(memory)}});
                }),
                AllOf(HasSubstr("shard-00001-of-00002.h5 is damaged in bytes"), HasSubstr("of array table")));
  });
}

TEST_F(Saving, OnTheMetaDeviceArraysTakeTheirRoom) {
  std::int64_t held[2];
  for (const bool arrays : {false, true}) {
    const Config config = odd_config(run_on(4, 3));
    RuntimeOptions options = RuntimeOptions::from(config);
    options.device = DeviceKind::meta;
    Runtime runtime(options, [](const CommunicatorOptions& o) { return make_meta_communicator(1, 4, 4, o); });
    Engine engine(runtime, odd_model(), config);
    std::vector<SavedArray> given;
    if (arrays) {
      given = {
          SavedArray::part("table", Shape{1 << 20}, 1 << 18, {nullptr, DataType::float32, Shape{1 << 18}}),
          SavedArray::whole("mean", {nullptr, DataType::float32, Shape{1 << 20}})};
    }
    engine.save("nowhere", {.arrays = given});
    held[arrays ? 1 : 0] = runtime.ledger().total(Tier::host);
  }
  EXPECT_NEAR(static_cast<double>(held[1] - held[0]), 2.0 * (1 << 20), 16384.0);
}

}  // namespace
}  // namespace tranche::test
