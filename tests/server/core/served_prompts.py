"""Prompts served one after another by a scheduler whose model has states, and how much of them is hit."""

from __future__ import annotations

from dataclasses import dataclass, field

from core_helpers import core_request

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.scheduler import Scheduler
from octavo.core.states.manager import StateSettings
from octavo.interface.engine_config import SchedulerConfig
from octavo.interface.step import ModelRunnerOutput

STATE = 24  # blocks of a state: as agents' texts here are an eighth as long as real ones, so is a state


@dataclass
class Server:
    """A scheduler, and a runner that answers as it is told to."""

    num_blocks: int
    scheduler: Scheduler = field(init=False)
    prompt_tokens: int = 0
    hits: int = 0  # tokens
    num_preemptions: int = 0
    found: int = 0  # tokens of which keys and values were cached

    def __post_init__(self) -> None:
        kv = KVCacheManager(self.num_blocks + 1, 16, states=StateSettings(STATE, interval=512, gap=8))
        config = SchedulerConfig(max_model_len=self.num_blocks * 8, max_num_batched_tokens=4096, max_num_seqs=4)
        self.scheduler = Scheduler(config, kv)

    def serve(
        self, prompt: list[int], answer: list[int], boundaries: list[int] | None = None, counts: bool = True
    ) -> int:
        """Returns the number of tokens hit."""
        asked = core_request("r", prompt, max_tokens=len(answer), ignore_eos=True, boundaries=boundaries)
        self.scheduler.add_request(asked)
        tokens, hit = iter(answer), 0
        while self.scheduler.has_unfinished_requests():
            step = self.scheduler.schedule()
            for new in step.scheduled_new_reqs:
                hit = new.num_computed_tokens
            sampled = {req_id: [next(tokens)] for req_id in step.sampled_req_ids}
            self.scheduler.update_from_output(ModelRunnerOutput(sampled))
        every = self.scheduler.make_stats()
        assert every.states is not None
        self.num_preemptions += every.num_preemptions
        if counts:
            self.prompt_tokens += len(prompt)
            self.hits += hit
            self.found += hit + every.states.num_tokens_without_state
        return hit
