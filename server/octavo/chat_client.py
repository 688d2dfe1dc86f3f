"""HTTP client of `octavo chat` and of the dashboard: the served model, and streamed answers."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from octavo.errors import OctavoError

# For models without recommended parameters: at OpenAI's default temperature of 1 small models ramble.
CHAT_SAMPLING = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05}
# OpenAI's defaults, where neither the user nor the model sets a value.
SERVER_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
# How servers tell what a prompt has that fits, but not together with max_tokens: this one and vLLM's; OpenAI's.
_PROMPT = re.compile(r"(?:the prompt's|request has) (\d+) (?:input )?tokens|\((\d+) in the messages")
TIMEOUT = httpx.Timeout(None, connect=10)


_LEAST_SECONDS = 0.001  # between the first and the last token of an answer that has a rate
_LONGEST_PAUSE = 2.0  # seconds between looks at a server that is loading its model
_WAYS_OUT = {
    401: "; the key is that of --api-key or OPENAI_API_KEY",
    404: "; --url takes the API's base address, as http://127.0.0.1:8000/v1",
}


def has_tls(url: str) -> bool:
    """``verify`` of an HTTP client for ``url``: reading certificates takes 20 ms, and plain HTTP has none."""
    return not url.startswith("http://")


class KeyRequiredError(OctavoError):
    """The server answers those with an API key, and this one is missing or wrong."""


class MessageRefusedError(OctavoError):
    """One message could not be answered; the conversation may go on. ``too_long``: the context is full;
    ``prompt_tokens``: of the prompt, if the server counted it, so that a shorter answer may fit."""

    def __init__(self, message: str, too_long: bool = False) -> None:
        super().__init__(message)
        self.too_long = too_long
        count = _PROMPT.search(message) if too_long else None
        self.prompt_tokens = int(count[1] or count[2]) if count else None


class StillLoadingError(MessageRefusedError):
    """The server has not loaded its model yet; ``pause``: seconds after which it may be asked again."""

    def __init__(self, message: str, pause: float) -> None:
        super().__init__(message)
        self.pause = pause


@dataclass(frozen=True)
class Model:
    """A model as a server describes it. ``sampling``: the recommended parameters, None if not stated; ``reads_images``:
    messages may have images, None if not stated."""

    name: str
    max_model_len: int | None = None
    sampling: dict[str, float] | None = field(default=None, hash=False)
    reads_images: bool | None = False

    @property
    def chat_sampling(self) -> dict[str, float]:
        """Temperature and the like of an answer in a chat where the user sets none, as far as they are known."""
        return {} if self.sampling is None else SERVER_SAMPLING | (self.sampling or CHAT_SAMPLING)


@dataclass
class Answer:
    """One answer, filled while it comes. Times in seconds."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    ended: bool = False  # the server has said so, and not only gone
    first_token: float = 0.0
    last_token: float = 0.0
    elapsed: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer together; 0 if the server does not say."""
        return int(self.usage.get("prompt_tokens") or 0) + int(self.usage.get("completion_tokens") or 0)

    @property
    def tokens_per_second(self) -> float | None:
        """Rate of the tokens after the first; None where the server counts none, or where all came at once, through
        something that collects them: how fast they were made is not seen."""
        count, seconds = int(self.usage.get("completion_tokens") or 0), self.last_token - self.first_token
        return (count - 1) / seconds if count > 1 and seconds >= _LEAST_SECONDS else None

    def take(self, line: str, seconds: float) -> Iterator[tuple[str, str]]:
        """The pieces of reasoning and of text in a line of the stream, which came ``seconds`` after the request.

        Raises MessageRefusedError where the server says that the answer broke off.
        """
        self.ended = self.ended or line.startswith("data: [DONE]")
        if not line.startswith("data: {"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            raise MessageRefusedError(f"the answer broke off: {event['error'].get('message', event['error'])}")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.ended = self.ended or bool(self.finish_reason)
            delta = choice.get("delta") or {}
            thought, piece = delta.get("reasoning") or delta.get("reasoning_content") or "", delta.get("content") or ""
            if thought or piece:
                self.first_token, self.last_token = self.first_token or seconds, seconds
                self.text += piece
                yield thought, piece


class Client:
    """An OpenAI-compatible server. Methods raise OctavoError when it cannot be reached. ``uds``: its Unix socket, where
    ``url`` does not say where it listens. ``waiting``: told once when a model is still being loaded, which methods then
    wait for; without it they raise StillLoadingError."""

    def __init__(
        self, url: str, api_key: str | None, uds: str | None = None, waiting: Callable[[str], None] | None = None
    ) -> None:
        self._waiting, self._has_waited = waiting, False
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if "://" not in url:  # 127.0.0.1:8000
            url = f"http://{url}"
        self._listed: list[Any] | None = None
        try:
            verify = has_tls(url)
            self._http = httpx.Client(
                base_url=url.rstrip("/"),
                headers=headers,
                timeout=TIMEOUT,
                trust_env=False,
                verify=verify,
                transport=httpx.HTTPTransport(uds=uds, verify=verify) if uds is not None else None,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise OctavoError(f"--url {url!r} is not a valid URL: {error}") from None

    @property
    def url(self) -> str:
        """Base URL of the API, without a slash at its end."""
        return str(self._http.base_url).rstrip("/")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def serves(self, name: str) -> bool:
        """Return whether the server lists a model of that name."""
        return any(isinstance(card, dict) and card.get("id") == name for card in self._cards())

    def model(self, name: str | None) -> Model:
        """The model of that name, or the first that the server lists."""
        try:
            cards = self._cards()
            card = next((card for card in cards if name in (None, card["id"])), None) or {"id": name}
            modalities = card.get("input_modalities")
            reads_images = None if modalities is None else "image" in modalities
            name = card["id"] or cards[0]["id"]
            return Model(name, card.get("max_model_len"), card.get("default_sampling_params"), reads_images)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise OctavoError(f"no OpenAI-compatible server at {self.url}: it lists no models") from None

    def _cards(self) -> list[Any]:
        """The models that the server lists, asked once."""
        while self._listed is None:
            try:
                self._listed = self._list()
            except StillLoadingError as loading:
                self._wait(loading)
        return self._listed

    def _wait(self, loading: StillLoadingError) -> None:
        """Wait a moment for a model that is being loaded. Raises ``loading`` where nobody is to be told."""
        if self._waiting is None:
            raise loading
        if not self._has_waited:
            self._waiting(f"(the server at {self.url} is still loading its model: waiting for it; Ctrl-C stops that)")
        self._has_waited = True
        time.sleep(loading.pause)

    def _list(self) -> list[Any]:
        try:
            response = self._http.get("/models")
            if response.status_code == 404 and not self._http.base_url.path.rstrip("/").endswith("/v1"):
                self._http.base_url = self._http.base_url.join("v1")  # a URL without /v1
                response = self._http.get("/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise OctavoError(f"no server at {self._http.base_url}: {error}; start one with octavo serve") from None
        if response.status_code != 200:
            if (pause := _pause_of_loading(response)) is not None:
                raise StillLoadingError(_reason(response), pause)
            kind = KeyRequiredError if response.status_code == 401 else OctavoError
            said = f"the server at {self.url} answered {response.status_code}: {_reason(response)}"
            raise kind(said + _WAYS_OUT.get(response.status_code, ""))
        try:
            return list(response.json()["data"])
        except (ValueError, KeyError, TypeError):
            raise OctavoError(f"no OpenAI-compatible server at {self.url}: it lists no models") from None

    def stream(self, body: dict[str, Any], answer: Answer) -> Generator[tuple[str, str], None, None]:
        """Pieces of reasoning and of text, collected in ``answer``. Closing it ends the request.

        Raises MessageRefusedError.
        """
        while True:
            try:
                return (yield from self._stream(body, answer))
            except StillLoadingError as loading:
                self._wait(loading)

    def _stream(self, body: dict[str, Any], answer: Answer) -> Generator[tuple[str, str], None, None]:
        started = time.perf_counter()
        try:
            with self._http.stream("POST", "/chat/completions", json=_streamed(body)) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refusal(response)
                lines = _Lines()
                for data in response.iter_bytes():
                    seconds = time.perf_counter() - started
                    for line in lines.take(data):
                        yield from answer.take(line, seconds)
                if not answer.ended:
                    raise ValueError("the answer has no end")
        except (httpx.HTTPError, ValueError) as error:
            raise OctavoError(f"the connection to {self.url} broke: {error or type(error).__name__}") from None
        finally:
            answer.elapsed = time.perf_counter() - started


async def stream(
    http: httpx.AsyncClient, body: dict[str, Any], answer: Answer
) -> AsyncGenerator[tuple[str, str], None]:
    """`Client.stream` for event loops; ``http`` has the API's base URL. Raises OctavoError."""
    started = time.perf_counter()
    try:
        async with http.stream("POST", "/chat/completions", json=_streamed(body)) as response:
            if response.status_code != 200:
                await response.aread()
                raise _refusal(response)
            lines = _Lines()
            async for data in response.aiter_bytes():
                seconds = time.perf_counter() - started
                for line in lines.take(data):
                    for pieces in answer.take(line, seconds):
                        yield pieces
    except (httpx.HTTPError, ValueError) as error:
        raise OctavoError(f"the connection to {http.base_url} broke: {error or type(error).__name__}") from None
    finally:
        answer.elapsed = time.perf_counter() - started


class _Lines:
    """The lines of a stream of events. httpx's `iter_lines` also ends one at U+0085 or U+2028, within a JSON string."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode() for line in lines]


def _streamed(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"stream": True, "stream_options": {"include_usage": True}}


def _refusal(response: httpx.Response) -> MessageRefusedError:
    reason = _reason(response)
    if (pause := _pause_of_loading(response)) is not None:
        return StillLoadingError(f"the server answered {response.status_code}: {reason}", pause)
    code = None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        code = response.json()["error"].get("code")
    too_long = response.status_code in (400, 413, 422) and (
        code == "context_length_exceeded" or "max_model_len" in reason or "context length" in reason
    )
    way_out = _WAYS_OUT.get(response.status_code, "")
    return MessageRefusedError(f"the server answered {response.status_code}: {reason}{way_out}", too_long)


def _pause_of_loading(response: httpx.Response) -> float | None:
    """Return for how many seconds to wait for a model that is being loaded (so llama.cpp says it, too); else None."""
    if response.status_code != 503 or "loading" not in _reason(response).lower():
        return None
    said = response.headers.get("retry-after", "")
    return min(float(said), _LONGEST_PAUSE) if said.isdecimal() else _LONGEST_PAUSE


def _reason(response: httpx.Response) -> str:
    """Return the message of an error response."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(response.text[:500].split()) or response.reason_phrase
