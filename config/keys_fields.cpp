// Reads, writes and checks the fields of a Config according to the table's rows.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "config/keys.h"

namespace tranche::detail {
namespace {

template <typename... Visitors>
struct Overloaded : Visitors... {
  using Visitors::operator()...;
};
template <typename... Visitors>
Overloaded(Visitors...) -> Overloaded<Visitors...>;

/// A field for reading; the table's rows return fields of a mutable Config.
FieldPointer field_in(const ConfigKey& key, const Config& config) {
  return key.field(const_cast<Config&>(config));
}

template <typename T>
bool is_within(T value, const FieldRange& range) {
  const auto number = static_cast<double>(value);
  if (range.or_zero && number == 0) return true;
  return number >= range.least && number <= range.most &&
         (range.multiple_of == 0 || std::fmod(number, range.multiple_of) == 0);
}

bool is_one_of(std::string_view text, std::string_view choices) {
  while (!choices.empty()) {
    const std::size_t comma = choices.find(", ");
    if (text == choices.substr(0, comma)) return true;
    choices = comma == std::string_view::npos ? std::string_view() : choices.substr(comma + 2);
  }
  return false;
}

}  // namespace

Json empty_block(const Config&) {
  return Json::object();
}

void read_field(const ConfigKey& key, const Values& values, Config& config, Problems& problems) {
  if (!key.other.empty() && values.has(key.path) && values.has(key.other)) {
    return problems.add(fmt::format("{} and {} are two names of one key; write one", key.path, key.other));
  }
  const std::string_view path = key.other.empty() || values.has(key.path) ? key.path : key.other;
  if (!values.has(path)) return;
  const auto not_one_of = [&](std::string_view text, std::string_view choices) {
    problems.add(fmt::format("{}: '{}' is not one of {}", path, text, choices));
  };
  const auto integer = [&] {
    return (key.kind == ValueKind::size ? values.size(path) : values.integer(path)).value_or(0);
  };
  std::visit(
      Overloaded{[&](bool* field) { *field = values.boolean(path).value_or(false); },
                 [&](int* field) { *field = small_integer(values, path, *field, problems); },
                 [&](std::int64_t* field) {
                   const std::int64_t value = integer();
                   if (value != 0 || !key.zero_is_default) {
                     *field = value;
                   } else {
                     config.notes.push_back(fmt::format("{}: 0 is taken as {}, the default", path, *field));
                   }
                 },
                 [&](std::uint64_t* field) {
                   if (integer() < 0) problems.add(fmt::format("{}: {} is negative", path, integer()));
                   *field = static_cast<std::uint64_t>(integer());
                 },
                 [&](double* field) {
                   *field = key.kind == ValueKind::size ? static_cast<double>(integer())
                                                        : values.number(path).value_or(0);
                 },
                 [&](std::string* field) { *field = values.text(path).value_or(""); },
                 [&](std::vector<std::string>* field) {
                   if (std::vector<std::string> texts = values.texts(path); !texts.empty())
                     *field = std::move(texts);
                 },
                 [&](DataType* field) {
                   const std::string text = values.text(path).value_or("");
                   const std::string_view choices = key.choices.empty() ? "fp32, bf16, fp16" : key.choices;
                   const auto dtype = data_type_from(lower(text));
                   if (dtype) {
                     *field = *dtype;
                   } else if (is_one_of(name_of(DataType::block8), choices) &&
                              lower(text) == name_of(DataType::block8)) {
                     *field = DataType::block8;
                   } else {
                     not_one_of(text, choices);
                   }
                 },
                 [](void*) {},
                 [&](NamedField field) {
                   const std::string given = values.text(path).value_or("");
                   const std::string text = key.any_case ? lower(given) : given;
                   const auto found = std::find(field.names.begin(), field.names.end(), text);
                   if (found == field.names.end())
                     return not_one_of(text, fmt::format("{}", fmt::join(field.names, ", ")));
                   *field.value = static_cast<unsigned char>(found - field.names.begin());
                 }},
      key.field(config));
}

Json value_of(const ConfigKey& key, const Config& config) {
  if (key.value != nullptr) return key.value(config);
  return std::visit(Overloaded{[](void*) { return Json(); },
                               [&](NamedField field) { return Json(field.names[*field.value]); },
                               [&](const DataType* field) { return Json(name_of(*field)); },
                               [&](const double* field) {
                                 return key.kind == ValueKind::size ? Json(static_cast<std::int64_t>(*field))
                                                                    : Json(*field);
                               },
                               [&](const std::int64_t* field) {
                                 return key.zero_is_null && *field == 0 ? Json(nullptr) : Json(*field);
                               },
                               [&](const auto* field) { return Json(*field); }},
                    field_in(key, config));
}

void write_field(const ConfigKey& key, const Config& config, Json& document) {
  static const Config defaults;
  const bool has_value =
      key.value != nullptr || (key.field != nullptr && !std::holds_alternative<void*>(field_in(key, config)));
  if (!has_value || (key.written != nullptr && !key.written(config))) return;
  Json value = value_of(key, config);
  if (key.unless_default && value == value_of(key, defaults)) return;
  std::string pointer = "/" + std::string(key.path);
  std::replace(pointer.begin(), pointer.end(), '.', '/');
  document[Json::json_pointer(pointer)] = std::move(value);
}

void check_field(const ConfigKey& key, const Config& config, Problems& problems) {
  if (key.field == nullptr || (key.range.wrong.empty() && key.choices.empty())) return;
  std::visit(
      [&](auto field) {
        using T = std::remove_pointer_t<decltype(field)>;
        if constexpr (std::is_arithmetic_v<T>) {
          const FieldRange& range = key.range;
          if (is_within(*field, range)) return;
          problems.add(fmt::format("{}: {}", key.path,
                                   fmt::format(fmt::runtime(range.wrong), *field, range.least, range.most)));
        } else if constexpr (std::is_same_v<T, std::string>) {
          if (is_one_of(*field, key.choices)) return;
          problems.add(fmt::format("{}: '{}' is not one of {}", key.path, *field, key.choices));
        }
      },
      field_in(key, config));
}

}  // namespace tranche::detail
