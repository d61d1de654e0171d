// Methods of texts and dictionaries.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "training/chat_template/builtins.h"
#include "training/chat_template/text.h"

namespace tranche::training::jinja {

namespace {

constexpr std::array<std::string_view, 16> text_methods{
    "capitalize", "count",  "endswith", "find",  "join",       "lower", "lstrip", "replace",
    "rsplit",     "rstrip", "split",    "strip", "startswith", "title", "upper",  "isdigit"};
constexpr std::array<std::string_view, 4> map_methods{"get", "items", "keys", "values"};
/// Methods that modify their object, which transformers' environment refuses.
constexpr std::array<std::string_view, 10> changing{"append", "extend", "insert", "pop",     "remove",
                                                    "update", "clear",  "sort",   "reverse", "setdefault"};

template <typename Names>
bool is_in(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Splits a text at blanks, or at `separator`. The last of `most` + 1 pieces contains the rest.
std::vector<Value> pieces(std::string_view text, const Value* separator, std::int64_t most, Work& work) {
  std::vector<Value> result;
  const auto add = [&](std::string_view piece) {
    work.text(piece.size());
    result.push_back(Value::text(std::string(piece)));
  };
  work.text(text.size());
  if (separator == nullptr || separator->is_none()) {
    for (text = without_blanks(text, true, false); !text.empty(); text = without_blanks(text, true, false)) {
      std::size_t end = 0;
      if (most >= 0 && static_cast<std::int64_t>(result.size()) >= most) {
        add(text);
        break;
      }
      while (end < text.size() && blank_bytes(text.substr(end)) == 0)
        end += character_bytes(text.substr(end));
      add(text.substr(0, end));
      text.remove_prefix(end);
    }
    return result;
  }
  if (separator->text() == nullptr || separator->text()->bytes.empty())
    refuse("split() needs a separator that is a text of at least one character");
  const std::string_view own = separator->text()->bytes;
  for (;;) {
    const std::size_t end = most >= 0 && static_cast<std::int64_t>(result.size()) >= most
                                ? std::string_view::npos
                                : text.find(own);
    add(text.substr(0, end));
    if (end == std::string_view::npos) return result;
    text.remove_prefix(end + own.size());
  }
}

/// The same from the end.
std::vector<Value> pieces_from_end(std::string_view text, const Value* separator, std::int64_t most,
                                   Work& work) {
  if (most < 0) return pieces(text, separator, most, work);
  if (separator == nullptr || separator->text() == nullptr || separator->text()->bytes.empty())
    refuse("rsplit() with a limit needs a separator that is a text of at least one character");
  work.text(text.size());
  const std::string_view own = separator->text()->bytes;
  std::vector<Value> result;
  while (static_cast<std::int64_t>(result.size()) < most) {
    const std::size_t at = text.rfind(own);
    if (at == std::string_view::npos) break;
    work.text(text.size() - at);
    result.push_back(Value::text(std::string(text.substr(at + own.size()))));
    text = text.substr(0, at);
  }
  result.push_back(Value::text(std::string(text)));
  std::reverse(result.begin(), result.end());
  return result;
}

std::int64_t whole(const Value* value, std::int64_t otherwise, const Arguments& arguments) {
  if (value == nullptr) return otherwise;
  if (!value->integer())
    refuse(fmt::format("{} needs an integer, not a {}", arguments.what(), value->type()));
  return *value->integer();
}

/// True if `holds` is true for the text, or for one of several, as startswith() accepts them.
bool any_text(const Value& wanted, const Arguments& arguments,
              const std::function<bool(std::string_view)>& holds) {
  if (const List* list = wanted.list(); list != nullptr && list->kind == List::Kind::tuple) {
    return std::any_of(list->items.begin(), list->items.end(), [&](const Value& each) {
      if (each.text() == nullptr) refuse(fmt::format("{} needs texts", arguments.what()));
      return holds(each.text()->bytes);
    });
  }
  if (wanted.undefined() != nullptr) refuse(*wanted.undefined()->what);
  if (wanted.text() == nullptr)
    refuse(fmt::format("{} needs a text, not a {}", arguments.what(), wanted.type()));
  return holds(wanted.text()->bytes);
}

Value call_text(std::string_view name, const Text& text, Arguments& arguments, Work& work) {
  const std::string_view own = text.bytes;
  work.text(own.size());
  if (text.safe)
    refuse(
        fmt::format("{} of a text of the filter 'safe', which escapes, is not supported", arguments.what()));
  if (name == "upper" || name == "lower" || name == "title" || name == "capitalize")
    return Value::text(cased(own, name));
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    const Value* characters = arguments.next();
    return Value::text(std::string(stripped(own, characters, name != "rstrip", name != "lstrip", work)));
  }
  if (name == "startswith" || name == "endswith") {
    return Value::boolean(any_text(arguments.need("prefix"), arguments, [&](std::string_view part) {
      return name == "startswith" ? own.starts_with(part) : own.ends_with(part);
    }));
  }
  if (name == "split" || name == "rsplit") {
    const Value* separator = arguments.take("sep");
    const std::int64_t most = whole(arguments.take("maxsplit"), -1, arguments);
    return Value::list((name == "split" ? pieces : pieces_from_end)(own, separator, most, work));
  }
  if (name == "replace") {
    const std::string old = arguments.need_text("old"), by = arguments.need_text("new");
    return Value::text(replaced(own, old, by, whole(arguments.take("count"), -1, arguments), work));
  }
  if (name == "join") {
    std::string result;
    const auto list = entries(arguments.need("iterable"), work);
    for (const Value& item : list->items) {
      if (item.text() == nullptr || item.text()->safe)
        refuse(fmt::format("{} joins texts, not a {}", arguments.what(), item.type()));
      if (&item != &list->items.front()) result += own;
      work.text(own.size() + item.text()->bytes.size());
      result += item.text()->bytes;
    }
    return Value::text(std::move(result));
  }
  if (name == "isdigit") {
    if (!is_ascii(own)) refuse("isdigit() of a text with other characters than ASCII's is not supported");
    return Value::boolean(!own.empty() &&
                          std::all_of(own.begin(), own.end(), [](char c) { return c >= '0' && c <= '9'; }));
  }
  const std::string part = arguments.need_text("sub");
  if (name == "find") {
    const std::size_t at = own.find(part);
    return Value::integer(
        at == std::string_view::npos ? -1 : static_cast<std::int64_t>(characters(own.substr(0, at))));
  }
  if (part.empty()) refuse("count() of an empty text is not supported");
  std::int64_t count = 0;
  for (std::size_t at = own.find(part); at != std::string_view::npos; at = own.find(part, at + part.size()))
    ++count;
  return Value::integer(count);
}

Value call_map(std::string_view name, const Map& map, Arguments& arguments, Work& work) {
  if (name == "get") {
    const Value key = arguments.need("key");
    const Value* otherwise = arguments.next();
    const Value* found = key.text() == nullptr ? nullptr : map.find(key.text()->bytes, work);
    return found != nullptr ? *found : otherwise != nullptr ? *otherwise : Value();
  }
  work.entries(4 * map.items.size());
  std::vector<Value> items;
  for (const auto& [key, value] : map.items) {
    work.text(key.size());
    items.push_back(name == "keys"     ? Value::text(key)
                    : name == "values" ? value
                                       : Value::list({Value::text(key), value}, List::Kind::tuple));
  }
  return Value::list(std::move(items), List::Kind::view);
}

}  // namespace

void require_method(std::string_view name, int line) {
  if (is_in(text_methods, name) || is_in(map_methods, name)) return;
  if (is_in(changing, name)) {
    refuse(fmt::format("the method '{}' changes a value, which transformers does not allow", name), line);
  }
  refuse(fmt::format("the method '{}' is not supported", name), line);
}

Value call_method(std::string_view name, const Value& value, Arguments& arguments, Work& work) {
  if (value.undefined() != nullptr) refuse(*value.undefined()->what);
  Value result;
  if (value.text() != nullptr && is_in(text_methods, name)) {
    result = call_text(name, *value.text(), arguments, work);
  } else if (value.map() != nullptr && is_in(map_methods, name)) {
    result = call_map(name, *value.map(), arguments, work);
  } else {
    refuse(fmt::format("a {} has no method '{}'", value.type(), name));
  }
  arguments.finish();
  return result;
}

std::string cased(std::string_view text, std::string_view how) {
  if (!is_ascii(text))
    refuse(fmt::format("'{}' of a text with other characters than ASCII's is not supported", how));
  std::string result(text);
  bool inside = false;  // within a word
  for (char& c : result) {
    const bool small = c >= 'a' && c <= 'z', large = c >= 'A' && c <= 'Z';
    const bool up = how == "upper" || (how != "lower" && !inside);
    if (small && up) c = static_cast<char>(c - 'a' + 'A');
    if (large && !up) c = static_cast<char>(c - 'A' + 'a');
    inside = how == "capitalize" || small || large;
  }
  return result;
}

std::string_view stripped(std::string_view text, const Value* characters, bool front, bool behind,
                          Work& work) {
  work.text(text.size());
  if (characters == nullptr || characters->is_none()) return without_blanks(text, front, behind);
  if (characters->text() == nullptr)
    refuse(fmt::format("the characters that are stripped are a {}, not a text", characters->type()));
  const std::string_view all = characters->text()->bytes;
  if (!is_ascii(all)) refuse("stripping other characters than ASCII's is not supported");
  if (front) text.remove_prefix(std::min(text.find_first_not_of(all), text.size()));
  if (behind) text = text.substr(0, text.find_last_not_of(all) + 1);
  return text;
}

std::string replaced(std::string_view text, std::string_view old, std::string_view by, std::int64_t most,
                     Work& work) {
  if (old.empty()) refuse("replace() of an empty text is not supported");
  work.text(text.size());
  std::string result;
  for (std::int64_t done = 0; most < 0 || done < most; ++done) {
    const std::size_t at = text.find(old);
    if (at == std::string_view::npos) break;
    work.text(at + by.size());
    result += text.substr(0, at);
    result += by;
    text.remove_prefix(at + old.size());
  }
  result += text;
  return result;
}

}  // namespace tranche::training::jinja
