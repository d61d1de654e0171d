#include "tools/shell/man_page.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <sstream>

#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

/// Text as roff prints it literally: a hyphen of roff would not be the one that a shell reads.
std::string literal(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '\\') {
      escaped += "\\e";
    } else if (c == '-') {
      escaped += "\\-";
    } else {
      escaped += c;
    }
  }
  // A line that begins with one of these would be a request.
  return escaped.starts_with('.') || escaped.starts_with('\'') ? "\\&" + escaped : escaped;
}

std::string upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::toupper(c); });
  return text;
}

std::string page_name(const DescribedCommand& command) {
  std::string name = command.name;
  std::replace(name.begin(), name.end(), ' ', '-');
  return name;
}

void add_option(std::string& page, const DescribedOption& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.names)
    names.push_back(fmt::format("\\f{}{}\\fR", option.argument ? 'I' : 'B', literal(name)));
  page += fmt::format(".TP\n{}", fmt::join(names, ", "));
  if (!option.type.empty() && !option.argument) page += fmt::format(" \\fI{}\\fR", literal(option.type));
  page += "\n" + literal(option.text + (option.required && !option.argument ? " (required)" : "")) + "\n";
}

void add_synopsis(std::string& page, const DescribedCommand& command) {
  page += fmt::format("\\fB{}\\fR [\\fIOPTION\\fR]...", literal(command.name));
  for (const DescribedOption& option : command.options) {
    if (option.argument)
      page += fmt::format(" {}\\fI{}\\fR{}", option.required ? "" : "[", literal(option.names[0]),
                          option.required ? "" : "]");
    if (option.required && !option.argument)
      page += fmt::format(" \\fB{}\\fR \\fI{}\\fR", literal(option.names.back()), literal(option.type));
  }
  page += "\n";
}

/// Adds the options in their groups, in the order in which the groups begin.
void add_options(std::string& page, const DescribedCommand& command) {
  std::vector<std::string> groups;
  for (const DescribedOption& option : command.options) {
    if (!option.argument && std::find(groups.begin(), groups.end(), option.group) == groups.end())
      groups.push_back(option.group);
  }
  for (const DescribedOption& option : command.options) {
    if (option.argument) add_option(page, option);
  }
  for (const std::string& group : groups) {
    if (groups.size() > 1) page += fmt::format(".SS {}\n", literal(group));
    for (const DescribedOption& option : command.options) {
      if (!option.argument && option.group == group) add_option(page, option);
    }
  }
}

/// Adds the text behind the options. A line that ends with a colon is a heading, and indented lines are
/// printed as they are.
void add_footer(std::string& page, const std::string& footer, const char* heading) {
  std::istringstream lines(footer);
  bool verbatim = false, below_heading = false;
  for (std::string line; std::getline(lines, line);) {
    const bool indented = line.starts_with(' ');
    if (verbatim && !indented) page += ".EE\n";
    if (line.ends_with(':') && !indented) {
      page += fmt::format("{} {}\n", heading, literal(upper(line.substr(0, line.size() - 1))));
      below_heading = true;
    } else if (indented) {
      if (!verbatim) page += ".EX\n";
      page += literal(line) + "\n";
    } else if (!line.empty()) {
      page += (below_heading ? ".PP\n" : fmt::format("{} NOTES\n", heading)) + literal(line) + "\n";
      below_heading = true;
    }
    verbatim = indented;
  }
  if (verbatim) page += ".EE\n";
}

}  // namespace

std::vector<std::string> man_page_names(const DescribedCommand& program) {
  std::vector<std::string> names{page_name(program)};
  for (const DescribedCommand& command : program.commands) names.push_back(page_name(command));
  return names;
}

std::string man_page(const DescribedCommand& program, const std::string& name, const std::string& version) {
  const std::vector<std::string> names = man_page_names(program);
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) {
    throw ConfigurationError(
        fmt::format("'{}' is no manual page; there are {}", name, fmt::join(names, ", ")));
  }
  const bool whole = found == names.begin();
  const DescribedCommand& command =
      whole ? program : program.commands[static_cast<std::size_t>(found - names.begin()) - 1];
  std::string page =
      fmt::format(".TH {} 1 \"\" \"{} {}\"\n.nh\n.SH NAME\n{} \\- {}\n.SH SYNOPSIS\n", literal(upper(name)),
                  program.name, version, literal(name), literal(command.text));
  if (whole) page += fmt::format("\\fB{}\\fR \\fICOMMAND\\fR [\\fIOPTION\\fR]...\n.br\n", program.name);
  if (command.commands.empty() || !command.options.empty()) add_synopsis(page, command);
  for (const DescribedCommand& below : command.commands) {
    if (whole) break;
    page += ".br\n";
    add_synopsis(page, below);
  }
  if (whole) page += ".SH COMMANDS\n";
  for (const DescribedCommand& below : program.commands) {
    if (whole)
      page += fmt::format(".TP\n\\fB{}\\fR(1)\n{}\n", literal(page_name(below)), literal(below.text));
  }
  page += ".SH OPTIONS\n";
  add_options(page, command);
  for (const DescribedCommand& below : command.commands) {
    if (whole) break;
    page += fmt::format(".SH {}\n{}\n", literal(upper(below.name)), literal(below.text));
    add_options(page, below);
    add_footer(page, below.footer, ".SS");
  }
  add_footer(page, command.footer, ".SH");
  std::vector<std::string> others;
  for (const std::string& other : names) {
    if (other != name) others.push_back(fmt::format("\\fB{}\\fR(1)", literal(other)));
  }
  return page + fmt::format(".SH SEE ALSO\n{}\n", fmt::join(others, ", "));
}

}  // namespace tranche::tools
