"""Encoders: the states, vectors and classes of transformers, the same in any company, by recorded steps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.encoders import CLASSIFIERS, FAMILIES, POOLED, make_encoder, weighted_mean, write_modules
from transformers import AutoModel

from octavo import LLM, PoolingParams, SamplingParams
from octavo.engine.args import EngineArgs
from octavo.errors import ModelError
from octavo.interface.pooling import Pooling

LENGTHS = (1, 2, 17, 64, 100, 128)
CLS, SEP = 2, 3


def prompts(seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(5, 60) for _ in range(length)]} for length in LENGTHS]


def states(model: Any, prompt: dict[str, Any], **more: Any) -> torch.Tensor:
    with torch.inference_mode():
        ids = torch.tensor([prompt["prompt_token_ids"]])
        return model(ids, attention_mask=torch.ones_like(ids), **more).last_hidden_state[0]


def recorded(llm: LLM) -> bool:
    return llm.engine.executor.worker.runner.can_record  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_encoder(family, tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True)
    assert recorded(llm)
    for pooling, of in POOLED.items():
        params = PoolingParams(pooling=pooling, normalize=False)
        for prompt, output in zip(prompts(), llm.embed(prompts(), params, use_tqdm=False), strict=True):
            found = torch.tensor(output.outputs.embedding)
            torch.testing.assert_close(found, of(states(model, prompt)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize("labels", [1, 3])
def test_classes_are_those_of_transformers(family: str, labels: int, tmp_path: Path) -> None:
    model = make_encoder(family, tmp_path, head=True, num_labels=labels)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True)
    outputs = llm.classify(prompts(), PoolingParams(use_activation=False), use_tqdm=False)
    probabilities = llm.classify(prompts(), use_tqdm=False)
    for prompt, output, probs in zip(prompts(), outputs, probabilities, strict=True):
        ids = torch.tensor([prompt["prompt_token_ids"]])
        with torch.inference_mode():
            logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0]
        torch.testing.assert_close(torch.tensor(output.outputs.probs), logits, rtol=0, atol=1e-5)
        wanted = logits.sigmoid() if labels == 1 else logits.softmax(0)
        torch.testing.assert_close(torch.tensor(probs.outputs.probs), wanted, rtol=0, atol=1e-5)
        assert probs.outputs.num_classes == labels


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_in_any_company(family: str, quantization: str, tmp_path: Path) -> None:
    make_encoder(family, tmp_path)
    llm = LLM(str(tmp_path), quantization=quantization, skip_tokenizer_init=True, max_num_batched_tokens=150)
    alone = [llm.embed([prompt], pooling="mean", use_tqdm=False)[0] for prompt in prompts()]
    assert recorded(llm)
    assert llm.embed(prompts() * 3, pooling="mean", use_tqdm=False) == alone * 3
    assert llm.embed(prompts()[::-1], pooling="mean", use_tqdm=False) == alone[::-1]
    llm.engine.check_integrity()
    assert not llm.engine.has_unfinished_requests()


RELEASED = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "max_trained_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}


def test_nomic_bert_in_the_words_of_its_release(tmp_path: Path) -> None:
    model = make_encoder("nomic-bert", tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"], config["hidden_act"], config["head_dim"]
    config = {RELEASED.get(key, key): value for key, value in config.items()} | {
        "rotary_emb_base": 500,
        "activation_function": "swiglu",
        "n_positions": 8192,
        "rotary_emb_fraction": 1.0,
        "qkv_proj_bias": False,
        "rotary_scaling_factor": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(str(tmp_path), skip_tokenizer_init=True)
    (output,) = llm.embed([prompts()[3]], PoolingParams(pooling="mean", normalize=False), use_tqdm=False)
    expected = states(model, prompts()[3]).mean(0)
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0, atol=1e-5)
    experts = {"num_experts": 8, "moe_every_n_layers": 2, "moe_top_k": 2}  # of v2-moe
    for field, change in {"prenorm": {"prenorm": True}, "moe_every_n_layers": experts}.items():
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=f"{field} is .*NomicBertModel"):
            LLM(str(tmp_path), skip_tokenizer_init=True)


@pytest.mark.parametrize("head", [False, True])
def test_gte_in_the_words_of_its_release(head: bool, tmp_path: Path) -> None:
    """Rope of type ntk is that of a larger base, with positions divided by a little."""
    size, factor = 16, 8.0
    rope = {"rope_type": "linear", "rope_theta": 20000.0 * factor, "factor": factor ** (2 / size)}
    model = make_encoder("gte", tmp_path, head, rope_parameters=rope)
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "architectures": [model.config.architectures[0].replace("Gte", "New")],
        "model_type": "new",
        "pack_qkv": True,
        "position_embedding_type": "rope",
        "rope_theta": 20000,
        "rope_scaling": {"type": "ntk", "factor": factor},
        "layer_norm_type": "layer_norm",
    }
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {f"new.{k.removeprefix('gte.')}" if "classifier" not in k else k: t for k, t in tensors.items()},
        tmp_path / "model.safetensors",
    )
    llm = LLM(str(tmp_path), skip_tokenizer_init=True)
    if head:
        (output,) = llm.classify([prompts()[3]], PoolingParams(use_activation=False), use_tqdm=False)
        ids = torch.tensor([prompts()[3]["prompt_token_ids"]])
        found, expected = output.outputs.probs, model(ids, attention_mask=torch.ones_like(ids)).logits[0]
    else:
        (embedded,) = llm.embed([prompts()[3]], PoolingParams(pooling="cls", normalize=False), use_tqdm=False)
        found, expected = embedded.outputs.embedding, states(model, prompts()[3])[0]
    torch.testing.assert_close(torch.tensor(found), expected.detach(), rtol=0, atol=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(config | {"logn_attention_scale": True}))
    with pytest.raises(ModelError, match="logn_attention_scale is True"):
        LLM(str(tmp_path), skip_tokenizer_init=True)


def test_pairs_have_token_types_and_scores(tmp_path: Path) -> None:
    model = make_encoder("bert", tmp_path, head=True, num_labels=1)
    llm = LLM(str(tmp_path))
    found = llm.score("the capital of france", ["paris is a city", "a cat runs"], use_tqdm=False)
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    for text, output in zip(["paris is a city", "a cat runs"], found, strict=True):
        encoding = tokenizer.backend.encode("the capital of france", text)
        assert output.prompt_token_ids == encoding.ids and set(encoding.type_ids) == {0, 1}
        with torch.inference_mode():
            ids, types = torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids])
            logit = model(ids, token_type_ids=types, attention_mask=torch.ones_like(ids)).logits[0, 0]
        assert output.outputs.score == pytest.approx(logit.sigmoid().item(), abs=1e-5)


def test_texts_of_pairs_may_be_written_as_parts(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path, head=True, num_labels=1)
    llm = LLM(str(tmp_path), dtype="float32")
    (plain,) = llm.score("paris", "a cat", use_tqdm=False)
    for parts in ({"text": "a cat"}, {"content": [{"type": "text", "text": "a "}, {"type": "text", "text": "cat"}]}):
        (one,) = llm.score("paris", parts, use_tqdm=False)
        assert one.prompt_token_ids == plain.prompt_token_ids and one.outputs.score == plain.outputs.score
    for bad in ({"content": [{"type": "image_url"}]}, [3], {}):
        with pytest.raises(ValueError, match="data_2 must be a text or a list of texts"):
            llm.score("paris", bad, use_tqdm=False)


def test_a_model_of_vectors_scores_by_their_cosine(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    llm = LLM(str(tmp_path))
    texts = ["paris", "a cat runs", "berlin is a city"]
    vectors = torch.tensor([list(output) for output in llm.embed(texts, use_tqdm=False)])
    scores = [output.outputs.score for output in llm.score(texts[0], texts[1:], use_tqdm=False)]
    expected = torch.nn.functional.cosine_similarity(vectors[:1], vectors[1:]).tolist()
    assert scores == pytest.approx(expected, abs=1e-6)
    pairwise = llm.score(texts[:2], texts[1:], use_tqdm=False)
    assert pairwise[1].outputs.score == pytest.approx(float(vectors[1] @ vectors[2]), abs=1e-6)


def test_a_sentence_transformers_folder_says_how_to_pool(tmp_path: Path) -> None:
    model = make_encoder("bert", tmp_path)
    dense = {
        "in_features": 64,
        "out_features": 24,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    write_modules(
        tmp_path, ("Pooling", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}), ("Dense", dense)
    )
    weight, bias = torch.randn(24, 64), torch.randn(24)
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    llm = LLM(str(tmp_path), skip_tokenizer_init=True)
    for prompt, output in zip(prompts(), llm.embed(prompts(), use_tqdm=False), strict=True):
        expected = torch.tanh(states(model, prompt)[0] @ weight.T + bias)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "2_Dense" / "config.json").read_text())
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(config | {"in_features": 32}))
    with pytest.raises(ModelError, match="takes 32 numbers"):
        LLM(str(tmp_path), skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, "mean_sqrt_len"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        ({"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
    ],
)
def test_poolings_have_the_names_of_sentence_transformers(config: dict[str, Any], pooling: str, tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    write_modules(tmp_path, ("Pooling", config))
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True)
    assert args.create_engine_config(progress=False).model.pooler.pooling == pooling


def test_dimensions_are_for_models_that_say_so(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path, matryoshka_dimensions=[16, 32, 64])
    llm = LLM(str(tmp_path), skip_tokenizer_init=True)
    whole = llm.embed(prompts(), use_tqdm=False)
    short = llm.embed(prompts(), PoolingParams(dimensions=16), use_tqdm=False)
    for one, other in zip(whole, short, strict=True):
        cut = torch.nn.functional.normalize(torch.tensor(one.outputs.embedding[:16]), dim=0)
        torch.testing.assert_close(torch.tensor(other.outputs.embedding), cut, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"dimensions must be one of 16, 32, 64, got 20"):
        llm.embed(prompts(), PoolingParams(dimensions=20), use_tqdm=False)


def test_requests_that_an_encoder_cannot_serve_are_refused(tmp_path: Path) -> None:
    make_encoder("roberta", tmp_path)
    llm = LLM(str(tmp_path))
    assert llm.config.scheduler.max_model_len == 128  # two positions are the padding token's and none's
    with pytest.raises(ValueError, match="model cannot generate text: it gives vectors"):
        llm.generate("paris", SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(ValueError, match="model cannot classify"):
        llm.classify("paris", use_tqdm=False)
    with pytest.raises(ValueError, match=r"129 tokens.*at most 128 \(max_model_len\)"):
        llm.embed([[5] * 129], use_tqdm=False)
    assert len(llm.embed("paris " * 200, truncate_prompt_tokens=-1, use_tqdm=False)[0].prompt_token_ids) == 128
    cut = llm.embed("paris " * 200, truncate_prompt_tokens=9, use_tqdm=False)[0].prompt_token_ids
    assert len(cut) == 9 and cut[0] == CLS and cut[-1] == SEP
    small = LLM(str(tmp_path), skip_tokenizer_init=True, max_num_batched_tokens=8, max_num_seqs=8)
    with pytest.raises(ValueError, match=r"9 tokens.*at most 8 \(max_num_batched_tokens\)"):
        small.embed([[5] * 9], use_tqdm=False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "mish"}, "mish"),
        ({"type_vocab_size": -1}, "type_vocab_size"),
    ],
)
def test_unsupported_encoders_are_refused_by_name(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=says):
        LLM(str(tmp_path), skip_tokenizer_init=True)


# Our names of poolings -> sentence-transformers'.
NAMES_THERE = {name: name for name in POOLED} | {"last": "lasttoken", "mean_sqrt_len": "mean_sqrt_len_tokens"}
PROMPTS = {"query": "is it so ", "document": "a city ", "Classification": "dog "}


def prompted(path: Path, default: str | None = None, **pooling: Any) -> LLM:
    make_encoder("bert", path)
    write_modules(path, ("Pooling", {"pooling_mode": "mean"} | pooling))
    settings = {"prompts": PROMPTS, "default_prompt_name": default}
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return LLM(str(path), dtype="float32")


@pytest.mark.parametrize(
    ("asked", "default", "name"),
    [
        ({}, None, None),
        ({}, "document", "document"),
        ({"prompt_name": "query"}, "document", "query"),
        ({"input_type": "search_query"}, None, "query"),
        ({"input_type": "passage"}, None, "document"),
        ({"input_type": "classification"}, None, "Classification"),
        ({"input_type": "clustering"}, "query", "query"),
        ({"input_type": "clustering"}, None, None),
    ],
)
def test_a_prompt_of_the_files_is_put_before_texts(
    asked: dict[str, str], default: str | None, name: str | None, tmp_path: Path
) -> None:
    llm = prompted(tmp_path, default)
    tokens = llm.tokenizer.encode(PROMPTS.get(name or "", "") + "paris")  # type: ignore[union-attr]
    found = llm.embed("paris", PoolingParams(**asked), use_tqdm=False)
    assert found[0].prompt_token_ids == tokens
    (ids,) = llm.embed([tokens], PoolingParams(**asked), use_tqdm=False)
    assert ids.prompt_token_ids == tokens and ids.outputs == found[0].outputs, "token ids have none"


def test_prompts_that_are_not_there_are_refused(tmp_path: Path) -> None:
    llm = prompted(tmp_path)
    for asked, said in {
        ("prompt_name", "poem"): "prompt_name must be one of query, document, Classification, got 'poem'",
        ("input_type", "poem"): "input_type must be one of query, ",
    }.items():
        with pytest.raises(ValueError, match=said):
            llm.embed("paris", PoolingParams(**dict([asked])), use_tqdm=False)
    with pytest.raises(ValueError, match="set one of them"):
        llm.embed("paris", PoolingParams(prompt_name="query", input_type="query"), use_tqdm=False)
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"default_prompt_name": "poem"}))
    with pytest.raises(ModelError, match="default_prompt_name is 'poem'"):
        LLM(str(tmp_path))
    (tmp_path / "config_sentence_transformers.json").unlink()
    with pytest.raises(ValueError, match="prompt_name must be left out"):
        LLM(str(tmp_path)).embed("paris", PoolingParams(prompt_name="query"), use_tqdm=False)


@pytest.mark.parametrize("pooling", POOLED)
def test_a_prompt_is_left_out_of_pooling_where_the_files_say_so(pooling: str, tmp_path: Path) -> None:
    """As sentence-transformers: the tokens before the prompt's last one, [CLS] too; later weights stay."""
    llm = prompted(tmp_path, "query", include_prompt=False, pooling_mode=NAMES_THERE[pooling])
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    texts = ["paris", "a city of france", "berlin"]
    before = len(llm.tokenizer.encode(PROMPTS["query"])) - 1  # type: ignore[union-attr]
    found = llm.embed(texts, use_tqdm=False)
    for text, output in zip(texts, found, strict=True):
        ids = llm.tokenizer.encode(PROMPTS["query"] + text)  # type: ignore[union-attr]
        assert output.prompt_token_ids == ids and ids[0] == CLS
        hidden = states(model, {"prompt_token_ids": ids})
        wanted = weighted_mean(hidden, before) if pooling == "weightedmean" else POOLED[pooling](hidden[before:])
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), wanted, rtol=0, atol=1e-5)
        assert llm.embed([text], use_tqdm=False)[0].outputs == output.outputs, "the same alone"
    (ids_alone,) = llm.embed([[CLS, 31, SEP]], use_tqdm=False)
    hidden = states(model, {"prompt_token_ids": [CLS, 31, SEP]})
    torch.testing.assert_close(torch.tensor(ids_alone.outputs.embedding), POOLED[pooling](hidden), rtol=0, atol=1e-5)


def test_a_cut_text_keeps_something_behind_a_prompt_that_is_left_out(tmp_path: Path) -> None:
    llm = prompted(tmp_path, "query", include_prompt=False)
    before = len(llm.tokenizer.encode(PROMPTS["query"])) - 1  # type: ignore[union-attr]
    assert llm.embed("paris", truncate_prompt_tokens=before + 1, use_tqdm=False)
    with pytest.raises(ValueError, match=f"prompt has {before} tokens, and {before} of the prompt .* left out"):
        llm.embed("paris", truncate_prompt_tokens=before, use_tqdm=False)
    with pytest.raises(ValueError, match="truncation_side must not cut beginnings: the prompt"):
        pooling, before_text = Pooling(), PROMPTS["query"]
        llm._input.process_pooling(
            "0", "paris", pooling, truncate_prompt_tokens=20, truncation_side="left", before=before_text
        )


def test_several_poolings_are_put_one_behind_the_other(tmp_path: Path) -> None:
    """In the order of sentence-transformers' flags, or of its list; a request that names one gets that alone."""
    model = make_encoder("bert", tmp_path)
    flags = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True, "pooling_mode_lasttoken": True}
    write_modules(tmp_path, ("Pooling", flags))
    config = tmp_path / "1_Pooling" / "config.json"
    for settings, kinds in ((flags, ["cls", "mean", "last"]), ({"pooling_mode": ["max", "cls"]}, ["max", "cls"])):
        config.write_text(json.dumps(settings))
        llm = LLM(str(tmp_path), skip_tokenizer_init=True)
        mixed = [llm.embed(prompts(), use_tqdm=False), llm.embed(prompts(), pooling="mean", use_tqdm=False)]
        for prompt, output, one in zip(prompts(), *mixed, strict=True):
            hidden = states(model, prompt)
            wanted = torch.cat([POOLED[kind](hidden) for kind in kinds])
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), wanted, rtol=0, atol=1e-5)
            torch.testing.assert_close(torch.tensor(one.outputs.embedding), hidden.mean(0), rtol=0, atol=1e-5)


def test_a_layer_norm_and_dense_layers_behind_several_poolings(tmp_path: Path) -> None:
    model = make_encoder("bert", tmp_path)
    sizes = {"in_features": 128, "out_features": 24, "bias": False, "activation_function": "torch.nn.Tanh"}
    pooling = {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}
    modules = [("Pooling", pooling), ("LayerNorm", {"dimension": 128}), ("Dense", sizes), ("Normalize", {})]
    write_modules(tmp_path, *modules)
    scale, shift, weight = torch.rand(128) + 0.5, torch.randn(128), torch.randn(24, 128)
    save_file({"norm.weight": scale, "norm.bias": shift}, tmp_path / "2_LayerNorm" / "model.safetensors")
    save_file({"linear.weight": weight}, tmp_path / "3_Dense" / "model.safetensors")
    llm = LLM(str(tmp_path), skip_tokenizer_init=True)
    for prompt, output in zip(prompts(), llm.embed(prompts(), use_tqdm=False), strict=True):
        hidden = states(model, prompt)
        normed = torch.nn.functional.layer_norm(torch.cat([hidden.amax(0), hidden.mean(0)]), (128,), scale, shift)
        expected = torch.nn.functional.normalize(torch.tanh(weight @ normed), dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"pooling must be left out: mean gives 64 numbers, .* take 128 \(of max\+mean\)"
    ):
        llm.embed(prompts(), pooling="mean", use_tqdm=False)


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ([("Pooling", {}), ("Router", {})], "module 'Router', which sends queries and documents"),
        ([("WeightedLayerPooling", {})], "mixes the states of several layers"),
        ([("Pooling", {}), ("CNN", {})], "module 'CNN', which is not built; known are Transformer, "),
        ([("Pooling", {}), ("Normalize", {}), ("LayerNorm", {})], "has LayerNorm behind Normalize"),
        ([("Dense", {}), ("Pooling", {})], "has Dense before Pooling"),
        ([("Pooling", {"pooling_mode": ["cls", "cls"]})], "pooling by cls and cls, which is not supported"),
        ([("Pooling", {"pooling_mode": ["cls", "median"]})], "pooling by cls and median"),
        ([("Pooling", {}), ("LayerNorm", {"dimension": 64})], "2_LayerNorm has no model.safetensors"),
        (
            [
                ("Pooling", {}),
                ("Dense", {"in_features": 64, "out_features": 8, "module_input_name": "token_embeddings"}),
            ],
            "module_input_name is 'token_embeddings'",
        ),
    ],
)
def test_modules_that_are_not_built_are_refused_by_name(
    modules: list[tuple[str, dict[str, Any]]], said: str, tmp_path: Path
) -> None:
    make_encoder("bert", tmp_path)
    modules = [(kind, {"pooling_mode": "mean"} | own if kind == "Pooling" else own) for kind, own in modules]
    write_modules(tmp_path, *modules)
    with pytest.raises(ModelError, match=said):
        EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config(progress=False)
