"""How the page at / shows Markdown, beside CommonMark's rules as markdown-it has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from octavo.entrypoints import chat_page

pytest.importorskip("playwright.sync_api")
JUDGE = MarkdownIt("commonmark", {"breaks": True, "html": False}).enable(["table", "strikethrough"])
# What models write. Of headings below the page's own only the order is kept, so each is two levels lower.
TEXTS = (
    "A paragraph\nof two lines.\n\nAnother one.",
    "# One\n## Two ##\n###### Six\n#no heading",
    "*it*, **bold**, ***both***, _it_, __bold__, ~~gone~~, **bold *and it* bold**",
    "snake_case_name and 2 * 3 * 4 = 24, **open, a*b*c, \\*no\\*, * no *",
    "`code`, ``a ` b``, `*no*`, unclosed ` tick, `a``b`",
    "- one\n- two\n  - inner\n    more of inner\n  - second\n- three",
    "1. one\n2. two\n   1. inner\n3. three\n\nafter",
    "3. three\n4. four",
    "* a\n* b\n\n  second paragraph of b\n* c",
    "1. Install:\n\n   ```bash\n   pip install x\n     indented\n   ```\n\n2. Run it",
    "- [link](https://a.example/x_(y)) and `code`\n- **bold**: text",
    "Intro:\n- no blank line before\n- is needed\n\nend",
    "> quote\n> goes on\n\n> # heading\n> - list",
    "> lazy\ncontinuation",
    "```python\nif a < b:\n    print('*no*')\n\n\nend\n```\ntext",
    "~~~\n``` inside\n~~~",
    "````md\n```\ninner\n```\n````",
    "```\nunclosed",
    "a\n\n---\n\nb\n***\nc",
    "| a | b |\n|---|:-:|\n| 1 | `x` |\n| **2** | |",
    "a | b\n--|--\n1 | 2 \\| 3\n\nafter",
    "text before\n| a | b |\n|---|---|\n| 1 | 2 |",
    "<b>no html</b> & <script>",
    "[a](https://x.example/ 'title') [**b** c](http://y.example/?d=e&f#g), [ref][x] [] [x] [ ] (x)",
    "<https://x.example/a?b=c>",
    "**Note:** *this* and **that**:\n\n* **Key**: value\n* **Other**: value",
    "- a\n\n\n- b\n\ntext\n\n- c",
    "10) ten\n11) eleven",
)
SOURCE = Path(str(chat_page.__file__)).parent / "page" / "markdown.js"
READ = """
  const body = document.createElement('div'), said = [], begin = performance.now();
  showMarkdown(body, text);
  const seconds = (performance.now() - begin) / 1000;
  const walk = node => {
    if (node.nodeType === Node.TEXT_NODE) return said.push(node.data);
    if (node.className === 'codehead') return;
    const name = {H3: 'h1', H4: 'h2', H5: 'h3', H6: 'h', DEL: 's'}[node.nodeName] ?? node.nodeName.toLowerCase();
    const shown = !['div', 'span'].includes(name);
    const more = name === 'a' ? ' ' + node.getAttribute('href') : name === 'ol' ? ' ' + node.start : '';
    if (shown) said.push(['<' + name + more]);
    node.childNodes.forEach(walk);
    if (shown) said.push(['/' + name]);
  };
  body.childNodes.forEach(walk);
  return [seconds, said];
"""


class Judged(HTMLParser):
    """What markdown-it makes of a text: texts, and lists of one for what begins and ends."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.said: list[Any] = []
        self.feed(JUDGE.render(text))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "img":
            self.said.append(f"![{given['alt']}]({given['src']})")
            return
        more = {"a": f" {given.get('href')}", "ol": f" {given.get('start', 1)}"}.get(tag, "")
        self.said.append([f"<{self._level(tag)}{more}"])
        if tag in ("br", "hr"):
            self.said.append([f"/{tag}"])

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("br", "hr"):
            self.said.append([f"/{self._level(tag)}"])

    def handle_data(self, data: str) -> None:
        self.said.append(data)

    @staticmethod
    def _level(tag: str) -> str:
        return "h" if tag in ("h4", "h5", "h6") else tag


def normal(said: list[Any]) -> list[str]:
    """Without what a reader does not see: space around blocks, whether an item's text is a paragraph, empty bodies."""
    result: list[str] = []
    in_item, in_code = 0, 0
    for one in said:
        if isinstance(one, list):
            [tag] = one
            in_item += {"<li": 1, "/li": -1}.get(tag, 0)
            in_code += {"<pre": 1, "/pre": -1}.get(tag, 0)
            if not (in_item and tag in ("<p", "/p")) and tag not in ("<tbody", "/tbody"):
                result.append(tag)
        elif text := one.rstrip("\n") if in_code else one.strip("\n"):
            if result and result[-1][0] == "'":
                result[-1] += text
            else:
                result.append("'" + text)
    return [one.rstrip() if one[0] == "'" else one for one in result]


@pytest.fixture(scope="module")
def show(browser: Any) -> Iterator[Callable[[str], tuple[float, list[Any]]]]:
    """``show(text)``: the seconds that the page's renderer takes for a text, and what it makes of it."""
    page = browser.new_page()
    renderer = f"text => {{ {SOURCE.read_text()}\n{READ} }}"
    yield lambda text: page.evaluate(renderer, text)
    page.close()


def test_texts_of_models_are_shown_as_commonmark_has_them(show: Callable[[str], Any]) -> None:
    differ = []
    for text in TEXTS:
        ours, theirs = normal(show(text)[1]), normal(Judged(text).said)
        if ours != theirs:
            differ.append(f"{text!r}\n  ours   {ours}\n  theirs {theirs}")
    assert not differ, "\n".join(differ)


def test_no_text_stops_the_page(show: Callable[[str], Any]) -> None:
    """100,000 characters that make careless readers of Markdown go over them again and again."""
    parts = (
        "[",
        "](",
        "![a](",
        "`",
        "``a`",
        "*",
        "**a ",
        "_a ",
        "> ",
        "- ",
        "|",
        " |-",
        "# ",
        "~~a",
        "(",
        "\\",
        "<https://",
    )
    long = [part * (100_000 // len(part)) for part in parts]
    long += ["a|b\n" + "-" + " " * 100_000 + "x", "https://" + "." * 100_000, "https://x" + ")" * 100_000]
    long += ["# a" + " " * 100_000 + "b", "```" + " " * 100_000 + "`", "\n".join("  " * i + "- a" for i in range(400))]
    took = {text[:20]: show(text)[0] for text in long}
    assert max(took.values()) < 10, took  # 0.1 on a machine with nothing else to do


def test_text_that_grows_keeps_what_is_shown(show: Callable[[str], Any], browser: Any) -> None:
    """After each piece of a stream the page shows what it would show of the text so far at once."""
    page = browser.new_page()
    grown = page.evaluate(
        f"""text => {{
      {SOURCE.read_text()}
      const host = document.createElement('div'), first = [];
      let wrong = 0;
      for (let end = 1; end <= text.length; end++) {{
        const fresh = document.createElement('div');
        showMarkdown(host, text.slice(0, end));
        showMarkdown(fresh, text.slice(0, end));
        wrong += !host.isEqualNode(fresh);
        first.push(host.firstChild);
      }}
      return [wrong, first.at(-1) === first.at(text.indexOf('\\n\\n') + 3)];
    }}""",
        "\n\n".join(TEXTS),
    )
    page.close()
    assert grown == [0, True], "and a block that is complete is not made anew"
