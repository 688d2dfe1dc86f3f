"""examples/smollm2.yaml on a real Kubernetes: OpenAI clients get tokens, whatever happens to the pod."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from clusterrig.fixtures import Cluster, eventually
from openai import OpenAI

from octavo.bench.calibrate import server_blocks
from octavo.cli.main import main

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.smoke]

ROOT = Path(__file__).parents[2]
NAME = "smollm2"
SELECTOR = f"octavo.dev/llmdeployment={NAME}"
QUESTION = [{"role": "user", "content": "Name the capital of France."}]
CORE = "octavo.engine.core_proc"
# Runs in the pod, which has neither ps nor pkill: the process whose command line names the engine's core.
FIND_CORE = (
    "import glob; print(next(p.split('/')[2] for p in glob.glob('/proc/[0-9]*/cmdline') "
    f"if b'{CORE}' in open(p, 'rb').read() and p.split('/')[2] != '1'))"
)


def ready(cluster: Cluster, namespace: str) -> dict[str, Any]:
    """The condition, once it speaks of the spec as it is now."""
    found = cluster.get("llmd", NAME, namespace=namespace)
    conditions = (found.get("status") or {}).get("conditions") or []
    one = next((c for c in conditions if c["type"] == "Ready"), {})
    return dict(one) if one.get("observedGeneration") == found["metadata"]["generation"] else {}


def wait_until_ready(cluster: Cluster, namespace: str, seconds: float = 180) -> None:
    eventually(lambda: ready(cluster, namespace).get("status") == "True", seconds)


def pods(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    items = cluster.get("pods", "-l", SELECTOR, namespace=namespace)["items"]
    return [item for item in items if "deletionTimestamp" not in item["metadata"]]


def in_pod(cluster: Cluster, namespace: str, *command: str) -> str:
    return cluster.kubectl("exec", "-n", namespace, f"deploy/{NAME}", "-c", "engine", "--", *command)


@contextlib.contextmanager
def address(cluster: Cluster, namespace: str) -> Iterator[str]:
    """The Service's URL as it is reached from here: its ClusterIP on the rig, forwarded by kubectl elsewhere."""
    if cluster.is_rig:
        yield f"http://{cluster.get('service', NAME, namespace=namespace)['spec']['clusterIP']}"
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [cluster.program, f"--kubeconfig={cluster.kubeconfig}", "port-forward", "-n", namespace]
    process = subprocess.Popen([*command, f"service/{NAME}", f"{port}:80"], stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: socket.create_connection(("127.0.0.1", port), timeout=1).close() or True)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def model(cluster: Cluster, installed: str) -> Iterator[str]:
    """The example, applied and ready; its namespace. Limits on memory keep two of them on a small machine."""
    manifest = yaml.safe_load((ROOT / "examples/smollm2.yaml").read_text())
    manifest["spec"]["resources"]["limits"] = {"memory": "3Gi"}
    manifest["spec"]["lifecycle"] = {"preStopSeconds": 3, "drainSeconds": 30}
    cluster.apply(manifest, namespace=installed)
    eventually(lambda: cluster.get("service", NAME, namespace=installed))
    with address(cluster, installed) as url:
        until = time.monotonic() + 240
        while not _answers(url):
            condition = ready(cluster, installed)
            assert condition.get("status") != "True" or _answers(url), f"it does not answer and is {condition}"
            assert condition.get("reason") not in ("CrashLoop", "ImagePullBackOff"), condition
            assert time.monotonic() < until, condition
            time.sleep(0.3)
    wait_until_ready(cluster, installed, 30)  # soon after it is so, the status says it
    yield installed


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def test_an_openai_client_gets_tokens_through_the_service(cluster: Cluster, model: str) -> None:
    with address(cluster, model) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        assert [one.id for one in client.models.list()] == [NAME]
        stream = client.chat.completions.create(model=NAME, messages=QUESTION, temperature=0, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "Paris" in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 1, "streamed, not sent as one"


def test_the_pod_logs_the_ledger_that_is_planned(
    cluster: Cluster, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = cluster.get("llmd", NAME, namespace=model)["spec"]
    engine, limit = spec["engine"], spec["resources"]["limits"]["memory"]
    flags = ["--memory", limit, "--gpu-memory-utilization", str(engine["gpuMemoryUtilization"] / 100)]
    for field, flag in (("maxNumSeqs", "--max-num-seqs"), ("maxModelLen", "--max-model-len")):
        flags += [flag, str(engine[field])] if field in engine else []
    assert main(["plan", spec["model"]["uri"], *flags, *engine.get("args", [])]) == 0
    parts = ("memory limit", "weights", "process", "left free", "KV cache", "prefix cache")
    planned = [line for line in capsys.readouterr().out.splitlines() if line.startswith(parts)]
    (pod,) = pods(cluster, model)
    log = cluster.kubectl("logs", "-n", model, pod["metadata"]["name"], "-c", "engine")
    assert len(planned) == len(parts)
    for line in planned:
        said = line if not line.startswith("weights") else line.partition("MiB")[0] + "MiB"  # kinds are listed apart
        assert said in log, f"{line}\n{log[:3000]}"
    with address(cluster, model) as url:
        assert main(["plan", spec["model"]["uri"], *flags, *engine.get("args", []), "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert server_blocks(url) == (said["num_blocks"], said["block_size"])


def test_a_pod_finds_it_by_its_name(cluster: Cluster, model: str) -> None:
    url = cluster.get("llmd", NAME, namespace=model)["status"]["url"]
    script = f"import urllib.request as u; print(u.urlopen({url!r} + '/models', timeout=10).read().decode())"
    assert json.loads(in_pod(cluster, model, "python", "-c", script))["data"][0]["id"] == NAME


def test_the_pod_can_do_little(cluster: Cluster, model: str) -> None:
    script = (
        "import os, json; s = open('/proc/1/status').read(); f = dict(l.split(':\\t', 1) for l in s.splitlines());"
        "w = [d for d in ('/', '/opt/octavo', '/etc', '/home', '/cache', '/tmp') if os.access(d, os.W_OK)];"
        "print(json.dumps([os.getuid(), f['CapEff'].strip(), f['Seccomp'].strip(), f['NoNewPrivs'].strip(), w,"
        " os.path.exists('/var/run/secrets/kubernetes.io')]))"
    )
    uid, capabilities, seccomp, no_new, writable, has_token = json.loads(in_pod(cluster, model, "python", "-c", script))
    assert (uid, int(capabilities, 16), seccomp, no_new) == (65532, 0, "2", "1")
    assert writable == ["/cache", "/tmp"], "a read-only root, and two volumes"
    assert not has_token


def test_the_operator_s_image_has_no_engine_s_packages(cluster: Cluster, installed: str) -> None:
    script = "import importlib.util as u; print([m for m in ('torch', 'numpy', 'fastapi') if u.find_spec(m)])"
    pod = cluster.get("pods", "-l", "app.kubernetes.io/component=operator", namespace=installed)["items"][0]
    name = pod["metadata"]["name"]
    assert cluster.kubectl("exec", "-n", installed, name, "--", "python", "-c", script).strip() == "[]"


def test_the_engine_s_image_compiles_what_triton_needs_on_a_gpu(cluster: Cluster, model: str) -> None:
    script = (
        "import ctypes, subprocess, sysconfig; c = 'gcc -O2 -shared -fPIC -x c - -o /tmp/launcher.so -I'"
        " + sysconfig.get_paths()['include']; code = '#include <Python.h>\\nint f(void) { return PY_MAJOR_VERSION; }';"
        "subprocess.run(c.split(), input=code, text=True, check=True);"
        "import triton; print(ctypes.CDLL('/tmp/launcher.so').f(), bool(triton.__version__))"
    )
    assert in_pod(cluster, model, "python", "-c", script).split() == ["3", "True"]


def test_helm_test(helm: Callable[..., str], installed: str) -> None:
    assert "Succeeded" in helm("test", installed, "-n", installed, "--timeout=2m")


def test_the_status_tells_how_long_the_start_took(cluster: Cluster, model: str) -> None:
    def start() -> dict[str, Any]:
        found: dict[str, Any] = cluster.get("llmd", NAME, namespace=model)["status"].get("start") or {}
        return found

    eventually(lambda: {"pod", "readyAt", "imagePull", "fetch", "load", "ready", "toolFormat"} == set(start()), 60)
    found = start()
    assert 0 < found["load"] < found["ready"] and found["fetch"] <= found["ready"]
    with address(cluster, model) as url:
        assert found["toolFormat"] == httpx.get(f"{url}/v1/models").json()["data"][0]["tool_format"]


def test_a_killed_engine_comes_back_and_the_status_says_so(cluster: Cluster, model: str) -> None:
    (before,) = pods(cluster, model)
    pid = in_pod(cluster, model, "python", "-c", FIND_CORE).strip()
    in_pod(cluster, model, "python", "-c", f"import os; os.kill({pid}, 9)")
    eventually(lambda: ready(cluster, model).get("status") == "False", 30, every=0.05)
    wait_until_ready(cluster, model, 120)
    (after,) = pods(cluster, model)
    engine = next(c for c in after["status"]["containerStatuses"] if c["name"] == "engine")
    assert after["metadata"]["uid"] == before["metadata"]["uid"], "the same pod"
    assert engine["restartCount"] == 1
    with address(cluster, model) as url:
        answer = httpx.post(
            f"{url}/v1/chat/completions", json={"model": NAME, "messages": QUESTION, "temperature": 0}, timeout=120
        )
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


def test_a_changed_argument_rolls_out_and_no_client_notices(cluster: Cluster, model: str) -> None:
    (before,) = pods(cluster, model)
    failures: list[str] = []
    answered, stop = [0], threading.Event()

    def keep_asking(url: str) -> None:
        body = {"model": NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 16}
        while not stop.is_set():
            try:
                answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
                answered[0] += 1
                if answer.status_code != 200:
                    failures.append(f"{answer.status_code} {answer.text[:200]}")
            except httpx.HTTPError as error:
                failures.append(repr(error))
            time.sleep(0.05)

    with address(cluster, model) as url:
        asking = threading.Thread(target=keep_asking, args=(url,))
        asking.start()
        try:
            change = json.dumps({"spec": {"engine": {"maxNumSeqs": 7}}})
            cluster.kubectl("patch", "llmd", NAME, "-n", model, "--type=merge", "-p", change)
            wait_until_ready(cluster, model)
            eventually(lambda: len(pods(cluster, model)) == 1, 60)
            time.sleep(1)
        finally:
            stop.set()
            asking.join()
    (after,) = pods(cluster, model)
    args = after["spec"]["containers"][0]["args"]
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert args[args.index("--max-num-seqs") + 1] == "7"
    assert answered[0] > 5
    if cluster.is_rig:  # kubectl's forwarding is bound to one pod
        assert not failures, f"{len(failures)} of {answered[0]}: {failures[:3]}"


def test_deleted_models_are_gone(cluster: Cluster, model: str) -> None:
    with address(cluster, model) as url:
        cluster.kubectl("delete", "llmd", NAME, "-n", model, "--timeout=60s", timeout=90)
        kinds = "deployment,service,networkpolicy,serviceaccount,poddisruptionbudget,pod"
        eventually(lambda: not cluster.get(kinds, "-l", SELECTOR, namespace=model)["items"], 90)
        assert not _answers(url)
