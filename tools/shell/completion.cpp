#include "tools/shell/completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

std::string replaced(const std::string& text, char found, const char* by) {
  std::string result;
  for (const char c : text) result += c == found ? std::string(by) : std::string(1, c);
  return result;
}

/// A word of bash and zsh that stands for exactly this text.
std::string shell_quoted(const std::string& text) {
  return "'" + replaced(text, '\'', "'\\''") + "'";
}

std::string fish_quoted(const std::string& text) {
  return "'" + replaced(replaced(text, '\\', "\\\\"), '\'', "\\'") + "'";
}

/// The different values of a program, in the order in which options have them. Shells get a function for
/// each, by its position.
class DifferentValues {
 public:
  explicit DifferentValues(const DescribedCommand& program) {
    for (const DescribedCommand* command : all_commands(program)) {
      for (const DescribedOption& option : command->options) {
        if (!option.values.empty() && position(option.values) == all_.size()) all_.push_back(option.values);
      }
    }
  }
  std::size_t position(const ProposedValues& values) const {
    return static_cast<std::size_t>(std::find(all_.begin(), all_.end(), values) - all_.begin());
  }
  const std::vector<ProposedValues>& all() const { return all_; }

 private:
  std::vector<ProposedValues> all_;
};

/// "train" and "checkpoint list": names without the program's own.
std::string path_of(const DescribedCommand& program, const DescribedCommand& command) {
  return &command == &program ? "" : command.name.substr(program.name.size() + 1);
}

const DescribedOption* argument_of(const DescribedCommand& command) {
  const auto found =
      std::find_if(command.options.begin(), command.options.end(),
                   [](const DescribedOption& option) { return option.argument && !option.values.empty(); });
  return found == command.options.end() ? nullptr : &*found;
}

std::string beginning(const DescribedCommand& program, const char* shell) {
  return fmt::format("# Completion of {0} for {1}, printed by `{0} completion {1}`.\n", program.name, shell);
}

// bash

constexpr const char* bash_functions = R"(
# Adds the proposals for $current, behind $before: words, and files or folders.
_tranche_propose() {
  local kinds=$1 stem="" end=$current word
  shift
  if [[ $kinds == *list* && $current == *[,\;]* ]]; then
    end=${current##*[,;]}
    stem=${current%"$end"}
    [[ $end != ' '* ]] || { end=${end# }; stem+=' '; }
  fi
  for word in "$@"; do
    [[ $word != "$end"* ]] || COMPREPLY+=("$before$stem$word")
  done
  case $kinds in
    *files*) kinds=-f ;;
    *folders*) kinds=-d ;;
    *) kinds="" ;;
  esac
  if [[ -n $kinds ]]; then
    compopt -o filenames 2> /dev/null
    while IFS= read -r word; do COMPREPLY+=("$before$stem$word"); done < <(compgen "$kinds" -- "$end")
  fi
}
)";

constexpr const char* bash_words = R"(
  # bash splits words at = and :, which this does not; a word in quotes stays one.
  local line=${COMP_LINE:0:COMP_POINT} raw=${COMP_WORDS[COMP_CWORD]} current before="" previous
  local -a words
  COMPREPLY=()
  if [[ $raw == [\'\"]* ]]; then
    read -ra words <<< "${line%"$raw"}"
    current=${raw:1}
  else
    read -ra words <<< "$line"
    current=""
    [[ $line == *[[:space:]] ]] || { current=${words[${#words[@]} - 1]}; unset "words[${#words[@]} - 1]"; }
  fi
  previous=${words[${#words[@]} - 1]}
  if [[ $current == --*=* ]]; then
    previous=${current%%=*}
    before=$previous=
    current=${current#*=}
  fi
  local command=tranche at
  for ((at = 1; at < ${#words[@]}; ++at)); do
    case "$command ${words[at]}" in
)";

constexpr const char* bash_end = R"(
  # What stands before the last = or : is another word of bash's.
  local typed=$before$current cut=""
  if [[ $raw != [\'\"]* && $typed == *[=:]* ]]; then cut=${typed%"${typed##*[=:]}"}; fi
  for at in "${!COMPREPLY[@]}"; do COMPREPLY[at]=${COMPREPLY[at]#"$cut"}; done
  if [[ ${#COMPREPLY[@]} -gt 0 && ${COMPREPLY[0]} == *= ]]; then compopt -o nospace 2> /dev/null; fi
}
complete -F _tranche tranche
)";

std::string bash_proposal(const ProposedValues& values) {
  std::string call =
      fmt::format("_tranche_propose '{}{}{}'", values.list ? "list " : "", values.files ? "files" : "",
                  !values.files && values.folders ? "folders" : "");
  for (const std::string& word : values.words) call += " " + shell_quoted(word);
  return call;
}

std::string bash_script(const DescribedCommand& program) {
  const DifferentValues values(program);
  const auto commands = all_commands(program);
  std::string text = beginning(program, "bash") + bash_functions + "_tranche() {" + bash_words;
  std::vector<std::string> names;
  for (const DescribedCommand* command : commands) {
    if (command != &program) names.push_back(shell_quoted(command->name));
  }
  text += fmt::format("      {}) command+=\" ${{words[at]}}\" ;;\n      *) break ;;\n    esac\n  done\n",
                      fmt::join(names, "|"));
  // A flag's value: the flags with equal values in one line, at the end those whose values nobody knows.
  std::vector<std::vector<std::string>> flags(values.all().size() + 1);
  for (const DescribedCommand* command : commands) {
    for (const DescribedOption& option : command->options) {
      if (option.argument || option.type.empty()) continue;
      for (const std::string& name : option.names)
        flags[values.position(option.values)].push_back(shell_quoted(command->name + " " + name));
    }
  }
  text += "  case \"$command $previous\" in\n";
  for (std::size_t i = 0; i < flags.size(); ++i) {
    if (flags[i].empty()) continue;
    text += fmt::format("    {}) {} ;;\n", fmt::join(flags[i], "|"),
                        i < values.all().size() ? bash_proposal(values.all()[i]) : "return");
  }
  text += "    *)\n      case $command in\n";
  for (const DescribedCommand* command : commands) {
    std::string options, others;
    for (const DescribedOption& option : command->options) {
      if (option.argument) continue;
      for (const std::string& name : option.names) options += " " + shell_quoted(name);
    }
    for (const DescribedCommand& below : command->commands) others += " " + shell_quoted(below.last_name());
    if (!others.empty()) others = "_tranche_propose ''" + others + "; ";
    if (const DescribedOption* argument = argument_of(*command))
      others += bash_proposal(argument->values) + "; ";
    text += fmt::format(
        "        {})\n          if [[ $current == -* ]]; then _tranche_propose ''{}; else {}:; fi ;;\n",
        shell_quoted(command->name), options, others);
  }
  return text + "      esac ;;\n  esac" + bash_end;
}

// zsh

constexpr const char* zsh_functions = R"(
# Proposes values: list, files and folders as the first word says, and the words behind it.
_tranche_propose() {
  local kinds=$1 result=1
  shift
  if [[ $kinds == *list* ]]; then compset -P '*[,;]( |)'; fi
  local -a open=(${(M)@:#*=}) whole=(${@:#*=})
  (( ! $#open )) || { compadd -S '' -a open && result=0; }
  (( ! $#whole )) || { compadd -a whole && result=0; }
  case $kinds in
    *files*) _files && result=0 ;;
    *folders*) _files -/ && result=0 ;;
  esac
  return result
}
)";

/// Escapes the characters that have a meaning in a specification of zsh's _arguments.
std::string zsh_text(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

std::string zsh_function(const DescribedCommand& command) {
  std::string name = "_" + command.name;
  std::replace(name.begin(), name.end(), ' ', '_');
  return name == "_tranche" ? "_tranche_commands" : name;
}

std::string zsh_specifications(const DescribedCommand& command, const DifferentValues& values) {
  std::string text;
  for (const DescribedOption& option : command.options) {
    if (option.argument) continue;
    const std::string action =
        option.values.empty() ? " " : fmt::format("_tranche_values_{}", values.position(option.values));
    for (const std::string& name : option.names) {
      const bool long_name = name.starts_with("--");
      std::string specification = (option.repeats ? "*" : "") + name;
      if (!option.type.empty()) specification += long_name ? "=" : "+";
      specification += fmt::format("[{}]", zsh_text(option.text));
      if (!option.type.empty()) specification += fmt::format(":{}:{}", zsh_text(option.type), action);
      text += fmt::format(" \\\n    {}", shell_quoted(specification));
    }
  }
  return text;
}

std::string zsh_command(const DescribedCommand& command, const DifferentValues& values) {
  const std::string specifications = zsh_specifications(command, values);
  const DescribedOption* argument = argument_of(command);
  const std::string proposal =
      argument == nullptr ? "" : fmt::format("_tranche_values_{}", values.position(argument->values));
  const std::string more =
      argument == nullptr ? "" : fmt::format(" \\\n    '*:{}:{}'", zsh_text(argument->names[0]), proposal);
  if (command.commands.empty())
    return fmt::format("{}() {{\n  _arguments -s{}{}\n}}\n", zsh_function(command), specifications, more);
  std::string text = fmt::format(
      "{}() {{\n  local context state line result=1\n  typeset -A opt_args\n"
      "  _arguments -s -C{} \\\n    '1: :->first' '*:: :->rest' && result=0\n  case $state in\n"
      "    first)\n      local -a commands=(",
      zsh_function(command), specifications);
  for (const DescribedCommand& below : command.commands) {
    text += fmt::format("\n        {}", shell_quoted(below.last_name() + ":" + zsh_text(below.text)));
  }
  text += ")\n      _describe command commands && result=0\n";
  if (!proposal.empty()) text += fmt::format("      {} && result=0\n", proposal);
  text += "      ;;\n    rest)\n      case $line[1] in\n";
  for (const DescribedCommand& below : command.commands)
    text += fmt::format("        {}) {} && result=0 ;;\n", below.last_name(), zsh_function(below));
  text += fmt::format("        *) _arguments -s{}{} && result=0 ;;\n", specifications, more);
  return text + "      esac ;;\n  esac\n  return result\n}\n";
}

std::string zsh_script(const DescribedCommand& program) {
  const DifferentValues values(program);
  std::string text = fmt::format("#compdef {}\n", program.name) + beginning(program, "zsh") + zsh_functions;
  for (std::size_t i = 0; i < values.all().size(); ++i) {
    const ProposedValues& one = values.all()[i];
    text += fmt::format("_tranche_values_{}() {{ _tranche_propose '{}{}{}'", i, one.list ? "list " : "",
                        one.files ? "files" : "", !one.files && one.folders ? "folders" : "");
    for (const std::string& word : one.words) text += " " + shell_quoted(word);
    text += " }\n";
  }
  for (const DescribedCommand* command : all_commands(program)) text += zsh_command(*command, values);
  return text + R"(
_tranche() { _tranche_commands "$@" }
if [[ $funcstack[1] == _tranche ]]; then _tranche "$@"; else compdef _tranche tranche; fi
)";
}

// fish

constexpr const char* fish_functions = R"(
# True if the command line has reached this command, and none below it.
function __tranche_at
    set -l words (commandline -opc)
    set -e words[1]
    set -l reached
    for word in $words
        set -l next (string trim -- "$reached $word")
        contains -- $next $__tranche_commands; or break
        set reached $next
    end
    test "$reached" = "$argv[1]"
end
# Proposes words behind the last comma or semicolon of what was typed.
function __tranche_list
    set -l stem (string replace -r -- '^--[^=]*=' '' (commandline -ct) | string replace -r -- '[^,;]*$' '')
    for word in $argv
        echo $stem$word
    end
end
complete -c tranche -f
)";

std::string fish_values(const ProposedValues& values) {
  std::vector<std::string> words;
  for (const std::string& word : values.words) words.push_back(fish_quoted(word));
  std::string text;
  if (values.list && !words.empty()) {
    text += fmt::format("    __tranche_list {}\n", fmt::join(words, " "));
  } else if (!words.empty()) {
    text += fmt::format("    printf '%s\\n' {}\n", fmt::join(words, " "));
  }
  if (!values.files && values.folders) text += "    __fish_complete_directories (commandline -ct)\n";
  return text;
}

std::string fish_script(const DescribedCommand& program) {
  const DifferentValues values(program);
  const auto commands = all_commands(program);
  std::vector<std::string> paths;
  for (const DescribedCommand* command : commands) {
    if (command != &program) paths.push_back(fish_quoted(path_of(program, *command)));
  }
  std::string text = beginning(program, "fish") +
                     fmt::format("set -g __tranche_commands {}\n", fmt::join(paths, " ")) + fish_functions;
  for (std::size_t i = 0; i < values.all().size(); ++i)
    text += fmt::format("function __tranche_values_{}\n{}end\n", i, fish_values(values.all()[i]));
  const auto proposal = [&](const ProposedValues& one) {
    return fmt::format("{} -a '(__tranche_values_{})'", one.files ? "-F" : "-f", values.position(one));
  };
  for (const DescribedCommand* command : commands) {
    const std::string at =
        fmt::format("complete -c tranche -n \"__tranche_at {}\"", fish_quoted(path_of(program, *command)));
    for (const DescribedCommand& below : command->commands) {
      text += fmt::format("{} -a {} -d {}\n", at, fish_quoted(below.last_name()), fish_quoted(below.text));
    }
    if (const DescribedOption* argument = argument_of(*command))
      text += fmt::format("{} {}\n", at, proposal(argument->values));
    for (const DescribedOption& option : command->options) {
      if (option.argument) continue;
      text += at;
      for (const std::string& name : option.names) {
        const bool long_name = name.starts_with("--");
        text += fmt::format(" -{} {}", long_name ? "l" : "s", name.substr(long_name ? 2 : 1));
      }
      if (!option.type.empty())
        text += " -r" + (option.values.empty() ? std::string(" -f") : " " + proposal(option.values));
      text += fmt::format(" -d {}\n", fish_quoted(option.text));
    }
  }
  return text;
}

}  // namespace

std::string completion_script(const DescribedCommand& program, const std::string& shell) {
  if (shell == "bash") return bash_script(program);
  if (shell == "zsh") return zsh_script(program);
  if (shell == "fish") return fish_script(program);
  throw ConfigurationError(fmt::format("there is no completion for '{}', but for bash, zsh and fish", shell));
}

}  // namespace tranche::tools
