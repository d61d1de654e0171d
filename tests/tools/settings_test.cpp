#include "tools/train/settings.h"

#include <gmock/gmock.h>

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

#include "tests/tools/temporary.h"
#include "tranche/core/error.h"
#include "tranche/training/tokenize.h"

namespace tranche::tools {
namespace {

using test::message_of;
using test::TemporaryFolder;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;

Options train(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"train", "--model", "gpt-nano"});
  return parse_arguments(arguments);
}

TEST(Settings, FlagsAndSetOverrideTheFile) {
  const TemporaryFolder folder;
  const std::string file = folder.write("ds.json", R"({
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1},
    "fp16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}, "tranche": {"seed": 9}})");
  const Settings as_file = resolve_settings(train({"--config", file}), 2);
  EXPECT_EQ(as_file.config.stage, 1);
  EXPECT_EQ(as_file.config.train_batch_size, 16);
  EXPECT_EQ(as_file.config.precision.compute, DataType::float16);
  EXPECT_EQ(as_file.config.seed, 9u);
  const Settings flags = resolve_settings(
      train({"--config", file, "--stage", "3", "--micro-batch", "1", "--accumulate", "5", "--dtype", "bf16",
             "--seed", "4", "--lr", "0.25", "--threads", "2", "--device-memory", "1GiB"}),
      2);
  EXPECT_EQ(flags.config.stage, 3);
  EXPECT_EQ(flags.config.train_batch_size, 10);
  EXPECT_EQ(flags.batch.micro_batch, 1);
  EXPECT_EQ(flags.batch.accumulation, 5);
  EXPECT_EQ(flags.batch.ranks, 2);
  EXPECT_EQ(flags.config.precision.compute, DataType::bfloat16);
  EXPECT_EQ(flags.config.seed, 4u);
  EXPECT_EQ(flags.config.optimizer.learning_rate, 0.25);
  EXPECT_EQ(flags.config.threads, 2);
  EXPECT_EQ(flags.config.device_memory_limit, std::int64_t{1} << 30);
  const Settings set =
      resolve_settings(train({"--config", file, "--stage", "3", "--set", "zero_optimization.stage=2"}), 1);
  EXPECT_EQ(set.config.stage, 2);
}

TEST(Settings, FlagsSayWhereStateLives) {
  const Config config =
      resolve_settings(
          train({"--stage", "3", "--offload-optimizer", "cpu", "--offload-param", "nvme", "--nvme-path",
                 "/a \"folder\"", "--offload-ratio", "0.5", "--offload-activations", "--host-memory", "2GiB",
                 "--host-state", "3MiB", "--nvme-space", "1TiB"}),
          2)
          .config;
  EXPECT_EQ(config.offload.optimizer, OffloadTier::cpu);
  EXPECT_EQ(config.offload.parameters, OffloadTier::nvme);
  EXPECT_EQ(config.offload.nvme_path, "/a \"folder\"");
  EXPECT_EQ(config.offload.ratio, 0.5);
  EXPECT_TRUE(config.offload.activations);
  EXPECT_TRUE(config.activation_checkpointing) << "activations that are not kept cannot move";
  EXPECT_EQ(config.offload.host_memory_limit, std::int64_t{2} << 30);
  EXPECT_EQ(config.offload.nvme_limit, std::int64_t{1} << 40);
  EXPECT_EQ(config.offload.host_state, 3 << 20);
  EXPECT_EQ(
      resolve_settings(train({"--offload-optimizer", "nvme", "--nvme-path", "/a", "--host-state", "auto"}), 2)
          .config.offload.host_state,
      -1);
  EXPECT_THROW((void)resolve_settings(train({"--host-state", "much"}), 2), ConfigurationError);
  EXPECT_FALSE(resolve_settings(train({}), 2).config.offload.any());
}

TEST(Settings, OffloadFlagsWinOverTheFile) {
  const TemporaryFolder folder;
  const std::string blocks = folder.write("ds.json", R"({"zero_optimization": {"stage": 3,
      "offload_optimizer": {"device": "nvme", "nvme_path": "/old", "ratio": 0.25},
      "offload_param": {"device": "nvme", "nvme_path": "/old"}}})");
  const Config config =
      resolve_settings(train({"--config", blocks, "--offload-optimizer", "cpu", "--nvme-path", "/new"}), 1)
          .config;
  EXPECT_EQ(config.offload.optimizer, OffloadTier::cpu);
  EXPECT_EQ(config.offload.ratio, 0.25);
  EXPECT_EQ(config.offload.parameters, OffloadTier::nvme);
  EXPECT_EQ(config.offload.nvme_path, "/new");
  const std::string older = folder.write(
      "older.json", R"({"zero_optimization": {"stage": 3, "cpu_offload": true, "cpu_offload_param": true}})");
  EXPECT_EQ(resolve_settings(train({"--config", older}), 1).config.offload.parameters, OffloadTier::cpu);
  const Config off =
      resolve_settings(train({"--config", older, "--offload-optimizer", "none", "--offload-param", "none"}),
                       1)
          .config;
  EXPECT_FALSE(off.offload.any());
}

TEST(Settings, WithoutAFileTheProgramHasDefaultsOfItsOwn) {
  const Config own = resolve_settings(train({}), 2).config;
  EXPECT_EQ(own.precision.compute, DataType::bfloat16);
  EXPECT_EQ(own.gradient_clipping, 1.0);
  EXPECT_EQ(own.optimizer.type, "AdamW");
  EXPECT_THAT(own.notes, testing::IsEmpty());
  const auto set = [](const std::string& text) { return resolve_settings(train({"--set", text}), 1).config; };
  EXPECT_EQ(set("fp16.enabled=true").precision.compute, DataType::float16);
  EXPECT_EQ(set("fp16={\"enabled\": true}").precision.compute, DataType::float16);
  EXPECT_EQ(set("bfloat16.enabled=false").precision.compute, DataType::float32);
  EXPECT_EQ(set("bf16.enabled=false").precision.compute, DataType::float32);
  EXPECT_EQ(set("gradient_clipping=0").gradient_clipping, 0);
  const TemporaryFolder folder;
  const Config file = resolve_settings(train({"--config", folder.write("ds.json", "{}")}), 1).config;
  EXPECT_EQ(file.precision.compute, DataType::float32);
  EXPECT_EQ(file.gradient_clipping, 0);
}

TEST(Settings, FlagsFindOlderKeysInFilesWithComments) {
  const TemporaryFolder folder;
  const std::string file =
      folder.write("ds.json", "# ours\n{zero_optimization: {stage: 3, cpu_offload: True,},}");
  EXPECT_EQ(resolve_settings(train({"--config", file}), 1).config.offload.optimizer, OffloadTier::cpu);
  EXPECT_FALSE(
      resolve_settings(train({"--config", file, "--offload-optimizer", "none"}), 1).config.offload.any());
  EXPECT_THAT(
      message_of<ConfigurationError>([&] {
        resolve_settings(train({"--config", folder.write("bad.json", "{a: 'x' /* "), "--dtype", "fp32"}), 1);
      }),
      HasSubstr("is not JSON: line 1, column 9: the comment that begins here has no end"));
}

TEST(Settings, DtypeReplacesWhicheverNameTheFileUses) {
  const TemporaryFolder folder;
  const std::string older = folder.write("ds.json", R"({"bfloat16": {"enabled": true}})");
  EXPECT_EQ(resolve_settings(train({"--config", older, "--dtype", "fp32"}), 1).config.precision.compute,
            DataType::float32);
  EXPECT_EQ(resolve_settings(train({"--config", older, "--dtype", "fp16"}), 1).config.precision.compute,
            DataType::float16);
  EXPECT_THAT(overrides_of(train({"--dtype", "fp32"}), "{}"),
              ElementsAre("bf16.enabled=false", "fp16.enabled=false"));
  EXPECT_THAT(message_of<ConfigurationError>([] {
                resolve_settings(train({"--dtype", "fp64"}), 1);
              }),
              HasSubstr("--dtype fp64 is not one of fp32, bf16, fp16"));
}

TEST(Settings, FlagsAndSetApplyInTheOrderOfTheCommandLine) {
  EXPECT_THAT(
      overrides_of(train({"--stage",
                          "3",
                          "--lr",
                          "0.5",
                          "--set",
                          "optimizer.params.lr=0.25",
                          "--stage",
                          "0",
                          "--lr=0.125",
                          "--set",
                          "optimizer.params.lr=0.0625",
                          "--offload-activations",
                          "--nvme-path",
                          "d",
                          "--dtype",
                          "fp32",
                          "--offload-optimizer",
                          "cpu",
                          "--checkpoint-dir",
                          "c",
                          "--threads",
                          "1"}),
                   R"({"zero_optimization": {"cpu_offload": true}})"),
      ElementsAre("tranche.save_buffer=true", "optimizer.params.lr=0.25", "zero_optimization.stage=0",
                  "optimizer.params.lr=0.125", "optimizer.params.lr=0.0625", "tranche.threads=1",
                  "zero_optimization.offload_optimizer.device=\"cpu\"", "zero_optimization.cpu_offload=false",
                  "zero_optimization.offload_optimizer.nvme_path=\"d\"",
                  "zero_optimization.offload_param.nvme_path=\"d\"",
                  "activation_checkpointing.cpu_checkpointing=true", "tranche.activation_checkpointing=true",
                  "bf16.enabled=false", "fp16.enabled=false"));
  const Config behind = read_config(train({"--set", "optimizer.params.lr=0.5", "--lr", "0.01"}), 1);
  EXPECT_EQ(behind.optimizer.learning_rate, 0.01);
  EXPECT_THAT(behind.notes,
              Contains("optimizer.params.lr=0.5 is replaced by optimizer.params.lr=0.01, which was "
                       "given behind it"));
  const Config in_front = read_config(train({"--lr", "0.01", "--set", "optimizer.params.lr=0.5"}), 1);
  EXPECT_EQ(in_front.optimizer.learning_rate, 0.5);
  EXPECT_THAT(in_front.notes, Contains(HasSubstr("lr=0.01 is replaced by optimizer.params.lr=0.5")));
  // Overrides of a checkpoint stand in front of all.
  Options resumed = train({"--set", "optimizer.params.lr=0.5", "--lr", "0.01"});
  resumed.of_checkpoint = {"gradient_clipping=1.0"};
  EXPECT_THAT(overrides_of(resumed, "{}"),
              ElementsAre("gradient_clipping=1.0", "optimizer.params.lr=0.5", "optimizer.params.lr=0.01"));
}

TEST(Settings, ARateThatTheScheduleDoesNotFollowIsSaid) {
  const auto said = [](const std::vector<std::string>& sets) {
    std::vector<std::string> flags{"--lr", "0.5"};
    for (const std::string& set : sets) flags.insert(flags.end(), {"--set", set});
    std::string lines;
    for (const std::string& note : resolve_settings(train(flags), 1).config.notes) {
      if (note.starts_with("--lr")) lines += note;
    }
    return lines;
  };
  const auto schedule = [&](const std::string& type, const std::string& parameters) {
    return said({R"(scheduler={"type": ")" + type + R"(", "params": {)" + parameters + "}}"});
  };
  EXPECT_EQ(schedule("WarmupLR", R"("warmup_num_steps": 5, "warmup_max_lr": 3e-4)"),
            "--lr has no effect: WarmupLR rises to scheduler.params.warmup_max_lr, which is 0.0003");
  EXPECT_EQ(schedule("WarmupDecayLR", R"("warmup_num_steps": 5, "warmup_max_lr": 1)"),
            "--lr has no effect: WarmupDecayLR rises to scheduler.params.warmup_max_lr, which is 1");
  EXPECT_EQ(schedule("WarmupDecayLR", R"("warmup_num_steps": 5, "warmup_max_lr": "auto")"), "");
  EXPECT_EQ(schedule("WarmupCosineLR", R"("warmup_num_steps": 5)"), "");
  EXPECT_EQ(
      schedule("OneCycle", R"("cycle_min_lr": 0.1, "cycle_max_lr": 1)"),
      "--lr has no effect: OneCycle takes its rates from scheduler.params.cycle_min_lr and cycle_max_lr");
  EXPECT_EQ(schedule("LRRangeTest", ""),
            "--lr has no effect: LRRangeTest takes its rates from scheduler.params.lr_range_test_min_lr");
  const std::string muon = "optimizer.type=Muon", own = "optimizer.params.muon_lr=0.1";
  EXPECT_EQ(said({muon, own, "optimizer.params.adam_lr=0.01"}),
            "--lr has no effect: optimizer.params.muon_lr and adam_lr are the rates of all tensors");
  EXPECT_EQ(said({muon, own}), "");
  EXPECT_EQ(said({}), "");
}

TEST(Settings, AFlagWithoutEffectIsNamedInPlaceOfItsKey) {
  const auto said = [](const std::vector<std::string>& flags) {
    std::vector<std::string> notes = resolve_settings(train(flags), 1).config.notes;
    std::erase_if(notes, [](const std::string& note) {
      return note.find("effect") == note.npos && note.find("--keep-every") == note.npos;
    });
    return notes;
  };
  EXPECT_THAT(
      said({"--nvme-space", "1GiB", "--nvme-path", "a", "--offload-ratio", "0.5", "--host-state", "1MiB"}),
      ElementsAre("--offload-ratio has no effect: the optimizer's state stays on the device",
                  "--host-state has no effect: nothing is on nvme",
                  "--nvme-space has no effect: nothing is on nvme",
                  "--nvme-path has no effect: nothing is on nvme"));
  EXPECT_THAT(said({"--set", "tranche.nvme_space=1GiB"}),
              ElementsAre("tranche.nvme_space has no effect: nothing is on nvme"));
  EXPECT_THAT(said({"--offload-optimizer", "nvme", "--nvme-space", "1GiB", "--nvme-path", "a",
                    "--offload-ratio", "0.5", "--host-state", "1MiB"}),
              testing::IsEmpty());
  const Options evaluated = parse_arguments({"evaluate", "--from", "c", "--seed", "3"});
  EXPECT_THAT(resolve_settings(evaluated, 1).config.notes,
              Contains("--seed has no effect: the weights are those of --from"));
  const std::vector<std::string> keeps{"--checkpoint-dir", "c", "--keep-last", "1", "--save-every", "2"};
  const auto keep_every = [&](const std::string& steps) {
    std::vector<std::string> flags = keeps;
    flags.insert(flags.end(), {"--keep-every", steps});
    return said(flags);
  };
  EXPECT_THAT(
      keep_every("3"),
      ElementsAre("--keep-every 3 keeps multiples of --save-every 2 alone: other steps are not saved"));
  EXPECT_THAT(keep_every("4"), testing::IsEmpty());
}

TEST(Settings, AnEmptyPipeIsExplained) {
  const TemporaryFolder folder;
  const std::string pipe = folder.path("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::thread writer([&] { std::ofstream(pipe) << " \n"; });
  EXPECT_EQ(
      message_of<ConfigurationError>([&] {
        read_config(train({"--config", pipe}), 1);
      }),
      "configuration file '" + pipe +
          "' is empty; under mpirun rank 0 alone has standard input, and one rank alone reads a pipe: write "
          "the configuration to a file, and give that");
  writer.join();
}

TEST(Settings, StepsAndSequenceHaveDefaults) {
  EXPECT_EQ(resolve_settings(train({}), 1).steps, 100);
  EXPECT_EQ(resolve_settings(train({}), 1).sequence, 64) << "as many as the model has positions";
  EXPECT_EQ(resolve_settings(train({"--set", "tranche.total_steps=31"}), 1).steps, 31);
  const Settings given = resolve_settings(train({"--steps", "7", "--sequence", "9"}), 1);
  EXPECT_EQ(given.steps, 7);
  EXPECT_EQ(given.sequence, 9);
  EXPECT_EQ(given.config.total_steps_hint, 7) << "schedules end with the run";
}

TEST(Settings, TheDefaultSequenceIsNoMoreThanPeopleTrainOn) {
  const auto of = [](const std::string& model, std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"train", "--model", model});
    const Settings settings = resolve_settings(parse_arguments(more), 1);
    const auto& notes = settings.config.notes;
    const auto said = std::find_if(notes.begin(), notes.end(),
                                   [](const std::string& note) { return note.starts_with("--sequence"); });
    return std::pair(settings.sequence, said == notes.end() ? std::string() : *said);
  };
  EXPECT_EQ(
      of("llama-3.1-8b"),
      std::pair(std::int64_t{1024}, std::string("--sequence: not given: sequences of 1024 tokens, of the "
                                                "131072 that the model has positions for")));
  EXPECT_EQ(of("llama-3.1-8b", {"--sequence", "8192"}), std::pair(std::int64_t{8192}, std::string()));
  EXPECT_EQ(of("gpt2"), std::pair(std::int64_t{1024}, std::string()));
}

TEST(Settings, HeldOutTextIsTheTailOrASecondFile) {
  const TemporaryFolder folder;
  const std::string text = folder.write("a.txt", test::some_text(2000));
  const Options tail = train({"--data", text, "--sequence", "10", "--validation-fraction", "0.1"});
  const Data data = open_data(tail, resolve_settings(tail, 1));
  EXPECT_EQ(data.training->ranges()[0].size, 1800);
  EXPECT_EQ(data.validation.front().windows->ranges()[0].begin, 1800);
  EXPECT_EQ(data.validation.front().windows->ranges()[0].size, 200);
  EXPECT_EQ(data.held_out_windows(), 19);
  EXPECT_EQ(data.validation.front().numbers.size(), 19u);
  const std::string other = folder.write("b.txt", test::some_text(500));
  const Options second = train({"--data", text, "--validation-data", other, "--sequence", "10",
                                "--eval-batches", "2", "--micro-batch", "3"});
  const Data both = open_data(second, resolve_settings(second, 2));
  EXPECT_EQ(both.training->ranges()[0].size, 2000);
  EXPECT_EQ(both.validation.front().windows->ranges()[0].file->path(), other);
  EXPECT_EQ(both.validation.front().numbers.size(), 12u) << "two batches of 2 ranks x 3";
}

TEST(Settings, SeveralHeldOutSetsHaveNames) {
  const TemporaryFolder folder;
  const std::string a = folder.write("a.txt", test::some_text(2000)),
                    b = folder.write("b.txt", test::some_text(500)),
                    odd = folder.write("x=y.txt", test::some_text(300));
  const auto open = [&](const std::vector<std::string>& sets, const std::vector<std::string>& more = {}) {
    std::vector<std::string> flags{"--data", a, "--sequence", "10", "--eval-batches", "20"};
    for (const std::string& set : sets) flags.insert(flags.end(), {"--validation-data", set});
    flags.insert(flags.end(), more.begin(), more.end());
    const Options options = train(flags);
    return open_data(options, resolve_settings(options, 1));
  };
  const auto refused = [&](const std::vector<std::string>& sets, const std::vector<std::string>& more = {}) {
    return test::message_of<ConfigurationError>([&] { (void)open(sets, more); });
  };
  const Data data = open({"all=" + folder.path("?.txt"), "b-1.x_y=" + b});
  EXPECT_EQ(data.training->ranges()[0].size, 2000) << "no tail is held out";
  ASSERT_EQ(data.validation.size(), 2u);
  EXPECT_EQ(data.validation[0].name, "all");
  EXPECT_EQ(data.validation[0].windows->count(), 199 + 49);
  EXPECT_EQ(data.validation[0].numbers.size(), 20u) << "each set has its own";
  EXPECT_EQ(data.validation[1].name, "b-1.x_y");
  EXPECT_EQ(data.validation[1].windows->count(), 49);
  EXPECT_EQ(data.held_out_windows(), 199 + 49 + 49);
  EXPECT_EQ(data.validation_files.size(), 3u);
  EXPECT_EQ(open({odd}).validation.front().name, "") << "the name of a file that is there";
  EXPECT_EQ(open({odd}).validation.front().key(), "validation");
  EXPECT_EQ(open({"only=" + b}).validation.front().key(), "only");
  EXPECT_EQ(refused({"a=" + a, b}), "--validation-data 'a=" + a + "' and --validation-data '" + b +
                                        "': several sets need names, NAME=FILE each");
  EXPECT_EQ(refused({"a=" + a, "b=" + b, "a=" + b}), "--validation-data names two sets 'a'");
  EXPECT_EQ(refused({"a b=" + a}),
            "--validation-data 'a b=" + a + "': there is no file 'a b=" + a +
                "', and as NAME=FILE 'a b' is no name of a set: letters, digits, '-', '_' and '.'");
  EXPECT_THAT(refused({"=" + a}), HasSubstr("'' is no name of a set"));
  const std::string none = folder.path("*.bin");
  EXPECT_EQ(refused({"a=" + none}), "no file matches '" + none + "'; --validation-data 'a=" + none +
                                        "' was read as the set 'a' of '" + none +
                                        "', as no file matches 'a=" + none + "' either");
  EXPECT_THAT(refused({"a=" + a, "tiny=" + folder.write("tiny.txt", "tiny")}),
              HasSubstr("tokens for validation on tiny"));
  EXPECT_EQ(refused({"a=" + a, "b=" + b}, {"--ngrams"}),
            "--ngrams compares with one held-out text; give one --validation-data");
  EXPECT_EQ(refused({"a=" + a}, {"--keep-best", "--checkpoint-dir", "c", "--best-by", "b"}),
            "--best-by 'b' is no set that --validation-data names");
}

TEST(Settings, PathsMayHoldEqualsSignsAndColons) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path("date=2024-01-01"));
  const std::string a = folder.write("date=2024-01-01/a.txt", test::some_text(2000)),
                    time = folder.path("log_12:30");
  const auto open = [&](const std::string& data, const std::string& held_out) {
    const Options options = train({"--data", data, "--sequence", "10", "--validation-data", held_out});
    return open_data(options, resolve_settings(options, 1));
  };
  const auto refused = [&](const std::string& data, const std::string& held_out) {
    return test::message_of<ConfigurationError>([&] { (void)open(data, held_out); });
  };
  const std::string pattern = folder.path("date=2024-01-01/*.txt");
  EXPECT_EQ(open(pattern, pattern).validation.front().name, "");
  EXPECT_EQ(open(a, "day=" + pattern).validation.front().name, "day");
  // A pattern for the working folder, in which the text before the equals sign could be a name.
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path("."));
  const std::string own = folder.write("own.txt", test::some_text(1500));
  const Data data = open(own, "date=2024-01-01/*.txt");
  std::filesystem::create_directories("2024-01-01");
  std::filesystem::copy_file(a, "2024-01-01/b.txt");
  const Data both = open(own, "date=2024-01-01/*.txt");
  std::filesystem::current_path(before);
  EXPECT_EQ(data.validation.front().name, "");
  EXPECT_EQ(data.validation_files.front()->path(), "date=2024-01-01/a.txt");
  EXPECT_THAT(data.notes, ElementsAre());
  EXPECT_EQ(both.validation.front().name, "");
  EXPECT_THAT(both.notes,
              ElementsAre("--validation-data 'date=2024-01-01/*.txt' is taken as a path; the set 'date' of "
                          "'2024-01-01/*.txt' is meant by 'date=./2024-01-01/*.txt'"));
  EXPECT_EQ(refused(a, "date=2025/*.txt"),
            "no file matches '2025/*.txt'; --validation-data 'date=2025/*.txt' was read as the set 'date' of "
            "'2025/*.txt', as no file matches 'date=2025/*.txt' either");
  EXPECT_EQ(refused("log_12:30", a),
            "data file 'log_12' cannot be opened: No such file or directory; --data 'log_12:30' was read as "
            "the file "
            "'log_12' with the weight 30, as there is no file of the whole name either");
  folder.write("log_12:30", test::some_text(500));
  EXPECT_EQ(open(time, a).training_files.front()->path(), time);
  EXPECT_EQ(open(folder.path("log_1?:30"), a).training_files.front()->path(), time)
      << "a pattern is no weight";
}

TEST(Settings, DataWithoutAnythingToLearnAreRefused) {
  const TemporaryFolder folder;
  // Nine prompts of 40 bytes, each with one repeated letter, and a text of 200.
  std::string prompts;
  for (int i = 0; i < 9; ++i)
    prompts += R"({"prompt": ")" + std::string(39, 'p') + R"(", "completion": "c"})" + "\n";
  const auto tokens = [&](const std::string& name, const std::string& lines) {
    training::TokenizeOptions how;
    how.inputs = {folder.write("lines.jsonl", lines)};
    how.output = folder.path(name);
    (void)training::tokenize_files(*training::make_byte_tokenizer(), how);
    return how.output;
  };
  const std::string text = R"({"text": ")" + std::string(200, 't') + "\"}\n",
                    learned = tokens("text.safetensors", text);
  const auto refused = [&](std::vector<std::string> flags, const char* command = "train") {
    flags.insert(flags.begin(), {command, "--model", "gpt-nano", "--sequence", "10"});
    const Options options = parse_arguments(flags);
    return test::message_of<ConfigurationError>(
        [&] { (void)open_data(options, resolve_settings(options, 1)); });
  };
  const std::string first = tokens("first.safetensors", prompts + text);
  EXPECT_EQ(refused({"--data", first, "--validation-data", first}), "");
  // One empty completion: only prompts.
  const std::string none = tokens(
      "none.safetensors", R"({"prompt": ")" + std::string(300, 'p') + R"(", "completion": ""})" + "\n");
  EXPECT_EQ(refused({"--data", none, "--validation-data", learned}),
            "--data '" + none +
                "' holds nothing to learn: 29 windows of 10 tokens were looked at, and none of the tokens is "
                "learned; "
                "tranche tokenize marks as learned texts, completions and what the assistant says");
  EXPECT_THAT(refused({"--data", learned + ":0.5", "--data", none + ":0.5", "--validation-data", learned}),
              HasSubstr("--data '" + none + ":0.5' holds nothing to learn"));
  EXPECT_EQ(refused({"--data", learned, "--data", none, "--validation-data", learned}), "")
      << "one set of windows";
  EXPECT_EQ(refused({"--data", learned, "--validation-data", "far=" + none}),
            "the held-out windows of 'far' hold nothing to evaluate: 29 windows of 10 tokens were looked at, "
            "and none of "
            "the tokens is learned; hold out other data with --validation-data or --validation-fraction");
  EXPECT_EQ(refused({"--data", learned, "--validation-data", first, "--eval-batches", "1"}),
            "the held-out windows hold nothing to evaluate: 1 window of 10 tokens was looked at, and none of "
            "the tokens is learned; a larger --eval-batches takes more of the 55 windows, --validation-data "
            "takes other windows");
  EXPECT_THAT(refused({"--data", none}, "evaluate"),
              HasSubstr("the held-out windows hold nothing to evaluate"));
  EXPECT_EQ(refused({"--data", none, "--validation-data", learned}, "evaluate"), "")
      << "which trains on nothing";
}

TEST(Settings, ManyFilesAndMixtures) {
  const TemporaryFolder folder;
  const std::string a = folder.write("a.txt", test::some_text(2000)),
                    b = folder.write("b.txt", test::some_text(500));
  const auto open = [&](std::vector<std::string> data) {
    std::vector<std::string> flags{"--sequence", "10", "--validation-fraction", "0.1"};
    for (const std::string& each : data) flags.insert(flags.end(), {"--data", each});
    const Options options = train(flags);
    return open_data(options, resolve_settings(options, 1));
  };
  const auto refused = [&](const std::vector<std::string>& data) {
    return test::message_of<ConfigurationError>([&] { (void)open(data); });
  };
  for (const Data& data : {open({a, b}), open({folder.path("*.txt")})}) {
    EXPECT_EQ(data.training->count(), 179 + 44);
    EXPECT_EQ(data.held_out_windows(), 19 + 4);
    EXPECT_EQ(data.mixture->window(7), training::window_of_sample(7, 179 + 44, 1234));
  }
  const Data mixed = open({a + ":0.25", b + ":0.75"});
  int of_b = 0;
  for (std::int64_t sample = 0; sample < training::Mixture::block; ++sample) {
    of_b += mixed.mixture->window(sample) >= 179 ? 1 : 0;
  }
  EXPECT_EQ(of_b, training::Mixture::block * 3 / 4);
  EXPECT_EQ(refused({a + ":0.5", b}),
            "--data '" + a + ":0.5' and --data '" + b + "': give all of them a weight, or none");
  EXPECT_EQ(refused({a + ":0", b + ":1"}), "'" + a + ":0' has the weight 0, but weights are above 0");
  EXPECT_EQ(refused({folder.path("*.bin")}), "no file matches '" + folder.path("*.bin") + "'");
}

TEST(Settings, BytesAndTokensAreNotMixed) {
  const TemporaryFolder folder;
  const std::string text = folder.write("a.txt", test::some_text(2000)),
                    more = folder.write("b.txt", test::some_text(900)),
                    tokens = folder.write(
                        "t.bin", test::nanogpt_tokens(std::vector<std::uint16_t>(1000, std::uint16_t{7})));
  const auto refused = [&](std::vector<std::string> flags) {
    flags.insert(flags.end(), {"--sequence", "10"});
    const Options options = train(flags);
    return test::message_of<ConfigurationError>(
        [&] { (void)open_data(options, resolve_settings(options, 1)); });
  };
  const auto both = [](const std::string& bytes, const std::string& numbers) {
    return "data file '" + bytes + "' holds bytes, and '" + numbers +
           "' tokens of 16 bits: in one run the same numbers would mean two texts; make tokens of both with "
           "one "
           "tokenizer (tranche tokenize)";
  };
  EXPECT_EQ(refused({"--data", text, "--data", tokens}), both(text, tokens));
  EXPECT_EQ(refused({"--data", tokens, "--validation-data", text}), both(text, tokens));
  EXPECT_EQ(refused({"--data", text, "--validation-data", "b=" + more, "--validation-data", "t=" + tokens}),
            both(text, tokens));
  EXPECT_EQ(refused({"--data", text, "--validation-data", more}), "");
  EXPECT_EQ(refused({"--data", text, "--data", tokens, "--data-format", "text"}), "") << "all are bytes";
}

TEST(Settings, DocumentsLongerThanASequenceAreSaid) {
  const TemporaryFolder folder;
  const std::string lines = folder.write("a.jsonl", R"({"text": ")" + std::string(11, 'a') + "\"}\n" +
                                                        R"({"text": ")" + std::string(40, 'b') + "\"}\n" +
                                                        R"({"text": ")" + std::string(12, 'c') + "\"}\n");
  const std::string tokens = folder.path("a.safetensors");
  training::TokenizeOptions how;
  how.inputs = {lines};
  how.output = tokens;
  (void)training::tokenize_files(*training::make_byte_tokenizer(), how);
  const auto note = [&](const char* sequence, const std::string& file) {
    const Options options = train({"--data", file, "--sequence", sequence, "--validation-fraction", "0.3"});
    return note_on_long_documents(open_data(options, resolve_settings(options, 1)), options.sequence.value());
  };
  EXPECT_EQ(note("10", tokens),
            "2 of 3 documents are longer than a sequence of 10 tokens (the longest has 40): they are split "
            "over several");
  EXPECT_EQ(note("11", tokens),
            "1 of 3 documents is longer than a sequence of 11 tokens (the longest has 40): it is split over "
            "several");
  EXPECT_EQ(note("10", folder.write("b.txt", test::some_text(500))), "") << "which tells of no documents";
}

TEST(Settings, DocumentsThatAWindowCutsAreSaid) {
  const TemporaryFolder folder;
  const auto tokens = [&](const std::string& name, const std::string& lines) {
    training::TokenizeOptions how;
    how.inputs = {folder.write(name + ".jsonl", lines)};
    how.output = folder.path(name + ".safetensors");
    (void)training::tokenize_files(*training::make_byte_tokenizer(), how);
    return how.output;
  };
  const std::string six = R"({"prompt": "abcd", "completion": "ef"})"
                          "\n",
                    text = R"({"text": "abcdef"})"
                           "\n";
  const auto note = [&](const char* sequence, const std::string& file) {
    const Options options = train({"--data", file, "--sequence", sequence, "--validation-data", file});
    return note_on_cut_documents(*open_data(options, resolve_settings(options, 1)).training);
  };
  const std::string prompts = tokens("prompts", six + six + six + six);
  const std::string without =
      " tokens: what follows the cut is learned without what stands before it, such as the prompt; a longer "
      "--sequence cuts fewer";
  EXPECT_EQ(note("8", prompts), "1 of 3 documents (33 %) is cut by the end of a window of 8" + without)
      << "the second by the first window, and the third ends with the target of the second";
  EXPECT_EQ(note("4", prompts), "3 of 4 documents (75 %) are cut by the end of a window of 4" + without);
  EXPECT_EQ(note("5", prompts), "2 of 4 documents (50 %) are cut by the end of a window of 5" + without)
      << "the first one's last token is the last target of a window";
  EXPECT_EQ(note("6", prompts), "");
  EXPECT_EQ(note("4", tokens("texts", text + text + text + text)), "") << "everything is learned";
}

TEST(Settings, CopiesOfAFileToTrainOnAreSaid) {
  const TemporaryFolder folder;
  const std::string a = folder.write("a.txt", test::some_text(500)),
                    b = folder.write("b.txt", test::some_text(501)), link = folder.path("link.txt");
  std::filesystem::create_symlink(a, link);
  const auto notes = [&](std::vector<std::string> files) {
    std::vector<std::string> flags{"--sequence", "10"};
    for (const std::string& file : files) flags.insert(flags.end(), {"--data", file});
    const Options options = train(flags);
    return open_data(options, resolve_settings(options, 1)).notes;
  };
  const auto note = [&](const std::string& copy) {
    return "'" + copy + "' has the contents of '" + a +
           "', another file to train on: its windows are trained on once more in each epoch";
  };
  EXPECT_THAT(notes({a, b}), testing::IsEmpty());
  EXPECT_THAT(notes({a, b, a}), ElementsAre(note(a)));
  EXPECT_THAT(notes({folder.path("*.txt")}), ElementsAre(note(link)));
  EXPECT_THAT(notes({a, link, a}),
              ElementsAre(note(link) + "; the same holds for 1 more of the --data files"));
}

TEST(Settings, AFileThatIsTooShortForItsTailTellsWhatHelps) {
  const TemporaryFolder folder;
  const std::string a = folder.write("a.txt", test::some_text(5000)),
                    b = folder.write("b.txt", test::some_text(100));
  const auto refused = [&](std::vector<std::string> flags) {
    flags.insert(flags.end(), {"--sequence", "10"});
    return message_of<ConfigurationError>([&] {
      const Options options = train(flags);
      (void)open_data(options, resolve_settings(options, 1));
    });
  };
  const std::string short_of = "data file '" + b +
                               "' has 5 tokens for validation, but one sequence of 10 needs 11; give "
                               "more data or a shorter --sequence",
                    other = "; --validation-data FILE holds out a file in place of the tail of each";
  EXPECT_EQ(refused({"--data", a, "--data", b}),
            short_of + ", or put the files into one with tranche tokenize" + other);
  EXPECT_EQ(refused({"--data", b}), short_of + other);
  EXPECT_EQ(refused({"--data", a, "--data", b, "--validation-data", a}), "");
}

TEST(Settings, MisspeltKeysOfAModelAreSaid) {
  const TemporaryFolder folder;
  const std::string text = folder.write("a.txt", test::some_text(500));
  const auto notes = [&](const std::string& model) {
    return resolve_settings(train({"--model", model, "--data", text, "--sequence", "10"}), 1).config.notes;
  };
  const std::string config = folder.write("m.json", R"({"model_type": "llama", "rope_thetta": 5})");
  EXPECT_THAT(notes(config),
              testing::Contains(config + ": the key 'rope_thetta' is not read; did you mean 'rope_theta'?"));
  EXPECT_THAT(notes("llama-nano"), testing::Not(testing::Contains(HasSubstr("did you mean"))));
}

TEST(Settings, ValidationsDuringTrainingAreBounded) {
  const TemporaryFolder folder;
  const std::string text = folder.write("a.txt", test::some_text(400000));
  const auto taken = [&](std::vector<std::string> more, const char* command = "train") {
    std::vector<std::string> arguments{command, "--data", text, "--sequence", "10", "--validation-fraction",
                                       "0.9"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Options options = parse_arguments(arguments);
    return open_data(options, resolve_settings(options, 1)).validation.front().numbers.size();
  };
  const auto bound = static_cast<std::size_t>(default_validation_tokens / 10);
  EXPECT_EQ(bound, 13107u);
  EXPECT_EQ(taken({}), bound);
  EXPECT_EQ(taken({"--eval-batches", "0"}), 35999u) << "all of them, when asked for";
  EXPECT_EQ(taken({"--eval-batches", "2"}), 2u);
  EXPECT_EQ(taken({"--ngrams"}), 35999u) << "n-grams are of the whole held-out text";
  EXPECT_EQ(taken({}, "evaluate"), 35999u);
}

}  // namespace
}  // namespace tranche::tools
