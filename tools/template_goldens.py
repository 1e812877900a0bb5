"""Writes goldens of chat templates for spec/lua/text/template_spec.lua: what transformers'
apply_chat_template makes of templates that use all of Jinja that kvlab runs, and of the
forms that the templates of many models have, for twelve chats each.

  pip install transformers==5.23.0 jinja2==3.1.6 tokenizers
  python3 tools/template_goldens.py spec/data/templates.json        the committed ones
  python3 tools/template_goldens.py table.json --folder=DIR         the *.jinja of a folder

The second is for templates that are not ours to commit. A text is null where transformers
refuses. The time is 2026-03-05 14:07:09, so that templates that write it can be compared.
"""
import argparse
import copy
import datetime
import json
import os

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


class Then(datetime.datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 3, 5, 14, 7, 9)


# ---- chats ----------------------------------------------------------------------------

def says(role, content, **more):
    return dict({"role": role, "content": content}, **more)


def calls(arguments, **more):
    function = {"name": "get_weather", "arguments": arguments}
    return dict({"role": "assistant", "tool_calls": [
        {"id": "call12345", "type": "function", "function": function}]}, **more)


TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "Tells the weather, <today> & later.",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "The \"city\", such as Zürich"},
            "days": {"type": "integer", "enum": [1, 2, 3]},
            "unit": {"type": ["string", "null"], "default": None},
            "exact": {"type": "number", "minimum": 1.0}}}}},
    {"type": "function", "function": {
        "name": "stop", "description": "Stops.",
        "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS = {"city": "Zürich", "days": 2, "exact": 1.0,
             "list": [1, "a", None, True, {"x": 1.5e-7}]}
CHATS = {
    "a question": ([says("user", "Hello")], {}),
    "a system prompt": ([says("system", "You are a cat."), says("user", "Hello")], {}),
    "turns": ([says("system", " Be kind.\n"), says("user", "2+2?"), says("assistant", " 4 "),
               says("user", " And\u00a0é 日本 👩‍👩‍👧? \n")], {}),
    "empty content": ([says("user", ""), says("assistant", ""), says("user", "  \n")], {}),
    "the same role twice": ([says("user", "a"), says("user", "b"), says("assistant", "c"),
                             says("assistant", "d"), says("user", "e")], {}),
    "an answer first": ([says("assistant", "b"), says("user", "c"),
                         says("assistant", "d\n")], {}),
    "tools": ([says("system", "Use tools."), says("user", "Weather?")], {"tools": TOOLS}),
    "a call": ([says("user", "Weather in Zürich?"), calls(ARGUMENTS, content="Let me see."),
                says("tool", '{"t": 12}', name="get_weather", tool_call_id="call12345"),
                says("assistant", "12 degrees."), says("user", "Thanks")],
               {"tools": TOOLS}),
    "a call in JSON": ([says("system", "x"), says("user", "Weather?"),
                        calls('{"city": "Bern"}', content=None),
                        says("tool", "rain", tool_call_id="call12345")], {"tools": TOOLS}),
    "parts": ([says("system", "x"), says("user", [{"type": "text", "text": "Look "},
                                                  {"type": "text", "text": "here"}]),
               says("assistant", "ok"),
               says("user", [{"type": "image"}, {"type": "text", "text": "and here"}])], {}),
    "thoughts": ([says("user", "q"),
                  says("assistant", "<think>\nwhy\n</think>\n\nthis ", reasoning="because"),
                  says("user", "r"), says("assistant", "<think>a</think>b"),
                  says("user", "t")], {"enable_thinking": False}),
    "odd text": ([says("system", "{{ x }} {% y %}"),
                  says("user", "'\"\\ <|im_end|></s> [INST] & <b>\r\n\ttab\u2028"),
                  says("assistant", "don't"), says("user", "# x")],
                 {"enable_thinking": True}),
}

# ---- constructs -----------------------------------------------------------------------

# What the constructs below may read beside `messages`. In a construct, ⏎ is a line end.
VALUES = {
    "s": "Hello, World", "t": "  é日本 x\n", "n": 7, "f": 2.5, "g": 3.0, "yes": True,
    "none_": None, "xs": [3, 1, 2], "words": ["pear", "Apple", "fig", "apple"],
    "d": {"b": 1, "a": [True, None, 1.0], "items": "mine"},
    "people": [{"name": "Ann", "age": 30, "at": {"city": "Rome"}}, {"name": "bob", "age": 4},
               {"name": "Cy", "age": 30, "at": {"city": "Oslo"}}],
    "quotes": ["it's", 'say "x"', "both ' and \"", "tab\t\\\n\x00é\u00a0\u200b"],
}
CONSTRUCTS = """
{{ s }} {{ n }} {{ f }} {{ g }} {{ yes }} {{ none_ }} {{ nothing }}|
{{ xs }} {{ d }} {{ people }} {{ quotes }} {{ [] }} {{ {} }} {{ (1,) }} {{ () }} {{ 1, 2 }}
{{ [1e16, 1e15, 0.1, 1e-5, 0.0001, 1/3, 2.0, -0.0, 123456789.125, 1e100] }}
{{ 7 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 2 ** 10 }} {{ 2 ** -1 }}
{{ 2 ** 3 ** 2 }} {{ -2 ** 2 }} {{ 6 / 2 }} {{ 1 + 1.0 }} {{ true + 1 }} {{ 7.5 // 2 }} {{ 1 // 0.1 }} {{ 2.5 % 0.1 }} {{ 4.0 % -2 }} {{ -7.5 // 2 }} {{ -0.5 % 3 }}
{{ 1 - -1 }} {{ +n }} {{ -f }} {{ 3 * "ab" }} {{ "ab" * 0 }} {{ [1] * 2 + [3] }} {{ (1,) + (2,) }}
{{ 1_000 + 0 }} {{ 1.5e3 }} {{ 0.5 }} {{ "a" "b" 'c' }} {{ 'it\\'s\\t\\x41\\u00e9\\101\\q' }}
{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 1 == 1.0 }} {{ true == 1 }} {{ "a" < "b" }} {{ [1, 2] < [1, 3] }}
{{ "1" == 1 }} {{ none == false }} {{ nothing == nothing }} {{ nothing == none }} {{ [] == () }}
{{ 1 != 2 }} {{ 2 >= 2 }} {{ 2 <= 1 }} {{ {"a": 1} == {"a": 1.0} }} {{ xs == [3, 1, 2] }}
{{ "ell" in s }} {{ 3 in xs }} {{ 4 not in xs }} {{ "b" in d }} {{ 1 in d }} {{ "x" in nothing }}
{{ not yes }} {{ not nothing }} {{ 1 and 2 }} {{ 0 and 2 }} {{ 0 or "x" }} {{ nothing or none or [] }}
{{ not 1 == 2 }} {{ 1 if yes else 2 }} {{ 1 if no }}. {{ 1 if no else 2 if no else 3 }}
{{ "a" ~ 1 ~ none ~ nothing ~ 2.0 ~ true }} {{ 1 ~ (2 + 3) }} {{ "a" + "b" ~ "c" }}
{{ s[0] }} {{ s[-1] }} {{ s[99] }}. {{ t[2] }}{{ t[3] }} {{ s[1:4] }} {{ s[:-7] }} {{ s[::-1] }} {{ t[::2] }}
{{ s[8:2:-2] }} {{ xs[1:] }} {{ xs[::-1] }} {{ xs[-2:] }} {{ xs[5:] }} {{ xs[none:2] }} {{ (1, 2, 3)[1:] }}
{{ xs[0] }} {{ xs[-1] }} {{ xs[3] }}. {{ xs.0 }} {{ xs[true] }} {{ people[0].at.city }} {{ d["b"] }} {{ d.zzz }}.
{{ d["items"] }} {{ d.get("b") }} {{ d.get("z") }} {{ d.get("z", 5) }} {{ s["upper"]() }} {{ none_.x }}.
{{ d.items() }} {{ d.keys() }} {{ d.values() }} {{ d.copy() }} {{ {1: "a", true: "b", none: "c", 1.5: "d"} }}
{{ s.upper() }} {{ s.lower() }} {{ s.title() }} {{ "éa ßx"[:2].upper() }} {{ "ÀÉ".lower() }} {{ "hELLO".capitalize() }}
[{{ t.strip() }}] [{{ t.lstrip() }}] [{{ t.rstrip() }}] {{ "xxaxx".strip("x") }} {{ "abcba".lstrip("ab") }} {{ "日本日".rstrip("日") }}
{{ "a,b,,c".split(",") }} {{ "a,b,c".split(",", 1) }} {{ " a  b ".split() }} {{ " a b c ".split(none, 1) }} {{ "a,b,c".rsplit(",", 1) }}
{{ "a--b".split("--") }} {{ "abc".split("x")[-1] }} {{ "a\\nb\\r\\nc\\n".splitlines() }} {{ "a\\nb".splitlines(true) }} {{ "".split(",") }} {{ "".split() }}
{{ s.startswith("He") }} {{ s.endswith(("x", "ld")) }} {{ s.startswith("") }} {{ s.find("o") }} {{ s.rfind("o") }} {{ s.find("z") }} {{ t.find("本") }} {{ s.count("l") }}
{{ s.replace("l", "L") }} {{ s.replace("l", "L", 1) }} {{ "ab".replace("", "-") }} {{ s.index("W") }} {{ "a=b".partition("=") }} {{ "a".partition("=") }} {{ "a.b.c".rpartition(".") }}
{{ ", ".join(["a", "b"]) }} {{ "-".join("abc") }} {{ "%s is %d, %.2f, %r, %%, %5s|%-5s|" % ("x", 3, 2.5, "y", "r", "l") }} {{ "%(a)s" % {"a": 1} }} {{ "%x" % 255 }}
{{ "{} {1} {name} {{}}".format(1, 2, name="z") if no else "{}-{}".format(1, "a") }} {{ "{1}{0}{a}".format("x", "y", a=none) }}
{{ "abc".removeprefix("a") }} {{ "abc".removesuffix("c") }} {{ "7".zfill(3) }} {{ "-7".zfill(4) }} [{{ "a".center(4) }}] [{{ "ab".center(5, "*") }}] [{{ "a".ljust(3) }}] [{{ "a".rjust(3) }}]
{{ "12".isdigit() }} {{ "ab".isalpha() }} {{ "a1".isalnum() }} {{ " ".isspace() }} {{ "AB".isupper() }} {{ "ab".islower() }} {{ "é".isascii() }} {{ "1".isnumeric() }} {{ "aB".swapcase() }}
{{ s is string }} {{ n is number }} {{ yes is number }} {{ yes is boolean }} {{ n is integer }} {{ g is float }} {{ yes is integer }} {{ d is mapping }} {{ xs is mapping }}
{{ nothing is defined }} {{ none_ is defined }} {{ none_ is none }} {{ nothing is none }} {{ nothing is undefined }} {{ xs is iterable }} {{ n is iterable }} {{ nothing is iterable }} {{ s is iterable }}
{{ s is sequence }} {{ d is sequence }} {{ n is sequence }} {{ nothing is sequence }} {{ d.items() is sequence }} {{ range(2) is sequence }} {{ xs|map("string") is sequence }}
{{ 3 is odd }} {{ 3 is even }} {{ 6 is divisibleby 3 }} {{ 6 is divisibleby(4) }} {{ yes is true }} {{ yes is not false }} {{ 1 is true }} {{ 2 is in xs }} {{ 2 is not in [1] }}
{{ 1 is eq 1 }} {{ 1 is ne(2) }} {{ 1 is lt 2 }} {{ 1 is gt 2 }} {{ 1 is equalto 1.0 }} {{ none is sameas none }} {{ s is lower }} {{ "A" is upper }} {{ raise_exception is callable }} {{ s is callable }}
{{ s|length }} {{ t|length }} {{ xs|length }} {{ d|length }} {{ nothing|length }} {{ xs|count }} {{ xs|first }} {{ xs|last }} {{ []|first }}. {{ "é日"|last }} {{ ""|last }}.
{{ s|upper }} {{ s|lower }} {{ "hello wORLD-x (y"|title }} {{ "hELLO é"|capitalize }} [{{ t|trim }}] {{ "xax"|trim("x") }} {{ 12|upper }} {{ nothing|trim }}. {{ none|upper }}
{{ s|replace("o", "0") }} {{ s|replace("o", "0", 1) }} {{ 121|replace(1, "x") }} {{ xs|join }} {{ xs|join(", ") }} {{ people|join(", ", attribute="name") }} {{ [none, 1.0, "é"]|join("-") }}
{{ nothing|default("x") }} {{ ""|default("x") }} {{ ""|default("x", true) }} {{ nothing|d }}. {{ none_|default("x") }} {{ 0|default(5, boolean=true) }} {{ d.zzz|default([]) }}
{{ xs|sort }} {{ xs|sort(reverse=true) }} {{ words|sort }} {{ words|sort(case_sensitive=true) }} {{ people|sort(attribute="age")|map(attribute="name")|list }} {{ people|sort(attribute="age,name", reverse=true)|map(attribute="name")|join(" ") }}
{{ xs|reverse|list }} {{ s|reverse }} {{ words|unique|list }} {{ words|unique(true)|list }} {{ xs|min }} {{ xs|max }} {{ words|min }} {{ []|max }}. {{ people|max(attribute="age") }} {{ xs|sum }} {{ people|sum(attribute="age") }}
{{ xs|map("string")|list }} {{ words|map("upper")|join(" ") }} {{ people|map(attribute="age")|list|length }} {{ people|map(attribute="at", default="?")|list }} {{ nothing|map("upper")|list }} {{ xs|map("replace", "1", "x")|list }}
{{ xs|select("odd")|list }} {{ xs|reject("odd")|list }} {{ xs|select("gt", 1)|list }} {{ [0, 1, ""]|select|list }} {{ people|selectattr("at")|map(attribute="name")|list }} {{ people|selectattr("age", "equalto", 30)|list|length }} {{ people|rejectattr("at", "defined")|map(attribute="name")|first }}
{{ d|items|list }} {{ nothing|items|list }} {{ {"b": 1, "A": 2}|dictsort }} {{ {"b": 1, "A": 2}|dictsort(true) }} {{ {"b": 1, "A": 2}|dictsort(by="value", reverse=true) }} {{ [1, 2, 3, 4, 5]|batch(2)|list }} {{ [1, 2, 3]|batch(2, 0)|list }}
{{ "12"|int }} {{ "x"|int }} {{ "x"|int(5) }} {{ "4.7"|int }} {{ 4.7|int }} {{ -4.7|int }} {{ true|int }} {{ " 1_0 "|int }} {{ "1.5"|float }} {{ "x"|float }} {{ 3|float }} {{ "inf"|float }} {{ none|int }} {{ "1e3"|float }}
{{ 2.5|round }} {{ 3.5|round }} {{ 2.567|round(2) }} {{ 5|round }} {{ 2.1|round(0, "ceil") }} {{ 2.9|round(method="floor") }} {{ -3|abs }} {{ -2.5|abs }} {{ n|string + "x" }} {{ 1.0|string }} {{ "abc"|list }} {{ d|list }}
{{ "a\\nb\\n\\nc"|indent }} {{ "a\\nb"|indent(2, true) }} {{ "a\\n\\nb"|indent("> ", blank=true) }} {{ "a"|indent(first=true) }} {{ "foo bar baz qux"|truncate(9) }} {{ "foo bar baz"|truncate(9, true, "…", 0) }} {{ "a b_c d"|wordcount }} [{{ "a"|center(5) }}]
{{ d|tojson }} {{ quotes|tojson }} {{ "é"|tojson(ensure_ascii=true) }} {{ "👩"|tojson(true) }} {{ [1.0, 1e20, 1e-7, true, none]|tojson }} {{ {"b": 1, "a": {"x": []}}|tojson(indent=2) }} {{ {"b": 1, "a": 2}|tojson(sort_keys=true) }} {{ [1, [2]]|tojson(indent=1, separators=(",", "=")) }} {{ {}|tojson(indent=4) }} {{ (1, 2)|tojson }} {{ {1: 2, none: 3, true: 4}|tojson }} {{ [1, 2]|tojson(separators=[",", ":"]) }} {{ [[], {}]|tojson(indent="\\t") }}
{{ "<a & 'b'>"|e }} {{ "<x>"|safe }} {{ "<x>"|safe + "<y>" }} {{ "<y>" + "<x>"|safe }} {{ "<x>"|safe ~ "<y>" }} {{ ["<x>"|safe, "<"]|join("&") }} {{ "a"|safe is string }} {{ ("<"|safe)|length }}
{{ range(3)|list }} {{ range(1, 7, 2)|list }} {{ range(3, 0, -1)|list }} {{ range(0)|list }} {{ range(5)[1:3]|list }} {{ range(3)|length }} {{ 2 in range(3) }} {{ dict(a=1) }} {{ dict([("x", 1), ("y", 2)]) }} {{ dict({"z": 3}) }}
{% for x in xs %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle("a", "b") }}{{ loop.changed(x > 1) }}{{ loop.depth }} {% endfor %}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}{% for c in "é日" %}[{{ c }}]{% endfor %}{% for x in nothing %}x{% else %}none{% endfor %}{% for (a, (b, c)) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}
{% for x in xs if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }} {% else %}no{% endfor %}{% for x in xs %}{% for y in xs %}{{ loop.index }}{% endfor %}{{ loop.index }} {% endfor %}{% for x in 1, 2 %}{{ x }}{% endfor %}{% for x in xs|select("odd") %}{{ x }}{{ loop.length }}{{ loop.last }}{% endfor %}
{% for x in range(9) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}{% for x in xs %}{% with y = x %}{% if y == 1 %}{% break %}{% endif %}{{ y }}{% endwith %}{% endfor %}
{% set x = 1 %}{% for y in xs %}{{ x }}{% set x = y %}{{ x }} {% endfor %}{{ x }}{% if yes %}{% set x = "if" %}{% endif %}{{ x }}{% set a, b = [1, 2] %}{{ a }}{{ b }}{% set c %}<{{ x }}>{% set x = 9 %}{% endset %}{{ c }}{{ x }}{% set e | upper | trim %} low {% endset %}[{{ e }}]
{% set ns = namespace(a=1, b="x") %}{% for y in xs %}{% set ns.a = ns.a + y %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns["a"] }}{{ ns.zzz }}.{% set ns.t %}block{% endset %}{{ ns.t }}{{ ns is mapping }}{{ namespace({"k": 2}).k }}
{% macro m(a, b="B", c=a) %}({{ a }}{{ b }}{{ c }}{{ nothing }}){% endmacro %}{{ m(1) }}{{ m(1, 2) }}{{ m(b=3, a=1) }}{{ m() }}{{ m("<")|length }}{% macro w(x) %}[{{ caller() }}{{ x }}{{ caller("y") if no }}]{% endmacro %}{% call w(5) %}in{{ s }}{% endcall %}{% macro v(a) %}{{ a }}{{ varargs }}{% endmacro %}{{ v(1, 2, 3) }}
{% macro down(x) %}{{ x }}{% if x > 0 %}{{ down(x - 1) }}{% endif %}{% endmacro %}{{ down(3) }}{% macro late() %}{{ later }}{% endmacro %}{% set later = "L" %}{{ late() }}{% macro each(xs) %}{% for x in xs %}{{ caller(x) }}{% endfor %}{% endmacro %}{% call(x) each(xs) %}<{{ x }}>{% endcall %}{{ m2 is defined }}{% for x in xs %}{% macro m2() %}{{ x }}{% endmacro %}{{ m2() }}{% endfor %}
{% if n > 10 %}a{% elif n > 5 %}b{% elif true %}c{% else %}d{% endif %}{% if nothing %}x{% endif %}{% if xs and d and not none_ %}y{% endif %}{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}{% filter upper %}up {{ s }}{% endfilter %}{% generation %}gen{% set z = 1 %}{% endgeneration %}{{ z }}
  {% if yes %}  ⏎ a ⏎  {% endif %}  ⏎ b⏎{#- c -#}⏎ d {#+ e #} f⏎   {# g #}⏎{%- if yes %} h {%- endif -%} ⏎ {{- 1 -}} ⏎ {{ 2 }}⏎ i⏎{%+ if yes %}j{% endif +%}⏎k⏎    {%+ set q = 1 %}⏎l⏎
{% raw %}{{ not }} {% if %} {# x #}{% endraw %} {%- raw -%}  y  {%- endraw -%}  z⏎  {% raw %}⏎ w⏎  {% endraw %}⏎v{{ "%}" }}{{ "}}" }}{{ {"a": {"b": 1}}["a"]["b"] }}{{- "\\n" -}}  x {{- '' }}
{{ messages[0].role }} {{ messages[0]["content"] }} {{ messages|length }} {{ add_generation_prompt }} {{ tools is none }} {{ documents is none }} {{ tools is defined }} {{ bos_token }} {{ eos_token }} {{ unk_token is defined }} {{ messages[-1].keys()|list }} {{ messages[0].tool_calls is defined }}
{{ strftime_now("%Y-%m-%d") }} {{ strftime_now("%d %b %Y, %H:%M:%S") }} {{ strftime_now("%B %A %j %%") }} {{ strftime_now("*t") }} {{ strftime_now("!x") }}
{{ (people|selectattr("name", "in", ["Ann"])|list)[0].age }} {{ people|map(attribute="name")|map("lower")|select("ne", "bob")|join }} {{ (xs|map("string"))|join(xs|first|string) }} {{ people[0].at["city"][:2] ~ xs[-1] }} {{ s.split(", ")[1].lower()|capitalize }}
{% set it = xs|map("string") %}{{ it|list }}{{ it|list }}{% set ks = d.keys() %}{{ ks|list }}{{ ks|list }}{{ "b" in d.keys() }}{{ xs|select("odd")|first }}{{ {"a": 1}.items()|list }}{{ d.values()|list|length }}
{% set content = messages[0].content %}{% if content is string and "</think>" in content %}{% set content = content.split("</think>")[-1].lstrip("\\n") %}{% endif %}{{ content }}{{ "a</think>\\n\\nb</think>c".split("</think>")[-1] }}{{ "a</think>b".split("</think>")[0].split("<think>")[-1].rstrip("\\n").lstrip("\\n") }}
{% for x, y in [[1, 2], [3, 4]] if x %}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}{{ nothing is callable }}{{ ["<"|safe] }}{{ [(1, 2), (1, 2), 3]|unique|list }}{{ none_|map("upper")|list }}{{ none_|selectattr("a")|list }}{{ s[:5]|truncate(3, true, "") }}
{{ m }}{% macro g(x) %}{% set y = x %}{{ y }}{% endmacro %}{{ g(1) }}{{ y is defined }}{% for x in [1, 2] %}{% set z = x %}{% endfor %}{{ z is defined }}{{ x is defined }}{{ loop is defined }}
"""
REFUSED = """
{{ nothing.x }}
{{ nothing["x"] }}
{{ nothing + "a" }}
{{ people|unique|list }}
{{ namespace(nothing) }}
{% for a, in xs %}{% endfor %}
{{ n|truncate(2) }}
{{ [xs, xs]|unique|list }}
{{ "a" + 1 }}
{{ 1 + none }}
{{ 1 / 0 }}
{{ xs.append(4) }}
{% do xs %}
{{ xs + (1,) }}
{{ "a" < 1 }}
{{ 1 in "a" }}
{{ 1 in 5 }}
{% for x in 5 %}{% endfor %}
{% for a, b in [1, 2] %}{% endfor %}
{% for a, b in [(1, 2, 3)] %}{% endfor %}
{{ raise_exception("no") }}
{{ s() }}
{{ nothing() }}
{{ nothing|tojson }}
{{ range(3)|tojson }}
{{ "x"|nofilter }}
{{ "x" is notest }}
{{ d|first|nofilter }}
{% set d.x = 1 %}
{% set nothing.x = 1 %}
{% set namespace(a=1).a = 2 %}
{{ namespace(_a=1) }}
{% include "x" %}
{% extends "x" %}
{% import "x" as y %}
{% frob %}
{% if yes %}
{% endif %}
{% for x in xs %}{% endif %}
{{ 1 + }}
{{ (1 }}
{{ 1 ) }}
{{ "a }}
{% raw %}x
{# a
{{ a b }}
{{ 1 is odd is even }}
{% break %}
{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}
{% macro f(a) %}{% endmacro %}{{ f(b=2) }}
{% macro f(a) %}{% endmacro %}{{ f(1, a=2) }}
{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{{ s.split("") }}
{{ s.index("zz") }}
{{ s.nothing() }}
{{ "%d" % "x" }}
{{ "%s %s" % ("x",) }}
{{ "%s" % ("x", "y") }}
{{ [1, "a"]|sort }}
{{ n|length }}
{{ none_|length }}
{{ xs[0:1:0] }}
{{ none_[1:] }}
{{ {[1]: 2} }}
{{ range(1000000) }}
{{ xs|map("string")|length }}
{{ xs|map("string")|tojson }}
{{ -s }}
{{ "x"|trim(1) }}
{{ ", ".join([1]) }}
{{ "a".center("b") }}
{{ s|indent("x", no, no, no) }}
{{ d.update({"x": 1}) }}
{{ d.pop("b") }}
{{ s.startswith(1) }}
{{ {"a": nothing}|tojson }}
{{ xs|join(attribute="a.b") }}
"""


def lines(text):
    return [line.replace("⏎", "\n") for line in text.strip("\n").split("\n")]


# ---- rendering ------------------------------------------------------------------------

def renderer():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)

    def render(template, messages, **more):
        """The text, or None where transformers refuses; JSON can hold both."""
        try:
            text = tokenizer.apply_chat_template(
                copy.deepcopy(messages), chat_template=template, tokenize=False,
                **copy.deepcopy(more))
            text.encode()
            return text
        except Exception as problem:
            render.why = f"{type(problem).__name__}: {problem}"
            return None

    return render


def rows_of(render, templates):
    """For each template, a text for each chat without and with a generation prompt."""
    rows = {}
    for name, template in templates.items():
        rows[name] = []
        for i, (messages, more) in enumerate(CHATS.values()):
            for prompt in False, True:
                rows[name].append(render(template, messages, add_generation_prompt=prompt,
                                         **more))
    return rows


def chats():
    """The chats as JSON texts: their keys have an order, and 1.0 is no 1."""
    return [{"name": name, "messages": json.dumps(messages, ensure_ascii=False),
             "tools": json.dumps(more["tools"], ensure_ascii=False) if "tools" in more
             else None, "variables": {k: v for k, v in more.items() if k != "tools"}}
            for name, (messages, more) in CHATS.items()]


def constructs(render):
    hello = [says("user", "Hello")]
    out = [[line, render(line, hello, **VALUES)] for line in lines(CONSTRUCTS)]
    for line, text in out:
        if text is None:
            raise SystemExit(f"transformers refuses {line!r}")
    for line in lines(REFUSED):
        if render(line, hello, **VALUES) is not None:
            raise SystemExit(f"transformers does not refuse {line!r}")
        out.append([line, None])
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--folder", help="of *.jinja, in place of our own forms")
    options = parser.parse_args()
    chat_template_utils.datetime = Then
    render = renderer()
    if options.folder:
        templates = {}
        for name in sorted(os.listdir(options.folder)):
            if name.endswith(".jinja"):
                path = os.path.join(options.folder, name)
                with open(path, encoding="utf-8") as file:
                    templates[name[:-6]] = file.read()
        golden = {"constructs": []}
    else:
        from template_forms import FORMS as templates
        golden = {"values": json.dumps(VALUES, ensure_ascii=False),
                  "constructs": constructs(render)}
    golden.update(tokens=TOKENS, chats=chats(), templates=templates,
                  rows=rows_of(render, templates))
    with open(options.out, "w") as file:
        json.dump(golden, file, ensure_ascii=False, indent=0)
        file.write("\n")
    texts = [text for row in golden["rows"].values() for text in row]
    print(f"{len(templates)} templates, {len(texts)} renderings, of which transformers "
          f"refuses {texts.count(None)}; {len(golden['constructs'])} constructs")


main()
