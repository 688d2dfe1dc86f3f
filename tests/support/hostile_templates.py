"""Chat templates that take all time or memory, each in its own way; and what rendering one comes to."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

MEMORY = 2 << 30
LONG = "{% set ns = namespace(x='ab') %}{% for i in range(22) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
SHARED = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
SHARED += "{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
TUPLES = SHARED.replace("[1]", "(1,)").replace("[ns.x, ns.x]", "(ns.x, ns.x)").replace("[ns.y, ns.y]", "(ns.y, ns.y)")


def rounds(body: str, times: int = 99999) -> str:
    return f"{{% for i in range({times}) %}}{{% for j in range({times}) %}}{body}{{% endfor %}}{{% endfor %}}"


TEMPLATES = {
    # rounds without end
    "loops": rounds(""),
    "tested loop": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "looped loop": rounds("{{ loop.index and '' }}"),
    "calls": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "callers": "{% macro m(n) %}{{ caller(n) }}{{ caller(n) }}{% endmacro %}{% macro o(n) %}{% if n %}"
    "{% call(k) m(n - 1) %}{{ o(k) }}{% endcall %}{% endif %}{% endmacro %}{{ o(60) }}",
    "blocks": "{% block a %}{% if x is not defined %}{{ self.a() }}{{ self.a() }}{% endif %}{% endblock %}",
    "recursive loop": "{% for i in [[1]] recursive %}{{ loop([[1]]) }}{{ loop([[1]]) }}{% endfor %}",
    "mapped": rounds("{{ range(99999)|map('string')|list|length }}"),
    "selected": rounds("{{ range(99999)|select('odd')|first }}{{ range(99999)|reject('>=', 0)|list }}"),
    "listed": rounds("{{ (range(99999)|list)[:0] }}"),
    "members": "{% set l = range(99999)|list %}" + rounds("{{ -1 in l }}"),
    "indexes": "{% set l = range(99999)|list %}" + rounds("{{ l.count(5) }}"),
    "sorted": "{% set l = range(99999)|list %}" + rounds("{{ l|sort|first }}"),
    "searched": LONG + rounds("{{ 'c' in ns.x }}{{ ns.x.find('c') }}"),
    "path": "{% set l = [{}] * 99999 %}{{ l|map(attribute='a" + ".a" * 9999 + "')|list|length }}",
    # texts without end
    "doubling": LONG.replace("22", "60") + "{{ ns.x }}",
    "doubling by +": LONG.replace("22", "60").replace("~", "+") + "{{ ns.x }}",
    "doubled block": LONG.replace("22", "60").replace(
        "{% set ns.x = ns.x ~ ns.x %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"
    ),
    "doubled list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "grown list": "{% set ns = namespace(x=[1]) %}" + rounds("{% set ns.x = ns.x + [1] %}"),
    "kept lists": "{% set ns = namespace(x=[1]) %}" + rounds("{% set ns.x = [ns.x, range(99999)|list] %}"),
    "constant": rounds("{{ '" + "a" * 99999 + "' }}"),
    "data": rounds("a" * 99999),
    "output": LONG + rounds("{{ ns.x }}"),
    "slices": LONG + "{% set ns.l = [] %}" + rounds("{% set ns.l = [ns.l, ns.x[1:]] %}"),
    "times": "{{ 'a' * 3000000000 }}",
    "times of a list": "{{ ([1] * 3000000000)|length }}",
    "times left": "{{ 3000000000 * 'a' }}",
    "times of a tuple": "{{ ((1,) * 3000000000)|length }}",
    "power": "{{ 10 ** 3000000000 }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "center": "{{ 'a'|center(3000000000) }}",
    "centered": "{{ 'a'.center(3000000000) }}",
    "ljust": "{{ 'a'.ljust(3000000000) }}",
    "rjust": "{{ 'a'.rjust(3000000000) }}",
    "zfill": "{{ 'a'.zfill(3000000000) }}",
    "tabs": "{{ '\t'.expandtabs(2000000000) }}",
    "tabs named": "{{ '\t'.expandtabs(tabsize=2000000000) }}",
    "width": "{{ '%3000000000d' % 1 }}",
    "width apart": "{{ '%*d' % (2000000000, 1) }}",
    "precision": "{{ '%.2000000000f' % 1 }}",
    "width of a filter": "{{ '%3000000000d'|format(1) }}",
    "width of a test": "{{ '%3000000000d' is even }}",
    "width of another test": "{{ '%3000000000d' is divisibleby 3 }}",
    "width of bytes": "{{ 'a%2000000000d'.encode() % 1 }}",
    "width of a field": "{{ '{:3000000000}'.format('a') }}",
    "width from a field": "{{ '{:{}}'.format('a', 3000000000) }}",
    "width of a mapped field": "{{ '{a:3000000000}'.format_map({'a': 1}) }}",
    "width of a marked field": "{{ ('{:3000000000}'|safe).format('a') }}",
    "many fields": LONG + "{{ ('{0}' * 9999).format(ns.x) }}",
    "many signs": LONG + "{{ ('%(a)s' * 9999) % {'a': ns.x} }}",
    "indent": "{{ [[1]]|tojson(indent=1000000000) }}",
    "indented": "{{ ('a\n' * 9999)|indent(1000000) }}",
    "indent in depth": "{% set ns = namespace(x=1) %}{% for i in range(300) %}{% set ns.x = [ns.x] %}{% endfor %}"
    "{{ ns.x|tojson(indent=9999999) }}",
    "separators": LONG + "{{ (range(9999)|list)|tojson(separators=(ns.x, ns.x)) }}",
    "joined": LONG + "{{ range(9999)|join(ns.x) }}",
    "joining": LONG + "{{ ns.x.join('a' * 9999) }}",
    "replaced": LONG + "{{ ns.x|replace('a', ns.x) }}",
    "replacing": LONG + "{{ ns.x.replace('', ns.x) }}",
    "translated": LONG + "{{ ns.x.translate({97: ns.x}) }}",
    "batch": "{{ [1]|batch(3000000000, 1)|list|length }}",
    "slice": "{{ [1]|slice(3000000000)|list|length }}",
    "round": "{{ 1|round(3000000000, 'ceil') }}",
    "round down": "{{ 1|round(-3000000000) }}",
    "round a text": "{{ 'a'|round(12, 'floor') }}",
    "bytes": "{{ (1).to_bytes(3000000000, 'big') }}",
    "split": LONG + "{% set ns.l = [] %}{% for i in range(9999) %}{% set ns.l = [ns.l, ns.x.split('a')] %}{% endfor %}",
    "characters": LONG + "{% set ns.l = [] %}{% for i in range(9999) %}{% set ns.l = [ns.l, ns.x|list] %}{% endfor %}",
    "escaped": LONG + "{{ ('&' * 9999999)|e|e|e }}",
    "autoescaped": "{% autoescape true %}{% set x = '&' * 9999999 %}{{ x ~ ('a'|safe) }}"
    "{{ x }}{{ x }}{{ x }}{{ x }}{{ x }}{{ x }}{% endautoescape %}",
    "sum of lists": "{{ ([[1] * 9999] * 9999)|sum(start=[])|length }}",
    "wordwrap": "{{ ('a' * 9999999)|wordwrap(1) }}",
    "urlize": "{{ ('a@' * 999999)|urlize }}",
    "striptags": "{{ ('<a>' * 999999)|striptags }}",
    "punycode": LONG + "{{ ns.x.encode('punycode') }}",
    "named characters": LONG + "{{ ('\U0001f600' * 9999999).encode('ascii', 'namereplace') }}",
    "pprint": LONG + "{{ ([[[['a']]]] * 999999)|pprint }}",
    # small values that are large in writing
    "shared": SHARED + "{{ ns.x }}",
    "shared json": SHARED + "{{ ns.x|tojson }}",
    "shared string": SHARED + "{{ ns.x|string }}",
    "shared equal": SHARED + "{{ ns.x == ns.y }}",
    "shared less": SHARED + "{{ ns.x < ns.y }}",
    "shared chain": SHARED + "{{ 1 in [ns.x] == ns.y }}",
    "shared member": SHARED + "{{ ns.x in [ns.y] }}",
    "shared test": SHARED + "{{ ns.x is eq ns.y }}",
    "shared in a test": SHARED + "{{ ns.x is in [ns.y] }}",
    "shared selection": SHARED + "{{ [ns.x]|select('eq', ns.y)|list|length }}",
    "shared unique": TUPLES + "{{ [ns.x, ns.y]|unique|list|length }}",
    "shared sort": SHARED + "{{ [ns.x, ns.y]|sort|length }}",
    "shared max": SHARED + "{{ [ns.x, ns.y]|max|length }}",
    "shared group": SHARED + "{{ [{'a': ns.x}, {'a': ns.y}]|groupby('a')|length }}",
    "shared joined": SHARED + "{{ [ns.x]|join }}",
    "shared concat": SHARED + "{{ ns.x ~ '' }}",
    "shared format": SHARED + "{{ '%s' % ns.x }}",
    "shared formatted": SHARED + "{{ '%s'|format(ns.x) }}",
    "shared field": SHARED + "{{ '{}'.format(ns.x) }}",
    "shared repr": SHARED + "{{ '{!r}'.format(ns.x) }}",
    "shared key": TUPLES + "{{ {ns.x: 1} }}",
    "shared look": TUPLES + "{{ {}[ns.x] }}",
    "shared get": TUPLES + "{{ {}.get(ns.x) }}",
    "shared name": SHARED + "{{ {}[ns.x] }}",
    "shared index": SHARED + "{{ [ns.x].index(ns.y) }}",
    "shared set": TUPLES + "{{ {}.fromkeys([ns.x]) }}",
    "shared error": SHARED + "{{ raise_exception(ns.x) }}",
    "shared change": SHARED + "{% for i in [ns.x, ns.y] %}{{ loop.changed(i) }}{% endfor %}",
    "shared lower": SHARED + "{{ ns.x is lower }}",
    "shared trim": SHARED + "{{ ns.x|trim }}",
    "shared views": SHARED + "{{ {'a': ns.x}.items() }}",
    "shared values": SHARED + "{{ {'a': ns.x}.values() }}",
    "shared namespace": SHARED + "{{ ns }}",
    "shared safe": SHARED + "{{ ns.x|safe }}",
    "shared escape": SHARED + "{{ ns.x|e }}",
    "shared url": SHARED + "{{ ns.x|urlencode }}",
    "shared attr": SHARED + "{{ {}|attr(ns.x) }}",
    "shared minus": TUPLES + "{{ {}.keys() - [ns.x] }}",
    "shared dict": TUPLES + "{{ dict([(ns.x, 1)]) }}",
    "shared json key": SHARED + "{{ {'a': ns.x}|tojson(indent=1) }}",
    "shared pprint": SHARED + "{{ ns.x|pprint }}",
    # what takes long to compile
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "ifs": "{% if a %}" * 5000 + "{% endif %}" * 5000,
    "fors": "{% for a in b %}" * 5000 + "{% endfor %}" * 5000,
    "nots": "{{ " + "not " * 5000 + "1 }}",
    "sums": "{{ 1" + " + 1" * 99999 + " }}",
    "minus": "{{ " + "-" * 5000 + "1 }}",
    "names": "".join(f"{{% set a{i} = 1 %}}{{% if a{i} %}}{{% endif %}}" for i in range(6000)),
    "size": "a" * (2 << 20),
    "data tags": "{{ a }}" * 30000,
    "constants": "{{ 'a' * 10 ** 10 }}" * 10,
}


def main() -> None:
    """Renders templates (stdin: a JSON list of them, and the steps that each may take); writes what each comes to, and
    the processor's seconds."""
    from octavo.text.chat_template import ChatTemplateError, TemplateLimitError, render
    from octavo.text.template_meter import Meter, metered

    render("{{ 1 }}", [])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    templates, steps = json.load(sys.stdin)
    for template in templates:
        before = time.process_time()
        try:
            with metered(Meter(steps=steps)):
                found = f"rendered {len(render(template, [{'role': 'user', 'content': 'hi'}]))}"
        except TemplateLimitError:
            found = "limit"
        except ChatTemplateError as error:
            found = f"refused: {error.__context__!r}"[:300]
        print(json.dumps([found, time.process_time() - before]), flush=True)


def outcomes(templates: list[str], steps: int) -> list[tuple[str, float]]:
    """What `main` finds, in a process with little memory."""
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps([templates, steps]), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    main()
