"""The page at / of a server, in a browser."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from PIL import Image
from support.scripted_server import API_KEY, ScriptedServer
from support.serving import free_port, tiny_model

from octavo.chat_client import CHAT_SAMPLING
from octavo.fetch.model_names import FIRST_QUESTIONS

expect = pytest.importorskip("playwright.sync_api").expect
HOSTILE = (
    "<img src=x onerror=\"document.title='run'\"> <script>document.title='run'</script> "
    "[press](javascript:document.title='run') ![x](https://elsewhere.example/pixel.png) "
    "[data](data:text/html,x) <https://elsewhere.example/a> https://elsewhere.example/b. [file](file:///etc/passwd)\n\n"
    "| a | b |\n|---|--:|\n| <svg onload=\"document.title='run'\"> | 1 |\n\n"
    "```html\n<script>document.title='run'</script>\n```"
)
GIVE = """([kind, name, type, code]) => {
  const data = Uint8Array.from(atob(code), one => one.charCodeAt(0)), files = new DataTransfer();
  files.items.add(new File([data], name, {type}));
  const event = kind === 'paste' ? new ClipboardEvent(kind, {clipboardData: files, bubbles: true, cancelable: true})
    : new DragEvent(kind, {dataTransfer: files, bubbles: true, cancelable: true});
  document.querySelector('#message').dispatchEvent(event);
}"""
PASTE = """([selector, length]) => {
  const data = new DataTransfer();
  data.setData('text/plain', 'word '.repeat(length / 5));
  const event = new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true});
  return document.querySelector(selector).dispatchEvent(event);
}"""


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def answers(page: Any, count: int) -> Any:
    """The last answer, once there are so many and it is complete."""
    expect(page.locator(".assistant")).to_have_count(count)
    last = page.locator(".assistant").last
    expect(last.get_by_role("button", name="Retry")).to_be_visible()
    return last


@pytest.fixture
def page(scripted: ScriptedServer, visit: Callable[[str], Any]) -> Iterator[Any]:
    """The page of the scripted server, ready; nothing may go wrong in it."""
    scripted.answers.clear()
    scripted.requests.clear()
    shown = visit(scripted.url)
    expect(shown.page.locator("#state")).to_have_text("Ready")
    expect(shown.page.locator("#model")).to_have_value("scripted")
    yield shown.page
    assert not [one for one in shown.problems if "400" not in one]


def test_an_answer_that_came_at_once_has_no_rate(scripted: ScriptedServer, page: Any) -> None:
    scripted.answers["collected"] = ["all ", "at ", "once"]
    scripted.at_once = True
    try:
        ask(page, "collected")
        expect(answers(page, 1).locator(".figures")).to_contain_text("3 tokens")
    finally:
        scripted.at_once = False
    assert "tokens/s" not in answers(page, 1).locator(".figures").inner_text()


def test_an_answer_streams_and_says_what_it_cost(scripted: ScriptedServer, page: Any) -> None:
    seen = threading.Event()
    scripted.answers["hello"] = [("let me ", ""), ("see", ""), "**bold** ", seen, "`code`"]
    ask(page, "hello")
    expect(page.locator(".assistant .body strong")).to_have_text("bold")
    seen.set()
    answer = answers(page, 1)
    for figure in ("first token", "tokens/s", "4 tokens", "48 of 64 prompt tokens cached"):
        expect(answer.locator(".figures")).to_contain_text(figure)
    assert answer.locator(".body").inner_html() == "<p><strong>bold</strong> <code>code</code></p>"
    expect(answer.get_by_text("let me see")).not_to_be_visible()
    answer.get_by_text("Thinking").click()
    expect(answer.get_by_text("let me see")).to_be_visible()
    body = scripted.requests[-1]
    assert body["stream_options"] == {"include_usage": True} and body["max_tokens"] == 8192 // 4
    assert not CHAT_SAMPLING.keys() & body.keys(), "the model's own recommendation holds"


def test_questions_are_proposed_and_what_is_being_written_stays(scripted: ScriptedServer, page: Any) -> None:
    first, *_, last = FIRST_QUESTIONS
    scripted.answers[f"please\n{first}"] = ["Paris"]
    page.get_by_label("Message", exact=True).fill("please")
    page.get_by_role("button", name=first).click()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(answers(page, 1).locator(".body")).to_have_text("Paris")
    expect(page.get_by_role("button", name=last)).to_have_count(0)


def test_stop_edit_retry_and_undo_lose_nothing(scripted: ScriptedServer, page: Any) -> None:
    scripted.answers["wait"] = ["begun ", 30.0, "never"]
    page.locator("#settings summary").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    ask(page, "first")
    answers(page, 1)
    ask(page, "wait")
    page.get_by_text("begun").wait_for()
    page.get_by_label("Message", exact=True).fill("a draft while it answers")
    page.get_by_role("button", name="Stop").click()
    expect(answers(page, 2).locator(".figures")).to_contain_text("stopped")
    scripted.answers["wait"] = ["again"]
    answers(page, 2).get_by_role("button", name="Retry").click()
    expect(answers(page, 2).locator(".body")).to_have_text("again")
    said = [message["content"] for message in scripted.requests[-1]["messages"]]
    assert said == ["Be brief.", "first", "fine", "wait"] and scripted.requests[-1]["temperature"] == 0.5
    page.locator(".user").first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit: You").fill("second")
    page.get_by_label("Edit: You").press("Control+Enter")
    answers(page, 1)
    assert [message["content"] for message in scripted.requests[-1]["messages"]] == ["Be brief.", "second"]
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".body")).to_have_text(["first", "fine", "wait", "again"])
    page.locator(".assistant").first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit: Answer").fill("better")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".body")).to_have_text(["first", "better", "wait", "again"])
    expect(page.get_by_label("Message", exact=True)).to_have_value("a draft while it answers")
    page.reload()
    expect(page.locator(".body")).to_have_text(["first", "better", "wait", "again"])
    expect(page.get_by_label("Message", exact=True)).to_have_value("a draft while it answers")
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".message")).to_have_count(4)


def test_model_output_runs_nothing_and_no_request_leaves(
    scripted: ScriptedServer, visit: Callable[[str], Any], page: Any
) -> None:
    scripted.answers |= {"hostile": [HOSTILE[:20], HOSTILE[20:]], "word": ["x" * 100_000]}
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.reload()
    expect(page.locator("#state")).to_have_text("Ready")
    title = page.title()
    for count, question in enumerate(("hostile", "word", HOSTILE), 1):
        ask(page, question)
        answers(page, count)
    page.get_by_role("tab", name="Model").click()
    page.get_by_role("tab", name="Memory").click()
    page.get_by_role("tab", name="Chat").click()
    shown = page.locator("#messages")
    links = [link.get_attribute("href") for link in shown.locator("a").all()]
    assert links == [f"https://elsewhere.example/{name}" for name in ("pixel.png", "a", "b")]
    assert shown.locator("script, iframe, svg, img").count() == 0
    assert shown.get_by_text("<script>document.title='run'</script>").count() >= 2
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a long word is wrapped"
    assert page.title() == title
    assert requested and all(url.startswith((scripted.url, "data:")) for url in requested), requested
    policy = httpx.get(scripted.url).headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    refused = "html => { try { document.body.innerHTML = html; return false } catch { return true } }"
    assert visit(scripted.url).page.evaluate(refused, HOSTILE), "no text can become HTML"


def test_pictures_are_sent_made_smaller_or_refused_in_words(
    scripted: ScriptedServer, visit: Callable[[str], Any], page: Any, monkeypatch: Any
) -> None:
    small, large = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (40, 50), "red").save(small, "PNG")
    Image.new("RGB", (4096, 1024), "red").save(large, "PNG")
    given = [b64encode(one.getvalue()).decode() for one in (small, large)]
    page.get_by_label("Message", exact=True).fill("what is this?")
    page.evaluate(GIVE, ["drop", "small.png", "image/png", given[0]])
    expect(page.locator("#note")).to_contain_text("scripted reads no pictures")
    expect(page.get_by_label("Message", exact=True)).to_have_value("what is this?")
    monkeypatch.setattr(scripted, "reads_images", True)
    page.reload()
    expect(page.get_by_role("button", name="Picture", exact=True)).to_be_visible()
    expect(page.get_by_label("Message", exact=True)).to_have_value("what is this?")
    page.evaluate(GIVE, ["drop", "small.png", "image/png", given[0]])
    page.evaluate(GIVE, ["paste", "large.png", "image/png", given[1]])
    page.evaluate(GIVE, ["drop", "third.png", "image/png", given[0]])
    expect(page.locator("#pictures img")).to_have_count(3)
    page.evaluate(GIVE, ["drop", "text.png", "image/png", b64encode(b"no picture").decode()])
    expect(page.locator("#note")).to_contain_text("text.png is no picture")
    page.get_by_role("button", name="Remove picture 3").press("Enter")
    expect(page.locator("#pictures img")).to_have_count(2)
    page.get_by_label("Message", exact=True).press("Enter")
    answers(page, 1)
    *pictures, text = scripted.requests[-1]["messages"][-1]["content"]
    assert text == {"type": "text", "text": "what is this?"}
    sent = [Image.open(io.BytesIO(b64decode(one["image_url"]["url"].partition(",")[2]))) for one in pictures]
    assert [(one.format, one.size) for one in sent] == [("PNG", (40, 50)), ("JPEG", (2048, 512))]
    expect(page.locator(".user img")).to_have_count(2)
    page.reload()
    expect(page.locator(".user img")).to_have_count(2)


def test_calls_of_tools_are_shown_and_their_results_sent(scripted: ScriptedServer, page: Any) -> None:
    begin = {"index": 0, "id": "call-1", "function": {"name": "get_weather", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"Paris"}'}}
    scripted.answers |= {"weather?": [{"tool_calls": [begin]}, {"tool_calls": [rest]}], "rain": ["It rains."]}
    page.locator("#settings summary").click()
    page.get_by_label("Tools, as JSON").fill("[{]")
    ask(page, "weather?")
    expect(answers(page, 1).locator(".problem-text")).to_contain_text("not JSON")
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    page.get_by_label("Tools, as JSON").fill(json.dumps(tools))
    answers(page, 1).get_by_role("button", name="Retry").click()
    expect(page.get_by_text("Calls get_weather")).to_be_visible()
    expect(page.get_by_label("Code JSON")).to_have_text('{\n  "city": "Paris"\n}')
    page.get_by_label("What get_weather returns").fill("rain")
    page.get_by_role("button", name="Send results").click()
    expect(answers(page, 2).locator(".body")).to_have_text("It rains.")
    body = scripted.requests[-1]
    assert body["tools"] == tools
    assert body["messages"][-1] == {"role": "tool", "tool_call_id": "call-1", "content": "rain"}
    call = {"id": "call-1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    assert body["messages"][-2]["tool_calls"] == [call]


def test_an_answer_that_breaks_off_is_kept_and_can_be_asked_for_again(scripted: ScriptedServer, page: Any) -> None:
    scripted.answers |= {"die": ["half of ", None], "gone": [None]}
    scripted.refusals["refused"] = "the words of the server"
    ask(page, "die")
    answer = answers(page, 1)
    expect(answer.locator(".body")).to_have_text("half of")
    expect(answer.locator(".problem-text")).to_contain_text("broke off")
    page.reload()
    expect(page.locator(".body").first).to_have_text("die")
    scripted.answers["die"] = ["all of it"]
    answers(page, 1).get_by_role("button", name="Retry").click()
    expect(answers(page, 1).locator(".body")).to_have_text("all of it")
    expect(answers(page, 1).locator(".problem-text")).not_to_be_visible()
    ask(page, "gone")
    answers(page, 2)
    ask(page, "next")
    answers(page, 3)
    said = [message["content"] for message in scripted.requests[-1]["messages"]]
    assert said == ["die", "all of it", "next"], "turns alternate: what was not answered is left out"
    page.locator(".assistant").nth(1).get_by_role("button", name="Retry").click()
    answers(page, 2)
    scripted.most_messages = 1
    ask(page, "more")
    expect(answers(page, 3).locator(".figures")).to_contain_text("without the oldest")
    scripted.most_messages = None


def test_refusals_and_a_server_that_is_gone_are_words(scripted: ScriptedServer, visit: Callable[[str], Any]) -> None:
    scripted.refusals["refused"] = "the words of the server"
    with ScriptedServer() as other:
        shown = visit(other.url)
        page = shown.page
        expect(page.locator("#state")).to_have_text("Ready")
        other.refusals["refused"] = "the words of the server"
        ask(page, "refused")
        expect(answers(page, 1).locator(".problem-text")).to_have_text("the words of the server")
    ask(page, "anybody?")
    expect(answers(page, 2).locator(".problem-text")).to_contain_text("does not answer")
    expect(page.locator("#state")).to_have_text("The server does not answer")
    expect(page.locator(".user .body")).to_have_text(["refused", "anybody?"])


def test_the_key_is_asked_for_and_kept_in_its_tab_alone(
    scripted: ScriptedServer, visit: Callable[[str], Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(scripted, "needs_key", True)
    page = visit(scripted.url).page
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    field = page.get_by_label("Key", exact=True)
    field.press("Escape")
    expect(page.locator("#state")).to_contain_text("asks for an API key")
    page.locator("#state").get_by_role("button", name="Retry").click()
    field.fill("wrong")
    field.press("Enter")
    expect(page.locator("#ask-why")).to_contain_text("does not accept this key")
    field.fill(API_KEY)
    page.get_by_role("button", name="Use this key").click()
    expect(page.locator("#model")).to_have_value("scripted")
    ask(page, "hello")
    answers(page, 1)
    assert page.evaluate("Object.values(localStorage).join()").find(API_KEY) < 0
    assert API_KEY not in page.content() and not any(API_KEY in url for url in urls)
    page.reload()
    ask(page, "again")
    answers(page, 2)


def test_a_paste_of_20_mb_is_refused_in_words(scripted: ScriptedServer, page: Any) -> None:
    page.get_by_label("Message", exact=True).fill("typed before")
    assert not page.evaluate(PASTE, ["#message", 20_000_000]), "it is not pasted"
    expect(page.locator("#note")).to_contain_text("20,000,000 characters")
    expect(page.get_by_label("Message", exact=True)).to_have_value("typed before")
    page.get_by_role("button", name="Paste the first 131,072").click()
    assert len(page.get_by_label("Message", exact=True).input_value()) == 131_072 + len("typed before")
    assert page.evaluate(PASTE, ["#message", 100]), "short ones are"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it(scripted: ScriptedServer, browser: Any, axe: str, scheme: str) -> None:
    """No violation of axe's rules in any tab, also 390 pixels wide, where nothing is cut off; and by keyboard alone."""
    scripted.answers["all"] = [("thought", ""), f"# Title\n\n> quote\n\n- one\n- [two](https://x.example)\n\n{HOSTILE}"]
    page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    page.goto(scripted.url)
    expect(page.locator("#state")).to_have_text("Ready")
    page.evaluate(axe)

    def look() -> None:
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        assert not found, [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    look()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("all")
    page.keyboard.press("Enter")
    answers(page, 1)
    page.locator("#settings summary").click()
    page.locator(".assistant").get_by_text("Thinking").click()
    look()
    page.locator(".user").get_by_role("button", name="Edit").click()
    look()
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Chat").focus()
    for name in ("Model", "Memory"):
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name=name)).to_be_focused()
        expect(page.locator("section:not([hidden])").get_by_text(re.compile("base URL|KV cache"))).to_be_visible()
        look()
    page.close()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an `octavo serve` with a key, below a path of a proxy, without a management port."""
    folder = tmp_path_factory.mktemp("real")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    port = free_port()
    flags = ("--port", str(port), "--host", "127.0.0.1", "--api-key", API_KEY, "--root-path", "/llm")
    model = ("--load-format", "dummy", "--served-model-name", "tiny", "--chat-template", template)
    command = [sys.executable, "-m", "octavo.cli.main", "serve", str(tiny_model(folder / "model")), *flags, *model]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 120
        while "serving tiny" not in (folder / "log").read_text():
            assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/llm"
    finally:
        process.terminate()
        process.wait(90)


def test_a_real_server_chats_and_shows_its_blocks(real: str, visit: Callable[[str], Any]) -> None:
    begin = time.monotonic()
    page = visit(real).page
    page.get_by_label("Key", exact=True).wait_for()
    print(f"asks for the key {time.monotonic() - begin:.2f} s after it was opened")
    page.get_by_label("Key", exact=True).fill(API_KEY)
    page.get_by_label("Key", exact=True).press("Enter")
    expect(page.locator("#model")).to_have_value("tiny")
    page.locator("#settings summary").click()
    page.get_by_label("temperature").fill("0")  # the same answer each time: a drawn one may end at once, or be too long
    page.get_by_label("max_tokens").fill("200")
    ask(page, "hello " * 10)
    expect(answers(page, 1).locator(".figures")).to_contain_text("200 tokens")
    ask(page, "more")
    expect(answers(page, 2).locator(".figures")).to_contain_text(re.compile(r"[1-9]\d* of \d+ prompt tokens cached"))
    page.get_by_role("tab", name="Memory").click()
    expect(page.locator("#memory")).to_contain_text(re.compile(r"blocks: \d+ used, [1-9]\d* cached"))
    page.get_by_role("tab", name="Model").click()
    for fact in ("1,024 tokens, prompt and answer together", "completion", f"{real}/v1"):
        expect(page.locator("#details")).to_contain_text(fact)


def test_whoever_asks_without_a_browser_needs_the_key_and_gets_words(real: str) -> None:
    key = {"Authorization": f"Bearer {API_KEY}"}
    assert httpx.get(real).status_code == 401, "it would tell the model's name"
    said = httpx.get(real, headers=key)
    assert said.headers["content-type"].startswith("text/plain") and "Octavo serves tiny." in said.text
    page = httpx.get(real, headers={"Accept": "text/html"})
    assert page.status_code == 200 and "tiny" not in page.text
    blocks = httpx.get(f"{real}/octavo/blocks", headers=key).json()
    assert blocks["num_blocks"] > 0 and blocks["running"] == [], "others' ids are no business of a client"
