"""The table of rotary angles is the one of transformers, for every scaling and both ways of writing it down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_configs import LLAMA_SIZES
from support.tiny_models import VOCAB_SIZE
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_files import ModelFiles
from octavo.layers.rotary import RotaryEmbedding

LENGTH = 600


def table(size: int | None = None, **hf_config: Any) -> torch.Tensor:
    hf_config = LLAMA_SIZES | {"hidden_size": 256, "num_attention_heads": 4} | hf_config
    config = ModelConfig("m", ModelFiles("m", "safetensors", "."), hf_config, "float32", max_model_len=LENGTH)
    return RotaryEmbedding(config, size).cos_sin_cache


def reference(module: Any, config: Any) -> torch.Tensor:
    cos, sin = module(config)(torch.zeros(1), torch.arange(LENGTH)[None])
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


factors = st.floats(1.0, 64.0)
contexts = st.integers(64, 1 << 17)
scalings = st.one_of(
    st.just({"rope_type": "default"}),
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": factors}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": factors,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(2.5, 8.0),
        },
        optional={"original_max_position_embeddings": contexts},
    ),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": factors},
        optional={
            "original_max_position_embeddings": contexts,
            "attention_factor": st.floats(0.5, 2.0),
            "beta_fast": st.sampled_from([None, 16.0, 32.0]),
            "beta_slow": st.sampled_from([None, 1.0, 2.0]),
            "mscale": st.sampled_from([0.707, 1.0]),
            "mscale_all_dim": st.sampled_from([0.707, 1.0]),
            "truncate": st.booleans(),
        },
    ),
)


@settings(max_examples=150)
@given(scaling=scalings, theta=st.sampled_from([1e4, 1e5, 5e5, 1e6]), head_dim=st.sampled_from([16, 64, 128]))
def test_angles_are_those_of_transformers(scaling: dict[str, Any], theta: float, head_dim: int) -> None:
    parameters = scaling | {"rope_theta": theta}
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=4096, rope_parameters=dict(parameters))
    expected = reference(LlamaRotaryEmbedding, config)
    common = {"head_dim": head_dim, "max_position_embeddings": 4096}
    ours = table(**common, rope_parameters=dict(parameters))
    # One rounding more or less in a frequency is a turn's 2^-24 at position 600.
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    assert torch.equal(ours, table(**common, rope_theta=theta, rope_scaling=dict(scaling)))


@settings(max_examples=60)
@given(
    theta=st.sampled_from([1e4, 5e5]),
    head_dim=st.sampled_from([16, 64]),
    factor=st.sampled_from([1.0, 2.0, 8.0]),
    longest=st.sampled_from([128, 600, 4096]),
)
def test_dynamic_angles_are_those_that_transformers_has_for_the_longest_sequence(
    theta: float, head_dim: int, factor: float, longest: int
) -> None:
    parameters = {"rope_type": "dynamic", "factor": factor, "rope_theta": theta}
    common = {"head_dim": head_dim, "max_position_embeddings": longest}
    expected = reference(LlamaRotaryEmbedding, LlamaConfig(**common, rope_parameters=dict(parameters)))
    torch.testing.assert_close(table(**common, rope_parameters=dict(parameters)), expected, rtol=0, atol=1e-4)


@settings(max_examples=60)
@given(data=st.data(), part=st.sampled_from([0.5, 0.75, 1.0]), longest=st.sampled_from([600, 4096]))
def test_longrope_turns_by_the_list_for_the_longest_sequence(data: st.DataObject, part: float, longest: int) -> None:
    size = int(64 * part)
    divisors = st.lists(st.floats(1.0, 64.0), min_size=size // 2, max_size=size // 2)
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": part,
        "short_factor": data.draw(divisors),
        "long_factor": data.draw(divisors),
    }
    for original in (128, 1024):  # shorter and longer than the longest sequence here
        given_factor = data.draw(st.sampled_from([{}, {"factor": 4.0}, {"attention_factor": 1.3}]))
        common = {
            "hidden_size": 256,
            "num_attention_heads": 4,
            "max_position_embeddings": longest,
            "original_max_position_embeddings": original,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        stated = parameters | given_factor
        config = Phi3Config(**common, rope_parameters=dict(stated))
        expected = reference(Phi3RotaryEmbedding, config)
        ours = table(size, **common, rope_scaling={**stated, "type": "su"} | {"rope_type": "longrope"})
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("factor", [0.25, 1.5])
def test_partial_rotary_factor_means_nothing_to_llama(factor: float) -> None:
    """As in transformers, whose Llama turns whole heads whatever this says."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor},
    )
    expected = reference(LlamaRotaryEmbedding, config)
    for ours in (table(partial_rotary_factor=factor), table(rope_parameters=dict(config.rope_parameters))):
        assert ours.shape == expected.shape == (LENGTH, 64)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "spiral", "factor": 2.0}, "spiral"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "32 positive numbers"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 31 + [0], "long_factor": [1.0] * 32}, "positive numbers"),
        ({"rope_type": "longrope"}, "lack 'short_factor'"),
        ({"type": "linear"}, "factor"),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}, "differ"),
    ],
)
def test_invalid_rope_scaling_is_refused(scaling: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        table(rope_scaling=scaling, max_position_embeddings=4096)
