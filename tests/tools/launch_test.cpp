#include "tools/launch.h"

#include <gmock/gmock.h>

#include <atomic>
#include <sstream>
#include <system_error>
#include <thread>

#include "comm/transport/transport.h"
#include "tests/comm/common_start.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/engine/runtime.h"

namespace tranche::tools {
namespace {

using testing::AllOf;
using testing::HasSubstr;

/// The output and status of a rank.
struct Outcome {
  std::string errors;
  int status = -1;
};

/// Runs thread ranks, each with its own Launch.
std::vector<Outcome> on_ranks(int size, const std::function<int(Launch&)>& body) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(size));
  run_thread_ranks(size, [&](int rank, const CommunicatorFactory& factory) {
    std::ostringstream errors;
    CommunicatorOptions options;
    options.timeout_seconds = 60;
    Launch launch(factory(options), errors);
    Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    outcome.status = body(launch);
    outcome.errors = errors.str();
  });
  return outcomes;
}

TEST(Describe, KnowsStatusesAndEchoes) {
  const auto of = [](auto error) { return describe(std::make_exception_ptr(error)); };
  EXPECT_EQ(of(ConfigurationError("x")).status, 2);
  EXPECT_EQ(of(OutOfMemory("x")).status, 3);
  EXPECT_EQ(of(CommunicationError("x")).status, 5);
  EXPECT_EQ(of(NumericalError("x")).status, 6);
  EXPECT_EQ(of(IoError("write of 'a' failed", 5)).status, 8);
  EXPECT_EQ(of(IoError("write of 'a' failed", 5)).text, "write of 'a' failed") << "no place in the sources";
  const auto no_thread = std::make_error_code(std::errc::resource_unavailable_try_again);
  EXPECT_EQ(of(std::system_error(no_thread)).status, 2);
  EXPECT_THAT(of(std::system_error(no_thread)).text, HasSubstr("starts no further thread"));
  EXPECT_EQ(of(std::system_error(std::make_error_code(std::errc::io_error))).status, 1);
  EXPECT_EQ(of(std::runtime_error("plain")).status, 1);
  EXPECT_EQ(of(std::runtime_error("plain")).text, "plain");
  EXPECT_EQ(of(std::bad_alloc()).status, 3);
  EXPECT_EQ(of(7).status, 1);
  EXPECT_EQ(of(CheckpointError("run1: not there")).text, "run1: not there")
      << "without a place in the sources";
  EXPECT_EQ(of(OutOfMemory("x")).text, "x");
  EXPECT_THAT(of(CommunicationError("x")).text, HasSubstr("x (launch_test.cpp:"));
  CheckpointError of_rank("x");
  of_rank.attach_rank(3);
  EXPECT_EQ(of(of_rank).text, "[rank 3] x");
  EXPECT_FALSE(of(CommunicationError("x")).echo);
  EXPECT_TRUE(of(comm::PeerFailure("rank 1 failed: x")).echo);
  EXPECT_EQ(of(comm::PeerFailure("rank 1 failed: x")).status, 5);
  EXPECT_EQ(of(comm::PeerFailure("rank 1 failed: x", ExitStatus::checkpoint)).status, 4);
}

TEST(Agree, ErrorsOfAllRanksArePrintedOnce) {
  const auto outcomes = on_ranks(3, [](Launch& launch) {
    return launch.agree([] { throw ConfigurationError("stage is 0 to 3, not 4"); });
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcomes[0].errors, HasSubstr("tranche: stage is 0 to 3, not 4"));
  EXPECT_EQ(outcomes[1].errors + outcomes[2].errors, "");
}

TEST(Agree, AnErrorOfOneRankEndsAllWithItsStatus) {
  const auto outcomes = on_ranks(3, [](Launch& launch) {
    return launch.agree([&] {
      if (launch.rank() == 2) throw OutOfMemory("only here");
    });
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.status, 3);
  EXPECT_EQ(outcomes[0].errors + outcomes[1].errors, "");
  EXPECT_THAT(outcomes[2].errors, HasSubstr("only here"));
}

TEST(Agree, NothingIsSaidWhenAllIsWell) {
  for (const Outcome& outcome : on_ranks(2, [](Launch& launch) { return launch.agree([] {}); })) {
    EXPECT_EQ(outcome.status, 0);
    EXPECT_EQ(outcome.errors, "");
  }
}

TEST(Agree, AValueThatIsAnotherOnOneRankIsNamedWithBothAndEndsAll) {
  const auto outcomes = on_ranks(4, [](Launch& launch) {
    launch.require_same("the command", "tranche train", "");
    launch.require_same("--steps", launch.rank() == 3 ? "7" : "6", "");
    const std::string own = launch.rank() < 2 ? "a.txt" : "/scratch/a.txt";
    const int status = launch.agree([&] {
      launch.require_same("the digest of '" + own + "'", launch.rank() < 2 ? "12ab" : "34cd", "copy it");
    });
    return status;
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(
      outcomes[2].errors,
      "tranche: the digest of 'a.txt' is 12ab on rank 0, the digest of '/scratch/a.txt' is 34cd on rank 2; "
      "copy it\n")
      << "the lowest rank that differs";
  EXPECT_EQ(outcomes[0].errors + outcomes[1].errors + outcomes[3].errors, "");
}

TEST(Agree, TheFirstOfSeveralValuesIsNamed) {
  const auto outcomes = on_ranks(2, [](Launch& launch) {
    const std::string value = launch.rank() == 0 ? "1" : "not given";
    for (const char* name : {"--eval-every", "--save-every"}) launch.require_same(name, value, "do");
    return launch.agree([] {});
  });
  EXPECT_EQ(outcomes[1].errors,
            "tranche: --eval-every is 1 on rank 0, --eval-every is not given on rank 1; do\n");
}

TEST(Agree, ValuesThatOneRankLacksDiffer) {
  for (const int lacking : {0, 1}) {
    const auto outcomes = on_ranks(2, [&](Launch& launch) {
      launch.require_same("--a", "", "do");
      if (launch.rank() != lacking) launch.require_same("--b", "", "do");
      return launch.agree([] {});
    });
    EXPECT_EQ(outcomes[0].status, 2);
    EXPECT_THAT(outcomes[1].errors,
                AllOf(HasSubstr(lacking == 0 ? "--b is not given on rank 0" : "--b is not given on rank 1")));
  }
}

TEST(Agree, EqualValuesMayHaveOtherNamesAndAnErrorGoesBeforeADifference) {
  const auto outcomes = on_ranks(2, [](Launch& launch) {
    launch.require_same("file of rank " + std::to_string(launch.rank()), "12ab", "");
    if (const int status = launch.agree([] {}); status != 0) return status;
    launch.require_same("steps", std::to_string(launch.rank()), "");
    return launch.agree([&] {
      if (launch.rank() == 1) throw OutOfMemory("only here");
    });
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.status, 3);
  EXPECT_EQ(outcomes[0].errors + outcomes[1].errors, "tranche: only here\n");
}

TEST(Fail, OneRankReturnsTheStatusOfItsError) {
  std::ostringstream errors;
  Launch launch(make_self_communicator({}), errors);
  EXPECT_EQ(launch.fail(std::make_exception_ptr(NumericalError("too many skipped steps"))), 6);
  EXPECT_THAT(errors.str(), HasSubstr("tranche: too many skipped steps"));
}

TEST(Fail, ADiskThatFailsOnOneRankEndsAllWithItsStatus) {
  const auto outcomes = on_ranks(2, [](Launch& launch) {
    try {
      if (launch.rank() == 1) throw IoError("write of 'swap' failed: Input/output error", 5);
      (void)launch.agree([] {});
    } catch (...) {
      return launch.fail(std::current_exception(), 0.3);
    }
    return 0;
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.status, 8);
  EXPECT_THAT(outcomes[1].errors, HasSubstr("tranche: [rank 1] write of 'swap' failed"));
}

TEST(Fail, TheRankThatFailedAndTheLowestPeerSpeakWithRankAndOperation) {
  const auto outcomes = on_ranks(3, [](Launch& launch) {
    try {
      if (launch.rank() == 1) throw std::runtime_error("disk on fire");
      (void)launch.agree([] {});
    } catch (...) {
      return launch.fail(std::current_exception(), 0.3);
    }
    return 0;
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.status, 5);
  EXPECT_THAT(outcomes[1].errors, HasSubstr("[rank 1] disk on fire"));
  EXPECT_THAT(outcomes[0].errors, AllOf(HasSubstr("[rank 0]"), HasSubstr("all_reduce"),
                                        HasSubstr("rank 1 failed: disk on fire")));
  EXPECT_EQ(outcomes[2].errors, "");
}

TEST(Fail, RanksOfAMeshAreNamedWithTheirCoordinates) {
  const ThreadGroup group(4);
  tranche::test::CommonStart start(4);
  const auto outcomes = on_ranks(4, [&](Launch& launch) {
    tranche::test::CommonStart::Rank started(start);
    RuntimeOptions options;
    options.mesh = "replicate=2, shard=*";
    Runtime runtime(options, [&](const CommunicatorOptions& communicator) {
      return group.communicator(launch.rank(), communicator);
    });
    started.await_others();
    try {
      if (launch.rank() == 0) throw std::runtime_error("disk on fire");
      runtime.all().barrier({"", "step"}).wait();
    } catch (...) {
      return launch.fail(std::current_exception(), 0.3, {}, &runtime);
    }
    return 0;
  });
  EXPECT_THAT(outcomes[0].errors, HasSubstr("tranche: [rank 0 (replicate 0, shard 0)] disk on fire"));
  EXPECT_THAT(outcomes[1].errors,
              AllOf(HasSubstr("[rank 1 (replicate 0, shard 1)] "), HasSubstr("barrier in step"),
                    HasSubstr("rank 0 (replicate 0, shard 0) failed: disk on fire")));
  EXPECT_EQ(outcomes[2].errors + outcomes[3].errors, "");
}

TEST(Fail, ATypedErrorKeepsItsStatusOnEveryRank) {
  const auto outcomes = on_ranks(3, [](Launch& launch) {
    try {
      if (launch.rank() == 0) throw ConfigurationError("token 300 at position 7");
      (void)launch.agree([] {});
    } catch (...) {
      return launch.fail(std::current_exception(), 0.3);
    }
    return 0;
  });
  // mpirun returns the status of the rank that ends first.
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcomes[0].errors, HasSubstr("[rank 0] token 300"));
  EXPECT_THAT(outcomes[1].errors, HasSubstr("rank 0 failed: token 300")) << "rank 0 is no peer of itself";
}

TEST(OfFirst, IsRankZerosNumberEverywhere) {
  on_ranks(3, [](Launch& launch) {
    EXPECT_EQ(launch.broadcast_from_root(launch.rank() + 5), 5);
    return 0;
  });
}

}  // namespace
}  // namespace tranche::tools
