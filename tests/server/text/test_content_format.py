"""Templates that loop over contents get lists of parts, others get texts."""

from __future__ import annotations

import pytest

from octavo.text.content_format import PARTS, iterates_over_content, with_parts

TEXT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
LOOP = "{% for m in messages %}{% for c in m['content'] %}{{ c.type }}{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}{% endfor %}"
)
MACRO = "{% macro show(content) %}{% for item in content %}{{ item.text }}{% endfor %}{% endmacro %}"
NAMED = "{% for m in messages %}{% set parts = m.content %}{% for c in parts %}{{ c.text }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template, loops",
    [(TEXT, False), (LOOP, True), (BOTH, True), (MACRO, True), (NAMED, True), ("{% for", False), ("", False)],
)
def test_a_template_s_loops_over_contents_are_found(template: str, loops: bool) -> None:
    assert iterates_over_content(template) is loops


def message(*parts: object) -> dict[str, object]:
    return {"role": "user", "content": "\n".join(p for p in parts if isinstance(p, str)), PARTS: list(parts)}


def test_images_keep_their_places() -> None:
    image, plain = object(), {"role": "system", "content": "be brief"}
    said = message("look", image, "and tell")
    (_, listed) = with_parts([plain, said], BOTH, "<image>")
    assert listed["content"] == [
        {"type": "text", "text": "look"},
        {"type": "image"},
        {"type": "text", "text": "and tell"},
    ]
    (first, text) = with_parts([plain, said], TEXT, "<image>")
    assert first is plain and text == {"role": "user", "content": "look\n<image>\nand tell"}
    (wrapped, _) = with_parts([plain, said], LOOP, "<image>")
    assert wrapped["content"] == [{"type": "text", "text": "be brief"}]


def test_text_written_around_a_message_stays() -> None:
    said = message(object(), "and tell")
    said["content"] = f"Be brief.\n\n{said['content']}"
    (text,) = with_parts([said], TEXT, "<image>")
    assert text["content"] == "Be brief.\n<image>\nand tell"
