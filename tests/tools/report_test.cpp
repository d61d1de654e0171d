#include "tools/train/report.h"

#include <gmock/gmock.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "tests/tools/temporary.h"

namespace tranche::tools {
namespace {

using nlohmann::json;

/// A report in its own folder, and its file.
struct Written {
  Written() { report.keep_for(path); }
  std::string text() {
    report.write();
    return test::read_file(path);
  }
  test::TemporaryFolder folder;
  std::string path = folder.path("report.json");
  Report report;
};

TEST(Report, WritesWhatItWasGiven) {
  Written written;
  Report& report = written.report;
  report.set_start(2, 3, R"({"zero_optimization": {"stage": 3}})", "cpu", "gpt-nano", "a.txt");
  StepResult step;
  step.step = 1;
  step.applied = true;
  step.loss = 2.5;
  step.exposed_offload_seconds = 0.5;
  step.exposed_message_seconds = 0.75;
  step.update_seconds = 0.25;
  step.between_seconds = 0.125;
  step.offload = {1, 2, 3, 4};
  step.offload_traffic = {10, 20, 30, 40};
  report.add_step(step);
  report.add_step_digest({{1, 0xabcdef}}, {{2, 3}});
  step.step = 2;
  step.applied = false;
  step.skipped_because = "norm";
  report.add_step(step);
  report.add_validation(1, {3.5, 10});
  report.add_validation(2, {3.25, 10});
  report.set_ngrams({1, 2, 3});
  report.add_processor_seconds({1.5});
  report.set_placement({2, 3, 4, 5});
  report.set_mesh(Mesh::parse("replicate=2, shard=*", 4));
  report.set_stages({{1, 4}, {3, 4}});
  const json document = json::parse(written.text());
  EXPECT_EQ(document["schema"], "tranche-report-1");
  EXPECT_EQ(document["world"], 2);
  EXPECT_EQ(document["config"]["zero_optimization"]["stage"], 3);
  ASSERT_EQ(document["steps"].size(), 2u);
  EXPECT_EQ(document["steps"][0]["weights_digest"], "00000000000000010000000000abcdef");
  EXPECT_EQ(document["steps"][0]["state_digest"], "00000000000000020000000000000003");
  EXPECT_FALSE(document["steps"][1].contains("weights_digest"));
  EXPECT_TRUE(document["checkpoints"].is_array() && document["checkpoints"].empty());
  EXPECT_FALSE(document.contains("resumed") || document.contains("stopped_by"));
  EXPECT_EQ(document["steps"][0]["exposed_offload_seconds"], 0.5);
  EXPECT_EQ(document["steps"][0]["exposed_message_seconds"], 0.75);
  EXPECT_EQ(document["steps"][0]["update_seconds"], 0.25);
  EXPECT_EQ(document["steps"][0]["between_seconds"], 0.125);
  EXPECT_EQ(document["steps"][0]["cpu_seconds"], 1.5);
  EXPECT_FALSE(document["steps"][1].contains("cpu_seconds")) << "only as many as there are";
  EXPECT_EQ(document["mesh"]["axes"], "replicate=2, shard=2");
  EXPECT_EQ(document["mesh"]["coordinates"].size(), 4u);
  EXPECT_EQ(document["mesh"]["coordinates"][2], (nlohmann::json{{"replicate", 1}, {"shard", 0}}));
  EXPECT_EQ(document["pipeline"]["stages"][1],
            json::parse(R"({"stage": 1, "idle_share": 0.75, "waited_seconds": 3.0, "step_seconds": 4.0})"));
  EXPECT_EQ(document["placement"],
            json::parse(R"({"ranks_on_host": 2, "threads": 3, "cores": 4, "host_cores": 5})"));
  EXPECT_EQ(document["steps"][0]["offload"], json::parse(R"({"to_host_seconds": 1.0, "from_host_seconds": 2.0,
      "host_update_seconds": 3.0, "disk_seconds": 4.0})"));
  EXPECT_EQ(document["steps"][0]["offload_bytes"],
            json::parse(R"({"to_host": 10, "from_host": 20, "nvme_read": 30, "nvme_written": 40})"));
  EXPECT_EQ(document["steps"][1]["skipped_because"], "norm");
  EXPECT_EQ(document["validation"].size(), 2u);
  EXPECT_EQ(document["validation_loss"], 3.25) << "the last";
  EXPECT_EQ(document["trigram_entropy"], 3);
}

TEST(Report, HasEverySetsLossAndTheBestCheckpoint) {
  Written written;
  Report& report = written.report;
  for (const double loss : {3.5, 3.25}) {
    report.add_validation(1, {loss, 10}, "web");
    report.add_validation(1, {loss + 1, 20}, "code");
  }
  report.set_best({"c/step-00000004", 4, "code", 4.25});
  const json document = json::parse(written.text());
  EXPECT_EQ(document["validation"][3],
            json::parse(R"({"step": 1, "loss": 4.25, "tokens": 20, "set": "code"})"));
  EXPECT_EQ(document["validation_losses"], json::parse(R"({"web": 3.25, "code": 4.25})"));
  EXPECT_EQ(document["validation_loss"], 3.25) << "of the first";
  EXPECT_EQ(document["best"],
            json::parse(R"({"path": "c/step-00000004", "step": 4, "set": "code", "loss": 4.25})"));
}

TEST(Report, SaysWhereARunCameFromAndWhatItLeft) {
  Written written;
  Report& report = written.report;
  LoadResult loaded;
  loaded.folder = "ckpt/step-00000004";
  loaded.step = 4;
  loaded.samples = 32;
  loaded.world = 3;
  loaded.stage = 2;
  report.set_resumed(loaded, false, {{1, 2}}, {{3, 4}}, {"a is 1, was 2"});
  report.add_checkpoint({8, "ckpt/step-00000008", 0.25, 1.5});
  report.set_stopped("SIGUSR1");
  const json document = json::parse(written.text());
  const json& resumed = document["resumed"];
  EXPECT_EQ(resumed["path"], "ckpt/step-00000004");
  EXPECT_EQ(resumed["weights_only"], false);
  EXPECT_EQ(resumed["step"], 4);
  EXPECT_EQ(resumed["samples"], 32);
  EXPECT_EQ(resumed["world"], 3);
  EXPECT_EQ(resumed["stage"], 2);
  EXPECT_EQ(resumed["weights_digest"], "00000000000000010000000000000002");
  EXPECT_EQ(resumed["state_digest"], "00000000000000030000000000000004");
  EXPECT_EQ(resumed["changes"][0], "a is 1, was 2");
  ASSERT_EQ(document["checkpoints"].size(), 1u);
  EXPECT_EQ(document["checkpoints"][0]["step"], 8);
  EXPECT_EQ(document["checkpoints"][0]["path"], "ckpt/step-00000008");
  EXPECT_EQ(document["checkpoints"][0]["pause_seconds"], 0.25);
  EXPECT_EQ(document["checkpoints"][0]["seconds"], 1.5);
  EXPECT_EQ(document["stopped_by"], "SIGUSR1");
}

TEST(Report, StaysJsonWhateverHappens) {
  Written written;
  Report& report = written.report;
  StepResult step;
  step.loss = std::numeric_limits<double>::quiet_NaN();
  step.gradient_norm = std::numeric_limits<double>::infinity();
  report.add_step(step);
  report.set_sample("not \xff utf-8");
  const json document = json::parse(written.text());
  EXPECT_TRUE(document["steps"][0]["loss"].is_null());
  EXPECT_TRUE(document["steps"][0]["grad_norm"].is_null());
  EXPECT_EQ(document["sample"], "not \xef\xbf\xbd utf-8");
}

TEST(Report, HasTheBytesOfOneDocumentHoweverManySteps) {
  Written written;
  Report& report = written.report;
  report.set_start(1, 0, R"({"a": {"b": []}})", "cpu", "gpt-nano", "a.txt");
  std::vector<double> seconds;
  const auto check = [&] {
    const std::string text = written.text();
    EXPECT_EQ(nlohmann::ordered_json::parse(text).dump(1) + "\n", text);
    return json::parse(text)["steps"].size();
  };
  EXPECT_EQ(check(), 0u);
  StepResult step;
  for (step.step = 1; step.step <= 1000; ++step.step) {
    step.loss = 1.0 / static_cast<double>(step.step);
    step.skipped_because = step.step % 3 == 0 ? "\n \"quoted\"" : "";
    report.add_step(step);
    if (step.step % 5 == 0) report.add_step_digest({{1, 2}}, {{3, 4}});
    if (step.step % 7 == 0) report.add_validation(step.step, {0.1, 10});
    if (step.step % 11 == 0) report.add_checkpoint({step.step, "c", 0.25, 1.5});
    seconds.push_back(0.5 * static_cast<double>(step.step));
    if (seconds.size() == 64) report.add_processor_seconds(std::exchange(seconds, {}));
  }
  EXPECT_EQ(check(), 1000u);
  const json document = json::parse(written.text());
  EXPECT_EQ(document["steps"][959]["cpu_seconds"], 480.0);
  EXPECT_FALSE(document["steps"][960].contains("cpu_seconds"));
  EXPECT_EQ(document["steps"][999]["step"], 1000);
  EXPECT_EQ(document["validation"].size(), 142u);
  EXPECT_EQ(document["checkpoints"].size(), 90u);
  EXPECT_THAT(written.folder.names(), testing::ElementsAre("report.json")) << "what waits has no name";
}

TEST(Report, KeepsNothingWhereNobodyReadsIt) {
  Report report;
  report.add_step({});
  report.add_step_digest({{1, 2}}, {{3, 4}});
  report.add_processor_seconds({1, 2});
  report.add_checkpoint({8, "c", 0.25, 1.5});
  report.add_validation(1, {3.5, 10});
  report.write();
}

TEST(Placement, SaysWhereThreadsWaitForCores) {
  const auto note = [](int ranks, int threads, int cores, int host) {
    return note_on_cores({.ranks_on_node = ranks, .threads = threads, .cores = cores, .node_cores = host});
  };
  EXPECT_EQ(note(2, 1, 2, 2), "");
  EXPECT_EQ(note(1, 1, 64, 64), "");
  EXPECT_EQ(note(64, 1, 1, 64), "") << "bound to a core each, and all of them busy";
  EXPECT_EQ(note(1, 2, 2, 64), "") << "a container of two cores";
  EXPECT_EQ(note(4, 1, 2, 2),
            "4 ranks of 1 thread share 2 cores of this node: fewer of either would be as fast");
  EXPECT_EQ(note(1, 500, 2, 2),
            "1 rank of 500 threads share 2 cores of this node: fewer of either would be as fast");
  EXPECT_EQ(note(2, 1, 1, 64),
            "this rank may run on 1 of the node's 64 cores; where it was mpirun that bound it, mpirun "
            "--bind-to none lifts that");
  EXPECT_EQ(note(2, 16, 1, 64),
            "this rank may run on 1 of the node's 64 cores, which its 16 threads share; where it was "
            "mpirun that bound it, mpirun --bind-to none lifts that");
}

TEST(Placement, SaysThatThreadsOfOpenMpAreNotRead) {
  EXPECT_EQ(note_on_openmp("8", 2),
            "OMP_NUM_THREADS=8 is not read: a rank has 2 threads; --threads 8 sets them");
  EXPECT_EQ(note_on_openmp("2,4", 1),
            "OMP_NUM_THREADS=2,4 is not read: a rank has 1 thread; --threads 2 sets them");
  for (const char* given : {static_cast<const char*>(nullptr), "", "0", "1", "2", "many"})
    EXPECT_EQ(note_on_openmp(given, 2), "");
}

TEST(Placement, SaysThatABatchScriptStartsOneRankForManyTasks) {
  EXPECT_EQ(
      note_on_tasks("4", false),
      "Slurm's allocation has 4 tasks (SLURM_NTASKS), and this run is one rank; srun --mpi=pmix, or mpirun, "
      "starts a rank for each");
  for (const char* none : {static_cast<const char*>(nullptr), "", "1"})
    EXPECT_EQ(note_on_tasks(none, false), "");
  EXPECT_EQ(note_on_tasks("4", true), "");  // mpirun -n 1, on purpose
}

}  // namespace
}  // namespace tranche::tools
