#!/usr/bin/env python3
"""Writes tests/training/golden_chat_templates.json: small templates and the texts that Jinja2 renders from them, with transformers' settings.

usage: chat_template_goldens.py > tests/training/golden_chat_templates.json

Each case is a template of one construct or two, the variables that it is given, and the text that comes out, or "refused" where
Jinja2 raises an error. test_data holds the reader of templates to them. Needs the Python packages jinja2 and transformers,
installed by hand; the file names their versions.
"""
import json
import sys

MESSAGES = [{"role": "system", "content": " be kind "}, {"role": "user", "content": "Hi é\n"}, {"role": "assistant", "content": "Yes <b>"}]
VALUES = {"list": [3, 1, 2], "texts": ["a", "b", ""], "map": {"b": 1, "A": [1, "x", None, True, 1.5], "keys": "k"}, "n": 7, "x": 2.5,
          "text": "  one two\tthree  ", "quote": "it's \"é\"\n", "yes": True, "nothing": None, "eos_token": "</s>"}
CASES = [
    # Blanks around tags.
    "a\n  {% if yes %}\n  b\n  {% endif %}\nc\n", "a\n  {%- if yes -%}\n  b\n  {%- endif -%}\n c\n", "a {%+ if yes +%}\n b {% endif %} c",
    "  {{ n }}\n  {{- n -}}\n  x", "a\n  {# note #}\nb{#- note -#}\n  c", "{% if yes %}  \n x{% endif %}\n\n", "x\n\n", "x\r\ny\rz\r\n",
    "a\u00a0\n\u3000{% if yes %}b{% endif %}", "{% raw %}{{ a }}{% b %}{% endraw %}\nc", "  {%- raw -%}  {{ x }} {%- endraw %} d", "{{ '}}' ~ \"%}\" }}",
    "{ {% if yes %}{{% endif %}}", "{{ {'a': {'b': 1}}['a']['b'] }}",
    # Values as text.
    "{{ list }} {{ map }} {{ (1,) }} {{ (1, 'a') }} {{ [] }} {{ {} }} {{ nothing }} {{ yes }} {{ x }} {{ 100.0 * 1.0 }}",
    "{{ [quote, \"it's\", 'a\\\\b', '\\x01\\u200b\\u00e9\\U0001f642'] }}", "{{ 1.0 }} {{ 0.1 + 0.2 }} {{ 1 / 3 }} {{ 10.0 * 100000000.0 * 100000000.0 }} {{ 0.00001 * 1.0 }}",
    "{{ 'a' 'b' }} {{ 'tab\\tnew\\n\\'quote\\' \\q' }}", "{{ undefined_name }}|{{ map.none_such }}|{{ list[9] }}|{{ nothing.x }}|{{ text[99] }}",
    # Operators.
    "{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 * 3 + 1 }} {{ 2 ~ 3 * 4 }} {{ -n }} {{ +n }} {{ 'ab' * 2 }} {{ 2 * 'ab' }}",
    "{{ 1 < 2 < 3 }} {{ 1 < 2 > 5 }} {{ 'a' < 'b' }} {{ 1 == 1.0 }} {{ true == 1 }} {{ '1' == 1 }} {{ [1] == [1.0] }} {{ none == nothing }} {{ u == v }} {{ u != 1 }}",
    "{{ 'a' in 'cab' }} {{ 3 in list }} {{ 'b' in map }} {{ 'z' not in map }} {{ 1 in u }} {{ not yes }} {{ not not yes }}",
    "{{ yes and 'x' }} {{ '' or 'y' }} {{ nothing or 0 }} {{ 0 and u.x }} {{ 'a' if n > 5 else 'b' }} {{ 'a' if n > 9 }}|{{ 1 if false else 2 if false else 3 }}",
    "{{ [1] + [2] }} {{ (1,) + (2,) }} {{ 'a' + 'b' ~ 1 + 'c' }} {{ 'x' ~ none ~ true ~ 1.5 }}", "{{ 'a' + 1 }}", "{{ u + 'a' }}", "{{ u.x.y }}", "{{ 1 // 0 }}", "{{ none + 1 }}",
    "{{ list < 3 }}", "{{ 'a' - 'b' }}", "{{ -'a' }}",
    # Subscripts.
    "{{ list[0] }} {{ list[-1] }} {{ list.1 }} {{ text[2] }} {{ text[-3] }} {{ quote[6] }} {{ map['keys'] }} {{ map['A'][1] }} {{ map.A.1 }} {{ list[true] }}",
    "{{ list[1:] }} {{ list[:-1] }} {{ list[::-1] }} {{ list[::2] }} {{ list[5:] }} {{ list[-9:2] }} {{ text[2:5] }}|{{ quote[::-1] }}|{{ list[2:0:-1] }} {{ list[-1:-9:-2] }}",
    "{{ list[::0] }}", "{{ u[1:] }}", "{{ map[1:] }}", "{{ map[0] }}|{{ list['a'] }}|{{ text['a'] }}|",
    # Loops.
    "{% for i in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}",
    "{% for k, v in map.items() %}{{ k }}={{ v }},{% endfor %}{% for k in map %}{{ k }}{% endfor %}{% for c in 'aé' %}[{{ c }}]{% endfor %}",
    "{% for i in list if i > 1 %}{{ i }}{{ loop.last }}{% else %}none{% endfor %}{% for i in [] %}x{% else %}none{% endfor %}{% for i in u %}x{% else %}empty{% endfor %}",
    "{% for i in list %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% set x = 1 %}{% for i in list %}{% set x = i %}{{ x }}{% endfor %}{{ x }}{% if yes %}{% set x = 9 %}{% endif %}{{ x }}",
    "{% set ns = namespace(a=1, b='z') %}{% for i in list %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns.c }}",
    "{% for a in list %}{% for b in 'xy' %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}", "{% for a, b in list %}{% endfor %}", "{% for a in n %}{% endfor %}",
    "{% for i in range(3) %}{{ i }}{% endfor %}{{ range(1, 9, 3)|list }}{{ range(3, 0, -1)|list }}{{ range(0)|length }}",
    # Sets and macros.
    "{% set a, b = (1, 2) %}{{ b }}{{ a }}{% set t %}x{{ n }}\n{% endset %}[{{ t }}]{% set t = 'q' %}{{ t }}",
    "{% macro f(a, b='z') %}<{{ a }}{{ b }}{{ c }}{{ n }}>{% endmacro %}{{ f(1) }}{{ f(1, 2) }}{{ f(b=3, a=4) }}{{ f() }}{% set c = 5 %}{{ f(6)|length }}",
    "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}", "{% set n.x = 1 %}", "{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}",
    # Filters.
    "[{{ text|trim }}][{{ 'xxaxx'|trim('x') }}][{{ n|trim }}]{{ list|length }}{{ quote|length }}{{ map|count }}{{ u|length }}", "{{ n|length }}", "{{ [1]|map('string')|length }}",
    "{{ list|join('-') }} {{ list|join }} {{ messages|join(', ', attribute='role') }} {{ 'abc'|join('.') }} {{ messages|map(attribute='role')|join(' ') }}",
    "{{ u|default('d') }} {{ ''|default('d') }} {{ ''|default('d', true) }} {{ nothing|d('d') }} {{ nothing|d('d', boolean=true) }} {{ u|default }}",
    "{{ map|tojson }} {{ quote|tojson }} {{ [1, 2.0, none, false]|tojson }} {{ '<é\\x01\\x7f>'|tojson }} {{ 'é🙂'|tojson(ensure_ascii=true) }}",
    "{{ map|tojson(indent=2) }} {{ []|tojson(indent=2) }} {{ {}|tojson(indent=1) }} {{ map|tojson(separators=(',', ':')) }} {{ map|tojson(sort_keys=true) }}", "{{ u|tojson }}",
    "{{ map|items|list }} {{ map|dictsort }} {{ map.keys()|list }} {{ map.values()|list }} {{ u|items|list }}", "{{ list|items|list }}",
    "{{ 'aBc é'|string }} {{ 'aBc'|upper }} {{ 'aBc'|lower }} {{ 'hello World'|capitalize }} {{ 'a-b-a'|replace('a', 'x') }} {{ 'a-b-a'|replace('a', 'x', 1) }}",
    "{{ list|first }}{{ list|last }}{{ [] |first }}{{ 'abc'|first }} {{ list|reverse|list }} {{ 'abc'|reverse }} {{ 'ab'|list }} {{ '12'|int }} {{ ' 7 '|int + 1 }} {{ 'x'|int }} {{ 2.9|int }} {{ 'x'|int(default=4) }}",
    "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list }} {{ messages|rejectattr('role', 'eq', 'user')|list|length }} {{ messages|selectattr('x')|list }}",
    "{{ [1, 0, 2]|select|list }} {{ [1, 0, 2]|reject('odd')|list }} {{ list|select('gt', 1)|list }} {{ list|map('string')|join('') }} {{ 'yes' if [] |select else 'no' }}",
    "{{ 'a'|safe }}{{ ('a'|safe) ~ '<' }}", "{{ -n|string }} {{ (-n)|string }} {{ 'a' ~ ' b '|trim ~ 'c' }}",
    # Tests.
    "{{ u is defined }} {{ n is defined }} {{ u is undefined }} {{ nothing is none }} {{ u is none }} {{ n is not none }} {{ yes is true }} {{ 1 is true }} {{ false is false }}",
    "{{ 'a' is string }} {{ map is mapping }} {{ list is mapping }} {{ list is iterable }} {{ 'a' is iterable }} {{ n is iterable }} {{ u is iterable }} {{ map is iterable }}",
    "{{ list is sequence }} {{ map is sequence }} {{ n is sequence }} {{ nothing is iterable }} {{ n is number }} {{ yes is number }} {{ yes is integer }} {{ x is float }} {{ yes is boolean }}",
    "{{ 3 is odd }} {{ 3 is even }} {{ 9 is divisibleby 3 }} {{ 1 is eq 1 }} {{ 1 is in list }} {{ 'a' is lower }} {{ 'A1' is upper }} {{ nothing is sameas none }} {{ 2 is ge 2 }} {{ not n is string }}",
    # Methods.
    "[{{ text.strip() }}][{{ text.lstrip() }}][{{ text.rstrip() }}][{{ 'xyax'.strip('xy') }}][{{ '\\na\\n'.strip('\\n') }}] {{ 'abc'.startswith('ab') }} {{ 'abc'.endswith(('x', 'bc')) }}",
    "{{ text.split() }} {{ 'a,b,c'.split(',') }} {{ 'a,b,c'.split(',', 1) }} {{ 'a</t>b'.split('</t>')[-1] }} {{ 'a,b,c'.rsplit(',', 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ ' a b c '.split(none, 1) }}",
    "{{ 'abA'.upper() }}{{ 'ABa'.lower() }} {{ \"they're bill's\".title() }} {{ 'aBC d'.capitalize() }} {{ 'aXbX'.replace('X', '') }} {{ '-'.join(['a', 'b']) }} {{ 'héllo'.find('l') }} {{ 'abc'.find('z') }} {{ 'aaa'.count('a') }} {{ '12'.isdigit() }}",
    "{{ map.get('b') }} {{ map.get('z') }} {{ map.get('z', 'd') }} {{ map['b'] }}", "{{ ''.split('') }}", "{{ u.strip() }}", "{{ n.strip() }}", "{{ list.append(1) }}",
    # transformers' functions.
    "{{ raise_exception('no: ' ~ n) }}", "{% if u %}{{ raise_exception('no') }}{% endif %}fine", "{{ dict(a=1, b='x') }}", "{{ u() }}", "{{ n() }}",
    # Conversations.
    "{{ bos }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{{ message.content|trim }}{{ eos_token if message.role == 'assistant' }}\n{% endfor %}",
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}{% set rest = messages[1:] if system else messages %}{{ system }}{% for m in rest %}{{ loop.index }}{{ m.role }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    # Each of these cases found a fault in a reader of templates that was wrong in one place.
    "{% for i in list if i > 5 %}x{% else %}none{% endfor %}", "{{ 3 > 1 < 2 }} {{ 1 < 3 > 2 }} {{ 1 == 1 != 2 }}",
    "{% macro f(a, b=a) %}<{{ a }}{{ b }}>{% endmacro %}{{ f(1) }}", "{% for a, b in [[1, 2, 3]] %}{% endfor %}", "{% set a, b = (1, 2, 3) %}",
    "{{ {'a': 1, 'b': 2, 'a': 3} }}", "{% if n > 9 %}a{% elif n > 8 %}b{% else %}c{% endif %}",
    "{% for i in list %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}{% for i in 'ab' %}{% for j in 'xyz' %}{% if j == 'y' %}{% break %}{% endif %}{{ i }}{{ j }}{% endfor %}{% endfor %}",
    "{{ 7 // -2 }} {{ 7 % -2 }} {{ -7 // -2 }} {{ -7 % -2 }} {{ 6 // -2 }} {{ 6 % -2 }}", "{% set m = {'a': none} %}{{ 'a' in m }} {{ m.get('a', 'd') }} {{ m.a is defined }}",
    "{{ 2 <= 2 }} {{ 2 >= 2 }} {{ 1 <= 2 }} {{ 3 <= 2 }} {{ 'a' < 'ab' }} {{ 'ab' < 'a' }} {{ 'ab' <= 'ab' }}",
    "{{ 'a,b,'.split(',') }} {{ ',a'.split(',') }} {{ 'a,,b'.split(',') }} {{ 'a-b'.replace('-', '+', 0) }} {{ 'xab'.startswith('ab') }} {{ 'abx'.endswith('ab') }}",
    "{{ ['', 'a', '', 'b']|join('-') }}", "{{ [[1, 2], [3, 4]]|map(attribute='1')|list }} {{ messages|map(attribute='content.0')|list }}",
    "{{ {'b': 1, 'C': 2, 'a': 3}|dictsort }}", "{{ '12' is upper }} {{ '12' is lower }} {{ 'aB' is upper }}",
    "{{ 'yes' if 0.0 else 'no' }} {{ 'yes' if {} else 'no' }} {{ 'yes' if {'a': 0} else 'no' }} {{ 'yes' if '0' else 'no' }} {{ 'yes' if 0.5 else 'no' }} {{ 'yes' if () else 'no' }}",
    "{{ {'a': 1} == {'a': 2} }} {{ {'a': 1, 'b': 2} == {'b': 2, 'a': 1} }} {{ [1, 2] == [1, 3] }} {{ (1, 2) == (1, 2) }} {{ [1] == (1,) }} {{ [[1]] != [[1]] }}",
    "{{ 1 if false else 2 if true else 3 }} {{ 1 if true else 2 if false else 3 }} {{ 1 if false else (2 if false else 3) }} {{ (1 if true else 2) if false else 4 if false else 5 }}",
]


def main():
    try:
        import jinja2
        import transformers
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError as problem:
        print(f"chat_template_goldens: {problem}; install jinja2 and transformers in an environment outside of the repository", file=sys.stderr)
        return 2
    cases = []
    for template in CASES:
        try:
            cases.append({"template": template, "text": _compile_jinja_template(template).render(messages=MESSAGES, **VALUES)})
        except Exception as error:  # Python's own errors too
            cases.append({"template": template, "refused": f"{type(error).__name__}: {error}"})
    lines = ",\n".join("    " + json.dumps(case, ensure_ascii=False) for case in cases)
    print(f'{{\n  "by": "jinja2 {jinja2.__version__}, transformers {transformers.__version__}",\n  "values": '
          f'{json.dumps({"messages": MESSAGES, **VALUES}, ensure_ascii=False)},\n  "cases": [\n{lines}\n  ]\n}}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
