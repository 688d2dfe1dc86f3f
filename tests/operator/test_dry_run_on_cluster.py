"""Every object that the renderers make is one that a real API server takes, strictly, under restricted Pod Security."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusterrig.fixtures import Cluster
from hypothesis import HealthCheck, given, settings
from support.llmd import manifest, parsed
from support.llmd_strategies import specs

from octavo.cli.main import main
from octavo_operator.config import OperatorConfig
from octavo_operator.render import render

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(spec=specs)
def test_specs_and_what_they_are_rendered_to_are_taken(
    cluster: Cluster, namespace: str, operator_kubeconfig: Any, spec: dict[str, Any]
) -> None:
    objects = [manifest("toy", namespace, **spec), *render(parsed("toy", namespace, **spec), OperatorConfig())]
    pod = next(one for one in objects if one["kind"] == "Deployment")["spec"]["template"]
    if "priorityClassName" not in pod["spec"] and "runtimeClassName" not in pod["spec"]:  # those must exist for pods
        objects.append({"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {**pod["metadata"], "name": "pod"}})
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "toy"}}
        cluster.apply(account, namespace=namespace)
    listed = {"apiVersion": "v1", "kind": "List", "items": objects}
    arguments = (
        "apply",
        "--dry-run=server",
        "--validate=strict",
        "-n",
        namespace,
    )
    done = cluster.try_kubectl(*arguments, "-f", "-", input=json.dumps(listed))
    assert done.returncode == 0, f"{done.stderr}\n{yaml.safe_dump(spec)}"
    assert "Warning" not in done.stderr, done.stderr


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
DEVICES = (["--memory", "64GiB"], ["--memory", "40000000001"], ["--gpu", "h100"], ["--gpu", "l4"], ["--gpu", "b200"])
FLAGS = (
    [],
    ["--max-model-len", "4096", "--max-num-seqs", "16", "--dtype", "bfloat16", "--quantization", "int8"],
    ["--gpu-memory-utilization", "0.875", "--no-enable-prefix-caching", "--block-size", "32"],
    [
        "--served-model-name",
        "llama",
        "--port",
        "9000",
        "--default-chat-template-kwargs",
        '{"a": "$(b): #c"}',
        "--hf-overrides",
        '{"rope_theta": 1e6}',
        "--kv-cache-memory-bytes",
        "1GiB",
    ],
)


def test_planned_objects_are_accepted(
    cluster: Cluster, namespace: str, crd: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`octavo plan ... --yaml | kubectl apply --dry-run=server -f -`, twenty times."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    for device, flags in itertools.product(DEVICES, FLAGS):
        assert main(["plan", str(tmp_path), *device, *flags, "--yaml"]) == 0, (device, flags)
        text = capsys.readouterr().out
        done = cluster.try_kubectl(
            "apply", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", "-", input=text
        )
        assert done.returncode == 0 and "Warning" not in done.stderr, f"{done.stderr}\n{text}"
