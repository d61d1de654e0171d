#include "training/chat_template/evaluator.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "training/chat_template/builtins.h"

namespace tranche::training::jinja {

namespace {

/// The most nested evaluations, so that recursive macros end before the stack does.
constexpr int most_open = 1000;

/// The names visible to a block: its own before those around it.
struct Scope {
  explicit Scope(Scope* around) : parent(around) {}
  std::vector<std::pair<std::string, Value>> names;
  Scope* parent;
  Value* find(std::string_view name, Work& work) {
    work.entries(names.size());
    const auto found =
        std::find_if(names.begin(), names.end(), [&](const auto& each) { return each.first == name; });
    return found == names.end() ? nullptr : &found->second;
  }
  void set(const std::string& name, Value value, Work& work) {
    if (Value* there = find(name, work)) {
      *there = std::move(value);
    } else {
      names.emplace_back(name, std::move(value));
    }
  }
};

enum class Flow : std::uint8_t { on, stop, next };

class Evaluator {
 public:
  Evaluator(std::size_t bytes, const Variables& variables)
      : variables_(variables), work_(bytes + variables.bytes), root_(nullptr) {
    for (const auto& [name, value] : variables.values) {
      root_.names.emplace_back(name, value);
      if (name != "messages" || value.list() == nullptr) continue;
      const std::vector<Value>& messages = value.list()->items;
      for (std::size_t i = 0; i < messages.size(); ++i) messages_.emplace(messages[i].map(), i);
    }
  }

  Rendering run(const Block& block) {
    try {
      out_ = &rendering_.text;
      (void)execute(block, root_);
    } catch (Refusal& refusal) {
      if (refusal.line == 0) refusal.line = line_;
      throw;
    }
    return std::move(rendering_);
  }

 private:
  /// Counts nested evaluations, and adds the line to errors.
  struct Deeper {
    Deeper(Evaluator& evaluator, int line) : own(evaluator), before(evaluator.line_) {
      own.line_ = line;
      own.work_.steps(1);
      if (++own.open_ > most_open)
        refuse(fmt::format("macros call one another deeper than {} steps", most_open));
    }
    ~Deeper() { --own.open_; }
    Evaluator& own;
    int before;
  };

  // Statements

  Flow execute(const Block& block, Scope& scope) {
    for (const Statement& statement : block) {
      const Flow flow = execute(statement, scope);
      if (flow != Flow::on) return flow;
    }
    return Flow::on;
  }

  Flow execute(const Statement& statement, Scope& scope) {
    const Deeper deeper(*this, statement.line);
    switch (statement.kind) {
      case Statement::Kind::text:
        write(statement.text);
        return Flow::on;
      case Statement::Kind::output:
        write(to_text(value_of(*statement.parts[0], scope), work_));
        return Flow::on;
      case Statement::Kind::branches:
        return branch(statement, scope);
      case Statement::Kind::loop:
        loop(statement, scope);
        return Flow::on;
      case Statement::Kind::assignment:
        assign(statement, value_of(*statement.parts[0], scope), scope);
        return Flow::on;
      case Statement::Kind::capture: {
        Flow flow = Flow::on;
        std::string text = captured([&] {
          Scope inside(&scope);
          flow = execute(statement.blocks[0], inside);
        });
        if (flow == Flow::on) assign(statement, Value::text(std::move(text)), scope);
        return flow;
      }
      case Statement::Kind::macro:
        scope.set(statement.text,
                  Value(Value::Stored(
                      std::make_shared<const Callable>(Callable{statement.text, &statement, nullptr}))),
                  work_);
        return Flow::on;
      case Statement::Kind::generation: {
        const std::size_t begin = out_->size();
        Scope inside(&scope);
        const Flow flow = execute(statement.blocks[0], inside);
        if (out_->size() == begin) return flow;
        if (captures_ == 0) rendering_.generated.push_back({begin, out_->size()});
        rendering_.lost_marks = rendering_.lost_marks || captures_ > 0;
        return flow;
      }
      case Statement::Kind::stop:
        return Flow::stop;
      default:
        return Flow::next;
    }
  }

  void write(std::string_view text) {
    work_.text(text.size());
    *out_ += text;
  }

  template <typename Write>
  std::string captured(const Write& write_into) {
    std::string text;
    std::string* before = std::exchange(out_, &text);
    ++captures_;
    write_into();
    --captures_;
    out_ = before;
    return text;
  }

  Flow branch(const Statement& statement, Scope& scope) {
    for (std::size_t i = 0; i < statement.parts.size(); ++i) {
      if (value_of(*statement.parts[i], scope).truth()) return execute(statement.blocks[i], scope);
    }
    return statement.blocks.size() > statement.parts.size() ? execute(statement.blocks.back(), scope)
                                                            : Flow::on;
  }

  void unpack(const std::vector<std::string>& names, const Value& value, Scope& scope) {
    if (names.size() == 1) return scope.set(names[0], value, work_);
    const auto list = entries(value, work_);
    if (list->items.size() != names.size()) {
      refuse(fmt::format("{} names are set to {} values", names.size(), list->items.size()));
    }
    for (std::size_t i = 0; i < names.size(); ++i) scope.set(names[i], list->items[i], work_);
  }

  void assign(const Statement& statement, Value value, Scope& scope) {
    line_ = statement.line;
    if (statement.attribute.empty()) return unpack(statement.names, value, scope);
    const Value* target = look_up(statement.names[0], scope);
    Namespace* names = target == nullptr ? nullptr : target->names();
    if (names == nullptr)
      refuse(
          fmt::format("sets '{}' of '{}', which is no namespace", statement.attribute, statement.names[0]));
    (void)Value::list({value});  // refuses values that no container may hold
    work_.entries(names->items.size());
    for (auto& [name, item] : names->items) {
      if (name == statement.attribute) {
        item = std::move(value);
        return;
      }
    }
    names->items.emplace_back(statement.attribute, std::move(value));
  }

  void loop(const Statement& statement, Scope& scope) {
    std::shared_ptr<const List> list = entries(value_of(*statement.parts[0], scope), work_);
    line_ = statement.line;
    if (statement.parts[1] != nullptr) {
      List kept;
      for (const Value& item : list->items) {
        Scope inside(&scope);
        unpack(statement.names, item, inside);
        if (value_of(*statement.parts[1], inside).truth()) kept.items.push_back(item);
      }
      list = std::make_shared<const List>(std::move(kept));
    }
    for (std::size_t i = 0; i < list->items.size(); ++i) {
      work_.steps(1);
      Scope inside(&scope);
      unpack(statement.names, list->items[i], inside);
      inside.set("loop", Value(Value::Stored(std::make_shared<const Loop>(Loop{list, i}))), work_);
      if (turn(statement.blocks[0], list->items[i], inside) == Flow::stop) break;
    }
    if (list->items.empty() && statement.blocks.size() > 1) {
      Scope inside(&scope);
      (void)execute(statement.blocks[1], inside);
    }
  }

  /// Runs one round of a loop, which may be that of a message.
  Flow turn(const Block& block, const Value& item, Scope& scope) {
    const auto message = item.map() == nullptr ? messages_.end() : messages_.find(item.map());
    if (message == messages_.end() || in_turn_ || captures_ > 0) return execute(block, scope);
    in_turn_ = true;
    const std::size_t begin = out_->size();
    const Flow flow = execute(block, scope);
    if (out_->size() > begin) rendering_.turns.push_back({message->second, {begin, out_->size()}});
    in_turn_ = false;
    return flow;
  }

  // Expressions

  const Value* look_up(std::string_view name, Scope& scope) {
    for (Scope* each = &scope; each != nullptr; each = each->parent) {
      if (const Value* found = each->find(name, work_)) return found;
    }
    return nullptr;
  }

  Value value_of(const Expression& expression, Scope& scope) {
    const Deeper deeper(*this, expression.line);
    Value value = evaluate(expression, scope);
    line_ = deeper.before;
    return value;
  }

  /// The value of a part, or None if it is missing.
  Value part(const Expression& expression, std::size_t index, Scope& scope) {
    return expression.parts[index] == nullptr ? Value() : value_of(*expression.parts[index], scope);
  }

  Value evaluate(const Expression& expression, Scope& scope) {
    using Kind = Expression::Kind;
    switch (expression.kind) {
      case Kind::constant:
        return expression.constant;
      case Kind::name:
        return named(expression.text, scope);
      case Kind::list:
      case Kind::tuple:
        return Value::list(parts_from(expression, 0, scope),
                           expression.kind == Kind::list ? List::Kind::list : List::Kind::tuple);
      case Kind::map:
        return map(expression, scope);
      case Kind::attribute:
        return attribute(expression, scope);
      case Kind::item: {
        const Value value = part(expression, 0, scope);
        return item_of(value, part(expression, 1, scope), work_);
      }
      case Kind::slice:
        return slice(expression, scope);
      case Kind::call:
        return call(expression, scope);
      case Kind::filter:
      case Kind::test:
        return filter_or_test(expression, scope);
      case Kind::negation:
        return Value::boolean(!part(expression, 0, scope).truth());
      case Kind::both: {
        Value first = part(expression, 0, scope);
        return first.truth() ? part(expression, 1, scope) : std::move(first);
      }
      case Kind::either: {
        Value first = part(expression, 0, scope);
        return first.truth() ? std::move(first) : part(expression, 1, scope);
      }
      case Kind::conditional:
        return conditional(expression, scope);
      case Kind::comparison:
        return comparison(expression, scope);
      case Kind::joined:
        return joined(expression, scope);
      default: {
        const Value first = part(expression, 0, scope);
        if (expression.parts.size() == 1) return negative(expression.text, first);
        return arithmetic(expression.text, first, part(expression, 1, scope), work_);
      }
    }
  }

  std::vector<Value> parts_from(const Expression& expression, std::size_t first, Scope& scope) {
    std::vector<Value> values;
    for (std::size_t i = first; i < expression.parts.size(); ++i)
      values.push_back(part(expression, i, scope));
    return values;
  }

  Value named(const std::string& name, Scope& scope) {
    if (const Value* found = look_up(name, scope)) return *found;
    if (is_function(name))
      return Value(Value::Stored(std::make_shared<const Callable>(Callable{name, nullptr, nullptr})));
    return Value::undefined(fmt::format("'{}' is undefined", name));
  }

  Value map(const Expression& expression, Scope& scope) {
    std::vector<std::pair<std::string, Value>> items;
    for (std::size_t i = 0; i < expression.parts.size(); i += 2) {
      const Value key = part(expression, i, scope);
      if (key.text() == nullptr) refuse(fmt::format("a key of a dictionary is a {}, not a text", key.type()));
      Value value = part(expression, i + 1, scope);
      work_.entries(items.size());
      const auto there = std::find_if(items.begin(), items.end(),
                                      [&](const auto& each) { return each.first == key.text()->bytes; });
      if (there != items.end()) {
        there->second = std::move(value);
      } else {
        items.emplace_back(key.text()->bytes, std::move(value));
      }
    }
    return Value::map(std::move(items));
  }

  Value attribute(const Expression& expression, Scope& scope) {
    const Value value = part(expression, 0, scope);
    if (has_method(value, expression.text)) {
      refuse(fmt::format("the method '{}' of a {} that is not called; its key is reached by ['{}']",
                         expression.text, value.type(), expression.text));
    }
    return attribute_of(value, expression.text, work_);
  }

  Value slice(const Expression& expression, Scope& scope) {
    const std::vector<Value> values = parts_from(expression, 0, scope);
    return slice_of(values[0], values[1], values[2], values[3], work_);
  }

  Value conditional(const Expression& expression, Scope& scope) {
    if (part(expression, 0, scope).truth()) return part(expression, 1, scope);
    if (expression.parts[2] != nullptr) return part(expression, 2, scope);
    return Value::undefined("the condition of a value without 'else' does not hold");
  }

  Value comparison(const Expression& expression, Scope& scope) {
    Value left = part(expression, 0, scope);
    for (std::size_t i = 0; i < expression.signs.size(); ++i) {
      Value right = part(expression, i + 1, scope);
      if (!compare(expression.signs[i], left, right, work_)) return Value::boolean(false);
      left = std::move(right);
    }
    return Value::boolean(true);
  }

  Value joined(const Expression& expression, Scope& scope) {
    std::string text;
    for (std::size_t i = 0; i < expression.parts.size(); ++i)
      text += to_text(part(expression, i, scope), work_);
    work_.text(text.size());
    return Value::text(std::move(text));
  }

  Arguments arguments_of(const Expression& expression, std::string what, Scope& scope) {
    std::vector<Value> positional = parts_from(expression, 1, scope);
    std::vector<std::pair<std::string, Value>> keywords;
    for (const auto& [name, value] : expression.keywords)
      keywords.emplace_back(name, value_of(*value, scope));
    return {std::move(what), std::move(positional), std::move(keywords)};
  }

  Value filter_or_test(const Expression& expression, Scope& scope) {
    const Value value = part(expression, 0, scope);
    const bool filter = expression.kind == Expression::Kind::filter;
    Arguments arguments = arguments_of(
        expression, fmt::format("the {} '{}'", filter ? "filter" : "test", expression.text), scope);
    if (filter) return call_filter(expression.text, value, arguments, work_);
    return Value::boolean(call_test(expression.text, value, arguments, work_));
  }

  Value call(const Expression& expression, Scope& scope) {
    const Expression& target = *expression.parts[0];
    if (target.kind == Expression::Kind::attribute) {
      const Value value = part(target, 0, scope);
      Arguments arguments = arguments_of(expression, fmt::format("{}()", target.text), scope);
      return call_method(target.text, value, arguments, work_);
    }
    const Value function = value_of(target, scope);
    if (function.undefined() != nullptr) refuse(*function.undefined()->what);
    const Callable* callable = function.callable();
    if (callable == nullptr)
      refuse(fmt::format("'{}' is a {}, which cannot be called", target.text, function.type()));
    Arguments arguments = arguments_of(expression, fmt::format("{}()", target.text), scope);
    if (callable->macro != nullptr) return call_macro(*callable->macro, arguments);
    return call_function(callable->name, arguments, variables_.date, work_);
  }

  Value call_macro(const Statement& macro, Arguments& arguments) {
    Scope inside(&root_);
    const std::size_t required = macro.names.size() - macro.parts.size();
    for (std::size_t i = 0; i < macro.names.size(); ++i) {
      const Value* given = arguments.take(macro.names[i]);
      Value value = given != nullptr ? *given
                    : i >= required
                        ? value_of(*macro.parts[i - required], inside)
                        : Value::undefined(fmt::format("argument '{}' was not given", macro.names[i]));
      inside.set(macro.names[i], std::move(value), work_);
    }
    arguments.finish();
    return Value::text(captured([&] { (void)execute(macro.blocks[0], inside); }));
  }

  const Variables& variables_;
  Work work_;
  Scope root_;
  Rendering rendering_;
  std::string* out_ = nullptr;
  int captures_ = 0, open_ = 0, line_ = 0;
  bool in_turn_ = false;
  std::unordered_map<const Map*, std::size_t> messages_;
};

}  // namespace

Rendering render(const Block& block, std::size_t bytes, const Variables& variables) {
  return Evaluator(bytes, variables).run(block);
}

}  // namespace tranche::training::jinja
