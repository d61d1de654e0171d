// Failures of offloaded state are reported with file, range or figure, and never lead to wrong weights or a
// hang.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>

#include "../offload/faulty_file_system.h"
#include "odd_model.h"
#include "on_ranks.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using tranche::testing::FaultyFileSystem;
using tranche::testing::FileOperation;

class OffloadFaults : public ::testing::Test {
 protected:
  OffloadFaults()
      : folder_(std::filesystem::temp_directory_path() /
                ("tranche_offload_faults_" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
    run_.stage = 3;
    run_.offload.optimizer = OffloadTier::nvme;
    run_.offload.parameters = OffloadTier::nvme;
    run_.offload.tile_elements = 4096;
    run_.offload.nvme_path = folder_.string();
  }
  ~OffloadFaults() override { std::filesystem::remove_all(folder_); }

  /// Trains; `before_step` may inject faults. Returns the error of each rank.
  std::vector<std::string> train(int steps, const std::function<void(int step)>& before_step = {},
                                 std::unique_ptr<Optimizer> (*make)() = nullptr) {
    std::vector<std::string> thrown(static_cast<std::size_t>(run_.ranks));
    run_thread_ranks(run_.ranks, [&](int rank, const CommunicatorFactory& factory) {
      const Config config = odd_config(run_);
      RuntimeOptions options = RuntimeOptions::from(config);
      options.log_level = LogLevel::off;
      options.files = &files_;
      Runtime runtime(options, factory);
      try {
        Engine engine(runtime, odd_model(), config, make == nullptr ? nullptr : make());
        const auto one_step = [&] {
          odd_micro_batch(engine, 0, 3);
          (void)engine.step();
        };
        for (int step = 0; step < steps; ++step) {
          if (before_step && rank == 0) before_step(step);
          one_step();
        }
        (void)engine.state_digest();
      } catch (const Error& error) {
        thrown[static_cast<std::size_t>(rank)] = error.message();
        (void)runtime.fail(std::current_exception());
      }
    });
    return thrown;
  }
  std::vector<std::string> left_behind() const {
    std::vector<std::string> names;
    if (!std::filesystem::exists(folder_)) return names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) names.push_back(entry.path());
    return names;
  }

  std::filesystem::path folder_;
  FaultyFileSystem files_{detail::posix_file_system()};
  OddRun run_;
};

TEST_F(OffloadFaults, WithoutFaultsNothingIsSaidAndNothingIsLeft) {
  EXPECT_THAT(train(3)[0], IsEmpty());
  EXPECT_THAT(left_behind(), IsEmpty());
}

TEST_F(OffloadFaults, AFailedTransferEndsTheRunWithFileAndRange) {
  for (const FileOperation operation : {FileOperation::read, FileOperation::write}) {
    for (const OffloadTier parameters : {OffloadTier::none, OffloadTier::nvme}) {
      for (const auto& [ranks, optimizer] :
           {std::pair(1, "AdamW"), std::pair(2, "AdamW"), std::pair(2, "Lamb"), std::pair(2, "Muon")}) {
        run_.ranks = ranks;
        run_.optimizer = optimizer;
        run_.offload.parameters = parameters;
        files_.clear();
        const std::vector<std::string> thrown = train(4, [&](int step) {
          if (step == 2) files_.inject({.operation = operation, .nth = 2, .times = -1, .code = EIO});
        });
        const std::string what = operation == FileOperation::read ? "read of bytes" : "write of bytes";
        int named = 0;
        for (const std::string& text : thrown) {
          EXPECT_FALSE(text.empty()) << "a rank went on with " << optimizer;
          named += text.find(what) != std::string::npos && text.find(folder_.string()) != std::string::npos &&
                           text.find("Input/output error") != std::string::npos
                       ? 1
                       : 0;
        }
        EXPECT_GE(named, 1) << optimizer << ": " << thrown[0];
        EXPECT_THAT(left_behind(), IsEmpty());
      }
    }
  }
}

TEST_F(OffloadFaults, AnEngineWhoseDiskFailedSaysTheSameAgain) {
  files_.clear();
  const Config config = odd_config(run_);
  RuntimeOptions options = RuntimeOptions::from(config);
  options.log_level = LogLevel::off;
  options.files = &files_;
  Runtime runtime(options, [](const CommunicatorOptions& o) { return make_self_communicator(o); });
  Engine engine(runtime, odd_model(), config);
  files_.inject({.operation = FileOperation::write, .nth = 1, .times = -1, .code = EIO});
  std::string first;
  for (int step = 0; step < 3 && first.empty(); ++step) {
    try {
      odd_micro_batch(engine, 0, 3);
      (void)engine.step();
    } catch (const IoError& error) {
      first = error.message();
      EXPECT_EQ(error.code(), EIO);
    }
  }
  ASSERT_FALSE(first.empty());
  files_.clear();
  try {
    (void)engine.state_digest();
    FAIL() << "state that was not written is no run's";
  } catch (const IoError& error) {
    EXPECT_EQ(error.message(), first);
  }
}

TEST_F(OffloadFaults, ADiskThatIsTooSmallIsRefusedOnAllRanks) {
  run_.ranks = 2;
  files_.set_free_bytes(20'000);
  for (const std::string& text : train(1)) {
    EXPECT_THAT(text, AllOf(HasSubstr("the nvme tier of the 2 ranks of this node"),
                            HasSubstr("19.53 KiB (20000 B)"), HasSubstr(folder_.string())));
  }
  EXPECT_THAT(left_behind(), IsEmpty());
}

TEST_F(OffloadFaults, BudgetsAreKeptBeforeAnythingIsTaken) {
  run_.offload.nvme_limit = 30'000;
  EXPECT_THAT(train(1)[0], AllOf(HasSubstr("nvme"), HasSubstr("29.30 KiB")));
  run_.offload.nvme_limit = 0;
  run_.offload.optimizer = run_.offload.parameters = OffloadTier::cpu;
  run_.offload.host_memory_limit = 10'000;
  EXPECT_THAT(train(1)[0], AllOf(HasSubstr("host"), HasSubstr("9.77 KiB")));
  run_.offload.host_memory_limit = 1 << 20;
  EXPECT_THAT(train(1)[0], IsEmpty());
}

/// Reads all gradients before it updates any.
class LooksFirst final : public Optimizer {
 public:
  std::string name() const override { return "LooksFirst"; }
  std::vector<OptimizerStateTensor> state(const TrainableTensor&) const override { return {}; }
  int sums(const TrainableTensor&) const override { return 1; }
  void prepare(Stream& stream, const OptimizerStep&, const UpdateRange& range) const override {
    if (stream.kind() != DeviceKind::cpu) return;
    for (const TensorSegment& segment : range.segments) {
      stream.enqueue("sum", [gradient = range.part(segment).gradient, sums = segment.partial] {
        for (std::int64_t i = 0; i < gradient.elements(); ++i) sums->add(gradient.as<float>()[i]);
      });
    }
  }
  void apply(Stream& stream, const OptimizerStep& step, const UpdateRange& range) const override {
    if (!step.apply || stream.kind() != DeviceKind::cpu) return;
    for (const TensorSegment& segment : range.segments) {
      const UpdateRange part = range.part(segment);
      stream.enqueue("apply", [part, sums = segment.sums] {
        const auto by = static_cast<float>(1e-4 * *sums);
        for (std::int64_t i = 0; i < part.master.elements(); ++i) {
          part.master.as<float>()[i] -= by * part.gradient.as<float>()[i];
        }
      });
      if (part.weight.data != nullptr && part.weight.dtype != DataType::float32) {
        kernels::cast(stream, part.master, part.weight);
      } else if (part.weight.data != nullptr) {
        kernels::copy(stream, part.master, part.weight);
      }
    }
  }
  std::string describe() const override { return "{}"; }
};
std::unique_ptr<Optimizer> looks_first() {
  return std::make_unique<LooksFirst>();
}

TEST_F(OffloadFaults, RulesThatLookFirstMayLiveInHostMemoryAndOnDisk) {
  kernels::Digest digests[3];
  for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
    run_.offload.optimizer = tier;
    run_.offload.parameters = OffloadTier::none;
    run_.ranks = 2;
    std::mutex mutex;
    run_thread_ranks(2, [&](int rank, const CommunicatorFactory& factory) {
      const Config config = odd_config(run_);
      RuntimeOptions options = RuntimeOptions::from(config);
      options.log_level = LogLevel::off;
      Runtime runtime(options, factory);
      Engine engine(runtime, odd_model(), config, looks_first());
      for (int step = 0; step < 3; ++step) {
        odd_micro_batch(engine, 3 * rank, 3);
        EXPECT_TRUE(engine.step().applied);
      }
      const kernels::Digest digest = engine.state_digest();
      const std::lock_guard lock(mutex);
      digests[static_cast<std::size_t>(tier)] = digest;
    });
  }
  EXPECT_EQ(digests[0], digests[1]);
  EXPECT_EQ(digests[0], digests[2]);
}

}  // namespace
}  // namespace tranche::test
