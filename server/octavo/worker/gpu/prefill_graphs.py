"""Steps with prompts in them, alone or beside decodes, captured for some numbers of tokens.

The host takes 0.2 ms a layer to launch one, longer than a device needs to compute a small model's few hundred tokens.
Lengths and block tables lie in device memory, so one graph serves any sequences.
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import nullcontext

import torch
from torch import Tensor

from octavo.layers.attention import ForwardContext
from octavo.layers.decoder import DeferredHidden
from octavo.loader.lora import ModelAdapters
from octavo.models.base import CausalLM
from octavo.worker.gpu.graphs import Capture, Captured
from octavo.worker.input_batch import InputBatch, StepInputs
from octavo_kernels import AttentionMetadata
from octavo_kernels.attention_metadata import for_groups


class PrefillGraphs:
    """The layers of such steps up to the last attention."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: list[Tensor],
        batch: InputBatch,
        sizes: list[int],
        device: torch.device,
        capture: Capture,
        adapters: ModelAdapters | None = None,
    ) -> None:
        """``adapters``: that rows may have."""
        self.sizes, self._adapters = sizes, adapters
        self._model, self._kv_caches, self._capture = model, kv_caches, capture
        num_groups, max_num_reqs, max_blocks = batch.block_tables.shape
        most = sizes[-1]
        self._input_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.full((num_groups, most), -1, dtype=torch.int64, device=device)
        self._starts = torch.zeros(max_num_reqs + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(num_groups, max_num_reqs, max_blocks, dtype=torch.int32, device=device)
        self._adapter_slots = torch.full((most,), -1, dtype=torch.int32, device=device)
        self._max_model_len = max_blocks * batch.block_size
        self._graphs: dict[tuple[int, bool], Captured] = {}

    def capture_all(self) -> None:
        """Capture every size now, the largest first, instead of when it is first needed."""
        for size in reversed(self.sizes):
            for adapted in (False, True) if self._adapters else (False,):
                self._graph(size, adapted)

    def run(self, step: StepInputs, adapter_slots: Tensor | None = None) -> DeferredHidden | None:
        """``adapter_slots`` int32, of the tokens with their padding; None: they have none. Returns None where no graph
        is large enough."""
        rows = len(step.positions)
        at = bisect_left(self.sizes, rows)
        if at == len(self.sizes):
            return None
        graph = self._graph(self.sizes[at], adapter_slots is not None)
        self._fill(step, self.sizes[at])
        if adapter_slots is not None:
            self._adapter_slots[:rows] = adapter_slots
            self._adapter_slots[rows:] = -1
        graph.replay()
        return tuple(tensor[:rows] for tensor in graph.outputs)

    def _graph(self, size: int, adapted: bool) -> Captured:
        key = size, adapted
        if key not in self._graphs:
            self._adapter_slots.fill_(-1)
            self._slots.fill_(-1)  # no sequence has tokens, so nothing is written
            self._starts.zero_()
            self._seq_lens.zero_()

            def work() -> tuple[Tensor, ...]:
                first = AttentionMetadata(
                    query_start_loc=self._starts,
                    seq_lens=self._seq_lens,
                    block_table=self._block_tables[0],
                    slot_mapping=self._slots[0, :size],
                    max_query_len=size,
                    max_seq_len=self._max_model_len,
                    num_actual_tokens=size,
                )
                metadata = for_groups(first, self._block_tables, self._slots[:, :size])
                context = ForwardContext(metadata, self._kv_caches)
                applied = self._adapters.applied(self._adapter_slots[:size]) if adapted and self._adapters else None
                with applied or nullcontext():
                    return self._model.begin(self._input_ids[:size], self._positions[:size], context)

            self._graphs[key] = self._capture(work)
        return self._graphs[key]

    def _fill(self, step: StepInputs, size: int) -> None:
        """Rows beyond the step's are padding, whose keys and values are not written; further sequences are empty."""
        first, rows = step.metadata[0], len(step.positions)
        count, columns = first.block_table.shape
        self._input_ids[:rows] = step.input_ids
        self._positions[:rows] = step.rotary_positions
        self._slots[:, :rows] = step.slots
        self._slots[:, rows:size] = -1
        self._starts[: count + 1] = first.query_start_loc
        self._starts[count + 1 :] = step.num_tokens
        self._seq_lens[:count] = first.seq_lens
        self._block_tables[:, :count, :columns] = step.block_tables
