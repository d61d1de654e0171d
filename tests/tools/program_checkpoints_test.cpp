// Saving and resuming through the program on one rank.

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "checkpoint/run_lease.h"
#include "tests/tools/program_fixture.h"

namespace tranche::tools {
namespace {

using nlohmann::json;
using test::ProgramResult;
using test::read_file;
using test::TemporaryFolder;
using test::tiny_train;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::UnorderedElementsAre;

class ProgramCheckpoints : public testing::Test {
 protected:
  std::string folder(const std::string& name = "ckpt") const { return files_.path(name); }
  ProgramResult train(const std::vector<std::string>& more) const {
    return test::run(tiny_train(files_, more));
  }
  /// Trains with a report and returns it.
  json report(std::vector<std::string> more, std::string* out = nullptr, int status = 0) const {
    more.insert(more.end(), {"--report", files_.path("r.json")});
    std::filesystem::remove(files_.path("r.json"));  // a run that trains nothing leaves a report as it is
    const ProgramResult result = train(more);
    EXPECT_EQ(result.status, status) << result.errors;
    if (out != nullptr) *out = result.out;
    return result.status == status ? json::parse(read_file(files_.path("r.json"))) : json();
  }
  void refused(int status, const std::vector<std::string>& more,
               const std::vector<std::string>& texts) const {
    const ProgramResult result = train(more);
    EXPECT_EQ(result.status, status) << result.errors;
    for (const std::string& text : texts) EXPECT_THAT(result.errors, HasSubstr(text));
  }
  std::vector<std::string> names(const std::string& name = "ckpt") const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder(name))) {
      found.push_back(entry.path().filename().string());
    }
    return found;
  }
  TemporaryFolder files_;
};

TEST_F(ProgramCheckpoints, AResumedRunHasTheBitsOfOneThatNeverStopped) {
  const std::vector<std::string> schedule{"--set", "scheduler.type=WarmupLR", "--set",
                                          "scheduler.params.warmup_num_steps=4"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), schedule.begin(), schedule.end());
    return more;
  };
  const json whole = report(with({"--steps", "5", "--digest-every", "1"}));
  std::string out;
  const json first = report(with({"--steps", "3", "--checkpoint-dir", folder(), "--save-every", "2"}), &out);
  EXPECT_THAT(out, AllOf(HasSubstr("step-00000002 is complete: training paused for"),
                         HasSubstr("step-00000003 is complete")));
  ASSERT_EQ(first["checkpoints"].size(), 2u) << "at step 2, and the last one";
  EXPECT_EQ(first["checkpoints"][0]["step"], 2);
  EXPECT_EQ(first["checkpoints"][1]["path"], folder() + "/step-00000003");
  EXPECT_GE(first["checkpoints"][1]["seconds"], first["checkpoints"][1]["pause_seconds"]);
  EXPECT_THAT(names(), UnorderedElementsAre("latest", "run.lock", "step-00000002", "step-00000003"));
  EXPECT_FALSE(first.contains("resumed"));

  const json rest = report(with({"--steps", "5", "--checkpoint-dir", folder(), "--resume", "latest"}), &out);
  EXPECT_EQ(rest["weights_digest"], whole["weights_digest"]);
  EXPECT_EQ(rest["state_digest"], whole["state_digest"]);
  EXPECT_EQ(rest["validation_loss"], whole["validation_loss"]);
  ASSERT_EQ(rest["steps"].size(), 2u);
  for (const std::size_t i : {0u, 1u}) {
    for (const char* key : {"step", "loss", "grad_norm", "lr"}) {
      EXPECT_EQ(rest["steps"][i][key], whole["steps"][3 + i][key]) << key << " of step " << 4 + i;
    }
  }
  EXPECT_EQ(rest["resumed"]["step"], 3);
  EXPECT_EQ(rest["resumed"]["samples"], 3);
  EXPECT_EQ(rest["resumed"]["weights_digest"], whole["steps"][2]["weights_digest"]);
  EXPECT_EQ(rest["resumed"]["state_digest"], whole["steps"][2]["state_digest"]);
  EXPECT_THAT(rest["resumed"]["changes"], IsEmpty()) << rest["resumed"];
  EXPECT_THAT(out, AllOf(HasSubstr("resumed"), HasSubstr("step 3, 3 samples, saved by 1 rank at stage 0"),
                         HasSubstr("trained 2 steps, to step 5,"), Not(HasSubstr("changed"))));
  EXPECT_THAT(names(), testing::Contains("step-00000005"));
  const json manifest = json::parse(read_file(folder() + "/step-00000005/manifest.json"));
  EXPECT_EQ(manifest["lineage"].size(), 2u);
  EXPECT_EQ(manifest["branches"], (json{0, 3})) << "behind the first run's third update";
}

TEST_F(ProgramCheckpoints, ResumingBeginsAnewOnlyWhereNothingElseLies) {
  const std::vector<std::string> resumed{"--steps", "4", "--checkpoint-dir", folder(), "--resume", "latest"};
  ASSERT_EQ(test::run(tiny_train(files_, {"--steps", "2", "--checkpoint-dir", folder()})).status, 0);
  std::filesystem::rename(folder() + "/step-00000002", folder() + "/step-2");
  const ProgramResult renamed = test::run(tiny_train(files_, resumed));
  EXPECT_EQ(renamed.status, 4);
  EXPECT_THAT(
      renamed.errors,
      AllOf(HasSubstr("--resume latest: there is no checkpoint named step-NNNNNNNN in " + folder()),
            HasSubstr("step-2: a checkpoint of step 2 under another name; rename it to step-00000002"),
            HasSubstr("latest: it names step-00000002")));
  EXPECT_THAT(names(), UnorderedElementsAre("latest", "run.lock", "step-2")) << "and nothing has changed";
  // A new run may begin beside the files that a run leaves before its first save, and beside files of users.
  std::filesystem::remove_all(folder());
  std::filesystem::create_directories(folder() + "/step-00000002.0123456789abcdef.tmp");
  std::filesystem::create_directories(folder() + "/curves");
  for (const char* name :
       {"run.lock", "slurm-17.out", "report.json", "curves/events.out.tfevents.1.host.2"}) {
    (void)files_.write("ckpt/" + std::string(name), "");
  }
  std::string out;
  (void)report(resumed, &out);
  EXPECT_THAT(out, HasSubstr("no checkpoint in " + folder() + " yet: training starts from the beginning"));
  // Files with another program's model are refused.
  std::filesystem::remove_all(folder());
  std::filesystem::create_directories(folder());
  (void)files_.write("ckpt/model.safetensors", "x");
  const ProgramResult foreign = test::run(tiny_train(files_, resumed));
  EXPECT_EQ(foreign.status, 4);
  EXPECT_THAT(foreign.errors, HasSubstr("\n  model.safetensors"));
}

TEST_F(ProgramCheckpoints, RuinedWeightsTakeNoGoodOnesPlace) {
  // With and without a checkpoint at the step that ruins the weights, after which it is unknown whether they
  // are sound.
  for (const char* every : {"3", "1"}) {
    std::filesystem::remove_all(folder());
    const std::vector<std::string> flags{"--checkpoint-dir", folder(), "--keep-last", "1",
                                         "--save-every",     every,    "--resume",    "latest"};
    const auto with = [&](std::vector<std::string> more) {
      more.insert(more.end(), flags.begin(), flags.end());
      return more;
    };
    const json good = report(with({"--steps", "6"}));
    ASSERT_THAT(names(), UnorderedElementsAre("latest", "run.lock", "step-00000006"));
    std::string out;
    (void)report(with({"--steps", "12", "--lr", "1e30", "--set", "gradient_clipping=0"}), &out, 6);
    EXPECT_THAT(out, AllOf(HasSubstr("loss nan"), Not(HasSubstr("-nan"))));
    EXPECT_THAT(
        out, HasSubstr("note: the checkpoint that is due at step " + std::string(*every == '1' ? "8" : "9") +
                       " waits for a step that is not skipped: the weights may be ruined"));
    EXPECT_THAT(out,
                AllOf(HasSubstr("SKIPPED"), HasSubstr("note: the weights of " + folder() +
                                                      "/step-00000012 may be ruined: 5 steps in a row were "
                                                      "skipped; older checkpoints stay")));
    EXPECT_THAT(out, Not(HasSubstr("due at step 12"))) << "the last step is saved all the same";
    EXPECT_THAT(names(), AllOf(testing::Contains("step-00000006"), testing::Contains("step-00000012")));
    const json next = report(with({"--steps", "14", "--lr", "0.001"}), &out);
    EXPECT_EQ(next["resumed"]["step"], 6);
    EXPECT_EQ(next["resumed"]["weights_digest"], good["weights_digest"]);
    EXPECT_THAT(out, AllOf(HasSubstr("note"),
                           HasSubstr("passed over: " + folder() +
                                     "/step-00000012: its weights may be ruined: the last 5 "
                                     "steps before it were skipped"),
                           Not(HasSubstr("SKIPPED"))));
    EXPECT_THAT(names(), testing::Contains("step-00000014"));
    EXPECT_EQ(report(with({"--steps", "15", "--lr", "0.001"}))["resumed"]["step"], 14);
  }
}

TEST_F(ProgramCheckpoints, ARunThatSkipsTooManyStepsSavesItsDoubt) {
  const std::vector<std::string> flags{"--checkpoint-dir", folder(), "--save-every", "1", "--keep-last", "2"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), flags.begin(), flags.end());
    return more;
  };
  (void)report(with({"--steps", "6"}));
  refused(6,
          with({"--steps", "30", "--resume", "latest", "--lr", "1e30", "--set", "gradient_clipping=0",
                "--set", "tranche.maximum_consecutive_skips=4"}),
          {"4 steps in a row were skipped"});
  const json next = report(with({"--steps", "8", "--resume", "latest", "--lr", "0.001"}));
  EXPECT_EQ(next["resumed"]["step"], 6) << "step 7 ruined the weights, and was saved as a good one";
}

TEST_F(ProgramCheckpoints, StepsThatTheLossScalerSkipsLeaveNoDoubt) {
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--checkpoint-dir", folder(), "--save-every", "1", "--resume", "latest",
                             "--dtype", "fp16", "--set", "fp16.initial_scale_power=40"});
    return more;
  };
  std::string out;
  (void)report(with({"--steps", "4"}), &out);
  EXPECT_THAT(out, AllOf(HasSubstr("the checkpoint that is due at step 1 waits for a step that is not "
                                   "skipped, as this one was skipped"),
                         Not(HasSubstr("ruined"))));
  EXPECT_THAT(names(), UnorderedElementsAre("latest", "run.lock", "step-00000004"))
      << "with the scale that has fallen";
  const json rest = report(with({"--steps", "40"}), &out);
  EXPECT_EQ(rest["resumed"]["step"], 4);
  EXPECT_THAT(out, AllOf(HasSubstr("SKIPPED"), Not(HasSubstr("ruined"))));
  EXPECT_THAT(names(), AllOf(Not(testing::Contains("step-00000005")), testing::Contains("step-00000040")));
}

TEST_F(ProgramCheckpoints, TheBestIsKeptMarkedAndResumed) {
  const std::vector<std::string> sets{
      "--validation-data", "near=" + files_.write("near.txt", test::some_text(700)),
      "--validation-data", "far=" + files_.write("far.txt", std::string(600, 'z')),
      "--checkpoint-dir",  folder(),
      "--keep-last",       "1"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), sets.begin(), sets.end());
    return more;
  };
  // A learning rate at which "far" gets worse with every step, because the model forgets what it never saw.
  std::string out;
  const json first = report(
      with({"--steps", "6", "--eval-every", "2", "--keep-best", "--best-by", "far", "--lr", "0.02"}), &out);
  ASSERT_EQ(first["validation"].size(), 6u) << "both sets after steps 2, 4 and 6";
  std::map<std::int64_t, double> far;
  for (const json& entry : first["validation"]) {
    if (entry["set"] == "far") far[entry["step"]] = entry["loss"];
  }
  const auto least = std::min_element(far.begin(), far.end(),
                                      [](const auto& a, const auto& b) { return a.second < b.second; });
  ASSERT_EQ(least->first, 2) << "or there is nothing to keep: " << first["validation"];
  EXPECT_EQ(first["best"]["step"], 2);
  EXPECT_EQ(first["best"]["loss"], far[2]);
  EXPECT_EQ(first["best"]["set"], "far");
  EXPECT_EQ(first["validation_loss"], first["validation_losses"]["near"]);
  EXPECT_THAT(names(), UnorderedElementsAre("latest", "run.lock", "step-00000002", "step-00000006"));
  EXPECT_THAT(out, AllOf(HasSubstr("step 2: validation loss of near "), HasSubstr("loss of far "),
                         HasSubstr("held out: far"), HasSubstr("; the best so far\n"),
                         HasSubstr("best checkpoint: " + folder() + "/step-00000002, with a loss of ")));

  const ProgramResult list = test::checkpoint_command({"list", folder()});
  EXPECT_THAT(list.out, HasSubstr(fmt::format("complete, the best: loss {:.4f} on far\n", far[2])));
  const json listed = json::parse(test::checkpoint_command({"list", folder(), "--json"}).out);
  EXPECT_EQ(listed["best"], (json{{"name", "step-00000002"}, {"step", 2}, {"set", "far"}, {"loss", far[2]}}));

  // Commands that take the newest checkpoint name the best one.
  const std::string newest = folder() + "/step-00000006";
  const auto note = [&](const std::string& taken) {
    return taken + " is the newest checkpoint; the best, with a loss of " + fmt::format("{:.4f}", far[2]) +
           " on far, is " + folder() + "/step-00000002\n";
  };
  const auto noted = [&](std::vector<std::string> command) {
    const ProgramResult result = test::run(command);
    EXPECT_EQ(result.status, 0) << result.errors;
    return result.out + result.errors;
  };
  const std::string data = files_.write("data.txt", test::some_text(700));
  const auto evaluated = [&](const std::string& from) {
    return noted({"evaluate", "--model", "gpt-nano", "--data", data, "--sequence", "16", "--threads", "1",
                  "--from", from});
  };
  const auto exported = [&](const std::string& from, const char* to) {
    return noted({"checkpoint", "export", from, "--to", files_.path(to)});
  };
  const auto generated = [&](const std::string& from) {
    return noted({"generate", "--from", from, "--prompt", "a", "--tokens", "1"});
  };
  for (const std::string& text : {evaluated(folder()), exported(folder(), "all"), generated(folder())}) {
    EXPECT_THAT(text, HasSubstr(note(newest)));
  }
  for (const std::string& text : {evaluated(newest), exported(newest, "one"), generated(newest)}) {
    EXPECT_THAT(text, Not(HasSubstr("is the newest checkpoint"))) << "it was asked for";
  }

  // Continues from the end; the best one stays.
  const json second =
      report(with({"--steps", "8", "--keep-best", "--best-by", "far", "--lr", "0.02", "--resume", "latest"}));
  EXPECT_EQ(second["resumed"]["step"], 6);
  EXPECT_EQ(second["best"]["step"], 2);
  EXPECT_THAT(names(), UnorderedElementsAre("latest", "run.lock", "step-00000002", "step-00000008"));
  // Continues from the best, by the set that the newest checkpoint of the folder names.
  const json third = report(with({"--steps", "3", "--resume", "best"}), &out);
  EXPECT_EQ(third["resumed"]["path"], folder() + "/step-00000002");
  EXPECT_EQ(third["steps"][0]["loss"], first["steps"][2]["loss"]) << "with the bits of the first run";
  EXPECT_FALSE(third.contains("best")) << "it keeps none";
  refused(4, with({"--resume", "best", "--best-by", "near"}),
          {"--resume best: no checkpoint in " + folder() + " has a recorded loss on 'near'", "--keep-best",
           "--resume latest takes the newest"});
}

TEST_F(ProgramCheckpoints, TheBestOfAnUnnamedSet) {
  std::string out;
  const json fresh = report({"--checkpoint-dir", folder(), "--resume", "best", "--keep-best"}, &out);
  EXPECT_THAT(out,
              AllOf(HasSubstr("no checkpoint in " + folder() + " yet: training starts from the beginning"),
                    HasSubstr("/step-00000003, with a loss of"), HasSubstr(" on the held-out windows\n")));
  EXPECT_EQ(fresh["best"]["step"], 3);
  EXPECT_EQ(fresh["best"]["set"], "validation");
  EXPECT_EQ(fresh["best"]["loss"], fresh["validation_loss"]);
  EXPECT_FALSE(fresh.contains("validation_losses"));
  EXPECT_FALSE(fresh["validation"][0].contains("set"));
  report({"--checkpoint-dir", folder("plain")});
  refused(4, {"--checkpoint-dir", folder("plain"), "--resume", "best"},
          {"--resume best: no checkpoint in " + folder("plain") +
           " has a recorded loss; --keep-best records one"});
}

TEST_F(ProgramCheckpoints, ACheckpointIsNoFolderOfARun) {
  report({"--checkpoint-dir", folder()});
  const std::string one = folder() + "/step-00000003";
  for (const std::string& inside : {one, one + "/logs/run"}) {
    refused(2, {"--checkpoint-dir", inside},
            {"--checkpoint-dir '" + inside + "': " + one + " is a checkpoint",
             "give the folder of its run, " + folder()});
  }
  refused(2, {"--checkpoint-dir", one, "--resume", "latest"}, {one + " is a checkpoint"});
  EXPECT_FALSE(std::filesystem::exists(one + "/run.lock")) << "nothing is left in it";
}

TEST_F(ProgramCheckpoints, ExportsAndImportsKeepOutOfCheckpoints) {
  report({"--checkpoint-dir", folder()});
  const std::string one = folder() + "/step-00000003";
  const auto says = [](const std::vector<std::string>& command, int status, const std::string& text) {
    const test::ProgramResult result = test::run(command);
    EXPECT_EQ(result.status, status) << result.errors;
    EXPECT_THAT(result.errors, HasSubstr(text));
  };
  for (const std::string& inside : {one, one + "/exported"}) {
    says({"checkpoint", "export", one, "--to", inside}, 4, one + " is a checkpoint: name another folder");
  }
  says({"checkpoint", "export", one, "--to", folder()}, 4,
       "it holds the checkpoints of a run: name another folder");
  const std::string exported = folder("exported");
  EXPECT_EQ(test::run({"checkpoint", "export", one, "--to", exported}).status, 0);
  says({"checkpoint", "import", exported, "--to", one}, 4, one + " is a checkpoint; name another folder");
  std::filesystem::copy_file(exported + "/model.safetensors", folder() + "/model.safetensors");
  says({"generate", "--from", folder(), "--prompt", "a", "--tokens", "1"}, 4,
       "it holds checkpoints and model.safetensors too: give one of them");
}

TEST_F(ProgramCheckpoints, ALinkToACheckpointIsNamedAndARenamedOneHasItsOwnStep) {
  report({"--checkpoint-dir", folder(), "--save-every", "2"});
  const auto listed = [&] { return test::run({"checkpoint", "list", folder()}).out; };
  std::filesystem::rename(folder() + "/step-00000002", folder() + "/step-00000007");
  EXPECT_THAT(listed(), AllOf(HasSubstr("\n2  "), Not(HasSubstr("\n7  "))));
  std::filesystem::remove_all(folder() + "/step-00000007");
  std::filesystem::rename(folder() + "/step-00000003", folder("archive"));
  std::filesystem::create_directory_symlink(folder("archive"), folder() + "/step-00000003");
  const std::string link = folder() + "/step-00000003 is a link, which is not followed here";
  EXPECT_THAT(listed(), HasSubstr(link));
  refused(4, {"--checkpoint-dir", folder(), "--resume", "latest"}, {link});
}

TEST_F(ProgramCheckpoints, AResumeThatNamesNothingIsToldSo) {
  report({"--checkpoint-dir", folder()});
  refused(2, {"--checkpoint-dir", folder(), "--resume", "lastest"},
          {"--resume 'lastest': there is nothing of this name; did you mean 'latest'?"});
  refused(
      2, {"--checkpoint-dir", folder(), "--resume", "step-00000003"},
      {"--resume 'step-00000003': there is nothing of this name; '" + folder() + "/step-00000003' is there"});
  refused(2, {"--checkpoint-dir", folder(), "--resume", "elsewhere/x"},
          {"it is a checkpoint's path, or 'latest' or 'best' of --checkpoint-dir"});
}

TEST_F(ProgramCheckpoints, TheFirstStartOfALineThatResumesBeginsFromTheBeginning) {
  std::string out;
  const json fresh = report({"--checkpoint-dir", folder(), "--resume", "latest"}, &out);
  EXPECT_THAT(out, HasSubstr("no checkpoint in " + folder() + " yet: training starts from the beginning"));
  EXPECT_EQ(fresh["steps"].size(), 3u);
  const json again = report({"--checkpoint-dir", folder(), "--resume", "latest"}, &out);
  EXPECT_THAT(out, AllOf(HasSubstr("step 3 of 3 is reached already: nothing to train"),
                         HasSubstr("trained 0 steps, to step 3,")));
  EXPECT_EQ(again["weights_digest"], fresh["weights_digest"]);
  EXPECT_THAT(again["checkpoints"], IsEmpty());
}

TEST_F(ProgramCheckpoints, SamplesGoOnInSequenceWhenTheBatchChanged) {
  report({"--checkpoint-dir", folder(), "--steps", "3", "--micro-batch", "4"});
  std::string out;
  const json second = report({"--checkpoint-dir", folder(), "--steps", "5", "--micro-batch", "3",
                              "--accumulate", "2", "--resume", "latest"},
                             &out);
  EXPECT_EQ(second["resumed"]["samples"], 12);
  EXPECT_THAT(second["resumed"]["changes"], UnorderedElementsAre("train_batch_size is 6, was 4",
                                                                 "train_micro_batch_size_per_gpu is 3, was 4",
                                                                 "gradient_accumulation_steps is 2, was 1"));
  EXPECT_THAT(out, HasSubstr("changed                train_batch_size is 6, was 4\n"));
  const std::string manifest = read_file(folder() + "/step-00000005/manifest.json");
  EXPECT_EQ(json::parse(manifest)["run"]["samples"], 12 + 2 * 6);
}

TEST_F(ProgramCheckpoints, ABatchThatChangedBeginsWhereTheOldOneEnded) {
  // The weights do not change and there is no dropout, so the loss of a step shows which samples it used.
  const std::string model = files_.write("config.json", R"({"model_type": "gpt2", "n_layer": 1, "n_head": 2,
      "n_embd": 32, "vocab_size": 256, "n_positions": 64, "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0})");
  const std::vector<std::string> still{"--model", model, "--lr", "0", "--dtype", "fp32"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), still.begin(), still.end());
    return more;
  };
  const json whole = report(with({"--steps", "4", "--micro-batch", "3", "--accumulate", "2"}));
  report(with({"--checkpoint-dir", folder(), "--steps", "3", "--micro-batch", "4"}));
  const json rest = report(with({"--checkpoint-dir", folder(), "--steps", "5", "--micro-batch", "3",
                                 "--accumulate", "2", "--resume", "latest"}));
  ASSERT_EQ(rest["steps"].size(), 2u);
  for (const std::size_t i : {0u, 1u}) {  // samples 12 .. 17 and 18 .. 23
    EXPECT_EQ(rest["steps"][i]["loss"], whole["steps"][2 + i]["loss"]);
    EXPECT_NE(rest["steps"][i]["loss"], whole["steps"][i]["loss"]);
  }
}

TEST_F(ProgramCheckpoints, WhatTheCommandLineChangesIsSaidInALineEach) {
  report({"--checkpoint-dir", folder()});
  std::string out;
  const json changed = report({"--checkpoint-dir", folder(), "--resume", "latest", "--steps", "4", "--lr",
                               "0.0001", "--stage", "1", "--seed", "9", "--sequence", "8"},
                              &out);
  EXPECT_THAT(
      changed["resumed"]["changes"],
      UnorderedElementsAre("optimizer.params.lr is 0.0001, was 0.001", "zero_optimization.stage is 1, was 0",
                           "tranche.seed is 9, was 1234", "--sequence is 8, was 16"));
  EXPECT_EQ(changed["steps"][0]["lr"], 0.0001);
}

TEST_F(ProgramCheckpoints, OtherBytesInADataFileOfTheSameLengthAreSaid) {
  const std::string text = test::some_text(4000);
  const std::vector<std::string> flags{"--checkpoint-dir", folder(), "--resume",
                                       "latest",           "--data", files_.write("mine.txt", text)};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), flags.begin(), flags.end());
    return more;
  };
  report(flags);
  EXPECT_THAT(report(with({"--steps", "4"}))["resumed"]["changes"], IsEmpty());
  std::string other = text;
  other[2000] = '#';
  files_.write("mine.txt", other);
  std::string out;
  const json changed = report(with({"--steps", "5"}), &out);
  ASSERT_EQ(changed["resumed"]["changes"].size(), 1u) << changed["resumed"];
  const std::string line = changed["resumed"]["changes"][0];
  EXPECT_THAT(line, testing::MatchesRegex("the digest of --data is [0-9a-f]+, was [0-9a-f]+"));
  EXPECT_THAT(out, HasSubstr("changed                " + line + "\n"));
}

TEST_F(ProgramCheckpoints, WhatEarlierVersionsHadByDefaultStaysUnlessTheFileChooses) {
  const json first = report({"--checkpoint-dir", folder()});
  ASSERT_EQ(first["config"]["bf16"]["enabled"], true);
  ASSERT_EQ(first["config"]["gradient_clipping"], 1.0);
  const std::string silent = files_.write("silent.json", R"({"optimizer": {"type": "AdamW"}})");
  std::string out;
  const json kept =
      report({"--checkpoint-dir", folder(), "--resume", "latest", "--steps", "4", "--config", silent}, &out);
  EXPECT_EQ(kept["config"]["bf16"]["enabled"], true);
  EXPECT_EQ(kept["config"]["communication_data_type"], "bf16");
  EXPECT_EQ(kept["config"]["gradient_clipping"], 1.0);
  EXPECT_THAT(kept["resumed"]["changes"], IsEmpty());
  EXPECT_THAT(
      out, AllOf(HasSubstr("bf16.enabled: not given: stays true, as the run was saved (in a new run it is "
                           "false, which is fp32); write it to choose"),
                 HasSubstr("gradient_clipping: not given: stays 1.0, as the run was saved (in a new run it "
                           "is 0, which is off); write it to choose")));
  const std::string chosen =
      files_.write("chosen.json", R"({"bf16": {"enabled": false}, "gradient_clipping": 0})");
  const json changed =
      report({"--checkpoint-dir", folder(), "--resume", "latest", "--steps", "5", "--config", chosen}, &out);
  EXPECT_THAT(
      changed["resumed"]["changes"],
      UnorderedElementsAre("bf16.enabled is false, was true", "communication_data_type is 'fp32', was 'bf16'",
                           "gradient_clipping is 0.0, was 1.0"));
  EXPECT_THAT(out, Not(HasSubstr("as the run was saved")));
  // A new run, and one that loads only weights, has DeepSpeed's defaults.
  const json anew = report({"--resume-weights-only", folder(), "--config", silent});
  EXPECT_EQ(anew["config"]["bf16"]["enabled"], false);
  EXPECT_EQ(anew["config"]["gradient_clipping"], 0.0);
}

TEST_F(ProgramCheckpoints, MomentsThatAnotherOptimizerDropsAreNamed) {
  report({"--checkpoint-dir", folder()});
  std::string out;
  report({"--checkpoint-dir", folder(), "--resume", "latest", "--steps", "4", "--set", "optimizer.type=SGD"},
         &out);
  EXPECT_THAT(out, HasSubstr("optimizer SGD has no use for exp_avg, exp_avg_sq of " + folder() +
                             "/step-00000003 (saved by AdamW): dropped, and not in later checkpoints"));
}

TEST_F(ProgramCheckpoints, OfTheNumericsThatChangedTheNoteHasOnlyWhatDiffers) {
  std::string out;
  report({"--checkpoint-dir", folder()});
  report({"--checkpoint-dir", folder(), "--resume", "latest", "--steps", "4", "--threads", "2"}, &out);
  EXPECT_THAT(out,
              HasSubstr("in the numerics fingerprint '1 threads a rank' is '2 threads a rank' now: bits may "
                        "differ from here on"));
}

TEST_F(ProgramCheckpoints, RetentionKeepsTheLastAndTheMultiples) {
  report({"--checkpoint-dir", folder(), "--steps", "7", "--save-every", "1", "--keep-last", "2",
          "--keep-every", "3"});
  EXPECT_THAT(names(),
              UnorderedElementsAre("latest", "run.lock", "step-00000003", "step-00000006", "step-00000007"));
}

TEST_F(ProgramCheckpoints, WeightsAloneStartANewRun) {
  const json first = report({"--checkpoint-dir", folder()});
  std::string out;
  const std::vector<std::string> line{"--checkpoint-dir",      folder("tuned"), "--resume", "latest",
                                      "--resume-weights-only", folder(),        "--lr",     "0.01"};
  const json tuned = report(line, &out);
  EXPECT_THAT(out, AllOf(HasSubstr("weights from           " + folder() + "/step-00000003 (step 3)"),
                         HasSubstr("training starts from --resume-weights-only"), Not(HasSubstr("changed"))));
  EXPECT_EQ(tuned["resumed"]["weights_only"], true);
  EXPECT_EQ(tuned["resumed"]["weights_digest"], first["weights_digest"]);
  EXPECT_EQ(tuned["steps"][0]["step"], 1);
  EXPECT_NE(tuned["weights_digest"], first["weights_digest"]);
  // When the same command is repeated after the end, it continues its own run.
  const json again = report(line, &out);
  EXPECT_EQ(again["resumed"]["weights_only"], false);
  EXPECT_EQ(again["weights_digest"], tuned["weights_digest"]);
}

TEST_F(ProgramCheckpoints, EvaluateTakesWeightsFromACheckpoint) {
  const json trained = report({"--checkpoint-dir", folder(), "--dtype", "fp32"});
  const ProgramResult result =
      test::run({"evaluate", "--model", "gpt-nano", "--data", files_.path("tiny.txt"), "--sequence", "16",
                 "--dtype", "fp32", "--threads", "1", "--from", folder(), "--report", files_.path("e.json")});
  ASSERT_EQ(result.status, 0) << result.errors;
  EXPECT_THAT(result.out, HasSubstr("validation loss of " + folder() + "/step-00000003: "));
  const json evaluated = json::parse(read_file(files_.path("e.json")));
  EXPECT_EQ(evaluated["validation_loss"], trained["validation_loss"]);
  EXPECT_EQ(evaluated["weights_digest"], trained["weights_digest"]);
  EXPECT_EQ(evaluated["resumed"]["step"], 3);
  // Without --sequence the training's sequence length applies, so the loss is the run's own.
  const ProgramResult without = test::run(
      {"evaluate", "--model", "gpt-nano", "--data", files_.path("tiny.txt"), "--from", folder(), "--threads",
       "1", "--dtype", "fp32", "--debug-peak-seconds", "0.01", "--report", files_.path("e2.json")});
  ASSERT_EQ(without.status, 0) << without.errors;
  EXPECT_EQ(json::parse(read_file(files_.path("e2.json")))["validation_loss"], trained["validation_loss"]);
  EXPECT_THAT(without.out,
              HasSubstr("--sequence: not given: 16, as " + folder() + "/step-00000003 was trained with"));
  EXPECT_THAT(result.out, Not(HasSubstr("was trained on sequences")));
  const ProgramResult longer =
      test::run({"evaluate", "--model", "gpt-nano", "--data", files_.path("tiny.txt"), "--sequence", "32",
                 "--threads", "1", "--from", folder()});
  ASSERT_EQ(longer.status, 0) << longer.errors;
  EXPECT_THAT(longer.out, HasSubstr("note                   " + folder() +
                                    "/step-00000003 was trained on sequences of 16 tokens, this run has 32: "
                                    "their losses cannot be compared; --sequence 16 makes them comparable"));
}

TEST_F(ProgramCheckpoints, AResumeTakesTheSequencesOfItsRun) {
  report({"--checkpoint-dir", folder()});
  const auto resumed = [&](const std::string& from, const std::string& to) {
    std::vector<std::string> line{"train",
                                  "--model",
                                  "gpt-nano",
                                  "--data",
                                  files_.path("tiny.txt"),
                                  "--threads",
                                  "1",
                                  "--steps",
                                  "4",
                                  "--eval-batches",
                                  "1",
                                  "--micro-batch",
                                  "1",
                                  "--debug-peak-seconds",
                                  "0.01",
                                  "--checkpoint-dir",
                                  to,
                                  "--resume",
                                  from};
    return test::run(line);
  };
  for (const auto& [from, to] : {std::pair(folder() + "/step-00000003", folder("other")),
                                 std::pair(std::string("latest"), folder())}) {
    const ProgramResult result = resumed(from, to);
    ASSERT_EQ(result.status, 0) << result.errors;
    EXPECT_THAT(result.out, AllOf(HasSubstr("windows of 16 tokens to train"), Not(HasSubstr("--sequence is")),
                                  HasSubstr("--sequence: not given: 16, as " + folder() +
                                            "/step-00000003 was trained with")));
  }
  EXPECT_THAT(resumed("latest", folder("new")).out, HasSubstr("windows of 64 tokens to train"))
      << "a run that begins";
  EXPECT_THAT(resumed(folder("none"), folder("newer")).errors,
              HasSubstr("cannot open checkpoint " + folder("none")));
}

TEST_F(ProgramCheckpoints, AnotherModelOrTokenizerIsRefusedWithBothSides) {
  report({"--checkpoint-dir", folder()});
  const std::string other = files_.write(
      "config.json",
      R"({"model_type": "gpt2", "n_layer": 3, "n_head": 2, "n_embd": 32, "vocab_size": 256, "n_positions": 64})");
  refused(4, {"--checkpoint-dir", folder(), "--resume", "latest", "--model", other},
          {folder() + "/step-00000003 is of another model", "n_layer is 2 there, 3 here"});
  refused(4, {"--resume-weights-only", folder(), "--model", other}, {"n_layer is 2 there, 3 here"});
  std::vector<std::uint16_t> tokens;
  for (int i = 0; i < 2000; ++i) tokens.push_back(static_cast<std::uint16_t>(i * i % 251));
  const std::string data = files_.write("n.bin", test::nanogpt_tokens(tokens));
  refused(4, {"--checkpoint-dir", folder(), "--resume", "latest", "--data", data},
          {"was trained on bytes, but --data holds tokens below 256", "--resume-weights-only"});
  std::string out;
  report({"--resume-weights-only", folder(), "--data", data}, &out);
  EXPECT_THAT(out, HasSubstr("the same numbers mean other text"));
}

TEST_F(ProgramCheckpoints, AnotherEpsilonOfTheWeightsModelIsSaid) {
  report({"--checkpoint-dir", folder()});
  const std::string other = files_.write(
      "config.json",
      R"({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 256, "n_positions": 64,
          "layer_norm_epsilon": 0.5, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0})");
  std::string out;
  report({"--resume-weights-only", folder(), "--model", other}, &out);
  EXPECT_THAT(out, HasSubstr("the model's layer_norm_epsilon is 0.5, was 1e-05"));
}

TEST_F(ProgramCheckpoints, TextIsRefusedForWeightsOfAnotherTokenizer) {
  const std::string model = files_.write(
      "config.json",
      R"({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 300, "n_positions": 64})");
  std::vector<std::uint16_t> tokens;
  for (int i = 0; i < 2000; ++i) tokens.push_back(static_cast<std::uint16_t>(i * i % 299));
  const std::string data = files_.write("n.bin", test::nanogpt_tokens(tokens));
  report({"--model", model, "--checkpoint-dir", folder(), "--data", data});
  const std::string text = files_.path("tiny.txt"),
                    weights = "but the weights of " + folder() + "/step-00000003 are of";
  refused(
      2, {"--model", model, "--resume-weights-only", folder()},
      {"--data '" + text + "' holds bytes, " + weights + " tokens below 300, whose numbers mean other text",
       "tranche tokenize --data FILE --tokenizer FOLDER --out FILE.safetensors", "--data-format text"});
  files_.write("tokenizer.json", "{}");
  refused(2, {"--model", model, "--resume-weights-only", folder()},
          {"--tokenizer '" + std::filesystem::path(model).parent_path().string() + "' --out"});
  std::string out;
  report({"--model", model, "--resume-weights-only", folder(), "--data-format", "text"}, &out);
  EXPECT_THAT(out, HasSubstr("the same numbers mean other text"));
  const ProgramResult evaluated = test::run({"evaluate", "--model", model, "--data", text, "--sequence", "16",
                                             "--threads", "1", "--from", folder()});
  EXPECT_EQ(evaluated.status, 2);
  EXPECT_THAT(evaluated.errors, HasSubstr("holds bytes, " + weights));
}

TEST_F(ProgramCheckpoints, APartialResumeTakesWhatBothModelsHaveAndReportsEachDifference) {
  const json first = report({"--checkpoint-dir", folder()});
  const std::string other = files_.write(
      "config.json",
      R"({"model_type": "gpt2", "n_layer": 3, "n_head": 2, "n_embd": 32, "vocab_size": 256, "n_positions": 64})");
  refused(4, {"--resume", folder(), "--model", other}, {"n_layer is 2 there, 3 here", "--partial"});
  std::string out;
  const std::string from = folder() + "/step-00000003";
  const json grown = report({"--resume", folder(), "--model", other, "--partial", "--rename",
                             "transformer.h.1.*=transformer.h.2.*", "--steps", "5"},
                            &out);
  const auto& differences = grown["resumed"]["differences"];
  EXPECT_EQ(differences.size(), 24u) << "12 tensors renamed, 12 missing";
  EXPECT_THAT(differences.get<std::vector<std::string>>(),
              testing::IsSupersetOf(
                  {"tensor transformer.h.1.ln_1.weight of " + from + ": renamed transformer.h.2.ln_1.weight",
                   "tensor transformer.h.1.ln_1.weight is not in " + from + ": it stays as it is"}));
  for (const auto& line : differences)
    EXPECT_THAT(out, HasSubstr("note                   " + line.get<std::string>()));
  EXPECT_THAT(out, HasSubstr("changed                the model's n_layer is 3, was 2"));
  EXPECT_EQ(grown["resumed"]["step"], 3);
  EXPECT_EQ(grown["steps"][0]["step"], 4);
  // Back to two layers: the third is skipped, and the first two have their old weights.
  const json shrunk = report({"--resume-weights-only", folder(), "--partial", "--checkpoint-dir",
                              folder("small"), "--resume", "latest"});
  EXPECT_THAT(shrunk["resumed"]["differences"], IsEmpty());
  EXPECT_EQ(shrunk["resumed"]["weights_digest"], first["weights_digest"]);
  // The run's own checkpoints are complete, so the command that started it continues it.
  const json again = report({"--resume-weights-only", folder(), "--partial", "--rename", "none.*=other.*",
                             "--checkpoint-dir", folder("small"), "--resume", "latest"});
  EXPECT_EQ(again["resumed"]["weights_only"], false);
  refused(2, {"--partial"},
          {"--partial says how the tensors of --resume DIR or --resume-weights-only DIR are taken"});
  refused(2, {"--partial", "--checkpoint-dir", folder(), "--resume", "latest"}, {"--partial says how"});
  refused(2, {"--rename", "a=b"}, {"--rename says how"});
  refused(2, {"--resume", folder(), "--rename", "a"}, {"--rename 'a' is not OLD=NEW"});
}

TEST_F(ProgramCheckpoints, WhatIsNotThereOrDamagedIsRefused) {
  refused(4, {"--resume", folder("none")}, {"no complete checkpoint in " + folder("none")});
  report({"--checkpoint-dir", folder()});
  std::filesystem::resize_file(folder() + "/step-00000003/shard-00000-of-00001.h5", 5000);
  // It must not start from the beginning, which would silently lose the run.
  refused(4, {"--checkpoint-dir", folder(), "--resume", "latest"}, {"shard-00000-of-00001.h5", "truncated"});
  refused(4, {"--resume", folder() + "/step-00000003"}, {"truncated"});
}

TEST_F(ProgramCheckpoints, AFolderInUseIsRefusedUnlessTheRunGoesOnInIt) {
  report({"--checkpoint-dir", folder()});
  refused(2, {"--checkpoint-dir", folder()},
          {"--checkpoint-dir '" + folder() + "' holds checkpoints of an earlier run, the newest of step 3",
           "--resume latest"});
  refused(2, {"--checkpoint-dir", folder(), "--resume-weights-only", folder()}, {"earlier run"});
  report({"--checkpoint-dir", folder("b")});
  refused(2, {"--checkpoint-dir", folder("b"), "--resume", folder()}, {"earlier run"});
  // Back to an earlier step of the run.
  report({"--checkpoint-dir", folder(), "--resume", "latest", "--steps", "5"});
  const json back =
      report({"--checkpoint-dir", folder(), "--resume", folder() + "/step-00000003/", "--steps", "4"});
  EXPECT_EQ(back["resumed"]["step"], 3);
}

TEST_F(ProgramCheckpoints, AFolderThatAnotherProcessHoldsIsRefusedUntilThatHasDied) {
  std::filesystem::create_directories(folder());
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto lease = checkpoint::RunLease::take(folder());
    if (::write(ready[1], "x", 1) == 1) ::pause();
    ::_exit(0);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  for (const std::vector<std::string>& more : {std::vector<std::string>{}, {"--resume", "latest"}}) {
    std::vector<std::string> flags{"--checkpoint-dir", folder()};
    flags.insert(flags.end(), more.begin(), more.end());
    refused(4, flags, {folder() + " is in use by process " + std::to_string(child)});
  }
  EXPECT_THAT(names(), ElementsAre("run.lock"));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  report({"--checkpoint-dir", folder()});
  EXPECT_THAT(read_file(folder() + "/run.lock"), IsEmpty()) << "given back at the end";
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(ProgramCheckpoints, TheBestOnOtherDataIsNotCompared) {
  const std::vector<std::string> texts{files_.write("easy.txt", std::string(4000, 'z')),
                                       files_.write("hard.txt", test::some_text(4000))};
  const auto train = [&](const std::string& steps, const std::string& text, const std::string& batches,
                         std::string* out) {
    return report({"--validation-data", "v=" + text, "--eval-batches", batches, "--keep-best",
                   "--checkpoint-dir", folder(), "--resume", "latest", "--data", texts[0], "--steps", steps},
                  out);
  };
  std::string out;
  const double easy = train("2", texts[0], "1", &out)["best"]["loss"];
  const json hard = train("4", texts[1], "1", &out);
  EXPECT_THAT(out, HasSubstr("note: " + folder() + "/step-00000002 was the best so far, with a loss of " +
                             fmt::format("{:.4f}", easy)));
  EXPECT_EQ(hard["best"]["step"], 4);
  EXPECT_GT(hard["best"]["loss"], easy) << "or nothing was tested";
  EXPECT_EQ(train("6", texts[1], "3", &out)["best"]["step"], 6);
  EXPECT_THAT(out,
              HasSubstr("the new loss is over other windows, so the search for the best starts again\n"));
  (void)train("7", texts[1], "3", &out);
  EXPECT_THAT(out, Not(HasSubstr("other windows")));
}

TEST_F(ProgramCheckpoints, ADamagedNewestOneIsPassedOverUnlessToldOtherwise) {
  report({"--checkpoint-dir", folder(), "--save-every", "2", "--steps", "4"});
  {
    const std::string shard = folder() + "/step-00000004/shard-00000-of-00001.h5";
    std::fstream file(shard, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(std::filesystem::file_size(shard) / 2));
    file.put('\x5a');
    file.put('\xa5');
  }
  const std::vector<std::string> line{"--checkpoint-dir", folder(), "--resume", "latest", "--steps", "5"};
  std::vector<std::string> strict = line;
  strict.emplace_back("--resume-strict");
  refused(4, strict, {"step-00000004/shard-00000-of-00001.h5"});
  std::string out;
  const json resumed = report(line, &out);
  EXPECT_EQ(resumed["resumed"]["step"], 2);
  EXPECT_THAT(out, AllOf(HasSubstr("passed over: "), HasSubstr("step-00000004/shard-00000-of-00001.h5"),
                         HasSubstr("resumed                " + folder() + "/step-00000002")));
  // A missing manifest is noticed before anything is read.
  std::filesystem::remove(folder() + "/step-00000005/manifest.json");
  refused(4, strict, {"--resume-strict: no complete checkpoint in " + folder() + "/step-00000005"});
  refused(2, {"--resume-strict"}, {"--resume-strict says what --resume latest does"});
}

TEST_F(ProgramCheckpoints, StateInAnotherFormatIsConvertedWhereThatIsAskedFor) {
  report({"--checkpoint-dir", folder(), "--save-every", "2", "--steps", "2"});
  std::vector<std::string> line{"--checkpoint-dir", folder(), "--resume", "latest",
                                "--steps",          "3",      "--set",    "tranche.moments=block8"};
  refused(4, line,
          {"exp_avg of tensor ", " is in fp32 in " + folder() + "/step-00000002, but in block8",
           "--convert-state"});
  line.emplace_back("--convert-state");
  const json resumed = report(line);
  EXPECT_EQ(resumed["resumed"]["step"], 2);
  refused(2, {"--convert-state"}, {"--convert-state says how --resume takes optimizer state; give that too"});
}

TEST_F(ProgramCheckpoints, AFolderThatCannotBeWrittenIsRefusedBeforeTraining) {
  const std::string file = files_.write("file", "x");
  const ProgramResult result = train({"--checkpoint-dir", file + "/ckpt"});
  EXPECT_EQ(result.status, 4);
  EXPECT_THAT(result.errors, AllOf(HasSubstr("--checkpoint-dir '" + file + "/ckpt' cannot be written"),
                                   HasSubstr("File exists"), HasSubstr("nothing was trained yet")));
  EXPECT_EQ(result.out, "");
}

TEST_F(ProgramCheckpoints, ASignalEndsTheRunWithACheckpointAndAStatusOfItsOwn) {
  for (const int signal : {SIGUSR1, SIGTERM}) {
    const std::string name = "stopped" + std::to_string(signal);
    // The signal arrives during start-up, is kept pending, and is noticed in the first step.
    sigset_t set{}, before{};
    sigemptyset(&set);
    sigaddset(&set, signal);
    pthread_sigmask(SIG_BLOCK, &set, &before);
    raise(signal);
    std::string out;
    const json stopped = report({"--checkpoint-dir", folder(name), "--steps", "1000000"}, &out, 9);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    const std::string by = signal == SIGUSR1 ? "SIGUSR1" : "SIGTERM";
    EXPECT_THAT(out, AllOf(HasSubstr("stopped after step 1 of 1000000 by " + by),
                           HasSubstr(folder(name) +
                                     "/step-00000001 is complete: the same command with --resume latest"),
                           Not(HasSubstr("validating"))));
    EXPECT_EQ(stopped["stopped_by"], by);
    ASSERT_EQ(stopped["checkpoints"].size(), 1u);
    const json rest =
        report({"--checkpoint-dir", folder(name), "--resume", "latest", "--set", "tranche.threads=1"});
    EXPECT_EQ(rest["weights_digest"], report({})["weights_digest"]);
  }
}

TEST_F(ProgramCheckpoints, ASignalDuringAValidationSavesAtOnceAndTheResumedRunMakesItUp) {
  const std::string held_out = files_.write("long.txt", test::some_text(16 << 20));
  for (const std::vector<std::string>& best : {std::vector<std::string>{}, {"--keep-best"}}) {
    const std::string name = best.empty() ? "validating" : "validating_best",
                      metrics = files_.path(name + ".m");
    const auto with = [&](std::vector<std::string> more) {
      more.insert(more.end(), {"--checkpoint-dir", folder(name), "--save-every", "1", "--eval-every", "1",
                               "--validation-data", held_out, "--metrics", metrics});
      more.insert(more.end(), best.begin(), best.end());
      return more;
    };
    bool saved_before = false;
    std::atomic<bool> over = false;  // the run has ended
    std::thread person([&] {         // the line of a step is written before its validation begins
      while (!std::filesystem::exists(metrics) || read_file(metrics).empty()) ::usleep(1000);
      const std::string manifest = folder(name) + "/step-00000001/manifest.json";
      for (; best.empty() && !saved_before && !over; ::usleep(1000))
        saved_before = std::filesystem::exists(manifest);
      if (!over) ::kill(::getpid(), SIGTERM);
    });
    std::string out;
    const json stopped = report(with({"--steps", "3", "--eval-batches", "0"}), &out, 9);
    over = true;
    person.join();
    EXPECT_EQ(saved_before, best.empty()) << "a checkpoint that waits for no loss is complete before";
    EXPECT_THAT(out, AllOf(HasSubstr("stopped after step 1 of 3 by SIGTERM"),
                           HasSubstr("/step-00000001 is complete"), Not(HasSubstr("validation loss"))));
    EXPECT_THAT(stopped["validation"], IsEmpty());
    EXPECT_THAT(names(name), UnorderedElementsAre("latest", "run.lock", "step-00000001"));
    const std::vector<std::string> rest = with({"--steps", "3", "--eval-batches", "1", "--resume", "latest"});
    const json resumed = report(rest, &out);
    EXPECT_THAT(out, AllOf(HasSubstr("step 1: validation loss "), HasSubstr("step 2: validation loss ")));
    ASSERT_EQ(resumed["validation"].size(), 3u) << "of steps 1, 2 and 3";
    EXPECT_EQ(resumed["validation"][0]["step"], 1);
    EXPECT_EQ(resumed.contains("best"), !best.empty());
    EXPECT_THAT(report(rest)["validation"].size(), 1u) << "the checkpoint of step 3 has nothing due";
  }
}

TEST_F(ProgramCheckpoints, AStatusForRunsThatNoSignalStopsIsRefused) {
  refused(2, {"--stopped-status", "75"}, {"--stopped-status 75 needs --checkpoint-dir DIR"});
  refused(2, {"--stopped-status", "126", "--checkpoint-dir", folder()}, {"--stopped-status is 126"});
  EXPECT_EQ(report({"--stopped-status", "75", "--checkpoint-dir", folder(), "--max-seconds", "1e-9"})["steps"]
                .size(),
            1u);
}

TEST_F(ProgramCheckpoints, AnInterruptEndsTheRunWithACheckpointAndTheStatusThatIsAskedFor) {
  const std::string metrics = files_.path("steps.jsonl");
  std::thread person([&] {
    while (!std::filesystem::exists(metrics) || test::read_file(metrics).empty()) ::usleep(1000);
    ::kill(::getpid(), SIGINT);
  });
  std::string out;
  const json stopped = report({"--checkpoint-dir", folder("interrupted"), "--metrics", metrics, "--steps",
                               "1000000", "--stopped-status", "75"},
                              &out, 75);
  person.join();
  EXPECT_THAT(
      out, AllOf(HasSubstr("SIGINT: the run is saved after step "), HasSubstr("a second one ends it at once"),
                 HasSubstr(" of 1000000 by SIGINT, "), HasSubstr(" is complete: the same command")));
  EXPECT_EQ(stopped["stopped_by"], "SIGINT");
  ASSERT_EQ(stopped["checkpoints"].size(), 1u);
}

}  // namespace
}  // namespace tranche::tools
