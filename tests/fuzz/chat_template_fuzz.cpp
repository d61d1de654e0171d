// Chat templates, and the conversations that they format.

#include <nlohmann/json.hpp>

#include "tests/fuzz/fuzz_target.h"
#include "training/chat_template/template.h"

namespace tranche::fuzz {

namespace {

/// The input is a template, and a conversation as a JSON line.
void read_chat_template(std::string_view input) {
  constexpr const char* plain = R"({"messages": [{"role": "user", "content": " Hi "},
      {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "No", "n": [1, 2.5, {"k": null}]}]})";
  const auto parts = split(input, 2);
  training::ChatFormat chat;
  chat.date = "2026-11-27";
  chat.own =
      training::read_jinja_template(parts[0], "template", R"({"bos_token": "<s>", "eos_token": "</s>"})");
  const std::string_view line = parts[1].empty() ? plain : parts[1];
  const std::string whole = chat.own->render(nlohmann::ordered_json::parse(plain), false, chat.date, "").text;
  const std::string again = chat.own->render(nlohmann::ordered_json::parse(plain), false, chat.date, "").text;
  require(whole == again, "a template writes two texts");
  (void)training::read_json_prompt(line, chat, "line");
  const training::Document document = training::read_json_line(line, chat, "line");
  if (!document.rendered) return;
  std::string text;
  for (const training::Segment& segment : document.segments) text += segment.text;
  const auto conversation = nlohmann::ordered_json::parse(line);
  require(text == chat.own->render(conversation, false, chat.date, "").text,
          "marking what is learned changes a text");
}

std::vector<std::string> chat_template_seeds() {
  const std::string talk =
      R"({"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "Hi é"},)"
      R"({"role": "assistant", "content": "Yes", "weight": 1}], "tools": [{"name": "f"}]})";
  return {
      "{% for m in messages %}{{ m.role ~ ': ' + m['content']|trim }}{{ eos_token if loop.last }}\n{% endfor "
      "%}"
      "{% if add_generation_prompt %}assistant: {% endif %}",
      join({"{%- set ns = namespace(a=true, i=messages|length - 1) %}{%- for m in messages[::-1] %}"
            "{%- if ns.a and m.role == \"user\" and m.content is string and not "
            "(m.content.startswith('<t>')) %}"
            "{%- set ns.a = false %}{%- set ns.i = loop.index0 %}{%- endif %}{%- endfor %}{{ "
            "tools|tojson(indent=2) }}",
            talk}),
      join(
          {"{% macro f(x, y='d') %}[{{ x }}{{ y }}]{% endmacro %}{# note #}{% for k, v in tools[0].items() %}"
           "{{ f(k, v) }}{{ f(k) }}{% else %}none{% endfor %}{{ messages|map(attribute='role')|join(', ') }}",
           talk}),
      join({"{%- for m in messages if m.role != 'system' -%}{% if loop.first %}{% continue %}{% endif %}"
            "{% generation %}{{ m.content.split('e')[-1].lstrip('\\n') }}{% endgeneration %}{% break %}{%- "
            "endfor -%}"
            "{{ strftime_now('%d %b %Y') }}{{ messages|selectattr('role', 'equalto', 'user')|list|length "
            "}}{{ tools }}",
            talk}),
      join({"{% set a, b = (1, [2.5, none]) %}{% set t %}x{{ a // 2 * 3 % 4 }}{% endset %}{{ t[1:] ~ b[0:1] "
            "}}{{ {'a': b} }}"
            "{% raw %}{{ }}{% endraw %}{{ range(3)|list }}{{ u is defined }}{{ tools|length > 0 and 'f' in "
            "tools[0].name }}",
            talk}),
      join({"{% if messages[0].role != 'user' %}{{ raise_exception('Roles ' + 'alternate') }}{% endif %}",
            talk})};
}

}  // namespace

Target chat_template_target() {
  return {"chat_template", read_chat_template, chat_template_seeds, {ExitStatus::configuration}};
}

}  // namespace tranche::fuzz
