#include "tools/checkpoint/adapters.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/convert.h"
#include "core/json.h"
#include "tools/checkpoint/checkpoint_source.h"
#include "tranche/config/config.h"
#include "tranche/core/dtype.h"
#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

std::vector<NamedShape> shapes_of(const checkpoint::Reader& reader) {
  std::vector<NamedShape> found;
  for (const checkpoint::StoredTensor& tensor : reader.tensors())
    found.push_back({tensor.name, tensor.shape});
  return found;
}

}  // namespace

std::string adapters_text(std::string_view config) {
  const auto json = detail::parse_json(config);
  if (!json.is_object() || !json.contains("tranche") || !json["tranche"].contains("lora")) return {};
  return json["tranche"]["lora"].dump();
}

LoraConfig adapters_from_text(const std::string& text) {
  if (text.empty()) return {};
  return parse_config(R"({"tranche": {"lora": )" + text + "}}", 1, {}, true, "tranche.lora").lora;
}

LoraConfig adapters_of(const checkpoint::Manifest& manifest) {
  return adapters_from_text(adapters_text(manifest.run.config));
}

std::string describe(const LoraConfig& lora) {
  return fmt::format(
      "rank {}, alpha {}{}{} on {}", lora.rank, lora.effective_alpha(), lora.rank_scaled ? " (rsLoRA)" : "",
      lora.dropout > 0 ? fmt::format(", dropout {}", lora.dropout) : "", fmt::join(lora.targets, ", "));
}

void require_same_adapters(const LoraConfig& saved, const LoraConfig& present, std::string_view checkpoint) {
  LoraConfig same = saved;  // dropout and the saved tensors may change
  same.dropout = present.dropout;
  same.save_base = present.save_base;
  same.alpha = saved.effective_alpha();
  LoraConfig wanted = present;
  wanted.alpha = present.effective_alpha();
  if (same == wanted) return;
  throw ConfigurationError(
      fmt::format("{} holds adapters of {}, tranche.lora asks for {}: leave tranche.lora out to take them as "
                  "they are, or "
                  "export the checkpoint merged and import that to begin others",
                  checkpoint, describe(saved), describe(present)));
}

ModelSpec spec_with_adapters(const models::LanguageModel& model, const checkpoint::Manifest& manifest) {
  const ModelSpec whole = with_adapters(model.spec(model.shape().positions), adapters_of(manifest));
  if (!manifest.base) return whole;
  ModelSpec spec;
  for (UnitSpec unit : whole.units()) {
    std::erase_if(unit.tensors, [](const TensorSpec& tensor) { return tensor.frozen; });
    if (!unit.tensors.empty()) spec.add_unit(std::move(unit));
  }
  return spec;
}

void require_adapters(const models::LanguageModel& model, std::string_view model_origin,
                      const checkpoint::Reader& reader) {
  require_tensors(spec_with_adapters(model, reader.manifest()), model_origin, shapes_of(reader),
                  reader.folder());
}

OpenedBase::OpenedBase(checkpoint::Storage storage, const checkpoint::Reader& adapters,
                       const models::LanguageModel& model, const std::string& base,
                       std::vector<std::string>& notes)
    : spec_(model.spec(model.shape().positions)) {
  const checkpoint::BaseRecord& record = *adapters.manifest().base;
  const std::string& path = base.empty() ? record.folder : base;
  std::string name = "that was drawn";
  if (path.empty()) {
    values_.emplace(spec_, detail::seed_of_base(adapters.manifest(), adapters.folder()));
  } else {
    try {
      reader_ = std::make_unique<checkpoint::Reader>(storage, find_checkpoint(storage.files, path, notes));
      if (reader_->manifest().base)
        throw CheckpointError(reader_->folder() + " holds adapters alone; export it merged");
      require_tensors(model, "the adapters", shapes_of(*reader_), reader_->folder());
    } catch (const CheckpointError& problem) {
      throw CheckpointError(fmt::format("the base of the adapters in {}: {}{}", adapters.folder(),
                                        problem.message(),
                                        base.empty() ? "; where it lies elsewhere now, give --base" : ""));
    }
    name = reader_->folder();
    values_.emplace(spec_, *reader_);
  }
  if (record.digest.empty() || record.dtype.empty()) {
    notes.push_back(
        fmt::format("{} does not say which values the base of its adapters had: they were not compared",
                    adapters.folder()));
    return;
  }
  const std::string found = detail::to_text(values_->digest(parse_data_type(record.dtype)));
  if (found == record.digest) return;
  throw CheckpointError(
      fmt::format("{} holds adapters that were trained beside another base: its digest in {} was {} ({}), "
                  "the base {} has "
                  "{}; give the base that it belongs to (--base)",
                  adapters.folder(), record.dtype, record.digest,
                  record.folder.empty() ? "drawn, not loaded" : record.folder, name, found));
}

MergedWeights::MergedWeights(checkpoint::Storage storage, checkpoint::Reader& adapters,
                             const models::LanguageModel& model, const std::string& base,
                             std::vector<std::string>& notes)
    : adapters_(adapters) {
  const checkpoint::Manifest& manifest = adapters.manifest();
  if (manifest.base) base_.emplace(storage, adapters, model, base, notes);
  spec_ = with_adapters(model.spec(model.shape().positions), adapters_of(manifest));
  for (const UnitSpec& unit : spec_.units()) {
    for (const LowRankAdapter& from : unit.adapters) {
      const TensorSpec& weight = unit.tensors[static_cast<std::size_t>(from.weight)];
      const TensorSpec &a = unit.tensors[static_cast<std::size_t>(from.a)],
                       &b = unit.tensors[static_cast<std::size_t>(from.b)];
      Adapter adapter;
      adapter.name = weight.aliases.empty() ? weight.name : weight.aliases.front();
      unties_head_ = unties_head_ || !weight.aliases.empty();
      adapter.in_out = weight.linear == LinearLayout::in_out;
      adapter.rank = a.shape[0];
      adapter.in = a.shape[1];
      adapter.out = b.shape[0];
      adapter.scale = from.scale;
      const auto read = [&](const TensorSpec& tensor) {
        std::vector<float> values(static_cast<std::size_t>(tensor.shape.elements()));
        adapters.read_tensor(tensor.name, "weight", {0, tensor.shape.elements()}, DataType::float32,
                             values.data());
        return values;
      };
      adapter.a = read(a);
      adapter.b = read(b);
      merged_.emplace_back(weight.name, std::move(adapter));
    }
  }
}

void MergedWeights::add(const Adapter& adapter, detail::ElementRange elements, float* values) const {
  const std::int64_t columns = adapter.in_out ? adapter.out : adapter.in;
  for (std::int64_t e = elements.begin; e < elements.end; ++e) {
    const std::int64_t row = e / columns, column = e % columns;
    const std::int64_t o = adapter.in_out ? column : row, i = adapter.in_out ? row : column;
    double sum = 0;
    for (std::int64_t r = 0; r < adapter.rank; ++r) {
      sum += static_cast<double>(adapter.b[static_cast<std::size_t>(o * adapter.rank + r)]) *
             static_cast<double>(adapter.a[static_cast<std::size_t>(r * adapter.in + i)]);
    }
    float& value = values[e - elements.begin];
    value = static_cast<float>(static_cast<double>(value) + adapter.scale * sum);
  }
}

void MergedWeights::read_base(const std::string& tensor, detail::ElementRange elements, float* values) const {
  if (base_) return base_->read(tensor, elements, values);
  adapters_.read_tensor(tensor, "weight", elements, DataType::float32, values);
}

std::vector<checkpoint::ExportTensor> MergedWeights::tensors() {
  std::vector<checkpoint::ExportTensor> tensors;
  const auto write = [](const std::vector<float>& values, DataType dtype, void* memory) {
    checkpoint::convert(DataType::float32, values.data(), dtype, memory,
                        static_cast<std::int64_t>(values.size()));
  };
  const auto plain = [this, write](const TensorSpec& tensor) {
    return checkpoint::ExportTensor{
        tensor.name, tensor.shape,
        [this, write, name = tensor.name](detail::ElementRange elements, DataType dtype, void* memory) {
          std::vector<float> values(static_cast<std::size_t>(elements.size()));
          read_base(name, elements, values.data());
          write(values, dtype, memory);
        }};
  };
  for (const UnitSpec& unit : spec_.units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      if (!tensor.frozen) continue;  // belongs to an adapter
      const auto merged = std::find_if(merged_.begin(), merged_.end(),
                                       [&](const auto& one) { return one.first == tensor.name; });
      // The embedding keeps its values if the head that is tied to it has an adapter.
      if (merged == merged_.end() || merged->second.name != tensor.name) tensors.push_back(plain(tensor));
      if (merged == merged_.end()) continue;
      const Adapter& adapter = merged->second;
      tensors.push_back({adapter.name, tensor.shape,
                         [this, write, &adapter, name = tensor.name](detail::ElementRange elements,
                                                                     DataType dtype, void* memory) {
                           std::vector<float> values(static_cast<std::size_t>(elements.size()));
                           read_base(name, elements, values.data());
                           add(adapter, elements, values.data());
                           write(values, dtype, memory);
                         }});
    }
  }
  return tensors;
}

}  // namespace tranche::tools
