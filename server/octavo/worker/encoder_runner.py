"""The steps of an encoder on one device: whole texts in, vectors or classes out, nothing kept between steps."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.interface.engine_config import EngineConfig
from octavo.interface.step import ModelRunnerOutput, PendingOutput, SchedulerOutput
from octavo.layers.encoder import EncoderInputs
from octavo.models.encoder import Encoder
from octavo.sample import devices
from octavo.worker.cpu.recorded_steps import obstacle_to_recording
from octavo.worker.pooler import PoolingHead, StepRows
from octavo_kernels.cpu import Program, RecordingError, record

logger = logging.getLogger(__name__)


class EncoderRunner:
    """Runs steps of one encoder. On a CPU they are replayed from a recording, where the model's can be recorded."""

    def __init__(self, model: Encoder, config: EngineConfig, device: torch.device) -> None:
        self.model, self.device = model, device
        self.head = PoolingHead(config.model, device, model.classify)
        scheduler = config.scheduler
        self._max_rows, self._max_seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
        self._row_multiple = model.row_multiple if device.type == "cpu" else 1
        self._recorded: Program[Tensor] | None = None
        self._buffers: EncoderInputs | None = None
        self.recording_obstacle: str | None = None  # what keeps a CPU's steps from being recorded
        if device.type == "cpu":
            self.recording_obstacle = obstacle_to_recording(self._row_multiple)

    @property
    def can_record(self) -> bool:
        """True if steps are recorded, as far as is known before one is."""
        return self.device.type == "cpu" and self.recording_obstacle is None

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record the step, or compile its kernels, before the first text comes."""
        self._run(_inputs_of([[0]], [None], self._row_multiple))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> PendingOutput:
        """Start one step. Calling what is returned reads its results back."""
        texts = step.scheduled_new_reqs
        inputs = _inputs_of(
            [text.token_ids for text in texts], [text.token_types for text in texts], self._row_multiple
        )
        hidden = self._run(inputs)
        starts, lengths = inputs.query_start_loc[:-1].long(), inputs.seq_lens.long()
        poolings = [text.pooling for text in texts if text.pooling is not None]
        calls = self.head.start(poolings, StepRows(hidden, starts, lengths).pooled)

        def pending() -> ModelRunnerOutput:
            output = ModelRunnerOutput()
            for text, call in zip(texts, calls, strict=True):
                vector = call()
                if sum(vector) - sum(vector) == 0.0:
                    output.embeddings[text.req_id] = vector
                else:
                    output.errors[text.req_id] = NOT_FINITE
            return output

        return pending

    def _run(self, inputs: EncoderInputs) -> Tensor:
        """Hidden states ``[T, H]``, valid until the next step."""
        if self.can_record and self._recorded is None:
            self._record()
        if self._recorded is not None and self._buffers is not None:
            _copy(inputs, self._buffers)
            rows = len(inputs.input_ids)
            self._recorded.replay(rows, sequences=len(inputs.seq_lens))
            return self._recorded.outputs[:rows]
        if self.device.type != "cpu":
            inputs = EncoderInputs(*(devices.put(tensor, self.device) for tensor in vars(inputs).values()))
        hidden: Tensor = self.model(inputs)
        return hidden

    def _record(self) -> None:
        rows, seqs = self._max_rows, self._max_seqs
        empty = partial(torch.empty, dtype=torch.int64)
        small = partial(torch.empty, dtype=torch.int32)
        buffers = EncoderInputs(empty(rows), empty(rows), empty(rows), small(seqs + 1), small(seqs))
        try:
            self._recorded, self._buffers = record(lambda: self.model(buffers)), buffers
        except RecordingError as error:
            logger.info("steps are not recorded, each operation is called from Python: %s", error)
            self.recording_obstacle = str(error)


NOT_FINITE = "the result holds NaN or infinity (damaged weights, or a dtype too narrow: try --dtype float32)"


def _inputs_of(texts: list[list[int]], types: list[list[int] | None], multiple: int) -> EncoderInputs:
    """The inputs on the host, padded to a multiple of ``multiple`` rows."""
    lengths = np.fromiter(map(len, texts), dtype=np.int32, count=len(texts))
    starts = np.zeros(len(texts) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    total = int(starts[-1])
    rows = -(-total // multiple) * multiple
    input_ids, positions, token_types = (np.zeros(rows, dtype=np.int64) for _ in range(3))
    for start, text, kinds in zip(starts.tolist(), texts, types, strict=False):
        input_ids[start : start + len(text)] = text
        if kinds is not None:
            token_types[start : start + len(text)] = kinds
    positions[:total] = np.arange(total) - np.repeat(starts[:-1], lengths)
    return EncoderInputs(*map(torch.from_numpy, (input_ids, positions, token_types, starts, lengths)))


def _copy(inputs: EncoderInputs, buffers: EncoderInputs) -> None:
    for name, tensor in vars(inputs).items():
        getattr(buffers, name)[: len(tensor)] = tensor
