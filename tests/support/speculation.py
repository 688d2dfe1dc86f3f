"""What speculation must not change, and a draft model made of another model's first layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from octavo.interface.outputs import RequestOutput


def all_of(outputs: list[RequestOutput]) -> list[Any]:
    """All that a user sees, log-probabilities to the bit."""
    return [
        (
            output.prompt_logprobs and list(output.prompt_logprobs),
            [
                (
                    one.text, list(one.token_ids), one.cumulative_logprob, one.finish_reason, one.stop_reason,
                    one.logprobs and [{i: (v.logprob, v.rank) for i, v in at.items()} for at in one.logprobs],
                )
                for one in output.outputs
            ],
        )
        for output in outputs
    ]  # fmt: skip


def cut_gguf(source: Path, target: Path, num_layers: int) -> Path:
    """Write the model in the GGUF file ``source`` with its first layers alone."""
    reader = GGUFReader(source)
    arch = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = num_layers if name == f"{arch}.block_count" else field.contents()
        of_items = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], of_items)
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < num_layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=gguf.GGMLQuantizationType(tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
