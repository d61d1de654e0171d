// The host memory that plans may use: its source, its division among ranks, and the texts about it.
#include "tranche/planner/host_memory.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/tools/program_fixture.h"
#include "tools/plan/plan.h"

namespace tranche::planner {
namespace {

using namespace tools;  // for the program, which runs what is planned

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using tools::test::ProgramResult;
using tools::test::TemporaryFolder;

TEST(HostMemory, IsDescribedWithItsSource) {
  using Source = HostMemory::Source;
  const std::int64_t gib = std::int64_t{1} << 30;
  EXPECT_EQ(describe(HostMemory{}), "no limit; --host-memory sets one");
  EXPECT_EQ(describe(HostMemory{.source = Source::configuration, .bytes = gib}),
            "1.00 GiB a rank, as --host-memory or tranche.host_memory has it");
  EXPECT_EQ(describe(HostMemory{Source::this_machine, 3 * gib, 3 * gib, 1}),
            "3.00 GiB a rank, all of this machine's 3.00 GiB available; --host-memory sets it");
  EXPECT_EQ(describe(HostMemory{Source::this_machine, gib, 8 * gib, 8}),
            "1.00 GiB a rank, 1/8 of this machine's 8.00 GiB available; --host-memory sets it");
}

TEST(HostMemory, IsNotLimitedWhereTheSystemSaysNothing) {
  const TemporaryFolder nothing;
  const HostMemory memory = host_memory_of(0, 2, nothing.path(""));
  EXPECT_EQ(memory.source, HostMemory::Source::unlimited);
  EXPECT_EQ(memory.bytes, 0);
  EXPECT_EQ(host_memory_of(77, 2, nothing.path("")).bytes, 77);
}

/// The output of `tranche plan` on a machine with this much available memory.
ProgramResult plan_on(std::int64_t available_kib, std::vector<std::string> arguments,
                      const std::string& group_limit = "") {
  const TemporaryFolder root;
  std::filesystem::create_directories(root.path("proc/self"));
  std::filesystem::create_directories(root.path("sys/fs/cgroup/job"));
  root.write("proc/meminfo", fmt::format("MemTotal: 99999999 kB\nMemAvailable: {} kB\n", available_kib));
  root.write("proc/self/cgroup", "0::/job\n");
  if (!group_limit.empty()) root.write("sys/fs/cgroup/job/memory.max", group_limit);
  Options options = parse_arguments(arguments);
  options.system_root = root.path("");
  std::ostringstream out, errors;
  const int status = run_plan(options, {out, errors, false});
  return {status, out.str(), errors.str()};
}

const std::vector<std::string> fit_on_host{"plan",    "--model", "gpt-mini", "--sequence", "64",
                                           "--ranks", "2",       "--fit",    "24MiB"};

TEST(FitCommand, HostMemoryIsWhatThisMachineHasForEachRank) {
  // There is enough: state is placed in host memory, and the output names the source of the limit.
  const ProgramResult roomy = plan_on(24 << 20, fit_on_host);
  ASSERT_EQ(roomy.status, 0) << roomy.out << roomy.errors;
  EXPECT_THAT(roomy.out,
              AllOf(HasSubstr("\nhost memory: 12.00 GiB a rank, half of this machine's 24.00 GiB available; "
                              "--host-memory sets it\n"),
                    HasSubstr("offloaded: optimizer cpu"),
                    HasSubstr(" taken; 12.00 GiB a rank, half of this machine's 24.00 GiB available"),
                    Not(HasSubstr("too little"))));
  // There is too little for the same: 8 MiB per rank.
  const ProgramResult tight = plan_on(16 << 10, fit_on_host);
  EXPECT_EQ(tight.status, 3);
  EXPECT_THAT(tight.out, AllOf(HasSubstr("host memory: 8.00 MiB a rank, half of this machine's 16.00 MiB"),
                               HasSubstr("nothing fits in 24.00 MiB")));
  // A control group's limit counts if it is lower.
  const ProgramResult group = plan_on(24 << 20, fit_on_host, "16777216\n");
  EXPECT_EQ(group.status, 3);
  EXPECT_THAT(group.out,
              HasSubstr("host memory: 8.00 MiB a rank, half of the 16.00 MiB that the limit of its "
                        "control group leaves; --host-memory sets it\n"));
  auto arguments = fit_on_host;
  arguments.emplace_back("--json");
  EXPECT_EQ(json::parse(plan_on(24 << 20, arguments, "16777216\n").out)["host_memory"]["source"],
            "control group");
}

TEST(FitCommand, HostMemoryIsSharedByTheRanksOfANode) {
  auto arguments = fit_on_host;
  arguments.insert(arguments.end(), {"--ranks", "8", "--ranks-per-node", "4", "--json"});
  const json plan = json::parse(plan_on(24 << 20, arguments).out);
  EXPECT_EQ(plan["host_memory"]["source"], "this machine");
  EXPECT_EQ(plan["host_memory"]["bytes_per_rank"], std::int64_t{6} << 30);
  EXPECT_EQ(plan["host_memory"]["available_bytes"], std::int64_t{24} << 30);
  EXPECT_EQ(plan["host_memory"]["ranks_sharing"], 4);
}

TEST(FitCommand, HostMemoryThatIsGivenIsTaken) {
  const auto with = [&](std::vector<std::string> more) {
    auto arguments = fit_on_host;
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  const std::string given = "host memory: 1.00 GiB a rank, as --host-memory or tranche.host_memory has it";
  const ProgramResult flag = plan_on(16 << 10, with({"--host-memory", "1GiB"}));
  EXPECT_EQ(flag.status, 0);
  EXPECT_THAT(flag.out, HasSubstr(given));
  EXPECT_THAT(plan_on(16 << 10, with({"--set", "tranche.host_memory=1GiB"})).out, HasSubstr(given));
  const ProgramResult none = plan_on(16 << 10, with({"--host-memory", "0"}));
  EXPECT_EQ(none.status, 0);
  EXPECT_THAT(none.out, HasSubstr("host memory: no limit; --host-memory sets one"));
  const json unlimited = json::parse(plan_on(16 << 10, with({"--host-memory", "0", "--json"})).out);
  EXPECT_EQ(unlimited["host_memory"]["source"], "none");
  EXPECT_EQ(unlimited["host_memory"]["bytes_per_rank"], nullptr);
  // --machine describes another machine, whose memory is unknown.
  EXPECT_THAT(plan_on(16 << 10, with({"--machine", "epyc-9654-2s"})).out,
              HasSubstr("host memory: no limit; --host-memory sets one"));
}

TEST(PlanCommand, SaysWhatThisMachineHasOfHostMemory) {
  const std::vector<std::string> arguments{
      "plan", "--model", "gpt-mini", "--sequence", "64", "--ranks", "2", "--offload-optimizer", "cpu"};
  const ProgramResult said = plan_on(16 << 10, arguments);
  EXPECT_EQ(said.status, 0) << "without a budget nothing is refused";
  EXPECT_THAT(said.out, AllOf(HasSubstr(" taken; 8.00 MiB a rank, half of this machine's 16.00 MiB"),
                              HasSubstr("this machine has too little of it: "), HasSubstr(" are missing")));
  auto budget = arguments;
  budget.insert(budget.end(), {"--device-memory", "1GiB"});
  const ProgramResult refused = plan_on(16 << 10, budget);
  EXPECT_EQ(refused.status, 3);
  EXPECT_THAT(refused.out, HasSubstr("does not fit in 8.00 MiB of host memory: "));
  // On a CPU device memory is host memory: the plan fits each limit, but not both together.
  const ProgramResult both = plan_on(120 << 10, budget);
  EXPECT_EQ(both.status, 0);
  EXPECT_THAT(both.out, HasSubstr("  on CPUs device memory is this machine's too: with "));
  EXPECT_THAT(plan_on(24 << 20, budget).out, Not(HasSubstr("on CPUs")));
  const ProgramResult device = plan_on(16 << 10, {"plan", "--model", "gpt-mini", "--sequence", "64"});
  EXPECT_THAT(device.out, Not(HasSubstr("this machine's"))) << "which takes no host memory";
}

}  // namespace
}  // namespace tranche::planner
