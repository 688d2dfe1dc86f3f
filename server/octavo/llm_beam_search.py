"""Beam search of `octavo.LLM`: the most likely answers, found by following several at a time.

As `generate(num_beams=...)` of transformers searches: of each step's best continuations the first ``beam_width`` may
end, and what has not ended goes on; the search ends once no beam can beat the worst answer by its score so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.errors import OctavoError
from octavo.interface.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from octavo.interface.lora import Adapter, LoRARequest
from octavo.interface.pooling_params import check_generates
from octavo.interface.sampling_params import SamplingParams
from octavo.llm_pooling import Prompt, RunsRequests, is_one_prompt

if TYPE_CHECKING:
    from octavo.interface.outputs import RequestOutput
    from octavo.text.tokenizer import Tokenizer


class BeamSearchMethods(RunsRequests):
    """`beam_search` of `octavo.LLM`."""

    tokenizer: Tokenizer | None

    def _adapters_for(
        self, given: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[Adapter | None]:
        raise NotImplementedError

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The ``beam_width`` most likely answers to every prompt that the search finds, the best first.

        ``concurrency_limit``: prompts at a time (None: all). Raises ValueError, naming the field, before anything runs.
        """
        check_generates(self._input.pooler)
        many: list[Any] = [prompts] if is_one_prompt(prompts) else list(prompts)
        requested = lora_request if isinstance(lora_request, Sequence) else [lora_request] * len(many)
        adapters = self._adapters_for(lora_request, len(many))
        ends = frozenset() if params.ignore_eos else frozenset(self._input.eos_token_ids)
        searches = [
            _Search(self._prompt_ids(prompt, params), params, ends, asked, adapter)
            for prompt, asked, adapter in zip(many, requested, adapters, strict=True)
        ]
        at_once = concurrency_limit or max(1, len(searches))
        for start in range(0, len(searches), at_once):
            while running := [search for search in searches[start : start + at_once] if search.beams]:
                self._lengthen(running, use_tqdm)
        return [BeamSearchOutput([self._with_text(one) for one in search.answers()]) for search in searches]

    def _prompt_ids(self, prompt: Any, params: BeamSearchParams) -> list[int]:
        if isinstance(prompt, dict) and prompt.get("multi_modal_data"):
            raise ValueError("multi_modal_data is not supported yet in beam_search: give text alone")
        room = self.config.scheduler.max_model_len
        request = self._input.process(self._new_id(), prompt, SamplingParams(max_tokens=1))
        if (length := len(request.prompt_token_ids)) + params.max_tokens > room:
            raise ValueError(
                f"max_tokens ({params.max_tokens}) plus the prompt's {length} tokens exceeds max_model_len ({room})"
            )
        most = self._input.max_logprobs
        if 0 <= most < (needed := _num_candidates(params, self._input.eos_token_ids)):
            raise ValueError(f"beam_width {params.beam_width} needs max_logprobs={needed} or more, and it is {most}")
        return request.prompt_token_ids

    def _lengthen(self, searches: list[_Search], show_progress: bool) -> None:
        """Lengthen every beam of the searches by one token."""
        requests = [
            self._input.process(self._new_id(), beam.tokens, search.sampling, adapter=search.adapter)
            for search in searches
            for beam in search.beams
        ]
        outputs = iter(self._run(requests, [None] * len(requests), show_progress))
        for search in searches:
            search.advance([next(outputs) for _ in search.beams])

    def _with_text(self, sequence: BeamSearchSequence) -> BeamSearchSequence:
        if self.tokenizer is not None:
            sequence.text = self.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        return sequence


def _num_candidates(params: BeamSearchParams, ends: Sequence[int] | frozenset[int]) -> int:
    """Continuations that are looked at in a step: enough that ``beam_width`` of them do not end."""
    return max(2, 1 + len(ends)) * params.beam_width


class _Search:
    """The beams of one prompt, and the answers that have ended."""

    def __init__(
        self,
        prompt: list[int],
        params: BeamSearchParams,
        ends: frozenset[int],
        asked: LoRARequest | None,
        adapter: Adapter | None,
    ) -> None:
        self.adapter, self._params, self._ends, self._prompt_length = adapter, params, ends, len(prompt)
        self._width, self._num_candidates = params.beam_width, _num_candidates(params, ends)
        self.sampling = SamplingParams(
            temperature=0, max_tokens=1, logprobs=self._num_candidates, detokenize=False, ignore_eos=True
        )
        self.beams = [BeamSearchSequence(prompt, lora_request=asked)]
        self._ended: list[tuple[float, BeamSearchSequence]] = []  # by score, the best first
        self._length = 0  # of the beams, without the prompt

    def answers(self) -> list[BeamSearchSequence]:
        """The best that have ended."""
        return [sequence for _, sequence in self._ended]

    def advance(self, outputs: list[RequestOutput]) -> None:
        """Follow the best continuations. ``outputs``: one token of each beam, with log-probabilities."""
        candidates = []
        for beam, output in zip(self.beams, outputs, strict=True):
            table = output.outputs[0].logprobs
            if not table or (logprobs := table[0]) is None:
                raise OctavoError(f"beam_search could not go on: {output.error or output.outputs[0].finish_reason}")
            candidates += [(beam.cum_logprob + one.logprob, beam, token, logprobs) for token, one in logprobs.items()]
        candidates.sort(key=lambda candidate: -candidate[0])
        self._length += 1
        beams = []
        for rank, (total, beam, token, logprobs) in enumerate(candidates[: self._num_candidates]):
            grown = replace(beam, tokens=[*beam.tokens, token], logprobs=[*beam.logprobs, logprobs], cum_logprob=total)
            if token not in self._ends and self._length < self._params.max_tokens:
                beams.append(grown)
            elif rank < self._width:  # further ones are there to go on, should these all end
                self._end(grown, token)
        self.beams = beams[: self._width] if self._may_improve(beams) else []

    def _end(self, sequence: BeamSearchSequence, token: int) -> None:
        score = self._score(sequence)
        sequence.finish_reason = "length"
        if token in self._ends:
            sequence.finish_reason, sequence.stop_reason = "stop", token
            if not self._params.include_stop_str_in_output:
                sequence.tokens = sequence.tokens[:-1]
        self._ended = sorted([*self._ended, (score, sequence)], key=lambda one: -one[0])[: self._width]

    def _may_improve(self, beams: list[BeamSearchSequence]) -> bool:
        full = len(self._ended) == self._width
        return bool(beams) and not (full and self._score(beams[0]) <= self._ended[-1][0])

    def _score(self, sequence: BeamSearchSequence) -> float:
        return sequence.cum_logprob / float(self._length**self._params.length_penalty)
