// How a process finds out from the environment whether it is one of several ranks.
#include <gmock/gmock.h>

#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/launcher.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using testing::AllOf;
using testing::HasSubstr;

using Variables = std::vector<std::pair<const char*, const char*>>;

/// Replaces the environment of the test by that of a launcher.
class Launcher {
 public:
  explicit Launcher(const Variables& variables) {
    for (const char* name : {"OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "PMI_SIZE",
                             "PMI_RANK",
                             "PMIX_RANK",
                             "SLURM_STEP_NUM_TASKS",
                             "SLURM_PROCID",
                             "SLURM_CPUS_PER_TASK",
                             "SLURM_NODEID",
                             "SLURM_STEP_TASKS_PER_NODE",
                             "PBS_TASKNUM",
                             "PBS_NODEFILE",
                             "LSB_DJOB_NUMPROC",
                             "LSF_PM_TASKID",
                             "JSM_NAMESPACE_SIZE",
                             "JSM_NAMESPACE_RANK",
                             "WORLD_SIZE",
                             "TORCHELASTIC_RUN_ID",
                             "RANK"}) {
      set(name, nullptr);
    }
    for (const auto& [name, value] : variables) set(name, value);
  }
  ~Launcher() {
    for (auto before = before_.rbegin(); before != before_.rend(); ++before) {
      put(before->first, before->second ? before->second->c_str() : nullptr);
    }
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

 private:
  static void put(const char* name, const char* value) {
    if (value == nullptr) {
      ::unsetenv(name);
    } else {
      ::setenv(name, value, 1);
    }
  }
  void set(const char* name, const char* value) {
    const char* before = std::getenv(name);
    before_.emplace_back(name, before == nullptr ? std::nullopt : std::optional<std::string>(before));
    put(name, value);
  }
  std::vector<std::pair<const char*, std::optional<std::string>>> before_;
};

std::string refusal(const std::function<void()>& work) {
  try {
    work();
  } catch (const ConfigurationError& error) {
    return error.message();
  }
  return "";
}

TEST(Launcher, TasksThatCannotFindEachOtherAreRefused) {
  const std::vector<Variables> batches{{{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}},
                                       {{"PBS_TASKNUM", "2"}, {"PBS_NODEFILE", "/nodes"}},
                                       {{"LSB_DJOB_NUMPROC", "2"}, {"LSF_PM_TASKID", "1"}},
                                       {{"JSM_NAMESPACE_SIZE", "2"}, {"JSM_NAMESPACE_RANK", "0"}},
                                       {{"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", "none"}},
                                       {{"WORLD_SIZE", "2"}, {"RANK", "0"}}};
  for (const auto& batch : batches) {
    const std::string name = batch[0].first;
    {
      const Launcher tasks(batch);
      EXPECT_THAT(refusal(require_joined_tasks),
                  AllOf(HasSubstr("one of several"), HasSubstr("(" + name + " is 2)"), HasSubstr("no PMI"),
                        HasSubstr("mpirun"), HasSubstr("env -u " + name)));
    }
    {
      auto with_pmi = batch;
      with_pmi.emplace_back("PMIX_RANK", "0");
      const Launcher ranks(with_pmi);
      EXPECT_EQ(refusal(require_joined_tasks), "") << name;
    }
    const Launcher alone(Variables{{batch[0].first, "1"}, batch[1]});
    EXPECT_EQ(refusal(require_joined_tasks), "") << name;
  }
  // A batch script, or the shell of salloc: the allocation has tasks, but this process is none of them.
  const Launcher script(Variables{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}});
  EXPECT_EQ(refusal(require_joined_tasks), "");
}

TEST(Launcher, AWorldOfOneRankIsRefusedWhereMoreWereStarted) {
  for (const auto& [name, value] : {std::pair("OMPI_COMM_WORLD_SIZE", "3"), std::pair("PMI_SIZE", "3"),
                                    std::pair("SLURM_STEP_NUM_TASKS", "3")}) {
    const Launcher ranks(Variables{{name, value}});
    EXPECT_THAT(refusal([] { require_joined_world(1); }),
                AllOf(HasSubstr("started 3 ranks"), HasSubstr("sees one"), HasSubstr("another MPI"),
                      HasSubstr("srun --mpi=list")));
    EXPECT_EQ(refusal([] { require_joined_world(3); }), "");
  }
  // mpirun -n 1 on a node of a larger step: the step's tasks are mpirun's daemons.
  const Launcher one(Variables{{"OMPI_COMM_WORLD_SIZE", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}});
  EXPECT_EQ(refusal([] { require_joined_world(1); }), "");
}

TEST(Launcher, CoresOfARankAreTheLaunchersCount) {
  const Launcher task(Variables{{"SLURM_CPUS_PER_TASK", "6"}});
  EXPECT_EQ(cores_of_rank_by_launcher(), 6);
  const Launcher silent(Variables{});
  EXPECT_EQ(cores_of_rank_by_launcher(), 0);
}

TEST(Launcher, RanksOfANodeAreTheLaunchersCount) {
  const auto ranks = [](const char* list, const char* node) {
    const Launcher step(Variables{{"SLURM_STEP_TASKS_PER_NODE", list}, {"SLURM_NODEID", node}});
    return ranks_of_node_by_launcher();
  };
  EXPECT_EQ(ranks("2(x2)", "1"), 2);
  EXPECT_EQ(ranks("3,1", "0"), 3);
  EXPECT_EQ(ranks("3,1", "1"), 1);
  EXPECT_EQ(ranks("4(x2),3,5(x10)", "2"), 3);
  EXPECT_EQ(ranks("4(x2),3,5(x10)", "12"), 5);
  EXPECT_EQ(ranks("4(x2),3,5(x10)", "13"), 0);
  EXPECT_EQ(ranks("x", "0"), 0);
  const Launcher mpirun(
      {{"OMPI_COMM_WORLD_LOCAL_SIZE", "7"}, {"SLURM_STEP_TASKS_PER_NODE", "1"}, {"SLURM_NODEID", "0"}});
  EXPECT_EQ(ranks_of_node_by_launcher(), 7);
}

TEST(Launcher, TellsTheRankBeforeThereIsACommunicator) {
  const auto rank_with = [](const Variables& variables) {
    const Launcher launcher(variables);
    return detail::rank_by_launcher();
  };
  EXPECT_EQ(rank_with({}), -1);
  EXPECT_EQ(rank_with({{"OMPI_COMM_WORLD_RANK", "3"}}), 3);
  EXPECT_EQ(rank_with({{"PMI_RANK", "0"}}), 0);
  EXPECT_EQ(rank_with({{"PMIX_RANK", "12"}}), 12);
  EXPECT_EQ(rank_with({{"PMIX_RANK", ""}}), -1);
  EXPECT_EQ(rank_with({{"SLURM_PROCID", "4"}}), -1) << "without PMI each task is a run of its own";
}

}  // namespace
}  // namespace tranche
