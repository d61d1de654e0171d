#pragma once
/// Generation: what a language model says behind prompts.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tranche/models/language_model.h"
#include "tranche/models/sampling.h"

namespace tranche::models {

struct GenerationOptions {
  std::int64_t tokens = 200;  ///< most new ones behind a prompt
  /// Tokens that are seen at once; 0: the model's positions. A text that is longer is seen by its last ones,
  /// at positions from 0 on: with each new token all of them move, so that keys and values kept for the old
  /// positions are of no use, and each token costs a pass over `context` tokens.
  std::int64_t context = 0;
  /// Prompts that a data rank works on at once. They bound the cache: so many rows of min(context, longest
  /// prompt
  /// + tokens) tokens (models::KeyValueCache::bytes).
  std::int64_t max_batch = 8;
  SamplingOptions sampling = {};
  std::int32_t end_token = -1;                ///< ends a text, and is no part of it; negative: none
  std::vector<std::int32_t> end_tokens = {};  ///< others that do
  std::int64_t writable = 0;  ///< only tokens below are drawn (a vocabulary may be padded); 0: all
  /// Without a cache all tokens are computed again for each new one. So they are, which the log says, for
  /// models that have none.
  bool cache = true;
  /// Called for each new token on the one rank that works on its prompt, as it comes; true ends the text
  /// behind it. Prompt 0 is rank 0's. On a mesh with a pipeline it is called on the first stage's rank,
  /// and with the axis `tensor` on the first of that axis.
  std::function<bool(std::int64_t prompt, std::int32_t token)> on_token = {};
};

/// The continuation of a prompt.
struct Generation {
  enum class End : std::uint8_t {
    length,     ///< options.tokens are written
    end_token,  ///< the model wrote it
    stopped     ///< options.on_token asked for it
  };
  std::int64_t prompt = 0;  ///< its index
  std::vector<std::int32_t> tokens = {};
  End end = End::length;
};

/// Collective over the engine's ranks, between steps; all give the same prompts and options, but for
/// on_token. Prompts of different lengths are worked on together. They are not cut: with n =
/// Mesh::token_ranks(), prompt i of a round of max_batch * n is worked on by token rank i % n, so that ranks
/// of the axis `context` take other prompts. With each round `finished` is called for its prompts in order,
/// on every rank. The tokens do not depend on the mesh, on max_batch and on what other prompts there are, on
/// a CPU not by a bit (cuBLASLt's sums depend on the size of a batch).
///
/// On a mesh with a pipeline the stages of a data rank compute a token one after the other. The last stage
/// draws it. Two broadcasts over the stages then tell all of them the tokens and which texts on_token has
/// ended, each of 4 bytes a text. The ranks of the axis `tensor` gather the logits of each token, draw the
/// same one, and the first of them tells the others which texts on_token has ended.
///
/// With sharded weights (stage 3) every rank gathers each unit once for every token of the longest text of a
/// round, whether or not it has a prompt itself. Memory of passes repeats from the third token of a round on.
///
/// Throws InvalidArgument on all ranks for prompts without tokens or with tokens that the vocabulary lacks,
/// for options out of range, and where ranks were given different ones; OutOfMemory for the cache;
/// NumericalError on all ranks where the logits of a prompt are not finite, which names the first weight that
/// is not, or says that all are. An error that one rank alone has is to be reported with Engine::fail().
void generate(Engine& engine, const models::LanguageModel& model,
              std::span<const std::vector<std::int32_t>> prompts, const GenerationOptions& options,
              const std::function<void(const Generation&)>& finished);

/// The same; all that was said, in the order of the prompts, on every rank.
std::vector<Generation> generate(Engine& engine, const models::LanguageModel& model,
                                 std::span<const std::vector<std::int32_t>> prompts,
                                 const GenerationOptions& options);

}  // namespace tranche::models
