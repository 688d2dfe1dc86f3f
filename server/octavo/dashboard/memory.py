"""The tab Memory: what the memory was shared out for, and every block of the KV cache, live."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr
import httpx
from prometheus_client.parser import text_string_to_metric_families

from octavo.chat_client import has_tls
from octavo.dashboard.block_map import CacheView, counters_html, ledger_html, map_html
from octavo.dashboard.events import QUIET
from octavo.dashboard.session import Session
from octavo.errors import OctavoError

_SECONDS = 1.0  # between looks at the blocks, while the tab is open
_NO_PORT = (
    "This tab reads the management port of the server: start the server with <code>--management-port 8001</code>, the "
    "dashboard with <code>--management-url http://HOST:8001</code>. A page at the server's own address has the map "
    "of blocks without either."
)


@dataclass(frozen=True)
class Ledger:
    """A server's memory ledger, printed at its start."""

    shares: dict[str, int]  # bytes by what they are for
    blocks_of_longest: int  # that a sequence of max_model_len takes
    num_blocks: int

    @classmethod
    def of(cls, metrics: str) -> Ledger:
        """Parse the text of /metrics."""
        shares, cache = {}, {}
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if sample.name == "octavo:memory_bytes":
                    shares[sample.labels["part"]] = int(sample.value)
                elif sample.name == "vllm:cache_config_info":
                    cache = sample.labels
        num_blocks = int(cache.get("num_gpu_blocks", 0))
        concurrency = float(cache.get("kv_cache_max_concurrency", 0))
        return cls(shares, round(num_blocks / concurrency) if concurrency else 0, num_blocks)

    @property
    def block_bytes(self) -> int:
        """Return the size of a block; the null block counts as one more."""
        return self.shares.get("KV cache", 0) // (self.num_blocks + 1)


class _Port:
    """The management port."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def get(self, path: str, **query: str) -> httpx.Response:
        """Raises OctavoError."""
        try:
            verify = has_tls(self._url)
            async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=10, verify=verify) as http:
                answer = await http.get(path, params=query)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise OctavoError(
                f"the management port at {self._url} does not answer: {error or type(error).__name__}"
            ) from None
        if answer.status_code != 200:
            raise OctavoError(f"the management port at {self._url} answered HTTP {answer.status_code} to {path}")
        return answer


def build(session: Session) -> None:
    """Add the tab's components and events."""
    missing = not session.is_own and session.management_url is None
    note = gr.HTML(f"<p>{_NO_PORT}</p>" if missing else "", visible=missing)
    ledger_bar, counters = gr.HTML(visible=not missing), gr.HTML(visible=not missing)
    with gr.Row(visible=not missing):
        picked = gr.Dropdown(
            [("none", "")],
            value="",
            label="Request",
            allow_custom_value=True,
            scale=3,
            info="one that runs, or the id of an answer: its blocks light up",
        )
        whole = gr.Checkbox(label="All free blocks as well", scale=1)
    blocks = gr.HTML(elem_id="block-map", visible=not missing)
    ledger, shown_ids = gr.State(None), gr.State(())
    timer = gr.Timer(_SECONDS, active=False)

    def noted(text: str) -> dict[Any, Any]:
        return {note: gr.HTML(f"<p>{text}</p>", visible=bool(text))}

    async def look(
        model: Any, known: Ledger | None, request_id: str | None, whole: bool, ids: tuple[str, ...]
    ) -> dict[Any, Any]:
        if session.management_url is None or model is None:
            return noted(_NO_PORT if missing else "The server is starting.")
        port, updates = _Port(session.management_url), noted("")
        try:
            if known is None:
                known = Ledger.of((await port.get("/metrics")).text)
                updates |= {ledger: known, ledger_bar: ledger_html(known.shares)}
            query = {"request_id": request_id} if request_id else {}
            view = CacheView.of((await port.get("/octavo/blocks", **query)).json())
        except OctavoError as error:
            return noted(escape(str(error)))
        except (ValueError, KeyError, TypeError):
            return noted(f"{escape(session.management_url)} is no management port of an Octavo server.")
        if not view.cells:
            return updates | noted("An encoder has no KV cache.")
        updates |= {
            counters: counters_html(view, known.blocks_of_longest, known.block_bytes),
            blocks: map_html(view, whole),
        }
        if (now := tuple(view.running)) != ids:
            updates |= {picked: gr.Dropdown(choices=_choices(view)), shown_ids: now}
        return updates

    inputs = [session.model, ledger, picked, whole, shown_ids]
    outputs = [note, ledger_bar, counters, picked, blocks, ledger, shown_ids]
    timer.tick(look, inputs, outputs, **QUIET)
    gr.on([picked.input, whole.input], look, inputs, outputs, **QUIET)

    def open_or_close(event: gr.SelectData) -> tuple[gr.Timer, None]:
        return gr.Timer(active=event.value == "Memory" and not missing), None

    session.tabs.select(open_or_close, None, [timer, ledger], **QUIET)


def _choices(view: CacheView) -> list[tuple[str, str]]:
    tokens = {name: ", ".join(f"{count:,}" for count in counts) for name, counts in view.running.items()}
    return [("none", ""), *((f"{name} ({said} tokens)", name) for name, said in tokens.items())]
