"""Schemas, regexes and grammars that cost much more than they look: the first of each list hurt an engine once."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterator
from typing import Any

Case = tuple[str, str, Any]  # name, kind of structured output, value

# One of each way to explode: while checking, compiling (time, memory, stack), at the first mask, at later ones.
SAMPLE = (
    "multipleOf 1999993",
    "multipleOf at once 9",
    "patterns at once 15",
    "pattern properties 200",
    "rule chain 20000",
    "literal 900000",
    "literal 200000 later",
    "alternatives 20000",
    "optional rules 5000",
    "many words",
    "ambiguous 2",
    "counted rules nested",
    "counted nested x 500",
    "optional words 3000",
    "enum 50000",
)


def cases() -> dict[str, Case]:
    """About 200, by name."""
    regexes = list(_regexes())
    patterns = [(f"{name} as a pattern", "json", {"type": "string", "pattern": regex}) for name, _, regex in regexes]
    every = [*_schemas(), *regexes, *patterns[:35], *_grammars(), *_choices()]
    found = {name: (name, kind, value) for name, kind, value in every}
    assert len(found) == len(every), "a name is there twice"
    return found


def _schemas() -> Iterator[Case]:  # noqa: C901 (a list of cases)
    def case(name: str, schema: Any) -> Case:
        return name, "json", schema

    for number in (97, 1009, 10007, 65537, 999983, 1999993, 15485863, 2147483647, 10**15 + 37):
        yield case(f"multipleOf {number}", {"type": "integer", "multipleOf": number})
        yield case(f"multipleOf {number} in a range", {"type": "integer", "multipleOf": number, "minimum": 1})
    for step in (0.1, 0.0001, 1.9999993, 1e-9, 123456.789):
        yield case(f"multipleOf {step}", {"type": "number", "multipleOf": step})
    primes = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37]
    for count in (4, 6, 9, 12):
        many = [{"type": "integer", "multipleOf": prime} for prime in primes[:count]]
        yield case(f"multipleOf at once {count}", {"allOf": many})
    for count in (100, 1_000, 10_000, 50_000, 100_000):
        yield case(f"enum {count}", {"enum": [f"word {i}" for i in range(count)]})
        yield case(f"enum of numbers {count}", {"enum": list(range(count))})
    words = {f"p{j}": {"enum": [f"w{j} {i}" for i in range(1_000)]} for j in range(50)}
    yield case("enums of 50 properties", {"type": "object", "properties": words})
    for width, depth in ((40, 12), (10, 6), (2, 20), (3, 9)):
        constants = [{"anyOf": [{"const": i * j} for i in range(width)]} for j in range(depth)]
        yield case(f"product of constants {width}^{depth}", {"allOf": constants})
        objects = [
            {"anyOf": [{"properties": {f"a{j}_{i}": {"type": "string"}}, "type": "object"} for i in range(width)]}
            for j in range(depth)
        ]
        yield case(f"product of objects {width}^{depth}", {"allOf": objects})
    for count in (3, 6, 15):
        patterns = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}$"} for i in range(5, 5 + count)]
        yield case(f"patterns at once {count}", {"allOf": patterns})
    for length in (20, 30, 200):
        yield case(f"pattern {length}", {"type": "string", "pattern": f"(a|b)*a(a|b){{{length}}}$"})
        yield case(
            f"pattern of words {length}", {"type": "string", "pattern": rf"^(\w{{1,{length}}}\s){{1,{length}}}$"}
        )
    for key in ("minLength", "maxLength"):
        yield case(f"{key} 1e6", {"type": "string", key: 1_000_000})
    for key, count in itertools.product(("minItems", "maxItems"), (1_000, 10**5, 10**9)):
        yield case(f"{key} {count}", {"type": "array", "items": {"type": "integer"}, key: count})
    inner: Any = {"type": "integer"}
    for _ in range(4):
        inner = {"type": "array", "minItems": 100, "maxItems": 200, "items": inner}
    yield case("arrays inside each other", inner)
    deep: Any = {"type": "integer"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    yield case("deep objects", deep)
    for count in (500, 5_000, 20_000):
        yield case(f"properties {count}", {"type": "object", "properties": {f"p{i}": {} for i in range(count)}})
    for count in (10, 50, 200):
        patterns_of = {f"^[a-z]{{1,{i}}}{i}$": {"type": "integer"} for i in range(1, count)}
        yield case(f"pattern properties {count}", {"type": "object", "patternProperties": patterns_of})
    for name, both in (("prefixItems", "items"), ("allOf", ""), ("anyOf", ""), ("oneOf", "")):
        definitions: dict[str, Any] = {"d25": {"const": 1}}
        for i in range(25):
            next_one = {"$ref": f"#/$defs/d{i + 1}"}
            definitions[f"d{i}"] = {name: [next_one, next_one]} | ({both: False, "minItems": 2} if both else {})
        yield case(f"references twice by {name}", {"$defs": definitions, "$ref": "#/$defs/d0"})
    yield case("reference to itself", {"$ref": "#"})
    loop = {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]}, "b": {"$ref": "#/$defs/a"}}
    yield case("references in a circle", {"$defs": loop, "$ref": "#/$defs/a"})
    chain = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}], "properties": {"a": {}}} for i in range(5_000)}
    yield case("chain of references", {"$defs": chain, "$ref": "#/$defs/d0"})
    formats = ("date-time", "uuid", "email", "ipv4", "ipv6", "uri", "hostname", "duration")
    yield case("formats", {"anyOf": [{"type": "string", "format": name} for name in formats]})
    for one, other in itertools.combinations(("email", "hostname", "uri", "ipv6"), 2):
        yield case(f"{one} and {other}", {"allOf": [{"type": "string", "format": name} for name in (one, other)]})


def _regexes() -> Iterator[Case]:
    def case(name: str, regex: str) -> Case:
        return name, "regex", regex

    yield case("counted nested x 500", "(x{1,9999}){1,9999}" * 500)
    yield case("counted nested", "(x{1,9999}){1,9999}")
    yield case("counted nested thrice", "((a{1,100}){1,100}){1,100}")
    for count in (1_000, 100_000, 1_000_000):
        yield case(f"any {count}", f".{{1,{count}}}")
        yield case(f"digits {count}", rf"\d{{1,{count}}}")
        yield case(f"letters {count}", rf"\p{{L}}{{1,{count}}}")
    yield case("counted alternatives", "(a|b|ab){1,5000}c")
    for count in (20, 100, 1_000, 5_000):
        yield case(f"states {count}", f"(a|b)*a(a|b){{{count}}}")
        yield case(f"states of any {count}", f".*a.{{{count}}}")
    yield case("states thrice", ".*a.{20}b.{20}c.{20}")
    yield case("states of classes", "(.*[a-e].{12}[f-j].{12})|(.*[k-o].{13}[p-t].{11})")
    yield case("classes", r"(\p{L}|\p{N}|\p{P}|\p{S}){1,500}")
    yield case("classes left out", r"[^\p{Lu}\p{Nd}]{1,3000}\p{Greek}")
    names = ("L", "N", "P", "S", "Lu", "Ll", "Lt", "Lm", "Lo", "Nd", "Nl", "No", "Greek", "Cyrillic", "Han")
    yield case("classes as alternatives", "|".join(rf"\p{{{name}}}{{1,50}}" for name in names))
    yield case("a class of 10000", "[" + "".join(chr(0x4E00 + 2 * i) for i in range(10_000)) + "]{1,100}")
    yield case("any case", "(?i)" + "|".join(f"word{i}" for i in range(5_000)))
    for count in (900, 50_000):
        yield case(f"parentheses {count}", "(" * count + "a" + ")" * count)
    yield case("words 50000", "|".join(f"w{i}" for i in range(50_000)))
    rng = random.Random(1)
    yield case("many words", "|".join("".join(rng.choices(string.ascii_letters, k=20)) for _ in range(20_000)))
    yield case("stars", "(a*)*b")
    yield case("stars nested", "((((a*)*)*)*)*b")
    for count in (100, 5_000):
        yield case(f"optional {count}", "a?" * count + "a" * count)
    yield case("the same alternatives", "(a|a|a|a|a)*b" * 200)
    yield case("optional words 3000", "(the |a |an )?" * 3_000)
    yield case("words and spaces", r"(\w+\s?)*!")
    yield case("mail", r"([a-zA-Z0-9._%+-]+)*@([a-zA-Z0-9.-]+)*\.[a-zA-Z]{2,2000}")
    yield case("nothing 20000 times", "|" * 20_000)
    yield case("places", "(?:" + "|".join(f".{{{i}}}x.*" for i in range(200)) + ")")
    yield case("suffixes", "|".join(f".*{letter}.{{{i}}}" for i, letter in enumerate("abcdefghijklmnop", 5)))


def _grammars() -> Iterator[Case]:
    def case(name: str, grammar: str) -> Case:
        return name, "grammar", grammar

    for count in (1_000, 20_000):
        yield case(f"alternatives {count}", "start: " + " | ".join(f'"w{i}" start' for i in range(count)))
        chain = "\n".join(f"r{i}: r{i + 1}" for i in range(count))
        yield case(f"rule chain {count}", f'start: r0\n{chain}\nr{count}: "x"')
    for count in (50, 500, 5_000):
        rules = "\n".join(f'a{i}: "x"?' for i in range(count))
        yield case(f"optional rules {count}", "start: " + " ".join(f"a{i}" for i in range(count)) + "\n" + rules)
    yield case("ambiguous 2", 'start: s\ns: s s | s s s | "a" | ""')
    yield case("ambiguous 4", 'start: s\ns: s s s s | "a" | "aa" | "aaa"')
    operators = " | ".join(f'e "{letter}" e' for letter in string.ascii_lowercase[:20])
    yield case("ambiguous operators", f'start: e\ne: {operators} | "x" | "xx"')
    yield case("left recursion", 'start: start "a" | "a"')
    yield case("recursion on both sides", 'start: s\ns: "a" s "a" | "b" s "b" | "c" s "c" | ""')
    yield case("empty loops", 'start: a*\na: b*\nb: c*\nc: "x"?')
    for end in ('"x"', '"x" | ""'):
        doubled = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40))
        yield case(f"doubled rules to {end}", f"start: r0\n{doubled}\nr40: {end}")
    yield case("regexes at once", "start: T\nT: /.*a.{20}/ & /.*b.{21}/ & /.*c.{22}/")
    yield case("a regex not", "start: T\nT: ~/(.*a.{20}b.*)/ & /[ab]{1,500}/")
    for count, length in ((300, 20), (2_000, 50)):
        names = " | ".join(f"T{i}" for i in range(count))
        some = "\n".join(f"T{i}: /[a-z]{{1,{i % length + 1}}}{i}/" for i in range(count))
        yield case(f"terminals {count}", f"start: ({names})*\n{some}")
        some = "\n".join(f"T{i}: /.*{chr(97 + i % 26)}.{{{i % length}}}/" for i in range(count))
        yield case(f"terminals of any {count}", f"start: ({names})*\n{some}")
    yield case("counted rules", 'start: a{1,100000}\na: "x" b{1,1000}\nb: "y"')
    yield case("counted rules nested", 'start: a{1,1000}\na: b{1,1000}\nb: c{1,1000}\nc: "x"')
    yield case("GBNF counted", "root ::= a{1,5000}\na ::= b{1,5000}\nb ::= [a-z]{1,5000}")
    yield case("GBNF deep", "root ::= " + "(" * 2_000 + '"a"' + ")" * 2_000)
    yield case("Lark deep", "start: " + "(" * 3_000 + '"a"' + ")" * 3_000)
    yield case("a schema inside", 'start: %json {"type": "integer", "multipleOf": 1999993}')
    letters = string.ascii_lowercase * 2_000
    yield case("parts of a text", f'start: %regex {{ "substring_chars": "{letters}" }}')
    yield case("words of a text", f'start: %regex {{ "substring_words": "{"the quick brown fox " * 5_000}" }}')
    yield case("one text, many ways", "start: " + " ".join(['("a"|"ab"|"abc")'] * 300))
    for count in (20_000, 200_000, 900_000):
        yield case(f"literal {count}", f'start: "{"y" * count}"')
        yield case(f"literal {count} later", f'start: /[0-9]{{3}}/ "{"y" * count}"')


def _choices() -> Iterator[Case]:
    yield "choice 10000", "choice", [f"choice number {i}" for i in range(10_000)]
    yield "choice of long texts", "choice", ["x" * 90 + str(i) for i in range(9_000)]
    yield "choice of one text", "choice", ["y" * 900_000]
    yield "choice of beginnings", "choice", ["a" * i for i in range(1, 1_300)]
