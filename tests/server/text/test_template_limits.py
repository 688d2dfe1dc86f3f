"""No template takes all time or memory, and those of models render as in a sandbox without bounds."""

from __future__ import annotations

import json
import runpy
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2.ext
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from support import hostile_templates

from octavo.chat.system_messages import rendered
from octavo.chat.tools.choice import own_format
from octavo.text.bounded_sandbox import Generation, environment
from octavo.text.chat_template import ChatTemplateError, TemplateLimitError, render
from octavo.text.content_format import iterates_over_content, with_parts
from octavo.text.template_meter import SECONDS, STEPS, Meter, UsedUpError, metered

ASK = [{"role": "user", "content": "hi"}]
TESTS = Path(__file__).parents[1]
WITH_TEMPLATES = (
    "text/test_chat_template.py",
    "text/test_content_format.py",
    "tools/test_call_formats.py",
    "api/test_tool_formats.py",
    "api/test_system_messages.py",
    "api/conftest.py",
)
# What templates of many families do, in one.
RICH = """{%- macro part(p, sep='\\n') -%}{{ p.text if p is mapping else p }}{{ sep }}{%- endmacro -%}
{%- set ns = namespace(last=-1, n=0, seen=[], text='') -%}
{%- for m in messages[::-1] -%}
  {%- set index = (messages|length - 1) - loop.index0 -%}
  {%- if ns.last < 0 and m.role == "user" and m.content is string and not(m.content.startswith('<x>')) -%}
    {%- set ns.last = index -%}
  {%- endif -%}
{%- endfor -%}
{{- "%s|%d" % ('a', ns.last) ~ '{:>5}|{role}'.format(ns.last, role=messages[0].role) if messages }}
{%- for m in messages if m.role != 'nobody' -%}
  {%- set content = m.content if m.content is string else '' -%}
  {%- if '</think>' in content -%}
    {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}{{- '<t>' + thought + '</t>' -}}
  {%- endif -%}
  {%- set ns.n = ns.n + 1 -%}{%- set ns.seen = ns.seen + [m.role] -%}
  {%- set shout %}{{ content|upper|trim }}{{ loop.index }}{% endset -%}
  {{- m.role|title ~ ':' ~ (content|replace('a', 'bb')|indent(2)) + '!' * (loop.index % 3) + shout + part(m.content) }}
  {%- for c in m.tool_calls or [] -%}
    {{- c.function.name }}({% for k, v in c.function.arguments|dictsort -%}
    {{ k }}={{ v|tojson if v is not string else v }}{{ ', ' if not loop.last }}{% endfor %})
    {{- c|tojson(indent=2) }}{{ c.function.arguments|items|list|length }}
  {%- endfor -%}
  {%- if loop.previtem is defined and loop.previtem.role == m.role %}{{ [m.role, 'again']|join('-') }}{% endif -%}
  {%- if m.content in ['a', 'b'] or m.role not in ns.seen[:1] %}{{ m.content|string|e|length }}{% endif -%}
{%- endfor -%}
{{- ns.seen|unique|sort|join(',') ~ (tools|map(attribute='function.name')|list if tools else none)|tojson }}
{{- messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list|string -}}
{{- messages|groupby('role')|map('first')|join('+') ~ (messages|map('length')|sum) ~ (ns.n // 2) ~ (7 / 2)|round(1) }}
{{- '%05.1f' % 2.25 ~ "a,b".split(',') ~ {'k': 1}.get('k') ~ {'k': 2}.items()|list ~ 2 ** 10 ~ [1] * 2 }}
{%- for pair in messages|batch(2) %}{% for m in pair %}{{ m.role[0] }}{% else %}-{% endfor %};{% endfor %}
{%- autoescape true %}{{ messages[-1].content ~ '<b>'|safe ~ '<' }}{% endautoescape -%}
"""


def templates_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if "{%" in value and "messages" in value:
            yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from templates_of(part)


@pytest.fixture(scope="module")
def templates() -> list[str]:
    """All that the tests of templates have."""
    found = [RICH, *templates_of(runpy.run_path(str(TESTS.parent / "support/scripted_model.py")))]
    for name in WITH_TEMPLATES:
        module = runpy.run_path(str(TESTS / name))
        found += templates_of({key: value for key, value in module.items() if key.isupper()})
        if "WRITTEN" in module:
            found += [module["template"](calls) for calls, _ in module["WRITTEN"].values()]
    return sorted(set(found))


@lru_cache(maxsize=1)
def unbounded() -> ImmutableSandboxedEnvironment:
    """jinja2's own sandbox with what chat templates are given."""
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    plain.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )
    plain.globals.update(raise_exception=environment().globals["raise_exception"])
    return plain


def as_before(template: str, messages: list[Any], **variables: Any) -> str:
    values = {"messages": messages, "documents": None, "bos_token": "<s>", "eos_token": "</s>", **variables}
    try:
        expected = unbounded().from_string(template).render(values)
    except Exception:
        with pytest.raises(ChatTemplateError) as raised:
            ours(template, messages, **variables)
        assert not isinstance(raised.value, TemplateLimitError)
        return ""
    assert ours(template, messages, **variables) == expected
    return expected


def ours(template: str, messages: list[Any], **variables: Any) -> str:
    return render(template, messages, bos_token="<s>", eos_token="</s>", **variables)


words = st.text(st.sampled_from("ab <>&'\"\\\n\t{}%é日😀\x00"), max_size=20) | st.sampled_from(
    ["<think>\nx\n</think>\n\ny", "%s {} {{ x }}", "a", ""]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(
    lambda name, arguments: {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}},
    words,
    st.dictionaries(words, values, max_size=3) | words,
)
parts = st.lists(words.map(lambda text: {"type": "text", "text": text}), max_size=3)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": words | words | parts | st.none()},
    optional={"tool_calls": st.lists(calls, max_size=2)},
)
tools = st.none() | st.lists(
    st.builds(lambda name: {"type": "function", "function": {"name": name, "parameters": {}}}, words), max_size=2
)


@settings(max_examples=12, deadline=None)
@given(said=st.lists(messages, max_size=6), tools=tools, asks=st.booleans())
def test_templates_render_as_in_a_sandbox_without_bounds(
    templates: list[str], said: list[Any], tools: Any, asks: bool
) -> None:
    for template in templates:
        as_before(template, said, tools=tools, add_generation_prompt=asks)


@pytest.mark.sampled(share=3)
@pytest.mark.slow
@pytest.mark.parametrize("third", range(3))
def test_a_conversation_of_4_mb_and_of_5000_messages_renders(templates: list[str], third: int) -> None:
    texts = ["The quick brown fox. " * 60, "日本語のテキスト。" * 30, "<think>\nso\n</think>\n\nwell\n" * 20]
    many = [{"role": ("user", "assistant")[i % 2], "content": texts[i % 3]} for i in range(5000)]
    some = templates[third::3]
    assert sum(len(m["content"].encode()) for m in many) > 4_000_000
    long = [{"role": "user", "content": "The quick brown fox.\n" * 200_000}]
    rendered = 0
    for template in some:
        for said in (many, long):
            shown = with_parts(said, template, "")  # as the server gives them: no template loops over characters
            rendered += bool(as_before(template, shown, tools=None, add_generation_prompt=True))
    assert rendered > len(some)


FEW_STEPS = 1_000_000  # a tenth of what a rendering has


def assert_refused(names: Any, steps: int) -> None:
    found = hostile_templates.outcomes([hostile_templates.TEMPLATES[name] for name in names], steps)
    for name, (outcome, seconds) in zip(names, found, strict=True):
        reasons = ("Recursion", "deeply", "in one another", "are taken")
        assert outcome == "limit" or any(reason in outcome for reason in reasons), (name, outcome)
        assert seconds < SECONDS + 1, name


@pytest.mark.slow
def test_hostile_templates_are_refused_in_little_time_and_memory() -> None:
    assert_refused(hostile_templates.TEMPLATES, FEW_STEPS)


def test_a_rendering_s_whole_share_is_little() -> None:
    assert_refused(["loops", "doubling", "center", "width", "indent", "brackets", "shared"], STEPS)


def test_the_clock_is_looked_at_while_one_value_is_weighed() -> None:
    shared: list[Any] = [1]
    for _ in range(60):
        shared = [shared, shared]
    meter = Meter(steps=15_000_000, size=10**15, seconds=0.1)  # steps of some seconds
    before = time.thread_time()
    with pytest.raises(UsedUpError, match=r"takes more than 0\.1 s of processor time"):
        meter.weigh(shared)
    assert time.thread_time() - before < 1


# Whatever can be called on any value, with arguments that would make it large: nothing of it may pass.
HUGE = (
    "3000000000",
    "-3000000000",
    "10 ** 12",
    "'%3000000000d'",
    "'{:3000000000}'",
    "big",
    "big ~ '%s{0}'",
    "[big] * 9999",
    "{97: big}",
    "shared",
    "(shared, shared)",
    "{'a': shared}",
    "'a'",
    "''",
    "1",
    "none",
    "'utf-7'",
)
OWNERS = (
    "big",
    "'a\tb%s'",
    "big.encode()",
    "3",
    "2.5",
    "[big, shared]",
    "(1, shared)",
    "{'a': big}",
    "{}.keys()",
    "('<' ~ big)|safe",
    "range(99999)",
    "shared",
    "cycler(big)",
    "joiner(big)",
    "ns",
    "dict",
    "true",
)
KINDS = (str, bytes, int, float, list, tuple, dict, range, set)
NAMES = sorted({name for kind in KINDS for name in dir(kind) if not name.startswith("_")})
FILTERS, IS = sorted(environment().filters), sorted(environment().tests)
arguments = st.lists(st.sampled_from(HUGE), max_size=3).map(", ".join)
expressions = st.one_of(
    st.builds("{}.{}({})".format, st.sampled_from(OWNERS), st.sampled_from(NAMES), arguments),
    st.builds("{}|{}({})".format, st.sampled_from(OWNERS + HUGE), st.sampled_from(FILTERS), arguments),
    st.builds("{} is {}({})".format, st.sampled_from(OWNERS + HUGE), st.sampled_from(IS), arguments),
    st.builds(
        "({}) {} ({})".format,
        st.sampled_from(OWNERS + HUGE),
        st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "not in"]),
        st.sampled_from(OWNERS + HUGE),
    ),
)
drawn = expressions.map(
    lambda expression: (
        "{% set ns = namespace(x='ab', s=[1]) %}{% for i in range(20) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}{% for i in range(50) %}{% set ns.s = (ns.s, ns.s) %}{% endfor %}"
        "{% set big, shared = ns.x, ns.s %}"
        "{% set got = " + expression + " %}{{ got|list|length if got is iterable and got is not string }}"
    )
)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(st.lists(drawn, min_size=30, max_size=30))
def test_no_call_makes_much(some: list[str]) -> None:
    for template, (outcome, seconds) in zip(some, hostile_templates.outcomes(some, FEW_STEPS), strict=True):
        assert "MemoryError" not in outcome and seconds < 3, template


def test_the_error_names_the_limit_and_the_way_out_and_is_not_tried_in_other_forms() -> None:
    # As few steps as take no two seconds where each line is traced, too: then the limit of time would be named.
    few = pytest.raises(TemplateLimitError, match=r"takes more than [\d,]+ steps .* fewer or shorter")
    with few, metered(Meter(steps=FEW_STEPS)):
        render("{% for i in range(99999) %}{% for j in range(999) %}{% endfor %}{% endfor %}", ASK)
    with pytest.raises(TemplateLimitError, match=r"makes more than [\d,]+ bytes"):
        render("{{ 'a' * 10 ** 10 }}", ASK)
    tried = []

    def refuse(messages: list[Any]) -> str:
        tried.append(messages)
        raise TemplateLimitError("too much")

    with pytest.raises(TemplateLimitError):
        rendered([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], refuse)
    assert len(tried) == 1


@pytest.mark.slow
def test_the_format_of_calls_of_a_hostile_template_is_not_looked_for_long() -> None:
    before = time.process_time()
    for name in ("loops", "calls", "doubling", "output", "names", "shared"):
        template = hostile_templates.TEMPLATES[name] + "{{ tools }}"
        assert own_format(template) is None
        iterates_over_content(template)
    assert time.process_time() - before < 6
