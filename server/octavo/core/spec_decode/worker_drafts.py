"""Drafts of a model in the worker: made at the end of a step, verified in the next."""

from __future__ import annotations


class WorkerDrafts:
    """Hands on what came with the last step's results; see `octavo.core.spec_decode.drafts.Drafter`."""

    def __init__(self) -> None:
        self._drafts: dict[str, list[int]] = {}

    def receive(self, drafts: dict[str, list[int]]) -> None:
        """Replace the drafts of the previous step by those of the step whose results have arrived."""
        self._drafts = drafts

    def start(self, req_id: str, scope: bytes, num_prompt_tokens: int) -> None:
        """See `octavo.core.spec_decode.drafts.Drafter`."""

    def propose(self, req_id: str, token_ids: list[int], most: int) -> list[int]:
        """See `octavo.core.spec_decode.drafts.Drafter`."""
        return self._drafts.pop(req_id, [])[:most]

    def forget(self, req_id: str) -> None:
        """See `octavo.core.spec_decode.drafts.Drafter`."""
        self._drafts.pop(req_id, None)
