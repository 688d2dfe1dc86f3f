"""Decisions of `octavo.LLM`: questions about an input, answered by probabilities instead of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octavo.chat.decisions.answers import MIN_MASS, Decision
from octavo.chat.decisions.asking import Asking, Ways
from octavo.chat.decisions.prompts import Renderer, num_shared, prompt_for_engine, read_params
from octavo.chat.decisions.questions import read_input, read_questions
from octavo.chat.decisions.reads import Read, Reads, named_logprobs
from octavo.chat.offline_images import offline_image
from octavo.errors import FieldError, OctavoError
from octavo.interface.lora import Adapter, LoRARequest
from octavo.interface.outputs import RequestOutput
from octavo.interface.pooling_params import check_generates
from octavo.interface.sampling_params import SamplingParams
from octavo.llm_pooling import RunsRequests

if TYPE_CHECKING:
    from octavo.chat.messages import Conversation
    from octavo.chat.render import Rendered
    from octavo.interface.messages import EngineCoreRequest
    from octavo.text.tokenizer import Tokenizer


class DecisionMethods(RunsRequests):
    """`decide` of `octavo.LLM`."""

    model_name: str
    _temperatures: Mapping[str, float]  # of decisions.json

    def _require_tokenizer(self, method: str) -> Tokenizer:
        raise NotImplementedError

    def _render(self, conversation: Conversation, params: SamplingParams) -> Rendered:
        raise NotImplementedError

    def _adapters_for(
        self, given: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[Adapter | None]:
        raise NotImplementedError

    def decide(
        self,
        input: str | list[dict[str, Any]],
        questions: list[dict[str, Any]],
        *,
        min_mass: float = MIN_MASS,
        debias: bool = False,
        diagnostics: bool = False,
        temperatures: Mapping[str, float] | None = None,
        use_tqdm: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> Decision:
        """Answer questions about one input, both as OpenAI's /v1/decisions has them: the input is read once.

        ``min_mass``: a question whose labels have less probability together is answered by a refusal. ``debias``: each
        question is asked again with its options reversed. ``diagnostics``: the decision has a field ``octavo``.
        ``temperatures``: by type of question, in place of those in the model's decisions.json. Raises ValueError naming
        the field, ModelError for an adapter that cannot be used, OctavoError when the engine fails.
        """
        check_generates(self._input.pooler)
        tokenizer = self._require_tokenizer("decide")
        temperatures = self._temperatures if temperatures is None else temperatures
        ways = Ways(debias, diagnostics, diagnostics, min_mass, temperatures)
        asked, messages = read_questions(questions, _read_image), read_input(input, _read_image)
        asking = Asking(asked, ways)
        (adapter,) = self._adapters_for(lora_request, 1)
        renderer = Renderer(
            lambda conversation: self._render(conversation, SamplingParams()),
            lambda text: self._input.tokenize(text, add_special_tokens=False),
            tokenizer,
            lambda at: _naming(asking.number(at)),
        )
        prompts = renderer.prompts(messages, asking.put)
        reads, shared = Reads([prompt.labels for prompt in prompts]), num_shared(prompts)

        def request(read: Read) -> EngineCoreRequest:
            prompt = prompts[read.question]
            images = [part.image for part in prompt.rendered.images]
            ids = [*prompt.ids, *read.path]
            with _naming(asking.number(read.question)):
                whole = prompt_for_engine(prompt, ids, images, shared)
                return self._input.process(self._new_id(), whole, read_params(read.token_ids), adapter=adapter)

        # All are checked before the first runs, which alone reads what they share.
        waiting = [(read, request(read)) for read in reads.first()]
        outputs, size = list[RequestOutput](), 1
        while waiting:
            wave, waiting, size = waiting[:size], waiting[size:], len(prompts)
            found = self._run([one for _, one in wave], [None] * len(wave), use_tqdm)
            outputs += found
            for (read, _), output in zip(wave, found, strict=True):
                if output.error is not None:
                    raise OctavoError(f"questions.{asking.number(read.question)} could not be read: {output.error}")
                waiting += [(more, request(more)) for more in reads.take(read, *named_logprobs(output))]
        return asking.decide(reads, self.model_name, outputs)


@contextmanager
def _naming(at: int) -> Iterator[None]:
    """Have errors of a prompt name its question."""
    try:
        yield
    except FieldError:
        raise
    except ValueError as error:
        raise ValueError(f"questions.{at}: {error}") from None


def _read_image(part: Any, where: str) -> Any:
    """The image of a part; None for what is none."""
    kind = part.get("type")
    if kind == "input_image":
        return offline_image({"type": "image_url", "image_url": part.get("image_url")}, f"{where}.image_url")
    return offline_image(part, where) if kind in ("image_url", "image_pil") else None
