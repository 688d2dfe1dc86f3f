"""`octavo chat`, in a terminal as people have it and with its input from a pipe."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from support.chat_terminal import CHAT, Terminal
from support.gguf_files import write_gguf
from support.scripted_server import ScriptedServer
from support.tiny_models import FAMILIES, make_model

import octavo_kernels
from octavo.chat_client import CHAT_SAMPLING, Answer, Client, Model, stream
from octavo.cli.conversation import Conversation
from octavo.fetch.model_names import FIRST_QUESTIONS
from octavo_kernels.cpu import compiler


@pytest.fixture
def terminal(shared_server):
    # A sampled answer may end before it is cut.
    return Terminal("--url", shared_server.url + "/v1", "--max-tokens", "8", "--temperature", "0")


def run(url: str, *flags: str, text: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "OPENAI_API_KEY"} | env
    return subprocess.run(
        [*CHAT, "--url", url, *flags], input=text, capture_output=True, text=True, timeout=60, env=environment
    )


def test_a_conversation(terminal):
    terminal.wait_for_prompt()
    for count, message in enumerate(["Hello", "And now?", "/clear", ""], 2):
        terminal.type(message + "\n")
        terminal.wait_for_prompt(count)
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    assert "/? for help" in terminal.shown and "(forgotten)" in terminal.shown


def test_ctrl_c_stops_an_answer_and_then_the_chat(shared_server):
    # By chance an answer may be over before anybody looks: this one takes hundreds of tokens.
    terminal = Terminal("--url", shared_server.url + "/v1", "--max-tokens", "900", "--temperature", "0")
    terminal.wait_for_prompt()
    terminal.type("Write a long story about a river.\r")
    deadline = time.monotonic() + 90
    while shared_server.get("/load").json()["server_load"] == 0:
        assert time.monotonic() < deadline, "no answer was seen under way"
        time.sleep(0.01)
    terminal.type("\x03")
    terminal.wait_for_prompt(2)
    terminal.type("never sent\x03")  # gives up the line
    terminal.wait_for_prompt(3)
    assert "Ctrl-C again" not in terminal.shown
    terminal.type("\x03")
    terminal.wait_for("Ctrl-C again")
    terminal.type("\x03")
    # A key that was typed once too often may come while Python ends. A shell says 130 either way.
    assert terminal.exit_code(again="\x03") in (130, -signal.SIGINT)
    deadline = time.monotonic() + 90
    while shared_server.get("/load").json()["server_load"]:
        assert time.monotonic() < deadline, "it answers nobody"
        time.sleep(0.02)


def test_the_conversation_goes_on_after_a_message_that_is_refused(terminal):
    """Here one that is too long: what was said before stands, and so does what comes."""
    terminal.wait_for_prompt()
    terminal.type("brown fox " * 600 + "\r")
    terminal.wait_for("max_model_len")
    terminal.type("short\r")
    terminal.wait_for("cut after")
    terminal.type("/exit\r")
    assert terminal.exit_code() == 0
    assert terminal.shown.count("max_model_len") == 1 and "oldest" not in terminal.shown


def test_keys_of_a_terminal(terminal):
    """Letters of any script, a line that wraps, a window that changes its size, the last line once more."""
    terminal.wait_for_prompt()
    long = "Grüße 漢字 🙂 " + "word " * 60 + "end"
    terminal.type(f"/set system {long}\r")
    terminal.wait_for_prompt(2)
    fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 40, 0, 0))
    terminal.type("/show\r")
    terminal.wait_for(f"system={long}")
    terminal.wait_for_prompt(3)
    terminal.type("/sho\r")
    terminal.wait_for("did you mean /show?")
    terminal.wait_for_prompt(4)
    terminal.type("\x1b[A\r")
    terminal.wait_for("did you mean /show?", 2)
    terminal.type("/?\r")
    terminal.wait_for("forget the conversation")
    terminal.type("/bye\r")
    assert terminal.exit_code() == 0


@pytest.mark.parametrize(
    ("model", "said", "settings", "sent"),
    [
        ("other", {"temperature": 0.2}, {}, {}),
        ("other", {"temperature": 0.0, "frequency_penalty": 0.4}, {}, {}),
        ("other", {"temperature": 0.0, "frequency_penalty": 0.4}, {"temperature": 0.5}, {}),
        ("other", {}, {}, CHAT_SAMPLING),
        ("other", None, {}, {}),
        ("other", {}, {"repetition_penalty": 1.1}, CHAT_SAMPLING),
    ],
)
def test_chat_adds_sampling_only_where_the_model_recommends_none(model, said, settings, sent):
    """What a model's files recommend is left as it is."""
    client = SimpleNamespace()
    conversation = Conversation(client, Model(model, None, said), settings, None, False, print)
    assert conversation._body([]) == {"model": model, "messages": [], **sent, **settings}


@pytest.mark.parametrize(
    ("pieces", "rate"),
    [
        pytest.param(["a ", 0.25, "b ", 0.25, "c"], 4, id="streamed"),
        pytest.param(["a ", "b ", 0.5, "c"], 4, id="in two pieces"),
        pytest.param(["a"], None, id="one token"),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_an_answer_has_a_rate_only_where_its_tokens_came_one_after_another(pieces, rate, at_once):
    taken, started, text = threading.Event(), time.perf_counter(), ""
    with ScriptedServer() as server, Client(f"{server.url}/v1", None) as client:
        server.answers["count"], server.at_once = [pieces[0], taken, *pieces[1:]], at_once
        if at_once:
            taken.set()
        answer = Answer()
        for _, piece in client.stream({"messages": [{"content": "count"}]}, answer):
            text += piece
            taken.set()
    assert text.startswith("a")
    if at_once or rate is None:
        assert answer.tokens_per_second is None
    else:  # the server's pauses and what this machine adds, no less and no more
        assert 2 / (time.perf_counter() - started) < answer.tokens_per_second <= rate


def test_an_answer_of_a_server_that_escapes_nothing():
    """What Unicode takes for a line end is in the text, and the bytes come in any pieces."""
    said = "a\u2028b\x85c\u2029d 日"
    event = json.dumps({"choices": [{"delta": {"content": said}}]}, ensure_ascii=False)
    sent = f"data: {event}\n\ndata: {event}\r\n\r\ndata: [DONE]\n\n".encode()

    async def pieces():
        for start in range(0, len(sent), 3):
            yield sent[start : start + 3]

    async def ask() -> str:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=pieces()))
        async with httpx.AsyncClient(base_url="http://server/v1", transport=transport) as http:
            return "".join([piece async for _, piece in stream(http, {}, Answer())])

    assert asyncio.run(ask()) == 2 * said


@pytest.mark.slow
def test_a_hundred_turns_in_512_tokens(start):
    server = start("--max-model-len", "512")
    lines = [f"Turn {number}: " + "the quick brown fox " * (number % 9) for number in range(100)]
    done = run(server.url, "--max-tokens", "12", text="".join(line + "\n" for line in lines))
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.count("oldest") == 1


def turns(shared_server, lines: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    done = run(shared_server.url, *flags, text="".join(line + "\n" for line in lines))
    assert done.returncode == 0, done.stderr
    return done


def test_a_full_context_forgets_the_oldest_turns(shared_server):
    """Far more than the model's 1,024 tokens; said once, and again after the conversation began anew."""
    lines = [f"Turn {number}: " + "the quick brown fox " * 20 for number in range(12)]
    done = turns(shared_server, [*lines, "/show", "/clear", *lines], "--max-tokens", "30", "--temperature", "0")
    assert done.stdout.count("oldest") == 2 and not done.stderr
    assert done.stdout.count("(cut after 30 tokens") >= 20, "the answers went on"
    used, limit = map(int, re.search(r"context=(\d+) of (\d+) tokens", done.stdout).groups())
    assert limit // 2 < used <= limit == 1024


def test_settings_and_commands(shared_server):
    """Each line is a turn, or a command; what the model's files do not recommend, chat does."""
    lines = [
        "/show",
        "/set temperature 0.25",
        "/set parameter min_p 0.125",
        "/set system Be brief",
        "/show",
        "/set temp 1",
        "/set top_k x",
        "/set top_p nan",
        "/sho",
        "/help",
        "/?",
        "/set temperature default",
        "/show",
        "/quit",
        "never said",
    ]
    out = turns(shared_server, lines, "--max-tokens", "7").stdout
    shows = re.findall(r"temperature=(\S+)\ntop_p=(\S+)\nmin_p=(\S+)\nmax_tokens=(\S+)", out)
    assert shows == [("0.7", "0.9", "0.05", "7"), ("0.25", "0.9", "0.125", "7"), ("0.7", "0.9", "0.125", "7")]
    assert "system=Be brief" in out and "model=tiny" in out and out.count("/bye") == 2
    assert "no setting 'temp'; did you mean temperature?" in out and "top_k must be a whole number, got 'x'" in out
    assert "top_p must be a number, got 'nan'" in out
    assert "there is no command /sho; did you mean /show?" in out and "cut" not in out, "nothing was sent"
    assert re.search("temperature=0.1\n.*", turns(shared_server, ["/show"], "--temperature", "0.1").stdout)


@pytest.mark.slow
def test_pasted_and_piped_texts_arrive_whole(start, tmp_path):
    """The template says what it was given: how many lines were one message, what came before, what was appended."""
    template = "{{ raise_exception('given: ' + messages | map(attribute='content') | list | tojson) }}"
    (tmp_path / "template").write_text(template)
    server = start("--chat-template", str(tmp_path / "template"))
    lines = ["one", "", "/etc/passwd is a file", '"""two', "", '/bye lines"""', '"""', "open"]
    done = run(server.url, "--system-prompt", "Be kind", text="\n".join(lines))
    assert done.returncode == 0
    given = re.findall(r"given: (\[.*?\])$", done.stderr, re.MULTILINE)
    said = ["one", "/etc/passwd is a file", "two\\n\\n/bye lines", "\\nopen"]
    assert given == [f'["Be kind", "{text}"]' for text in said]
    quick = run(server.url, "-q", "What is this?", text="a\nb\n")
    assert quick.returncode == 1 and quick.stderr.count("\n") == 1
    assert '["What is this?\\n\\na\\nb"]' in quick.stderr
    assert '["Hello"]' in run(server.url, "-q", "Hello").stderr
    terminal = Terminal("--url", server.url)
    terminal.wait_for_prompt()
    terminal.type("\x1b[200~first\nsecond\n\x1b[201~third\r")
    terminal.wait_for("given: ")
    terminal.wait_for("]")
    server.stop()
    terminal.type("Still there?\r")
    terminal.wait_for("the connection to")
    terminal.type("/bye\r")
    assert terminal.exit_code() == 0
    assert '["first\\nsecond\\nthird"]' in terminal.shown and terminal.shown.count("given") == 1


def test_a_quick_answer_is_all_that_is_printed(shared_server):
    """What is said of it is beside it, so that it may go into a file."""
    done = run(shared_server.url, "-q", "Hello", "--max-tokens", "5", "--temperature", "0")
    assert done.returncode == 0 and done.stdout.strip() and "cut" not in done.stdout, "the address is good without /v1"
    assert re.fullmatch(r"\(cut after 5 tokens; .*\)\n", done.stderr)
    fast = run(shared_server.url, "-q", "Hello", "--max-tokens", "5", "--temperature", "0", "--verbose")
    assert fast.stdout == done.stdout and re.search(r"5 tokens(, [\d.]+ tokens/s)?; the first after", fast.stderr)
    assert run(shared_server.url, "-q", "brown fox " * 600).returncode == 1
    none = run(shared_server.url, "-q", "Hello", "--max-tokens", "0")
    assert none.returncode == 1 and "max_tokens" in none.stderr
    binary = [*CHAT, "--url", shared_server.url, "-q", "What is this?", "--max-tokens", "3"]
    assert subprocess.run(binary, input=b"\xff\xfe\n", capture_output=True, timeout=60).returncode == 0


@pytest.mark.slow
def test_errors_are_one_line(guarded, shared_server):
    nobody = run("http://127.0.0.1:9/v1", text="Hello\n")
    assert nobody.returncode == 1 and "no server at http://127.0.0.1:9/v1/" in nobody.stderr
    other = run(shared_server.url + "/v1", "--model-name", "no-such", "-q", "Hello")
    assert other.returncode == 1 and "'tiny'" in other.stderr
    stranger = run(guarded.url + "/v1", text="Hello\n")
    assert stranger.returncode == 1 and "401: Send a valid API key" in stranger.stderr
    assert stranger.stderr.count("\n") == 1
    assert run(guarded.url + "/v1", "-q", "Hello", "--max-tokens", "3", OPENAI_API_KEY="secret-key").returncode == 0


def test_a_wrong_model_is_one_line_before_a_server_is_started():
    done = subprocess.run([*CHAT, "smollm2"], input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "octavo: error: 'smollm2' is not a model; did you mean smollm2-135m-instruct?\n"


QUESTIONS = dict(zip(FIRST_QUESTIONS, ("is Tokyo.", "Neil Armstrong", "Bananas\n2. Oranges\n3. Grapes"), strict=True))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("isa", compiler.supported_isas())
def test_the_embedded_model_answers_plain_questions(isa):
    """What chats propose to ask, always, on each kind of CPU; and the server that was started for the conversation ends
    with it, however that ends."""
    times = 20 if isa == compiler.supported_isas()[0] else 2
    chat = subprocess.Popen(
        [*CHAT, "--max-tokens", "16"],
        stdin=-1,
        stdout=-1,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OCTAVO_CPU_ISA": isa},
    )
    for seed in range(times):
        for question in QUESTIONS:
            chat.stdin.write(f"/clear\n/set seed {seed}\n{question}\n")
    chat.stdin.write("/show\n")
    chat.stdin.flush()
    out = ""
    while "context=" not in out:
        line = chat.stdout.readline()
        assert line, f"it ended:\n{out}"
        out += line
    assert "temperature=0\ntop_p=1\nmin_p=0\nfrequency_penalty=0.4\n" in out
    answers = out.split("(forgotten)\n")[1:]
    right = [word in answer for answer, word in zip(answers, list(QUESTIONS.values()) * times, strict=True)]
    assert all(right), out
    (server,) = Path(f"/proc/{chat.pid}/task/{chat.pid}/children").read_text().split()
    chat.send_signal(signal.SIGTERM)
    assert chat.wait(90) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{server}").exists()


@pytest.mark.slow
@pytest.mark.model
def test_a_chat_outlives_its_own_server():
    """It says what has happened, starts the server again, and has the conversation and the message still."""
    terminal = Terminal("--max-tokens", "8")
    terminal.wait_for_prompt()
    (server,) = Path(f"/proc/{terminal.pid}/task/{terminal.pid}/children").read_text().split()
    terminal.type("Name the capital of France.\r")
    terminal.wait_for("is Paris")
    terminal.wait_for_prompt(2)
    os.kill(int(server), signal.SIGKILL)
    terminal.type("And of Italy?\r")
    terminal.wait_for("was killed by signal 9")
    terminal.wait_for_prompt(3)
    assert "smaller model" in terminal.shown and "up arrow" in terminal.shown
    terminal.type("\x1b[A\r")
    terminal.wait_for_prompt(4)
    terminal.type("/show\r/bye\r")
    assert terminal.exit_code() == 0
    used = int(re.search(r"context=(\d+) of", terminal.shown)[1])
    assert used > 60, "the first question and its answer are part of the second prompt"


@pytest.mark.slow
@pytest.mark.model
def test_nothing_is_left_of_a_chat_that_is_killed():
    chat = subprocess.Popen(CHAT, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True)
    assert chat.stdin is not None and chat.stdout is not None
    chat.stdin.write("/show\n")
    chat.stdin.flush()
    assert chat.stdout.readline(), "it has begun"
    started = _descendants(chat.pid)
    assert len(started) >= 2, "a server and its core"
    chat.kill()
    chat.wait()
    deadline = time.monotonic() + 90
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < deadline, started
        time.sleep(0.05)


def _descendants(pid: int) -> list[str]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return children + [grandchild for child in children for grandchild in _descendants(int(child))]


@pytest.mark.slow
def test_without_a_c_compiler_the_person_is_told(tmp_path):
    """By the server that the chat starts, whose log is otherwise silent; the answer comes all the same."""
    kernels = Path(octavo_kernels.__file__).parent
    shutil.copytree(kernels, tmp_path / "octavo_kernels", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    write_gguf(
        tmp_path / "m.gguf",
        make_model(*FAMILIES["llama"]),
        arch="llama",
        more=lambda writer: writer.add_chat_template("{{ messages[0].content }}"),
    )
    command = [*CHAT, str(tmp_path / "m.gguf"), "-q", "Hello", "--max-tokens", "3"]
    environment = {"PATH": "/nonexistent", "HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert done.stderr.count("about 50 times slower") == 1 and "apt-get install gcc" in done.stderr
