#include "golden.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/safetensors.h"
#include "offload/file_system.h"
#include "training_fixture.h"
#include "tranche/core/error.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/models/llama.h"

namespace tranche::models {

namespace {

using Floats = std::vector<float>;

Floats values_of(const checkpoint::SafetensorsFolder& file, const checkpoint::SafeTensor& tensor) {
  Floats values(static_cast<std::size_t>(tensor.elements));
  file.read(tensor, {0, tensor.elements}, DataType::float32, values.data());
  return values;
}

/// The vectors in golden.safetensors.
class Golden {
 public:
  explicit Golden(const std::string& path) : file_(detail::posix_file_system(), path), path_(path) {}
  const checkpoint::SafeTensor& tensor(const std::string& name) const {
    const checkpoint::SafeTensor* found = file_.find(name);
    if (found == nullptr) throw CheckpointError(path_ + " has no tensor " + name);
    return *found;
  }
  Floats operator[](const std::string& name) const { return values_of(file_, tensor(name)); }

 private:
  checkpoint::SafetensorsFolder file_;
  std::string path_;
};

/// The batches of all steps: tokens and targets [steps, batch, time], as floats.
struct GoldenBatches {
  std::int64_t steps, batch, time;
  std::vector<std::int32_t> tokens, targets;
  std::vector<std::int64_t> samples;
  explicit GoldenBatches(const Golden& golden) {
    const auto& shape = golden.tensor("tokens").shape;
    steps = shape.at(0), batch = shape.at(1), time = shape.at(2);
    const Floats read_tokens = golden["tokens"], read_targets = golden["targets"];
    tokens.assign(read_tokens.begin(), read_tokens.end());
    targets.assign(read_targets.begin(), read_targets.end());
    for (std::int64_t i = 0; i < batch; ++i) samples.push_back(i);
  }
  /// The batches with sequences padded to a multiple of `multiple` tokens; targets of the padding are
  /// ignored.
  GoldenBatches padded(std::int64_t multiple) const {
    GoldenBatches made = *this;
    made.time = (time + multiple - 1) / multiple * multiple;
    made.tokens.clear(), made.targets.clear();
    for (std::int64_t row = 0; row < steps * batch; ++row) {
      for (std::int64_t t = 0; t < made.time; ++t) {
        const auto at = static_cast<std::size_t>(row * time + t);
        made.tokens.push_back(t < time ? tokens[at] : 0);
        made.targets.push_back(t < time ? targets[at] : -100);
      }
    }
    return made;
  }
  TokenBatch of(std::int64_t step) const {
    const Shape shape{batch, time};
    const std::int64_t first = step * batch * time;
    return {{tokens.data() + first, DataType::int32, shape},
            {targets.data() + first, DataType::int32, shape},
            samples};
  }
};

double relative(const Floats& found, const Floats& wanted) {
  return relative_distance({found.begin(), found.end()}, {wanted.begin(), wanted.end()});
}

/// The adapters in a folder, if it has any (scripts/compare_peft.py).
LoraConfig adapters_in(const std::string& folder) {
  std::ifstream file(folder + "/adapter_config.json");
  if (!file) return {};
  const auto json = nlohmann::json::parse(file);
  LoraConfig lora{.rank = json.at("r"), .alpha = json.at("lora_alpha"), .rank_scaled = json.at("use_rslora")};
  lora.targets = json.at("target_modules").get<std::vector<std::string>>();
  return lora;
}

void load_adapters(Engine& engine, const std::string& path) {
  const checkpoint::SafetensorsFolder adapters(detail::posix_file_system(), path);
  const std::string prefix = "base_model.model.";
  for (const checkpoint::SafeTensor& tensor : adapters.tensors()) {
    engine.write_weight(tensor.name.substr(prefix.size()), values_of(adapters, tensor));
  }
}

void load_weights(Engine& engine, const std::string& path) {
  const checkpoint::SafetensorsFolder weights(detail::posix_file_system(), path);
  std::size_t used = 0;
  for (const auto& unit : engine.model().units()) {
    for (const auto& tensor : unit.tensors) {
      if (!engine.frozen(tensor.name) && engine.config().lora.any()) continue;
      const checkpoint::SafeTensor* found = weights.find(tensor.name);
      if (found == nullptr || !(Shape(found->shape) == tensor.shape)) {
        throw CheckpointError(path + " has no " + tensor.name + tensor.shape.to_string());
      }
      engine.write_weight(tensor.name, values_of(weights, *found));
      ++used;
    }
  }
  if (used != weights.tensors().size()) throw CheckpointError(path + " has tensors that the model lacks");
}

/// Compares every logit of the first batch: a token's row follows the tokens up to it. With a cache of one
/// row the first half of a sequence is the prompt.
double logits_difference(const Llama& model, Engine& engine, const GoldenBatches& batches,
                         const Floats& wanted, KeyValueCache* cache) {
  double largest = 0, difference = 0;
  std::size_t at = 0;
  for (std::int64_t sequence = 0; sequence < batches.batch; ++sequence) {
    for (std::int64_t t = 1; t <= batches.time; ++t) {
      const std::span<const std::int32_t> tokens(batches.tokens.data() + sequence * batches.time,
                                                 static_cast<std::size_t>(t));
      const Floats logits = cache == nullptr        ? model.next_token_logits(engine, tokens)
                            : t <= batches.time / 2 ? model.prefill(engine, *cache, 0, tokens)
                                                    : model.decode(engine, *cache, tokens.last(1));
      for (const float logit : logits) {
        const float theirs = wanted.at(at++);
        largest = std::max<double>(largest, std::abs(theirs));
        difference = std::max<double>(difference, std::abs(logit - theirs));
      }
    }
  }
  return difference / largest;
}

/// The number of greedily generated tokens, after the first tokens of the first sequence, that differ from
/// `wanted`.
int generation_differences(const Llama& model, Engine& engine, const Floats& wanted) {
  constexpr std::size_t prompt = 8;
  std::vector<std::int32_t> tokens(wanted.begin(), wanted.begin() + prompt);
  KeyValueCache cache(engine, model, 1, static_cast<std::int64_t>(wanted.size()));
  int different = 0;
  Floats logits = model.prefill(engine, cache, 0, tokens);
  for (; tokens.size() < wanted.size(); logits = model.decode(engine, cache, std::span(tokens).last(1))) {
    const auto next = std::max_element(logits.begin(), logits.end()) - logits.begin();
    different += next != static_cast<std::ptrdiff_t>(wanted[tokens.size()]);
    tokens.push_back(static_cast<std::int32_t>(next));
  }
  return different;
}

}  // namespace

GoldenDifferences compare_with_golden(const std::string& folder, const std::string& mesh, int ranks) {
  const checkpoint::SafetensorsFolder weights(detail::posix_file_system(), folder + "/model.safetensors");
  const Llama model(LlamaConfig::from_json(weights.config(), folder + "/config.json"));
  const Golden golden(folder + "/golden.safetensors");
  const GoldenBatches batches(golden);
  GoldenDifferences result{.worst_gradient = {}, .config = model.to_json()};

  Config config = plain_config(batches.batch);
  config.optimizer.learning_rate = 1e-3;
  config.optimizer.parameters["weight_decay"] = 0.1;
  config.lora = adapters_in(folder);
  config.mesh = mesh;
  const int context = ranks > 1 ? Mesh::parse(mesh, ranks).size(MeshAxis::context) : 1;
  const GoldenBatches padded = batches.padded(2 * context);
  on_ranks(ranks, model.spec(context > 1 ? padded.time : batches.time), config, [&](Engine& engine) {
    const bool root = engine.runtime().rank() == 0;  // every rank has the same numbers
    load_weights(engine, folder + "/model.safetensors");
    if (config.lora.any()) load_adapters(engine, folder + "/adapter_model.safetensors");
    if (engine.runtime().pipeline() == nullptr) {
      const double logits = logits_difference(model, engine, batches, golden["logits"], nullptr);
      KeyValueCache cache(engine, model, 1, batches.time);
      const double cached = logits_difference(model, engine, batches, golden["logits"], &cache);
      const int generated = generation_differences(model, engine, golden["generated"]);
      if (root) result.logits = logits, result.cached = cached, result.generated = generated;
    }
    const Floats losses = golden["losses"];
    for (std::int64_t step = 0; step < batches.steps; ++step) {
      train_step(model, engine,
                 [&](std::int64_t) { return context > 1 ? padded.of(step) : batches.of(step); });
      for (const auto& unit : engine.model().units()) {
        for (const auto& tensor : unit.tensors) {
          if (step > 0 || engine.frozen(tensor.name)) continue;
          const double difference =
              relative(engine.read_gradient(tensor.name), golden["gradient." + tensor.name]);
          if (root && tensor.name == "model.embed_tokens.weight") result.table = difference;
          if (!root || difference < result.gradients) continue;
          result.gradients = difference;
          result.worst_gradient = tensor.name;
        }
      }
      const double loss = engine.step().loss, theirs = losses.at(static_cast<std::size_t>(step));
      if (!root) continue;
      result.training = std::max(result.training, std::abs(loss - theirs) / theirs);
      if (step == 0) result.loss = std::abs(loss - golden["loss"].at(0)) / theirs;
    }
  });
  return result;
}

}  // namespace tranche::models
