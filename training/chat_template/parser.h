#pragma once
/// The classes of the parser; its interface is parse() in syntax.h.

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "training/chat_template/lexer.h"
#include "training/chat_template/syntax.h"

namespace tranche::training::jinja {

/// Tokens one after the other.
class TokenReader {
 public:
  explicit TokenReader(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}
  const Token& now() const { return tokens_[at_]; }
  const Token& later(std::size_t count) const { return tokens_[std::min(at_ + count, tokens_.size() - 1)]; }
  Token take() { return at_ + 1 < tokens_.size() ? tokens_[at_++] : tokens_.back(); }
  bool is_sign(std::string_view text) const { return now().kind == Token::Kind::sign && now().text == text; }
  bool is_name(std::string_view text) const { return now().kind == Token::Kind::name && now().text == text; }
  bool skip_sign(std::string_view text);
  bool skip_name(std::string_view text);
  void expect_sign(std::string_view text);
  void expect(Token::Kind kind, std::string_view what);
  /// Reads a required name: `what` describes it in errors.
  std::string name(std::string_view what);
  /// Throws that `what` was expected in place of the next token.
  [[noreturn]] void refuse_token(std::string_view what) const;

 private:
  std::vector<Token> tokens_;
  std::size_t at_ = 0;
};

class ExpressionParser {
 public:
  explicit ExpressionParser(TokenReader& tokens) : tokens_(tokens) {}
  Part expression();
  /// Parses an expression without `if`, which would begin a condition of the statement.
  Part without_condition();
  /// The names in `name(` with their lines, for all calls of a name.
  const std::vector<std::pair<std::string, int>>& called() const { return called_; }

 private:
  /// Counts nested constructs.
  struct Deeper {
    explicit Deeper(ExpressionParser& parser);
    ~Deeper();
    ExpressionParser& parser;
  };
  Part node(Expression::Kind kind, int line, std::string text = "") const;
  void add(Part& to, Part part) const;
  Part either();
  Part both();
  Part negation();
  Part comparison();
  Part sum();
  Part joined();
  Part product();
  Part power();
  Part unary(bool with_filters);
  Part primary();
  Part behind(Part value);
  Part filters(Part value);
  Part subscript(Part value);
  Part parentheses();
  Part map();
  Part filter(Part value);
  Part test(Part value);
  Part call(Part value);
  void arguments(Part& to);
  TokenReader& tokens_;
  int open_ = 0;
  std::vector<std::pair<std::string, int>> called_;
};

}  // namespace tranche::training::jinja
