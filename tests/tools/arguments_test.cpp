#include "tools/arguments.h"

#include <gmock/gmock.h>

#include <limits>
#include <map>
#include <sstream>

#include "tests/tools/temporary.h"
#include "tranche/core/error.h"
#include "tranche/version.h"

namespace tranche::tools {
namespace {

using test::message_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

std::string error_of(const std::vector<std::string>& arguments) {
  return message_of<ConfigurationError>([&] { parse_arguments(arguments); });
}

TEST(Arguments, ReadsEveryTrainFlag) {
  const Options options = parse_arguments({"train",
                                           "--config",
                                           "ds.json",
                                           "--model",
                                           "gpt2",
                                           "--data",
                                           "a.txt",
                                           "--data-format=text",
                                           "--validation-data",
                                           "b.txt",
                                           "--validation-fraction",
                                           "0.1",
                                           "--stage",
                                           "3",
                                           "--steps",
                                           "7",
                                           "--micro-batch",
                                           "2",
                                           "--accumulate",
                                           "4",
                                           "--sequence",
                                           "64",
                                           "--dtype",
                                           "fp16",
                                           "--device",
                                           "cpu",
                                           "--seed",
                                           "5",
                                           "--threads",
                                           "1",
                                           "--device-memory",
                                           "1GiB",
                                           "--lr",
                                           "0.01",
                                           "--eval-every",
                                           "10",
                                           "--eval-batches",
                                           "3",
                                           "--digest-every",
                                           "2",
                                           "--report",
                                           "r.json",
                                           "--trace",
                                           "t.json",
                                           "--max-seconds",
                                           "1.5",
                                           "--min-steps",
                                           "3",
                                           "--log-every",
                                           "9",
                                           "--sample-bytes",
                                           "100",
                                           "--ngrams",
                                           "--checkpoint-dir",
                                           "ckpt",
                                           "--save-every",
                                           "50",
                                           "--keep-last",
                                           "3",
                                           "--keep-every",
                                           "1000",
                                           "--resume",
                                           "latest",
                                           "--resume-weights-only",
                                           "base",
                                           "--set",
                                           "a.b=1",
                                           "--set",
                                           "c=[1,2]",
                                           "--debug-fail",
                                           "1:2",
                                           "--debug-hang",
                                           "0:3"});
  EXPECT_EQ(options.command, Command::train);
  EXPECT_EQ(options.config, "ds.json");
  EXPECT_EQ(options.model, "gpt2");
  EXPECT_EQ(options.data, "a.txt");
  EXPECT_EQ(options.data_format, "text");
  EXPECT_THAT(options.validation_data, ElementsAre("b.txt"));
  EXPECT_EQ(options.validation_fraction, 0.1);
  EXPECT_EQ(options.stage, 3);
  EXPECT_EQ(options.steps, 7);
  EXPECT_EQ(options.micro_batch, 2);
  EXPECT_EQ(options.accumulate, 4);
  EXPECT_EQ(options.sequence, 64);
  EXPECT_EQ(options.dtype, "fp16");
  EXPECT_EQ(options.seed, 5);
  EXPECT_EQ(options.threads, 1);
  EXPECT_EQ(options.device_memory, "1GiB");
  EXPECT_EQ(options.learning_rate, 0.01);
  EXPECT_EQ(options.eval_every, 10);
  EXPECT_EQ(options.eval_batches, 3);
  EXPECT_EQ(options.digest_every, 2);
  EXPECT_EQ(options.report, "r.json");
  EXPECT_EQ(options.trace, "t.json");
  EXPECT_EQ(options.max_seconds, 1.5);
  EXPECT_EQ(options.min_steps, 3);
  EXPECT_EQ(options.log_every, 9);
  EXPECT_EQ(options.sample_bytes, 100);
  EXPECT_TRUE(options.ngrams);
  EXPECT_EQ(options.checkpoint_dir, "ckpt");
  EXPECT_EQ(options.save_every, 50);
  EXPECT_EQ(options.keep_last, 3);
  EXPECT_EQ(options.keep_every, 1000);
  EXPECT_EQ(options.resume, "latest");
  EXPECT_EQ(options.resume_weights_only, "base");
  EXPECT_THAT(options.set, ElementsAre("a.b=1", "c=[1,2]"));
  EXPECT_EQ(options.fail.rank, 1);
  EXPECT_EQ(options.fail.step, 2);
  EXPECT_EQ(options.hang.rank, 0);
}

TEST(Arguments, AllFlagsAreComparedAmongRanksButThoseOfOneRank) {
  const auto of = [](const std::vector<std::string>& arguments) {
    std::map<std::string, std::string> values;
    for (const Flag& flag : parse_arguments(arguments).flags) values[flag.name] = flag.value;
    return values;
  };
  const auto none = of({"train"});
  for (const char* name : {"--eval-every", "--digest-every", "--save-every", "--max-seconds",
                           "--sample-bytes", "--memory-profile", "--trace", "--checkpoint-dir", "--resume",
                           "--eval-batches", "--keep-last", "--steps", "--ngrams"}) {
    ASSERT_TRUE(none.contains(name)) << name;
    EXPECT_EQ(none.at(name), "not given") << name;
  }
  EXPECT_EQ(none.at("the command"), "tranche train");
  EXPECT_EQ(of({"evaluate"}).at("the command"), "tranche evaluate");
  for (const char* name : {"--report", "--metrics", "--log-every", "--debug-fail", ""})
    EXPECT_FALSE(none.contains(name)) << name;

  auto given = of({"train", "--eval-every", "1", "--eval-every", "5", "--ngrams", "--set", "a.b=1", "--set",
                   "c.d=2", "--data", "/here/a.txt", "--debug-fail", "1:2", "--report", "r.json"});
  EXPECT_EQ(given.at("--eval-every"), "5") << "the last one counts";
  EXPECT_EQ(given.at("--ngrams"), "given");
  EXPECT_EQ(given.at("--set"), "a.b=1 c.d=2");
  EXPECT_EQ(given.at("--data"), "given") << "nodes may have it in different places";
  for (const char* name : {"--eval-every", "--ngrams", "--set", "--data"}) given[name] = "not given";
  EXPECT_EQ(given, none);
}

TEST(Arguments, LeavesWhatIsNotGivenToTheConfiguration) {
  const Options options = parse_arguments({"train"});
  EXPECT_FALSE(options.stage || options.steps || options.dtype || options.seed || options.learning_rate);
  EXPECT_EQ(options.model, "gpt-mini");
  EXPECT_EQ(options.fail.rank, -1);
}

TEST(Arguments, WhatStandsBeforeTheCommandIsRefused) {
  EXPECT_THAT(error_of({"--model", "my.json", "train"}),
              HasSubstr("'--model' stands before the command, but arguments are read behind it: "
                        "tranche train --model ..."));
  EXPECT_THAT(error_of({"--json", "info"}), HasSubstr("tranche info --json ..."));
  EXPECT_THAT(error_of({"config", "--strict", "check", "f.json"}),
              HasSubstr("tranche config check --strict ..."));
  EXPECT_THAT(error_of({"checkpoint", "--json", "list", "run"}), HasSubstr("tranche checkpoint list --json"));
  EXPECT_THAT(error_of({"--machine=m", "completion", "bash"}), HasSubstr("tranche completion --machine=m"));
}

TEST(Arguments, UnknownFlagsComeBackWithTheNearest) {
  EXPECT_THAT(error_of({"train", "--accumulte", "2"}),
              AllOf(HasSubstr("unknown flag --accumulte"), HasSubstr("did you mean --accumulate?")));
  EXPECT_THAT(error_of({"train", "--stag=2"}),
              AllOf(HasSubstr("--stag "), HasSubstr("did you mean --stage?")));
  EXPECT_THAT(error_of({"info", "--jsn"}), HasSubstr("did you mean --json?"));
  // Names of other programs.
  EXPECT_THAT(error_of({"train", "--learning_rate", "2"}), HasSubstr("did you mean --lr?"));
  EXPECT_THAT(error_of({"train", "--batch-size=2"}), HasSubstr("did you mean --micro-batch?"));
  EXPECT_THAT(error_of({"generate", "--from", "a", "--max_new_tokens", "2"}),
              HasSubstr("did you mean --tokens?"));
  EXPECT_THAT(error_of({"info", "--learning-rate", "2"}), Not(HasSubstr("--lr")));
  EXPECT_THAT(error_of({"train", "--qqqqqqqqqqqqqqqqqq"}), Not(HasSubstr("did you mean")));
  EXPECT_THAT(error_of({"train", "data.txt"}), HasSubstr("'data.txt' is no argument"));
  EXPECT_NE(error_of({"evaluate", "--steps", "3"}), "");
}

TEST(Arguments, CommandsThatAreNotThere) {
  EXPECT_THAT(error_of({}), HasSubstr("which command?"));
  EXPECT_THAT(error_of({"trian"}),
              AllOf(HasSubstr("'trian' is no command"), HasSubstr("did you mean train?")));
}

TEST(Arguments, Studies) {
  const Options options = parse_arguments({"scale",
                                           "--out",
                                           "s",
                                           "--ranks",
                                           "4,1,2",
                                           "--stages",
                                           "3,0",
                                           "--strong",
                                           "--set",
                                           "a.b=1",
                                           "--model",
                                           "m",
                                           "--threads",
                                           "2",
                                           "--set",
                                           "c=2",
                                           "--offload-activations",
                                           "--hostfile",
                                           "h",
                                           "--",
                                           "--map-by",
                                           "node",
                                           "--set"});
  EXPECT_EQ(options.command, Command::scale);
  EXPECT_THAT(options.scale.ranks, ElementsAre(1, 2, 4));
  EXPECT_THAT(options.scale.stages, ElementsAre(0, 3));
  EXPECT_TRUE(options.scale.strong);
  EXPECT_EQ(options.scale.hostfile, "h");
  EXPECT_THAT(options.scale.launcher_arguments, ElementsAre("--map-by", "node", "--set"));
  // The flags of runs, as they were given; the model is always among them.
  EXPECT_THAT(options.scale.train_flags, ElementsAre("--set", "a.b=1", "--model", "m", "--threads", "2",
                                                     "--set", "c=2", "--offload-activations"));
  EXPECT_THAT(options.set, ElementsAre("a.b=1", "c=2"));
  const Options plain = parse_arguments({"scale", "--out", "s", "--ranks", "1"});
  EXPECT_THAT(plain.scale.stages, ElementsAre(0, 1, 2, 3));
  EXPECT_FALSE(plain.scale.strong);
  EXPECT_TRUE(plain.scale.train_flags.empty() && plain.scale.launcher_arguments.empty());
}

TEST(Arguments, StudiesRefuseWhatTheyHaveNoRoomFor) {
  const auto error = [](std::vector<std::string> more) {
    std::vector<std::string> arguments{"scale", "--out", "s", "--ranks", "1,2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return error_of(arguments);
  };
  EXPECT_EQ(error({}), "");
  EXPECT_THAT(error_of({"scale", "--out", "s"}), HasSubstr("give --ranks, like --ranks 1,2,4,8"));
  EXPECT_THAT(error_of({"scale", "--ranks", "1"}), HasSubstr("give --out a folder"));
  EXPECT_THAT(error({"--ranks", "1,,2"}),
              HasSubstr("--ranks '1,,2': '' is no number of ranks, which is 1 to 65536"));
  EXPECT_THAT(error({"--ranks", "0"}), HasSubstr("'0' is no number of ranks"));
  EXPECT_THAT(error({"--ranks", "65537"}), HasSubstr("'65537' is no number of ranks"));
  EXPECT_THAT(error({"--ranks", "2,2"}), HasSubstr("has 2 twice"));
  EXPECT_THAT(error({"--stages", "1,4"}), HasSubstr("'4' is no stage, which is 0 to 3"));
  EXPECT_THAT(error({"--weak", "--strong"}), HasSubstr("--weak and --strong are two studies"));
  EXPECT_THAT(error({"--repeats", "0"}), HasSubstr("--repeats is 0, but must be at least 1"));
  EXPECT_THAT(error({"--warmup", "1"}),
              HasSubstr("--warmup is 1, but must be at least 2: the first two steps plan memory"));
  EXPECT_THAT(error({"--steps", "0"}), HasSubstr("--steps is 0"));
  EXPECT_THAT(error({"--run-timeout", "0"}), HasSubstr("--run-timeout is 0"));
  EXPECT_THAT(error({"--launcher", "mpiexec"}), HasSubstr("--launcher 'mpiexec' is not one of mpirun, srun"));
  EXPECT_THAT(error({"--launcher", "srun", "--host", "a"}),
              HasSubstr("srun takes its own arguments behind --"));
  EXPECT_THAT(error({"--stage", "3"}),
              HasSubstr("--stage is not for tranche scale: a study runs several: --stages 0,1,2,3"));
  EXPECT_THAT(error({"--metrics", "f"}), HasSubstr("--metrics is not for tranche scale: every run"));
  EXPECT_THAT(error({"--report=f"}), HasSubstr("--report is not for tranche scale: every run"));
  EXPECT_THAT(error({"--resume", "latest"}), HasSubstr("the same command goes on with a study"));
  EXPECT_THAT(error({"--rank", "3"}), HasSubstr("did you mean --ranks?"));
  EXPECT_THAT(error({"--ranks-per-node", "-2"}), HasSubstr("--ranks-per-node is -2, but must be at least 0"));
}

TEST(Arguments, WhereStateLives) {
  for (const char* command : {"train", "evaluate", "plan"}) {
    const Options options =
        parse_arguments({command, "--offload-optimizer", "nvme", "--offload-param", "cpu", "--nvme-path",
                         "/d", "--offload-ratio", "0.5", "--offload-activations", "--host-memory", "2GiB",
                         "--host-state", "auto", "--nvme-space", "1TiB"});
    EXPECT_EQ(options.host_state, "auto");
    EXPECT_EQ(options.offload_optimizer, "nvme");
    EXPECT_EQ(options.offload_parameters, "cpu");
    EXPECT_EQ(options.nvme_path, "/d");
    EXPECT_EQ(options.offload_ratio, 0.5);
    EXPECT_TRUE(options.offload_activations);
    EXPECT_EQ(options.host_memory, "2GiB");
    EXPECT_EQ(options.nvme_space, "1TiB");
  }
  const Options none = parse_arguments({"train"});
  EXPECT_FALSE(none.offload_optimizer || none.offload_parameters || none.nvme_path || none.offload_ratio ||
               none.offload_activations || none.host_memory || none.host_state || none.nvme_space);
  for (const char* flag : {"--offload-optimizer", "--offload-param"}) {
    EXPECT_EQ(error_of({"train", flag, "none"}), "") << flag;
    EXPECT_THAT(error_of({"train", flag, "disk"}),
                HasSubstr(std::string(flag) + " 'disk' is not one of none, cpu, nvme"));
  }
  for (const char* wrong : {"1.5", "-0.5"}) {
    EXPECT_THAT(error_of({"train", "--offload-ratio", wrong}),
                HasSubstr(std::string("--offload-ratio is ") + wrong + ", but must be between 0 and 1"));
  }
  EXPECT_THAT(error_of({"train", "--nvme-path", ""}), HasSubstr("--nvme-path has an empty value"));
}

TEST(Arguments, FlagsOfCheckpointsNeedEachOther) {
  for (const char* flag : {"--save-every", "--keep-last", "--keep-every"}) {
    EXPECT_THAT(error_of({"train", flag, "5"}),
                HasSubstr(std::string(flag) + " 5 needs --checkpoint-dir DIR"));
    EXPECT_THAT(error_of({"train", "--checkpoint-dir", "c", flag, "-1"}),
                HasSubstr(std::string(flag) + " is -1"));
  }
  EXPECT_THAT(error_of({"train", "--resume", "latest"}),
              HasSubstr("--resume latest needs --checkpoint-dir DIR"));
  EXPECT_EQ(error_of({"train", "--resume", "ckpt/step-00000001"}), "");
  EXPECT_THAT(error_of({"train", "--resume", "best"}), HasSubstr("--resume best needs --checkpoint-dir DIR"));
  EXPECT_THAT(error_of({"train", "--keep-best"}), HasSubstr("--keep-best needs --checkpoint-dir DIR"));
  EXPECT_THAT(error_of({"train", "--best-by", "code", "--checkpoint-dir", "c"}),
              HasSubstr("--best-by 'code' says by which set --keep-best keeps a checkpoint; give that too"));
  EXPECT_EQ(error_of({"train", "--best-by", "code", "--checkpoint-dir", "c", "--resume", "best"}), "");
  EXPECT_THAT(
      error_of({"train", "--resume", "a", "--resume-weights-only", "b"}),
      AllOf(HasSubstr("--resume 'a'"), HasSubstr("--resume-weights-only 'b'"), HasSubstr("two origins")));
  EXPECT_EQ(parse_arguments({"evaluate", "--from", "ckpt"}).from, "ckpt");
  EXPECT_THAT(error_of({"evaluate", "--resume", "ckpt"}), HasSubstr("unknown flag --resume"));
}

TEST(Arguments, ValuesThatAreNone) {
  EXPECT_EQ(error_of({"train", "--stage", "three"}),
            "--stage 'three' is no number; see tranche train --help");
  EXPECT_EQ(error_of({"train", "--steps", "3", "--steps", "1e1"}),
            "--steps was given 2 times, and the last, '1e1', is no whole number; see tranche train --help");
  EXPECT_EQ(error_of({"train", "--lr", "1e-400"}),
            "--lr is 1e-400, which is too small for a number; write 0 if that is meant");
  EXPECT_EQ(parse_arguments({"train", "--lr", "0.0e-999"}).learning_rate, 0);
  EXPECT_EQ(error_of({"plan", "--ranks", "1.5"}),
            "--ranks '1.5' is no whole number; see tranche plan --help");
  EXPECT_EQ(error_of({"train", "--stage"}), "--stage needs a value behind it; see tranche train --help");
  EXPECT_EQ(error_of({"checkpoint", "export", "a"}), "--to is missing; see tranche checkpoint export --help");
  EXPECT_THAT(error_of({"train", "--steps", "0"}),
              HasSubstr("--steps is 0, but must be between 1 and 1000000000000"));
  // Numbers that the parser would interpret differently.
  const std::string seeds = "but must be between 0 and 9223372036854775807";
  EXPECT_THAT(error_of({"train", "--seed", "9223372036854775999"}),
              HasSubstr("--seed is 9223372036854775999, " + seeds));
  EXPECT_THAT(error_of({"train", "--seed", "99999999999999999999"}), HasSubstr(seeds));
  EXPECT_THAT(error_of({"train", "--seed", "-1"}), HasSubstr("--seed is -1, " + seeds));
  EXPECT_EQ(parse_arguments({"train", "--seed", "9223372036854775807"}).seed,
            std::numeric_limits<std::int64_t>::max());
  EXPECT_THAT(error_of({"generate", "--from", "a", "--prompt", "b", "--seed", "99999999999999999999"}),
              HasSubstr("--seed is 99999999999999999999, " + seeds));
  for (const char* value : {"nan", "inf", "-inf", "1e999"}) {
    EXPECT_THAT(error_of({"train", "--max-seconds", value}),
                HasSubstr(std::string("--max-seconds is ") + value + ", but must be a finite number"));
  }
  EXPECT_THAT(error_of({"train", "--max-seconds", "-1"}),
              HasSubstr("--max-seconds is -1, but must be between 0 "));
  EXPECT_THAT(error_of({"train", "--lr", "nan"}), HasSubstr("--lr is nan, but must be a finite number"));
  EXPECT_THAT(error_of({"generate", "--from", "a", "--prompt", "b", "--temperature", "nan"}),
              HasSubstr("--temperature is nan, but must be a finite number"));
  for (const char* command : {"train", "plan"}) {
    EXPECT_THAT(error_of({command, "--threads", "100000"}),
                HasSubstr("--threads is 100000, but must be between 1 and 1024"));
  }
  EXPECT_THAT(error_of({"train", "--keep-last", "4294967297"}),
              HasSubstr("--keep-last is 4294967297, but must be between 0 and 1000000000"));
  EXPECT_THAT(error_of({"train", "--micro-batch", "-1"}), HasSubstr("--micro-batch is -1"));
  EXPECT_THAT(error_of({"train", "--validation-fraction", "1"}), HasSubstr("must be between 0 and 1"));
  EXPECT_THAT(error_of({"train", "--device", "tpu"}), HasSubstr("'tpu' is not one of cpu, cuda"));
  for (const char* value : {"0", "-1", "3601", "nan"}) {
    EXPECT_THAT(error_of({"calibrate", "--out", "m.json", "--seconds", value}),
                AllOf(HasSubstr(std::string("--seconds is ") + value), HasSubstr("must be")));
  }
  EXPECT_THAT(error_of({"calibrate", "--out", "m.json", "--seconds", "3601"}),
              HasSubstr("--seconds is 3601, but must be above 0 and at most 3600"));
  EXPECT_THAT(error_of({"train", "--debug-fail", "1"}), HasSubstr("'1' is not RANK:STEP"));
  EXPECT_THAT(error_of({"train", "--max-seconds", "-1"}), HasSubstr("--max-seconds"));
}

TEST(Arguments, WholeNumbersAreDecimal) {
  EXPECT_EQ(parse_arguments({"train", "--data", "a", "--steps", "0100"}).steps, 100);
  EXPECT_EQ(parse_arguments({"train", "--data", "a", "--seed", "009"}).seed, 9u);
  EXPECT_EQ(parse_arguments({"train", "--data", "a", "--save-every", "000"}).save_every, 0);
  EXPECT_THAT(error_of({"train", "--data", "a", "--steps", "0x10"}),
              HasSubstr("--steps is 0x10, but must be a decimal number"));
  EXPECT_THAT(error_of({"train", "--data", "a", "--steps", "-07"}), HasSubstr("--steps is -7"));
}

TEST(Arguments, AnEmptyValueIsNoAbsentOne) {
  for (const char* flag :
       {"--checkpoint-dir", "--resume", "--config", "--report", "--steps", "--max-seconds"}) {
    EXPECT_THAT(error_of({"train", "--data", "a", flag, ""}),
                HasSubstr(std::string(flag) + " has an empty value: is a variable unset?"));
  }
  EXPECT_THAT(error_of({"evaluate", "--data", "a", "--from", ""}), HasSubstr("--from has an empty value"));
  EXPECT_THAT(error_of({"generate", "--from", "a", "--prompt", ""}), HasSubstr("the --prompt is empty"));
}

TEST(Arguments, APathThatOnlyAShellWouldFindIsRefused) {
  const auto refused = [](const std::vector<std::string>& arguments) {
    return message_of<ConfigurationError>([&] { (void)parse_arguments(arguments); });
  };
  EXPECT_EQ(
      refused({"train", "--data", "a", "--checkpoint-dir=~/run"}),
      "--checkpoint-dir '~/run': the shell replaces ~ by the home folder only at the beginning of a word "
      "that is not quoted, so that this would be a folder named ~; write --checkpoint-dir ~/run, or ./~/run "
      "if that is meant");
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"train", "--data", "a", "--report", "~/r.json"},
        {"train", "--data", "~/a.txt"},
        {"train", "--data", "a", "--nvme-path", "~"},
        {"tokenize", "--data", "a", "--out", "~/t.safetensors"},
        {"checkpoint", "import", "a", "--to", "~/base"},
        {"plan", "--fit", "1GiB", "--write", "~/f.json"}}) {
    EXPECT_THAT(refused(arguments), HasSubstr("the shell replaces ~ by the home folder"));
  }
  EXPECT_EQ(refused({"train", "--data", "a", "--checkpoint-dir", "./~/run", "--report", "~report.json"}), "");
  EXPECT_EQ(refused({"generate", "--from", "a", "--prompt", "~/"}), "") << "a prompt is no path";
}

TEST(Arguments, HelpAndVersionAreTexts) {
  EXPECT_EQ(parse_arguments({"--version"}).text, std::string("tranche ") + version + "\n");
  EXPECT_THAT(parse_arguments({"--help"}).text,
              AllOf(HasSubstr("train"), HasSubstr("evaluate"), HasSubstr("plan"), HasSubstr("info")));
  const std::string help = parse_arguments({"train", "--help"}).text;
  EXPECT_THAT(help, AllOf(HasSubstr("--accumulate"), HasSubstr("--digest-every"),
                          HasSubstr("--memory-profile"), Not(HasSubstr("--debug-fail")),
                          HasSubstr("--resume latest|best|DIR "), HasSubstr("mpirun -n 4 tranche train")));
  EXPECT_THAT(parse_arguments({"evaluate", "--help"}).text, HasSubstr("initial weights"));
}

TEST(Arguments, HelpNamesTypesValuesAndDefaultsInGroups) {
  const std::string help = parse_arguments({"train", "--help"}).text;
  std::size_t last = 0;
  for (const char* group : {"\nModel:\n", "\nConfiguration:\n", "\nBatch:\n", "\nZeRO and offload:\n",
                            "\nDevice and memory:\n", "\nData and validation:\n", "\nOutput:\n"}) {
    const std::size_t at = help.find(group);
    ASSERT_NE(at, std::string::npos) << group << help;
    EXPECT_GT(at, last) << group;
    last = at;
  }
  for (const char* group : {"\nSteps:\n", "\nCheckpoints:\n"}) EXPECT_THAT(help, HasSubstr(group));
  for (const char* line :
       {"  --model PRESET|FILE         preset or Hugging Face config.json [gpt-mini]\n",
        "  --stage 0|1|2|3             ZeRO stage\n",
        "  --device cpu|cuda           where a rank computes [cpu]\n",
        "  --offload-optimizer none|cpu|nvme\n                              where master weights",
        "  --device-memory SIZE        most memory of a rank, like 512MiB\n",
        "  --steps N                   step to reach", "  --lr X                      learning rate",
        "  --checkpoint-dir DIR        folder of checkpoints", " saves at the end, and\n",
        "\n                              on SIGUSR1, SIGUSR2, SIGTERM or SIGHUP"}) {
    EXPECT_THAT(help, HasSubstr(line));
  }
  const std::string program = parse_arguments({"--help"}).text;
  EXPECT_THAT(program,
              AllOf(HasSubstr("\nExamples:\n  tranche plan --model gpt2-xl"), HasSubstr("\nExit status:\n"),
                    HasSubstr("2 flags, configuration or data"), HasSubstr("tranche config check")));
}

TEST(Arguments, HelpHasLinesOfAHundredColumnsAndNoNamelessTypes) {
  for (const std::vector<std::string>& command : {std::vector<std::string>{},
                                                  {"train"},
                                                  {"evaluate"},
                                                  {"generate"},
                                                  {"plan"},
                                                  {"calibrate"},
                                                  {"scale"},
                                                  {"schedule"},
                                                  {"info"},
                                                  {"config"},
                                                  {"config", "check"},
                                                  {"checkpoint"},
                                                  {"checkpoint", "list"},
                                                  {"checkpoint", "verify"},
                                                  {"checkpoint", "show"},
                                                  {"checkpoint", "export"},
                                                  {"checkpoint", "import"},
                                                  {"checkpoint", "diff"}}) {
    std::vector<std::string> arguments = command;
    arguments.emplace_back("--help");
    const std::string help = parse_arguments(arguments).text;
    std::istringstream lines(help);
    for (std::string line; std::getline(lines, line);) {
      EXPECT_LE(line.size(), 100u) << line;
      EXPECT_FALSE(line.ends_with(' ')) << "'" << line << "'";
      if (!line.starts_with("  --prompt ") && !line.starts_with("  --stop ")) {
        EXPECT_THAT(line, Not(HasSubstr(" TEXT")));
      }
      for (const char* type : {" INT", " UINT", " FLOAT"}) EXPECT_THAT(line, Not(HasSubstr(type)));
    }
    EXPECT_THAT(help, Not(HasSubstr("\n\n\n")));
  }
}

}  // namespace
}  // namespace tranche::tools
