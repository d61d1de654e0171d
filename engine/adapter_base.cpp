#include "engine/adapter_base.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "checkpoint/digest.h"
#include "core/json.h"
#include "kernels/digest_mix.h"
#include "tranche/core/dtype.h"
#include "tranche/core/error.h"
#include "tranche/core/random.h"

namespace tranche::detail {

namespace {

constexpr std::int64_t piece = std::int64_t{1} << 18;  // the most elements of one Initializer::fill call

float rounded(float value, DataType dtype) {
  if (dtype == DataType::bfloat16) return to_float(to_bfloat16(value));
  if (dtype == DataType::float16) return to_float(to_float16(value));
  return value;
}

}  // namespace

std::string to_text(const kernels::Digest& digest) {
  return checkpoint::to_hex(digest.lanes[0]) + checkpoint::to_hex(digest.lanes[1]);
}

std::uint64_t seed_of_base(const checkpoint::Manifest& adapters, const std::string& origin) {
  if (adapters.base && adapters.base->seed) return static_cast<std::uint64_t>(*adapters.base->seed);
  const auto random = parse_json(adapters.run.random);
  if (random.is_object() && random.contains("seed") && random["seed"].is_number_integer())
    return random["seed"].get<std::uint64_t>();
  throw CheckpointError(
      origin + ": its adapters belong to a base that was drawn, and it does not say from which seed");
}

AdapterBase::AdapterBase(const ModelSpec& model, checkpoint::Reader& from) : AdapterBase(model, 0) {
  from_ = &from;
}

AdapterBase::AdapterBase(const ModelSpec& model, std::uint64_t seed) : seed_(seed) {
  for (const UnitSpec& unit : model.units()) {
    const std::size_t own = unit.tensors.size() - 2 * unit.adapters.size();  // adapters follow these
    for (const TensorSpec& tensor : std::span(unit.tensors).first(own)) {
      indices_.emplace(tensor.name, tensors_.size());
      tensors_.push_back(&tensor);
    }
  }
}

void AdapterBase::draw(std::uint64_t index, ElementRange elements, float* values) const {
  const RandomKey key{seed_, RandomPurpose::initialization, index};
  const Initializer& how = tensors_[index]->initializer;
  const auto each = [&](auto value) {
    for (std::int64_t e = elements.begin; e < elements.end; ++e)
      values[e - elements.begin] = value(static_cast<std::uint64_t>(e));
  };
  switch (how.kind) {
    case Initializer::Kind::constant:
      return each([&](std::uint64_t) { return how.a; });
    case Initializer::Kind::normal:
      return each([&](std::uint64_t e) { return how.a + how.b * random_normal(key, e); });
    case Initializer::Kind::uniform:
      return each([&](std::uint64_t e) { return how.a + (how.b - how.a) * random_uniform(key, e); });
    case Initializer::Kind::custom:
      return how.fill(elements.begin, {values, static_cast<std::size_t>(elements.size())});
  }
}

void AdapterBase::read(const std::string& tensor, ElementRange elements, float* values) const {
  if (from_ != nullptr) return from_->read_tensor(tensor, "weight", elements, DataType::float32, values);
  const std::uint64_t index = indices_.at(tensor);
  for (std::int64_t at = elements.begin; at < elements.end; at += piece) {
    const ElementRange some{at, std::min(at + piece, elements.end)};
    draw(index, some, values + (at - elements.begin));
  }
}

kernels::Digest AdapterBase::digest(DataType dtype, int part, int parts) const {
  kernels::Digest sum;
  std::vector<float> values;
  std::int64_t number = 0;
  for (std::uint64_t index = 0; index < tensors_.size(); ++index) {
    const kernels::Digest origin = kernels::digest_origin(index);
    const std::int64_t elements = tensors_[index]->shape.elements();
    for (std::int64_t at = 0; at < elements; at += piece) {
      if (number++ % parts != part) continue;
      const ElementRange some{at, std::min(at + piece, elements)};
      values.resize(static_cast<std::size_t>(some.size()));
      read(tensors_[index]->name, some, values.data());
      for (std::int64_t e = some.begin; e < some.end; ++e) {
        sum += kernels::digest_of(origin, static_cast<std::uint64_t>(e),
                                  rounded(values[static_cast<std::size_t>(e - some.begin)], dtype));
      }
    }
  }
  return sum;
}

}  // namespace tranche::detail
