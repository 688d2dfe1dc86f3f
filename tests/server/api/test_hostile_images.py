"""Bad images over HTTP, in every dialect: each a 4xx that names its field, at once, and others' streams go on."""

from __future__ import annotations

import base64
import contextlib
import http.server
import io
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from support import media_server
from support.hostile_images import hostile_files, image
from support.images import make_tokenizer
from support.loop_watch import VARIABLE, LoopWatch
from support.neighbour import Neighbour
from support.run_queue import OwnTime
from support.vision import CASES

SLACK = 3.0  # test machines are shared
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}|{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    CASES["llava"].save(path)
    tokenizer = make_tokenizer()
    tokenizer.backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    (path / "preprocessor_config.json").write_text(json.dumps(sizes))
    config = json.loads((path / "config.json").read_text())
    config["image_token_index"] = config["image_token_id"] = tokenizer.convert_tokens_to_ids(["<image>"])[0]
    (path / "config.json").write_text(json.dumps(config))
    pictures = path / "pictures"
    pictures.mkdir()
    (pictures / "a.png").write_bytes(image("PNG"))
    (path / "secret.png").write_bytes(image("PNG"))
    (pictures / "link.png").symlink_to(path / "secret.png")
    (pictures / "up").symlink_to(path)
    os.mkfifo(pictures / "pipe.png")
    return path


def workers_of(pid: int) -> list[int]:
    """Processes that decode a server's images."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    found = []
    for child in [child for thread in threads for child in thread.read_text().split()]:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if b"pool_worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


@dataclass
class Server:
    """One that reads images, in a web of our own."""

    server: Any
    dialled: Path
    folder: Path

    @property
    def url(self) -> str:
        return str(self.server.url)

    @property
    def workers(self) -> list[int]:
        """Processes that decode images."""
        found = workers_of(self.server.process.pid)
        assert found
        return found

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.server.process  # type: ignore[no-any-return]

    @property
    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.server.process.pid}/fd"))


@pytest.fixture(scope="module")
def server(start: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    media_server.Web.picture = image("PNG")
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), media_server.Web)
    web.daemon_threads = True
    web.stop = threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=web.serve_forever, daemon=True).start()
    dialled = tmp_path_factory.mktemp("web") / "dialled"
    dialled.touch()
    env = {
        media_server.WEB: str(web.server_port),
        media_server.DIALLED: str(dialled),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    hosts = [*media_server.ADDRESSES, "127.0.0.1", "0x7f.1", "localhost"]
    flags = ["--limit-mm-per-prompt", '{"image": 3}', "--allowed-local-media-path", str(folder / "pictures")]
    flags += ["--allowed-media-domains", *hosts, "--max-model-len", "512", "--served-model-name", "tiny"]
    made = start("--dtype", "float32", *flags, model=folder, env=env, module="support.media_server serve")
    yield Server(made, dialled, folder)
    web.stop.set()  # type: ignore[attr-defined]
    web.shutdown()
    web.server_close()


@pytest.fixture
def neighbour(server: Server) -> Iterator[Neighbour]:
    """Somebody who streams while the test runs, and notices nothing."""
    made = Neighbour(server.url, server.server.pids)
    made.start()
    yield made
    made.check(longest_gap=2.0 * SLACK)
    assert server.server.get("/health").status_code == 200


# -- what the dialects send, and how they are answered ---------------------------------------------------------------


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def chat(url: Any) -> tuple[str, dict[str, Any], str]:
    """(path, body, field) of an image's url."""
    content = [{"type": "text", "text": "hm"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    return "/v1/chat/completions", body, "messages.0.content.1.image_url"


def responses(url: Any) -> tuple[str, dict[str, Any], str]:
    content = [{"type": "input_text", "text": "hm"}, {"type": "input_image", "image_url": url}]
    body = {"model": "tiny", "max_output_tokens": 16, "input": [{"role": "user", "content": content}]}
    return "/v1/responses", body, "input.0.content.1.image_url"


def messages(data: str) -> tuple[str, dict[str, Any], str]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "text", "text": "hm"}, {"type": "image", "source": source}]
    body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    return "/v1/messages", body, "messages.0.content.1.source.data"


def ollama(data: str) -> tuple[str, dict[str, Any], str]:
    said = {"role": "user", "content": "hm", "images": [data]}
    return "/api/chat", {"model": "tiny", "stream": False, "messages": [said]}, "messages.0.images.0"


def refused(server: Any, case: tuple[str, dict[str, Any], str], *words: str) -> str:
    """The message of a 400 in the dialect's own form, that names the field and came within a second, without
    what the server's processes waited for a processor that others had."""
    path, body, field = case
    pid = server.process.pid
    own = OwnTime([pid, *workers_of(pid)])
    answer = httpx.post(server.url + path, json=body, timeout=60)
    seconds = own.seconds
    assert answer.status_code == 400, (case[2], words, answer.text[:500])
    given = answer.json()
    if path.startswith("/api/"):
        assert set(given) == {"error"}
        message = given["error"]
    elif path == "/v1/messages":
        assert set(given) == {"type", "error"} and given["type"] == "error"
        message = given["error"]["message"]
        assert given["error"]["type"] == "invalid_request_error"
    else:
        assert set(given["error"]) == {"message", "type", "param", "code"}
        message = given["error"]["message"]
        assert given["error"]["param"] == field, (given, field)
    assert field in message, message
    for word in words:
        assert word in message, (word, message)
    assert "\n" not in message and len(message) < 700
    for word in ("Traceback", "PIL", "Pillow", "<_io", "/pictures", "secret"):  # what is nobody's business
        assert word not in message
    assert seconds < SLACK, (field, words, seconds)
    return str(message)


def test_hostile_files_are_refused_in_every_dialect(server: Server, neighbour: Neighbour) -> None:
    dialects = (
        lambda t: chat("data:image/png;base64," + t),
        lambda t: responses(f"data:;base64,{t}"),
        messages,
        ollama,
    )
    for number, (name, data, words) in enumerate(hostile_files()):
        refused(server, dialects[number % 4](encoded(data)), words), name
    # A wrong type is nothing bad: what a file is, its bytes say.
    path, body, _ = chat("data:text/html;base64," + encoded(image("JPEG")))
    assert httpx.post(server.url + path, json=body, timeout=60).status_code == 200


def test_a_body_that_is_too_much_of_an_image_is_refused(server: Server, neighbour: Neighbour) -> None:
    refused(server, messages("A" * 27_000_000), "20 MB")
    path, body, _ = chat("data:image/png;base64," + "A" * 34_000_000)
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 413 and "--max-request-bytes" in answer.json()["error"]["message"]


BAD_URLS: list[tuple[Any, str]] = [
    ("data:image/png;base64,@@@@", "base64"),
    ("data:image/png;base64,iVBORw0KGgo", "base64"),
    ("data:image/png;base64,aGVsbG8_", "base64"),
    ("data:image/png;base64,iVBO\nRw0KGgo=", "base64"),
    ("data:image/png;base64,iVBORw0KGgo\u00e9", "base64"),
    ("data:image/png;base64", "base64"),
    ("data:", "base64"),
    ("data:,", "base64"),
    ("data:image/png,iVBORw0KGgo=", "base64"),
    ("data:image/svg+xml;utf8,<svg/>", "base64"),
    ("data:image/png;base64,ZGF0YTppbWFnZS9wbmc7YmFzZTY0LGlWQk9SdzBLR2dvPQ==", "neither PNG"),
    ("", "must begin with"),
    ("ftp://pictures.example/a.png", "must begin with"),
    ("gopher://127.0.0.1:70/", "must begin with"),
    ("javascript:alert(1)", "must begin with"),
    ("unix:///var/run/docker.sock", "must begin with"),
    ("//pictures.example/a.png", "must begin with"),
    ("blob:https://pictures.example/1", "must begin with"),
    (3, "must be a url"),
    (None, "must be a url"),
    (["data:,"], "must be a url"),
    ({"url": "data:,"}, "must be a url"),
    ("https://other.example/a.png", "--allowed-media-domains"),
    ("http://pictures.example.evil.test/", "--allowed-media-domains"),
    ("http://2130706433/a.png", ""),
    ("http://0177.0.0.1/a.png", ""),
    ("http://127.1/a.png", ""),
    ("http://[::1]/a.png", "--allowed-media-domains"),
    ("http://[::ffff:127.0.0.1]/a.png", "--allowed-media-domains"),
    ("http://[::ffff:a9fe:a9fe]/latest/meta-data/", "--allowed-media-domains"),
    ("http://169.254.169.254/latest/meta-data/", "--allowed-media-domains"),
    ("http://10.0.0.1/a.png", "--allowed-media-domains"),
    ("http://[fe80::1%25eth0]/a.png", ""),
    ("http://127.0.0.1/a.png", ""),  # allowed by name, and no address of the internet
    ("http://127.0.0.1./a.png", ""),
    ("http://localhost/a.png", ""),
    ("http://localhost./a.png", ""),
    ("http://0x7f.1/a.png", ""),
    ("http://private.example/a.png", "not a public one"),
    ("http://metadata.example/latest/meta-data/", "not a public one"),
    ("http://both.example/a.png", "not a public one"),
    ("http://mapped.example/a.png", "not a public one"),
    ("http://user:password@pictures.example/a.png", "credentials"),
    ("http://pictures.example@127.0.0.1/a.png", ""),
    ("http://127.0.0.1\\@pictures.example/a.png", "backslash"),
    ("http://pictures.example\t.evil.test/", "control character"),
    ("http://pictures.example:99999/a.png", ""),
    ("http://", ""),
    ("file:///etc/passwd", "--allowed-local-media-path"),
    ("file:///proc/self/environ", "--allowed-local-media-path"),
    ("file://{pictures}/../secret.png", "--allowed-local-media-path"),
    ("file://{pictures}/%2e%2e/secret.png", "--allowed-local-media-path"),
    ("file://{pictures}/link.png", "--allowed-local-media-path"),
    ("file://{pictures}/up/secret.png", "--allowed-local-media-path"),
    ("file://{pictures}/pipe.png", "--allowed-local-media-path"),
    ("file://{pictures}", "--allowed-local-media-path"),
    ("file://{pictures}/none.png", "--allowed-local-media-path"),
    ("file://{pictures}/a.png%00.txt", "--allowed-local-media-path"),
    ("file://evil.test{pictures}/a.png", "file: urls are of this machine"),
]


def test_addresses_are_refused_before_anything_is_dialled(server: Server, neighbour: Neighbour) -> None:
    for url, words in BAD_URLS:
        if isinstance(url, str):
            url = url.replace("{pictures}", str(server.folder / "pictures"))
        try:
            refused(server, chat(url), words)
        except AssertionError as error:
            raise AssertionError(f"{url}: {error}") from None
    refused(server, responses("http://metadata.example/"), "not a public one")
    source = {"type": "url", "url": "http://private.example/"}
    said = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    asked = "/v1/messages", {"model": "tiny", "max_tokens": 2, "messages": said}, "messages.0.content.0.source.url"
    refused(server, asked, "not a public one")
    assert server.dialled.read_text() == ""
    for good in (f"file://{server.folder}/pictures/a.png", "http://pictures.example/a.png"):
        path, body, _ = chat(good)
        answer = httpx.post(server.url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text


def test_hostile_web_servers_are_refused_in_bounded_time(server: Server, neighbour: Neighbour) -> None:
    for path, words in (
        ("redirect", "redirect"),
        ("gzip", "neither PNG"),
        ("huge", "more than 20 MB"),
        ("missing", "answers 404"),
        ("page", "neither PNG"),
        ("endless", "more than 20 MB"),
    ):
        refused(server, chat(f"http://pictures.example/{path}.png"), words)
    own = OwnTime([server.process.pid])
    path, body, _ = chat("http://pictures.example/slow.png")
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 400 and "did not arrive within" in answer.json()["error"]["message"]
    assert own.seconds < media_server.SECONDS + SLACK
    # The checked address is dialled: that the name server says something else the next time changes nothing.
    server.dialled.write_text("")
    path, body, _ = chat("http://rebinding.example/a.png")
    assert httpx.post(server.url + path, json=body, timeout=60).status_code == 200
    refused(server, chat("http://rebinding.example/b.png"), "not a public one")
    assert server.dialled.read_text().split() == [media_server.PUBLIC]
    asked = [headers for seen, headers in media_server.Web.seen if seen == "/a.png"]
    assert asked and not {"authorization", "cookie", "referer"} & asked[-1].keys()


def test_parts_that_are_no_images_are_refused_by_name(server: Server, neighbour: Neighbour) -> None:
    for part, words in (
        ({"type": "video_url", "video_url": {"url": "data:,"}}, "no model reads video"),
        ({"type": "video", "video": "data:,"}, "no model reads video"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "no model reads audio"),
        ({"type": "audio_url", "audio_url": {"url": "data:,"}}, "no model reads audio"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "no model reads file"),
        ({"type": "image_pil", "image_pil": "x"}, "is not supported"),
        ({"type": "image_embeds", "image_embeds": "x"}, "is not supported"),
        ({"type": "image_url", "image_url": {"url": "data:,", "detail": "huge"}}, "detail must be"),
        ({"type": "image_url"}, "must be a url"),
        ({"image_url": {"url": "data:,"}}, "must be an object"),
    ):
        body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
        answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
        error = answer.json()["error"]
        assert answer.status_code == 400 and words in error["message"], answer.text
        assert error["param"].startswith("messages.0.content.0")
    for part in ({"type": "input_audio", "data": ""}, {"type": "input_file", "file_id": "x"}, {"type": "input_video"}):
        body = {"model": "tiny", "input": [{"role": "user", "content": [part]}]}
        answer = httpx.post(server.url + "/v1/responses", json=body, timeout=60)
        assert answer.status_code == 400 and part["type"] in answer.text, answer.text
    for part in ({"type": "document", "source": {"type": "text", "data": "x"}}, {"type": "video", "source": {}}):
        body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": [part]}]}
        answer = httpx.post(server.url + "/v1/messages", json=body, timeout=60)
        assert answer.status_code == 400 and part["type"] in answer.json()["error"]["message"], answer.text
    many = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + encoded(image("PNG"))}}] * 4
    body = {"model": "tiny", "messages": [{"role": "user", "content": many}]}
    refused(server, ("/v1/chat/completions", body, "messages.0.content.0.image_url"), "at most 3")
    body = {"model": "tiny", "mm_processor_kwargs": {"do_resize": False}, "messages": body["messages"]}
    refused(server, ("/v1/chat/completions", body, "mm_processor_kwargs"))


def test_a_text_model_names_itself_in_every_dialect(shared_server: Any, tiny_model: Path) -> None:
    code = encoded(image("PNG"))
    url = "data:image/png;base64," + code
    for case in (chat(url), responses(url), messages(code), ollama(code)):
        refused(shared_server, case, tiny_model.name, "text")


# -- processes that fail ---------------------------------------------------------------------------------------------


def asked(server: Server, data: bytes | None = None) -> httpx.Response:
    path, body, _ = chat("data:image/png;base64," + encoded(data or image("PNG", seed=time.monotonic_ns())))
    return httpx.post(server.url + path, json=body, timeout=60)


def test_a_worker_that_is_killed_or_stopped_fails_its_image_alone(server: Server, neighbour: Neighbour) -> None:
    assert asked(server).status_code == 200
    before = server.num_descriptors
    for _ in range(3):  # one that waits for images
        for worker in server.workers:
            os.kill(worker, signal.SIGKILL)
        assert asked(server).status_code == 200
    for ends in (False, True):  # one at work
        for worker in server.workers:
            os.kill(worker, signal.SIGSTOP)
        if ends:
            threading.Timer(media_server.SECONDS / 2, os.kill, (server.workers[0], signal.SIGKILL)).start()
        own = OwnTime([server.process.pid])
        answer = asked(server)
        assert answer.status_code == 400 and "could not be processed" in answer.json()["error"]["message"], answer.text
        assert answer.json()["error"]["param"] == "messages.0.content.1.image_url"
        assert own.seconds < media_server.SECONDS + SLACK
        assert asked(server).status_code == 200
    deadline = time.monotonic() + 90
    while server.num_descriptors > before + 2:  # connections that are about to close
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_more_images_than_the_queue_takes_are_refused_and_the_rest_answered(server: Server) -> None:
    """Eighty at once, of which a pool of one process takes 64."""
    assert asked(server).status_code == 200  # it is there
    for worker in server.workers:
        os.kill(worker, signal.SIGSTOP)
    with ThreadPoolExecutor(80) as threads:
        answers = [threads.submit(asked, server) for _ in range(80)]
        time.sleep(1.0)
        for worker in server.workers:
            os.kill(worker, signal.SIGCONT)
        found = [answer.result() for answer in answers]
    codes = sorted({answer.status_code for answer in found})
    assert codes[0] == 200 and set(codes) <= {200, 400, 429}, codes
    for answer in found:
        if answer.status_code == 429:
            assert "queue of images full" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"] == "1"
    assert asked(server).status_code == 200


def test_a_placeholder_in_a_text_is_no_image(server: Server) -> None:
    """Beside images it is refused by name; alone it is the token that it names, as every special token in a text."""
    path, body, _ = chat("data:image/png;base64," + encoded(image("PNG")))
    body["messages"][0]["content"][0]["text"] = "is <image> one?"
    refused(server, (path, body, "messages.0.content"), "<image>")
    path, body, _ = messages(encoded(image("PNG")))
    body["messages"][0]["content"][0]["text"] = "is <image> one?"
    refused(server, (path, body, "messages.0.content"), "<image>")
    path, body, _ = ollama(encoded(image("PNG")))
    body["messages"][0]["content"] = "is <image> one?"
    refused(server, (path, body, "messages.0.content"), "<image>")
    body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "is <image> one?"}]}
    alone = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
    assert alone.status_code == 200 and alone.json()["usage"]["prompt_tokens"] < 30


# -- the event loop --------------------------------------------------------------------------------------------------


def photograph(seed: int) -> bytes:
    """A JPEG of 12 megapixels and about 5 MB."""
    draw = np.random.default_rng(seed)
    rough = Image.fromarray(draw.integers(0, 256, (300, 400, 3), np.uint8)).resize(
        (4_000, 3_000), Image.Resampling.BICUBIC
    )
    grain = draw.integers(-14, 15, (3_000, 4_000, 3), np.int16)
    out = io.BytesIO()
    Image.fromarray((np.asarray(rough) + grain).clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=92)
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, pytest.param(20, marks=[pytest.mark.long, pytest.mark.alone])])
def test_large_images_do_not_hold_up_the_loop(start: Any, folder: Path, tmp_path: Path, count: int) -> None:
    """The longest turn of the loop, which what other threads do with the interpreter is part of, but not what the loop
    waits for a processor; on a machine of its own (``alone``) with that. `-s` shows both, and CPU time. The clients,
    which no server has on its own machine, are nice (on Linux, threads are, each for itself)."""
    watch = LoopWatch(tmp_path / "watch")
    env = {VARIABLE: str(tmp_path / "watch"), "PYTHONPATH": str(Path(__file__).parents[2])}
    flags = ["--dtype", "float32", "--max-model-len", "512", "--served-model-name", "tiny"]
    server = start(*flags, model=folder, env=env, module="support.loop_watch serve")
    images = [encoded(photograph(seed)) for seed in range(4)]
    one = [json.dumps(chat(f"data:image/jpeg;base64,{images[i % 4]}")[1]) for i in range(count)]
    path, several, _ = chat(f"data:image/jpeg;base64,{images[0]}")
    several["messages"][0]["content"] += [several["messages"][0]["content"][1]] * 2  # 20 MB in one body
    head = {"content-type": "application/json"}

    def post(body: str) -> int:
        return httpx.post(server.url + path, content=body, headers=head, timeout=300).status_code

    assert post(json.dumps(several)) == 200
    for bodies in (one, [json.dumps(several)] * (count // 4)):
        found: list[float] = []
        # The best of three: a thread that has the interpreter may wait for a processor, too.
        while not found or (found[-1] > 0.020 * (SLACK if count < 20 else 1.0) and len(found) < 3):
            neighbour = Neighbour(server.url)
            neighbour.start()
            watch.reset()
            with ThreadPoolExecutor(len(bodies), initializer=os.nice, initargs=(19,)) as threads:
                assert set(threads.map(post, bodies)) == {200}
            longest, own, most = watch.longest
            neighbour.check(longest_gap=30.0)
            print(
                f"\n{len(bodies)} bodies: longest turn {longest * 1e3:.1f} ms, without waits for a processor "
                f"{own * 1e3:.1f} ms; most CPU time of one {most * 1e3:.1f} ms"
            )
            found.append(longest if count == 20 else own)
        assert min(found) <= 0.020 * (SLACK if count < 20 else 1.0), found
    server.kill()
