"""Devices and kernels that do not go together are refused at start, before any weights are read, by the flag's name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import octavo_kernels
from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.interface.engine_config import EngineConfig, ModelConfig
from octavo.system.cuda_driver import FoundGPU
from octavo.worker import worker
from octavo.worker.device import choose_device, choose_kernels
from octavo.worker.kv_cache import quantized_kv_dtype
from octavo_kernels import triton as backend
from octavo_kernels.triton import attention_configs as configs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def restored_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OCTAVO_KERNEL_BACKEND", raising=False)
    yield
    monkeypatch.undo()
    octavo_kernels.select_backend("auto")


def config(tiny_checkpoints: dict[str, Path], **given: object) -> EngineConfig:
    defaults: dict[str, object] = {"dtype": "float32", "skip_tokenizer_init": True}
    return EngineArgs(model=str(tiny_checkpoints["llama"]), **defaults | given).create_engine_config()  # type: ignore


@pytest.mark.parametrize(
    "given, message",
    [
        ({"block_size": 24}, r"block_size=24 is not a multiple of 16.*'triton'.*attention_backend='reference'"),
        ({"kv_cache_dtype": "float16"}, r"kv_cache_dtype: .*torch\.float16 .*attention_backend='reference'"),
    ],
)
def test_the_triton_kernels_refuse_unsupported_caches(
    given: dict[str, object], message: str, tiny_checkpoints, monkeypatch
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(worker, "load_model", load)
    with pytest.raises(ConfigError, match=message):
        worker.Worker(config(tiny_checkpoints, device="cpu", attention_backend="triton", **given))
    choose_kernels(config(tiny_checkpoints, **given, attention_backend="reference"), CPU)


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "head_size=16: an int8 kv_cache_dtype needs a multiple of 32"),
        ({"head_size": 64, "block_size": 8}, "block_size=8: .* needs a multiple of 16"),
        ({"head_size": 64, "dtype": "float16"}, r"int8 cache does not go with .*float16; use float32 or bfloat16"),
        ({"head_size": 64, "attention_backend": "reference"}, "only the C kernels of a CPU have an int8 cache"),
        ({"head_size": 64, "attention_backend": "triton"}, r"kv_cache_dtype: .*torch\.int8 .*"),
    ],
)
def test_an_int8_cache_is_refused_without_its_kernels(
    given: dict[str, object], message: str, tiny_checkpoints, monkeypatch
) -> None:
    if "head_size" in given:
        monkeypatch.setattr(ModelConfig, "head_size", given.pop("head_size"))
    with pytest.raises(ConfigError, match=f"{message}.*; leave kv_cache_dtype at auto"):
        choose_kernels(config(tiny_checkpoints, kv_cache_dtype="int8", **given), CPU)


@pytest.mark.parametrize("spelling", ["fp8", "fp8_e4m3"])
def test_there_is_no_fp8_cache_on_a_cpu(spelling: str, tiny_checkpoints) -> None:
    usual = config(tiny_checkpoints, kv_cache_dtype=spelling)
    assert usual.cache.kv_cache_dtype == "float8_e4m3fn"
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: .*int8.*'cpu'.*attention_backend='reference'"):
        choose_kernels(usual, CPU)
    choose_kernels(replace(usual, attention_backend="reference"), CPU)


@pytest.mark.parametrize("capability, problem", [((9, 0), None), ((8, 9), None), ((8, 6), r"kv_cache_dtype: .* 8\.9")])
def test_older_gpus_have_no_fp8_cache(capability, problem, tiny_checkpoints, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(configs, "has_float8", configs.has_float8.__wrapped__)
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        choose_kernels(config(tiny_checkpoints, kv_cache_dtype="fp8", attention_backend="triton"), CUDA)


def test_heads_that_are_too_wide_for_the_triton_kernels(tiny_checkpoints) -> None:
    usual = config(tiny_checkpoints, attention_backend="triton")
    wide = replace(usual.model, hf_config=usual.model.hf_config | {"head_dim": 1024})
    with pytest.raises(ConfigError, match="head_size=1024 exceeds 512"):
        choose_kernels(replace(usual, model=wide), CPU)


def test_kernels_of_the_cpu_do_not_serve_cuda(tiny_checkpoints, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"attention_backend.*'cpu' reads host memory.*auto"):
        choose_kernels(config(tiny_checkpoints, attention_backend="cpu"), CUDA)
    monkeypatch.setenv("OCTAVO_KERNEL_BACKEND", "cpu")
    with pytest.raises(ConfigError, match="OCTAVO_KERNEL_BACKEND"):
        choose_kernels(config(tiny_checkpoints), CUDA)


def test_triton_serves_a_cpu_in_its_interpreter_alone(tiny_checkpoints, monkeypatch) -> None:
    if backend.INTERPRETED:
        choose_kernels(config(tiny_checkpoints, attention_backend="triton"), CPU)
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(backend, "unavailable_reason", lambda: None)  # as on a machine with a GPU
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ConfigError, match=r"'triton' runs on CUDA devices, not on 'cpu', unless TRITON_INTERPRET=1"):
        choose_kernels(config(tiny_checkpoints, attention_backend="triton"), CPU)
    choose_kernels(config(tiny_checkpoints, attention_backend="triton"), CUDA)


def test_only_kernels_that_read_nothing_on_the_host_are_captured(monkeypatch) -> None:
    assert octavo_kernels.can_be_captured(CUDA) is not backend.INTERPRETED
    octavo_kernels.select_backend("reference")
    assert not octavo_kernels.can_be_captured(CUDA)


def test_the_cache_beside_quantised_weights(tiny_checkpoints, monkeypatch) -> None:
    usual = config(tiny_checkpoints)
    octavo_kernels.select_backend("cpu")
    assert quantized_kv_dtype(usual, CPU) == "bfloat16"  # heads of 16: no int8
    monkeypatch.setattr(type(usual.model), "head_size", 64)
    assert quantized_kv_dtype(usual, CPU) == "int8"
    assert quantized_kv_dtype(config(tiny_checkpoints, block_size=8), CPU) == "bfloat16"
    octavo_kernels.select_backend("reference")
    assert quantized_kv_dtype(usual, CPU) == "bfloat16"
    octavo_kernels.select_backend("triton")
    assert quantized_kv_dtype(usual, CUDA) == "float32"


def gpu(cuda: tuple[int, int]) -> FoundGPU:
    return FoundGPU("NVIDIA L4", 23 << 30, 0, 300.0, (8, 9), cuda)


@pytest.mark.parametrize(
    "made_for, driver, message",
    [
        ("13.0", (12, 4), "L4 is here, and its driver runs CUDA up to 12.4, while torch needs 13.0: update it to 580"),
        ("12.8", (11, 8), "update it to 525 or newer; or give device='cpu'"),
        ("13.0", (13, 0), "torch cannot use it: no such context"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_no_cpu(
    made_for: str, driver: tuple[int, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError("no such context")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", made_for)
    monkeypatch.setattr("octavo.worker.device.gpu_here", lambda: gpu(driver))
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=re.escape(message)):
            choose_device(device)
    assert choose_device("cpu") == CPU


def test_a_torch_without_cuda_serves_on_the_cpu_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr("octavo.worker.device.gpu_here", lambda: gpu((13, 0)))
    assert choose_device("auto") == CPU
    assert "NVIDIA L4 is not used, because this torch is made without CUDA" in caplog.text
    with pytest.raises(ConfigError, match="made without CUDA: install one"):
        choose_device("cuda")
    monkeypatch.setattr("octavo.worker.device.gpu_here", lambda: None)
    assert choose_device("auto") == CPU


@pytest.mark.parametrize("capability, is_served", [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_gpus_below_the_least_capability_are_refused(
    capability: tuple[int, int], is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = backend.unsupported_device_reason(CUDA)
    assert (reason is None) == is_served
    assert is_served or f"this one has {capability[0]}.{capability[1]}" in str(reason)
