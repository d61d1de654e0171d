#include "core/json.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/printable.h"

namespace tranche::detail {
namespace {

using Json = nlohmann::ordered_json;

/// The position of the first bracket that exceeds the allowed depth; npos when there is none. It agrees with
/// the parser on every text up to the first error in it.
std::size_t too_deep(std::string_view text) {
  std::size_t depth = 0;
  bool quoted = false;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (quoted) {
      if (c == '\\') ++at;
      quoted = c != '"';
    } else if (c == '"') {
      quoted = true;
    } else if (c == '{' || c == '[') {
      if (++depth > deepest_json) return at;
    } else if ((c == '}' || c == ']') && depth > 0) {
      --depth;
    }
  }
  return std::string_view::npos;
}

/// The most bytes of a text that a message quotes: the text may be one long word.
constexpr std::size_t longest_quote = 200;

/// Drops the parser's own prefix: "[json.exception.parse_error.101] parse error at line 1, column 2: ".
std::string parser_message(std::string_view what) {
  constexpr std::string_view place = "parse error at ";
  if (const auto end = what.find("] "); end != std::string_view::npos) what.remove_prefix(end + 2);
  if (const auto end = what.find(": "); what.starts_with(place) && end != std::string_view::npos) {
    what.remove_prefix(end + 2);
  }
  return std::string(whole_characters(what, longest_quote)) + (what.size() > longest_quote ? "..." : "");
}

/// Receives the parser's events. The JSON library's own receiver compares each new key with all earlier keys
/// of its object, one by one, which takes minutes for a file with a million keys.
class Builder {
 public:
  explicit Builder(JsonRemarks& remarks) : remarks_(remarks) {}

  bool null() { return put(nullptr); }
  bool boolean(bool value) { return put(value); }
  bool number_integer(std::int64_t value) { return put(value); }
  bool number_unsigned(std::uint64_t value) { return put(value); }
  bool number_float(double value, const std::string& text) {
    const bool is_zero =
        text.substr(0, text.find_first_of("eE")).find_first_of("123456789") == std::string::npos;
    if (value == 0 && !is_zero && remarks_.vanished.empty()) {
      remarks_.vanished =
          std::string(whole_characters(text, longest_quote)) + (text.size() > longest_quote ? "..." : "");
    }
    return put(value);
  }
  bool string(std::string& value) { return put(std::move(value)); }
  bool binary(Json::binary_t&) { return false; }  // JSON text has no binary values
  bool start_object(std::size_t) { return open(Json::object()); }
  bool start_array(std::size_t) { return open(Json::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(std::string& name) {
    Level& level = open_.back();
    auto& block = level.value->get_ref<Json::object_t&>();
    const auto [known, added] = level.places.try_emplace(name, block.size());
    level.place = known->second;
    level.key = name;
    if (added) {
      block.emplace_back(std::move(name), Json());
    } else if (remarks_.duplicate.empty()) {
      for (const Level& outer : open_) {
        if (!outer.key.empty()) remarks_.duplicate += (remarks_.duplicate.empty() ? "" : ".") + outer.key;
      }
    }
    return true;
  }
  bool parse_error(std::size_t byte, const std::string&, const nlohmann::json::exception& error) {
    remarks_.byte = byte > 0 ? byte - 1 : 0;
    remarks_.problem = parser_message(error.what());
    return false;
  }
  Json take() { return std::move(root_); }

 private:
  struct Level {
    Json* value;
    std::unordered_map<std::string, std::size_t> places = {};  ///< position of each key of an object
    std::size_t place = 0;                                     ///< position of the latest key
    std::string key = {};
  };

  /// Stores `value` where the next value belongs and returns its address, which is valid until the level is
  /// closed.
  Json* place(Json&& value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Level& level = open_.back();
    if (level.value->is_array()) {
      level.value->push_back(std::move(value));
      return &level.value->back();
    }
    auto& block = level.value->get_ref<Json::object_t&>();
    Json& member = (block.begin() + static_cast<std::ptrdiff_t>(level.place))->second;
    member = std::move(value);
    return &member;
  }
  bool put(Json value) {
    place(std::move(value));
    return true;
  }
  bool open(Json value) {
    open_.push_back({place(std::move(value))});
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  JsonRemarks& remarks_;
  Json root_;
  std::vector<Level> open_;
};

}  // namespace

Json parse_json(std::string_view text, JsonRemarks* remarks) {
  JsonRemarks ignored;
  JsonRemarks& found = remarks != nullptr ? *remarks : ignored;
  found = {};
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) {
    found.problem = "it is empty";
    return Json(Json::value_t::discarded);
  }
  if (const std::size_t at = too_deep(text); at != std::string_view::npos) {
    found.byte = at;
    found.problem = fmt::format("blocks are nested deeper than {}", deepest_json);
    return Json(Json::value_t::discarded);
  }
  Builder builder(found);
  if (!Json::sax_parse(text, &builder)) return Json(Json::value_t::discarded);
  return builder.take();
}

std::optional<std::int64_t> json_integer(const Json& value) {
  if (value.is_number_float()) {
    constexpr double exact_integers = 9007199254740992.0;  // doubles up to here hold every integer
    const auto number = value.get<double>();
    if (std::abs(number) > exact_integers || number != std::floor(number)) return std::nullopt;
    return static_cast<std::int64_t>(number);
  }
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{INT64_MAX})
    return std::nullopt;
  return value.is_number_integer() ? std::optional(value.get<std::int64_t>()) : std::nullopt;
}

std::string brief_json(const Json& value) {
  if (value.is_array()) return fmt::format("a list of {}", value.size());
  if (value.is_object()) return fmt::format("a block of {} keys", value.size());
  constexpr std::size_t longest = 60;
  const std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() > longest ? std::string(whole_characters(text, longest - 3)) + "..." : text;
}

bool is_utf8(std::string_view text) {
  try {
    (void)Json(std::string(text)).dump();
    return true;
  } catch (const Json::type_error&) {
    return false;
  }
}

}  // namespace tranche::detail
