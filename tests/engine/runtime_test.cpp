// What a rank is given and says of itself: budgets, refused before anything is taken, and what its bits hang
// on.
#include "tranche/engine/runtime.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tranche/core/error.h"
#include "tranche/engine/config.h"
#include "tranche/kernels/revision.h"
#include "tranche/tests/core/error_text.h"

namespace tranche {
namespace {

using test::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(RuntimeBudgets, ComeFromTheConfiguration) {
  const Config config = parse_config(
      R"({"tranche": {"device_memory": "1MiB", "host_memory": "2MiB", "nvme_space": "3MiB"}})", 1);
  const RuntimeOptions options = RuntimeOptions::from(config);
  EXPECT_EQ(options.device_memory_limit, 1 << 20);
  EXPECT_EQ(options.host_memory_limit, 2 << 20);
  EXPECT_EQ(options.nvme_limit, 3 << 20);
  const RuntimeOptions none = RuntimeOptions::from(Config());
  EXPECT_EQ(none.host_memory_limit, 0);
  EXPECT_EQ(none.nvme_limit, 0);
}

TEST(RuntimeBudgets, HostMemoryIsRefusedBeforeItIsTaken) {
  RuntimeOptions options;
  options.host_memory_limit = 1 << 20;
  options.nvme_limit = 12345;
  const Runtime runtime(options, make_self_communicator);
  EXPECT_EQ(runtime.nvme_limit(), 12345);
  const Buffer held(runtime.memory(Tier::host), 600 << 10, Category::optimizer, "moments");
  const std::string text = message_of<OutOfMemory>(
      [&] { const Buffer more(runtime.memory(Tier::host), 500 << 10, Category::gradients, "gradients"); });
  EXPECT_THAT(text, AllOf(HasSubstr("'gradients' (gradients) asks for 500.00 KiB (512000 B) of host memory"),
                          HasSubstr("of the limit of 1.00 MiB (1048576 B) 600.00 KiB"),
                          HasSubstr("only 424.00 KiB are left"), HasSubstr("optimizer")))
      << "with the ledger's table";
  EXPECT_EQ(runtime.ledger().total(Tier::host), 600 << 10) << "nothing was booked";
  const Buffer fits(runtime.memory(Tier::host), 424 << 10, Category::gradients, "gradients");
  // The device's budget is another.
  EXPECT_NO_THROW(Buffer(runtime.memory(Tier::device), 2 << 20, Category::other, "on the device"));
}

TEST(RuntimeBudgets, WithoutThemHostMemoryIsNotBounded) {
  const Runtime runtime({}, make_self_communicator);
  EXPECT_EQ(runtime.nvme_limit(), 0);
  EXPECT_NO_THROW(Buffer(runtime.memory(Tier::host), 64 << 20, Category::other, "much"));
}

std::exception_ptr error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

TEST(RuntimeFail, EveryRankEndsWithTheStatusOfTheCause) {
  const std::pair<std::exception_ptr, int> causes[] = {
      {std::make_exception_ptr(ConfigurationError("no such data")), 2},
      {std::make_exception_ptr(OutOfMemory("too much")), 3},
      {std::make_exception_ptr(std::bad_alloc()), 3},
      {std::make_exception_ptr(CheckpointError("damaged")), 4},
      {std::make_exception_ptr(CommunicationError("no data from rank 0")), 5},
      {std::make_exception_ptr(NumericalError("too many skipped steps")), 6},
      {std::make_exception_ptr(std::runtime_error("of the user")), 1},
      {std::make_exception_ptr(7), 1},
  };
  for (const auto& [cause, status] : causes) {
    int statuses[3] = {-1, -1, -1};
    run_thread_ranks(3, [&, cause = cause](int rank, const CommunicatorFactory& factory) {
      RuntimeOptions options;
      options.log_level = LogLevel::off;
      Runtime runtime(options, factory);
      const auto error = rank == 1 ? cause : error_of([&] {
        runtime.all().barrier({"", "test", Traffic::control}).wait();
      });
      statuses[rank] = runtime.fail(error);
    });
    EXPECT_THAT(statuses, ::testing::Each(status)) << "of the rank that failed and of those that it ended";
  }
}

TEST(RuntimeFail, NamesTheRankOnce) {
  Runtime runtime({}, make_self_communicator);
  ::testing::internal::CaptureStderr();
  runtime.fail(std::make_exception_ptr(ConfigurationError("no such data")));
  ConfigurationError elsewhere("no such model");
  elsewhere.attach_rank(3);
  runtime.fail(std::make_exception_ptr(elsewhere));
  runtime.fail(std::make_exception_ptr(std::runtime_error("of the user")));
  const std::string said = ::testing::internal::GetCapturedStderr();
  const std::string front = "\\[rank 0\\] \\[[0-9:]+\\] \\[error\\] ";
  EXPECT_THAT(said, ::testing::MatchesRegex(front + "no such data \\(runtime_test.cpp:[0-9]+\\)\n" + front +
                                            "\\[rank 3\\] no such model \\(runtime_test.cpp:[0-9]+\\)\n" +
                                            front + "of the user\n"));
}

TEST(NumericsFingerprint, NamesLibraryArithmeticAndThreads) {
  RuntimeOptions options;
  options.threads = 2;
  const Runtime runtime(options, make_self_communicator);
  EXPECT_THAT(runtime.numerics_fingerprint(),
              AllOf(HasSubstr("tranche "),
                    HasSubstr(", arithmetic " + std::to_string(kernels::arithmetic_revision) + "; cpu; "),
                    HasSubstr("; 2 threads a rank")));
}

}  // namespace
}  // namespace tranche
