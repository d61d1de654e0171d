#include "training/chat_template/value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "training/chat_template/text.h"

namespace tranche::training::jinja {

namespace {

int nested_in(const Value& value) {
  if (value.names() != nullptr || value.callable() != nullptr || value.loop() != nullptr) {
    refuse(fmt::format("puts a {} into a container, which is not supported", value.type()));
  }
  if (const List* list = value.list()) return list->nested;
  if (const Map* map = value.map()) return map->nested;
  return 0;
}

int one_more(int nested) {
  if (nested >= 2 * most_nested) {
    refuse(fmt::format("nests lists and dictionaries deeper than {}", 2 * most_nested));
  }
  return nested + 1;
}

/// Python's text for these values contains a memory address.
[[noreturn]] void refuse_text(const Value& value) {
  refuse(fmt::format("writes a {} as text, which is not supported", value.type()));
}

/// Appends a value as repr() writes it if it is `inner`, else as str() writes it.
void append_text(std::string& result, const Value& value, bool inner, Work& work) {
  work.steps(1);
  if (const Text* text = value.text()) {
    work.text(text->bytes.size());
    if (inner && text->safe) refuse("writes a list with a text of the filter 'safe', which is not supported");
    result += inner ? python_quoted(text->bytes) : text->bytes;
  } else if (value.undefined() != nullptr) {
    if (inner) result += "Undefined";
  } else if (value.is_none()) {
    result += "None";
  } else if (const bool* truth = value.as<bool>()) {
    result += *truth ? "True" : "False";
  } else if (const auto integer = value.integer()) {
    result += std::to_string(*integer);
  } else if (const auto number = value.number()) {
    result += number_text(*number);
  } else if (const List* list = value.list()) {
    const bool tuple = list->kind == List::Kind::tuple;
    if (!tuple && list->kind != List::Kind::list) refuse_text(value);
    result += tuple ? "(" : "[";
    for (const Value& item : list->items) {
      if (&item != &list->items.front()) result += ", ";
      append_text(result, item, true, work);
    }
    if (tuple && list->items.size() == 1) result += ",";
    result += tuple ? ")" : "]";
  } else if (const Map* map = value.map()) {
    result += "{";
    for (const auto& [key, item] : map->items) {
      if (&key != &map->items.front().first) result += ", ";
      work.text(key.size());
      result += python_quoted(key) + ": ";
      append_text(result, item, true, work);
    }
    result += "}";
  } else {
    refuse_text(value);
  }
}

void append_json_text(std::string& result, std::string_view text, bool ascii, Work& work) {
  work.text(text.size());
  result += '"';
  for (std::size_t at = 0; at < text.size();) {
    const char c = text[at];
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x80) {
      const std::size_t bytes = character_bytes(text.substr(at));
      const std::string_view own = text.substr(at, bytes);
      at += bytes;
      if (!ascii) {
        result += own;
        continue;
      }
      std::uint32_t number = byte & (0xFFU >> (bytes + 1));
      for (const char more : own.substr(1)) number = number << 6 | (static_cast<unsigned char>(more) & 0x3F);
      if (number >= 0x10000) {
        number -= 0x10000;
        result += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + (number >> 10), 0xDC00 + (number & 0x3FF));
      } else {
        result += fmt::format("\\u{:04x}", number);
      }
      continue;
    }
    ++at;
    constexpr std::string_view named = "\"\\\n\r\t\b\f", letters = "\"\\nrtbf";
    if (const std::size_t i = named.find(c); i != std::string_view::npos) {
      result += '\\';
      result += letters[i];
    } else if (byte < 0x20) {
      result += fmt::format("\\u{:04x}", byte);
    } else {
      result += c;
    }
  }
  result += '"';
}

class JsonWriter {
 public:
  JsonWriter(const JsonStyle& style, Work& work) : style_(style), work_(work) {}

  void add(const Value& value, int level) {
    work_.steps(1);
    if (const Text* text = value.text()) {
      append_json_text(result, text->bytes, style_.ascii, work_);
    } else if (value.is_none()) {
      result += "null";
    } else if (const bool* truth = value.as<bool>()) {
      result += *truth ? "true" : "false";
    } else if (const auto integer = value.integer()) {
      result += std::to_string(*integer);
    } else if (const auto number = value.number()) {
      result += number_text(*number);
    } else if (const List* list = value.list();
               list != nullptr && (list->kind == List::Kind::list || list->kind == List::Kind::tuple)) {
      row('[', ']', list->items.size(), level, [&](std::size_t i) { add(list->items[i], level + 1); });
    } else if (const Map* map = value.map()) {
      std::vector<const std::pair<std::string, Value>*> order;
      for (const auto& item : map->items) order.push_back(&item);
      if (style_.sorted) {
        std::stable_sort(order.begin(), order.end(),
                         [](const auto* a, const auto* b) { return a->first < b->first; });
      }
      row('{', '}', order.size(), level, [&](std::size_t i) {
        append_json_text(result, order[i]->first, style_.ascii, work_);
        result += style_.colon;
        add(order[i]->second, level + 1);
      });
    } else {
      refuse(fmt::format("writes a {} as JSON, which cannot be", value.type()));
    }
  }
  std::string result;

 private:
  template <typename Add>
  void row(char open, char close, std::size_t count, int level, const Add& entry) {
    result += open;
    for (std::size_t i = 0; i < count; ++i) {
      if (i > 0) result += style_.comma;
      line(level + 1);
      entry(i);
    }
    if (count > 0) line(level);
    result += close;
  }
  void line(int level) {
    if (style_.indent < 0) return;
    const auto blanks = static_cast<std::size_t>(style_.indent) * static_cast<std::size_t>(level);
    work_.text(blanks);
    result += '\n';
    result.append(blanks, ' ');
  }
  const JsonStyle& style_;
  Work& work_;
};

}  // namespace

const Value* Map::find(std::string_view key, Work& work) const {
  work.entries(items.size());
  const auto found =
      std::find_if(items.begin(), items.end(), [&](const auto& item) { return item.first == key; });
  return found == items.end() ? nullptr : &found->second;
}

Value Value::list(std::vector<Value> items, List::Kind kind) {
  int nested = 0;
  for (const Value& item : items) nested = std::max(nested, nested_in(item));
  return Value(Stored(std::make_shared<const List>(List{std::move(items), kind, one_more(nested), false})));
}

Value Value::map(std::vector<std::pair<std::string, Value>> items) {
  int nested = 0;
  for (const auto& [key, item] : items) nested = std::max(nested, nested_in(item));
  return Value(Stored(std::make_shared<const Map>(Map{std::move(items), one_more(nested)})));
}

Value Value::of(const nlohmann::ordered_json& json) {
  switch (json.type()) {
    case nlohmann::ordered_json::value_t::null:
      return {};
    case nlohmann::ordered_json::value_t::boolean:
      return boolean(json.get<bool>());
    case nlohmann::ordered_json::value_t::number_integer:
      return integer(json.get<std::int64_t>());
    case nlohmann::ordered_json::value_t::number_unsigned:
      if (json.get<std::uint64_t>() > INT64_MAX)
        refuse("is given the number " + json.dump() + ", which has more than 64 bits");
      return integer(json.get<std::int64_t>());
    case nlohmann::ordered_json::value_t::number_float:
      return number(json.get<double>());
    case nlohmann::ordered_json::value_t::string:
      return text(json.get<std::string>());
    case nlohmann::ordered_json::value_t::array: {
      std::vector<Value> items;
      for (const auto& item : json) items.push_back(of(item));
      return list(std::move(items));
    }
    case nlohmann::ordered_json::value_t::object: {
      std::vector<std::pair<std::string, Value>> items;
      for (const auto& [key, item] : json.items()) items.emplace_back(key, of(item));
      return map(std::move(items));
    }
    default:
      refuse("is given a value that is no JSON");
  }
}

std::optional<std::int64_t> Value::integer() const {
  if (const auto* held = as<std::int64_t>()) return *held;
  if (const bool* held = as<bool>()) return *held ? 1 : 0;
  return std::nullopt;
}

std::optional<double> Value::number() const {
  if (const auto* held = as<double>()) return *held;
  if (const auto whole = integer()) return static_cast<double>(*whole);
  return std::nullopt;
}

bool Value::truth() const {
  if (undefined() != nullptr || is_none()) return false;
  if (const auto value = number()) return *value != 0;
  if (const Text* held = text()) return !held->bytes.empty();
  if (const List* held = list()) return held->kind == List::Kind::generator || !held->items.empty();
  if (const Map* held = map()) return !held->items.empty();
  return true;
}

const char* Value::type() const {
  if (undefined() != nullptr) return "undefined value";
  if (is_none()) return "None";
  if (as<bool>() != nullptr) return "bool";
  if (as<std::int64_t>() != nullptr) return "int";
  if (as<double>() != nullptr) return "float";
  if (text() != nullptr) return "str";
  if (map() != nullptr) return "dict";
  if (names() != nullptr) return "namespace";
  if (callable() != nullptr) return "function";
  if (loop() != nullptr) return "loop";
  switch (list()->kind) {
    case List::Kind::list:
      return "list";
    case List::Kind::tuple:
      return "tuple";
    case List::Kind::view:
      return "view of a dict or a range";
    default:
      return "generator";
  }
}

bool equal(const Value& a, const Value& b, Work& work) {
  work.steps(1);
  if (a.integer() && b.integer()) return *a.integer() == *b.integer();
  if (a.number() && b.number()) return *a.number() == *b.number();
  if (a.text() != nullptr && b.text() != nullptr) {
    work.text(std::min(a.text()->bytes.size(), b.text()->bytes.size()));
    return a.text()->bytes == b.text()->bytes;
  }
  if (a.list() != nullptr && b.list() != nullptr) {
    const List &left = *a.list(), &right = *b.list();
    if (&left == &right) return true;
    if (left.kind != right.kind || left.items.size() != right.items.size()) return false;
    if (left.kind != List::Kind::list && left.kind != List::Kind::tuple) {
      refuse(fmt::format("compares a {}, which is not supported", a.type()));
    }
    for (std::size_t i = 0; i < left.items.size(); ++i) {
      if (!equal(left.items[i], right.items[i], work)) return false;
    }
    return true;
  }
  if (a.map() != nullptr && b.map() != nullptr) {
    if (a.map()->items.size() != b.map()->items.size()) return false;
    for (const auto& [key, value] : a.map()->items) {
      const Value* found = b.map()->find(key, work);
      if (found == nullptr || !equal(value, *found, work)) return false;
    }
    return true;
  }
  if (a.undefined() != nullptr || b.undefined() != nullptr) {
    return a.undefined() != nullptr && b.undefined() != nullptr;
  }
  if (a.is_none() || b.is_none()) return a.is_none() && b.is_none();
  if (a.names() != nullptr || a.callable() != nullptr || a.loop() != nullptr) {
    refuse(fmt::format("compares a {}, which is not supported", a.type()));
  }
  return false;
}

bool less(const Value& a, const Value& b, Work& work) {
  if (a.integer() && b.integer()) return *a.integer() < *b.integer();
  if (a.number() && b.number()) return *a.number() < *b.number();
  if (a.text() == nullptr || b.text() == nullptr) {
    if (a.undefined() != nullptr) refuse(*a.undefined()->what);
    if (b.undefined() != nullptr) refuse(*b.undefined()->what);
    refuse(fmt::format("compares the sizes of a {} and a {}", a.type(), b.type()));
  }
  work.text(std::min(a.text()->bytes.size(), b.text()->bytes.size()));
  // The order of bytes in UTF-8 is the order of characters.
  const std::string_view left = a.text()->bytes, right = b.text()->bytes;
  const int sign = std::memcmp(left.data(), right.data(), std::min(left.size(), right.size()));
  return sign < 0 || (sign == 0 && left.size() < right.size());
}

std::string to_text(const Value& value, Work& work) {
  std::string result;
  append_text(result, value, false, work);
  return result;
}

std::string number_text(double value) {
  if (!std::isfinite(value)) refuse("writes a number that is not finite");
  // A JSON reader makes integers beyond 64 bits floats, which Python writes as integers.
  if (std::abs(value) >= 0x1p63 && value == std::floor(value)) {
    refuse(fmt::format("writes the number {}, which may have been an integer of more than 64 bits", value));
  }
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string to_json(const Value& value, const JsonStyle& style, Work& work) {
  JsonWriter writer(style, work);
  writer.add(value, 0);
  return std::move(writer.result);
}

std::shared_ptr<const List> entries(const Value& value, Work& work) {
  if (const std::shared_ptr<const List> list = value.shared_list()) {
    work.entries(list->items.size());
    if (list->kind == List::Kind::generator) {
      if (list->passed) refuse("goes through a generator a second time, which gives nothing");
      list->passed = true;
    }
    return list;
  }
  std::vector<Value> items;
  if (const Map* map = value.map()) {
    work.entries(map->items.size());
    for (const auto& [key, item] : map->items) {
      work.text(key.size());
      items.push_back(Value::text(key));
    }
  } else if (const Text* text = value.text()) {
    work.steps(text->bytes.size());
    for (std::string_view rest = text->bytes; !rest.empty();) {
      const std::size_t bytes = character_bytes(rest);
      items.push_back(Value::text(std::string(rest.substr(0, bytes))));
      rest.remove_prefix(bytes);
    }
  } else if (value.undefined() == nullptr) {
    refuse(fmt::format("goes through a {}, which has no entries", value.type()));
  }
  return Value::list(std::move(items)).shared_list();
}

}  // namespace tranche::training::jinja
