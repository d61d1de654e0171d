#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "tranche/engine/engine.h"
#include "tranche/models/language_model.h"

namespace tranche::tools {

/// Collective. Continues `prompt` by `count` bytes drawn from the model at a temperature, with draws keyed by
/// `seed`: every rank returns the same. The model sees the last `context` bytes, the number on which it was
/// trained, because later positions have untrained embeddings.
std::string sample_text(Engine& engine, const models::LanguageModel& model, std::string_view prompt,
                        std::int64_t count, std::int64_t context, double temperature, std::uint64_t seed);

}  // namespace tranche::tools
