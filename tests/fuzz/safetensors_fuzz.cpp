// safetensors files, their index, and a Hugging Face folder as a GPT.

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/safetensors.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/memory_files.h"
#include "tools/checkpoint/hugging_face.h"
#include "tranche/models/gpt_config.h"

namespace tranche::fuzz {

namespace {

using nlohmann::ordered_json;

constexpr std::int64_t most_elements_read = 64, most_data = 1 << 24;

/// A header, preceded by its length, and the data after it.
std::string safetensors_file(std::string_view header, std::string_view data = {}) {
  std::string text;
  for (int byte = 0; byte < 8; ++byte) text += static_cast<char>(header.size() >> (8 * byte) & 255);
  return text.append(header).append(data);
}

std::string header_of(const std::vector<std::pair<std::string, std::vector<std::int64_t>>>& tensors,
                      const std::string& dtype = "F32") {
  ordered_json header = ordered_json::object();
  header["__metadata__"] = {{"format", "pt"}};
  std::int64_t at = 0;
  for (const auto& [name, shape] : tensors) {
    std::int64_t bytes = dtype == "F32" ? 4 : 2;
    for (const std::int64_t extent : shape) bytes *= extent;
    header[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {at, at + bytes}}};
    at += bytes;
  }
  return header.dump();
}

/// The bytes of data that a header claims, if it can be read and the number is not too large.
std::int64_t claimed(std::string_view header) {
  std::int64_t most = 0;
  const auto json = nlohmann::json::parse(header, nullptr, false);
  if (!json.is_object()) return 0;
  for (const auto& [name, tensor] : json.items()) {
    if (!tensor.is_object() || !tensor.contains("data_offsets") || !tensor["data_offsets"].is_array())
      continue;
    for (const auto& offset : tensor["data_offsets"]) {
      if (offset.is_number_unsigned()) {
        most = std::max(most, static_cast<std::int64_t>(std::min(offset.get<std::uint64_t>(),
                                                                 static_cast<std::uint64_t>(most_data))));
      }
    }
  }
  return most;
}

void read_tensors(const checkpoint::SafetensorsFolder& folder) {
  std::vector<float> values(most_elements_read);
  for (const checkpoint::SafeTensor& tensor : folder.tensors()) {
    require(folder.find(tensor.name) == &tensor, "a tensor is not found by its name");
    if (tensor.dtype != "F32" && tensor.dtype != "BF16" && tensor.dtype != "F16") continue;
    const std::int64_t part = std::min(tensor.elements, most_elements_read);
    folder.read(tensor, {0, part}, DataType::float32, values.data());
    folder.read(tensor, {tensor.elements - part, tensor.elements}, DataType::bfloat16, values.data());
  }
  (void)folder.config();
}

/// The input is a header and data, whose length is inserted here; or, if it has one part, the bytes of a
/// file.
void read_safetensors(std::string_view input) {
  MemoryFiles files;
  const auto parts = split(input, 2);
  files.add("a.safetensors",
            parts[0].size() == input.size() ? std::string(input) : safetensors_file(parts[0], parts[1]));
  read_tensors(checkpoint::SafetensorsFolder(files, "a.safetensors"));
}

std::vector<std::string> safetensors_seeds() {
  const std::string header = header_of({{"a", {2, 3}}, {"b", {}}, {"c", {0}}}), data(28, '\1');
  const std::string half = header_of({{"wte.weight", {3}}, {"h.0.attn.bias", {1, 1}}}, "BF16");
  return {join({header, data}), safetensors_file(header, data), join({half, std::string(8, '\2')})};
}

/// The input is an index; the two files beside it are valid.
void read_index(std::string_view input) {
  MemoryFiles files;
  files.add("hf/model.safetensors.index.json", input);
  files.add("hf/one.safetensors",
            safetensors_file(header_of({{"a", {2}}, {"b", {1}}}), std::string(12, '\1')));
  files.add("hf/two.safetensors", safetensors_file(header_of({{"c", {2}}}, "F16"), std::string(4, '\1')));
  read_tensors(checkpoint::SafetensorsFolder(files, "hf"));
}

std::vector<std::string> index_seeds() {
  return {
      R"({"metadata": {"total_size": 16}, "weight_map": {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}})",
      R"({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}})"};
}

/// The input is config.json and a header; the header is followed by as many zeros as it claims.
void read_hugging_face(std::string_view input) {
  MemoryFiles files;
  const auto parts = split(input, 2);
  const std::string file = safetensors_file(parts[1]);
  files.add("hf/config.json", parts[0]);
  files.add("hf/model.safetensors",
            {static_cast<std::int64_t>(file.size()) + claimed(parts[1]), {{0, file}}});
  const tools::HuggingFaceModel model(files, "hf", "", models::ModelRegistry::with_builtin());
  (void)model.dtype();
  std::vector<float> values(most_elements_read);
  for (const char* name :
       {"transformer.wte.weight", "transformer.h.0.ln_1.weight", "transformer.ln_f.bias"}) {
    model.read(name, {0, 1}, DataType::float32, values.data());
  }
}

std::vector<std::string> hugging_face_seeds() {
  models::GptConfig model;
  model.layers = model.heads = 1;
  model.width = 4;
  model.vocabulary = 7;
  model.positions = 8;
  std::vector<std::pair<std::string, std::vector<std::int64_t>>> tensors{{"wte.weight", {7, 4}},
                                                                         {"wpe.weight", {8, 4}}};
  for (const std::string norm : {"h.0.ln_1.", "h.0.ln_2.", "ln_f."}) {
    tensors.push_back({norm + "weight", {4}});
    tensors.push_back({norm + "bias", {4}});
  }
  tensors.push_back({"h.0.attn.c_attn.weight", {4, 12}});
  tensors.push_back({"h.0.attn.c_attn.bias", {12}});
  tensors.push_back({"h.0.attn.c_proj.weight", {4, 4}});
  tensors.push_back({"h.0.attn.c_proj.bias", {4}});
  tensors.push_back({"h.0.mlp.c_fc.weight", {4, 16}});
  tensors.push_back({"h.0.mlp.c_fc.bias", {16}});
  tensors.push_back({"h.0.mlp.c_proj.weight", {16, 4}});
  tensors.push_back({"h.0.mlp.c_proj.bias", {4}});
  const std::string bare = header_of(tensors);
  for (auto& [name, shape] : tensors) name = "transformer." + name;
  tensors.push_back({"lm_head.weight", {7, 4}});
  tensors.push_back({"h.0.attn.bias", {1, 1, 8, 8}});
  return {join({model.to_json(), bare}), join({model.to_json(), header_of(tensors, "BF16")})};
}

}  // namespace

Target safetensors_target() {
  return {"safetensors", read_safetensors, safetensors_seeds, {ExitStatus::checkpoint}};
}
Target index_target() {
  return {"index", read_index, index_seeds, {ExitStatus::checkpoint}};
}
Target hugging_face_target() {
  return {"hugging_face",
          read_hugging_face,
          hugging_face_seeds,
          {ExitStatus::checkpoint, ExitStatus::configuration}};
}

}  // namespace tranche::fuzz
