#pragma once
/// The values of a template's expressions: the subset of Python's that templates use.

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "training/chat_template/work.h"

namespace tranche::training::jinja {

class Value;
struct Statement;

struct Text {
  std::string bytes;
  bool safe = false;  ///< result of the filter `safe`: adding to it is refused here
};
/// Lists, and other objects that Python iterates like a list.
struct List {
  enum class Kind : std::uint8_t { list, tuple, view, generator };
  std::vector<Value> items;
  Kind kind = Kind::list;
  int nested = 1;               ///< nesting depth of containers, including this one
  mutable bool passed = false;  ///< a generator yields its entries only once
};
/// A dictionary whose keys are texts, in insertion order.
struct Map {
  std::vector<std::pair<std::string, Value>> items;
  int nested = 1;
  const Value* find(std::string_view key, Work& work) const;
};
/// The object that `namespace()` makes; its values can be set.
struct Namespace {
  std::vector<std::pair<std::string, Value>> items;
};
/// A function of the environment, by name; a macro; or a method bound to its value.
struct Callable {
  std::string name;
  const Statement* macro = nullptr;
  std::shared_ptr<const Value> self;
};
/// The variable `loop`.
struct Loop {
  std::shared_ptr<const List> items;
  std::size_t index = 0;
  int depth = 1;
};
struct None {};
/// The value of a missing name or key: false, empty, and refused by most operations.
struct Undefined {
  std::shared_ptr<const std::string> what;  ///< "'x' is undefined"
};

class Value {
 public:
  using Stored =
      std::variant<Undefined, None, bool, std::int64_t, double, std::shared_ptr<const Text>,
                   std::shared_ptr<const List>, std::shared_ptr<const Map>, std::shared_ptr<Namespace>,
                   std::shared_ptr<const Callable>, std::shared_ptr<const Loop>>;
  Value() : stored_(None{}) {}
  Value(Stored stored) : stored_(std::move(stored)) {}  // NOLINT(google-explicit-constructor)
  static Value undefined(std::string what) {
    return Value(Stored(Undefined{std::make_shared<const std::string>(std::move(what))}));
  }
  static Value boolean(bool value) { return Value(Stored(value)); }
  static Value integer(std::int64_t value) { return Value(Stored(value)); }
  static Value number(double value) { return Value(Stored(value)); }
  static Value text(std::string bytes, bool safe = false) {
    return Value(Stored(std::make_shared<const Text>(Text{std::move(bytes), safe})));
  }
  /// Refuses values that a container may not hold, and containers that are nested too deep.
  static Value list(std::vector<Value> items, List::Kind kind = List::Kind::list);
  static Value map(std::vector<std::pair<std::string, Value>> items);
  /// Refuses integers beyond 64 bits.
  static Value of(const nlohmann::ordered_json& json);

  template <typename Type>
  const Type* as() const {
    return std::get_if<Type>(&stored_);
  }
  const Undefined* undefined() const { return as<Undefined>(); }
  bool is_none() const { return as<None>() != nullptr; }
  const Text* text() const { return pointee<const Text>(); }
  const List* list() const { return pointee<const List>(); }
  const Map* map() const { return pointee<const Map>(); }
  Namespace* names() const { return pointee<Namespace>(); }
  const Callable* callable() const { return pointee<const Callable>(); }
  const Loop* loop() const { return pointee<const Loop>(); }
  std::shared_ptr<const List> shared_list() const {
    const auto* held = as<std::shared_ptr<const List>>();
    return held == nullptr ? nullptr : *held;
  }
  /// An integer, or a boolean as 0 or 1.
  std::optional<std::int64_t> integer() const;
  /// A number of any kind.
  std::optional<double> number() const;

  bool truth() const;
  /// Python's name of the type: "str", "list".
  const char* type() const;

 private:
  template <typename Type>
  Type* pointee() const {
    const auto* held = std::get_if<std::shared_ptr<Type>>(&stored_);
    return held == nullptr ? nullptr : held->get();
  }
  Stored stored_;
};

/// Compares as Python's == does.
bool equal(const Value& a, const Value& b, Work& work);
/// Compares numbers and texts as Python's < does.
bool less(const Value& a, const Value& b, Work& work);
/// The result of Python's str().
std::string to_text(const Value& value, Work& work);
/// The result of Python's str() for an int or float.
std::string number_text(double value);

struct JsonStyle {
  bool ascii = false, sorted = false;
  int indent = -1;  ///< spaces; -1: all in one line
  std::string comma = ", ", colon = ": ";
};
/// The result of Python's json.dumps().
std::string to_json(const Value& value, const JsonStyle& style, Work& work);

/// The entries that a loop visits: those of lists, the keys of dictionaries, the characters of texts. It
/// consumes a generator.
std::shared_ptr<const List> entries(const Value& value, Work& work);

}  // namespace tranche::training::jinja
