"""Engines on a GPU that is pretended, for `support.on_pretended_gpu`: requests to them, and what their steps launch."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from support.pretended_configs import IMAGE_READERS
from support.pretended_gpu import PretendedGpu

from octavo import LLM, SamplingParams
from octavo.engine.core import EngineCore
from octavo.interface.architectures import SEES_IMAGES_WHOLE
from octavo.interface.images import HostTensor, ImageItem
from octavo.interface.messages import EngineCoreRequest
from octavo.memory.images import largest_image

Tensors = dict[str, torch.Tensor]


def engine(
    config: dict[str, Any],
    tensors: Tensors | None = None,
    image_settings: dict[str, Any] | None = None,
    **arguments: Any,
) -> LLM:
    """Of a checkpoint with these tensors; None: dummy ones."""
    with tempfile.TemporaryDirectory() as folder:
        if image_settings is not None:
            Path(folder, "preprocessor_config.json").write_text(json.dumps(image_settings))
        Path(folder, "config.json").write_text(json.dumps(config))
        if tensors is not None:
            save_file(tensors, Path(folder, "model.safetensors"))
        load_format = "auto" if tensors is not None else "dummy"
        return LLM(folder, load_format=load_format, skip_tokenizer_init=True, device="cuda", **arguments)


TOKENS = count(10)  # each prompt has its own, or the prefix cache would leave one token of it to compute


def ask(llm: LLM, lengths: list[int], **params: Any) -> list[str]:
    """Prompts of these lengths; the errors they met with."""
    params = {"max_tokens": 3, "ignore_eos": True, "temperature": 0.7} | params
    prompts = [{"prompt_token_ids": [next(TOKENS)] * length} for length in lengths]
    return errors(llm.generate(prompts, SamplingParams(**params), use_tqdm=False))


def errors(outputs: list[Any]) -> list[str]:
    return sorted({output.error for output in outputs if output.error})


@contextmanager
def noted_steps(gpu: PretendedGpu) -> Iterator[list[dict[str, int]]]:
    """What each step launches meanwhile, by name."""
    steps: list[dict[str, int]] = []
    plain = EngineCore.step

    def step(core: EngineCore) -> Any:
        gpu.take_launches()
        done = plain(core)
        steps.append(Counter(launch.name for launch in gpu.take_launches()))
        return done

    with mock.patch.object(EngineCore, "step", step):
        yield steps


def images(gpu: PretendedGpu, name: str) -> dict[str, Any]:
    """The largest image of a family in prompts of many forms: what was compiled for them, and what steps launch once
    all are past them."""
    config, about = IMAGE_READERS[name]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        Path(folder, "preprocessor_config.json").write_text(json.dumps(about))
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cuda",
            max_model_len=4096,
            num_gpu_blocks_override=2000,
            max_num_seqs=8,
        )
        known, largest = set(gpu.kernels), largest_image(llm.engine.config)
    assert largest is not None
    gpu.strict = True
    tensors = {key: HostTensor.of(array) for key, array in largest.tensors.items()}
    grid = largest.tensors.get("image_grid_thw")
    squares = None if grid is None else (1, int(grid[0][1]) // 2, int(grid[0][2]) // 2)
    whole = config["architectures"][0] in SEES_IMAGES_WHOLE
    length = largest.num_embeds

    def request(before: int, *digests: str, **params: Any) -> EngineCoreRequest:
        """Text, images with a token after each, and more text."""
        ids = [next(TOKENS)] * before + [4] * (len(digests) * (length + 1)) + [5] * 3
        sampling = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, "temperature": 0.7} | params)
        made = llm._input.process(llm._new_id(), {"prompt_token_ids": ids}, sampling)
        made.mm_items = [
            ImageItem(digest, before + number * (length + 1), [True] * length, tensors, squares, whole)
            for number, digest in enumerate(digests)
        ]
        return made

    found: list[str] = []
    for asked in (
        [request(1, "a")],
        [request(20, "b"), request(7)],
        [request(3, "a", "c"), request(300, "d", logprobs=2)],
        [request(2, "e", prompt_logprobs=1)],
    ):
        found += errors(llm._run(asked, [None] * len(asked), False))
    with noted_steps(gpu) as steps:
        found += errors(llm._run([request(5, "f"), request(9, "a"), request(4)], [None] * 3, False))
    encoder = llm.engine.executor.worker.runner.images  # type: ignore[attr-defined]
    new = [f"{gpu.kernels[h].metadata.name} {gpu.kernels[h].src.constants}" for h in set(gpu.kernels) - known]
    return {"errors": found, "compiled while serving": new, "steps": steps[12:-8], "encoded": encoder.num_encoded}
