"""Parts of prompts that clients want kept in the prefix cache: which tokens these are, and what answers say of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from octavo.chat.breakpoints import Keep
from octavo.chat.render import Rendered
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.tenants import current_tenant
from octavo.interface.messages import EngineCoreRequest, Retain
from octavo.multimodal.items import ImageFeatures
from octavo.text.text_lengths import common_prefix

SHORT = 300.0  # seconds: Anthropic counts what is written for longer by itself

Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True)
class CacheUse:
    """Tokens of a prompt: found in the cache, written to it for a while (short or long), and all others."""

    read: int
    written_short: int
    written_long: int
    rest: int

    @property
    def written(self) -> int:
        """Tokens that were computed, and are kept for a while."""
        return self.written_short + self.written_long


def use_of(request: EngineCoreRequest, cached: int) -> CacheUse:
    """The use that a prompt has made of the cache, where ``cached`` tokens of it were found."""
    end, written = cached, [0, 0]
    for wish in request.retain or ():
        new = max(0, wish.num_tokens - end)
        written[wish.seconds > SHORT] += new
        end += new
    return CacheUse(cached, written[0], written[1], len(request.prompt_token_ids) - end)


def with_cuts(rendered: Rendered, state: ServerState, tokenize: Tokenize, salt: str | None) -> Rendered:
    """``rendered`` with the tokens of what its client wants kept."""
    if rendered.text is None or not rendered.cuts:
        return rendered
    text, replayed, counted = rendered.text, rendered.replayed, []
    for end, seconds in rendered.cuts:
        if replayed is not None and replayed.answers and replayed.answers[0][0] < end:
            ids = replayed.tokenizing(tokenize)(text[:end])  # whose number is not the text's alone
            number = common_prefix(ids, rendered.ids)
        else:
            number = state.text_lengths.count(text[:end], rendered.ids, tokenize, salt)
        counted.append((number, seconds))
    return replace(rendered, kept=counted)


def retain(
    state: ServerState,
    request: EngineCoreRequest,
    rendered: Rendered,
    keep: Keep | None,
    features: Sequence[ImageFeatures],
) -> None:
    """Have the engine keep what the client wants kept of a prompt, as far as the server lets clients want that."""
    cache = state.engine.config.cache
    if keep is None or not (
        cache.enable_prefix_caching and cache.prefix_retention_share and cache.prefix_retention_max
    ):
        return
    images = state.engine.input_processor.images
    ends = [(images.expanded(rendered.ids, end, features), seconds) for end, seconds in rendered.kept]
    if keep.whole:
        ends.append((len(request.prompt_token_ids), keep.whole))
    ends = sorted(end for end in ends if end[0])
    longest = [*accumulate((min(time, cache.prefix_retention_max) for _, time in reversed(ends)), max)][::-1]
    found = [Retain(end, time) for (end, _), time in zip(ends, longest, strict=True)]
    request.retain = found or None
    tenant = current_tenant.get()
    request.owner = "" if tenant is None else f"{tenant.name} {tenant.account}"
