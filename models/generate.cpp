#include "tranche/models/generate.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "tranche/comm/communicator.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/partition/mesh.h"

namespace tranche::models {

namespace {

using Tokens = std::vector<std::int32_t>;
using Prompts = std::span<const Tokens>;

void check(const models::LanguageModel& model, Prompts prompts, const GenerationOptions& options) {
  const models::ModelShape shape = model.shape();
  const auto refuse = [](const std::string& text) { throw InvalidArgument("generate: " + text); };
  if (options.tokens < 1)
    refuse(fmt::format("{} tokens were asked for; ask for at least one", options.tokens));
  if (options.max_batch < 1) refuse(fmt::format("max_batch is {}, wanted at least 1", options.max_batch));
  if (options.context < 0 || options.context > shape.positions) {
    refuse(fmt::format("a context of {} tokens was asked for; the model has {} positions (0: all of them)",
                       options.context, shape.positions));
  }
  if (options.writable < 0 || options.writable > shape.vocabulary) {
    refuse(fmt::format("writable is {}, wanted up to the vocabulary of {} (0: all of it)", options.writable,
                       shape.vocabulary));
  }
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    if (prompts[i].empty()) refuse(fmt::format("prompt {} has no tokens; give it at least one", i));
    for (const std::int32_t token : prompts[i]) {
      if (token >= 0 && token < shape.vocabulary) continue;
      refuse(fmt::format("token {} of prompt {} is not in the vocabulary of {}", token, i, shape.vocabulary));
    }
  }
}

/// A hash of the arguments, below 2^62.
std::int64_t hash_of(Prompts prompts, const GenerationOptions& options) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  const auto add = [&](auto value) {
    hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x100000001b3u;
    hash ^= hash >> 29;
  };
  for (const Tokens& prompt : prompts) {
    add(prompt.size());
    for (const std::int32_t token : prompt) add(token);
  }
  for (const std::int64_t number :
       {options.tokens, options.context, options.max_batch, std::int64_t{options.end_token}, options.writable,
        std::int64_t{options.cache}, options.sampling.top_k}) {
    add(number);
  }
  for (const std::int32_t token : options.end_tokens) add(token);
  add(options.sampling.seed);
  for (const double number : {options.sampling.temperature, options.sampling.top_p}) add(number * 1e15);
  return static_cast<std::int64_t>(hash >> 2);
}

std::int64_t largest(Communicator& ranks, std::int64_t value) {
  if (ranks.size() == 1) return value;
  ranks
      .all_reduce(&value, 1, DataType::int64, ReduceOperation::maximum,
                  {"generation", "agree", Traffic::control, Tier::host})
      .wait();
  return value;
}

/// Collective. Names the first weight that is not finite; equal on all ranks.
std::string non_finite_weight(Engine& engine) {
  for (const UnitSpec& unit : engine.model().units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      const std::vector<float> values = engine.read_weight(tensor.name);
      const auto found =
          std::find_if(values.begin(), values.end(), [](float value) { return !std::isfinite(value); });
      if (found == values.end()) continue;
      return fmt::format("the first weight that is not finite is element {} of {} ({})",
                         found - values.begin(), tensor.name, *found);
    }
  }
  return "all weights are finite, so that a number on the way was too large: try another dtype";
}

/// A text in progress.
struct Text {
  std::int64_t prompt = 0;
  std::int64_t row = 0;  ///< its row of the cache
  Tokens tokens = {};    ///< the prompt and new tokens
  std::int64_t length_of_prompt = 0;
  bool ended = false;
  Generation::End end = Generation::End::length;

  std::int64_t length() const { return static_cast<std::int64_t>(tokens.size()); }
};

class Generator {
 public:
  Generator(Engine& engine, const models::LanguageModel& model, Prompts prompts,
            const GenerationOptions& options)
      : engine_(engine),
        model_(model),
        prompts_(prompts),
        options_(options),
        ranks_(engine.runtime().all()),
        stages_(engine.runtime().pipeline()),
        tensor_(engine.runtime().tensor()),
        stage_(engine.stage()),
        token_ranks_(engine.runtime().mesh().token_ranks()),
        token_rank_(engine.runtime().mesh().token_rank(ranks_.rank())),
        context_(options.context == 0 ? model.shape().positions : options.context),
        rows_(std::min(options.max_batch, divide_round_up(static_cast<std::int64_t>(prompts.size()),
                                                          std::int64_t{token_ranks_}))),
        ends_(options.end_tokens.begin(), options.end_tokens.end()),
        writable_(
            static_cast<std::size_t>(options.writable == 0 ? model.shape().vocabulary : options.writable)) {
    const std::int64_t hash = hash_of(prompts, options);
    if (largest(ranks_, hash) != -largest(ranks_, -hash)) {
      throw InvalidArgument("generate: ranks were given different prompts or options");
    }
    if (prompts.empty()) return;
    if (options.cache && !model.has_cache()) {
      if (ranks_.rank() == 0) {
        engine.runtime().log().info(
            model.architecture() +
            " has no key-value cache (LanguageModel::cache_heads): all tokens are computed "
            "again for each new one");
      }
    } else if (options.cache) {
      std::size_t longest = 0;
      for (const Tokens& prompt : prompts) longest = std::max(longest, prompt.size());
      // The last new token is not used as input.
      const std::int64_t most = static_cast<std::int64_t>(longest) + std::min(options.tokens, context_) - 1;
      cache_.emplace(engine, model, rows_, std::min(context_, most));
    }
  }

  std::int64_t prompts_of_a_round() const { return rows_ * token_ranks_; }

  /// Generates for the prompts from `first` on.
  std::vector<Generation> round(std::int64_t first) {
    texts_.clear();
    const auto count = static_cast<std::int64_t>(prompts_.size());
    for (std::int64_t row = 0; row < rows_; ++row) {
      const std::int64_t prompt = first + row * token_ranks_ + token_rank_;
      if (prompt >= count) break;
      const Tokens& tokens = prompts_[static_cast<std::size_t>(prompt)];
      texts_.push_back({.prompt = prompt,
                        .row = row,
                        .tokens = tokens,
                        .length_of_prompt = static_cast<std::int64_t>(tokens.size())});
      if (cache_) cache_->set_length(row, 0);
    }
    while (one_token()) {
    }
    return exchanged(first, std::min(count, first + prompts_of_a_round()));
  }

 private:
  /// Replaces a token if the logits were not finite.
  static constexpr std::int32_t not_finite = -2;
  /// Replaces a token that another stage draws, and every token in a plan, where nothing is received.
  static constexpr std::int32_t undrawn = 0;
  struct Drawn {
    Text* text = nullptr;
    std::int32_t token = undrawn;
  };
  /// A number larger than the passes of one round.
  static constexpr std::int64_t most_passes = std::int64_t{1} << 31;

  std::span<const std::int32_t> seen(const Text& text) const {
    return std::span(text.tokens).last(static_cast<std::size_t>(std::min(text.length(), context_)));
  }
  /// True if all tokens except the last are in the cache, and there is room for it.
  bool goes_on_in_cache(const Text& text) const {
    if (!cache_ || text.length() > cache_->capacity()) return false;
    return text.length() > 1 && cache_->length(text.row) == text.length() - 1;
  }

  /// Writes the next token of all texts that have not ended; returns false when none is left on any rank.
  bool one_token() {
    std::vector<Text*> whole, next;
    for (Text& text : texts_) {
      if (!text.ended) (goes_on_in_cache(text) ? next : whole).push_back(&text);
    }
    const auto mine = static_cast<std::int64_t>(whole.size() + (next.empty() ? 0 : 1));
    // The same exchange reports a text whose logits were not finite: the value is then its number times
    // most_passes, and the passes.
    const std::int64_t agreed = largest(ranks_, (not_finite_ + 1) * most_passes + mine);
    if (agreed >= most_passes) {
      throw NumericalError(fmt::format("generate: the logits behind prompt {} are not finite; {}",
                                       agreed / most_passes, non_finite_weight(engine_)));
    }
    const std::int64_t passes = agreed;
    constexpr auto where = models::LogitsOn::last_stage;
    std::vector<Drawn> drawn;
    for (Text* text : whole) {
      const bool fits = cache_ && text->length() <= cache_->capacity();
      const std::vector<float> logits = fits
                                            ? model_.prefill(engine_, *cache_, text->row, text->tokens, where)
                                            : model_.next_token_logits(engine_, seen(*text), where);
      drawn.push_back({text, draw(*text, logits, 0)});
      // Stages of a pipeline exchange the tokens of several prompts together, so that early stages can
      // continue with the next prompt.
      if (stages_ == nullptr) take(drawn);
    }
    if (!next.empty()) {
      Tokens tokens(static_cast<std::size_t>(rows_), -1);
      for (const Text* text : next) tokens[static_cast<std::size_t>(text->row)] = text->tokens.back();
      const std::vector<float> logits = model_.decode(engine_, *cache_, tokens, where);
      for (Text* text : next) drawn.push_back({text, draw(*text, logits, text->row)});
    }
    take(drawn);
    for (std::int64_t pass = mine; pass < passes; ++pass) model_.gather_for_others(engine_);
    return passes > 0;
  }

  /// Draws the next token of a text from row `row` of the logits. Returns not_finite if they are not usable,
  /// and undrawn on pipeline stages that get no logits.
  std::int32_t draw(const Text& text, std::span<const float> logits, std::int64_t row) const {
    if (!stage_.last()) return undrawn;
    const std::int64_t begin = row * model_.shape().vocabulary;
    const std::span<const float> drawn = logits.subspan(static_cast<std::size_t>(begin), writable_);
    // A user's model may exclude tokens by minus infinity.
    const bool any =
        std::any_of(drawn.begin(), drawn.end(), [](float value) { return std::isfinite(value); });
    const bool usable = any && std::all_of(drawn.begin(), drawn.end(), [](float value) {
                          return value < std::numeric_limits<float>::infinity();  // no NaN either
                        });
    if (!usable) return not_finite;
    return draw_token(drawn, options_.sampling, text.length() - text.length_of_prompt, text.prompt);
  }

  /// Broadcasts one number for each drawn text to the other stages of the data rank, and to all ranks of
  /// these.
  void share(Tokens& numbers, int from, std::string_view what) const {
    const auto give = [&](Communicator* ranks, int root) {
      if (ranks == nullptr) return;
      ranks
          ->broadcast(numbers.data(), static_cast<std::int64_t>(numbers.size()), DataType::int32, root, {},
                      {what, "generation", Traffic::control, Tier::host})
          .wait();
    };
    give(stages_, from);
    give(tensor_, 0);
  }

  /// Appends the drawn tokens to their texts, equally on all stages of the data rank, and clears the list.
  void take(std::vector<Drawn>& drawn) {
    if (drawn.empty()) return;
    Tokens tokens, stopped(drawn.size());
    for (const Drawn& one : drawn) tokens.push_back(one.token);
    share(tokens, stage_.last_stage, "tokens");
    const auto ends = [&](std::int32_t token) {
      return token == options_.end_token || ends_.contains(token);
    };
    for (std::size_t i = 0; i < drawn.size(); ++i) {
      Text& text = *drawn[i].text;
      if (tokens[i] == not_finite || ends(tokens[i])) continue;
      text.tokens.push_back(tokens[i]);
      if (!stage_.first() || (tensor_ != nullptr && tensor_->rank() > 0) || !options_.on_token) continue;
      try {
        stopped[i] = options_.on_token(text.prompt, tokens[i]) ? 1 : 0;
      } catch (...) {
        // The data rank's other ranks wait for this rank's answer.
        if (stages_ != nullptr || tensor_ != nullptr) engine_.break_down(std::current_exception());
        throw;
      }
    }
    share(stopped, 0, "stops");
    for (std::size_t i = 0; i < drawn.size(); ++i) {
      Text& text = *drawn[i].text;
      const bool full = text.length() - text.length_of_prompt == options_.tokens;
      if (tokens[i] == not_finite) not_finite_ = std::max(not_finite_, text.prompt);
      text.ended = tokens[i] == not_finite || ends(tokens[i]) || stopped[i] != 0 || full;
      text.end = ends(tokens[i])   ? Generation::End::end_token
                 : stopped[i] != 0 ? Generation::End::stopped
                                   : Generation::End::length;
    }
    drawn.clear();
  }

  /// Returns the round's texts of all ranks, in the order of the prompts.
  std::vector<Generation> exchanged(std::int64_t first, std::int64_t end) const {
    // Each row has the number of new tokens, how the text ended, and the tokens.
    std::int64_t longest = 0;
    for (const Text& text : texts_) longest = std::max(longest, text.length() - text.length_of_prompt);
    const std::int64_t stride = 2 + largest(ranks_, longest);
    Tokens mine(static_cast<std::size_t>(rows_ * stride));
    for (const Text& text : texts_) {
      const auto at = mine.begin() + text.row * stride;
      at[0] = static_cast<std::int32_t>(text.length() - text.length_of_prompt);
      at[1] = static_cast<std::int32_t>(text.end);
      std::copy(text.tokens.begin() + text.length_of_prompt, text.tokens.end(), at + 2);
    }
    Tokens all(mine.size() * static_cast<std::size_t>(ranks_.size()));
    if (ranks_.size() == 1) {
      all = mine;
    } else {
      ranks_
          .all_gather(mine.data(), all.data(), static_cast<std::int64_t>(mine.size()), DataType::int32, 0, {},
                      {"generation", "texts", Traffic::control, Tier::host})
          .wait();
    }
    const Mesh& mesh = engine_.runtime().mesh();
    std::vector<int> holders(static_cast<std::size_t>(token_ranks_));  // one rank for each token rank
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      holders[static_cast<std::size_t>(mesh.token_rank(rank))] = rank;
    }
    std::vector<Generation> result;
    for (std::int64_t prompt = first; prompt < end; ++prompt) {
      const std::int64_t number = prompt - first, row = number / token_ranks_;
      const std::int64_t rank = holders[static_cast<std::size_t>(number % token_ranks_)];
      const auto at = all.begin() + (rank * rows_ + row) * stride;
      result.push_back({prompt, {at + 2, at + 2 + at[0]}, static_cast<Generation::End>(at[1])});
    }
    return result;
  }

  Engine& engine_;
  const models::LanguageModel& model_;
  Prompts prompts_;
  const GenerationOptions& options_;
  Communicator& ranks_;
  Communicator* stages_;  ///< of this data rank; null: there is one stage
  Communicator* tensor_;  ///< the ranks that compute parts of this data rank's layers; null: there is one
  Engine::StageUses stage_;
  int token_ranks_, token_rank_;
  std::int64_t context_, rows_;
  std::unordered_set<std::int32_t> ends_;
  std::size_t writable_;
  std::int64_t not_finite_ = -1;  ///< the number of a prompt of this data rank, or -1
  std::optional<models::KeyValueCache> cache_;
  std::vector<Text> texts_;
};

}  // namespace

void generate(Engine& engine, const models::LanguageModel& model, Prompts prompts,
              const GenerationOptions& options, const std::function<void(const Generation&)>& finished) {
  check(model, prompts, options);
  Generator generator(engine, model, prompts, options);
  for (std::int64_t first = 0; first < static_cast<std::int64_t>(prompts.size());
       first += generator.prompts_of_a_round()) {
    for (const Generation& text : generator.round(first)) finished(text);
  }
}

std::vector<Generation> generate(Engine& engine, const models::LanguageModel& model, Prompts prompts,
                                 const GenerationOptions& options) {
  std::vector<Generation> texts;
  generate(engine, model, prompts, options, [&](const Generation& text) { texts.push_back(text); });
  return texts;
}

}  // namespace tranche::models
