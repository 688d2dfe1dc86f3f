"""The tab Plan says what `octavo plan` says, and shows its errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.dashboard.plans import Planner, plan_html, plan_words
from octavo.errors import OctavoError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(("running", "waits"), [(128, True), (65536, False)])
def test_users_that_the_cache_holds_are_no_more_than_run(
    running: int, waits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = plan_words(str(tmp_path), gpu="h200", context=64, output=64, users=20, max_num_seqs=running)
    assert main(["plan", *words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert 128 < said["workload"]["mean_capacity"] < 65536
    assert ("128 run at a time, the others wait" in plan_html(said)) is waits


def test_the_command_and_the_page_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = plan_words(str(tmp_path), gpu="h100", context=2048, users=20, prefix_share=None, memory=" ")
    assert words == [str(tmp_path), "--gpu=h100", "--context=2048", "--users=20"]

    async def ask() -> None:
        planner = Planner()
        planned = await planner.plan(words)
        forms = []
        for form in ("--json", "--explain", "--yaml"):
            assert main(["plan", *words, form]) == 0
            forms.append(capsys.readouterr().out)
        assert [planned.said, planned.text, planned.yaml] == [json.loads(forms[0]), *forms[1:]]
        shown = plan_html(planned.said)
        assert "Fits: H100" in shown and f"{planned.said['num_blocks']:,} blocks" in shown and "131,072 bytes" in shown
        tight = await planner.plan(plan_words(str(tmp_path), memory="4GiB"))  # by the same process
        assert "Will not start" in plan_html(tight.said) and tight.yaml.startswith("# there is no LLMDeployment")
        with pytest.raises(OctavoError, match="a100"):
            await planner.plan(plan_words(str(tmp_path), gpu="a1000"))
        assert planner._process is not None
        planner._process.kill()  # as after minutes without a plan
        await planner._process.wait()
        assert (await planner.plan(words)).yaml == planned.yaml
        planner._process.kill()
        await planner._process.wait()

    asyncio.run(ask())


@pytest.mark.parametrize("model", ["", " ", "--yaml"])
def test_a_model_is_named(model: str) -> None:
    with pytest.raises(OctavoError, match="Model"):
        plan_words(model)
