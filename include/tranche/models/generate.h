#pragma once
/// Generation: a language model continues prompts.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tranche/models/language_model.h"
#include "tranche/models/sampling.h"

namespace tranche::models {

struct GenerationOptions {
  std::int64_t tokens = 200;  ///< the most new tokens for a prompt
  /// The number of tokens that the model sees at once; 0: its number of positions. Of a longer text it sees
  /// the last ones, at positions from 0. Each new token then shifts all positions, so cached keys and values
  /// are useless, and each token costs a pass over `context` tokens.
  std::int64_t context = 0;
  /// The number of prompts that a data rank computes at once. It determines the size of the cache: so many
  /// rows of min(context, longest prompt + tokens) tokens (models::KeyValueCache::bytes).
  std::int64_t max_batch = 8;
  SamplingOptions sampling = {};
  std::int32_t end_token = -1;                ///< ends a text and is not part of it; negative: none
  std::vector<std::int32_t> end_tokens = {};  ///< other tokens that end a text
  std::int64_t writable = 0;  ///< only tokens below this are drawn (a vocabulary may be padded); 0: all
  /// Without a cache all tokens are computed again for each new one. Models that do not support a cache do
  /// this too, which is logged.
  bool cache = true;
  /// Called for each new token, on the one rank that computes its prompt; returning true ends the text after
  /// this token. Rank 0 computes prompt 0. On a mesh with a pipeline it is called on the first stage's rank,
  /// and with the axis `tensor` on the first rank of that axis.
  std::function<bool(std::int64_t prompt, std::int32_t token)> on_token = {};
};

/// The continuation of a prompt.
struct Generation {
  enum class End : std::uint8_t {
    length,     ///< options.tokens were written
    end_token,  ///< the model wrote an end token
    stopped     ///< options.on_token returned true
  };
  std::int64_t prompt = 0;  ///< its index
  std::vector<std::int32_t> tokens = {};
  End end = End::length;
};

/// Collective over the engine's ranks, between steps; all pass the same prompts and options, except for
/// on_token. Prompts may have different lengths, and are not cut: with n = Mesh::token_ranks(), token rank i
/// % n computes prompt i of a round of max_batch * n, so ranks of the axis `context` compute different
/// prompts. After each round `finished` is called for its prompts in order, on every rank. The tokens do not
/// depend on the mesh, on max_batch or on other prompts; on a CPU this holds bit by bit (sums in cuBLASLt
/// depend on the batch size).
///
/// On a mesh with a pipeline the stages of a data rank compute a token one after another, and the last stage
/// draws it. Two broadcasts over the stages, each of 4 bytes a text, then distribute the tokens and the texts
/// that on_token has ended. The ranks of the axis `tensor` gather the logits of each token and draw the same
/// one; the first of them broadcasts which texts on_token has ended.
///
/// With sharded weights (stage 3) every rank gathers each unit once for every token of the longest text of a
/// round, even if it has no prompt. The memory of passes repeats from the third token of a round on.
///
/// Throws InvalidArgument on all ranks for empty prompts, tokens outside the vocabulary, options out of
/// range, and different arguments on different ranks; OutOfMemory for the cache; NumericalError on all ranks
/// if the logits of a prompt are not finite, naming the first weight that is not finite, or saying that all
/// weights are. Report an error that occurs on one rank alone with Engine::fail().
void generate(Engine& engine, const models::LanguageModel& model,
              std::span<const std::vector<std::int32_t>> prompts, const GenerationOptions& options,
              const std::function<void(const Generation&)>& finished);

/// The same, returning all texts in the order of the prompts, on every rank.
std::vector<Generation> generate(Engine& engine, const models::LanguageModel& model,
                                 std::span<const std::vector<std::int32_t>> prompts,
                                 const GenerationOptions& options);

}  // namespace tranche::models
