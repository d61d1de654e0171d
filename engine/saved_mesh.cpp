#include "engine/saved_mesh.h"

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "core/json.h"
#include "tranche/core/error.h"

namespace tranche::detail {

std::optional<Mesh> saved_mesh(std::string_view config_json) {
  const auto config = parse_json(config_json);
  if (!config.is_object()) return std::nullopt;
  const auto number = [&](const char* key) {
    const auto found = config.find(key);
    return found != config.end() && found->is_number_integer() ? found->get<std::int64_t>() : 0;
  };
  const std::int64_t of_rank =
      number("train_micro_batch_size_per_gpu") * number("gradient_accumulation_steps");
  const std::int64_t ranks = of_rank > 0 ? number("train_batch_size") / of_rank : 0;
  if (ranks < 1 || ranks > INT32_MAX) return std::nullopt;
  std::string text;
  if (const auto block = config.find("tranche"); block != config.end() && block->is_object()) {
    const auto found = block->find("mesh");
    if (found != block->end() && found->is_string()) text = found->get<std::string>();
  }
  try {
    return Mesh::parse(text, static_cast<int>(ranks));
  } catch (const ConfigurationError&) {
    return std::nullopt;
  }
}

}  // namespace tranche::detail
