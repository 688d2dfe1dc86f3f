"""Prompts of requests that ask for the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.chat.infill import Around, InfillTokens, encode_parts, find_infill_tokens, infill_prompt
from octavo.entrypoints.errors import bad_request
from octavo.entrypoints.state import ServerState
from octavo.interface.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer


async def infill_prompts(
    state: ServerState, prefixes: Sequence[str | list[int]], around: Around, params: SamplingParams, field: str
) -> list[list[int]]:
    """Token ids of a prompt for each prefix, which is a text or token ids. The answer ends where the model's marks say
    so: they are added to ``params``. ``field`` is the client's word for the suffix. Raises ValueError, and APIError
    where the model has no marks."""
    tokenizer, tokens = _marks(state, field)
    params.stop_token_ids = [*dict.fromkeys([*(params.stop_token_ids or ()), *tokens.stops])]
    return await state.engine.run_in_thread(
        lambda: [infill_prompt(tokens, encode_parts(tokenizer, tokens, prefix, around)) for prefix in prefixes]
    )


def _marks(state: ServerState, field: str) -> tuple[Tokenizer, InfillTokens]:
    tokenizer = state.engine.tokenizer
    if tokenizer is None:
        raise bad_request(f"{field} needs the model's tokenizer: start without --skip-tokenizer-init", field)
    tokens = find_infill_tokens(tokenizer)
    if tokens is None:
        raise bad_request(
            f"{field} is not supported by {state.model_name}: its vocabulary has no tokens for infilling; ask a model "
            f"for code that has them (Qwen2.5-Coder, StarCoder2, Codestral, ...), or drop {field}",
            field,
        )
    return tokenizer, tokens
