#include "training/chat_template/parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "training/chat_template/builtins.h"

namespace tranche::training::jinja {

namespace {

using Task = Statement::Kind;

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(tokens_of(source)), expressions_(tokens_) {}

  Block run() {
    Block block = statements({});
    for (const auto& [name, line] : expressions_.called()) {
      if (!is_function(name) && !macros_.contains(name)) {
        refuse(fmt::format("the function '{}' is not known", name), line);
      }
    }
    return block;
  }

 private:
  /// Parses up to a block with one of these names, which is then the next token.
  Block statements(std::initializer_list<std::string_view> ends) {
    Block block;
    if (++open_ > most_nested) {
      refuse(fmt::format("blocks are nested deeper than {}", most_nested), tokens_.now().line);
    }
    for (;;) {
      const Token token = tokens_.now();
      if (token.kind == Token::Kind::end) {
        if (ends.size() > 0) tokens_.refuse_token(fmt::format("a block '{}'", *(ends.end() - 1)));
        break;
      }
      tokens_.take();
      if (token.kind == Token::Kind::data) {
        Statement text;
        text.line = token.line;
        text.text = token.text;
        block.push_back(std::move(text));
      } else if (token.kind == Token::Kind::output_begin) {
        Statement output;
        output.kind = Task::output;
        output.line = token.line;
        output.parts.push_back(expressions_.expression());
        if (tokens_.is_sign(",")) refuse("several values in one {{ }} are not supported", token.line);
        tokens_.expect(Token::Kind::output_end, "'}}'");
        block.push_back(std::move(output));
      } else {
        const std::string name = tokens_.name("the name of a block");
        if (std::find(ends.begin(), ends.end(), name) != ends.end()) {
          end_ = name;
          break;
        }
        block.push_back(statement(name, token.line));
      }
    }
    --open_;
    return block;
  }

  /// Reads the end of a block's tag.
  void close() { tokens_.expect(Token::Kind::block_end, "'%}'"); }
  /// Parses the text between this tag and the next one with one of these names.
  Block body(std::initializer_list<std::string_view> ends) {
    close();
    return statements(ends);
  }

  Statement statement(const std::string& name, int line) {
    Statement made;
    made.line = line;
    if (name == "if") {
      branches(made);
    } else if (name == "for") {
      loop(made);
    } else if (name == "set") {
      assignment(made);
    } else if (name == "macro") {
      macro(made);
    } else if (name == "generation") {
      made.kind = Task::generation;
      made.blocks.push_back(body({"endgeneration"}));
      close();
    } else if (name == "break" || name == "continue") {
      if (loops_ == 0) refuse(fmt::format("the block '{}' stands outside of a loop", name), line);
      made.kind = name == "break" ? Task::stop : Task::next;
      close();
    } else {
      const bool known = name == "include" || name == "import" || name == "from" || name == "extends" ||
                         name == "block" || name == "call" || name == "filter" || name == "with" ||
                         name == "autoescape" || name == "print";
      refuse(
          fmt::format("the block '{}' {}", name, known ? "is not supported" : "is not known or stands alone"),
          line);
    }
    return made;
  }

  void branches(Statement& made) {
    made.kind = Task::branches;
    made.parts.push_back(expressions_.expression());
    made.blocks.push_back(body({"elif", "else", "endif"}));
    while (end_ == "elif") {
      made.parts.push_back(expressions_.expression());
      made.blocks.push_back(body({"elif", "else", "endif"}));
    }
    if (end_ == "else") made.blocks.push_back(body({"endif"}));
    close();
  }

  std::vector<std::string> names() {
    std::vector<std::string> names;
    const bool bracket = tokens_.skip_sign("(");
    do {
      const int line = tokens_.now().line;
      names.push_back(tokens_.name("a name that is set"));
      if (std::set<std::string>{"true", "false", "none", "True", "False", "None", "loop", "not"}.contains(
              names.back()))
        refuse(fmt::format("'{}' cannot be set", names.back()), line);
    } while (tokens_.skip_sign(","));
    if (bracket) tokens_.expect_sign(")");
    return names;
  }

  void loop(Statement& made) {
    made.kind = Task::loop;
    made.names = names();
    if (!tokens_.skip_name("in")) tokens_.refuse_token("'in'");
    made.parts.push_back(expressions_.without_condition());
    if (tokens_.is_name("recursive")) refuse("a recursive loop is not supported", made.line);
    made.parts.push_back(tokens_.skip_name("if") ? expressions_.expression() : nullptr);
    if (tokens_.is_name("recursive")) refuse("a recursive loop is not supported", made.line);
    ++loops_;
    made.blocks.push_back(body({"else", "endfor"}));
    --loops_;
    if (end_ == "else") made.blocks.push_back(body({"endfor"}));
    close();
  }

  void assignment(Statement& made) {
    made.names = names();
    if (tokens_.skip_sign(".")) {
      if (made.names.size() > 1) refuse("several values that are set at once, one of a namespace", made.line);
      made.attribute = tokens_.name("the name of a namespace's value");
      if (made.attribute.starts_with("_"))
        refuse(fmt::format("a namespace's value '{}' begins with _", made.attribute), made.line);
    }
    if (tokens_.skip_sign("=")) {
      made.kind = Task::assignment;
      made.parts.push_back(expressions_.expression());
      if (tokens_.is_sign(",")) refuse("a tuple without brackets is not supported", made.line);
    } else {
      made.kind = Task::capture;
      if (tokens_.is_sign("|")) refuse("the block 'set' with a filter is not supported", made.line);
      if (made.names.size() > 1) refuse("the block 'set' with several names is not supported", made.line);
      made.blocks.push_back(body({"endset"}));
    }
    close();
  }

  void macro(Statement& made) {
    // In other places Jinja would let it see the names of its surroundings.
    if (loops_ > 0 || macros_open_ > 0) {
      refuse("a macro inside of a loop or of another macro is not supported", made.line);
    }
    made.kind = Task::macro;
    made.text = tokens_.name("the name of a macro");
    macros_.insert(made.text);
    tokens_.expect_sign("(");
    while (!tokens_.is_sign(")")) {
      if (!made.names.empty()) tokens_.expect_sign(",");
      made.names.push_back(tokens_.name("the name of an argument"));
      if (tokens_.skip_sign("=")) {
        made.parts.push_back(expressions_.expression());
      } else if (!made.parts.empty()) {
        refuse(fmt::format("the argument '{}' without a default stands behind one that has it",
                           made.names.back()),
               made.line);
      }
    }
    tokens_.take();
    ++macros_open_;
    made.blocks.push_back(body({"endmacro"}));
    --macros_open_;
    close();
  }

  TokenReader tokens_;
  ExpressionParser expressions_;
  std::string end_;  ///< name of the block that ended statements()
  int open_ = 0, loops_ = 0, macros_open_ = 0;
  std::set<std::string> macros_;
};

}  // namespace

Block parse(std::string_view source) {
  return Parser(source).run();
}

}  // namespace tranche::training::jinja
