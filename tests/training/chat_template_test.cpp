#include <gmock/gmock.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/tools/temporary.h"
#include "training/chat_template/template.h"
#include "tranche/core/error.h"
#include "tranche/training/documents.h"

namespace tranche::training {
namespace {

using nlohmann::ordered_json;
using testing::AllOf;
using testing::HasSubstr;
using tools::test::message_of;
using tools::test::TemporaryFolder;

jinja::Rendering filled(const std::string& text, const ordered_json& values, const std::string& date = "") {
  jinja::Variables variables;
  variables.date = date;
  variables.bytes = values.dump().size();
  for (const auto& [name, value] : values.items())
    variables.values.emplace_back(name, jinja::Value::of(value));
  return jinja::render(jinja::parse(text), text.size(), variables);
}

/// The error as "line 3: reason"; empty if nothing is refused.
std::string refusal(const std::string& text, const ordered_json& values = ordered_json::object()) {
  try {
    (void)filled(text, values);
  } catch (const jinja::Refusal& refused) {
    return "line " + std::to_string(refused.line) + ": " + refused.what;
  }
  return "";
}

/// The conversation's text with the learned parts in braces.
std::string learned(const std::string& text, const std::string& conversation,
                    const std::string& variables = "{}") {
  const JinjaTemplate chat(text, "T", variables);
  std::string result;
  for (const Segment& segment : chat.segments(ordered_json::parse(conversation), "", ""))
    result += segment.target ? "{" + segment.text + "}" : segment.text;
  return result;
}

constexpr const char* chatml =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
constexpr const char* talk =
    R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "No"}, {"role": "assistant", "content": "So"}]})";

TEST(ChatTemplateGolden, TextsAreThoseOfJinja) {
  std::ifstream file(TRANCHE_GOLDEN_CHAT_TEMPLATES);
  const auto golden = ordered_json::parse(file);
  EXPECT_GE(golden["cases"].size(), 105u);
  for (const auto& each : golden["cases"]) {
    const auto text = each["template"].get<std::string>();
    try {
      const std::string own = filled(text, golden["values"]).text;
      EXPECT_TRUE(each.contains("text"))
          << text << " is " << own << ", which Jinja refuses: " << each["refused"];
      EXPECT_EQ(own, each.value("text", own)) << text;
    } catch (const jinja::Refusal& refused) {
      EXPECT_FALSE(each.contains("text")) << text << ": " << refused.what;
    }
  }
}

TEST(ChatTemplate, RefusalsSayLineAndConstruct) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"a\n{% include 'x' %}", "line 2: the block 'include' is not supported"},
      {"\n\n{{ x|frobnicate }}", "line 3: the filter 'frobnicate' is not supported"},
      {"{{ x is prime }}", "line 1: the test 'prime' is not supported"},
      {"{{ x.append(1) }}", "line 1: the method 'append' changes a value, which transformers does not allow"},
      {"{{ x.zfill(1) }}", "line 1: the method 'zfill' is not supported"},
      {"{{\nlipsum() }}", "line 2: the function 'lipsum' is not known"},
      {"{{ x.__class__ }}", "line 1: the attribute '__class__' is not supported"},
      {"{{ 2 ** 3 }}", "line 1: the operator '**' is not supported"},
      {"{% for i in x recursive %}{% endfor %}", "line 1: a recursive loop is not supported"},
      {"{% for i in x %}\n{% macro f() %}{% endmacro %}{% endfor %}",
       "line 2: a macro inside of a loop or of another macro is not supported"},
      {"{% set x | upper %}{% endset %}", "line 1: the block 'set' with a filter is not supported"},
      {"{{ f(*x) }}", "line 1: arguments of a list or a dictionary (* and **) are not supported"},
      {"{{ self }}", "line 1: the name 'self' is not supported"},
      {"{% break %}", "line 1: the block 'break' stands outside of a loop"},
      {"{% if x %}\n\n", "line 2: the template ends where a block 'endif' is expected"},
      {"{% endfor %}", "line 1: the block 'endfor' is not known or stands alone"},
      {"{{ x ", "line 1: an expression {{ has no end }}"},
      {"\n{% if x", "line 2: a block {% has no end %}"},
      {"{# x", "line 1: a comment {# has no end #}"},
      {"{% raw %}", "line 1: a block {% raw %} has no end {% endraw %}"},
      {"{{ 'x }}", "line 1: a text that begins with ' has no end"},
      {"{{ 'x\\q\\ud800' }}", "line 1: the escape \\ud800 is no character"},
      {"{{ (x] }}", "line 1: the bracket ']' closes none"},
      {"{{ x $ y }}", "line 1: the character '$' begins nothing"},
      {"{{ 1e5 }}", "line 1: the number '1' is followed by 'e'"},
      {"{{ if }}", "line 1: 'if' where a value is expected"},
      {"\xff", "line 0: is not UTF-8"},
      {"a\n{{ x.y }}", "line 2: 'x' is undefined"},
      {"{% if true %}\n{{ 'a'\n + 1 }}{% endif %}", "line 3: '+' of a str and a int is not supported"},
      {"{{ (1, 2)|map('string') }}", "line 1: writes a generator as text, which is not supported"},
      {"{{ 'é'|upper }}", "line 1: 'upper' of a text with other characters than ASCII's is not supported"},
      {"{{ 'a'|trim(x=1) }}", "line 1: the filter 'trim' has no argument 'x'"},
      {"{{ ('a'|safe) + 'b' }}",
       "line 1: '+' of a text of the filter 'safe', of which Python escapes the other side, is not "
       "supported"},
      {"{{ {'a': 1}.keys }}",
       "line 1: the method 'keys' of a dict that is not called; its key is reached by ['keys']"},
      {"{% set n = namespace() %}{% set n.x = n %}",
       "line 1: puts a namespace into a container, which is not supported"},
      {"{{ 9223372036854775 * 9223372036854775 }}", "line 1: the result of '*' has more than 64 bits"},
      {"\n{{ raise_exception('Roles must alternate') }}",
       "line 2: refuses the messages: Roles must alternate"},
      {"{% for a, b in [(1, 2, 3)] %}{% endfor %}", "line 1: 2 names are set to 3 values"},
      {"{{ x[] }}", "line 1: ']' where a subscript is expected"},
      {"{{ range(stop=1, 2) }}", "line 1: '2' where a named argument is expected"},
      {"{{ x|tojson(separators=',') }}", "line 1: the filter 'tojson' needs two texts as separators"},
      {"{{ [1]|select(1) }}", "line 1: the filter 'select' needs a test's name"},
      {"{{ ([1]|select)|last }}",
       "line 1: the filter 'last' of a generator, which Python cannot go through from its end"},
      {"{{ 'a'|replace('a', 'b', 'c') }}", "line 1: the filter 'replace' needs an integer as 'count'"},
      {"{{ 'a'.replace('a', 'b', 'c') }}", "line 1: replace() needs an integer, not a str"},
      {"{{ 'a'|replace('a') }}", "line 1: the filter 'replace' needs an argument 'new'"},
      {"{{ 'a'|replace('a', 1) }}", "line 1: the filter 'replace' needs a text as 'new', not a int"},
      {"{{ range('a') }}", "line 1: range() needs integers, not a str"},
      {"{{ 'a'|trim('b', 'c') }}", "line 1: the filter 'trim' has more arguments than are supported"},
      {"{{ dict({}, {}) }}", "line 1: dict() has more arguments than are supported"},
      {"{{ 'a'.startswith(('b', 1)) }}", "line 1: startswith() needs texts"},
      {"{{ 'a'.startswith(1) }}", "line 1: startswith() needs a text, not a int"},
      {"{{ 'a'.join([1]) }}", "line 1: join() joins texts, not a int"},
      {"{{ [1].items() }}", "line 1: a list has no method 'items'"},
      {"{{ 1 // 0 }}", "line 1: '//' by 0"},
      {"{{ 1.5 // 2 }}", "line 1: '//' of numbers with a fraction is not supported, nor is a division by 0"},
      {"{{ 1 in 'a' }}", "line 1: looks for a int in a text"},
      {"{{ 1 in 2 }}", "line 1: looks for something in a int, which has no entries"},
      {"{% set range = 1 %}{{ range() }}", "line 1: 'range' is a int, which cannot be called"},
      {"{{ x[0]() }}", "line 1: a call of a value that is neither a name nor a method is not supported"},
      {"{{ '1_0'|int }}", "line 1: the filter 'int' of the text '1_0' is not supported"},
      {"{{ 1|tojson(indent=65) }}",
       "line 1: the filter 'tojson' with an indent that is no integer from 0 to 64 is not supported"},
      {"{{ [1]|map('select')|list }}", "line 1: the filter 'map' with 'select' is not supported"},
      {"{{ 'a'|safe|upper }}", "line 1: the filter 'upper' behind the filter 'safe' is not supported"},
      {"{{ ('a'|safe).upper() }}",
       "line 1: upper() of a text of the filter 'safe', which escapes, is not supported"},
      {"{{ 1 is sameas 1 }}",
       "line 1: the test 'sameas' with anything but none, true and false is not supported"},
      {"{{ dict(1) }}", "line 1: dict() of a int is not supported"},
      {"{{ 012 }}", "line 1: the number '012' begins with 0"},
      {"{{ 1234567890123456789 }}", "line 1: a number has more than 18 digits"},
      {"{{ '\\1' }}", "line 1: the escape \\1 is not supported"},
      {"{{ 'a'.rsplit(none, 1) }}",
       "line 1: rsplit() with a limit needs a separator that is a text of at least one character"},
      {"{{ 'a'.strip(1) }}", "line 1: the characters that are stripped are a int, not a text"},
      {"{% for i in [1] %}{{ loop.changed }}{% endfor %}", "line 1: 'loop.changed' is not supported"},
      {"{{ 'a'['upper'] }}", "line 1: the attribute ['upper'] of a str is not supported"},
      {"{{ {}['keys'] }}", "line 1: the method ['keys'] of a dict is not supported"},
      {"{{ ([1]|select)[0] }}", "line 1: a subscript of a generator is not supported"},
      {"{{ ([1]|select) == ([1]|select) }}", "line 1: compares a generator, which is not supported"},
      {"{{ namespace() == 1 }}", "line 1: compares a namespace, which is not supported"},
      {"{% set loop = 1 %}", "line 1: 'loop' cannot be set"},
      {"{% set n.__x = 1 %}", "line 1: a namespace's value '__x' begins with _"},
      {"{% macro f(a=1, b) %}{% endmacro %}",
       "line 1: the argument 'b' without a default stands behind one that has it"},
  };
  for (const auto& [text, why] : cases) EXPECT_EQ(refusal(text), why) << text;
  EXPECT_EQ(refusal("{{ x }}", {{"x", 1e30}}),
            "line 1: writes the number 1e+30, which may have been an integer of more than 64 bits");
}

TEST(ChatTemplate, WorkIsBoundedByTheInput) {
  EXPECT_THAT(refusal("{% for a in range(10000000) %}{% endfor %}"),
              HasSubstr("takes more work than its text"));
  const ordered_json many = {{"x", std::string(200, 'x')}};
  EXPECT_THAT(
      refusal("{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}{% endfor %}", many),
      HasSubstr("takes more work"));
  EXPECT_THAT(refusal("{% set n = namespace(a='xxxxxxxxxxxxxxxx') %}{% for i in range(60) %}"
                      "{% set n.a = n.a ~ n.a %}{% endfor %}"),
              HasSubstr("takes more work"));
  EXPECT_THAT(refusal("{{ 'abcdefgh' * 1000000000 }}"), HasSubstr("takes more work"));
  EXPECT_THAT(refusal("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
              HasSubstr("macros call one another"));
  EXPECT_THAT(
      refusal("{% set n = namespace(a=[]) %}{% for i in range(300) %}{% set n.a = [n.a] %}{% endfor %}"),
      HasSubstr("nests lists and dictionaries deeper than 128"));
  EXPECT_THAT(refusal("{{ " + std::string(10000, '(') + "1" + std::string(10000, ')') + " }}"),
              HasSubstr("nested deeper than 64"));
  EXPECT_THAT(refusal("{{ " + std::string(10000, '-') + "1 }}"), HasSubstr("nested deeper than 64"));
  std::string row = "{{ 1", blocks;
  for (int i = 0; i < 1000; ++i) row += " + 1";
  for (int i = 0; i < 100; ++i) blocks += "{% if 1 %}";
  EXPECT_THAT(refusal(row + " }}"), HasSubstr("of more than 256 operations in a row"));
  EXPECT_THAT(refusal(blocks), HasSubstr("blocks are nested deeper than 64"));
}

TEST(ChatTemplate, TheDateIsGiven) {
  constexpr const char* text = "{{ strftime_now('%d %b %Y, %A %a %B %m %y %j %%') }}";
  EXPECT_EQ(filled(text, {}, "2026-11-27").text, "27 Nov 2026, Friday Fri November 11 26 331 %");
  EXPECT_EQ(filled(text, {}, "2024-02-29").text, "29 Feb 2024, Thursday Thu February 02 24 060 %");
  EXPECT_EQ(filled(text, {}, "2000-12-31").text, "31 Dec 2000, Sunday Sun December 12 00 366 %");
  EXPECT_THAT(refusal(text), HasSubstr("give a date with --chat-date YYYY-MM-DD"));
  EXPECT_EQ(message_of<ConfigurationError>([] { (void)chat_format("chatml", "", "2026-02-29"); }),
            "--chat-date is '2026-02-29', but must be a day like 2026-11-27");
}

TEST(ChatTemplate, LearnedIsWhatTheAssistantSaysWithItsEnd) {
  EXPECT_EQ(learned(chatml, talk),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{Yes<|im_end|>}\n"
            "<|im_start|>user\nNo<|im_end|>\n<|im_start|>assistant\n{So<|im_end|>}\n");
  EXPECT_EQ(learned("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                    "{% if add_generation_prompt %}assistant: {% endif %}",
                    talk),
            "user: Hi\nassistant: {Yes\n}user: No\nassistant: {So\n}")
      << "a line's end is what ends these";
  EXPECT_EQ(
      learned("{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
              "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
              talk, R"({"bos_token": "<s>", "eos_token": "</s>"})"),
      "<s>[INST] Hi [/INST]{ Yes</s>}[INST] No [/INST]{ So</s>}");
  EXPECT_EQ(
      learned("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
              talk),
      learned(chatml, talk))
      << "a template that cannot be asked for an answer";
  EXPECT_EQ(learned(chatml, R"({"messages": [{"role": "assistant", "content": "<|im_end|>"}]})"),
            "<|im_start|>assistant\n{<|im_end|><|im_end|>}\n");
  constexpr const char* begun =
      R"({"messages": [{"role": "assistant", "content": "Yes"}, {"role": "user", "content": "Hi"},
      {"role": "assistant", "content": "So"}]})";
  EXPECT_EQ(
      learned("{% for m in messages %}{{ '<s>' if loop.first }}<{{ m.role }}>{{ m.content }}</s>{% endfor %}",
              begun),
      "<s><assistant>{Yes</s>}<user>Hi</s><assistant>{So</s>}");
  EXPECT_EQ(learned("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }};{% else %}"
                    "{% generation %}{{ m.content }}{% endgeneration %}.{% endif %}{% endfor %}",
                    talk),
            "Hi;{Yes}.No;{So}.")
      << "the template's own marks";
  constexpr const char* weights = R"({"messages": [{"role": "user", "content": "Hi"},
      {"role": "assistant", "content": "Yes", "weight": 0}, {"role": "assistant", "content": "So", "weight": 1}]})";
  EXPECT_THAT(learned(chatml, weights),
              AllOf(HasSubstr("\nYes<|im_end|>\n"), HasSubstr("\n{So<|im_end|>}\n")));
  EXPECT_EQ(learned("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}.{% endfor %}",
                    weights),
            "Hi.Yes.{So}.");
  EXPECT_EQ(learned(chatml, R"({"messages": [{"role": "assistant", "content": ""}]})"),
            "<|im_start|>assistant\n{<|im_end|>}\n");
}

TEST(ChatTemplate, EarlierAnswersMayLoseTheirThoughts) {
  // Only the last answer has thoughts, and an answer without them is requested by an empty thought.
  constexpr const char* text =
      "{% for m in messages %}<{{ m.role }}>\n{% if m.role == 'assistant' and loop.last "
      "%}<think>\n\n</think>\n"
      "{% endif %}{{ m.content }}<end>\n{% endfor %}"
      "{% if add_generation_prompt %}<assistant>\n{% if think == false %}<think>\n\n</think>\n{% endif %}{% "
      "endif %}";
  EXPECT_EQ(learned(text, talk),
            "<user>\nHi<end>\n<assistant>\n{Yes<end>}\n<user>\nNo<end>\n<assistant>\n"
            "{<think>\n\n</think>\nSo<end>}\n");
  auto without = ordered_json::parse(talk);
  without["chat_template_kwargs"] = {{"think", false}};
  EXPECT_EQ(learned(text, without.dump()),
            "<user>\nHi<end>\n<assistant>\n{Yes<end>}\n<user>\nNo<end>\n<assistant>\n<think>\n\n</"
            "think>\n{So<end>}\n");
}

TEST(ChatTemplate, WhatIsLearnedHasToBeKnown) {
  EXPECT_THAT(message_of<ConfigurationError>([] { (void)learned("{{ messages[1].content }}", talk); }),
              AllOf(HasSubstr("chat template T: writes the assistant's messages outside of a loop over them"),
                    HasSubstr("{% generation %}")));
  EXPECT_THAT(message_of<ConfigurationError>([] {
                (void)learned(
                    "{% for m in messages %}{{ m.content }}{% endfor %}"
                    "{% if add_generation_prompt %}Answer:{% endif %}",
                    talk);
              }),
              HasSubstr("begins an assistant message differently from the answer that it asks for"));
  const auto refused = [](const std::string& text) {
    return message_of<ConfigurationError>([&] { (void)learned(text, talk); });
  };
  EXPECT_THAT(refused("{% for m in messages %}{{ m.content }}{% endfor %}{% for m in messages %}{{ m.content "
                      "}}{% endfor %}"),
              HasSubstr("writes a message of the assistant in two places"));
  EXPECT_THAT(
      refused("{% set all %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}--{{ all }}"),
      HasSubstr("writes the assistant's messages outside of a loop over them"))
      << "a loop in a block whose text stands elsewhere";
  const std::string marked = "{% generation %}{{ m.content }}{% endgeneration %}";
  for (const std::string& text :
       {"{% for m in messages %}{% set t %}" + marked + "{% endset %}--{{ t }}{% endfor %}",
        "{% macro say(m) %}" + marked + "{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}"}) {
    EXPECT_THAT(refused(text),
                HasSubstr("marks what the assistant says inside of a macro or of a {% set %} block"));
  }
}

TEST(ChatTemplate, VariablesOfTheConversationAndThoughts) {
  EXPECT_EQ(learned("{{ think }}", R"({"messages": [], "chat_template_kwargs": {"think": false}})",
                    R"({"think": true})"),
            "False")
      << "a conversation's variable stands before the folder's";
  for (const char* key : {"reasoning_content", "thinking", "reasoning"}) {
    const ordered_json line = {{"messages", {{{"role", "user"}, {"content", "a"}, {key, "why"}}}}};
    EXPECT_EQ(
        learned("{% for m in messages %}{{ m.thinking }} {{ m.reasoning_content }}{% endfor %}", line.dump()),
        "why why")
        << key;
  }
}

TEST(ChatTemplate, MessagesHaveNoNullsAndToolsReachTheTemplate) {
  constexpr const char* line =
      R"({"messages": [{"role": "user", "content": "a", "tool_calls": null}], "tools": [{"f": 1}]})";
  EXPECT_EQ(learned("{{ messages }}{{ tools }}", line), "[{'role': 'user', 'content': 'a'}][{'f': 1}]");
  EXPECT_THAT(message_of<ConfigurationError>([] { (void)learned(chatml, line); }),
              HasSubstr("does not write the 'tools' of the conversation"));
  EXPECT_EQ(learned("{{ tools }}{{ documents }}", R"({"messages": [], "tools": []})"), "NoneNone");
}

/// A tokenizer's folder with its own template.
struct Folder {
  TemporaryFolder folder;
  explicit Folder(const std::string& chat) {
    const ordered_json config = {
        {"chat_template", chat}, {"bos_token", "<s>"}, {"eos_token", {{"content", "</s>"}}}};
    folder.write("tokenizer_config.json", config.dump());
  }
  std::string path() const { return folder.path(""); }
};

std::string text_of(const ChatFormat& chat, const std::string& line) {
  std::string text;
  for (const Segment& segment : read_json_line(line, chat, "line 7").segments) text += segment.text;
  return text;
}

TEST(ChatFormat, TheFoldersTemplateIsTheLaw) {
  const Folder same(chatml),
      other("{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}");
  EXPECT_EQ(text_of(chat_format("", other.path(), ""), talk), "<s>Hi</s>Yes</s>No</s>So</s>")
      << "without a flag";
  EXPECT_EQ(text_of(chat_format("own", other.path(), ""), talk), "<s>Hi</s>Yes</s>No</s>So</s>");
  const Folder faulty("{{ messages | sort }}");
  EXPECT_THAT(
      message_of<ConfigurationError>([&] { (void)text_of(chat_format("", faulty.path(), ""), talk); }),
      AllOf(HasSubstr("the filter 'sort' is not supported"), Not(HasSubstr(".cpp"))));
  EXPECT_EQ(text_of(chat_format("chatml", same.path(), ""), talk), text_of(ChatTemplate::chatml, talk));
  EXPECT_THAT(
      message_of<ConfigurationError>([&] { (void)text_of(chat_format("chatml", other.path(), ""), talk); }),
      AllOf(
          HasSubstr("line 7: chat template chatml writes another text than the template of the tokenizer's"),
          HasSubstr("tokenizer_config.json (chat_template)"),
          HasSubstr("after 1 equal bytes, '|im_start|>user\\nHi<|im_end|>\\n<|im_start|' stands in place of "
                    "'s>Hi</s>Yes</s>"),
          HasSubstr("--chat-template own"), HasSubstr("FILE.jinja")));
  const std::string file = other.folder.write("mine.jinja", "{{ messages[0].content }}{{ eos_token }}");
  EXPECT_EQ(
      text_of(chat_format(file, other.path(), ""), R"({"messages": [{"role": "user", "content": "a"}]})"),
      "a</s>");
  other.folder.write("chat_template.jinja", "{{ messages|length }}");
  EXPECT_EQ(
      text_of(chat_format("own", other.path(), ""), R"({"messages": [{"role": "user", "content": "a"}]})"),
      "1")
      << "the file stands before tokenizer_config.json";
}

TEST(ChatFormat, MessagesWithoutTextAreRefused) {
  const Folder plain(chatml), whole("{{ messages }}"),
      calls(
          "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }}{{ m['thinking'] }}</s>{% "
          "endfor %}");
  const auto message = [](const std::string& keys) {
    return R"({"messages": [{"role": "assistant")" + keys + "}]}";
  };
  const auto refused = [&](const Folder& folder, const std::string& keys) {
    return message_of<ConfigurationError>(
        [&] { (void)text_of(chat_format("own", folder.path(), ""), message(keys)); });
  };
  const std::string origin = plain.path() + "/tokenizer_config.json (chat_template)";
  const std::string remedy =
      "; beside its role it has \"value\": give the key that holds the text the name \"content\"";
  EXPECT_EQ(refused(plain, R"(, "value": "a")"),
            "line 7: messages[0].content is missing: the message has no text" + remedy);
  EXPECT_EQ(refused(plain, R"(, "content": null, "value": "a")"),
            "line 7: messages[0].content is null: the message has no text" + remedy);
  EXPECT_EQ(refused(plain, R"(, "tool_calls": [])"),
            "line 7: messages[0].content is missing: the message has no text");
  EXPECT_EQ(refused(plain, R"(, "content": [])"),
            "line 7: messages[0].content is []: the message has no text");
  EXPECT_EQ(
      refused(plain, R"(, "content": "a", "tool_calls": [1])"),
      "line 7: messages[0].tool_calls is in a message, but chat template " + origin + " does not write it");
  EXPECT_EQ(message_of<ConfigurationError>([&] {
              (void)read_json_prompt(message(R"(, "value": "a")"), chat_format("own", plain.path(), ""),
                                     "line 7");
            }),
            "line 7: messages[0].content is missing: the message has no text" + remedy);
  EXPECT_THAT(refused(calls, R"(, "tool_call": [1])"), HasSubstr("it has \"tool_call\""))
      << "a name's beginning is another name";
  EXPECT_THAT(refused(Folder("{{ messages[0].content[0].text }}"), R"(, "text": "a")"),
              HasSubstr("it has \"text\""));
  EXPECT_EQ(refused(calls, R"(, "content": null, "tool_calls": [1])"), "");
  EXPECT_EQ(refused(calls, R"(, "reasoning": "a")"), "") << "templates see it as thinking too";
  EXPECT_EQ(refused(plain, R"(, "content": "")"), "") << "an empty text is one";
  EXPECT_EQ(refused(whole, R"(, "tool_calls": [1])"), "") << "the template writes messages as a whole";
}

TEST(ChatFormat, KeysOfMessagesThatTheTemplateDoesNotNameAreUnread) {
  const Folder plain(std::string(chatml) + "{{ messages[0].name }}"), whole("{{ messages }}");
  constexpr const char* line =
      R"({"messages": [{"role": "user", "content": "a", "id": 1, "name": "b", "seen": null},
      {"role": "assistant", "content": "c", "id": 2, "thinking": "d", "weight": 1}], "source": 3})";
  EXPECT_THAT(unread_keys(line, chat_format("own", plain.path(), "")),
              testing::ElementsAre("source", "messages[].id", "messages[].thinking"));
  EXPECT_THAT(unread_keys(line, chat_format("own", whole.path(), "")), testing::ElementsAre("source"));
  EXPECT_THAT(unread_keys(line, ChatTemplate::chatml), testing::ElementsAre("source"));
  EXPECT_THAT(unread_keys(R"({"messages": [1, "a"]})", chat_format("own", plain.path(), "")),
              testing::IsEmpty());
}

TEST(ChatFormat, TheFormOfShareGptIsNamed) {
  const std::string remedy =
      "ShareGPT's conversations are read once \"conversations\" is renamed \"messages\", \"from\" is "
      "\"role\" (and its "
      "\"human\" is \"user\", its \"gpt\" \"assistant\"), and \"value\" is \"content\"";
  const Folder plain(chatml);
  for (const ChatFormat& chat : {chat_format("own", plain.path(), ""), ChatFormat(ChatTemplate::chatml)}) {
    EXPECT_EQ(message_of<ConfigurationError>(
                  [&] { (void)text_of(chat, R"({"conversations": [{"from": "human", "value": "a"}]})"); }),
              "line 7: conversations is not read: " + remedy);
    EXPECT_EQ(message_of<ConfigurationError>(
                  [&] { (void)text_of(chat, R"({"messages": [{"from": "human", "content": "a"}]})"); }),
              "line 7: messages[0] has no \"role\": " + remedy);
  }
}

TEST(ChatFormat, NamedTemplatesOfAFolder) {
  const TemporaryFolder folder;
  const auto config = [&](const std::string& name) {
    const ordered_json all = {
        {"chat_template",
         {{{"name", name}, {"template", "d"}}, {{"name", "tool_use"}, {"template", "t{{ tools|length }}"}}}}};
    folder.write("tokenizer_config.json", all.dump());
  };
  config("default");
  const ChatFormat chat = chat_format("own", folder.path(""), "");
  EXPECT_EQ(text_of(chat, R"({"messages": [{"role": "user"}]})"), "d");
  EXPECT_EQ(text_of(chat, R"({"messages": [{"role": "user"}], "tools": [1, 2]})"), "t2");
  EXPECT_EQ(text_of(chat, R"({"messages": [{"role": "user"}], "tools": []})"), "d");
  config("rag");
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)chat_format("own", folder.path(""), ""); }),
              HasSubstr("chat_template has no template 'default', but rag, tool_use"));
}

TEST(ChatFormat, ATemplateThatCannotBeReadIsRefusedWhenItIsNeeded) {
  const Folder bad("{% for m in messages %}\n{% include 'x' %}{% endfor %}");
  const std::string why =
      "tokenizer_config.json (chat_template), line 2: the block 'include' is not supported";
  for (const char* name : {"own", "chatml"})
    EXPECT_THAT(message_of<ConfigurationError>([&] { (void)chat_format(name, bad.path(), ""); }),
                HasSubstr(why));
  const ChatFormat chat = chat_format("", bad.path(), "");
  EXPECT_EQ(text_of(chat, R"({"text": "a"})"), "a");
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)text_of(chat, talk); }), HasSubstr(why));
  const TemporaryFolder none;
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)chat_format("own", none.path(""), ""); }),
              HasSubstr("has no chat template: neither chat_template.jinja nor"));
  EXPECT_NE(fingerprint(chat_format("own", Folder("a").path(), "")),
            fingerprint(chat_format("own", Folder("b").path(), "")));
}

TEST(ChatFormat, PromptsEndWithWhatAsksForAnAnswer) {
  constexpr const char* line = R"({"messages": [{"role": "user", "content": "Hi"}]})";
  const auto prompt = [&](const ChatFormat& chat) {
    return read_json_prompt(line, chat, "line 1").value_or("none");
  };
  EXPECT_EQ(prompt(ChatTemplate::chatml), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(prompt(ChatTemplate::llama3),
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n");
  EXPECT_EQ(prompt(ChatTemplate::mistral), "<s>[INST] Hi [/INST]");
  EXPECT_EQ(prompt(chat_format("", Folder(chatml).path(), "")), prompt(ChatTemplate::chatml));
  EXPECT_EQ(prompt(chat_format("chatml", Folder(chatml).path(), "")), prompt(ChatTemplate::chatml));
  EXPECT_FALSE(read_json_prompt(R"({"prompt": "a"})", ChatTemplate::none, "line 1").has_value());
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)prompt(ChatTemplate::none); }),
              HasSubstr("--chat-template"));
}

}  // namespace
}  // namespace tranche::training
