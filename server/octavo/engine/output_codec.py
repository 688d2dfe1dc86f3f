"""EngineCoreOutputs as msgpack. Nearly all outputs are one more token and nothing else: those travel as columns."""

from __future__ import annotations

import msgspec

from octavo.interface.messages import EngineCoreOutput, EngineCoreOutputs, SchedulerStats

# Of the tokens: request ids, indexes, token ids. Then all other outputs, whole.
_Columns = tuple[list[str], list[int], list[int], list[EngineCoreOutput], SchedulerStats | None, float]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Columns).decode


def encode_outputs(results: EngineCoreOutputs) -> bytes:
    """Encode one step's results."""
    request_ids: list[str] = []
    indexes: list[int] = []
    tokens: list[int] = []
    others: list[EngineCoreOutput] = []
    for output in results.outputs:
        if output.is_one_token:
            request_ids.append(output.request_id)
            indexes.append(output.index)
            tokens.append(output.new_token_ids[0])
        else:
            others.append(output)
    return _encode((request_ids, indexes, tokens, others, results.stats, results.timestamp))


def decode_outputs(data: bytes | bytearray) -> EngineCoreOutputs:
    """The inverse of `encode_outputs`, except that a step's outputs may change their order."""
    request_ids, indexes, tokens, others, stats, timestamp = _decode(data)
    outputs = [
        EngineCoreOutput(request_id, index, [token])
        for request_id, index, token in zip(request_ids, indexes, tokens, strict=True)
    ]
    return EngineCoreOutputs(outputs + others, stats, timestamp)
