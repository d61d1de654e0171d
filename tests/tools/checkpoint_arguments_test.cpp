#include "tools/checkpoint/checkpoint_arguments.h"

#include <gmock/gmock.h>

#include "tests/tools/temporary.h"
#include "tools/arguments.h"
#include "tranche/core/error.h"

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

CheckpointOptions parsed(const std::vector<std::string>& arguments) {
  const Options options = parse_arguments(arguments);
  EXPECT_EQ(options.command, Command::checkpoint);
  return options.checkpoint;
}

TEST(CheckpointArguments, ReadsEveryAction) {
  CheckpointOptions options = parsed({"checkpoint", "list", "run", "--json"});
  EXPECT_EQ(options.action, CheckpointAction::list);
  EXPECT_EQ(options.path, "run");
  EXPECT_TRUE(options.json);
  options = parsed({"checkpoint", "verify", "run"});
  EXPECT_EQ(options.action, CheckpointAction::verify);
  EXPECT_FALSE(options.json);
  options = parsed({"checkpoint", "show", "--tensor", "a.w", "run"});
  EXPECT_EQ(options.action, CheckpointAction::show);
  EXPECT_EQ(options.tensor, "a.w");
  EXPECT_EQ(options.path, "run");
  options = parsed({"checkpoint", "export", "run", "--to", "hf", "--dtype", "bf16", "--model", "gpt2"});
  EXPECT_EQ(options.action, CheckpointAction::export_folder);
  EXPECT_EQ(options.to, "hf");
  EXPECT_EQ(options.dtype, "bf16");
  EXPECT_EQ(options.model, "gpt2");
  options = parsed({"checkpoint", "import", "hf", "--to", "run"});
  EXPECT_EQ(options.action, CheckpointAction::import_folder);
  EXPECT_EQ(options.path, "hf");
  options = parsed({"checkpoint", "diff", "a", "b", "--json"});
  EXPECT_EQ(options.action, CheckpointAction::diff);
  EXPECT_EQ(options.path, "a");
  EXPECT_EQ(options.second, "b");
}

TEST(CheckpointArguments, ComplaintsSayWhatThereIs) {
  EXPECT_THAT(error_of({"checkpoint"}), HasSubstr("which of list, verify, show, export, import and diff?"));
  EXPECT_THAT(error_of({"checkpoint", "verfy", "x"}),
              AllOf(HasSubstr("'verfy' is no command of tranche checkpoint (did you mean verify?)"),
                    HasSubstr("list, verify, show, export, import, diff")));
  EXPECT_THAT(error_of({"checkpoint", "list"}), HasSubstr("folder"));
  EXPECT_THAT(error_of({"checkpoint", "diff", "a"}), HasSubstr("second"));
  EXPECT_THAT(error_of({"checkpoint", "export", "a"}), HasSubstr("--to"));
  EXPECT_THAT(error_of({"checkpoint", "list", "a", "b"}),
              HasSubstr("'b' is no argument of tranche checkpoint list"));
  EXPECT_THAT(error_of({"checkpoint", "show", "a", "--tensr", "b"}),
              HasSubstr("unknown flag --tensr (did you mean --tensor?); see tranche checkpoint show --help"));
  EXPECT_THAT(error_of({"checkpoint", "export", "a", "--to", "b", "--dtype", "fp8"}),
              HasSubstr("--dtype fp8 is not one of"));
}

TEST(CheckpointArguments, Help) {
  EXPECT_THAT(parse_arguments({"checkpoint", "--help"}).text,
              AllOf(HasSubstr("verify"), HasSubstr("tranche checkpoint")));
  EXPECT_THAT(parse_arguments({"checkpoint", "export", "--help"}).text,
              AllOf(HasSubstr("tranche checkpoint export"), HasSubstr("--to"), Not(HasSubstr("--tensor"))));
  EXPECT_THAT(parse_arguments({"generate", "-h"}).text,
              AllOf(HasSubstr("--prompt"), HasSubstr("tranche generate")));
}

TEST(GenerateArguments, ReadsEveryFlag) {
  const Options options =
      parse_arguments({"generate",      "--from",  "run",     "--prompt",  "It was", "--tokens", "9",
                       "--temperature", "0.5",     "--top-k", "40",        "--seed", "3",        "--dtype",
                       "bf16",          "--stage", "3",       "--threads", "2",      "--model",  "gpt2"});
  EXPECT_EQ(options.command, Command::generate);
  const GenerateOptions& given = options.generate;
  EXPECT_EQ(given.from, "run");
  EXPECT_THAT(given.prompts, testing::ElementsAre("It was"));
  EXPECT_EQ(given.tokens, 9);
  EXPECT_EQ(given.temperature, 0.5);
  EXPECT_EQ(given.top_k, 40);
  EXPECT_EQ(given.seed, 3);
  EXPECT_EQ(given.dtype, "bf16");
  EXPECT_EQ(given.stage, 3);
  EXPECT_EQ(given.threads, 2);
  EXPECT_EQ(given.model, "gpt2");
  EXPECT_FALSE(given.greedy);
  EXPECT_TRUE(given.cache && !given.json);
  EXPECT_EQ(given.max_batch, 8);
  EXPECT_TRUE(parse_arguments({"generate", "--from", "x", "--prompt", "a", "--greedy"}).generate.greedy);
  const GenerateOptions many = parse_arguments({"generate", "--from", "x", "--prompt", "a", "--prompt", "b",
                                                "--max-batch", "3", "--no-cache", "--json"})
                                   .generate;
  EXPECT_THAT(many.prompts, testing::ElementsAre("a", "b"));
  EXPECT_EQ(many.max_batch, 3);
  EXPECT_TRUE(many.json && !many.cache);
  EXPECT_EQ(parse_arguments({"generate", "--from", "x", "--prompts", "f.txt"}).generate.prompts_file,
            "f.txt");
}

TEST(GenerateArguments, RefusesWhatCannotBe) {
  const auto refused = [](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"generate", "--from", "run", "--prompt", "a"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return error_of(arguments);
  };
  EXPECT_THAT(refused({"--tokens", "0"}), HasSubstr("--tokens is 0, but must be at least 1"));
  EXPECT_THAT(refused({"--temperature", "-1"}), HasSubstr("--temperature is -1, but must not be negative"));
  EXPECT_THAT(refused({"--temperature", "nan"}), HasSubstr("--temperature is nan"));
  EXPECT_THAT(refused({"--top-k", "-2"}), HasSubstr("--top-k is -2"));
  EXPECT_THAT(refused({"--top-p", "0"}), HasSubstr("--top-p is 0, but must be above 0 and at most 1"));
  EXPECT_THAT(refused({"--top-p", "1.5"}), HasSubstr("--top-p is 1.5"));
  EXPECT_THAT(refused({"--stop", ""}), HasSubstr("--stop is empty"));
  EXPECT_THAT(refused({"--seed", "-2"}), HasSubstr("--seed is -2"));
  EXPECT_THAT(refused({"--stage", "4"}), HasSubstr("--stage is 4, but must be 0 to 3"));
  EXPECT_THAT(refused({"--threads", "0"}), HasSubstr("--threads is 0"));
  EXPECT_THAT(refused({"--dtype", "int8"}), HasSubstr("--dtype int8 is not one of fp32, bf16, fp16"));
  EXPECT_THAT(refused({"--dtype", "fp64"}), HasSubstr("--dtype fp64 is not one of fp32, bf16, fp16"));
  for (const char* name : {"float16", "half", "bfloat16", "float32"})
    EXPECT_NO_THROW(parse_arguments({"generate", "--from", "x", "--prompt", "a", "--dtype", name})) << name;
  EXPECT_THAT(refused({"--promt", "b"}), HasSubstr("unknown flag --promt"));
}

TEST(GenerateArguments, TextsAreTakenAsTheyAre) {
  const std::vector<std::string> texts{
      "[INST] Hello, world [/INST]", "[]", "[1,2,3]", "a, b", "{c}", "\"d\""};
  std::vector<std::string> prompts{"generate", "--from", "run", "--stop=[a, b]"},
      tokens{"generate", "--from", "run"}, renames{"checkpoint", "import", "hf", "--to", "run"},
      run{"train", "--data", "a.txt", "--resume-weights-only", "b"};
  for (const std::string& text : texts) {
    prompts.insert(prompts.end(), {"--prompt", text, "--stop", text});
    renames.insert(renames.end(), {"--rename", "[" + text + "=b,c]"});
    run.insert(run.end(), {"--rename", "[" + text + "=b,c]"});
  }
  const GenerateOptions given = parse_arguments(prompts).generate;
  EXPECT_EQ(given.prompts, texts);
  EXPECT_EQ(given.stop.front(), "[a, b]");
  EXPECT_EQ(std::vector<std::string>(given.stop.begin() + 1, given.stop.end()), texts);
  std::vector<std::string> renamed;
  for (const std::string& text : texts) renamed.push_back("[" + text + "=b,c]");
  EXPECT_EQ(parsed(renames).rename, renamed);
  EXPECT_EQ(parse_arguments(run).rename, renamed);
  tokens.insert(tokens.end(), {"--prompt-tokens", "1,2,3", "--prompt-tokens", "4"});
  EXPECT_THAT(parse_arguments(tokens).generate.prompt_tokens, ElementsAre("1,2,3", "4"));
  EXPECT_THAT(error_of({"generate", "--from", "run", "--prompt-tokens", "[1,2,3]"}),
              HasSubstr("--prompt-tokens '[1,2,3]' is not a list of numbers like 1,2,3"));
  EXPECT_THAT(error_of({"generate", "--from", "run", "--prompt", "a", "b"}), HasSubstr("'b' is no argument"));
}

TEST(GenerateArguments, ListsOfTokens) {
  EXPECT_THAT(parse_tokens("7"), ElementsAre(7));
  EXPECT_THAT(parse_tokens("1,2, 50256 ,0"), ElementsAre(1, 2, 50256, 0));
  for (const char* wrong : {"", ",", "1,", "1 2", "-1", "a", "1,b", "1.5", "99999999999"}) {
    EXPECT_THAT(message_of<ConfigurationError>([&] { (void)parse_tokens(wrong); }),
                HasSubstr("is not a list of numbers like 1,2,3"))
        << wrong;
  }
}

}  // namespace
}  // namespace tranche::tools
