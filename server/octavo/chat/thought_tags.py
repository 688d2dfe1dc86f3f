"""The families' tags around thoughts, one row each. Plain data. The names are vLLM's, as far as it has one."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.chat.options import AUTO, HF, NONE


@dataclass(frozen=True)
class ThoughtTags:
    """The texts by which a family of models tells thoughts from the answer. White space around them is nobody's."""

    opening: str
    closing: str
    names: tuple[str, ...] = ()
    also: tuple[tuple[str, str], ...] = ()  # other spellings of both
    texts: tuple[str, ...] = ()  # marks around the answer, which are no content
    empty: str = ""  # an empty thought, where it is more than the tags
    both_signs: bool = False  # other families write the closing tag, too, so that it alone says nothing

    @property
    def openings(self) -> tuple[str, ...]:
        """All spellings of the opening tag."""
        return (self.opening, *(opening for opening, _ in self.also))

    @property
    def closings(self) -> tuple[str, ...]:
        """All spellings of the closing tag."""
        return (self.closing, *(closing for _, closing in self.also))

    @property
    def around(self) -> tuple[str, str]:
        """The tags as the family writes them."""
        return self.opening, self.closing

    def opened_by(self, prompt_end: str) -> bool:
        """True if a prompt with this end has opened the thoughts."""
        return prompt_end.rstrip().endswith(self.openings)

    def closed_by(self, prompt_end: str) -> bool:
        """True if a prompt with this end has closed the thoughts, so that the answer comes next."""
        return prompt_end.rstrip().endswith(self.closings)

    def ended(self, prompt: str) -> str:
        """Return what a prompt needs behind it so that the model answers without thoughts."""
        if self.empty and not self.opened_by(prompt):
            return self.empty
        gap = "\n\n" if self.opening == THINK.opening else ""
        return (gap[1:] if self.opened_by(prompt) else self.opening + gap) + self.closing + gap


THINK = ThoughtTags(
    "<think>",
    "</think>",
    (
        "qwen3",
        "deepseek_r1",
        "deepseek_v3",
        "deepseek_v4",
        "deepseek_v41",
        "glm45",
        "glm47",
        "granite_thinking_parser",
        "holo2",
        "kimi_k2",
        "ling3",
        "mimo",
        "minicpmv",
        "minimax_m2",
        "nemotron_v3",
        "olmo3",
        "poolside_v1",
        "step3",
        "step3p5",
    ),
)
HUNYUAN = ThoughtTags("<think:opensource>", "</think:opensource>", ("hy_v3", "hy_v4"))  # or another suffix
# In the order in which they are looked for.
THOUGHT_TAGS = (
    THINK,
    ThoughtTags("<seed:think>", "</seed:think>", ("seed_oss",)),
    HUNYUAN,
    ThoughtTags("<mm:think>", "</mm:think>", ("minimax_m3",)),
    ThoughtTags("[THINK]", "[/THINK]", ("mistral",)),
    ThoughtTags(
        "<|channel>thought",
        "<channel|>",
        ("gemma4",),
        also=(("<|channel><|channel>thought", "<channel|>"), ("<|channel>", "<channel|>")),
    ),
    ThoughtTags(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("cohere_command3", "cohere_command4"),
        texts=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ThoughtTags(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ("kimi_k3",),
        texts=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    ThoughtTags(
        "to=self<|message|>",
        "<|eom|>",
        ("muse_glimmer",),
        texts=("<|start|>assistant", "to=user<|message|>", "to=commentary<|message|>", "<|eot|>"),
        empty=" to=self<|message|><|eom|><|start|>assistant",
        both_signs=True,
    ),
    ThoughtTags("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>", ("plamo3",)),
    ThoughtTags(
        "<ifm|think>",
        "</ifm|think>",
        ("k2_horizon",),
        also=(("<ifm|think_fast>", "</ifm|think_fast>"), ("<ifm|think_faster>", "</ifm|think_faster>")),
    ),
    ThoughtTags("<|inner_prefix|>", "<|inner_suffix|>", ("apertus",)),
    ThoughtTags("<think>", "</think>", ("hunyuan_a13b",), texts=("<answer>", "</answer>")),
    ThoughtTags("<think>", "</think>", ("ernie45",), texts=("<response>", "</response>")),
    ThoughtTags(
        "Here is my thought process:",
        "Here is my response:",
        ("granite",),
        also=(("Here's my thought process:", "Here's my response:"),),
    ),
    ThoughtTags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", ("apriel",), texts=("[END FINAL RESPONSE]",)),
    ThoughtTags(
        "<|think|>",
        "<|end|>",
        ("solar_open2",),
        texts=("<|begin|>assistant", "<|content|>"),
        empty="<|think|><|end|><|begin|>assistant",
        both_signs=True,
    ),
)
# Whose output begins inside the thoughts if neither the prompt nor the text says so.
ALWAYS_THINKING = frozenset({"deepseek_r1", "minimax_m2", "step3"})
HARMONY = "openai_gptoss"  # thoughts that are split off together with calls (tools.parsers.harmony)
TAGS_BY_NAME = {name: tags for tags in THOUGHT_TAGS for name in tags.names}
REASONING_PARSERS = (AUTO, NONE, HF, HARMONY, *sorted(TAGS_BY_NAME))
