// Operators and subscripts with Python's semantics.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "training/chat_template/builtins.h"
#include "training/chat_template/text.h"

namespace tranche::training::jinja {

namespace {

void require_defined(const Value& value) {
  if (const Undefined* undefined = value.undefined()) refuse(*undefined->what);
}

/// Names that Jinja finds as methods before it looks for a key.
constexpr std::array<std::string_view, 11> map_attributes{
    "clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"};
constexpr std::array<std::string_view, 11> list_attributes{
    "append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort"};
constexpr std::array<std::string_view, 47> text_attributes{
    "capitalize", "casefold",     "center",       "count",   "encode",     "endswith",    "expandtabs",
    "find",       "format",       "format_map",   "index",   "isalnum",    "isalpha",     "isascii",
    "isdecimal",  "isdigit",      "isidentifier", "islower", "isnumeric",  "isprintable", "isspace",
    "istitle",    "isupper",      "join",         "ljust",   "lower",      "lstrip",      "maketrans",
    "partition",  "removeprefix", "removesuffix", "replace", "rfind",      "rindex",      "rjust",
    "rpartition", "rsplit",       "rstrip",       "split",   "splitlines", "startswith",  "strip",
    "swapcase",   "title",        "translate",    "upper",   "zfill"};

template <typename Names>
bool names(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Python's rules for the limits of a slice of `size` entries.
struct Limits {
  std::int64_t begin = 0, end = 0, step = 1;
};
Limits limits_of(const Value& begin, const Value& end, const Value& step, std::size_t entries) {
  const auto number = [](const Value& value) -> std::optional<std::int64_t> {
    if (value.is_none()) return std::nullopt;
    require_defined(value);
    if (!value.integer()) refuse(fmt::format("a slice has a {} as a limit", value.type()));
    return value.integer();
  };
  const auto size = static_cast<std::int64_t>(entries);
  Limits limits;
  limits.step = number(step).value_or(1);
  if (limits.step == 0) refuse("a slice has steps of 0");
  const bool up = limits.step > 0;
  const std::int64_t lowest = up ? 0 : -1, highest = up ? size : size - 1;
  const auto within = [&](std::int64_t at) {
    return std::clamp(at < 0 ? std::max(at, -size - 1) + size : at, lowest, highest);
  };
  const auto from = number(begin), to = number(end);
  limits.begin = from ? within(*from) : up ? 0 : size - 1;
  limits.end = to ? within(*to) : up ? size : -1;
  return limits;
}

template <typename Take>
void each_of(const Limits& limits, const Take& take) {
  for (std::int64_t i = limits.begin; limits.step > 0 ? i < limits.end : i > limits.end;) {
    take(static_cast<std::size_t>(i));
    if (limits.step > limits.end - i && limits.step > 0) break;
    if (limits.step < limits.end - i && limits.step < 0) break;
    i += limits.step;
  }
}

/// The byte at which each character of a text begins, followed by the text's length.
std::vector<std::size_t> beginnings(std::string_view text) {
  std::vector<std::size_t> at{0};
  while (at.back() < text.size()) at.push_back(at.back() + character_bytes(text.substr(at.back())));
  return at;
}

std::int64_t checked(std::string_view sign, std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  const bool beyond = sign == "+"   ? __builtin_add_overflow(a, b, &result)
                      : sign == "-" ? __builtin_sub_overflow(a, b, &result)
                                    : __builtin_mul_overflow(a, b, &result);
  if (beyond) refuse(fmt::format("the result of '{}' has more than 64 bits", sign));
  return result;
}

Value whole_arithmetic(std::string_view sign, std::int64_t a, std::int64_t b) {
  if (sign == "+" || sign == "-" || sign == "*") return Value::integer(checked(sign, a, b));
  if (b == 0) refuse(fmt::format("'{}' by 0", sign));
  if (sign == "/") return Value::number(static_cast<double>(a) / static_cast<double>(b));
  if (b == -1) return sign == "//" ? Value::integer(checked("-", 0, a)) : Value::integer(0);
  std::int64_t quotient = a / b, rest = a % b;
  if (rest != 0 && (rest < 0) != (b < 0)) {
    --quotient;
    rest += b;
  }
  return Value::integer(sign == "//" ? quotient : rest);
}

Value repeated(const Text& text, std::int64_t times, Work& work) {
  std::string result;
  for (std::int64_t i = 0; i < times && !text.bytes.empty(); ++i) {
    work.text(text.bytes.size());
    result += text.bytes;
  }
  return Value::text(std::move(result));
}

bool contains(const Value& inside, const Value& value, Work& work) {
  if (const Text* text = inside.text()) {
    if (value.text() == nullptr) {
      require_defined(value);
      refuse(fmt::format("looks for a {} in a text", value.type()));
    }
    work.text(text->bytes.size());
    return text->bytes.find(value.text()->bytes) != std::string::npos;
  }
  if (const Map* map = inside.map()) {
    return value.text() != nullptr && map->find(value.text()->bytes, work) != nullptr;
  }
  if (inside.list() == nullptr && inside.undefined() == nullptr) {
    refuse(fmt::format("looks for something in a {}, which has no entries", inside.type()));
  }
  const auto list = entries(inside, work);
  return std::any_of(list->items.begin(), list->items.end(),
                     [&](const Value& item) { return equal(item, value, work); });
}

}  // namespace

bool has_method(const Value& value, std::string_view name) {
  return value.map() != nullptr    ? names(map_attributes, name)
         : value.list() != nullptr ? names(list_attributes, name)
                                   : value.text() != nullptr && names(text_attributes, name);
}

Value attribute_of(const Value& value, std::string_view name, Work& work) {
  require_defined(value);
  if (const Map* map = value.map()) {
    if (const Value* found = map->find(name, work)) return *found;
  }
  if (const Namespace* names = value.names()) {
    work.entries(names->items.size());
    for (const auto& [key, item] : names->items) {
      if (key == name) return item;
    }
  }
  if (const Loop* loop = value.loop()) {
    const std::size_t count = loop->items->items.size(), at = loop->index;
    const auto whole = [](std::size_t number) { return Value::integer(static_cast<std::int64_t>(number)); };
    if (name == "index") return whole(at + 1);
    if (name == "index0") return whole(at);
    if (name == "revindex") return whole(count - at);
    if (name == "revindex0") return whole(count - at - 1);
    if (name == "first") return Value::boolean(at == 0);
    if (name == "last") return Value::boolean(at + 1 == count);
    if (name == "length") return whole(count);
    if (name == "depth") return Value::integer(loop->depth);
    if (name == "depth0") return Value::integer(loop->depth - 1);
    if (name == "previtem" && at > 0) return loop->items->items[at - 1];
    if (name == "nextitem" && at + 1 < count) return loop->items->items[at + 1];
    if (name == "previtem") return Value::undefined("there is no previous item");
    if (name == "nextitem") return Value::undefined("there is no next item");
    refuse(fmt::format("'loop.{}' is not supported", name));
  }
  return Value::undefined(fmt::format("a {} has no '{}'", value.type(), name));
}

Value item_of(const Value& value, const Value& key, Work& work) {
  require_defined(value);
  if (const Text* name = key.text()) {
    if (value.map() == nullptr && has_method(value, name->bytes))
      refuse(fmt::format("the attribute ['{}'] of a {} is not supported", name->bytes, value.type()));
    if (const Map* map = value.map(); map != nullptr && has_method(value, name->bytes)) {
      if (map->find(name->bytes, work) == nullptr)
        refuse(fmt::format("the method ['{}'] of a dict is not supported", name->bytes));
    }
    return attribute_of(value, name->bytes, work);
  }
  const auto place = key.integer();
  if (const List* list = value.list(); list != nullptr && place) {
    if (list->kind != List::Kind::list && list->kind != List::Kind::tuple)
      refuse(fmt::format("a subscript of a {} is not supported", value.type()));
    const auto size = static_cast<std::int64_t>(list->items.size());
    const std::int64_t at = *place < 0 ? *place + size : *place;
    if (at >= 0 && at < size) return list->items[static_cast<std::size_t>(at)];
  }
  if (const Text* text = value.text(); text != nullptr && place) {
    work.steps(text->bytes.size() / 4);
    const std::vector<std::size_t> at = beginnings(text->bytes);
    const auto size = static_cast<std::int64_t>(at.size()) - 1;
    const std::int64_t own = *place < 0 ? *place + size : *place;
    if (own >= 0 && own < size) {
      const auto i = static_cast<std::size_t>(own);
      return Value::text(text->bytes.substr(at[i], at[i + 1] - at[i]));
    }
  }
  return Value::undefined(fmt::format("a {} has no such item", value.type()));
}

Value slice_of(const Value& value, const Value& begin, const Value& end, const Value& step, Work& work) {
  if (const Text* text = value.text()) {
    work.steps(1 + text->bytes.size() / 4);
    const std::vector<std::size_t> at = beginnings(text->bytes);
    std::string result;
    each_of(limits_of(begin, end, step, at.size() - 1),
            [&](std::size_t i) { result += text->bytes.substr(at[i], at[i + 1] - at[i]); });
    return Value::text(std::move(result));
  }
  const List* list = value.list();
  if (list == nullptr || (list->kind != List::Kind::list && list->kind != List::Kind::tuple)) {
    require_defined(value);
    refuse(fmt::format("a slice of a {}, which has none", value.type()));
  }
  work.entries(list->items.size());
  std::vector<Value> items;
  each_of(limits_of(begin, end, step, list->items.size()),
          [&](std::size_t i) { items.push_back(list->items[i]); });
  return Value::list(std::move(items), list->kind);
}

Value arithmetic(std::string_view sign, const Value& a, const Value& b, Work& work) {
  require_defined(a);
  require_defined(b);
  if (a.integer() && b.integer()) return whole_arithmetic(sign, *a.integer(), *b.integer());
  if (a.number() && b.number()) {
    const double x = *a.number(), y = *b.number();
    if (sign == "+") return Value::number(x + y);
    if (sign == "-") return Value::number(x - y);
    if (sign == "*") return Value::number(x * y);
    if (sign == "/" && y != 0) return Value::number(x / y);
    refuse(fmt::format("'{}' of numbers with a fraction is not supported, nor is a division by 0", sign));
  }
  if (sign == "+" && a.text() != nullptr && b.text() != nullptr) {
    if (a.text()->safe || b.text()->safe)
      refuse("'+' of a text of the filter 'safe', of which Python escapes the other side, is not supported");
    work.text(a.text()->bytes.size() + b.text()->bytes.size());
    return Value::text(a.text()->bytes + b.text()->bytes);
  }
  if (sign == "+" && a.list() != nullptr && b.list() != nullptr && a.list()->kind == b.list()->kind &&
      a.list()->kind <= List::Kind::tuple) {
    work.entries(a.list()->items.size() + b.list()->items.size());
    std::vector<Value> items = a.list()->items;
    items.insert(items.end(), b.list()->items.begin(), b.list()->items.end());
    return Value::list(std::move(items), a.list()->kind);
  }
  if (sign == "*" && a.text() != nullptr && b.integer() && !a.text()->safe)
    return repeated(*a.text(), *b.integer(), work);
  if (sign == "*" && b.text() != nullptr && a.integer() && !b.text()->safe)
    return repeated(*b.text(), *a.integer(), work);
  refuse(fmt::format("'{}' of a {} and a {} is not supported", sign, a.type(), b.type()));
}

Value negative(std::string_view sign, const Value& a) {
  require_defined(a);
  if (a.integer()) return Value::integer(sign == "-" ? checked("-", 0, *a.integer()) : *a.integer());
  if (a.number()) return Value::number(sign == "-" ? -*a.number() : *a.number());
  refuse(fmt::format("'{}' in front of a {}", sign, a.type()));
}

bool compare(std::string_view sign, const Value& a, const Value& b, Work& work) {
  if (sign == "==") return equal(a, b, work);
  if (sign == "!=") return !equal(a, b, work);
  if (sign == "<") return less(a, b, work);
  if (sign == ">") return less(b, a, work);
  if (sign == "<=") return less(a, b, work) || equal(a, b, work);
  if (sign == ">=") return less(b, a, work) || equal(a, b, work);
  return contains(b, a, work) == (sign == "in");
}

}  // namespace tranche::training::jinja
