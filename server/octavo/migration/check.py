"""A pasted command, judged as a whole."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from octavo.migration import llama_cpp, ollama, pasted, tgi, vllm
from octavo.migration.rules import judge
from octavo.migration.verdict import Status, Verdict

_SAMPLING = "--override-generation-config"


@dataclass(frozen=True)
class Checked:
    """``command``: what to run here instead, without what is refused or has no effect."""

    server: str
    verdicts: list[Verdict]
    command: str

    @property
    def runs(self) -> bool:
        """True if nothing is refused."""
        return all(one.status is not Status.REFUSED for one in self.verdicts)


def check(text: str) -> Checked:
    """Judge the first command in ``text``. Raises ConfigError if there is none."""
    found = pasted.read(text)
    ours = ["octavo", "serve"]
    if found.server == pasted.OLLAMA:
        ours, verdicts = ollama.check(found.arguments, found.environment)
    elif found.server == pasted.VLLM:
        verdicts = vllm.judge(found.arguments, found.environment)
    else:
        rules, prefix = (tgi.RULES, "") if found.server == pasted.TGI else (llama_cpp.RULES, "LLAMA_ARG_")
        verdicts = judge(rules, found.arguments, found.environment, prefix)
    arguments = _merged(verdicts)
    if ours[1:] == ["serve"]:
        verdicts = verdicts + vllm.together(arguments, found.environment)
    return Checked(found.server, verdicts, shlex.join([*ours, *arguments]))


def _merged(verdicts: list[Verdict]) -> list[str]:
    """The arguments of all verdicts, the same ones once, and the sampling parameters in one object."""
    parts = dict.fromkeys(one.arguments for one in verdicts)
    objects = [part[1] for part in parts if part[:1] == (_SAMPLING,)]
    if len(objects) < 2:
        return [word for part in parts for word in part]
    merged = {key: value for text in objects for key, value in json.loads(text).items()}
    others = [word for part in parts if part[:1] != (_SAMPLING,) for word in part]
    return [*others, _SAMPLING, json.dumps(merged)]
