"""Listens to answers, so that they are remembered as they were spoken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.chat.render import Rendered
from octavo.chat.replay import Replay
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.outputs import CompletionOutput, RequestOutput


class Listener:
    """Takes the outputs of one answer to the conversation ``rendered``."""

    def __init__(self, replay: Replay, rendered: Rendered) -> None:
        self._replay, self._rendered = replay, replace(rendered, count_calls=None)
        self._ids: list[int] = []
        self._texts: list[str] = []

    def hear(self, output: RequestOutput) -> None:
        """Take an output; when the answer is complete, and ends by itself, remember it."""
        for completion in output.outputs:
            self._ids += completion.token_ids
            self._texts.append(completion.text)
            if completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str):
                self._remember(completion.stop_reason)

    def _remember(self, stop_reason: int | None) -> None:
        rendered, text = self._rendered, "".join(self._texts)
        whole = CompletionOutput(0, text, self._ids, finish_reason="stop", stop_reason=stop_reason)
        answer = rendered.new_parser().parse(whole)
        self._replay.remember(rendered.text or "", rendered.num_messages, answer, self._ids)


def listener(
    replay: Callable[[str | None], Replay | None], rendered: Rendered | None, request: EngineCoreRequest
) -> Listener | None:
    """The listener to the answer of a request; None where it is not remembered. ``replay``: of a cache's salt."""
    if rendered is None or rendered.text is None or rendered.continues or not rendered.num_messages:
        return None
    found = replay(request.cache_salt) if request.sampling_params.n == 1 else None
    return None if found is None else Listener(found, rendered)
