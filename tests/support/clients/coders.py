"""Coding agents for the command line, as npm and pip install them: how each is told of a server, and what a reciting
model says so that each mends a sum: it reads a file, edits it, runs the test and says that it is done."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.clients.loops import MODEL, Call, spoken

Calls = tuple[Call, ...]  # of one turn
WRONG, RIGHT = "return a - b", "return a + b"
CONTEXT = 65_536


@dataclass(frozen=True)
class Task:
    """A folder with a file whose sum is wrong, and its test, for the agent ``name``."""

    name: str
    folder: Path

    @property
    def question(self) -> str:
        return f"Please mend the sum in calc.py and run its test, {self.name}."

    @property
    def read(self) -> str:
        """How the file ends."""
        return f"# all of this was read by {self.name}"

    @property
    def wrote(self) -> str:
        """How it ends when it was edited."""
        return f"# all of this was written by {self.name}"

    @property
    def ran(self) -> str:
        """What the test prints."""
        return f"the sum was found to be right by {self.name}"

    @property
    def done(self) -> str:
        return f"It was a sign, é; now {self.name} is done."

    @property
    def old(self) -> str:
        return f"    {WRONG}\n\n\n{self.read}"

    @property
    def new(self) -> str:
        return f"    {RIGHT}\n\n\n{self.wrote}"

    def lay(self) -> None:
        self.folder.mkdir(parents=True)
        (self.folder / "calc.py").write_text(f"def add(a, b):\n{self.old}")
        (self.folder / "test_calc.py").write_text(
            f"from calc import add\n\nassert add(2, 3) == 5\nopen('ran', 'w').write({self.ran!r})\n"
            f"print({self.ran!r}, end='')\n"
        )

    def check(self, output: str) -> None:
        assert self.done in output
        assert (self.folder / "calc.py").read_text().rstrip() == f"def add(a, b):\n{self.new}"
        assert (self.folder / "ran").exists(), "the test was not run"


@dataclass(frozen=True)
class Coder:
    """One agent. ``command``: from address and question, behind its program; ``files``: its settings as JSON, by path
    below HOME, from the address; ``environment``: what keeps it from asking its makers for anything; ``calls``: of a
    task, turn by turn: to read, to edit, to run the test; ``ends``: how the results of these turns end; ``asked``: how
    its first prompt ends; ``last``: calls beside the last words; ``edit``: the words that edit, of an agent that knows
    no calls and runs the test by itself."""

    program: str
    command: Callable[[str, str], list[str]]
    calls: Callable[[Task], tuple[Calls, Calls, Calls]]
    ends: Callable[[Task], tuple[str, str, str]]
    files: Callable[[str], dict[str, Any]] = lambda url: {}
    environment: Mapping[str, str] = field(default_factory=dict)
    asked: Callable[[Task], str] = lambda task: task.question
    last: Calls = ()
    edit: Callable[[Task], str] | None = None

    def count(self, task: Task) -> int:
        """The number of calls in a task."""
        return 0 if self.edit is not None else sum(map(len, (*self.calls(task), self.last)))


def scripts(task: Task) -> dict[str, str]:
    coder = CODERS[task.name]
    if coder.edit is not None:
        return {coder.asked(task): spoken("A wrong sign.", f"{coder.edit(task)}\n\n{task.done}", ())}
    read, edit, run = coder.calls(task)
    ends = coder.ends(task)
    return {
        coder.asked(task): spoken("First I read it.", "I read the file.", read),
        ends[0]: spoken("A wrong sign.", "I mend it.", edit),
        ends[1]: spoken("Is it right?", "", run),
        ends[2]: spoken("All is well.", task.done, coder.last),
    }


def settings(coder: Coder, url: str, home: Path) -> None:
    for name, content in coder.files(url).items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(json.dumps(content))


def _pi(url: str) -> dict[str, Any]:
    model = {"id": MODEL, "reasoning": True, "contextWindow": CONTEXT, "maxTokens": 4_096}
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
    return {".pi/agent/models.json": {"providers": {"octavo": provider}}}


def _opencode(url: str) -> dict[str, Any]:
    model = {"tool_call": True, "reasoning": True, "limit": {"context": CONTEXT, "output": 4_096}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: model},
    }
    settings = {"provider": {"octavo": provider}, "autoupdate": False, "share": "disabled"}
    return {".config/opencode/opencode.json": settings}


def _qwen_code(url: str) -> dict[str, Any]:
    return {
        ".qwen/settings.json": {
            "general": {"enableAutoUpdate": False},
            "memory": {"enableManagedAutoMemory": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
        }
    }


def _cline(url: str) -> dict[str, Any]:
    chosen = {"provider": "openai-compatible", "apiKey": "none", "model": MODEL, "baseUrl": f"{url}/v1"}
    return {
        ".cline/data/settings/providers.json": {
            "version": 1,
            "lastUsedProvider": "openai-compatible",
            "modes": {},
            "providers": {
                "openai-compatible": {"settings": chosen, "updatedAt": "2026-01-01T00:00:00Z", "tokenSource": "manual"}
            },
        }
    }


def _continue(url: str) -> dict[str, Any]:
    model = {"name": MODEL, "provider": "openai", "model": MODEL, "apiBase": f"{url}/v1", "apiKey": "none"}
    chosen = {**model, "roles": ["chat"], "capabilities": ["tool_use"]}
    return {".continue/config.yaml": {"name": "octavo", "version": "1.0.0", "schema": "v1", "models": [chosen]}}


def _by_shell(task: Task) -> tuple[Calls, Calls, Calls]:
    """The calls of an agent whose one tool is a shell."""
    mend = f"sed -i 's/{WRONG}/{RIGHT}/; s/read by/written by/' calc.py; cat calc.py"
    return (
        (("bash", {"command": "cat calc.py"}),),
        (("bash", {"command": mend}),),
        (("bash", {"command": "python3 test_calc.py"}),),
    )


CODERS = {
    "pi": Coder(
        "pi",
        lambda url, question: ["--provider", "octavo", "--model", MODEL, "--no-session", "-p", question],
        lambda task: (
            (("read", {"path": "calc.py"}),),
            (("edit", {"path": "calc.py", "edits": [{"oldText": task.old, "newText": task.new}]}),),
            (("bash", {"command": "python3 test_calc.py"}),),
        ),
        lambda task: (task.read, "Successfully replaced 1 block(s) in calc.py.", task.ran),
        _pi,
        {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"},
    ),
    "codex": Coder(
        "codex",
        lambda url, question: [
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            "-m",
            MODEL,
            "-c",
            "model_provider=octavo",
            "-c",
            "check_for_update_on_startup=false",
            "-c",
            f'model_providers.octavo={{name="octavo",base_url="{url}/v1",wire_api="responses"}}',
            question,
        ],
        lambda task: (
            (("exec_command", {"cmd": "cat calc.py"}),),
            (("exec_command", {"cmd": f"sed -i 's/{WRONG}/{RIGHT}/; s/read by/written by/' calc.py; cat calc.py"}),),
            (("exec_command", {"cmd": "python3 test_calc.py"}),),
        ),
        lambda task: (task.read, task.wrote, task.ran),
    ),
    "opencode": Coder(
        "opencode",
        # It puts a message of one argument in quotes.
        lambda url, question: ["run", "--pure", "--auto", "--title=sum", f"--model=octavo/{MODEL}", *question.split()],
        lambda task: (
            (("read", {"filePath": f"{task.folder}/calc.py"}),),
            (("edit", {"filePath": f"{task.folder}/calc.py", "oldString": task.old, "newString": task.new}),),
            (("bash", {"command": "python3 test_calc.py"}),),
        ),
        lambda task: (
            f"{task.read}\n\n(End of file - total 5 lines)\n</content>",
            "Edit applied successfully.",
            task.ran,
        ),
        _opencode,
        {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_SHARE": "1",
        },
    ),
    "qwen-code": Coder(
        "qwen",
        lambda url, question: [
            "--yolo",
            *("--auth-type", "openai", "--openai-api-key", "none", "--openai-base-url", f"{url}/v1", "--model", MODEL),
            question,
        ],
        lambda task: (
            (("read_file", {"file_path": f"{task.folder}/calc.py"}),),
            (("edit", {"file_path": f"{task.folder}/calc.py", "old_string": task.old, "new_string": task.new}),),
            (  # a command's result ends with the id of its process
                ("run_shell_command", {"command": "python3 test_calc.py", "is_background": False}),
                ("read_file", {"file_path": f"{task.folder}/ran"}),
            ),
        ),
        lambda task: (task.read, task.wrote, task.ran),
        _qwen_code,
    ),
    "cline": Coder(
        "cline",
        lambda url, question: ["--auto-approve", "true", "--compaction", "off", question],
        lambda task: (
            (("read_files", {"files": [{"path": f"{task.folder}/calc.py"}]}),),
            (("editor", {"path": f"{task.folder}/calc.py", "old_text": task.old, "new_text": task.new}),),
            (("run_commands", {"commands": ["python3 test_calc.py"]}),),
        ),
        lambda task: (
            f'{task.read}","success":true}}]',
            f'{task.wrote}\\n```","success":true}}',
            f'{task.ran}","success":true}}]',
        ),
        _cline,
        {"CLINE_NO_AUTO_UPDATE": "1"},
    ),
    "continue": Coder(
        "cn",
        lambda url, question: ["-p", "--auto", question],
        lambda task: (
            (("Read", {"filepath": "calc.py"}),),
            (("Edit", {"file_path": f"{task.folder}/calc.py", "old_string": task.old, "new_string": task.new}),),
            (("Bash", {"command": "python3 test_calc.py"}),),
        ),
        lambda task: (task.read, f"{task.wrote}\n\\ No newline at end of file\n", task.ran),
        _continue,
        {"CONTINUE_TELEMETRY_ENABLED": "0"},
    ),
    "mini-swe-agent": Coder(
        "mini",
        lambda url, question: [
            *("--yolo", "--exit-immediately", "--model", f"openai/{MODEL}", "--task", question),
            *("--config", "mini.yaml", "--config", f"model.model_kwargs.api_base={url}/v1"),
        ],
        _by_shell,
        lambda task: (f'{task.read}"\n}}', f'{task.wrote}"\n}}', f'{task.ran}"\n}}'),
        environment={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "OPENAI_API_KEY": "none",
        },
        asked=lambda task: "### Any other command you want to run\n\n```bash\nanything\n```",
        last=(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),),
    ),
    "aider": Coder(
        "aider",
        lambda url, question: [
            *("--model", f"openai/{MODEL}", "--openai-api-base", f"{url}/v1", "--openai-api-key", "none"),
            *("--edit-format", "diff", "--no-git", "--yes-always", "--no-pretty", "--no-show-model-warnings"),
            *("--no-check-update", "--analytics-disable", "--no-show-release-notes", "--map-tokens", "0"),
            *("--auto-test", "--test-cmd", "python3 test_calc.py", "--message", question, "calc.py"),
        ],
        lambda task: ((), (), ()),
        lambda task: ("", "", ""),
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        asked=lambda task: "suggest the command to install them.\n- Etc.",
        edit=lambda task: f"calc.py\n```python\n<<<<<<< SEARCH\n{task.old}\n=======\n{task.new}\n>>>>>>> REPLACE\n```",
    ),
}
