// tranche generate on one rank.

#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/tools/gpt_checkpoint.h"
#include "tests/tools/program_fixture.h"
#include "tests/training/sentencepiece_bytes.h"
#include "tools/train/evaluation.h"
#include "tranche/core/error.h"
#include "tranche/models/gpt.h"

namespace tranche::tools {
namespace {

using test::ProgramResult;
using testing::AllOf;
using testing::HasSubstr;

ProgramResult generate(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "generate");
  arguments.insert(arguments.end(), {"--threads", "1"});
  return test::run(arguments);
}

class Generate : public testing::Test {
 protected:
  /// The model's tokens for given weights, without loading anything.
  std::vector<std::int32_t> expected(std::vector<std::int32_t> tokens, int count, std::size_t context) const {
    const models::GptConfig config = test::tiny_gpt();
    Runtime runtime = Runtime::from_config(R"({"bf16": {"enabled": false}, "tranche": {"threads": 1}})");
    Engine engine(runtime, models::Gpt::spec(config, 16), runtime.config());
    for (const UnitSpec& unit : engine.model().units()) {
      for (const TensorSpec& tensor : unit.tensors) {
        std::vector<float> values(static_cast<std::size_t>(tensor.shape.elements()));
        for (std::size_t e = 0; e < values.size(); ++e) {
          values[e] = test::sample_value("weight", tensor.name, static_cast<std::int64_t>(e));
        }
        engine.write_weight(tensor.name, values);
      }
    }
    const models::Gpt model(config);
    for (int i = 0; i < count; ++i) {
      const auto seen = std::span<const std::int32_t>(tokens).last(std::min(tokens.size(), context));
      const std::vector<float> logits = model.next_token_logits(engine, seen);
      tokens.push_back(
          static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    }
    return tokens;
  }
  static std::string numbers(const std::vector<std::int32_t>& tokens) {
    std::string text;
    for (const std::int32_t token : tokens) text += (text.empty() ? "" : " ") + std::to_string(token);
    return text + "\n";
  }
  test::TemporaryFolder folder_;
};

TEST_F(Generate, WritesWhatTheModelFindsLikeliest) {
  // The text is longer than the training sequences of 16, so the model sees only the last 16 tokens.
  const std::string path = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {.world = 3});
  const std::vector<std::int32_t> tokens = expected({84, 104, 101}, 20, 16);
  const ProgramResult result =
      generate({"--from", path, "--prompt-tokens", "84,104, 101", "--tokens", "20", "--greedy"});
  EXPECT_EQ(result.status, 0) << result.errors;
  EXPECT_EQ(result.out, numbers(tokens));
  // The same as text: every byte is a token.
  const ProgramResult text =
      generate({"--from", folder_.path("run"), "--prompt", "The", "--tokens", "20", "--temperature", "0"});
  EXPECT_EQ(text.status, 0) << text.errors;
  std::string bytes;
  for (const std::int32_t token : tokens)
    bytes.push_back(static_cast<char>(static_cast<unsigned char>(token)));
  EXPECT_EQ(text.out, bytes + "\n");
}

TEST_F(Generate, FromAFolderOfHuggingFaces) {
  const std::string path = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {});
  ASSERT_EQ(test::run({"checkpoint", "export", path, "--to", folder_.path("hf")}).status, 0);
  const ProgramResult result =
      generate({"--from", folder_.path("hf"), "--prompt-tokens", "84,104,101", "--tokens", "30", "--greedy"});
  EXPECT_EQ(result.status, 0) << result.errors;
  EXPECT_EQ(result.out, numbers(expected({84, 104, 101}, 30, 24))) << "all 24 positions are seen";
  ASSERT_EQ(test::run({"checkpoint", "import", folder_.path("hf"), "--to", folder_.path("back")}).status, 0);
  const ProgramResult imported = generate(
      {"--from", folder_.path("back"), "--prompt-tokens", "84,104,101", "--tokens", "30", "--greedy"});
  EXPECT_EQ(imported.out, result.out) << imported.errors;
}

TEST_F(Generate, DrawsDependOnTheSeed) {
  const std::string path = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {});
  const auto drawn = [&](const std::string& seed, const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"--from",   path, "--prompt-tokens", "1",
                                       "--tokens", "24", "--seed",          seed};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult result = generate(arguments);
    EXPECT_EQ(result.status, 0) << result.errors;
    return result.out;
  };
  EXPECT_EQ(drawn("5", {}), drawn("5", {}));
  EXPECT_NE(drawn("5", {}), drawn("6", {}));
  EXPECT_EQ(drawn("5", {"--top-k", "1"}), drawn("6", {"--greedy"}));
  EXPECT_NE(drawn("5", {"--temperature", "0.01"}), drawn("5", {"--temperature", "9"}));
  EXPECT_EQ(drawn("5", {"--stage", "3"}), drawn("5", {}));
}

TEST_F(Generate, EndsBehindAStopText) {
  const std::string path = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {});
  const auto text = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments{"--from", path, "--prompt", "The", "--tokens", "20", "--greedy"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult result = generate(arguments);
    EXPECT_EQ(result.status, 0) << result.errors;
    return result.out.substr(0, result.out.size() - 1);
  };
  const std::string whole = text({});
  ASSERT_EQ(whole.size(), 23u);
  const std::string stop = whole.substr(9, 2);
  const std::string cut = whole.substr(0, whole.find(stop, 3) + 2);
  ASSERT_LT(cut.size(), whole.size());
  EXPECT_EQ(text({"--stop", stop}), cut) << "the text is written too";
  EXPECT_EQ(text({"--stop", "not there", "--stop", stop}), cut);
  EXPECT_EQ(text({"--stop", "The"}), whole) << "of the prompt";
}

TEST_F(Generate, SeveralPromptsAreWrittenInTheirOrder) {
  const std::string path = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {});
  const auto written = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"--from", path, "--tokens", "6"});
    const ProgramResult result = generate(arguments);
    EXPECT_EQ(result.status, 0) << result.errors;
    return result.out;
  };
  const std::string first = written({"--prompt", "The", "--greedy"});
  const std::string second = written({"--prompt", "A long time ago", "--greedy"});
  const std::string both = "==> prompt 1 of 2 <==\n" + first + "\n==> prompt 2 of 2 <==\n" + second;
  EXPECT_EQ(written({"--prompt", "The", "--prompt", "A long time ago", "--greedy"}), both);
  const std::string lines = folder_.write("prompts.txt", "The\r\n\nA long time ago");
  EXPECT_EQ(written({"--prompts", lines, "--greedy"}), both);
  const std::string objects =
      folder_.write("prompts.jsonl", "{\"prompt\": \"The\"}\n{\"prompt\": \"A long time ago\", \"id\": 7}\n");
  EXPECT_EQ(written({"--prompts", objects, "--greedy", "--max-batch", "1"}), both);
  EXPECT_EQ(written({"--prompts", objects, "--greedy", "--no-cache"}), both);
  const std::string named_otherwise = folder_.write("objects.txt", "\xef\xbb\xbf" + test::read_file(objects));
  EXPECT_EQ(written({"--prompts", named_otherwise, "--greedy"}), both);
  EXPECT_THAT(generate({"--from", path, "--tokens", "1", "--prompts", named_otherwise}).errors,
              HasSubstr("note: --prompts '" + named_otherwise +
                        "' holds JSON lines, an object a line, each a prompt"));
  EXPECT_THAT(written({"--prompts", named_otherwise, "--prompts-format", "text", "--greedy"}),
              HasSubstr("==> prompt 1 of 2 <==\n{\"prompt\": \"The\"}"));
  const std::string numbers =
      written({"--prompt-tokens", "84,104,101", "--prompt-tokens", "65", "--temperature", "2"});
  EXPECT_THAT(numbers,
              testing::MatchesRegex(
                  "==> prompt 1 of 2 <==\n84 104 101( [0-9]+)+\n\n==> prompt 2 of 2 <==\n65( [0-9]+)+\n"));
}

TEST_F(Generate, JsonLinesAreForPrograms) {
  const std::string path = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {});
  const auto lines = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"--from", path, "--json", "--greedy"});
    const ProgramResult result = generate(arguments);
    EXPECT_EQ(result.status, 0) << result.errors;
    std::vector<nlohmann::json> objects;
    std::istringstream text(result.out);
    for (std::string line; std::getline(text, line);) objects.push_back(nlohmann::json::parse(line));
    return objects;
  };
  const std::vector<std::int32_t> whole = expected({84, 104, 101}, 6, 16);
  const std::vector<std::int32_t> tokens(whole.begin() + 3, whole.end());
  const auto text = lines({"--prompt", "The", "--prompt", "x", "--tokens", "6"});
  ASSERT_EQ(text.size(), 2u);
  EXPECT_EQ(text[0]["index"], 0);
  EXPECT_EQ(text[0]["prompt"], "The");
  EXPECT_TRUE(text[0]["text"].is_string());
  EXPECT_EQ(text[0]["tokens"], tokens);
  EXPECT_EQ(text[0]["end"], "length");
  EXPECT_EQ(text[1]["index"], 1);
  const auto numbers = lines({"--prompt-tokens", "84,104,101", "--tokens", "6"});
  ASSERT_EQ(numbers.size(), 1u);
  EXPECT_EQ(numbers[0]["prompt"], (std::vector<std::int32_t>{84, 104, 101}));
  EXPECT_EQ(numbers[0]["tokens"], tokens);
  EXPECT_FALSE(numbers[0].contains("text"));
  // The first byte that can be passed as an argument stops generation.
  for (const std::int32_t token : tokens) {
    if (token < 33 || token > 126) continue;
    const std::string stop(1, static_cast<char>(token));
    const auto stopped = lines({"--prompt", "The", "--stop", stop, "--tokens", "6"});
    EXPECT_EQ(stopped.at(0)["end"], "stop");
    EXPECT_EQ(stopped.at(0)["tokens"].back(), token);
    return;
  }
}

TEST_F(Generate, InHalfPrecision) {
  const std::string path = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {});
  for (const char* dtype : {"bf16", "fp16"}) {
    const ProgramResult result =
        generate({"--from", path, "--prompt", "a", "--tokens", "3", "--dtype", dtype});
    EXPECT_EQ(result.status, 0) << result.errors;
    EXPECT_EQ(result.out.size(), 5u);
  }
}

TEST_F(Generate, SaysWhatItCannotDo) {
  const std::string bytes = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {});
  const std::string tokens = test::save_gpt(folder_.path("tokens"), test::tiny_gpt(300), {});
  const std::string other = test::save_gpt(folder_.path("other"), test::tiny_gpt(), {.user = R"({"a": 1})"});
  struct Case {
    std::vector<std::string> arguments;
    int status;
    std::string text;
  };
  const std::string talk = R"({"messages": [{"role": "user", "content": "a"}]})";
  folder_.write("p.txt", "a");
  std::filesystem::create_directory(folder_.path("tok"));
  folder_.write("tok/tokenizer.model", training::test::SmallModel().bytes());
  folder_.write("silent.jinja", "{# nothing #}");
  folder_.write("t.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
  const std::vector<Case> cases{
      {{"--from", tokens, "--prompt", "a"},
       2,
       "is of tokens below 300: how the --prompt is encoded in them is not known"},
      {{"--from", tokens, "--prompt-tokens", "299,300"},
       2,
       "token 300 of the prompt is not below the model's vocabulary of 300"},
      {{"--from", bytes},
       2,
       "give a --prompt, --prompts with a file, or --prompt-tokens like 1,2,3: one of the three"},
      {{"--from", bytes, "--prompt", "a", "--prompt-tokens", "1"}, 2, "one of the three"},
      {{"--from", bytes, "--prompt", "a", "--prompts", "file"}, 2, "one of the three"},
      {{"--from", bytes, "--prompt", "a", "--prompt", ""}, 2, "the --prompt is empty"},
      {{"--from", bytes, "--prompt", "a", "--max-batch", "0"}, 2, "--max-batch is 0, but must be at least 1"},
      {{"--from", bytes, "--prompts", folder_.path("none")},
       2,
       "--prompts '" + folder_.path("none") + "' cannot be read"},
      {{"--from", bytes, "--prompts", folder_.write("empty.txt", "\n \n")}, 2, "empty.txt has no prompts"},
      {{"--from", bytes, "--prompts", folder_.write("a.jsonl", "{\"prompt\": \"a\"}\n\n[1]\n")},
       2,
       "a.jsonl, line 3: is no JSON object"},
      {{"--from", bytes, "--prompts", folder_.write("b.jsonl", "{\"text\": \"a\"}")},
       2,
       "b.jsonl, line 1: has no \"prompt\", which is a text to go on from"},
      {{"--from", bytes, "--prompts", folder_.write("c.jsonl", "{\"prompt\": \"\"}")},
       2,
       "c.jsonl, line 1: has no \"prompt\""},
      {{"--from", bytes, "--prompts", folder_.write("m.jsonl", talk)},
       2,
       "m.jsonl, line 1: messages[0] is a message"},
      {{"--from", bytes, "--prompts", folder_.path("m.jsonl"), "--chat-template", "chatml"},
       2,
       "the tokenizer has no token '<|im_start|>', which chat template chatml writes"},
      {{"--from", bytes, "--prompts", folder_.path("m.jsonl"), "--chat-date", "today"},
       2,
       "--chat-date is 'today'"},
      {{"--from", bytes, "--prompts", folder_.path("p.txt"), "--chat-template", folder_.path("t.jinja")},
       2,
       "--chat-template says how conversations are written, but --prompts '" + folder_.path("p.txt") +
           "' holds none"},
      {{"--from", bytes, "--prompts", folder_.write("g.txt", std::string("\x1f\x8b\x08\0", 4))},
       2,
       "g.txt' is compressed by gzip; unpack it first: zcat"},
      {{"--from", bytes, "--prompts", folder_.write("l.json", "[{\"prompt\": \"a\"}]")},
       2,
       "l.json' is one array of JSON; write it as JSON lines first, an object a line: jq -c '.[]'"},
      {{"--from", bytes, "--prompts", folder_.path("p.txt"), "--prompts-format", "json"},
       2,
       "--prompts-format 'json' is not one of auto, text, jsonl; did you mean jsonl?"},
      {{"--from", bytes, "--prompt", "a", "--prompts-format", "text"},
       2,
       "--prompts-format is of --prompts FILE"},
      {{"--from", bytes, "--prompt", "a", "--chat-template", "own"},
       2,
       "--chat-template writes the messages of"},
      {{"--from", bytes, "--prompt", ""}, 2, "the --prompt is empty"},
      {{"--from", bytes, "--prompt", "a", "--tokenizer", folder_.path("tok")},
       2,
       " tokens, but the model of " + bytes + " has only 256: they do not belong together"},
      {{"--from", bytes, "--prompts", folder_.path("m.jsonl"), "--chat-template",
        folder_.path("silent.jinja")},
       2,
       "m.jsonl, line 1: the chat template writes no text for its messages"},
      {{"--from", bytes, "--prompt-tokens", "1", "--stop", "a"}, 2, "--stop is a text"},
      {{"--prompt", "a"}, 2, "--from"},
      {{"--from", folder_.path("none"), "--prompt", "a"}, 4, "cannot generate from " + folder_.path("none")},
      {{"--from", folder_.path(""), "--prompt", "a"}, 4, "there is no complete checkpoint in"},
      {{"--from", other, "--prompt", "a"}, 4, "does not say which model it holds"},
      {{"--from", bytes, "--prompt", "a", "--model", "gpt-nano"},
       4,
       "does not hold the model of --model gpt-nano"},
  };
  for (const Case& wrong : cases) {
    const ProgramResult result = generate(wrong.arguments);
    EXPECT_EQ(result.status, wrong.status) << result.errors;
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.errors, HasSubstr(wrong.text));
  }
  const std::string config = folder_.write("config.json", test::tiny_gpt().to_json());
  EXPECT_EQ(generate({"--from", other, "--prompt", "a", "--tokens", "2", "--model", config}).status, 0);
}

TEST_F(Generate, EndsWhereTheModelSays) {
  const std::string run = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {}), hf = folder_.path("hf");
  ASSERT_EQ(test::run({"checkpoint", "export", run, "--to", hf}).status, 0);
  const std::vector<std::int32_t> whole = expected({84, 104, 101}, 6, 24);
  const std::int32_t end = whole[5];  // the third new token, if it does not occur earlier
  const auto first = std::find(whole.begin() + 3, whole.end(), end);
  const std::vector<std::int32_t> cut(whole.begin() + 3, first);
  const std::string config = test::read_file(hf + "/config.json");
  const auto ends = [&](const std::string& from, const std::vector<std::string>& prompt) {
    std::vector<std::string> arguments{"--from", from, "--tokens", "6", "--greedy", "--json"};
    arguments.insert(arguments.end(), prompt.begin(), prompt.end());
    const ProgramResult result = generate(arguments);
    EXPECT_EQ(result.status, 0) << result.errors;
    const auto json = nlohmann::json::parse(result.out);
    EXPECT_EQ(json["tokens"], cut) << result.out;
    EXPECT_EQ(json["end"], "end_token");
  };
  const auto everywhere = [&](const std::string& name) {
    ASSERT_EQ(test::run({"checkpoint", "import", hf, "--to", folder_.path(name)}).status, 0);
    for (const std::string& from : {hf, folder_.path(name)}) {
      ends(from, {"--prompt-tokens", "84,104,101"});
      ends(from, {"--prompt", "The"});
    }
  };
  const std::string list = "{\"eos_token_id\": [300, " + std::to_string(end) + "]}";
  folder_.write("hf/generation_config.json", list);
  everywhere("of-generation-config");
  // generation_config.json has priority over config.json.
  nlohmann::json other = nlohmann::json::parse(config);
  other["eos_token_id"] = whole[3];
  folder_.write("hf/config.json", other.dump());
  everywhere("of-both");
  std::filesystem::remove(hf + "/generation_config.json");
  other["eos_token_id"] = end;
  folder_.write("hf/config.json", other.dump());
  everywhere("of-config");
  models::GptConfig named = test::tiny_gpt();
  named.token_ids["eos_token_id"] = std::to_string(end);
  RunIdentity identity = test::tiny_identity();
  identity.model = std::make_shared<const models::Gpt>(named);
  ends(test::save_gpt(folder_.path("of-model"), named, {.user = identity.to_json()}),
       {"--prompt-tokens", "84,104,101"});
}

TEST_F(Generate, SaysThatNoTokenEndsAText) {
  const std::string tokens = test::save_gpt(folder_.path("tokens"), test::tiny_gpt(300), {});
  const ProgramResult result = generate({"--from", tokens, "--prompt-tokens", "1", "--tokens", "2"});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.errors, AllOf(HasSubstr("note: no end token is known: " + tokens + " carries no"),
                                   HasSubstr("every text gets all --tokens 2")));
}

TEST_F(Generate, LogitsThatAreNotFiniteAreAnError) {
  const std::string run = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {}), hf = folder_.path("hf");
  ASSERT_EQ(test::run({"checkpoint", "export", run, "--to", hf}).status, 0);
  std::string file = test::read_file(hf + "/model.safetensors");
  const std::uint32_t infinity = 0x7f800000;
  std::memcpy(file.data() + file.size() - 4, &infinity, 4);
  folder_.write("hf/model.safetensors", file);
  const ProgramResult imported = test::run({"checkpoint", "import", hf, "--to", folder_.path("back")});
  EXPECT_EQ(imported.status, 0);
  EXPECT_THAT(imported.out, HasSubstr("note: 1 of "));
  EXPECT_THAT(imported.out,
              HasSubstr("weights is not finite, the first one element 3839 of transformer.wte.weight (inf)"));
  for (const std::string& from : {hf, folder_.path("back")}) {
    const ProgramResult result =
        generate({"--from", from, "--prompt", "a", "--prompt", "b", "--tokens", "3"});
    EXPECT_EQ(result.status, 6) << result.errors;
    EXPECT_THAT(result.errors, AllOf(HasSubstr("the logits behind prompt 2 are not finite"),
                                     HasSubstr("the first weight that is not finite is element 3839 of "
                                               "transformer.wte.weight (inf)")));
    EXPECT_EQ(result.out, "");
  }
}

TEST_F(Generate, SaysWhatOfAPromptIsNotSeen) {
  // The sequences have 16 tokens.
  const std::string path = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {});
  const auto run = [&](const std::string& prompt, const std::string& tokens) {
    const ProgramResult result = generate({"--from", path, "--prompt", prompt, "--tokens", tokens, "--json"});
    EXPECT_EQ(result.status, 0) << result.errors;
    return std::pair(nlohmann::json::parse(result.out), result.errors);
  };
  const auto [fits, nothing] = run(std::string(13, 'x'), "4");
  EXPECT_FALSE(fits.contains("unseen_prompt_tokens"));
  EXPECT_EQ(nothing, "");
  const auto [longer, lost] = run(std::string(20, 'x'), "1");
  EXPECT_EQ(longer["unseen_prompt_tokens"], 4);
  EXPECT_EQ(lost,
            "note: the model sees 16 tokens at once: prompt 1 has 20, and nothing of its first 4 was seen\n");
  const auto [grown, moved] = run(std::string(13, 'x'), "6");
  EXPECT_EQ(grown["unseen_prompt_tokens"], 2);
  EXPECT_EQ(moved,
            "note: the model sees 16 tokens at once: text and prompt 1 are longer, and the last tokens were "
            "written "
            "without the prompt's first 2\n");
}

TEST_F(Generate, SaysWhichSettingsOfTheModelAreNotTaken) {
  const std::string run = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {}), hf = folder_.path("hf"),
                    path = hf + "/generation_config.json";
  ASSERT_EQ(test::run({"checkpoint", "export", run, "--to", hf}).status, 0);
  const auto notes = [&](const std::string& settings, std::vector<std::string> more) {
    folder_.write("hf/generation_config.json", settings);
    more.insert(more.begin(), {"--from", hf, "--prompt-tokens", "1", "--tokens", "1"});
    const ProgramResult result = generate(more);
    EXPECT_EQ(result.status, 0) << result.errors;
    return result.errors;
  };
  const auto asks = [&](const std::string& settings) {
    return "note: " + path + " asks for " + settings +
           ", which is not taken; --temperature, --top-k, --top-p and --greedy say how tokens are drawn\n";
  };
  const std::string ours =
      R"("eos_token_id": 3, "do_sample": true, "top_p": null, "temperature": 0.6, "top_k": 20)";
  const std::string qwen = "{" + ours + R"(, "repetition_penalty": 1.05})";
  EXPECT_EQ(notes(qwen, {}), asks("temperature 0.6, top_k 20, repetition_penalty 1.05"));
  EXPECT_EQ(notes(qwen, {"--greedy"}), asks("repetition_penalty 1.05"));
  EXPECT_EQ(notes("{" + ours + "}", {"--temperature", "0.6", "--top-k", "20"}), "");
  EXPECT_EQ(notes(R"({"eos_token_id": 3, "do_sample": false, "num_beams": 4})", {}),
            asks("do_sample false, num_beams 4"));
  EXPECT_EQ(notes(R"({"eos_token_id": 3})", {"--greedy", "--top-k", "2", "--temperature", "2"}),
            "note: --temperature has no effect: --greedy always takes the likeliest token\n"
            "note: --top-k has no effect: --greedy always takes the likeliest token\n");
  EXPECT_EQ(notes(R"({"eos_token_id": 3})", {"--temperature", "0", "--seed", "2"}),
            "note: --seed has no effect: --temperature 0 always takes the likeliest token\n");
}

TEST_F(Generate, DamageIsFoundBeforeAnythingIsWritten) {
  const std::string path = test::save_gpt(folder_.path("run"), test::tiny_gpt(), {});
  test::flip(path + "/shard-00000-of-00001.h5", 4096 * 3);
  const ProgramResult result = generate({"--from", path, "--prompt", "a"});
  EXPECT_EQ(result.status, 4);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.errors,
              AllOf(HasSubstr("is damaged in bytes"), HasSubstr("of tensor transformer.wte.weight")));
}

}  // namespace
}  // namespace tranche::tools
