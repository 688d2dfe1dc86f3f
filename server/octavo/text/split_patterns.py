r"""Patterns by which byte-level vocabularies split a text into words before they merge bytes.

All of them cut between a letter and a space, whatever stands further left or right: no match goes on from a letter over
a space, and one that begins with the space depends on nothing before it.
"""

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
TEKKEN = rf"{_CASED.replace('{0}', '')}|\p{{N}}|{_SYMBOLS}|{_REST}"
GPT4O = rf"{_CASED.replace('{0}', _ENDINGS + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_REST}"

KNOWN = frozenset({LLAMA3, QWEN2, TEKKEN, GPT4O})
