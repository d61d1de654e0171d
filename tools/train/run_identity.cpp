#include "tools/train/run_identity.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "core/json.h"
#include "core/json_node.h"
#include "tranche/core/error.h"

namespace tranche::tools {

using detail::JsonNode;
using Json = nlohmann::ordered_json;

namespace {

constexpr std::string_view program_name = "tranche";

Json tokenizer_json(const Tokenizer& tokenizer) {
  if (tokenizer.kind == Tokenizer::Kind::bytes) return {{"kind", "bytes"}};
  return {{"kind", "tokens"}, {"vocabulary", tokenizer.vocabulary}};
}

Tokenizer tokenizer_from(const JsonNode& node) {
  if (node["kind"].choice({"bytes", "tokens"}) == "bytes") return {};
  return {Tokenizer::Kind::tokens, node["vocabulary"].integer(1)};
}

}  // namespace

std::string describe(const Tokenizer& tokenizer) {
  if (tokenizer.kind == Tokenizer::Kind::bytes) return "bytes";
  return fmt::format("tokens below {}", tokenizer.vocabulary);
}

std::string RunIdentity::to_json() const {
  Json json{{"program", program_name},
            {"model", Json::parse(model->to_json())},
            {"sequence", sequence},
            {"tokenizer", tokenizer_json(tokenizer)},
            {"data", data}};
  if (training_windows > 0) {
    json["windows"] = {{"training", training_windows}, {"held_out", held_out_windows}};
  }
  if (!data_digest.empty()) json["digests"]["data"] = data_digest;
  if (!validation_digest.empty()) json["digests"]["validation_data"] = validation_digest;
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);  // a path may hold any bytes
}

bool RunIdentity::wrote(std::string_view text) {
  const Json json = detail::parse_json(text);
  return json.contains("program") && json["program"] == program_name;
}

RunIdentity RunIdentity::from_json(std::string_view text, std::string_view origin,
                                   const models::ModelRegistry& models) {
  const JsonNode root = JsonNode::read<CheckpointError>(text, origin, "user");
  if (!wrote(text)) {
    throw CheckpointError(fmt::format(
        "{}: its 'user' does not say which model it is of: tranche train did not write it", origin));
  }
  RunIdentity identity;
  const std::string model = root["model"].object();
  try {
    identity.model = models.from_json(model, fmt::format("{}: user.model", origin));
  } catch (const ConfigurationError& problem) {
    throw CheckpointError(problem.message());
  }
  identity.sequence = root["sequence"].integer(1, identity.model->shape().positions);
  identity.tokenizer = tokenizer_from(root["tokenizer"]);
  identity.data = root["data"].text();
  if (root["windows"]) {
    identity.training_windows = root["windows"]["training"].integer(1);
    identity.held_out_windows = root["windows"]["held_out"].integer(0);
  }
  if (const JsonNode digests = root["digests"]) {
    identity.data_digest = digests["data"].text();
    if (digests["validation_data"]) identity.validation_digest = digests["validation_data"].text();
  }
  return identity;
}

}  // namespace tranche::tools
