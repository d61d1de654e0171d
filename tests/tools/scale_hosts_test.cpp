// The nodes on which a launcher places ranks, derived from a study's arguments.

#include "tools/scale/scale_nodes.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <utility>
#include <vector>

#include "tests/tools/temporary.h"

namespace tranche::tools {
namespace {

constexpr int unknown = -1;

int behind(std::vector<std::string> arguments, int ranks = 8, const char* launcher = "mpirun") {
  ScaleOptions options;
  options.launcher = launcher;
  options.launcher_arguments = std::move(arguments);
  return ranks_per_node(options, "", ranks).value_or(unknown);
}

int on_hosts(const std::string& list, int ranks) {
  ScaleOptions options;
  options.host = list;
  return ranks_per_node(options, "", ranks).value_or(unknown);
}

int in_file(const std::string& text, int ranks) {
  ScaleOptions options;
  options.hostfile = "hosts";
  return ranks_per_node(options, text, ranks).value_or(unknown);
}

TEST(ScaleHosts, OneHostHasAll) {
  EXPECT_EQ(behind({}), 8);
  EXPECT_EQ(behind({"--tag-output", "--bind-to", "core"}), 8);
}

TEST(ScaleHosts, TheFlagComesFirst) {
  ScaleOptions options;
  options.ranks_per_node = 4;
  options.host = "a:8,b:8";
  options.launcher_arguments = {"--map-by", "ppr:2:node"};
  EXPECT_EQ(ranks_per_node(options, "", 16), 4);
  EXPECT_EQ(ranks_per_node(options, "", 2), 2);
}

TEST(ScaleHosts, SlotsOfHosts) {
  EXPECT_EQ(on_hosts("a:8,b:8", 16), 8);
  EXPECT_EQ(on_hosts("a:8,b:8", 12), 8);
  EXPECT_EQ(on_hosts("a:8,b:8", 4), 4);
  EXPECT_EQ(on_hosts("a,b,c", 3), 1);
  EXPECT_EQ(on_hosts("a,a,b,b", 4), 2) << "named once for each slot";
  EXPECT_EQ(on_hosts("a:3,b:2", 5), 3);
  EXPECT_EQ(on_hosts("a:2,b:3", 5), unknown) << "blocks of two and three";
  EXPECT_EQ(on_hosts("a:2,b:3", 4), 2) << "of which only two are used";
  EXPECT_EQ(on_hosts("a:4,b:2,c:4", 10), unknown);
  EXPECT_EQ(on_hosts("a:2,b:2", 8), unknown) << "more than there are slots";
  EXPECT_EQ(on_hosts("a:*", 2), unknown);
  EXPECT_EQ(behind({"--host", "a:4,b:4"}), 4);
  EXPECT_EQ(behind({"-H", "a:2,b:6"}, 4), 2);
}

TEST(ScaleHosts, SlotsOfAFile) {
  EXPECT_EQ(in_file("# rack 1\na slots=8\n\nb slots=8 max_slots=16 # spare\n", 16), 8);
  EXPECT_EQ(in_file("a slots=8\nb slots=8\n", 8), 8);
  EXPECT_EQ(in_file("a slots=4\na slots=4\nb slots=8", 16), 8);
  EXPECT_EQ(in_file("a\nb\n", 2), unknown) << "the launcher counts their cores";
  EXPECT_EQ(in_file("", 2), unknown);
  EXPECT_EQ(behind({"--hostfile", "elsewhere"}), unknown);
}

TEST(ScaleHosts, MappingsOfMpirun) {
  EXPECT_EQ(behind({"--map-by", "ppr:2:node"}), 2);
  EXPECT_EQ(behind({"-map-by", "ppr:2:node:PE=4"}), 2);
  EXPECT_EQ(behind({"--map-by=ppr:4:node"}), 4);
  EXPECT_EQ(behind({"--map-by", "ppr:1:socket"}), unknown);
  EXPECT_EQ(behind({"--map-by", "ppr:x:node"}), unknown);
  EXPECT_EQ(behind({"--map-by", "ppr:2"}), unknown);
  EXPECT_EQ(behind({"--map-by", "slot"}), 8);
  EXPECT_EQ(behind({"--map-by", "slot:SPAN"}), unknown);
  EXPECT_EQ(behind({"--map-by", "node"}), unknown);
  EXPECT_EQ(behind({"-N", "4"}), 4);
  EXPECT_EQ(behind({"-npernode", "4"}), 4);
  EXPECT_EQ(behind({"--pernode"}), 1);
  EXPECT_EQ(behind({"-N"}), unknown);
  EXPECT_EQ(behind({"-N", "16"}), 8);
  EXPECT_EQ(behind({"--rank-by", "node"}), unknown);
  EXPECT_EQ(behind({"--bynode"}), unknown);
}

TEST(ScaleHosts, Srun) {
  EXPECT_EQ(behind({"--nodes", "2"}, 8, "srun"), 4);
  EXPECT_EQ(behind({"-N", "4"}, 8, "srun"), 2) << "nodes, not ranks of one as for mpirun";
  EXPECT_EQ(behind({"--nodes=3"}, 8, "srun"), unknown);
  EXPECT_EQ(behind({"--ntasks-per-node=2", "--nodes=4"}, 8, "srun"), 2);
  EXPECT_EQ(behind({"--ntasks-per-node=2", "--nodes=2"}, 2, "srun"), 1) << "srun uses both nodes";
  EXPECT_EQ(behind({"--nodes=4"}, 2, "srun"), 1) << "and not more than there are ranks";
  EXPECT_EQ(behind({"--nodes", "2", "--distribution=cyclic"}, 8, "srun"), unknown);
  EXPECT_EQ(behind({"--nodes", "2", "-m", "block:block"}, 8, "srun"), 4);
  EXPECT_EQ(behind({}, 8, "srun"), unknown);
  EXPECT_EQ(behind({}, 1, "srun"), 1);
}

/// The allocation in the environment of a batch job; nullptr removes a variable.
Allocation allocation_in(const std::vector<std::pair<const char*, const char*>>& variables) {
  for (const char* name : {"SLURM_JOB_ID", "SLURM_TASKS_PER_NODE", "PBS_NODEFILE", "LSB_HOSTS"}) {
    ::unsetenv(name);
  }
  for (const auto& [name, value] : variables) ::setenv(name, value, 1);
  Allocation allocation = Allocation::of_environment();
  for (const auto& [name, value] : variables) ::unsetenv(name);
  return allocation;
}

TEST(ScaleHosts, AnAllocationIsTheNodesOfTheRuns) {
  ScaleOptions mpirun, srun;
  srun.launcher = "srun";
  const auto slurm = [](const char* counts) {
    return allocation_in({{"SLURM_JOB_ID", "7"}, {"SLURM_TASKS_PER_NODE", counts}});
  };
  EXPECT_EQ(ranks_per_node(mpirun, "", 4, slurm("2(x2)")), 2);
  EXPECT_EQ(ranks_per_node(mpirun, "", 2, slurm("2(x2)")), 2);
  EXPECT_EQ(ranks_per_node(mpirun, "", 4, slurm("3,1")), 3);
  EXPECT_EQ(ranks_per_node(mpirun, "", 8, slurm("2(x2)")), std::nullopt) << "more than there are slots";
  EXPECT_EQ(ranks_per_node(mpirun, "", 8, slurm("2")), 8)
      << "one node, which mpirun may fill beyond its slots";
  EXPECT_EQ(ranks_per_node(mpirun, "", 4, allocation_in({{"LSB_HOSTS", "a a b b"}})), 2);
  const test::TemporaryFolder folder;
  const std::string file = folder.write("nodes", "a\na\nb\nb\n");
  EXPECT_EQ(ranks_per_node(mpirun, "", 4, allocation_in({{"PBS_NODEFILE", file.c_str()}})), 2);
  EXPECT_TRUE(allocation_in({{"PBS_NODEFILE", file.c_str()}}).several());
  EXPECT_FALSE(allocation_in({}).several());
  EXPECT_FALSE(slurm("x(x2)").several());
  // srun receives what the plan assumes.
  const auto told = [&](std::vector<std::string> arguments, int ranks) {
    srun.launcher_arguments = std::move(arguments);
    return nodes_of_run(srun, "", ranks, slurm("2(x2)")).arguments;
  };
  EXPECT_EQ(told({}, 4), (std::vector<std::string>{"--nodes=2", "--ntasks-per-node=2"}));
  EXPECT_EQ(told({}, 2), (std::vector<std::string>{"--nodes=1", "--ntasks-per-node=2"}));
  EXPECT_EQ(told({"--nodes=2"}, 4), (std::vector<std::string>{"--ntasks-per-node=2"})) << "else 3 and 1";
  EXPECT_EQ(told({"--ntasks-per-node=1"}, 2), (std::vector<std::string>{"--nodes=2"}));
  EXPECT_EQ(told({"--nodes=2", "--ntasks-per-node=2"}, 2), std::vector<std::string>{});
}

}  // namespace
}  // namespace tranche::tools
