// Saving by a schedule, and the best checkpoint, on several ranks, stages and meshes and over resumptions.
#include "tranche/training/checkpoint_schedule.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>

#include "checkpoint/folder.h"
#include "offload/file_system.h"
#include "tests/training/trainer_fixture.h"
#include "tranche/core/error.h"

namespace tranche::training {
namespace {

using nlohmann::json;
using test::on_ranks;
using test::Texts;
using test::Trained;
using testing::ElementsAre;
using testing::HasSubstr;
using tools::test::message_of;
using tools::test::TemporaryFolder;

std::vector<std::int64_t> steps_in(const std::string& folder) {
  std::vector<std::int64_t> steps;
  for (const auto& listed : checkpoint::list_checkpoints(detail::posix_file_system(), folder)) {
    EXPECT_TRUE(listed.complete()) << listed.problem;
    steps.push_back(listed.step);
  }
  return steps;
}

json user_of(const std::string& folder, std::int64_t step) {
  const std::string path = detail::join_path(folder, checkpoint::step_name(step));
  return json::parse(checkpoint::open_manifest(detail::posix_file_system(), path).run.user);
}

CheckpointScheduleOptions best_of(const std::string& folder) {
  CheckpointScheduleOptions options;
  options.folder = folder;
  options.user = R"({"name":"a run"})";
  options.keep_last = 1;
  options.keep_best = "a/b";
  return options;
}

std::vector<Evaluation> losses(double loss) {
  return {{"other", {9, 5}}, {"a/b", {loss, 7}}};
}

TEST(CheckpointSchedule, SavesEverySoManyStepsWhenToldAndNoStepTwice) {
  const TemporaryFolder folder;
  const Texts texts(folder);
  for (const int ranks : {1, 2}) {
    const std::string path = folder.path("run" + std::to_string(ranks));
    std::vector<CompletedCheckpoint> completed;  // of rank 0
    on_ranks(ranks, [&](const Trained& trained) {
      CheckpointScheduleOptions options;
      options.folder = path;
      options.every = 2;
      options.user = R"({"name": "a run"})";
      CheckpointSchedule none(trained.engine, {}), schedule(trained.engine, options, [&](const auto&one) {
        if (trained.rank == 0) completed.push_back(one);
      });
      for (int step = 1; step <= 5; ++step) {
        const StepResult result = trained.step(texts);
        none.after_step(result);
        schedule.after_step(result);
      }
      schedule.save();
      schedule.save();
      none.save();
      none.finish();
      schedule.finish();
      EXPECT_EQ(schedule.newest(), path + "/step-00000005");
      EXPECT_EQ(none.newest(), "");
      EXPECT_FALSE(schedule.best().has_value());
    });
    EXPECT_THAT(steps_in(path), ElementsAre(5, 4, 2));
    EXPECT_EQ(user_of(path, 2), json::parse(R"({"name": "a run"})")) << "and nothing more";
    ASSERT_EQ(completed.size(), 3u);
    EXPECT_EQ(completed[1].step, 4);
    EXPECT_EQ(completed[1].path, path + "/step-00000004");
    EXPECT_FALSE(completed[1].best);
    EXPECT_GE(completed[1].seconds, completed[1].pause_seconds);
  }
}

TEST(CheckpointSchedule, KeepsTheBestOnAnyRanksStageAndMesh) {
  const TemporaryFolder folder;
  const Texts texts(folder);
  struct Case {
    int ranks, stage;
    const char* mesh;
  };
  for (const Case& tested : {Case{1, 0, ""}, Case{2, 3, ""}, Case{3, 3, ""}, Case{2, 0, ""},
                             Case{2, 3, "replicate=2, shard=*"}, Case{4, 2, "replicate=2, shard=*"}}) {
    const std::string what = std::to_string(tested.ranks) + std::to_string(tested.stage) + tested.mesh;
    const std::string path = folder.path(what.substr(0, 4));
    std::vector<std::int64_t> best_steps;
    on_ranks(
        tested.ranks,
        [&](const Trained& trained) {
          CheckpointSchedule schedule(trained.engine, best_of(path), [&](const auto& one) {
            if (trained.rank == 0 && one.best) best_steps.push_back(one.step);
          });
          for (const double loss : {3.0, 1.0, 2.0, std::numeric_limits<double>::quiet_NaN(), 1.0, 4.0}) {
            schedule.after_step(trained.step(texts), true);
            schedule.evaluated(losses(loss));
          }
          schedule.save();
          schedule.finish();
          ASSERT_TRUE(schedule.best().has_value());
          EXPECT_EQ(schedule.best()->step, 2);
          EXPECT_EQ(schedule.best()->loss, 1.0);
          EXPECT_EQ(schedule.best()->path, path + "/step-00000002");
        },
        [&](Config& config) {
          config.stage = tested.stage;
          config.mesh = tested.mesh;
        });
    EXPECT_THAT(best_steps, ElementsAre(1, 2)) << what;
    EXPECT_THAT(steps_in(path), ElementsAre(6, 2)) << what;
    EXPECT_EQ(user_of(path, 2), json::parse(R"({"name": "a run", "keep_best": "a/b", "evaluations":
                                  {"other": {"loss": 9.0, "tokens": 5}, "a/b": {"loss": 1.0, "tokens": 7}}})"));
    const auto best = best_checkpoint(path);
    ASSERT_TRUE(best.has_value());
    EXPECT_EQ(best->set, "a/b");
    EXPECT_EQ(best->step, 2);
    EXPECT_EQ(best_checkpoint(path, "other")->loss, 9);
    EXPECT_FALSE(best_checkpoint(path, "another").has_value());
    EXPECT_FALSE(best_checkpoint(folder.path("none")).has_value());
  }
}

TEST(CheckpointSchedule, ARunGoesOnFromTheBestSoFarOnOtherRanks) {
  const TemporaryFolder folder;
  const Texts texts(folder);
  const std::string path = folder.path("run");
  std::vector<std::int64_t> saved;  // by the last run
  const auto run = [&](int ranks, const std::vector<double>& each) {
    saved.clear();
    on_ranks(ranks, [&](const Trained& trained) {
      if (std::filesystem::exists(path)) trained.engine.load(path);
      CheckpointSchedule schedule(trained.engine, best_of(path), [&](const CompletedCheckpoint& one) {
        if (trained.rank == 0) saved.push_back(one.step);
      });
      for (const double loss : each) {
        schedule.after_step(trained.step(texts), true);
        schedule.evaluated(losses(loss));
      }
      schedule.save();
      schedule.finish();
    });
  };
  run(2, {3, 1, 2});
  EXPECT_THAT(steps_in(path), ElementsAre(3, 2));
  run(3, {1.5, 1.25});
  EXPECT_THAT(steps_in(path), ElementsAre(5, 3, 2)) << "3, as no step has been taken from the weights of 5";
  EXPECT_THAT(saved, ElementsAre(5)) << "at its end alone: none of its losses is below the first run's";
  run(1, {0.5, 0.75});
  EXPECT_THAT(steps_in(path), ElementsAre(7, 6));
}

TEST(CheckpointSchedule, LossesOfOtherWindowsAreNotCompared) {
  const TemporaryFolder folder;
  const Texts texts(folder);
  const std::string path = folder.path("run");
  std::vector<std::string> said;  // by rank 0 of the last run
  const auto run = [&](const std::vector<Evaluation>& each) {
    said.clear();
    on_ranks(2, [&](const Trained& trained) {
      if (std::filesystem::exists(path)) trained.engine.load(path);
      CheckpointScheduleOptions options = best_of(path);
      if (trained.rank == 0) options.say = [&](const std::string& line) { said.push_back(line); };
      CheckpointSchedule schedule(trained.engine, options);
      for (const Evaluation& one : each) {
        schedule.after_step(trained.step(texts), true);
        schedule.evaluated({one});
      }
      schedule.save();
      schedule.finish();
    });
  };
  run({{"a/b", {1, 7}}, {"a/b", {2, 7}}});  // as earlier versions recorded it, without a digest
  EXPECT_THAT(steps_in(path), ElementsAre(2, 1));
  run({{"a/b", {1.5, 7}, 0xab}});
  EXPECT_THAT(said, testing::IsEmpty()) << "so many tokens of what may be the same windows";
  EXPECT_EQ(best_checkpoint(path)->step, 1);
  run({{"a/b", {3, 9}, 0xab}, {"a/b", {4, 9}, 0xab}});
  EXPECT_THAT(
      said,
      ElementsAre(path + "/step-00000001 was the best so far, with a loss of 1.0000 over 7 tokens of 'a/b'; "
                         "the new loss is over other windows, so the search for the best starts again"));
  EXPECT_EQ(best_checkpoint(path)->step, 4);
  EXPECT_EQ(user_of(path, 4)["evaluations"]["a/b"]["data"], "00000000000000ab");
  EXPECT_THAT(steps_in(path), ElementsAre(5, 4)) << "the best on the earlier windows is kept no more";
  run({{"a/b", {3.5, 9}, 0xab}});
  EXPECT_THAT(said, testing::IsEmpty());
  EXPECT_EQ(best_checkpoint(path)->step, 4);
  run({{"a/b", {5, 9}, 0xac}});
  EXPECT_EQ(said.size(), 1u);
  EXPECT_EQ(best_checkpoint(path)->step, 7);
  EXPECT_EQ(best_checkpoint(path)->data, 0xacu);
}

TEST(CheckpointSchedule, ASaveThatIsDueWaitsForTheEvaluationAndOneThatDidNotIsDoneAgain) {
  const TemporaryFolder folder;
  const Texts texts(folder);
  const std::string path = folder.path("run");
  on_ranks(2, [&](const Trained& trained) {
    CheckpointScheduleOptions options = best_of(path);
    options.every = 1;
    options.keep_last = 0;
    CheckpointSchedule schedule(trained.engine, options);
    schedule.after_step(trained.step(texts), true);
    schedule.evaluated(losses(3));
    schedule.after_step(trained.step(texts), true);
    schedule.evaluated(losses(4));  // due, but not the best
    schedule.after_step(trained.step(texts));
    schedule.evaluated(losses(2));  // saved earlier
    schedule.after_step(trained.step(texts));
    schedule.finish();
  });
  EXPECT_THAT(steps_in(path), ElementsAre(4, 3, 2, 1));
  EXPECT_EQ(user_of(path, 2)["evaluations"]["a/b"]["loss"], 4);
  EXPECT_EQ(user_of(path, 3)["evaluations"]["a/b"]["loss"], 2);
  EXPECT_FALSE(user_of(path, 4).contains("evaluations"));
  EXPECT_EQ(best_checkpoint(path)->step, 3);
}

// This also holds while the save of the step, the first one of this run, is still being written.
TEST(CheckpointSchedule, AStepWhoseEvaluationIsNotFiniteIsSavedAgainInDoubt) {
  const TemporaryFolder folder;
  const Texts texts(folder);
  on_ranks(2, [&](const Trained& trained) {
    CheckpointScheduleOptions options;
    options.folder = folder.path("doubt");
    options.every = 1;
    CheckpointSchedule schedule(trained.engine, options);
    schedule.after_step(trained.step(texts));
    const double loss = std::numeric_limits<double>::quiet_NaN();
    const std::int64_t tokens = 7;
    trained.engine.begin_evaluation();
    trained.engine.begin_micro_batch();
    trained.engine.end_micro_batch({&loss, DataType::float64, Shape{1}},
                                   {&tokens, DataType::int64, Shape{1}});
    (void)trained.engine.end_evaluation();
    EXPECT_TRUE(trained.engine.in_doubt());
    schedule.evaluated({{"", {loss, tokens}}});
    schedule.finish();
  });
  const std::string path = detail::join_path(folder.path("doubt"), checkpoint::step_name(1));
  EXPECT_TRUE(checkpoint::open_manifest(detail::posix_file_system(), path).run.in_doubt);
}

TEST(CheckpointSchedule, ABestThatIsReplacedIsForgotten) {
  const TemporaryFolder folder;
  const Texts texts(folder);
  const std::string path = folder.path("run");
  CheckpointScheduleOptions options = best_of(path);
  options.every = 1;
  options.keep_last = 9;
  const auto run = [&](std::int64_t from, const std::vector<double>& each, std::int64_t best) {
    on_ranks(2, [&](const Trained& trained) {
      if (from > 0) trained.engine.load(detail::join_path(path, checkpoint::step_name(from)));
      CheckpointSchedule schedule(trained.engine, options);
      for (const double loss : each) {
        schedule.after_step(trained.step(texts), true);
        schedule.evaluated(losses(loss));
      }
      schedule.finish();
      EXPECT_EQ(schedule.best()->step, best);
    });
  };
  run(0, {3, 2, 1}, 3);
  run(1, {2.5, 4}, 2);  // repeats steps 2 and 3
}

TEST(CheckpointSchedule, AFailedSaveIsToldAndTheNextBestIsKept) {
  const TemporaryFolder folder;
  const Texts texts(folder);
  const std::string path = folder.write("run", "a file where the folder would be");
  on_ranks(2, [&](const Trained& trained) {
    // The start looks for the best checkpoint there and finds a file.
    EXPECT_THAT(message_of<CheckpointError>([&] { CheckpointSchedule(trained.engine, best_of(path)); }),
                HasSubstr("run"));
  });
  std::filesystem::remove(path);
  on_ranks(2, [&](const Trained& trained) {
    CheckpointSchedule schedule(trained.engine, best_of(path));
    schedule.after_step(trained.step(texts), true);
    if (trained.rank == 0) folder.write("run", "a file now");
    schedule.evaluated(losses(1));
    EXPECT_THAT(message_of<CheckpointError>([&] { schedule.finish(); }),
                HasSubstr("cannot save step 1 to " + path));
    EXPECT_FALSE(schedule.best().has_value());
    if (trained.rank == 0) std::filesystem::remove(path);
    schedule.after_step(trained.step(texts), true);
    schedule.evaluated(losses(2));
    schedule.finish();
    ASSERT_TRUE(schedule.best().has_value());
    EXPECT_EQ(schedule.best()->step, 2);
  });
  EXPECT_THAT(steps_in(path), ElementsAre(2));
}

TEST(CheckpointSchedule, ALossOverNoTokensIsNeverTheBest) {
  const TemporaryFolder folder;
  on_ranks(1, [&](const Trained& trained) {
    {
      CheckpointSchedule schedule(trained.engine, best_of(folder.path("run")));
      schedule.evaluated({{"a/b", {0, 0}}});
      schedule.save();
      schedule.finish();
      EXPECT_FALSE(schedule.best().has_value());
      EXPECT_EQ(best_checkpoint(folder.path("run")), std::nullopt);
    }
    // A loss of 0 over no tokens, as written by earlier versions.
    const std::string user = R"({"keep_best": "a/b", "evaluations": {"a/b": {"loss": 0.0, "tokens": 0}}})";
    (void)trained.engine.save(folder.path("older"), {.user = user});
    (void)trained.engine.finish_saving();
    EXPECT_EQ(best_checkpoint(folder.path("older")), std::nullopt);
  });
}

TEST(CheckpointSchedule, RefusesWhatItCannotKeep) {
  const TemporaryFolder folder;
  on_ranks(1, [&](const Trained& trained) {
    CheckpointScheduleOptions options = best_of(folder.path("run"));
    CheckpointSchedule schedule(trained.engine, options);
    EXPECT_THAT(message_of<InvalidArgument>([&] {
                  schedule.evaluated({{"other", {1, 1}}});
                }),
                HasSubstr("the best checkpoint is chosen by the loss on 'a/b', which was not evaluated"));
    options.user = "[1]";
    EXPECT_THAT(message_of<InvalidArgument>([&] { CheckpointSchedule(trained.engine, options); }),
                HasSubstr("is no JSON object: [1]"));
    EXPECT_THAT(message_of<InvalidArgument>(
                    [&] { trained.engine.save(folder.path("run"), {.keep_lowest = "loss"}); }),
                HasSubstr("'loss' is no JSON pointer, as /loss is one"));
  });
}

}  // namespace
}  // namespace tranche::training
