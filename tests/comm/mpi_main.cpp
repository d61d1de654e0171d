#include "tests/comm/mpi_main.h"

#include <gtest/gtest.h>

#include <cstdio>

#include "tranche/comm/backends.h"
#include "tranche/core/error.h"

namespace tranche::test {

namespace {
Communicator* the_world = nullptr;  // a global, because GoogleTest's cases take no arguments; only in this
                                    // test program

/// Prints a rank's failures with its number, and informs all ranks of them.
class AgreeOnFailure : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "[rank %d] %s:%d: %s\n", the_world->rank(), result.file_name(), result.line_number(),
                 result.message());
  }
};

class Agreement : public testing::Environment {
 public:
  void TearDown() override {
    std::int64_t failed = testing::UnitTest::GetInstance()->failed_test_count();
    the_world
        ->all_reduce(&failed, 1, DataType::int64, ReduceOperation::sum, {"", "agreement", Traffic::control})
        .wait();
    EXPECT_EQ(failed, 0) << "cases failed, counted over all ranks";
  }
};
}  // namespace

Communicator& world() {
  return *the_world;
}

}  // namespace tranche::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  tranche::CommunicatorOptions options;
  options.timeout_seconds = 60;
  options.staging_bytes = tranche::test::mpi_staging_bytes;
  const auto world = tranche::make_mpi_communicator(options);
  tranche::test::the_world = world.get();
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  if (world->rank() != 0) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new tranche::test::AgreeOnFailure);
  testing::AddGlobalTestEnvironment(new tranche::test::Agreement);
  try {
    return RUN_ALL_TESTS();
  } catch (const tranche::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    world->post_failure(error.message(), error.exit_status(), 2);
    world->abort_job(1);
    return 1;
  }
}
