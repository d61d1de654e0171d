#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "core/printable.h"
#include "training/chat_template/builtins.h"
#include "training/chat_template/parser.h"

namespace tranche::training::jinja {

namespace {

using Form = Expression::Kind;

bool any_of(std::string_view text, std::initializer_list<std::string_view> texts) {
  return std::find(texts.begin(), texts.end(), text) != texts.end();
}

}  // namespace

bool TokenReader::skip_sign(std::string_view text) {
  const bool found = is_sign(text);
  if (found) take();
  return found;
}

bool TokenReader::skip_name(std::string_view text) {
  const bool found = is_name(text);
  if (found) take();
  return found;
}

void TokenReader::expect_sign(std::string_view text) {
  if (!skip_sign(text)) refuse_token(fmt::format("'{}'", text));
}

void TokenReader::expect(Token::Kind kind, std::string_view what) {
  if (now().kind != kind) refuse_token(what);
  take();
}

std::string TokenReader::name(std::string_view what) {
  if (now().kind != Token::Kind::name) refuse_token(what);
  return take().text;
}

void TokenReader::refuse_token(std::string_view what) const {
  const Token& token = now();
  const std::string found = token.kind == Token::Kind::end ? "the template ends"
                            : token.kind == Token::Kind::data
                                ? "text"
                                : fmt::format("'{}'", detail::printable(token.text.substr(0, 40)));
  refuse(fmt::format("{} where {} is expected", found, what), token.line);
}

ExpressionParser::Deeper::Deeper(ExpressionParser& own) : parser(own) {
  // An expression in brackets counts once for itself, for `not` and for a sign.
  if (++parser.open_ > 3 * most_nested) {
    refuse(fmt::format("an expression is nested deeper than {}", most_nested), parser.tokens_.now().line);
  }
}
ExpressionParser::Deeper::~Deeper() {
  --parser.open_;
}

Part ExpressionParser::node(Form kind, int line, std::string text) const {
  auto made = std::make_unique<Expression>();
  made->kind = kind;
  made->line = line;
  made->text = std::move(text);
  return made;
}

void ExpressionParser::add(Part& to, Part part) const {
  if (part != nullptr) to->height = std::max(to->height, part->height + 1);
  if (to->height > 4 * most_nested) {
    refuse(fmt::format("an expression of more than {} operations in a row", 4 * most_nested), to->line);
  }
  to->parts.push_back(std::move(part));
}

Part ExpressionParser::expression() {
  const Deeper deeper(*this);
  Part value = either();
  while (tokens_.is_name("if")) {
    Part made = node(Form::conditional, tokens_.take().line);
    add(made, either());
    add(made, std::move(value));
    add(made, tokens_.skip_name("else") ? expression() : nullptr);
    value = std::move(made);
  }
  return value;
}

Part ExpressionParser::without_condition() {
  return either();
}

Part ExpressionParser::either() {
  Part value = both();
  while (tokens_.is_name("or")) {
    Part made = node(Form::either, tokens_.take().line);
    add(made, std::move(value));
    add(made, both());
    value = std::move(made);
  }
  return value;
}

Part ExpressionParser::both() {
  Part value = negation();
  while (tokens_.is_name("and")) {
    Part made = node(Form::both, tokens_.take().line);
    add(made, std::move(value));
    add(made, negation());
    value = std::move(made);
  }
  return value;
}

Part ExpressionParser::negation() {
  const Deeper deeper(*this);
  if (!tokens_.is_name("not")) return comparison();
  Part made = node(Form::negation, tokens_.take().line);
  add(made, negation());
  return made;
}

Part ExpressionParser::comparison() {
  Part first = sum();
  Part made;
  for (;;) {
    const Token& token = tokens_.now();
    const bool sign =
        token.kind == Token::Kind::sign && any_of(token.text, {"==", "!=", "<", "<=", ">", ">="});
    const bool no =
        tokens_.is_name("not") && tokens_.later(1).kind == Token::Kind::name && tokens_.later(1).text == "in";
    if (!sign && !no && !tokens_.is_name("in")) break;
    if (made == nullptr) {
      made = node(Form::comparison, token.line);
      add(made, std::move(first));
    }
    if (no) tokens_.take();
    made->signs.push_back(no ? "not in" : tokens_.now().text);
    tokens_.take();
    add(made, sum());
  }
  return made == nullptr ? std::move(first) : std::move(made);
}

Part ExpressionParser::sum() {
  Part value = joined();
  while (tokens_.is_sign("+") || tokens_.is_sign("-")) {
    const Token sign = tokens_.take();
    Part made = node(Form::arithmetic, sign.line, sign.text);
    add(made, std::move(value));
    add(made, joined());
    value = std::move(made);
  }
  return value;
}

Part ExpressionParser::joined() {
  Part first = product();
  if (!tokens_.is_sign("~")) return first;
  Part made = node(Form::joined, tokens_.now().line);
  add(made, std::move(first));
  while (tokens_.skip_sign("~")) add(made, product());
  return made;
}

Part ExpressionParser::product() {
  Part value = power();
  while (tokens_.now().kind == Token::Kind::sign && any_of(tokens_.now().text, {"*", "/", "//", "%"})) {
    const Token sign = tokens_.take();
    Part made = node(Form::arithmetic, sign.line, sign.text);
    add(made, std::move(value));
    add(made, power());
    value = std::move(made);
  }
  return value;
}

Part ExpressionParser::power() {
  Part value = unary(true);
  if (tokens_.is_sign("**")) refuse("the operator '**' is not supported", tokens_.now().line);
  return value;
}

Part ExpressionParser::unary(bool with_filters) {
  const Deeper deeper(*this);
  Part value;
  if (tokens_.is_sign("-") || tokens_.is_sign("+")) {
    const Token sign = tokens_.take();
    value = node(Form::arithmetic, sign.line, sign.text);
    add(value, unary(false));
  } else {
    value = primary();
  }
  value = behind(std::move(value));
  return with_filters ? filters(std::move(value)) : std::move(value);
}

Part ExpressionParser::primary() {
  const Token token = tokens_.now();
  if (tokens_.is_sign("(")) return parentheses();
  if (tokens_.is_sign("{")) return map();
  if (tokens_.is_sign("[")) {
    tokens_.take();
    Part made = node(Form::list, token.line);
    while (!tokens_.is_sign("]")) {
      if (!made->parts.empty()) tokens_.expect_sign(",");
      if (!tokens_.is_sign("]")) add(made, expression());
    }
    tokens_.take();
    return made;
  }
  Part made = node(Form::constant, token.line);
  switch (token.kind) {
    case Token::Kind::name:
      if (any_of(token.text, {"if", "else", "is", "in", "and", "or", "not", "for"})) break;
      tokens_.take();
      if (any_of(token.text, {"true", "True", "false", "False"})) {
        made->constant = Value::boolean(token.text[0] == 't' || token.text[0] == 'T');
      } else if (token.text != "none" && token.text != "None") {
        if (token.text == "self" || token.text == "caller" || token.text == "varargs" ||
            token.text == "kwargs" || token.text == "super" || token.text.starts_with("__")) {
          refuse(fmt::format("the name '{}' is not supported", token.text), token.line);
        }
        made->kind = Form::name;
        made->text = token.text;
      }
      return made;
    case Token::Kind::text: {
      std::string text;
      while (tokens_.now().kind == Token::Kind::text) text += tokens_.take().text;
      made->constant = Value::text(std::move(text));
      return made;
    }
    case Token::Kind::integer: {
      std::int64_t number = 0;
      std::from_chars(token.text.data(), token.text.data() + token.text.size(), number);
      made->constant = Value::integer(number);
      tokens_.take();
      return made;
    }
    case Token::Kind::number: {
      double number = 0;
      std::from_chars(token.text.data(), token.text.data() + token.text.size(), number);
      made->constant = Value::number(number);
      tokens_.take();
      return made;
    }
    default:
      break;
  }
  tokens_.refuse_token("a value");
}

Part ExpressionParser::parentheses() {
  const int line = tokens_.take().line;
  if (tokens_.skip_sign(")")) return node(Form::tuple, line);
  Part first = expression();
  if (!tokens_.is_sign(",")) {
    tokens_.expect_sign(")");
    return first;
  }
  Part made = node(Form::tuple, line);
  add(made, std::move(first));
  while (tokens_.skip_sign(",")) {
    if (!tokens_.is_sign(")")) add(made, expression());
  }
  tokens_.expect_sign(")");
  return made;
}

Part ExpressionParser::map() {
  Part made = node(Form::map, tokens_.take().line);
  while (!tokens_.is_sign("}")) {
    if (!made->parts.empty()) tokens_.expect_sign(",");
    if (tokens_.is_sign("}")) break;
    add(made, expression());
    tokens_.expect_sign(":");
    add(made, expression());
  }
  tokens_.take();
  return made;
}

/// Attributes, subscripts and calls.
Part ExpressionParser::behind(Part value) {
  for (;;) {
    if (tokens_.is_sign(".") || tokens_.is_sign("[")) {
      value = subscript(std::move(value));
    } else if (tokens_.is_sign("(")) {
      value = call(std::move(value));
    } else {
      return value;
    }
  }
}

Part ExpressionParser::filters(Part value) {
  for (;;) {
    if (tokens_.is_sign("|")) {
      value = filter(std::move(value));
    } else if (tokens_.is_name("is")) {
      value = test(std::move(value));
    } else if (tokens_.is_sign("(")) {
      value = call(std::move(value));
    } else {
      return value;
    }
  }
}

Part ExpressionParser::subscript(Part value) {
  const Token open = tokens_.take();
  if (open.text == ".") {
    if (tokens_.now().kind == Token::Kind::integer) {
      Part made = node(Form::item, open.line);
      add(made, std::move(value));
      add(made, primary());
      return made;
    }
    Part made = node(Form::attribute, open.line, tokens_.name("the name of an attribute"));
    if (made->text.starts_with("__")) {
      refuse(fmt::format("the attribute '{}' is not supported", made->text), open.line);
    }
    add(made, std::move(value));
    return made;
  }
  std::array<Part, 3> limits;
  std::size_t count = 0;
  for (;; ++count) {
    if (!tokens_.is_sign(":") && !tokens_.is_sign("]")) limits[count] = expression();
    if (count == 2 || !tokens_.skip_sign(":")) break;
  }
  if (tokens_.is_sign(",")) refuse("several subscripts in one bracket are not supported", open.line);
  if (count == 0 && limits[0] == nullptr) tokens_.refuse_token("a subscript");
  tokens_.expect_sign("]");
  Part made = node(count == 0 ? Form::item : Form::slice, open.line);
  add(made, std::move(value));
  add(made, std::move(limits[0]));
  for (std::size_t i = 1; count > 0 && i < limits.size(); ++i) add(made, std::move(limits[i]));
  return made;
}

Part ExpressionParser::filter(Part value) {
  tokens_.take();
  const int line = tokens_.now().line;
  Part made = node(Form::filter, line, tokens_.name("the name of a filter"));
  require_filter(made->text, line);
  add(made, std::move(value));
  if (tokens_.is_sign("(")) arguments(made);
  return made;
}

Part ExpressionParser::test(Part value) {
  const int line = tokens_.take().line;
  const bool negated = tokens_.skip_name("not");
  Part made = node(Form::test, line, tokens_.name("the name of a test"));
  require_test(made->text, line);
  add(made, std::move(value));
  const Token& next = tokens_.now();
  if (tokens_.is_sign("(")) {
    arguments(made);
  } else if (next.kind == Token::Kind::text || next.kind == Token::Kind::integer ||
             next.kind == Token::Kind::number || tokens_.is_sign("[") || tokens_.is_sign("{") ||
             (next.kind == Token::Kind::name && !any_of(next.text, {"else", "or", "and"}))) {
    add(made, behind(primary()));
  }
  if (!made->keywords.empty()) refuse(fmt::format("the test '{}' has no named arguments", made->text), line);
  if (!negated) return made;
  Part inverse = node(Form::negation, line);
  add(inverse, std::move(made));
  return inverse;
}

Part ExpressionParser::call(Part value) {
  const int line = tokens_.now().line;
  if (value->kind == Form::name) {
    called_.emplace_back(value->text, line);
  } else if (value->kind == Form::attribute) {
    require_method(value->text, line);
  } else {
    refuse("a call of a value that is neither a name nor a method is not supported", line);
  }
  Part made = node(Form::call, line);
  add(made, std::move(value));
  arguments(made);
  return made;
}

void ExpressionParser::arguments(Part& to) {
  tokens_.take();
  bool first = true;
  while (!tokens_.is_sign(")")) {
    if (!first) tokens_.expect_sign(",");
    first = false;
    if (tokens_.is_sign(")")) break;
    if (tokens_.is_sign("*") || tokens_.is_sign("**")) {
      refuse("arguments of a list or a dictionary (* and **) are not supported", tokens_.now().line);
    }
    const bool named = tokens_.now().kind == Token::Kind::name &&
                       tokens_.later(1).kind == Token::Kind::sign && tokens_.later(1).text == "=";
    if (!named && !to->keywords.empty()) tokens_.refuse_token("a named argument");
    if (!named) {
      add(to, expression());
      continue;
    }
    std::string name = tokens_.take().text;
    tokens_.take();
    for (const auto& [other, value] : to->keywords) {
      if (other == name) refuse(fmt::format("the argument '{}' is given twice", name), to->line);
    }
    // add() computes the height, so the value is added as a part first.
    add(to, expression());
    to->keywords.emplace_back(std::move(name), std::move(to->parts.back()));
    to->parts.pop_back();
  }
  tokens_.take();
}

}  // namespace tranche::training::jinja
