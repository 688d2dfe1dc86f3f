"""What speculation must not change, a drafter that knows the truth, and a model made of another's first layers."""

from __future__ import annotations

import math
import random
from itertools import takewhile
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from octavo import LLM
from octavo.core.scheduler import Scheduler
from octavo.core.spec_decode.drafts import Drafts
from octavo.interface.outputs import RequestOutput


def alike(some: Any, others: Any) -> bool:
    """True if both are equal but for the last bits of numbers: samplers of CPUs and of GPUs add in other orders."""
    if isinstance(some, float) and isinstance(others, float):
        return some == others or math.isclose(some, others, rel_tol=1e-4, abs_tol=1e-4)
    if isinstance(some, list | tuple) and isinstance(others, list | tuple):
        return len(some) == len(others) and all(map(alike, some, others))
    if isinstance(some, dict) and isinstance(others, dict):
        return some.keys() == others.keys() and all(alike(value, others[key]) for key, value in some.items())
    return bool(some == others)


def all_of(outputs: list[RequestOutput]) -> list[Any]:
    """All that a user sees, log-probabilities to the bit."""
    return [
        (
            output.prompt_logprobs and list(output.prompt_logprobs),
            [
                (
                    one.text,
                    list(one.token_ids),
                    one.cumulative_logprob,
                    one.finish_reason,
                    one.stop_reason,
                    one.logprobs and [{i: (v.logprob, v.rank) for i, v in at.items()} for at in one.logprobs],
                )
                for one in output.outputs
            ],
        )
        for output in outputs
    ]


class Oracle:
    """Knows what comes, and says so always, never, or at times."""

    def __init__(self, kind: str, outputs: list[RequestOutput], vocab_size: int) -> None:
        self.truths = [[*(o.prompt_token_ids or []), *one.token_ids] for o in outputs for one in o.outputs]
        self.kind, self.vocab_size, self.rng = kind, vocab_size, random.Random(kind)

    def start(self, req_id: str, scope: bytes, num_prompt_tokens: int) -> None:
        pass

    def propose(self, req_id: str, token_ids: list[int], most: int) -> list[int]:
        # Samples of one prompt may begin alike: it says what all of them say next.
        truths = [truth for truth in self.truths if truth[: len(token_ids)] == token_ids]
        truth = [tokens[0] for tokens in takewhile(lambda tokens: len({*tokens}) == 1, zip(*truths, strict=False))]
        right = {"right": 1.0, "half": 0.7, "wrong": 0.0}[self.kind]
        return [
            token if self.rng.random() < right else (token + 1) % self.vocab_size
            for token in truth[len(token_ids) : len(token_ids) + most]
        ]

    def forget(self, req_id: str) -> None:
        pass


def speculate(llm: LLM, drafter: Any, k: int) -> LLM:
    scheduler = llm.engine.scheduler
    assert isinstance(scheduler, Scheduler)
    overlap = llm.engine.executor.max_in_flight > 1 and llm.config.parallel.pipeline_parallel_size == 1
    drafts = Drafts(drafter, k, llm.config.model.vocab_size, overlap=overlap) if drafter else None
    scheduler.use_drafts(drafts)
    return llm


def drafts_of(llm: LLM) -> Drafts:
    scheduler = llm.engine.scheduler
    assert isinstance(scheduler, Scheduler) and scheduler.drafts is not None
    return scheduler.drafts


def accepted(llm: LLM) -> tuple[int, int]:
    drafts_of(llm)
    return llm.totals.spec_decode.num_draft_tokens, llm.totals.spec_decode.num_accepted_tokens


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
