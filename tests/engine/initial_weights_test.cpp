// The caller's own initial weights: the ranges that are requested on each rank, and that every stage, number
// of ranks and tier begins with them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <stdexcept>

#include "device/cuda_probe.h"
#include "saving_fixture.h"
#include "tests/core/error_text.h"
#include "tests/core/rounds.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;      // NOLINT(misc-unused-using-decls): generic lambdas use it
using ::testing::HasSubstr;  // NOLINT(misc-unused-using-decls): generic lambdas use it

/// A value that is exact in bf16: a multiple of 1/8 below 16.
float own_value(int tensor, std::int64_t element) {
  return static_cast<float>((element * 7 + 31 * tensor) % 127) / 8;
}

/// The ranges that were requested, by tensor and rank.
struct Asked {
  std::mutex mutex;
  std::map<std::pair<int, int>, std::vector<std::pair<std::int64_t, std::int64_t>>> ranges;
};

/// A large tensor, a tied one and a frozen one.
ModelSpec own_model(int rank, Asked& asked, const std::string& name = "table 1") {
  const auto from = [&asked, rank, name](int tensor) {
    return Initializer::from(name, [&asked, rank, tensor](std::int64_t first, std::span<float> values) {
      {
        const std::lock_guard lock(asked.mutex);
        asked.ranges[{tensor, rank}].emplace_back(first, first + static_cast<std::int64_t>(values.size()));
      }
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = own_value(tensor, first + static_cast<std::int64_t>(i));
      }
    });
  };
  ModelSpec model;
  model.add_unit({"first", {{"large", {601, 1001}, from(0)}, {"frozen", {77}, from(1)}}});
  model.add_unit(
      {"second", {{"tied", {13, 5}, from(2), {"head"}}, {"drawn", {100}, Initializer::normal(1)}}, 2});
  return model;
}

class InitialWeights : public Saving {
 protected:
  std::string config(int stage, const std::string& precision, const std::string& offload) const {
    return R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, )" + precision +
           R"("zero_optimization": {"stage": )" + std::to_string(stage) + offload +
           R"(}, "tranche": {"threads": 1, "frozen": ["frozen"]}})";
  }

  /// Expects that each rank was asked for one range of every tensor, in order and without repetition, which
  /// covers everything that it keeps.
  static void expect_asked(Asked& asked, int ranks, bool all_keep_all) {
    const std::int64_t elements[] = {601 * 1001, 77, 65};
    for (int tensor = 0; tensor < 3; ++tensor) {
      std::int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        if (all_keep_all) next = 0;
        for (const auto& [begin, end] : asked.ranges[{tensor, rank}]) {
          EXPECT_EQ(begin, next) << "tensor " << tensor << " rank " << rank;
          EXPECT_LE(end - begin, 262144);
          next = end;
        }
        if (all_keep_all) {
          EXPECT_EQ(next, elements[tensor]);
        }
      }
      EXPECT_EQ(next, elements[tensor]) << "tensor " << tensor;
    }
  }

  void expect_own_values(DeviceKind device, int ranks, const std::string& text, bool all_keep_all) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks: " + text);
    Asked asked;
    run_thread_ranks(ranks, [&](int rank, const CommunicatorFactory& factory) {
      const Config config = parse_config(text, ranks);
      RuntimeOptions options = RuntimeOptions::from(config);
      options.device = device;
      Runtime runtime(options, factory);
      Engine engine(runtime, own_model(rank, asked), config);
      const char* names[] = {"large", "frozen", "tied"};
      for (int tensor = 0; tensor < 3; ++tensor) {
        const std::vector<float> values = engine.read_weight(names[tensor]);
        std::int64_t wrong = 0;
        for (std::size_t i = 0; i < values.size(); ++i) {
          wrong += values[i] != own_value(tensor, static_cast<std::int64_t>(i)) ? 1 : 0;
        }
        EXPECT_EQ(wrong, 0) << names[tensor] << " on rank " << rank;
      }
      engine.begin_evaluation();
      engine.begin_micro_batch();
      const GatheredUnit weights = engine.gather({0});  // the weights that compute reads
      if (engine.device().host_accessible() && weights.tensor(0).dtype == DataType::float32) {
        EXPECT_EQ(weights.tensor(0).as<float>()[600000], own_value(0, 600000));
      }
    });
    expect_asked(asked, ranks, all_keep_all);
  }

  void expect_own_values_everywhere(DeviceKind device) {
    const std::string fp32 = R"("bf16": {"enabled": false}, )", bf16 = R"("bf16": {"enabled": true}, )";
    int point = 0;
    for (const int ranks : {1, 3}) {
      for (const int stage : {0, 1, 2, 3}) {
        for (const std::string& precision : {fp32, bf16}) {
          if (!swept(point++, 3)) continue;
          expect_own_values(device, ranks, config(stage, precision, ""), ranks == 1 || stage == 0);
        }
      }
      const std::string nvme =
          R"(, "offload_optimizer": {"device": "nvme", "nvme_path": ")" + path() + R"("})";
      std::filesystem::create_directories(path());
      expect_own_values(device, ranks, config(2, bf16, R"(, "offload_optimizer": {"device": "cpu"})"),
                        ranks == 1);
      expect_own_values(device, ranks, config(1, fp32, nvme), ranks == 1);
      expect_own_values(device, ranks, config(3, bf16, nvme + R"(, "offload_param": {"device": "cpu"})"),
                        ranks == 1);
    }
  }
};

#if defined(TRANCHE_ENGINE_TESTS_ON_GPU)
TEST_F(InitialWeights, OfTheCallersOwnAreThereOnAGpu) {
  const detail::CudaProbe probe = detail::probe_cuda();
  if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  expect_own_values_everywhere(DeviceKind::cuda);
}
#else
TEST_F(InitialWeights, OfTheCallersOwnAreThereAtEveryStageAndTier) {
  expect_own_values_everywhere(DeviceKind::cpu);
}

TEST_F(InitialWeights, AreNotAskedForOnTheMetaDevice) {
  Asked asked;
  RuntimeOptions options;
  options.device = DeviceKind::meta;
  Runtime runtime(options, [](const CommunicatorOptions& o) { return make_meta_communicator(1, 4, 4, o); });
  const Engine engine(runtime, own_model(1, asked),
                      parse_config(config(3, R"("bf16": {"enabled": true}, )", ""), 4));
  EXPECT_TRUE(asked.ranges.empty());
}

TEST_F(InitialWeights, RanksAgreeOnTheNameOfWhatTheyCall) {
  EXPECT_THAT(
      message_of<ConfigurationError>([&] {
        Asked asked;
        run_thread_ranks(2, [&](int rank, const CommunicatorFactory& factory) {
          const Config config = parse_config(this->config(0, R"("bf16": {"enabled": false}, )", ""), 2);
          Runtime runtime(RuntimeOptions::from(config), factory);
          const Engine engine(runtime, own_model(rank, asked, rank == 1 ? "table 2" : "table 1"), config);
        });
      }),
      AllOf(HasSubstr("rank 1 was started with another model than rank 0: it has tensor "),
            HasSubstr("by 'table 2' where rank 0 has tensor "), HasSubstr("by 'table 1'; start all ranks")));
}

TEST_F(InitialWeights, AnExceptionOfTheCallersIsTheEngines) {
  const Config config = parse_config(R"({"train_batch_size": 1, "bf16": {"enabled": false}})", 1);
  Runtime runtime({}, make_self_communicator);
  ModelSpec model;
  model.add_unit({"unit", {{"w", {5}, Initializer::from("file", [](std::int64_t, std::span<float>) {
                              throw std::runtime_error("weights.bin ends early");
                            })}}});
  EXPECT_EQ(message_of<std::runtime_error>([&] { const Engine engine(runtime, model, config); }),
            "weights.bin ends early");
  EXPECT_THAT(message_of<InvalidArgument>([] { (void)Initializer::from("file", {}); }),
              AllOf(HasSubstr("Initializer::from('file')"), HasSubstr("wants a name and a function")));
}
#endif

}  // namespace
}  // namespace tranche::test
