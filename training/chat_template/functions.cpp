// Arguments, tests, and the functions that transformers provides to templates.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "training/chat_template/builtins.h"

namespace tranche::training::jinja {

namespace {

constexpr std::array<std::string_view, 28> tests{
    "defined", "undefined", "none",  "string",  "mapping", "iterable",    "sequence",
    "number",  "integer",   "float", "boolean", "true",    "false",       "odd",
    "even",    "equalto",   "eq",    "ne",      "lt",      "gt",          "le",
    "ge",      "in",        "lower", "upper",   "sameas",  "divisibleby", "callable"};
constexpr std::array<std::string_view, 5> functions{"range", "namespace", "dict", "raise_exception",
                                                    "strftime_now"};

bool is_type(std::string_view name, const Value& value) {
  const bool number = value.as<std::int64_t>() != nullptr || value.as<double>() != nullptr;
  if (name == "string") return value.text() != nullptr;
  if (name == "mapping") return value.map() != nullptr;
  if (name == "boolean") return value.as<bool>() != nullptr;
  if (name == "integer") return value.as<std::int64_t>() != nullptr;
  if (name == "float") return value.as<double>() != nullptr;
  if (name == "number") return number || value.as<bool>() != nullptr;
  const bool entries = value.text() != nullptr || value.map() != nullptr || value.undefined() != nullptr;
  if (name == "sequence") {
    return entries || (value.list() != nullptr && value.list()->kind <= List::Kind::tuple);
  }
  return entries || value.list() != nullptr || value.loop() != nullptr;  // iterable
}

std::string strftime(const std::string& format, const std::string& date) {
  if (date.empty()) {
    refuse(
        "asks for today's date (strftime_now), which would make the result another one each day; give a "
        "date with --chat-date YYYY-MM-DD");
  }
  constexpr std::array<std::string_view, 12> months{"January",   "February", "March",    "April",
                                                    "May",       "June",     "July",     "August",
                                                    "September", "October",  "November", "December"};
  constexpr std::array<std::string_view, 7> days{"Sunday",   "Monday", "Tuesday", "Wednesday",
                                                 "Thursday", "Friday", "Saturday"};
  constexpr std::array<int, 12> before{0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334};
  const auto number = [&](std::size_t at, std::size_t digits) {
    int value = 0;
    std::from_chars(date.data() + at, date.data() + at + digits, value);
    return value;
  };
  const int year = number(0, 4), month = number(5, 2), day = number(8, 2);
  const bool leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
  const int of_year = before[static_cast<std::size_t>(month - 1)] + day + (leap && month > 2 ? 1 : 0);
  const int years = year - 1;  // years that are over; 1 January of year 1 is a Monday
  const int weekday = (years + years / 4 - years / 100 + years / 400 + of_year) % 7;
  std::string result;
  for (std::size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%' || i + 1 == format.size()) {
      result += format[i];
      continue;
    }
    const char c = format[++i];
    const std::string_view long_month = months[static_cast<std::size_t>(month - 1)];
    const std::string_view long_day = days[static_cast<std::size_t>(weekday)];
    switch (c) {
      case 'Y':
        result += std::to_string(year);
        break;
      case 'y':
        result += fmt::format("{:02}", year % 100);
        break;
      case 'm':
        result += fmt::format("{:02}", month);
        break;
      case 'd':
        result += fmt::format("{:02}", day);
        break;
      case 'j':
        result += fmt::format("{:03}", of_year);
        break;
      case 'B':
        result += long_month;
        break;
      case 'b':
        result += long_month.substr(0, 3);
        break;
      case 'A':
        result += long_day;
        break;
      case 'a':
        result += long_day.substr(0, 3);
        break;
      case '%':
        result += '%';
        break;
      default:
        refuse(fmt::format("strftime_now() with '%{}' is not supported: a date has no time of day", c));
    }
  }
  return result;
}

Value range(Arguments& arguments, Work& work) {
  const auto number = [&](const Value* value) {
    if (!value->integer()) refuse(fmt::format("range() needs integers, not a {}", value->type()));
    return *value->integer();
  };
  std::int64_t begin = 0, end = number(&arguments.need("stop")), step = 1;
  if (const Value* second = arguments.next()) {
    begin = end;
    end = number(second);
  }
  if (const Value* third = arguments.next()) step = number(third);
  if (step == 0) refuse("range() with steps of 0");
  std::vector<Value> items;
  for (std::int64_t i = begin; step > 0 ? i < end : i > end;) {
    work.steps(1);
    items.push_back(Value::integer(i));
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return Value::list(std::move(items), List::Kind::view);
}

}  // namespace

const Value* Arguments::take(std::string_view name) {
  for (auto each = named_.begin(); each != named_.end(); ++each) {
    if (each->first != name) continue;
    // The argument is moved to the positional ones, whose storage does not move.
    positional_.insert(positional_.begin() + static_cast<std::ptrdiff_t>(at_), std::move(each->second));
    named_.erase(each);
    break;
  }
  return next();
}

const Value* Arguments::next() {
  return at_ < positional_.size() ? &positional_[at_++] : nullptr;
}

const Value& Arguments::need(std::string_view name) {
  const Value* value = take(name);
  if (value == nullptr) refuse(fmt::format("{} needs an argument '{}'", what_, name));
  return *value;
}

std::string Arguments::need_text(std::string_view name) {
  const Value& value = need(name);
  if (value.undefined() != nullptr) refuse(*value.undefined()->what);
  if (value.text() == nullptr)
    refuse(fmt::format("{} needs a text as '{}', not a {}", what_, name, value.type()));
  return value.text()->bytes;
}

bool Arguments::take_flag(std::string_view name, bool otherwise) {
  const Value* value = take(name);
  return value == nullptr ? otherwise : value->truth();
}

void Arguments::finish() const {
  if (!named_.empty()) refuse(fmt::format("{} has no argument '{}'", what_, named_.front().first));
  if (at_ < positional_.size()) refuse(fmt::format("{} has more arguments than are supported", what_));
}

std::vector<Value> Arguments::rest() {
  std::vector<Value> values(positional_.begin() + static_cast<std::ptrdiff_t>(at_), positional_.end());
  at_ = positional_.size();
  return values;
}

void require_test(std::string_view name, int line) {
  if (std::find(tests.begin(), tests.end(), name) == tests.end())
    refuse(fmt::format("the test '{}' is not supported", name), line);
}

bool is_function(std::string_view name) {
  return std::find(functions.begin(), functions.end(), name) != functions.end();
}

bool call_test(std::string_view name, const Value& value, Arguments& arguments, Work& work) {
  bool result = false;
  if (name == "defined" || name == "undefined") {
    result = (value.undefined() == nullptr) == (name == "defined");
  } else if (name == "none") {
    result = value.is_none();
  } else if (name == "true" || name == "false") {
    result = value.as<bool>() != nullptr && *value.as<bool>() == (name == "true");
  } else if (name == "callable") {
    result = value.callable() != nullptr;
  } else if (name == "odd" || name == "even" || name == "divisibleby") {
    const Value by = name == "divisibleby" ? arguments.need("num") : Value::integer(2);
    const bool divided = equal(arithmetic("%", value, by, work), Value::integer(0), work);
    result = divided == (name != "odd");
  } else if (name == "sameas") {
    const Value& other = arguments.need("other");
    const bool plain = other.is_none() || other.as<bool>() != nullptr;
    if (!plain) refuse("the test 'sameas' with anything but none, true and false is not supported");
    result = value.is_none() ? other.is_none()
                             : value.as<bool>() != nullptr && other.as<bool>() != nullptr &&
                                   *value.as<bool>() == *other.as<bool>();
  } else if (name == "lower" || name == "upper") {
    const std::string text = to_text(value, work);
    const bool letters = cased(text, "lower") != cased(text, "upper");
    result = letters && cased(text, name) == text;
  } else if (name == "in") {
    result = compare("in", value, arguments.need("seq"), work);
  } else if (name == "eq" || name == "equalto" || name == "ne" || name == "lt" || name == "gt" ||
             name == "le" || name == "ge") {
    constexpr std::array<std::pair<std::string_view, std::string_view>, 6> signs{
        {{"ne", "!="}, {"lt", "<"}, {"gt", ">"}, {"le", "<="}, {"ge", ">="}, {"eq", "=="}}};
    const auto found =
        std::find_if(signs.begin(), signs.end() - 1, [&](const auto& each) { return each.first == name; });
    result = compare(found->second, value, arguments.need("other"), work);
  } else {
    result = is_type(name, value);
  }
  arguments.finish();
  return result;
}

Value call_function(std::string_view name, Arguments& arguments, const std::string& date, Work& work) {
  Value result;
  if (name == "range") {
    result = range(arguments, work);
  } else if (name == "namespace" || name == "dict") {
    std::vector<std::pair<std::string, Value>> items;
    if (const Value* first = arguments.next()) {
      if (first->map() == nullptr)
        refuse(fmt::format("{} of a {} is not supported", arguments.what(), first->type()));
      items = first->map()->items;
    }
    if (arguments.next() != nullptr)
      refuse(fmt::format("{} has more arguments than are supported", arguments.what()));
    for (const auto& [key, value] : arguments.named()) {
      work.entries(items.size());
      const auto there = std::find_if(items.begin(), items.end(),
                                      [&key = key](const auto& each) { return each.first == key; });
      if (there != items.end()) {
        there->second = value;
      } else {
        items.emplace_back(key, value);
      }
    }
    // The construction checks what a container may hold.
    Value map = Value::map(items);
    if (name == "dict") return map;
    return Value(Value::Stored(std::make_shared<Namespace>(Namespace{std::move(items)})));
  } else if (name == "raise_exception") {
    refuse(fmt::format("refuses the messages: {}", to_text(arguments.need("message"), work)));
  } else {
    result = Value::text(strftime(arguments.need_text("format"), date));
  }
  arguments.finish();
  return result;
}

}  // namespace tranche::training::jinja
