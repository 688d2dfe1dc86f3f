"""The steps of a stage that others follow: it hands its states on instead of sampling."""

from __future__ import annotations

import torch

from octavo.interface.step import ModelRunnerOutput, PendingOutput, SchedulerOutput
from octavo.models.base import CausalLM
from octavo.worker.cpu.runner import CPURunner
from octavo.worker.image_encoder import ImageEncoder
from octavo.worker.kv_cache import KVCache
from octavo.worker.model_runner import ModelRunner, rows_of
from octavo.worker.request_states import RequestStates
from octavo.worker.stage import Pipes
from octavo.worker.step import DeviceRunner


class StageRunner(ModelRunner):
    """Runs a stage's layers. On the first rank, what it returns waits for the last stage's results."""

    def __init__(
        self,
        model: CausalLM,
        requests: RequestStates,
        runner: DeviceRunner,
        kv_cache: KVCache,
        pipes: Pipes,
        images: ImageEncoder | None = None,
    ) -> None:
        super().__init__(model, requests, runner, kv_cache, images=images)
        assert isinstance(runner, CPURunner)
        self._runner, self._pipes = runner, pipes

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> PendingOutput:
        """See `ModelRunner`."""
        self.update_rows(step)
        requests, batch, results, after = self.requests, self.requests.batch, self._pipes.results, self._pipes.after
        assert after is not None
        rows, num_scheduled = rows_of(batch, step)
        sampled_ids = [req_id for req_id in step.sampled_req_ids if req_id not in requests.pooler]
        grammars, drafts = requests.grammars, step.scheduled_spec_decode_tokens
        bitmask = grammars.start_fill(sampled_ids, drafts) if results is not None else None
        images = self.images_of(step, rows, num_scheduled)
        is_decode = len(rows) == len(step.sampled_req_ids) == step.total_num_scheduled_tokens
        states = self._runner.run_decode(rows) if is_decode and images is None else None
        after.send(states or self._runner.run(self.make_inputs(rows, num_scheduled, images)))
        batch.num_computed[rows] += num_scheduled  # as if drafts were right, see `InputBatch.put_tokens`
        if results is None or bitmask is None:
            return ModelRunnerOutput
        bitmask()  # which is sent to those who sample
        sampled = requests.identities(sampled_ids)

        def pending() -> ModelRunnerOutput:
            output = results()
            requests.take_tokens(output, sampled)
            return output

        return pending
