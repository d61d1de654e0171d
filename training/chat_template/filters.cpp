// Filters.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "training/chat_template/builtins.h"
#include "training/chat_template/text.h"

namespace tranche::training::jinja {

namespace {

using Filter = Value (*)(const Value& value, Arguments& arguments, Work& work);

/// The entry with a path like "a.b.0", as used by the filters with `attribute`.
Value by_path(const Value& value, const Value& path, Work& work) {
  if (path.integer()) return item_of(value, path, work);
  if (path.text() == nullptr) refuse(fmt::format("an attribute is a {}, not a text", path.type()));
  Value result = value;
  std::string_view rest = path.text()->bytes;
  for (;;) {
    const std::size_t dot = rest.find('.');
    const std::string_view part = rest.substr(0, dot);
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), number);
    const bool whole = error == std::errc() && end == part.data() + part.size() && number >= 0;
    result = item_of(result, whole ? Value::integer(number) : Value::text(std::string(part)), work);
    if (dot == std::string_view::npos) return result;
    rest.remove_prefix(dot + 1);
  }
}

std::int64_t size_of(const Value& value) {
  if (value.text() != nullptr) return static_cast<std::int64_t>(characters(value.text()->bytes));
  if (value.map() != nullptr) return static_cast<std::int64_t>(value.map()->items.size());
  if (value.list() != nullptr && value.list()->kind != List::Kind::generator)
    return static_cast<std::int64_t>(value.list()->items.size());
  if (value.undefined() != nullptr) return 0;
  refuse(fmt::format("the length of a {}, which has none", value.type()));
}

Value to_integer(const Value& value, Arguments& arguments, Work& work) {
  const Value* given = arguments.take("default");
  const Value otherwise = given == nullptr ? Value::integer(0) : *given;
  if (value.integer()) return Value::integer(*value.integer());
  if (value.number()) {
    if (!(std::abs(*value.number()) < 0x1p62)) refuse("the filter 'int' of a number beyond 62 bits");
    return Value::integer(static_cast<std::int64_t>(*value.number()));
  }
  if (value.text() == nullptr) return otherwise;
  work.text(value.text()->bytes.size());
  std::string_view text = without_blanks(value.text()->bytes);
  if (text.starts_with('+') && text.substr(1).find_first_of("+-") == std::string_view::npos)
    text.remove_prefix(1);
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size()) return Value::integer(number);
  // Python accepts more as a number: 1_000, 1e3, digits of other scripts.
  if (!text.empty() && (!is_ascii(text) || text.find_first_of("0123456789") != std::string_view::npos))
    refuse(fmt::format("the filter 'int' of the text '{}' is not supported", text.substr(0, 40)));
  return otherwise;
}

Value to_json_text(const Value& value, Arguments& arguments, Work& work) {
  JsonStyle style;
  style.ascii = arguments.take_flag("ensure_ascii", false);
  if (const Value* indent = arguments.take("indent"); indent != nullptr && !indent->is_none()) {
    if (!indent->integer() || *indent->integer() < 0 || *indent->integer() > 64)
      refuse("the filter 'tojson' with an indent that is no integer from 0 to 64 is not supported");
    style.indent = static_cast<int>(*indent->integer());
    style.comma = ",";
  }
  if (const Value* separators = arguments.take("separators");
      separators != nullptr && !separators->is_none()) {
    const List* list = separators->list();
    if (list == nullptr || list->items.size() != 2 || list->items[0].text() == nullptr ||
        list->items[1].text() == nullptr)
      refuse("the filter 'tojson' needs two texts as separators");
    style.comma = list->items[0].text()->bytes;
    style.colon = list->items[1].text()->bytes;
    work.text(style.comma.size() + style.colon.size());
  }
  style.sorted = arguments.take_flag("sort_keys", false);
  return Value::text(to_json(value, style, work));
}

Value join(const Value& value, Arguments& arguments, Work& work) {
  const Value* given = arguments.take("d");
  const std::string separator = given == nullptr ? "" : to_text(*given, work);
  const Value* attribute = arguments.take("attribute");
  std::string result;
  const auto list = entries(value, work);
  for (const Value& item : list->items) {
    if (&item != &list->items.front()) result += separator;
    const std::string text = to_text(attribute == nullptr ? item : by_path(item, *attribute, work), work);
    work.text(separator.size() + text.size());
    result += text;
  }
  return Value::text(std::move(result));
}

/// Implements select, reject, selectattr and rejectattr.
Value chosen(const Value& value, Arguments& arguments, Work& work, bool attribute, bool wanted) {
  const Value path = attribute ? arguments.need("attribute") : Value();
  const Value* test = arguments.next();
  const std::vector<Value> more = arguments.rest();
  if (test != nullptr && test->text() == nullptr)
    refuse(fmt::format("{} needs a test's name", arguments.what()));
  if (test != nullptr) require_test(test->text()->bytes, 0);
  std::vector<Value> items;
  const auto list = entries(value, work);
  for (const Value& item : list->items) {
    const Value own = attribute ? by_path(item, path, work) : item;
    work.entries(more.size());
    Arguments given("the test '" + (test == nullptr ? "" : test->text()->bytes) + "'", more, {});
    const bool holds = test == nullptr ? own.truth() : call_test(test->text()->bytes, own, given, work);
    if (holds == wanted) items.push_back(item);
  }
  return Value::list(std::move(items), List::Kind::generator);
}

Value mapped(const Value& value, Arguments& arguments, Work& work) {
  std::vector<Value> items;
  const auto list = entries(value, work);
  const auto& named = arguments.named();
  if (!named.empty() && named.front().first == "attribute") {
    const Value path = *arguments.take("attribute");
    for (const Value& item : list->items) items.push_back(by_path(item, path, work));
  } else {
    const std::string name = arguments.need_text("filter");
    require_filter(name, 0);
    if (name == "map" || name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr")
      refuse(fmt::format("the filter 'map' with '{}' is not supported", name));
    const std::vector<Value> more = arguments.rest();
    for (const Value& item : list->items) {
      work.entries(more.size());
      Arguments given("the filter '" + name + "'", more, {});
      items.push_back(call_filter(name, item, given, work));
    }
  }
  return Value::list(std::move(items), List::Kind::generator);
}

/// The pairs of a dictionary, in its order or sorted by key.
Value pairs(const Value& value, Work& work, bool sorted) {
  if (value.undefined() != nullptr && !sorted) return Value::list({}, List::Kind::generator);
  if (value.map() == nullptr)
    refuse(fmt::format("the filter '{}' of a {}, which is no dict", sorted ? "dictsort" : "items",
                       value.type()));
  const Map& map = *value.map();
  std::vector<std::size_t> order(map.items.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (sorted) {
    std::vector<std::string> keys;
    for (const auto& [key, item] : map.items) {
      work.text(16 * key.size());
      keys.push_back(cased(key, "lower"));
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return keys[a] < keys[b]; });
  }
  std::vector<Value> items;
  work.entries(16 * map.items.size());
  for (const std::size_t i : order) {
    work.text(map.items[i].first.size());
    items.push_back(Value::list({Value::text(map.items[i].first), map.items[i].second}, List::Kind::tuple));
  }
  return Value::list(std::move(items), sorted ? List::Kind::list : List::Kind::generator);
}

Value one_of(const Value& value, Work& work, bool first) {
  if (!first && value.list() != nullptr && value.list()->kind == List::Kind::generator)
    refuse("the filter 'last' of a generator, which Python cannot go through from its end");
  const auto list = entries(value, work);
  if (list->items.empty())
    return Value::undefined(fmt::format("there is no {} entry", first ? "first" : "last"));
  return first ? list->items.front() : list->items.back();
}

struct Named {
  std::string_view name;
  Filter call;
};
const std::array<Named, 25> filters{{
    {"trim",
     [](const Value& value, Arguments& arguments, Work& work) {
       const std::string text = to_text(value, work);
       const Value* characters = arguments.take("chars");
       return Value::text(std::string(stripped(text, characters, true, true, work)),
                          value.text() != nullptr && value.text()->safe);
     }},
    {"length",
     [](const Value& value, Arguments&, Work& work) {
       if (value.text() != nullptr) work.text(value.text()->bytes.size());
       return Value::integer(size_of(value));
     }},
    {"count",
     [](const Value& value, Arguments&, Work& work) {
       if (value.text() != nullptr) work.text(value.text()->bytes.size());
       return Value::integer(size_of(value));
     }},
    {"string",
     [](const Value& value, Arguments&, Work& work) {
       return value.text() != nullptr ? value : Value::text(to_text(value, work));
     }},
    {"safe",
     [](const Value& value, Arguments&, Work& work) { return Value::text(to_text(value, work), true); }},
    {"default",
     [](const Value& value, Arguments& arguments, Work&) {
       const Value* given = arguments.take("default_value");
       const bool false_too = arguments.take_flag("boolean", false);
       const bool missing = value.undefined() != nullptr || (false_too && !value.truth());
       return missing ? given == nullptr ? Value::text("") : *given : value;
     }},
    {"d", [](const Value& value, Arguments& arguments,
             Work& work) { return call_filter("default", value, arguments, work); }},
    {"tojson", to_json_text},
    {"join", join},
    {"items", [](const Value& value, Arguments&, Work& work) { return pairs(value, work, false); }},
    {"dictsort", [](const Value& value, Arguments&, Work& work) { return pairs(value, work, true); }},
    {"list",
     [](const Value& value, Arguments&, Work& work) { return Value::list(entries(value, work)->items); }},
    {"first", [](const Value& value, Arguments&, Work& work) { return one_of(value, work, true); }},
    {"last", [](const Value& value, Arguments&, Work& work) { return one_of(value, work, false); }},
    {"reverse",
     [](const Value& value, Arguments&, Work& work) {
       std::vector<Value> items = entries(value, work)->items;
       std::reverse(items.begin(), items.end());
       if (value.text() == nullptr) return Value::list(std::move(items), List::Kind::generator);
       std::string text;
       for (const Value& item : items) text += item.text()->bytes;
       return Value::text(std::move(text));
     }},
    {"map", mapped},
    {"select", [](const Value& value, Arguments& arguments,
                  Work& work) { return chosen(value, arguments, work, false, true); }},
    {"reject", [](const Value& value, Arguments& arguments,
                  Work& work) { return chosen(value, arguments, work, false, false); }},
    {"selectattr", [](const Value& value, Arguments& arguments,
                      Work& work) { return chosen(value, arguments, work, true, true); }},
    {"rejectattr", [](const Value& value, Arguments& arguments,
                      Work& work) { return chosen(value, arguments, work, true, false); }},
    {"upper", [](const Value& value, Arguments&,
                 Work& work) { return Value::text(cased(to_text(value, work), "upper")); }},
    {"lower", [](const Value& value, Arguments&,
                 Work& work) { return Value::text(cased(to_text(value, work), "lower")); }},
    {"capitalize", [](const Value& value, Arguments&,
                      Work& work) { return Value::text(cased(to_text(value, work), "capitalize")); }},
    {"replace",
     [](const Value& value, Arguments& arguments, Work& work) {
       const std::string text = to_text(value, work), old = arguments.need_text("old"),
                         by = arguments.need_text("new");
       const Value* count = arguments.take("count");
       if (count != nullptr && !count->is_none() && !count->integer())
         refuse("the filter 'replace' needs an integer as 'count'");
       return Value::text(
           replaced(text, old, by, count == nullptr || count->is_none() ? -1 : *count->integer(), work));
     }},
    {"int", to_integer},
}};

}  // namespace

void require_filter(std::string_view name, int line) {
  const bool known = !name.empty() && std::any_of(filters.begin(), filters.end(),
                                                  [&](const Named& each) { return each.name == name; });
  if (!known) refuse(fmt::format("the filter '{}' is not supported", name), line);
}

Value call_filter(std::string_view name, const Value& value, Arguments& arguments, Work& work) {
  const auto* found =
      std::find_if(filters.begin(), filters.end(), [&](const Named& each) { return each.name == name; });
  constexpr std::array<std::string_view, 8> takes_safe{"trim", "length",  "count", "string",
                                                       "safe", "default", "d",     "tojson"};
  if (value.text() != nullptr && value.text()->safe &&
      std::find(takes_safe.begin(), takes_safe.end(), name) == takes_safe.end())
    refuse(fmt::format("the filter '{}' behind the filter 'safe' is not supported", name));
  Value result = found->call(value, arguments, work);
  arguments.finish();
  return result;
}

}  // namespace tranche::training::jinja
