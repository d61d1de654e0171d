#include "tranche/training/tokenize.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/run_lease.h"
#include "tests/tools/temporary.h"
#include "training/file_content.h"
#include "training/token_parts.h"
#include "tranche/core/error.h"
#include "tranche/training/token_file.h"

namespace tranche::training {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using tools::test::message_of;
using tools::test::read_file;
using tools::test::TemporaryFolder;

Document read(std::string_view line, ChatTemplate chat = ChatTemplate::none) {
  return read_json_line(line, chat, "line 7");
}

/// The text with the learned parts in braces.
std::string marked(const Document& document) {
  std::string text;
  for (const Segment& segment : document.segments) {
    text += segment.target ? "{" + segment.text + "}" : segment.text;
  }
  return text;
}

TEST(Documents, TextPromptsAndConversations) {
  EXPECT_EQ(marked(read(R"({"text": "a b", "other": 1})")), "{a b}");
  EXPECT_EQ(marked(read(R"({"prompt": "2+2=", "completion": "4"})")), "2+2={4}");
  constexpr const char* talk = R"({"messages": [{"role": "user", "content": " Hi "},
      {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "No"}]})";
  EXPECT_EQ(marked(read(talk, ChatTemplate::chatml)),
            "<|im_start|>user\n Hi "
            "<|im_end|>\n<|im_start|>assistant\n{Yes?<|im_end|>}\n<|im_start|>user\nNo<|im_end|>\n");
  EXPECT_EQ(
      marked(read(talk, ChatTemplate::qwen)),
      "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
      "<|im_start|>user\n Hi "
      "<|im_end|>\n<|im_start|>assistant\n{Yes?<|im_end|>}\n<|im_start|>user\nNo<|im_end|>\n");
  EXPECT_EQ(marked(read(talk, ChatTemplate::llama3)),
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n{Yes?<|eot_id|>}"
            "<|start_header_id|>user<|end_header_id|>\n\nNo<|eot_id|>");
  EXPECT_EQ(marked(read(talk, ChatTemplate::mistral)), "<s>[INST]  Hi  [/INST]{Yes?</s>}[INST] No [/INST]");
  EXPECT_TRUE(read(talk, ChatTemplate::chatml).rendered);
}

TEST(Documents, KeysThatAskForNothingAreTaken) {
  EXPECT_EQ(marked(read(R"({"text": "a", "prompt": "how it was made"})")), "{a}");
  constexpr const char* talk =
      R"({"messages": [{"role": "user", "content": "Hi", "name": "x", "tool_calls": []},
      {"role": "assistant", "content": "Yes", "weight": 0}, {"role": "assistant", "content": "No", "weight": 1}],
      "tools": [], "documents": null})";
  EXPECT_EQ(marked(read(talk, ChatTemplate::chatml)),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
            "<|im_start|>assistant\n{No<|im_end|>}\n");
}

TEST(Documents, Llama3TrimsTheBlanksThatPythonTrims) {
  const auto content = [](const std::string& text) {
    const std::string line = R"({"messages": [{"role": "user", "content": ")" + text + R"("}]})";
    const std::string written = marked(read(line, ChatTemplate::llama3));
    const std::string before = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n",
                      after = "<|eot_id|>";
    EXPECT_TRUE(written.starts_with(before) && written.ends_with(after)) << written;
    return written.substr(before.size(), written.size() - before.size() - after.size());
  };
  EXPECT_EQ(
      content(
          R"(\u001c\u0085\u00a0\u1680\u2003\u2028\u202f\u205f\u3000 a\u3000b\u00e9 \t\r\n\u000b\u000c\u2029\u001f)"),
      "a\u3000b\u00e9");
  EXPECT_EQ(content(R"(\u200b\u180e\ufeff\u2060)"), "\u200b\u180e\ufeff\u2060") << "these are none";
  EXPECT_EQ(content(R"(\u2003 \u3000)"), "");
  EXPECT_EQ(content(""), "");
}

TEST(Documents, WhatIsNotOneIsRefused) {
  const auto refused = [](std::string_view line, ChatTemplate chat = ChatTemplate::none) {
    return message_of<ConfigurationError>([&] { (void)read(line, chat); });
  };
  EXPECT_THAT(refused("{"), HasSubstr("line 7 is not JSON"));
  EXPECT_THAT(refused("{}"),
              HasSubstr("has neither \"text\", nor \"prompt\" and \"completion\", nor \"messages\""));
  EXPECT_THAT(refused(R"({"prompt": "a"})"), HasSubstr("line 7 has \"prompt\" without \"completion\""));
  EXPECT_THAT(refused(R"({"completion": "a", "prompt": null})"),
              HasSubstr("\"completion\" without \"prompt\""));
  EXPECT_THAT(refused(R"({"text": null})"), HasSubstr("has no text: its \"text\" is null"));
  EXPECT_THAT(refused(R"({"text": "a", "completion": "b"})"),
              HasSubstr("has both \"text\" and \"completion\""));
  EXPECT_EQ(refused(R"({"text": 3})"), "line 7: text is not a string: 3");
  constexpr const char* talk = R"({"messages": [{"role": "user", "content": "a"}]})";
  EXPECT_THAT(refused(talk),
              HasSubstr("say how it is written with --chat-template, which is chatml, llama3"));
  EXPECT_THAT(refused(R"({"messages": [{"role": "tool", "content": "a"}]})", ChatTemplate::chatml),
              AllOf(HasSubstr("line 7: messages[0].role"), HasSubstr("tool")));
  EXPECT_THAT(
      refused(R"({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]})", ChatTemplate::chatml),
      HasSubstr("line 7: messages[0].tool_calls is in a message, which chat template chatml does not write"));
  EXPECT_THAT(
      refused(R"({"messages": [{"role": "user", "content": "a"}], "tools": [1]})", ChatTemplate::qwen),
      HasSubstr("line 7: tools stands beside messages, which chat template qwen does not write"));
  EXPECT_THAT(
      refused(R"({"messages": [{"role": "user", "content": "a", "weight": 2}]})", ChatTemplate::chatml),
      HasSubstr("messages[0].weight"));
  EXPECT_EQ(refused(R"({"messages": [{"role": "system", "content": "a"}]})", ChatTemplate::mistral),
            "line 7: messages[0].role is \"system\", but in template mistral user and assistant take turns");
  EXPECT_EQ(parse_chat_template("qwen"), ChatTemplate::qwen);
  EXPECT_EQ(message_of<ConfigurationError>([] { (void)parse_chat_template("lama3"); }),
            "chat template 'lama3' is neither chatml, llama3, mistral, qwen nor own, nor a file that ends in "
            ".jinja; did you mean llama3?");
  EXPECT_EQ(message_of<ConfigurationError>([] { require_names(*make_byte_tokenizer(), ChatTemplate::qwen); }),
            "the tokenizer has no token '<|im_start|>', which chat template qwen writes");
}

TEST(Documents, TokensOfAPromptAreNotLearned) {
  const auto bytes = make_byte_tokenizer();
  bytes->set_special({{1}, {}, 2});
  TokenDocuments documents;
  append_document(*bytes, read(R"({"prompt": "ab", "completion": "c"})"), true, documents);
  append_document(*bytes, read(R"({"text": "d"})"), true, documents);
  append_document(*bytes, read(R"({"text": ""})"), false, documents);
  EXPECT_THAT(documents.tokens, ElementsAre(1, 'a', 'b', 'c', 2, 1, 'd', 2));
  EXPECT_THAT(documents.targets, ElementsAre(0, 0, 0, 1, 1, 1, 1, 1));
  EXPECT_THAT(documents.ends, ElementsAre(5, 8)) << "an empty document has none";
}

/// The vocabulary in tokenizer.json: the bytes.
std::string byte_vocabulary() {
  std::string json = "{";
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool visible = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    json += fmt::format("{}\"\\u{:04x}\":{}", byte == 0 ? "" : ",", visible ? byte : next++, byte);
  }
  return json + "}";
}

/// Numbered lines, of which every third has a prompt.
std::string json_lines(int count) {
  std::string lines;
  for (int i = 0; i < count; ++i) {
    const std::string word(static_cast<std::size_t>(i % 13), 'x');
    lines +=
        i % 3 == 0 ? R"({"prompt": "p)" + word + R"(", "completion": "c"})" : R"({"text": "t)" + word + "\"}";
    lines += i % 5 == 0 ? "\r\n\n" : "\n";
  }
  return lines;
}

TEST(Tokenize, IsTheSameForEveryNumberOfThreadsAndSizeOfParts) {
  const TemporaryFolder folder;
  TokenizeOptions options;
  options.inputs = {folder.write("a.jsonl", json_lines(200)), folder.write("b.txt", "plain text")};
  const auto bytes = make_byte_tokenizer();
  const auto tokenized = [&](int threads, std::int64_t part_bytes) {
    options.output = folder.path("out.safetensors");
    options.threads = threads;
    options.part_bytes = part_bytes;
    const TokenizeSummary summary = tokenize_files(*bytes, options);
    EXPECT_EQ(summary.documents, 201);
    EXPECT_EQ(summary.reused, 0);
    EXPECT_FALSE(std::filesystem::exists(options.output + ".parts"));
    return read_file(options.output);
  };
  const std::string alone = tokenized(1, 1 << 20);
  EXPECT_THAT(alone, AllOf(HasSubstr(R"("tokens":{"dtype":"U8")"), HasSubstr(R"("targets":{"dtype":"U8")")));
  for (const std::int64_t part_bytes : {37, 100, 1000})
    EXPECT_EQ(tokenized(3, part_bytes), alone) << part_bytes;
}

TEST(Tokenize, GoesOnWithThePartsThatAreThere) {
  const TemporaryFolder folder;
  TokenizeOptions options;
  options.inputs = {folder.write("a.jsonl", json_lines(100))};
  options.output = folder.path("out.safetensors");
  options.part_bytes = 500;
  const auto bytes = make_byte_tokenizer();
  const TokenizeSummary whole = tokenize_files(*bytes, options);
  const std::string expected = read_file(options.output);
  int done = 0;
  options.progress = [&](std::int64_t) {
    if (++done == 3) throw std::runtime_error("stopped");
  };
  EXPECT_THROW((void)tokenize_files(*bytes, options), std::runtime_error);
  options.progress = {};
  const TokenizeSummary second = tokenize_files(*bytes, options);
  EXPECT_EQ(second.reused, 3);
  EXPECT_EQ(second.tokens, whole.tokens);
  EXPECT_EQ(read_file(options.output), expected);

  done = 0;
  options.progress = [&](std::int64_t) { throw std::runtime_error("stopped"); };
  EXPECT_THROW((void)tokenize_files(*bytes, options), std::runtime_error);
  options.progress = {};
  options.special = false;
  EXPECT_EQ(tokenize_files(*bytes, options).reused, 0) << "of other options";
  const std::string part = folder.path("out.safetensors.parts/00000000.safetensors");
  options.progress = [&](std::int64_t) { throw std::runtime_error("stopped"); };
  EXPECT_THROW((void)tokenize_files(*bytes, options), std::runtime_error);
  options.progress = {};
  std::filesystem::resize_file(part, 100);
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)tokenize_files(*bytes, options); }),
              AllOf(HasSubstr(part), HasSubstr("remove its folder and start again")));
}

TEST(Tokenize, LlmcFilesHaveNoMask) {
  const TemporaryFolder folder;
  TokenizeOptions options;
  options.inputs = {folder.write("b.txt", "ab")};
  options.output = folder.path("out.bin");
  const auto bytes = make_byte_tokenizer();
  EXPECT_EQ(tokenize_files(*bytes, options).tokens, 2);
  EXPECT_EQ(read_file(options.output), tools::test::llmc_tokens({'a', 'b'}));
  options.inputs = {folder.write("a.jsonl", json_lines(3))};
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)tokenize_files(*bytes, options); }),
              HasSubstr("llm.c's files cannot tell which tokens are learned"));
}

TEST(Tokenize, NamesFileAndLineOfWhatIsWrong) {
  const TemporaryFolder folder;
  const auto refused = [&](const std::string& name, const std::string& content, const std::string& output) {
    TokenizeOptions options;
    options.inputs = {folder.write(name, content)};
    options.output = folder.path(output);
    options.part_bytes = 64;
    return message_of<ConfigurationError>([&] { (void)tokenize_files(*make_byte_tokenizer(), options); });
  };
  EXPECT_THAT(refused("a.jsonl", json_lines(30) + "{\"text\": 1}\n", "o.safetensors"),
              HasSubstr("a.jsonl', line 37: text is not a string: 1"));
  EXPECT_THAT(refused("a.jsonl", "\n\n", "o.safetensors"), HasSubstr("the data files hold no documents"));
  EXPECT_THAT(refused("a.txt", "PAR1\x15 and more", "o.safetensors"),
              AllOf(HasSubstr("a.txt' is a parquet file; write it as JSON lines first"),
                    HasSubstr("--data-format text takes its bytes as text all the same")));
  EXPECT_THAT(refused("b.txt", "{\"text\": \"a\"}\nand words\n", "o.safetensors"),
              AllOf(HasSubstr("b.txt', line 2 is not JSON"),
                    HasSubstr("the file begins as JSON lines do: --data-format text takes it as one text")));
  EXPECT_THAT(refused("e.txt", "", "o.safetensors"), HasSubstr("e.txt' is empty"));
  std::filesystem::create_directories(folder.path("texts"));
  EXPECT_THAT(refused("texts", "", "o.safetensors"),
              HasSubstr("texts' is not a file but a folder; a pattern names its files, such as '" +
                        folder.path("texts/*.jsonl") + "'"));
  EXPECT_THAT(refused("a.txt", "x", "o.npy"), HasSubstr("o.npy' ends neither in .safetensors nor in .bin"));
}

TEST(Tokenize, AFileIsWhatItContains) {
  const TemporaryFolder folder;
  const auto bytes = make_byte_tokenizer();
  TokenizeOptions options;
  options.output = folder.path("out.safetensors");
  std::vector<std::string> notes;
  options.note = [&](const std::string& note) { notes.push_back(note); };
  const auto tokenized = [&](const std::string& name, const std::string& content) {
    options.inputs = {folder.write(name, content)};
    notes.clear();
    return tokenize_files(*bytes, options);
  };
  (void)tokenized("a.jsonl", json_lines(20));
  const std::string expected = read_file(options.output);
  EXPECT_THAT(notes, ElementsAre());
  for (const char* name : {"a.JSONL", "a.jsonlines", "a.jsonl.txt", "a.json", "a.txt", "a"}) {
    const TokenizeSummary summary = tokenized(name, "\xef\xbb\xbf" + json_lines(20));
    EXPECT_EQ(read_file(options.output), expected) << name;
    EXPECT_EQ(summary.json_lines, 1);
    const bool named = is_named_as_json_lines(name);
    EXPECT_EQ(notes.size(), named ? 0U : 1U) << name;
    for (const std::string& note : notes) {
      EXPECT_THAT(note, HasSubstr("holds JSON lines, an object a line, each a document"));
    }
  }
  options.format = TextFormat::text;
  EXPECT_EQ(tokenized("b.jsonl", "{\"text\": \"a\"}").tokens, 13);
  EXPECT_THAT(notes, ElementsAre(HasSubstr("b.jsonl' is taken as one text, as --data-format text says")));
  options.format = TextFormat::automatic;
  EXPECT_EQ(tokenized("b.txt",
                      "\xef\xbb\xbf"
                      "ab")
                .tokens,
            2);
  EXPECT_THAT(notes, ElementsAre(HasSubstr("begins with a byte order mark, which is left out of its text")));
  // After more bytes than are inspected at a file's beginning, and after a blank line.
  const std::string text(2 * content_head_bytes, 'x');
  for (const std::string before : {"", "\n", "\xef\xbb\xbf\r\n"}) {
    (void)tokenized("c.jsonl",
                    before + R"({"text": ")" + text + R"(", "origin": "x"})" + "\n{\"text\": \"a\"}\n");
    EXPECT_THAT(notes, ElementsAre(HasSubstr("c.jsonl': keys of its first line that are not read: origin")));
  }
  (void)tokenized("c.jsonl", R"({"text": ")" + std::string(std::size_t{1} << 24, 'x') + R"("})");
  EXPECT_THAT(
      notes,
      ElementsAre(HasSubstr("c.jsonl': keys of its first line, of more than 16 MiB, are not looked at")));
}

TEST(Tokenize, ATemplateWithoutConversationsIsAnError) {
  const TemporaryFolder folder;
  const auto names = read_tokenizer_json(
      R"({"added_tokens":[{"id":256,"content":"<|im_start|>","special":true},)"
      R"({"id":257,"content":"<|im_end|>","special":true}],)"
      R"("pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"model":{"type":"BPE","vocab":)" +
          byte_vocabulary() + R"(,"merges":[]}})",
      "tokenizer.json");
  TokenizeOptions options;
  options.output = folder.path("out.safetensors");
  options.chat = ChatTemplate::chatml;
  options.needs_conversations = true;
  const auto refused = [&] {
    return message_of<ConfigurationError>([&] { (void)tokenize_files(*names, options); });
  };
  options.inputs = {folder.write("a.txt", "words"), folder.path("a.txt")};
  EXPECT_THAT(refused(),
              AllOf(HasSubstr("--chat-template says how conversations are written, but the data hold none"),
                    HasSubstr("a.txt' and 1 more files has \"messages\"")));
  EXPECT_FALSE(std::filesystem::exists(options.output + ".parts")) << "refused before the work";
  options.inputs = {folder.write("a.jsonl", json_lines(5))};
  EXPECT_THAT(refused(), HasSubstr("a.jsonl' has \"messages\""));
  EXPECT_THAT(refused(), HasSubstr("a.jsonl' has \"messages\"")) << "parts that are there know it too";
  EXPECT_FALSE(std::filesystem::exists(options.output));
  options.inputs = {folder.write("a.jsonl", json_lines(5) +
                                                R"({"messages": [{"role": "user", "content": "Hi"},)"
                                                R"({"role": "assistant", "content": "Yes"}]})")};
  EXPECT_EQ(tokenize_files(*names, options).conversations, 1);
}

TEST(Tokenize, AnInputThatChangesIsAnError) {
  const TemporaryFolder folder;
  TokenizeOptions options;
  options.output = folder.path("out.safetensors");
  options.part_bytes = 300;
  const auto bytes = make_byte_tokenizer();
  // Each change happens after the first part.
  const auto refused = [&](const std::function<void(const std::string&)>& change) {
    options.inputs = {folder.write("a.jsonl", json_lines(100))};
    int parts = 0;
    options.progress = [&](std::int64_t) {
      if (++parts == 1) change(options.inputs.front());
    };
    return message_of<ConfigurationError>([&] { (void)tokenize_files(*bytes, options); });
  };
  const auto later = [](const std::string& path) {
    using namespace std::chrono_literals;
    std::filesystem::last_write_time(path, std::filesystem::last_write_time(path) + 1s);
  };
  EXPECT_THAT(refused(later),
              HasSubstr("a.jsonl' was written to while it was read, so that its tokens would be a mixture"));
  EXPECT_THAT(refused([](const std::string& path) { std::filesystem::resize_file(path, 2000); }),
              HasSubstr(" to 2000 bytes while it was read"));
  EXPECT_THAT(refused([&](const std::string& path) {
                std::filesystem::rename(folder.write("b", json_lines(100)), path);
              }),
              HasSubstr("was replaced by another file while it was read"));
  EXPECT_THAT(refused([](const std::string& path) { std::filesystem::remove(path); }),
              HasSubstr("was removed while it was read"));
  EXPECT_FALSE(std::filesystem::exists(options.output));
  options.part_bytes = 1 << 20;  // there is one part, so a change after it is noticed at the end
  EXPECT_THAT(refused(later), HasSubstr("was written to while it was read"));
}

TEST(Tokenize, OneProcessAtATimeWritesAnOutput) {
  const TemporaryFolder folder;
  TokenizeOptions options;
  options.inputs = {folder.write("a.txt", "ab")};
  options.output = folder.path("out.safetensors");
  const auto bytes = make_byte_tokenizer();
  std::array<int, 2> held{}, end{};
  ASSERT_EQ(::pipe(held.data()), 0);
  ASSERT_EQ(::pipe(end.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {  // works until it is asked to end
    std::filesystem::create_directories(options.output + ".parts");
    const auto lease =
        std::make_unique<checkpoint::RunLease>(checkpoint::RunLease::take(options.output + ".parts"));
    char byte = 'x';
    if (::write(held[1], &byte, 1) != 1 || ::read(end[0], &byte, 1) != 1) ::_exit(1);
    ::_exit(0);
  }
  char byte = 0;
  ASSERT_EQ(::read(held[0], &byte, 1), 1);
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)tokenize_files(*bytes, options); }),
              AllOf(HasSubstr("out.safetensors.parts is in use by process " + std::to_string(child)),
                    HasSubstr("two processes cannot write '" + options.output + "' at the same time")));
  ASSERT_EQ(::write(end[1], &byte, 1), 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (const int descriptor : {held[0], held[1], end[0], end[1]}) ::close(descriptor);
  EXPECT_EQ(tokenize_files(*bytes, options).tokens, 2) << "a process that has ended holds nothing";
}

TEST(Tokenize, LeftoversOfProcessesThatHaveEndedAreRemoved) {
  const TemporaryFolder folder;
  TokenizeOptions options;
  options.inputs = {folder.write("a.txt", "ab")};
  options.output = folder.path("out.safetensors");
  const std::string left = folder.write("out.safetensors.new-0123456789abcdef", "x");
  const std::string other = folder.write("other.safetensors.new-0123456789abcdef", "x");
  std::filesystem::create_directories(options.output + ".parts");
  const std::string part =
      folder.write("out.safetensors.parts/00000000.safetensors.new-0123456789abcdef", "x");
  std::vector<std::string> notes;
  options.note = [&](const std::string& note) { notes.push_back(note); };
  (void)tokenize_files(*make_byte_tokenizer(), options);
  EXPECT_FALSE(std::filesystem::exists(left));
  EXPECT_TRUE(std::filesystem::exists(other)) << "of another output";
  EXPECT_FALSE(std::filesystem::exists(part));
  EXPECT_THAT(notes, ElementsAre(HasSubstr("removed '" + left), HasSubstr("removed '" + part)));

  const std::string foreign = folder.path("out.safetensors.parts");
  std::filesystem::create_directories(foreign);
  folder.write("out.safetensors.parts/letter.txt", "x");
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)tokenize_files(*make_byte_tokenizer(), options); }),
              HasSubstr("holds 'letter.txt', which is no part of this command; move it away"));
}

TEST(Tokenize, SaysWhereNothingIsLearnedAndWhereTextIsNotUtf8) {
  const TemporaryFolder folder;
  TokenizeOptions options;
  options.output = folder.path("out.safetensors");
  std::vector<std::string> notes;
  options.note = [&](const std::string& note) { notes.push_back(note); };
  const auto tokenized = [&](const std::string& name, const std::string& content) {
    options.inputs = {folder.write(name, content)};
    notes.clear();
    (void)tokenize_files(*make_byte_tokenizer(), options);
  };
  tokenized("a.jsonl", R"({"prompt": "a", "completion": ""})"
                       "\n"
                       R"({"prompt": "a", "completion": "b"})");
  EXPECT_THAT(notes, ElementsAre("documents of which no token is learned: 1 of 2"));
  tokenized("l.txt", "caf\xe9");
  EXPECT_THAT(notes, ElementsAre()) << "bytes are taken as they are";
  options.tokenizer_digest = "of a folder";
  tokenized("l.txt", "caf\xe9");
  EXPECT_THAT(
      notes,
      ElementsAre(HasSubstr("texts that are not in UTF-8, which the tokenizer expects: 1 of 1 documents")));
  tokenized("l.txt", "caf\xc3\xa9");
  EXPECT_THAT(notes, ElementsAre());
}

TEST(TokenParts, AreJoinedOnlyWithTheCountsThatWereWritten) {
  const TemporaryFolder folder;
  TokenDocuments documents;
  append_document(*make_byte_tokenizer(), read(R"({"text": "abc"})"), true, documents);
  const std::vector<std::string> parts{folder.path("0.safetensors"), folder.path("1.safetensors")};
  PartSizes sizes = write_part(parts[0], documents);
  EXPECT_EQ(sizes, read_part_sizes(parts[0]));
  sizes += write_part(parts[1], documents);
  const std::string output = folder.path("out.safetensors");
  join_as_safetensors(parts, sizes, 1, {}, output);
  append_document(*make_byte_tokenizer(), read(R"({"text": "d"})"), true, documents);
  (void)write_part(parts[1], documents);
  std::filesystem::remove(output);
  for (const bool llmc : {false, true}) {
    EXPECT_THAT(message_of<ConfigurationError>([&] {
                  llmc ? join_as_llmc(parts, sizes, 2, output)
                       : join_as_safetensors(parts, sizes, 2, {}, output);
                }),
                HasSubstr("hold 7 tokens of 3 documents, but 6 tokens of 2 documents were written there"));
  }
  EXPECT_FALSE(std::filesystem::exists(output));
  const std::filesystem::path target = folder.path("taken.safetensors");
  std::filesystem::create_directories(target / "x");
  EXPECT_THROW((void)write_part(target.string(), documents), IoError);
  for (const std::string& name : folder.names()) EXPECT_THAT(name, testing::Not(HasSubstr(".new-")));
}

TEST(Tokenize, TheFileNamesItsTokenizer) {
  const TemporaryFolder folder;
  const auto bytes = make_byte_tokenizer();
  TokenizeOptions options;
  options.inputs = {folder.write("a.txt", "plain text")};
  options.output = folder.path("out.safetensors");
  (void)tokenize_files(*bytes, options);
  EXPECT_EQ(TokenFile(options.output).made_by().vocabulary, "") << "every byte is a token";
  options.tokenizer_digest = "of a folder";
  (void)tokenize_files(*bytes, options);
  const TokenFile named(options.output);
  EXPECT_EQ(named.made_by().vocabulary, vocabulary_digest(*bytes));
  EXPECT_EQ(named.made_by().files, "of a folder");
  EXPECT_EQ(named.size(), 10);
  // The digest is one of numbers and their text, whatever else the files hold.
  const auto read = [](const std::string& merges) {
    return read_vocabulary_and_merges(byte_vocabulary().replace(0, 1, R"({"ab":256,"ba":257,)"), merges, "x");
  };
  const auto one = read("#version\na b\nb a\n"), other = read("#version\nb a\na b\n");
  EXPECT_EQ(vocabulary_digest(*one), vocabulary_digest(*other));
  EXPECT_NE(vocabulary_digest(*one), vocabulary_digest(*bytes));
}

TEST(Tokenize, PatternsAreSortedNames) {
  const TemporaryFolder folder;
  for (const char* name : {"b.txt", "a.txt", "c.md"}) folder.write(name, "x");
  EXPECT_THAT(expand_pattern(folder.path("*.txt")), ElementsAre(folder.path("a.txt"), folder.path("b.txt")));
  EXPECT_THAT(expand_pattern("none"), ElementsAre("none"));
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)expand_pattern(folder.path("*.bin")); }),
              HasSubstr("no file matches"));
}

}  // namespace
}  // namespace tranche::training
