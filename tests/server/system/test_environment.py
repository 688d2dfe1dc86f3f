"""Processes of the engine get what their work needs of the environment, and none of the server's secrets."""

from __future__ import annotations

import pytest

from octavo.system.environment import RAY_SECRETS, process_environment

SECRETS = (
    "OCTAVO_API_KEY",
    "OCTAVO_HTTP_TOKEN",
    "OCTAVO_CLUSTER_TOKEN",
    "VLLM_API_KEY",
    "OPENAI_API_KEY",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "NVIDIA_API_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "HTTPS_PROXY",
    "https_proxy",
    "PIP_INDEX_URL",
    "DATABASE_URL",
    "PGPASSWORD",
    "GITHUB_TOKEN",
    "octavo_api_key",
    "OCTAVO_Secret",
    "RAY_AUTH_TOKEN",
    "XDG_PASSWORD",
)
NEEDED = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "GOMP_SPINCOUNT",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_SOCKET_IFNAME",
    "TRITON_INTERPRET",
    "TORCHINDUCTOR_CACHE_DIR",
    "TOKENIZERS_PARALLELISM",
    "XDG_CACHE_HOME",
    "OCTAVO_CACHE",
    "OCTAVO_KERNEL_BACKEND",
    "RAY_ADDRESS",
    "MALLOC_CONF",
)


@pytest.mark.parametrize("name", SECRETS)
def test_no_secret_is_handed_on(name: str) -> None:
    assert process_environment(source={name: "x", "PATH": "y"}) == {"PATH": "y"}


@pytest.mark.parametrize("name", NEEDED)
def test_variables_that_work_needs_are_handed_on(name: str) -> None:
    assert process_environment(source={name: "x", "HF_TOKEN": "y"}) == {name: "x"}


def test_a_secret_is_handed_to_whom_it_is_for() -> None:
    given = dict.fromkeys(SECRETS, "x")
    assert process_environment("OCTAVO_CLUSTER_TOKEN", source=given) == {"OCTAVO_CLUSTER_TOKEN": "x"}
    assert process_environment(*RAY_SECRETS, source=given) == {"RAY_AUTH_TOKEN": "x"}
