#include "tools/generate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>
#include <span>

#include "checkpoint/reader.h"
#include "checkpoint/storage.h"
#include "core/printable.h"
#include "tools/adapters.h"
#include "tools/checkpoint_source.h"
#include "tools/hugging_face.h"
#include "tools/token_sampler.h"
#include "tranche/core/error.h"
#include "tranche/data/tokenizer.h"

namespace tranche::tools {

namespace {

/// The source of the weights.
struct Source {
  RunIdentity identity;
  std::string checkpoint;                          ///< its path; empty: a folder of Hugging Face's
  std::unique_ptr<HuggingFaceModel> hugging_face;  ///< else
  std::unique_ptr<data::Tokenizer> encoding;       ///< of the text, when it is not bytes
  LoraConfig adapters;
  std::vector<std::string> notes;
};

/// From --tokenizer, or from the folder that the weights are in.
void open_encoding(const GenerateOptions& options, Source& source) {
  std::string folder = options.tokenizer;
  if (folder.empty() && source.hugging_face && data::has_tokenizer(options.from)) folder = options.from;
  if (folder.empty() || options.prompt_tokens) return;
  source.encoding = data::load_tokenizer(folder);
  if (source.encoding->vocabulary() > source.identity.model->shape().vocabulary) {
    throw ConfigurationError(
        fmt::format("{} has {} tokens, the model of {} only {}: they do not belong together", folder,
                    source.encoding->vocabulary(), options.from, source.identity.model->shape().vocabulary));
  }
}

Source open_source(const GenerateOptions& options) {
  detail::FileSystem& files = detail::posix_file_system();
  Source source;
  bool folder = false;
  checkpoint::with_reason("cannot generate from " + options.from, [&] {
    if (!files.exists(options.from)) throw CheckpointError("there is nothing of this name");
    folder = is_hugging_face(files, options.from);
  });
  if (folder) {
    source.hugging_face =
        std::make_unique<HuggingFaceModel>(files, options.from, options.model, options.models);
    source.identity = identity_of(source.hugging_face->model());
    return source;
  }
  source.checkpoint = find_checkpoint(files, options.from, source.notes);
  const checkpoint::LocalStorage local;
  const checkpoint::Reader reader(local, source.checkpoint);
  source.identity = identity_of(reader.manifest(), source.checkpoint, options.model, options.models);
  source.adapters = adapters_of(reader.manifest());
  require_tensors(*source.identity.model,
                  options.model.empty() ? "its own 'user'" : "--model " + options.model, reader);
  return source;
}

std::vector<std::int32_t> prompt_of(const GenerateOptions& options, const Source& source) {
  const RunIdentity& identity = source.identity;
  std::vector<std::int32_t> tokens;
  if (options.prompt_tokens) {
    tokens = parse_tokens(*options.prompt_tokens);
  } else if (source.encoding) {
    tokens = source.encoding->special().before;
    const std::vector<std::int32_t> prompt = source.encoding->encode(*options.prompt);
    tokens.insert(tokens.end(), prompt.begin(), prompt.end());
  } else if (identity.tokenizer.kind != Tokenizer::Kind::bytes) {
    throw ConfigurationError(fmt::format(
        "{} is of {}: which numbers the --prompt is in them is not known; give --tokenizer a folder with "
        "its tokenizer, or give --prompt-tokens",
        options.from, describe(identity.tokenizer)));
  } else {
    for (const char c : *options.prompt) tokens.push_back(static_cast<unsigned char>(c));
  }
  for (const std::int32_t token : tokens) {
    if (token >= identity.model->shape().vocabulary) {
      throw ConfigurationError(fmt::format("token {} of the prompt is not below the model's vocabulary of {}",
                                           token, identity.model->shape().vocabulary));
    }
  }
  return tokens;
}

/// Weights only: nothing but the smallest tensor, or what adapters there are, is trainable, so that there are
/// next to no gradients and no optimizer state.
Config config_of(const GenerateOptions& options, const ModelSpec& spec, const LoraConfig& adapters,
                 int ranks) {
  std::vector<const TensorSpec*> tensors;
  for (const UnitSpec& unit : spec.units()) {
    for (const TensorSpec& tensor : unit.tensors) tensors.push_back(&tensor);
  }
  tensors.erase(std::min_element(tensors.begin(), tensors.end(), [](const auto* a, const auto* b) {
    return a->shape.elements() < b->shape.elements();
  }));
  nlohmann::json frozen = nlohmann::json::array();
  for (const TensorSpec* tensor : tensors) {
    if (!adapters.any()) frozen.push_back(tensor->name);
  }
  std::vector<std::string> overrides{fmt::format("zero_optimization.stage={}", options.stage),
                                     fmt::format("bf16.enabled={}", options.dtype == "bf16"),
                                     fmt::format("fp16.enabled={}", options.dtype == "fp16"),
                                     "tranche.frozen=" + frozen.dump()};
  if (options.threads) overrides.push_back(fmt::format("tranche.threads={}", *options.threads));
  Config config = parse_config("{}", ranks, overrides);
  config.lora = adapters;
  return config;
}

/// The model. Each rank takes what it keeps of the weights from a folder of Hugging Face's as its engine is
/// made; those of a checkpoint are zero until they are read, as drawing initial ones would take longer.
ModelSpec spec_of(const Source& source) {
  const ModelSpec drawn = source.identity.model->spec(source.identity.sequence);
  ModelSpec spec;
  spec.tokens_per_sample = drawn.tokens_per_sample;
  spec.flops_per_token = drawn.flops_per_token;
  for (UnitSpec unit : drawn.units()) {
    for (TensorSpec& tensor : unit.tensors) {
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

/// The text of a token, which is a byte where there is no tokenizer.
std::string bytes_of(const Source& source, std::int32_t token) {
  if (source.encoding) return std::string(source.encoding->decode(token));
  return {static_cast<char>(static_cast<unsigned char>(token))};
}

/// Writes tokens as text or as numbers.
class Writer {
 public:
  Writer(const Output& output, bool numbers, const Source& source)
      : output_(output), numbers_(numbers), source_(source) {}
  void add(std::int32_t token) {
    if (numbers_) {
      output_.out << (first_ ? "" : " ") << token;
    } else {
      add(bytes_of(source_, token));
    }
    first_ = false;
    output_.out.flush();
  }
  void finish() { output_.out << std::endl; }

 private:
  /// A file gets the bytes that the model wrote.
  void add(std::string_view bytes) {
    if (output_.terminal) {
      output_.out << bytes;
    } else {
      detail::write_unchanged(output_.out, bytes);
    }
  }
  const Output& output_;
  bool numbers_;
  const Source& source_;
  bool first_ = true;
};

/// Collective.
void generate(Engine& engine, const models::LanguageModel& model, const GenerateOptions& options,
              const Source& source, std::vector<std::int32_t> tokens, Writer* writer) {
  // Only tokens that can be written are drawn: a model's vocabulary may be padded.
  std::size_t writable = SIZE_MAX;
  if (!options.prompt_tokens)
    writable = source.encoding ? static_cast<std::size_t>(source.encoding->vocabulary()) : 256;
  const SamplingOptions sampling{options.greedy ? 0 : options.temperature, options.top_k, options.top_p,
                                 static_cast<std::uint64_t>(options.seed)};
  const std::int32_t end = source.encoding ? source.encoding->special().end.value_or(-1) : -1;
  std::string text;  // what is generated, where something ends it
  const auto context = static_cast<std::size_t>(source.identity.sequence);
  if (writer != nullptr) {
    for (const std::int32_t token : tokens) writer->add(token);
  }
  for (std::int64_t i = 0; i < options.tokens; ++i) {
    // Positions beyond the training sequences' have embeddings that never were trained.
    const std::vector<float> logits =
        model.next_token_logits(engine, std::span(tokens).last(std::min(tokens.size(), context)));
    tokens.push_back(draw_token(std::span(logits).first(std::min(logits.size(), writable)), sampling, i));
    if (tokens.back() == end) break;  // of a document
    if (writer != nullptr) writer->add(tokens.back());
    if (options.stop.empty()) continue;
    text += bytes_of(source, tokens.back());
    if (std::any_of(options.stop.begin(), options.stop.end(),
                    [&](const std::string& stop) { return text.find(stop) != std::string::npos; })) {
      break;
    }
  }
  if (writer != nullptr) writer->finish();
}

}  // namespace

int run_generate(const Options& all_options, const Output& output) {
  const GenerateOptions& options = all_options.generate;
  Launch launch(output.errors, all_options.flags);
  Source source;
  std::vector<std::int32_t> prompt;
  ModelSpec spec;
  Config config;
  const int status = launch.agree([&] {
    source = open_source(options);
    open_encoding(options, source);
    prompt = prompt_of(options, source);
    spec = spec_of(source);
    config = config_of(options, spec, source.adapters, launch.size());
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
      (void)engine->load(source.checkpoint, load);
    }
    Writer writer(output, options.prompt_tokens.has_value(), source);
    const bool speaks = launch.rank() == 0;
    for (const std::string& note : source.notes) {
      if (speaks) output.errors << "note: " << note << "\n";
    }
    generate(*engine, *source.identity.model, options, source, std::move(prompt), speaks ? &writer : nullptr);
  } catch (...) {
    // Before anything is unwound: an Engine waits for its collectives, and peers have to know first.
    return launch.fail(std::current_exception(), 2, {}, runtime.get());
  }
  return 0;
}

}  // namespace tranche::tools
