"""Pictures through a gateway, its router and its picker to a model that reads them, as far as the spec lets them."""

from __future__ import annotations

import base64
import io
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from clusterrig import settings
from clusterrig.fixtures import Cluster, eventually
from PIL import Image
from support.hub_server import Hub, Repo
from support.tiny_image_readers import TOKENS, save_tiny_llava

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NAME, GATEWAY = "sees", "pictures"
PATIENCE = 600


@pytest.fixture(scope="module")
def hub(cluster: Cluster) -> Iterator[Hub]:
    if not cluster.is_rig:
        pytest.skip("the pods must reach a hub on this machine")
    folder = Path(tempfile.mkdtemp(prefix="octavo-llava-"))
    try:
        save_tiny_llava(folder)
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        with Hub(repos={"org/llava": Repo(files)}, host=settings.HOST_IP) as one:
            yield one
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def address(cluster: Cluster, installed: str, hub: Hub) -> Iterator[str]:
    """Of a gateway with one replica of the model."""
    spec: dict[str, Any] = {
        "model": {"uri": "hf://org/llava"},
        "engine": {
            "maxModelLen": 512,
            "maxNumSeqs": 4,
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "HF_ENDPOINT", "value": hub.url}],
            "multimodal": {"limitPerPrompt": {"image": 2}, "allowedMediaDomains": ["images.example.com"]},
        },
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}},
        "lifecycle": {"preStopSeconds": 1, "drainSeconds": 10},
    }
    model = {"apiVersion": "octavo.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": NAME}, "spec": spec}
    gateway = {"apiVersion": "octavo.dev/v1alpha1", "kind": "LLMGateway", "metadata": {"name": GATEWAY}, "spec": {}}
    cluster.apply(model, gateway, namespace=installed)
    eventually(lambda: all(one["ready"] for one in served(cluster, installed)), PATIENCE)
    yield f"http://{cluster.get('service', GATEWAY, namespace=installed)['spec']['clusterIP']}"
    cluster.kubectl("delete", f"llmg/{GATEWAY}", f"llmd/{NAME}", "-n", installed, "--timeout=60s", timeout=90)


def served(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    return cluster.get("llmg", GATEWAY, namespace=namespace).get("status", {}).get("models") or [{"ready": False}]


def picture(seed: int, width: int = 200, height: int = 100) -> dict[str, Any]:
    """Noise, which no PNG makes smaller."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=0)
    code = base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{code}"}}


def test_pictures_reach_the_model_through_the_gateway(cluster: Cluster, installed: str, address: str) -> None:
    sdk = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)

    def see(*parts: Any) -> openai.types.CompletionUsage:
        content: Any = [{"type": "text", "text": "What is this, in a few words, please?"}, *parts]
        made = sdk.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": content}], max_tokens=2, temperature=0
        )
        assert made.usage is not None
        return made.usage

    def cached(usage: openai.types.CompletionUsage) -> int:
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    text = see().prompt_tokens
    first, again, other = see(picture(1)), see(picture(1)), see(picture(2))
    assert {one.prompt_tokens for one in (first, again, other)} == {text + TOKENS}
    assert cached(again) >= text - 1 + TOKENS - 1 > cached(other), "the prefix cache tells pictures apart"
    assert see(picture(3, 2500, 2600)).prompt_tokens == text + TOKENS, "almost 20 MB"
    with pytest.raises(openai.BadRequestError, match="has 3 images, and at most 2"):
        see(picture(1), picture(2), picture(3))
    with pytest.raises(openai.BadRequestError, match=r"of 'elsewhere\.example'"):
        see({"type": "image_url", "image_url": {"url": "https://elsewhere.example/a.png"}})
    with pytest.raises(
        (openai.APIStatusError, openai.APIConnectionError)
    ) as refused:  # the answer may cut the body off
        see(picture(4, 3000, 2900))
    if isinstance(refused.value, openai.APIStatusError):
        assert refused.value.status_code == 413 and refused.value.code == "request_too_large"
    pods = cluster.get("pods", "-l", "app.kubernetes.io/part-of=octavo", namespace=installed)["items"]
    assert [status["restartCount"] for pod in pods for status in pod["status"]["containerStatuses"]] == [0] * len(
        [status for pod in pods for status in pod["status"]["containerStatuses"]]
    ), json.dumps(pods)
    card = httpx.get(f"{address}/v1/models", timeout=20).json()["data"][0]
    assert card["id"] == NAME
