#include "tools/generate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <set>
#include <span>
#include <sstream>

#include "checkpoint/companions.h"
#include "checkpoint/folder.h"
#include "checkpoint/reader.h"
#include "checkpoint/storage.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/text_file.h"
#include "engine/adapter_base.h"
#include "tools/checkpoint/adapters.h"
#include "tools/checkpoint/checkpoint_source.h"
#include "tools/checkpoint/hugging_face.h"
#include "tools/checkpoint/model_files.h"
#include "tools/flag_values.h"
#include "tools/train/tokenizer_match.h"
#include "training/file_content.h"
#include "tranche/core/error.h"
#include "tranche/models/generate.h"
#include "tranche/training/documents.h"
#include "tranche/training/tokenizer.h"

namespace tranche::tools {

namespace {

/// The source of the weights.
struct Source {
  RunIdentity identity;
  std::string checkpoint;                          ///< the checkpoint's path; empty: a Hugging Face folder
  std::unique_ptr<HuggingFaceModel> hugging_face;  ///< set if `checkpoint` is empty
  std::unique_ptr<training::Tokenizer> encoding;   ///< of the text, if it is not bytes
  std::string tokenizer_folder;                    ///< from which it was read
  std::string files;                               ///< folder of the companions; may be empty
  std::vector<std::int32_t> ends;                  ///< tokens that end a text, beside the tokenizer's
  LoraConfig adapters;
  std::optional<std::uint64_t> base_seed;  ///< the seed of the adapters' base, if it was drawn
  std::vector<std::string> notes;
};

/// Opens the tokenizer of --tokenizer, or the companions', unless the weights were trained on bytes.
void open_encoding(const GenerateOptions& options, Source& source) {
  std::string folder = options.tokenizer;
  const bool bytes = !source.hugging_face && source.identity.tokenizer.kind == Tokenizer::Kind::bytes;
  if (folder.empty() && !source.files.empty() && !bytes && training::has_tokenizer(source.files))
    folder = source.files;
  if (folder.empty()) return;
  try {
    source.encoding = training::load_tokenizer(folder);
    const std::int64_t vocabulary = source.identity.model->shape().vocabulary;
    if (source.encoding->vocabulary() > vocabulary) {
      throw ConfigurationError(
          fmt::format("{} has {} tokens, but the model of {} has only {}: they do not belong together",
                      folder, source.encoding->vocabulary(), options.from, vocabulary));
    }
  } catch (const ConfigurationError& problem) {
    if (options.prompt_tokens.empty() || !options.tokenizer.empty()) throw;
    source.encoding.reset();
    // Token numbers need no tokenizer, except for the end token.
    source.notes.push_back(fmt::format("the end token of the tokenizer is not known: {}", problem.message()));
    return;
  }
  source.tokenizer_folder = folder;
  if (options.tokenizer.empty() || source.files.empty() || bytes) return;
  const std::string note = note_on_tokenizer(*source.encoding, folder, source.files);
  if (!note.empty()) source.notes.push_back(note);
}

/// Sets the tokens that end a text, from the companions or, if there are none, from the files in --tokenizer.
void find_ends(const GenerateOptions& options, Source& source) {
  const std::string& folder = source.files.empty() ? options.tokenizer : source.files;
  if (!folder.empty()) source.ends = end_tokens_of_folder(folder);
  if (source.ends.empty()) source.ends = end_tokens("", source.identity.model->to_json(), options.from);
  if (source.encoding && source.encoding->special().end)
    source.ends.push_back(*source.encoding->special().end);
  const bool bytes = source.identity.tokenizer.kind == Tokenizer::Kind::bytes;
  if (!source.ends.empty() || bytes) return;
  source.notes.push_back(fmt::format(
      "no end token is known: {} {}; every text gets all --tokens {}", options.from,
      folder.empty()
          ? "carries no generation_config.json, config.json or tokenizer that names one"
          : "has no eos_token_id in generation_config.json or config.json and no tokenizer with an end token",
      options.tokens));
}

/// A line about what generation_config.json asks for and this command does not do; empty if there is nothing.
std::string note_on_settings(const GenerateOptions& options, const Source& source) {
  const std::string& folder = source.files.empty() ? options.tokenizer : source.files;
  const std::string path = detail::join_path(folder, std::string(generation_config_name));
  if (folder.empty() || !detail::posix_file_system().exists(path)) return {};
  const auto json = detail::parse_json(detail::read_text_file(path, "a model's generation_config.json"));
  if (!json.is_object()) return {};
  std::vector<std::string> other;
  const auto compare = [&](const char* key, const nlohmann::ordered_json& taken) {
    const auto found = json.find(key);
    if (found == json.end() || found->is_null() || *found == taken) return;
    other.push_back(fmt::format("{} {}", key, found->dump()));
  };
  if (!options.greedy && options.temperature > 0) {
    compare("do_sample", true);
    compare("temperature", options.temperature);
    compare("top_k", options.top_k);
    compare("top_p", options.top_p);
    compare("min_p", 0);
    compare("typical_p", 1);
  }
  compare("repetition_penalty", 1);
  compare("no_repeat_ngram_size", 0);
  compare("num_beams", 1);
  if (other.empty()) return {};
  return fmt::format(
      "{} asks for {}, which is not taken; --temperature, --top-k, --top-p and --greedy say how tokens are "
      "drawn",
      path, fmt::join(other, ", "));
}

/// A line for each flag of drawing that was given, though the likeliest token is always taken.
std::vector<std::string> notes_on_idle_flags(const GenerateOptions& options, const std::vector<Flag>& flags) {
  std::vector<std::string> notes;
  if (!options.greedy && options.temperature > 0) return notes;
  for (const Flag& flag : flags) {
    const bool draws = flag.name == "--top-k" || flag.name == "--top-p" || flag.name == "--seed" ||
                       (flag.name == "--temperature" && options.temperature > 0);
    if (!draws || flag.value == "not given") continue;
    notes.push_back(fmt::format("{} has no effect: {} always takes the likeliest token", flag.name,
                                options.greedy ? "--greedy" : "--temperature 0"));
  }
  return notes;
}

Source open_source(const GenerateOptions& options) {
  detail::FileSystem& files = detail::posix_file_system();
  Source source;
  bool folder = false;
  checkpoint::with_reason("cannot generate from " + options.from, [&] {
    if (!files.exists(options.from)) throw CheckpointError("there is nothing of this name");
    folder = is_hugging_face(files, options.from);
    const bool has_run =
        folder && !options.from.ends_with(".safetensors") &&
        (files.exists(detail::join_path(options.from, std::string(checkpoint::manifest_name))) ||
         !checkpoint::list_checkpoints(files, options.from).empty());
    if (has_run) {
      throw CheckpointError(
          "it holds checkpoints and model.safetensors too: give one of them, a folder step-NNNNNNNN or the "
          "file "
          "model.safetensors");
    }
  });
  if (folder) {
    source.hugging_face =
        std::make_unique<HuggingFaceModel>(files, options.from, options.model, options.models);
    source.identity = identity_of(source.hugging_face->model());
    source.files = source.hugging_face->folder();
    if (!options.base.empty()) {
      source.notes.push_back(
          fmt::format("the base {} is not read: {} is whole without it", options.base, options.from));
    }
    return source;
  }
  source.checkpoint = find_checkpoint(files, options.from, source.notes);
  const checkpoint::LocalStorage local;
  const checkpoint::Reader reader(local, source.checkpoint);
  source.identity = identity_of(reader.manifest(), source.checkpoint, options.model, options.models);
  source.adapters = adapters_of(reader.manifest());
  if (!reader.manifest().companions.empty()) {
    (void)checkpoint::read_companions(files, source.checkpoint,
                                      reader.manifest());  // verified by their digests
    source.files = detail::join_path(source.checkpoint, std::string(checkpoint::companion_folder));
  }
  if (const auto& base = reader.manifest().base; base && base->folder.empty() && options.base.empty())
    source.base_seed = detail::seed_of_base(reader.manifest(), source.checkpoint);
  require_tensors(*source.identity.model,
                  options.model.empty() ? "its own 'user'" : "--model " + options.model, reader);
  return source;
}

/// A text to continue.
struct Prompt {
  std::string text;  ///< empty if it was given as numbers
  std::vector<std::int32_t> tokens;
  bool rendered = false;  ///< a conversation, whose text contains all special tokens by name
};

/// Reads the texts of --prompts.
std::vector<Prompt> read_prompts(const std::string& path, training::TextFormat format,
                                 const training::ChatFormat& chat, std::vector<std::string>& notes) {
  const auto refuse = [&](std::size_t line, const std::string& what) {
    throw ConfigurationError(fmt::format("--prompts {}, line {}: {}", path, line, what));
  };
  std::string text = detail::read_text_file(path, "--prompts");
  const auto head = std::string_view(text).substr(0, static_cast<std::size_t>(training::content_head_bytes));
  const bool objects = training::holds_json_lines(
      "--prompts", path, head, static_cast<std::int64_t>(text.size()), format, "--prompts-format");
  if (objects && !training::is_named_as_json_lines(path)) {
    notes.push_back(
        fmt::format("--prompts '{}' holds JSON lines, an object a line, each a prompt; with --prompts-format "
                    "text each line is a prompt as it is",
                    path));
  }
  if (text.starts_with(training::byte_order_mark)) text.erase(0, training::byte_order_mark.size());
  std::istringstream lines(text);
  std::vector<Prompt> prompts;
  std::set<std::string> unread;
  std::size_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    if (!objects) {
      prompts.push_back({line, {}, false});
      continue;
    }
    const std::string where = fmt::format("--prompts {}, line {}", path, number);
    if (const auto text = training::read_json_prompt(line, chat, where)) {
      if (text->empty()) refuse(number, "the chat template writes no text for its messages");
      prompts.push_back({*text, {}, true});
      const std::vector<std::string> keys = training::unread_keys(line, chat);
      unread.insert(keys.begin(), keys.end());
      continue;
    }
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) refuse(number, "is no JSON object");
    const auto found = json.find("prompt");
    if (found == json.end() || !found->is_string() || found->get_ref<const std::string&>().empty())
      refuse(number, "has no \"prompt\", which is a text to go on from, and no \"messages\"");
    prompts.push_back({*found, {}, false});
    for (const auto& [key, value] : json.items()) {
      if (key != "prompt") unread.insert(key);
    }
  }
  if (!unread.empty()) {
    notes.push_back(fmt::format("--prompts '{}': keys of its lines that are not read: {}", path,
                                fmt::join(unread, ", ")));
  }
  if (prompts.empty()) throw ConfigurationError(fmt::format("--prompts {} has no prompts", path));
  return prompts;
}

/// Encodes a text, preceded by the tokens that the model expects.
std::vector<std::int32_t> tokens_of(const std::string& text, bool rendered, const GenerateOptions& options,
                                    const Source& source) {
  std::vector<std::int32_t> tokens;
  if (source.encoding) {
    if (!rendered) tokens = source.encoding->special().before;
    const std::vector<std::int32_t> prompt = source.encoding->encode(text);
    tokens.insert(tokens.end(), prompt.begin(), prompt.end());
  } else if (source.identity.tokenizer.kind != Tokenizer::Kind::bytes) {
    throw ConfigurationError(
        fmt::format("{} is of {}: how the --prompt is encoded in them is not known; give --tokenizer a "
                    "folder with its tokenizer, or give --prompt-tokens",
                    options.from, describe(source.identity.tokenizer)));
  } else {
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  }
  return tokens;
}

std::vector<Prompt> prompts_of(const GenerateOptions& options, Source& source) {
  std::vector<Prompt> prompts;
  for (const std::string& numbers : options.prompt_tokens)
    prompts.push_back({"", parse_tokens(numbers), false});
  for (const std::string& text : options.prompts) prompts.push_back({text, {}, false});
  if (!options.prompts_file.empty()) {
    const training::ChatFormat chat =
        training::chat_format(options.chat, source.tokenizer_folder, options.date);
    prompts = read_prompts(options.prompts_file,
                           training::parse_text_format(options.prompts_format, "--prompts-format"), chat,
                           source.notes);
    const bool talks =
        std::any_of(prompts.begin(), prompts.end(), [](const Prompt& each) { return each.rendered; });
    if (!talks && !options.chat.empty()) {
      throw ConfigurationError(fmt::format(
          "--chat-template says how conversations are written, but --prompts '{}' holds none: no line of it "
          "has \"messages\"; leave the flag out, or name JSON lines with conversations",
          options.prompts_file));
    }
    if (talks) {
      const auto bytes = training::make_byte_tokenizer();
      training::require_names(source.encoding ? *source.encoding : *bytes, chat.built_in);
    }
  }
  for (Prompt& prompt : prompts) {
    if (prompt.tokens.empty()) prompt.tokens = tokens_of(prompt.text, prompt.rendered, options, source);
  }
  for (const Prompt& prompt : prompts) {
    for (const std::int32_t token : prompt.tokens) {
      if (token < source.identity.model->shape().vocabulary) continue;
      throw ConfigurationError(fmt::format("token {} of the prompt is not below the model's vocabulary of {}",
                                           token, source.identity.model->shape().vocabulary));
    }
  }
  return prompts;
}

/// Loads weights only: just the smallest tensor, or the adapters if there are any, is trainable, so gradients
/// and optimizer state are tiny.
Config config_of(const GenerateOptions& options, const ModelSpec& spec, const Source& source, int ranks) {
  std::vector<const TensorSpec*> tensors;
  for (const UnitSpec& unit : spec.units()) {
    for (const TensorSpec& tensor : unit.tensors) tensors.push_back(&tensor);
  }
  tensors.erase(std::min_element(tensors.begin(), tensors.end(), [](const auto* a, const auto* b) {
    return a->shape.elements() < b->shape.elements();
  }));
  nlohmann::json frozen = nlohmann::json::array();
  for (const TensorSpec* tensor : tensors) {
    if (!source.adapters.any()) frozen.push_back(tensor->name);
  }
  const DataType dtype = dtype_of_flag(options.dtype);
  std::vector<std::string> overrides{fmt::format("zero_optimization.stage={}", options.stage),
                                     fmt::format("bf16.enabled={}", dtype == DataType::bfloat16),
                                     fmt::format("fp16.enabled={}", dtype == DataType::float16),
                                     "tranche.frozen=" + frozen.dump()};
  if (options.threads) overrides.push_back(fmt::format("tranche.threads={}", *options.threads));
  if (!options.mesh.empty())
    overrides.push_back(fmt::format("tranche.mesh={}", nlohmann::json(options.mesh).dump()));
  Config config = parse_config("{}", ranks, overrides);
  config.lora = source.adapters;
  if (source.base_seed) config.seed = *source.base_seed;
  return config;
}

/// The model's specification. From a Hugging Face folder, each rank reads its weights when its engine is
/// made. Weights of a checkpoint are zero until they are read, because drawing initial ones would take
/// longer; a drawn base of adapters is drawn.
ModelSpec spec_of(const Source& source) {
  const ModelSpec drawn = source.identity.model->spec(source.identity.sequence);
  ModelSpec spec = drawn.without_units();
  for (UnitSpec unit : drawn.units()) {
    for (TensorSpec& tensor : unit.tensors) {
      if (source.base_seed) continue;
      tensor.initializer = Initializer::zeros();
      if (!source.hugging_face) continue;
      tensor.initializer = Initializer::from(
          "the folder's",
          [&folder = *source.hugging_face, name = tensor.name](std::int64_t first, std::span<float> values) {
            const auto count = static_cast<std::int64_t>(values.size());
            folder.read(name, {first, first + count}, DataType::float32, values.data());
          });
    }
    spec.add_unit(std::move(unit));
  }
  return spec;
}

/// The text of a token; without a tokenizer it is a byte.
std::string bytes_of(const Source& source, std::int32_t token) {
  if (source.encoding) return std::string(source.encoding->decode(token));
  return {static_cast<char>(static_cast<unsigned char>(token))};
}

/// Writes prompts and their continuations: a single one as it is generated, several one after the other, for
/// people or as JSON lines.
class Writer {
 public:
  Writer(const Output& output, const GenerateOptions& options, const Source& source,
         const std::vector<Prompt>& prompts)
      : output_(output), options_(options), source_(source), prompts_(prompts) {}

  /// True for a single prompt for people: add() is then called with each of its new tokens.
  bool streams() const { return prompts_.size() == 1 && !options_.json; }
  /// Writes the prompt before its continuation; nothing if the first token cannot be written.
  void begin() {
    if (streams() && !begun_) add(prompts_.front().tokens);
    begun_ = true;
  }
  void add(std::span<const std::int32_t> tokens) {
    for (const std::int32_t token : tokens) {
      if (options_.prompt_tokens.empty()) {
        put(bytes_of(source_, token));
      } else {
        output_.out << (first_ ? "" : " ") << token;
      }
      first_ = false;
    }
    output_.out.flush();
  }
  void finish(const models::Generation& text) {
    const Prompt& prompt = prompts_[static_cast<std::size_t>(text.prompt)];
    begin();
    note_unseen(prompt, text);
    if (options_.json) return put(json_of(prompt, text) + "\n");
    if (!streams()) {
      first_ = true;
      output_.out << fmt::format("{}==> prompt {} of {} <==\n", text.prompt == 0 ? "" : "\n", text.prompt + 1,
                                 prompts_.size());
      add(prompt.tokens);
      add(text.tokens);
    }
    output_.out << std::endl;
  }

 private:
  /// The number of tokens at the prompt's beginning that were outside the context of the last new token.
  std::int64_t unseen_of(const Prompt& prompt, const models::Generation& text) const {
    const auto given = static_cast<std::int64_t>(prompt.tokens.size()),
               written = static_cast<std::int64_t>(text.tokens.size());
    // The end token was sampled from the context of everything written.
    const bool ended = text.end == models::Generation::End::end_token;
    const std::int64_t seen = given + written - (ended ? 0 : 1);
    return std::clamp<std::int64_t>(seen - source_.identity.sequence, 0, given);
  }
  void note_unseen(const Prompt& prompt, const models::Generation& text) const {
    const std::int64_t unseen = unseen_of(prompt, text), context = source_.identity.sequence;
    if (unseen == 0) return;
    const auto given = static_cast<std::int64_t>(prompt.tokens.size());
    output_.errors << fmt::format(
        "note: the model sees {} tokens at once: {}\n", context,
        given > context
            ? fmt::format("prompt {} has {}, and nothing of its first {} was seen", text.prompt + 1, given,
                          given - context)
            : fmt::format("text and prompt {} are longer, and the last tokens were written without the "
                          "prompt's first {}",
                          text.prompt + 1, unseen));
  }
  std::string json_of(const Prompt& prompt, const models::Generation& text) const {
    nlohmann::ordered_json json;
    json["index"] = text.prompt;
    if (options_.prompt_tokens.empty()) {
      std::string written;
      for (const std::int32_t token : text.tokens) written += bytes_of(source_, token);
      json["prompt"] = prompt.text;
      json["text"] = written;
    } else {
      json["prompt"] = prompt.tokens;
    }
    json["tokens"] = text.tokens;
    if (const std::int64_t unseen = unseen_of(prompt, text); unseen > 0)
      json["unseen_prompt_tokens"] = unseen;
    using End = models::Generation::End;
    json["end"] = text.end == End::length ? "length" : text.end == End::end_token ? "end_token" : "stop";
    // A text may end within a character, so invalid UTF-8 is replaced.
    return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  }
  /// A file gets the bytes that the model generated.
  void put(std::string_view bytes) {
    if (output_.terminal) {
      output_.out << bytes;
    } else {
      detail::write_unchanged(output_.out, bytes);
    }
  }
  const Output& output_;
  const GenerateOptions& options_;
  const Source& source_;
  const std::vector<Prompt>& prompts_;
  bool first_ = true, begun_ = false;
};

/// Generates the texts. Collective.
void generate(Engine& engine, const GenerateOptions& options, const Source& source,
              const std::vector<Prompt>& prompts, Writer* writer) {
  models::GenerationOptions wanted;
  wanted.tokens = options.tokens;
  // Positions beyond those of the training sequences have untrained embeddings.
  wanted.context = source.identity.sequence;
  wanted.max_batch = options.max_batch;
  wanted.cache = options.cache;
  wanted.sampling = {options.greedy ? 0 : options.temperature, options.top_k, options.top_p,
                     static_cast<std::uint64_t>(options.seed)};
  const std::int64_t vocabulary = source.identity.model->shape().vocabulary;
  // Only tokens that can be written are drawn, because a model's vocabulary may be padded.
  if (options.prompt_tokens.empty())
    wanted.writable = std::min(vocabulary, source.encoding ? source.encoding->vocabulary() : 256);
  wanted.end_tokens = source.ends;
  std::vector<std::string> texts(prompts.size());  // generated text, up to a stop text
  wanted.on_token = [&](std::int64_t prompt, std::int32_t token) {
    if (writer != nullptr && writer->streams()) {
      writer->begin();
      writer->add({&token, 1});
    }
    if (options.stop.empty()) return false;
    std::string& text = texts[static_cast<std::size_t>(prompt)];
    text += bytes_of(source, token);
    return std::any_of(options.stop.begin(), options.stop.end(),
                       [&](const std::string& stop) { return text.find(stop) != std::string::npos; });
  };
  std::vector<std::vector<std::int32_t>> tokens;
  for (const Prompt& prompt : prompts) tokens.push_back(prompt.tokens);
  models::generate(engine, *source.identity.model, tokens, wanted, [&](const models::Generation& text) {
    if (writer != nullptr) writer->finish(text);
  });
}

}  // namespace

int run_generate(const Options& all_options, const Output& output) {
  const GenerateOptions& options = all_options.generate;
  Launch launch(output.errors, all_options.flags);
  Source source;
  std::vector<Prompt> prompts;
  ModelSpec spec;
  Config config;
  const int status = launch.agree([&] {
    source = open_source(options);
    source.notes.insert(source.notes.begin(), all_options.notes.begin(), all_options.notes.end());
    open_encoding(options, source);
    find_ends(options, source);
    const std::vector<std::string> idle = notes_on_idle_flags(options, all_options.flags);
    source.notes.insert(source.notes.end(), idle.begin(), idle.end());
    const std::string settings = note_on_settings(options, source);
    if (!settings.empty()) source.notes.push_back(settings);
    prompts = prompts_of(options, source);
    spec = spec_of(source);
    config = config_of(options, spec, source, launch.size());
  });
  if (status != 0) return status;
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<Engine> engine;
  try {
    runtime = std::make_unique<Runtime>(Runtime::from_environment(RuntimeOptions::from(config)));
    engine = std::make_unique<Engine>(*runtime, spec, config);
    if (!source.hugging_face) {
      LoadOptions load;
      load.weights_only = true;
      load.base = options.base;
      const LoadResult loaded = engine->load(source.checkpoint, load);
      for (const std::string& note : loaded.notes) {
        if (std::find(source.notes.begin(), source.notes.end(), note) == source.notes.end())
          source.notes.push_back(note);
      }
    }
    Writer writer(output, options, source, prompts);
    const bool speaks = launch.rank() == 0;
    for (const std::string& note : source.notes) {
      if (speaks) output.errors << "note: " << note << "\n";
    }
    generate(*engine, options, source, prompts, speaks ? &writer : nullptr);
  } catch (...) {
    // The failure is reported before unwinding, because an Engine waits for its collectives and peers must be
    // informed first.
    return launch.fail(std::current_exception(), 2, {}, runtime.get());
  }
  return 0;
}

}  // namespace tranche::tools
