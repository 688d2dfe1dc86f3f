"""LoRA adapters beside a model, against the models that PEFT makes of the same adapters by merging them."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import save_adapter
from support.overlapped import overlapped
from support.tiny_models import FAMILIES, make_model

from octavo import LLM, LoRARequest, SamplingParams
from octavo.errors import ModelError, OctavoError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=320)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "some": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": r".*layers\.[12]\..*(k_proj|up_proj|o_proj)",
        "rank_pattern": {"up_proj": 7, "layers.2.self_attn.k_proj": 2},
        "alpha_pattern": {"o_proj": 20},
    },
    "ends": {"r": 5, "lora_alpha": 5, "target_modules": ["embed_tokens", "lm_head"]},
}
PROMPTS = [[5, 17, 200, 31, 8, 9, 10], [7, 7, 301, 2, 90], [11] * 20]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Any]:
    """A tiny Llama, and for each adapter the reference's logits after each prompt and its answer."""
    folder = tmp_path_factory.mktemp("adapters")
    config_class, settings = FAMILIES["llama"]
    model = make_model(config_class, settings | {"tie_word_embeddings": False})
    model.save_pretrained(folder / "model")
    models = {"base": model}
    for seed, (name, one) in enumerate(ADAPTERS.items()):
        models[name] = save_adapter(folder / name, model, seed + 1, **one)
    return {"folder": folder, "models": models}


@pytest.fixture(scope="module")
def llm(made) -> LLM:
    return LLM(str(made["folder"] / "model"), dtype="float32", enable_lora=True, skip_tokenizer_init=True)


def ask(name: str, folder: Path) -> LoRARequest | None:
    return None if name == "base" else LoRARequest(name, 1, str(folder / name))


@torch.inference_mode()
def expected(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the log-probabilities of all tokens at each of them."""
    ids, rows = list(prompt), []
    for _ in range(GREEDY.max_tokens or 0):
        rows.append(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1))
        ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)


def found(output: Any) -> tuple[list[int], torch.Tensor]:
    completion = output.outputs[0]
    rows = [[entry[token].logprob for token in range(320)] for entry in completion.logprobs]
    return list(completion.token_ids), torch.tensor(rows)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24, "max_num_seqs": 4, "speculative_config": NGRAM},
        {"tensor_parallel_size": 2},
        {"distributed_executor_backend": "mp"},
        {"overlap": True, "max_num_batched_tokens": 24, "max_num_seqs": 4, "speculative_config": NGRAM},
    ],
    ids=["whole", "chunks and guesses", "ranks", "process", "as on GPUs"],
)
def test_answers_are_those_of_merged_weights_alone_and_in_one_batch(made, options):
    """Also by a GPU's runner, whose slots are memory of their own."""
    folder, models, options = made["folder"], made["models"], dict(options)
    overlap = options.pop("overlap", False)
    llm = LLM(
        str(folder / "model"), dtype="float32", enable_lora=True, max_loras=4, skip_tokenizer_init=True, **options
    )
    assert_recorded(llm)
    if overlap:
        llm = overlapped(llm)
    names = [name for name in models for _ in PROMPTS]
    prompts = [{"prompt_token_ids": prompt} for _ in models for prompt in PROMPTS]
    alone = []
    for name, prompt in zip(names, prompts, strict=True):
        (output,) = llm.generate(prompt, GREEDY, lora_request=ask(name, folder), use_tqdm=False)
        tokens, logprobs = found(output)
        wanted_tokens, wanted = expected(models[name], prompt["prompt_token_ids"])
        assert tokens == wanted_tokens, name
        assert (logprobs - wanted).abs().max() <= 1e-4, name
        alone.append((tokens, logprobs))
    llm.reset_prefix_cache()
    together = llm.generate(prompts, GREEDY, lora_request=[ask(name, folder) for name in names], use_tqdm=False)
    for output, (tokens, logprobs) in zip(together, alone, strict=True):
        assert found(output)[0] == tokens and torch.equal(found(output)[1], logprobs)
    refused(llm, folder / "nothing", "adapter_config.json")


def assert_recorded(llm: LLM) -> None:
    assert llm.engine.executor.recording_obstacle is None


def test_llama_cpps_files_hold_the_same_adapter(made, llm, tmp_path):
    """With the rows of B for queries and keys in the order of the base model's file."""
    from gguf import GGUFWriter
    from safetensors.torch import load_file

    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    writer = GGUFWriter(tmp_path / "adapter.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 16.0)
    for name, tensor in load_file(made["folder"] / "all" / "adapter_model.safetensors").items():
        layer, module, matrix = re.search(r"layers\.(\d+)\.(.+)\.lora_([AB])", name).groups()
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(module)
        if heads and matrix == "B":
            rows, rank = tensor.shape
            tensor = tensor.view(heads, 2, rows // heads // 2, rank).transpose(1, 2).reshape(rows, rank)
        writer.add_tensor(f"blk.{layer}.{names[module]}.weight.lora_{matrix.lower()}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for path in (tmp_path, tmp_path / "adapter.gguf"):
        request = LoRARequest("gguf", 1, str(path))
        (output,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY, lora_request=request, use_tqdm=False)
        assert found(output)[0] == expected(made["models"]["all"], PROMPTS[0])[0]


def test_adapters_are_fetched_from_where_models_are(made, llm):
    for name in ("all", "some"):
        request = LoRARequest(name, 1, f"file://{made['folder'] / name}")
        for _ in range(2):
            (output,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY, lora_request=request, use_tqdm=False)
            assert found(output)[0] == expected(made["models"][name], PROMPTS[0])[0]
    with pytest.raises(ModelError, match="unknown source"):
        llm.generate({"prompt_token_ids": [1]}, GREEDY, lora_request=LoRARequest("x", 1, "ftp://host/x"))


def test_other_weights_under_one_name_find_no_keys_of_the_first(made, tmp_path):
    folder = made["folder"]
    llm = LLM(str(folder / "model"), dtype="float32", enable_lora=True, skip_tokenizer_init=True)
    prompt = {"prompt_token_ids": list(range(3, 90))}
    path = tmp_path / "one"
    answers = {}
    for name in ("all", "some"):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder / name, path)
        for _ in range(2):
            (output,) = llm.generate(prompt, GREEDY, lora_request=LoRARequest("one", 1, str(path)), use_tqdm=False)
            answers.setdefault(name, []).append((output.num_cached_tokens, output.outputs[0].token_ids))
        assert answers[name][0][0] == 0 and answers[name][1][0] > 0 and answers[name][0][1] == answers[name][1][1]
        assert answers[name][0][1] == expected(made["models"][name], prompt["prompt_token_ids"])[0]
    (base,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert base.num_cached_tokens == 0


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"dtype": "bfloat16"}], ids=["int8", "bfloat16"])
def test_rows_have_the_bits_that_they_have_alone_and_without_adapters_around(made, options):
    """With weights in codes, whose norms and gates are fused where no adapter is in the step, and in 16 bits."""
    folder, options = made["folder"], {"dtype": "float32", "skip_tokenizer_init": True} | options
    llm, plain = (LLM(str(folder / "model"), **options, **more) for more in ({"enable_lora": True, "max_loras": 4}, {}))
    names = [name for name in made["models"] for _ in PROMPTS]
    prompts = [{"prompt_token_ids": prompt} for _ in made["models"] for prompt in PROMPTS]
    together = llm.generate(prompts, GREEDY, lora_request=[ask(name, folder) for name in names], use_tqdm=False)
    base = [found(output) for output in plain.generate(prompts[: len(PROMPTS)], GREEDY, use_tqdm=False)]
    llm.reset_prefix_cache()
    for i, (name, prompt, output) in enumerate(zip(names, prompts, together, strict=True)):
        (alone,) = llm.generate(prompt, GREEDY, lora_request=ask(name, folder), use_tqdm=False)
        assert torch.equal(found(alone)[1], found(output)[1]), name
        assert torch.equal(found(output)[1], base[i % len(PROMPTS)][1]) == (name == "base"), name
    assert_recorded(llm)


@pytest.mark.long
def test_answers_are_the_same_by_the_kernels_of_gpus(made, monkeypatch):
    """In Triton's interpreter: rows of all adapters in a step, with bits that each has alone."""
    from octavo_kernels import cpu, triton

    for name in ("lora_tiles", "lora_shrink", "lora_gather", "lora_expand_"):
        monkeypatch.setattr(cpu, name, getattr(triton, name))
    folder, models, params = made["folder"], made["models"], replace(GREEDY, max_tokens=3)
    llm = overlapped(
        LLM(str(folder / "model"), dtype="float32", enable_lora=True, max_loras=4, skip_tokenizer_init=True)
    )
    of_each = [ask(name, folder) for name in models]
    together = llm.generate([{"prompt_token_ids": PROMPTS[0]}] * len(models), params, lora_request=of_each)
    llm.reset_prefix_cache()
    for name, output, adapter in zip(models, together, of_each, strict=True):
        assert found(output)[0] == expected(models[name], PROMPTS[0])[0][:3], name
        (alone,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, params, lora_request=adapter)
        assert torch.equal(found(alone)[1], found(output)[1]), name


@pytest.mark.parametrize("overlap", [False, True], ids=["", "as on GPUs"])
def test_many_adapters_take_turns_in_few_slots(made, overlap):
    folder = made["folder"]
    llm = LLM(
        str(folder / "model"),
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=2,
        skip_tokenizer_init=True,
        max_num_seqs=4,
    )
    llm = overlapped(llm) if overlap else llm
    names = ["all", "some", "base", "patterns", "ends"] * 4
    prompts = [{"prompt_token_ids": PROMPTS[i % 3]} for i in range(len(names))]
    outputs = llm.generate(prompts, GREEDY, lora_request=[ask(name, folder) for name in names], use_tqdm=False)
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == expected(made["models"][name], prompt["prompt_token_ids"])[0], name
    llm.engine.check_integrity()
    loaded = llm.engine.executor.worker.adapters._loaded.values()  # type: ignore[attr-defined]
    assert len(loaded) == 2
    if not overlap:
        largest = max(sum(t.nbytes for pair in one.matrices.values() for t in pair) for one in loaded)
        assert llm.engine.executor.memory_shares["adapters"] >= 4 * largest


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora"),
    "biases": ({"bias": "all"}, "bias"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "VeRA": ({"peft_type": "VERA"}, "VERA"),
    "transposed": ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    "rank": ({"r": 1000}, "max_lora_rank"),
    "no rank": ({"r": None}, "r must be"),
    "another rank": ({"r": 5}, "rank 8"),
    "alpha": ({"lora_alpha": "NaN"}, "lora_alpha"),
    "a slow pattern": ({"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern"),
    "an unknown variant": ({"use_something": True}, "use_something"),
    "a changed base": ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_uncomputed_parts_of_adapters_are_refused_by_name(made, llm, tmp_path, case):
    changes, word = HOSTILE[case]
    path = shutil.copytree(made["folder"] / "all", tmp_path / "bad")
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | changes))
    refused(llm, path, word)


def test_damaged_files_are_refused_in_one_line(made, llm, tmp_path):
    from safetensors.torch import load_file, save_file

    refused(llm, tmp_path / "nothing", "adapter_config.json")
    tensors = load_file(made["folder"] / "all" / "adapter_model.safetensors")
    first = next(name for name in tensors if "q_proj.lora_A" in name)

    def broken(word: str, **changes: torch.Tensor | None) -> None:
        path = tmp_path / word.replace(" ", "-")
        shutil.copytree(made["folder"] / "all", path)
        changed = {**tensors, **changes}
        save_file({name: t for name, t in changed.items() if t is not None}, path / "adapter_model.safetensors")
        refused(llm, path, word)

    second = first.replace("_A", "_B")

    def as_module(name: str) -> dict[str, torch.Tensor]:
        """The first pair once more, for another module."""
        return {one.replace("self_attn.q_proj", name): tensors[one].clone() for one in (first, second)}

    broken("finite", **{first: torch.full_like(tensors[first], float("nan"))})
    broken("inputs", **{first: torch.zeros(8)})
    broken("another model", **{first: torch.zeros(8, 65)})
    broken("alone", **{first: None})
    broken("not a matrix", **{first.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(64)})
    broken("no place", **as_module("self_attn.x_proj"))
    broken("experts", **as_module("mlp.experts.0.up_proj"))
    huge = shutil.copytree(made["folder"] / "all", tmp_path / "huge")
    with open(huge / "adapter_config.json", "r+b") as file:
        file.truncate(1 << 30)
    refused(llm, huge, "1073741824 bytes")
    with open(shutil.copytree(made["folder"] / "all", tmp_path / "large") / "adapter_model.safetensors", "r+b") as file:
        file.truncate(1 << 30)
    refused(llm, tmp_path / "large", "1073741824 bytes")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_copies_of_the_bases_tables_are_taken_where_they_equal_it(made, llm, tmp_path, dtype):
    """PEFT saves them beside the matrices of embedding and head, in the dtype that it has trained in."""
    from safetensors.torch import load_file, save_file

    tables = made["models"]["base"].state_dict()
    tensors = load_file(made["folder"] / "ends" / "adapter_model.safetensors")
    names = {"model.embed_tokens": ".base_layer", "lm_head": ""}
    copies = {f"base_model.model.{n}{kind}.weight": tables[f"{n}.weight"].to(dtype) for n, kind in names.items()}
    path = shutil.copytree(made["folder"] / "ends", tmp_path / "copies")
    save_file({**tensors, **copies}, path / "adapter_model.safetensors")
    request = LoRARequest("copies", 1, str(path))
    (output,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY, lora_request=request, use_tqdm=False)
    assert found(output)[0] == expected(made["models"]["ends"], PROMPTS[0])[0]
    for number, name in enumerate(copies):
        other = copies[name].clone()
        other[-1, -1] += 1
        resized = torch.cat([other, other[:1]])
        for word, table in (("other values", other), ("resized", resized)):
            bad = shutil.copytree(path, tmp_path / f"{word}{number}")
            save_file({**tensors, **copies, name: table}, bad / "adapter_model.safetensors")
            refused(llm, bad, word)
            refused(llm, bad, name)
    bad = shutil.copytree(path, tmp_path / "another")
    save_file({**tensors, "base_model.model.score.weight": torch.zeros(2, 64)}, bad / "adapter_model.safetensors")
    refused(llm, bad, "whole modules")


def refused(llm: LLM, path: Path, word: str) -> None:
    with pytest.raises(ModelError) as error:
        llm.generate({"prompt_token_ids": [1, 2]}, GREEDY, lora_request=LoRARequest("bad", 1, str(path)))
    assert word in str(error.value) and "\n" not in str(error.value)
    assert len(llm.generate({"prompt_token_ids": [1, 2]}, GREEDY)) == 1


def test_options_that_do_not_go_together_are_refused(made):
    model = str(made["folder"] / "model")
    for options, word in (
        ({"max_loras": 2}, "enable_lora"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras"),
        ({"enable_lora": True, "max_lora_rank": 4096}, "max_lora_rank"),
    ):
        with pytest.raises(OctavoError, match=word):
            LLM(model, skip_tokenizer_init=True, **options)
    plain = LLM(model, skip_tokenizer_init=True, dtype="float32")
    with pytest.raises(ValueError, match="enable_lora"):
        plain.generate({"prompt_token_ids": [1, 2]}, GREEDY, lora_request=ask("all", made["folder"]))
