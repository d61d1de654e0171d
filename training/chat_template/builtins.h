#pragma once
/// Filters, tests, methods and functions that templates call by name.

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "training/chat_template/value.h"

namespace tranche::training::jinja {

/// The arguments of a call. take() consumes arguments; finish() refuses the remaining ones.
class Arguments {
 public:
  Arguments(std::string what, std::vector<Value> positional, std::vector<std::pair<std::string, Value>> named)
      : what_(std::move(what)), positional_(std::move(positional)), named_(std::move(named)) {
    positional_.reserve(positional_.size() + named_.size());  // taken arguments must not move
  }
  /// The argument with a name, or the next one without a name; null if there is none.
  const Value* take(std::string_view name);
  /// The same, but it throws if there is none.
  const Value& need(std::string_view name);
  std::string need_text(std::string_view name);
  bool take_flag(std::string_view name, bool otherwise);
  /// The next argument without a name.
  const Value* next();
  void finish() const;
  const std::string& what() const { return what_; }
  const std::vector<std::pair<std::string, Value>>& named() const { return named_; }
  /// The remaining arguments, for another call.
  std::vector<Value> rest();

 private:
  std::string what_;
  std::vector<Value> positional_;
  std::vector<std::pair<std::string, Value>> named_;
  std::size_t at_ = 0;
};

/// Refuses an unknown name, with its line.
void require_filter(std::string_view name, int line);
void require_test(std::string_view name, int line);
void require_method(std::string_view name, int line);
bool is_function(std::string_view name);

Value call_filter(std::string_view name, const Value& value, Arguments& arguments, Work& work);
bool call_test(std::string_view name, const Value& value, Arguments& arguments, Work& work);
Value call_method(std::string_view name, const Value& value, Arguments& arguments, Work& work);
/// `date`: "2026-11-27", the result of strftime_now(); empty if none is given.
Value call_function(std::string_view name, Arguments& arguments, const std::string& date, Work& work);

/// True for names of methods that Python finds before the keys of a dictionary, or attributes of texts and
/// lists.
bool has_method(const Value& value, std::string_view name);
/// value.name and value[key], without methods.
Value attribute_of(const Value& value, std::string_view name, Work& work);
Value item_of(const Value& value, const Value& key, Work& work);
/// value[begin:end:step], where each may be None.
Value slice_of(const Value& value, const Value& begin, const Value& end, const Value& step, Work& work);
/// a + b and the like.
Value arithmetic(std::string_view sign, const Value& a, const Value& b, Work& work);
Value negative(std::string_view sign, const Value& a);
/// a == b, a < b, a in b and the like.
bool compare(std::string_view sign, const Value& a, const Value& b, Work& work);
/// The methods of text that filters share.
std::string cased(std::string_view text, std::string_view how);
std::string_view stripped(std::string_view text, const Value* characters, bool front, bool behind,
                          Work& work);
std::string replaced(std::string_view text, std::string_view old, std::string_view by, std::int64_t most,
                     Work& work);

}  // namespace tranche::training::jinja
