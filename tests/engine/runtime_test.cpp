// A rank's environment: budgets, which are checked before anything is allocated, and the facts on which its
// bits depend.
#include "tranche/engine/runtime.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "kernels/revision.h"
#include "tests/comm/common_start.h"
#include "tests/core/error_text.h"
#include "tranche/config/config.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"

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
                          HasSubstr("but the limit is 1.00 MiB (1048576 B), of which 600.00 KiB"),
                          HasSubstr("only 424.00 KiB are left"), HasSubstr("optimizer")))
      << "with the ledger's table";
  EXPECT_EQ(runtime.ledger().total(Tier::host), 600 << 10) << "nothing was tracked";
  const Buffer fits(runtime.memory(Tier::host), 424 << 10, Category::gradients, "gradients");
  // The device has a budget of its own.
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
    test::CommonStart start(3);
    run_thread_ranks(3, [&, cause = cause](int rank, const CommunicatorFactory& factory) {
      test::CommonStart::Rank started(start);
      RuntimeOptions options;
      options.log_level = LogLevel::off;
      Runtime runtime(options, factory);
      started.await_others();
      const auto error = rank == 1 ? cause : error_of([&] {
        runtime.all().barrier({"", "test", Traffic::control}).wait();
      });
      statuses[rank] = runtime.fail(error);
    });
    EXPECT_THAT(statuses, ::testing::Each(status)) << "of the rank that failed and of those that it ended";
  }
}

TEST(RuntimeOptions, NumbersBelowZeroAreRefused) {
  const auto told = [](const std::function<void(RuntimeOptions&)>& change) {
    RuntimeOptions options;
    change(options);
    return message_of<InvalidArgument>([&] { Runtime runtime(options, make_self_communicator); });
  };
  EXPECT_EQ(told([](RuntimeOptions& o) { o.threads = -1; }),
            "RuntimeOptions::threads is -1; it must be at least 0");
  EXPECT_EQ(told([](RuntimeOptions& o) { o.device_memory_limit = -7; }),
            "RuntimeOptions::device_memory_limit is -7; it must be at least 0");
  EXPECT_EQ(told([](RuntimeOptions& o) { o.host_memory_limit = -7; }),
            "RuntimeOptions::host_memory_limit is -7; it must be at least 0");
  EXPECT_EQ(told([](RuntimeOptions& o) { o.nvme_limit = -7; }),
            "RuntimeOptions::nvme_limit is -7; it must be at least 0");
  EXPECT_EQ(told([](RuntimeOptions& o) { o.staging_bytes = -1; }),
            "RuntimeOptions::staging_bytes is -1; it must be at least 0");
  EXPECT_EQ(told([](RuntimeOptions& o) { o.ranks_per_host = -2; }),
            "RuntimeOptions::ranks_per_host is -2; it must be at least 0");
  EXPECT_EQ(told([](RuntimeOptions& o) { o.trace_events = -1; }),
            "RuntimeOptions::trace_events is -1; it must be at least 0");
  for (const double seconds : {-3.0, 0.0, std::nan("")}) {
    EXPECT_EQ(
        told([&](RuntimeOptions& o) { o.communication_timeout = seconds; }),
        fmt::format("RuntimeOptions::communication_timeout is {} seconds; it must be above 0", seconds));
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

TEST(RuntimeFail, WithoutARuntimeNamesTheRankThatTheLauncherGave) {
  const auto said = [](const char* rank, std::exception_ptr error) {
    for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}) ::unsetenv(name);
    if (rank != nullptr) ::setenv("PMIX_RANK", rank, 1);
    Runtime runtime;
    ::testing::internal::CaptureStderr();
    runtime.fail(std::move(error));
    ::unsetenv("PMIX_RANK");
    return ::testing::internal::GetCapturedStderr();
  };
  const auto missing = std::make_exception_ptr(std::runtime_error("my input file is missing"));
  const std::string behind = "\\[[0-9:]+\\] \\[error\\] my input file is missing";
  EXPECT_THAT(said("1", missing), ::testing::MatchesRegex("\\[rank 1\\] " + behind + "\n"));
  EXPECT_THAT(said(nullptr, missing), ::testing::MatchesRegex(behind + "\n"));
  ConfigurationError elsewhere("my input file is missing");
  elsewhere.attach_rank(2);
  EXPECT_THAT(said(nullptr, std::make_exception_ptr(elsewhere)),
              ::testing::MatchesRegex("\\[rank 2\\] " + behind + " \\(runtime_test.cpp:[0-9]+\\)\n"));
}

TEST(RuntimeFail, PutsThePlaceInFrontOfOneError) {
  Runtime runtime({}, make_self_communicator);
  ::testing::internal::CaptureStderr();
  runtime.set_place("backward of micro-batch 5");
  runtime.fail(std::make_exception_ptr(std::runtime_error("the disk is full")));
  EXPECT_EQ(runtime.place(), "");
  runtime.fail(std::make_exception_ptr(std::runtime_error("of the user")));
  const std::string front = "\\[rank 0\\] \\[[0-9:]+\\] \\[error\\] ";
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::MatchesRegex(front + "rank 0, backward of micro-batch 5: the disk is full\n" +
                                      front + "of the user\n"));
}

TEST(RuntimeFromOptions, InlineProgressIsNotForRanksThatAreThreads) {
  RuntimeOptions options;
  options.inline_progress = true;
  EXPECT_THAT(message_of<ConfigurationError>([&] {
                run_thread_ranks(2, [&](int, const CommunicatorFactory& factory) {
                  const Runtime runtime(options, factory);
                });
              }),
              HasSubstr("tranche.progress: inline is for MPI communicators that a program hands over"));
}

TEST(RuntimeMesh, RanksWithAnotherMeshAreToldOf) {
  const auto refusal = [](const std::vector<std::string>& meshes) {
    std::vector<std::string> texts(meshes.size());
    run_thread_ranks(static_cast<int>(meshes.size()), [&](int rank, const CommunicatorFactory& factory) {
      RuntimeOptions options;
      options.mesh = meshes[static_cast<std::size_t>(rank)];
      std::string& text = texts[static_cast<std::size_t>(rank)];
      try {
        const Runtime runtime(options, factory);
        text = runtime.mesh().to_string();
      } catch (const ConfigurationError& error) {
        text = error.message();
        EXPECT_EQ(error.rank(), rank);
      }
    });
    EXPECT_THAT(texts, ::testing::Each(texts[0])) << "all ranks end alike";
    return texts[0];
  };
  EXPECT_EQ(
      refusal({"replicate=2, shard=*", "replicate=2, shard=*", "shard=*", ""}),
      "rank 2 was started with tranche.mesh \"shard=*\", rank 0 with \"replicate=2, shard=*\"; start all "
      "ranks with the same");
  EXPECT_THAT(refusal({"", "shard=5", "", ""}),
              HasSubstr("mesh \"shard=5\": shard 5, but there are 4 ranks"));
  EXPECT_EQ(refusal({"", "shard=*", "shard=4", "replicate=1, shard=4"}), "shard=4")
      << "other words of one mesh";
}

TEST(RuntimeMesh, RanksOfATensorAxisHaveTheirGroups) {
  run_thread_ranks(8, [&](int rank, const CommunicatorFactory& factory) {
    RuntimeOptions options;
    options.mesh = "tensor=2, replicate=2, shard=2";  // tensor is the slowest axis here, so orders differ
                                                      // from rank numbers
    const Runtime runtime(options, factory);
    const auto ranks_of = [&](Communicator& group) {
      std::vector<std::int64_t> ranks(static_cast<std::size_t>(group.size()));
      const std::int64_t own = rank;
      group
          .all_gather(&own, ranks.data(), 1, DataType::int64, 0, {},
                      {"test", "ranks", Traffic::control, Tier::host})
          .wait();
      return ranks;
    };
    const std::int64_t shard = rank / 2 * 2, data = rank % 4 / 2 * 2;
    EXPECT_THAT(ranks_of(runtime.shard()), testing::ElementsAre(shard, shard + 1));
    EXPECT_THAT(ranks_of(*runtime.tensor()), testing::ElementsAre(rank % 4, rank % 4 + 4));
    EXPECT_THAT(ranks_of(*runtime.tensor_and_shard()),
                testing::ElementsAre(data, data + 4, data + 1, data + 5))
        << "by data rank, then by tensor";
    EXPECT_EQ(runtime.of_stage().size(), 4);
  });
  run_thread_ranks(4, [&](int, const CommunicatorFactory& factory) {
    RuntimeOptions options;
    options.mesh = "replicate=2, shard=2";
    const Runtime runtime(options, factory);
    EXPECT_EQ(&runtime.of_stage(), &runtime.all()) << "all ranks compute the same";
    EXPECT_EQ(runtime.shard().size(), 2);
  });
  run_thread_ranks(2, [&](int, const CommunicatorFactory& factory) {
    const Runtime runtime(RuntimeOptions(), factory);
    EXPECT_EQ(runtime.context(), nullptr);
    EXPECT_EQ(runtime.tensor(), nullptr);
    EXPECT_EQ(runtime.tensor_and_shard(), nullptr);
    EXPECT_EQ(&runtime.of_stage(), &runtime.all());
  });
}

TEST(RuntimeMesh, RanksOfAContextAxisShareStateWithThoseOfShard) {
  for (const bool context_first : {false, true}) {
    run_thread_ranks(8, [&](int rank, const CommunicatorFactory& factory) {
      RuntimeOptions options;
      options.mesh = context_first ? "context=2, tensor=2, shard=2" : "shard=2, context=2, tensor=2";
      const Runtime runtime(options, factory);
      const auto ranks_of = [&](Communicator& group) {
        std::vector<std::int64_t> ranks(static_cast<std::size_t>(group.size()));
        const std::int64_t own = rank;
        group
            .all_gather(&own, ranks.data(), 1, DataType::int64, 0, {},
                        {"test", "ranks", Traffic::control, Tier::host})
            .wait();
        return ranks;
      };
      const std::int64_t i = rank;
      if (context_first) {
        const std::int64_t tensor = i / 2 % 2 * 2;
        EXPECT_THAT(ranks_of(*runtime.context()), testing::ElementsAre(i % 4, i % 4 + 4));
        EXPECT_THAT(ranks_of(runtime.shard()),
                    testing::ElementsAre(tensor, tensor + 1, tensor + 4, tensor + 5));
        EXPECT_THAT(ranks_of(*runtime.tensor_and_shard()), testing::ElementsAre(0, 2, 1, 3, 4, 6, 5, 7))
            << "by state rank, then by tensor";
      } else {
        const std::int64_t context = i / 4 * 4 + i % 2;
        EXPECT_THAT(ranks_of(*runtime.context()), testing::ElementsAre(context, context + 2));
        EXPECT_THAT(ranks_of(runtime.shard()), testing::ElementsAre(i % 2, i % 2 + 2, i % 2 + 4, i % 2 + 6));
        EXPECT_THAT(ranks_of(*runtime.tensor_and_shard()), testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
      }
      EXPECT_EQ(&runtime.of_stage(), &runtime.shard());
    });
  }
  run_thread_ranks(2, [&](int, const CommunicatorFactory& factory) {
    RuntimeOptions options;
    options.mesh = "context=2";
    const Runtime runtime(options, factory);
    EXPECT_EQ(&runtime.shard(), &runtime.all());
    EXPECT_NE(runtime.context(), &runtime.all()) << "messages of layers have a group of their own";
  });
}

TEST(RuntimeLog, GoesToAFunctionOfTheProgram) {
  std::vector<std::string> messages;
  RuntimeOptions options;
  options.log = [&](LogLevel level, std::string_view message) {
    messages.push_back((level == LogLevel::warning ? "warning: " : "other: ") + std::string(message));
  };
  testing::internal::CaptureStderr();
  {
    const Runtime runtime(options, make_self_communicator);
    runtime.log().warning("low on paper");
    runtime.log().debug("below the level");
  }
  EXPECT_THAT(messages, testing::ElementsAre("warning: low on paper"));
  {
    options.log = nullptr;
    const Runtime runtime(options, make_self_communicator);
    runtime.log().warning("low on ink");
  }
  const std::string errors = testing::internal::GetCapturedStderr();
  EXPECT_THAT(errors, HasSubstr("low on ink"));
  EXPECT_THAT(errors, testing::Not(HasSubstr("low on paper")));
  EXPECT_EQ(messages.size(), 1u);
}

TEST(RuntimeFromConfig, HonoursTheKeysAndKeepsTheConfiguration) {
  RuntimeOptions beside;
  beside.log_level = LogLevel::warning;
  beside.host_memory_limit = 7 << 20;
  const Runtime runtime = Runtime::from_config(R"({"train_batch_size": 6, "zero_optimization": {"stage": 2},
      "tranche": {"device_memory": "20MiB", "nvme_space": "3MiB", "threads": 3}})",
                                               beside);
  EXPECT_EQ(runtime.config().stage, 2);
  EXPECT_EQ(runtime.config().train_batch_size, 6);
  EXPECT_EQ(runtime.host_threads(), 3);
  EXPECT_EQ(runtime.nvme_limit(), 3 << 20);
  EXPECT_NO_THROW(runtime.check(runtime.config()));
  EXPECT_THAT(message_of<OutOfMemory>([&] {
                const Buffer much(runtime.memory(Tier::device), 21 << 20, Category::other, "much");
              }),
              HasSubstr("but the limit is 20.00 MiB"));
  EXPECT_THAT(message_of<OutOfMemory>(
                  [&] { const Buffer much(runtime.memory(Tier::host), 8 << 20, Category::other, "much"); }),
              HasSubstr("but the limit is 7.00 MiB"))
      << "what the configuration leaves open is as the program says";
  EXPECT_THAT(message_of<LogicError>([] { (void)Runtime({}, make_self_communicator).config(); }),
              HasSubstr("that was not made by Runtime::from_config()"));
}

TEST(RuntimeFromConfig, ReadsAFileAndSaysWhichItCannotRead) {
  const std::string path =
      ::testing::TempDir() + "runtime_from_config_" + std::to_string(::getpid()) + ".json";
  std::ofstream(path) << R"({"tranche": {"nvme_space": "5MiB"}})";
  EXPECT_EQ(Runtime::from_config(path).nvme_limit(), 5 << 20);
  Runtime runtime;
  int status = 0;
  ::testing::internal::CaptureStderr();
  try {
    runtime = Runtime::from_config(path + ".not");
  } catch (...) {
    status = runtime.fail(std::current_exception());
  }
  EXPECT_EQ(status, 2);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("configuration file '" + path + ".not' cannot be read: No such file"));
  std::remove(path.c_str());
}

/// A unit of one tensor, for engines whose constructor must fail.
ModelSpec any_model() {
  ModelSpec model;
  model.add_unit({"unit", {{"weight", {16}, Initializer::zeros()}}});
  return model;
}

TEST(RuntimeCheck, RefusesKeysThatTheRuntimeDoesNotHonour) {
  const struct {
    const char *json, *text;
  } cases[] = {
      {R"("device_memory": "4MiB")", "tranche.device_memory is 4194304, the runtime has 0"},
      {R"("host_memory": "2MiB")", "tranche.host_memory is 2097152, the runtime has 0"},
      {R"("nvme_space": "1MiB")", "tranche.nvme_space is 1048576, the runtime has 0"},
      {R"("threads": 7)", "tranche.threads is 7, the runtime has 0"},
      {R"("communication_timeout": 1.5)", "tranche.communication_timeout is 1.5, the runtime has 300"},
      {R"("communication_slab": "9MiB")", "tranche.communication_slab is 9437184, the runtime has 8388608"},
      {R"("progress": "inline")", "tranche.progress is inline, the runtime has thread"},
      {R"("collectives": "messages")", "tranche.collectives is messages, the runtime has auto"},
      {R"("device_transport": "staged")", "tranche.device_transport is staged, the runtime has auto"},
      {R"("debug": {"poison_memory": true})", "tranche.debug.poison_memory is true, the runtime has false"},
      {R"("debug": {"ranks_per_host": 1})", "tranche.debug.ranks_per_host is 1, the runtime has 0"},
  };
  Runtime runtime({}, make_self_communicator);
  for (const auto& [json, text] : cases) {
    const Config config = parse_config(std::string(R"({"tranche": {)") + json + "}}", 1);
    EXPECT_THAT(
        message_of<ConfigurationError>([&] { const Engine engine(runtime, any_model(), config); }),
        AllOf(HasSubstr("asks for what the runtime was not made with:\n  " + std::string(text) + "\nmake"),
              HasSubstr("Runtime::from_config() or with RuntimeOptions::from(config)")));
    if (config.inline_progress) continue;  // only for a program's own MPI communicators
    const Runtime honouring(RuntimeOptions::from(config), make_self_communicator);
    EXPECT_NO_THROW(honouring.check(config)) << json;
  }
  const Config both = parse_config(R"({"tranche": {"threads": 2, "device_memory": "4MiB"}})", 1);
  EXPECT_THAT(
      message_of<ConfigurationError>([&] { runtime.check(both); }),
      AllOf(HasSubstr("\n  tranche.threads is 2"), HasSubstr("\n  tranche.device_memory is 4194304")));
}

TEST(RuntimeCheck, LetsOptionsStandThatTheConfigurationDoesNotMention) {
  RuntimeOptions options;
  options.threads = 2;
  options.device_memory_limit = 64 << 20;
  options.communication_timeout = 12;
  options.collectives = "messages";
  const Runtime runtime(options, make_self_communicator);
  EXPECT_NO_THROW(runtime.check(parse_config("{}", 1)));
  EXPECT_THAT(message_of<ConfigurationError>(
                  [&] { runtime.check(parse_config(R"({"tranche": {"threads": 3}})", 1)); }),
              HasSubstr("tranche.threads is 3, the runtime has 2"));
}

TEST(RuntimeCheck, OfTheMetaDeviceIsAboutTheSlabAlone) {
  RuntimeOptions options;
  options.device = DeviceKind::meta;
  const Runtime runtime(options,
                        [](const CommunicatorOptions& o) { return make_meta_communicator(0, 2, 2, o); });
  EXPECT_NO_THROW(runtime.check(parse_config(R"({"tranche": {"device_memory": "4MiB", "threads": 7}})", 2)));
  EXPECT_THAT(message_of<ConfigurationError>(
                  [&] { runtime.check(parse_config(R"({"tranche": {"communication_slab": "16MiB"}})", 2)); }),
              HasSubstr("tranche.communication_slab is 16777216"));
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
