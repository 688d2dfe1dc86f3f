#!/usr/bin/env python3
"""`make demo`: from a bare machine to tokens out of a Kubernetes Service, with what each step takes.

A cluster and all images are made here, the operator is installed with Helm, examples/smollm2.yaml is applied, and a
client in the cluster asks the model a question. Then examples/autoscaled.yaml and a burst of requests take it from one
replica to two and back, with examples/routed.yaml the second turns of conversations find what their first ones have
computed on one of two replicas, and with examples/gateway.yaml two models have one address, one of which starts when it
is asked for. In the end everything is removed again.

    KEEP=1              leave it running, and say how to reach it
    BURST=0             without the burst
    KUBE_CONTEXT=name   use a cluster of yours (kubectl's context of that name); nothing is built then
    OCTAVO_OPERATOR_IMAGE, OCTAVO_ROUTER_IMAGE, OCTAVO_SERVER_IMAGE
                        images that the cluster can pull (default: those of the chart)
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RIG = [sys.executable, str(ROOT / "tests/cluster/rig.py")]
NAMESPACE = "octavo-demo"
RELEASE = "octavo-demo"
LABEL = "app.kubernetes.io/part-of=octavo"  # on every object and pod
CRD = "llmdeployments.octavo.dev"
VALUES = {"operator": "image", "router": "router.image", "server": "engine.image"}  # of the chart
NAMES = {name: f"ghcr.io/octavo-dev/octavo-{name}" for name in VALUES}
QUESTION = "Name the capital of France."
READY_SECONDS = 600
BURST_SECONDS = 300
QUEUE = f"/apis/external.metrics.k8s.io/v1beta1/namespaces/{NAMESPACE}/octavo_queue_depth"
START = time.monotonic()
running: list[subprocess.Popen[str]] = []


class DemoError(Exception):
    """What went wrong and the way out, for a person to read."""


# ------------------------------------------------------------------------------------------------------- what is shown


def say(text: str) -> None:
    seconds = int(time.monotonic() - START)
    print(f"{seconds // 60:3d}:{seconds % 60:02d}  {text}", flush=True)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    except BaseException:
        say(f"{what}: FAILED after {time.monotonic() - start:.1f} s")
        raise
    say(f"{what}: {time.monotonic() - start:.1f} s")


def run(command: list[str], *, input: str | None = None, timeout: float = 300) -> str:
    """Output of a command that is quick and quiet. Raises DemoError with its words."""
    done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise DemoError(f"{' '.join(command[:6])} ...: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def rig(*arguments: str) -> str:
    """Runs rig.py and shows what it tells of its progress. Returns its output."""
    process = subprocess.Popen([*RIG, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running.append(process)
    assert process.stdout and process.stderr
    said: list[str] = []
    for line in process.stderr:
        text = line.rstrip().removeprefix("[rig] ")
        said.append(text)
        if found := re.fullmatch(r" *(\[\S+\] )?STEP \S+ (RUN )?(.*)", text):
            text = f"  {' '.join(found[3].split())}" if found[2] else ""  # of a build, what takes time
        if text:
            say(f"    {text[:110]}")
    output = process.stdout.read()
    if process.wait():
        raise DemoError("\n".join(said[-30:]))
    return output


# --------------------------------------------------------------------------------------------------------- the cluster


class Cluster:
    """Where the demo runs. `images`: each as name@digest, or nothing for the chart's own."""

    def __init__(self, kubectl: list[str], helm: list[str], images: dict[str, str], hint: str) -> None:
        self._kubectl, self._helm, self.images, self.hint = kubectl, helm, images, hint
        self.shared = False  # another Octavo is at home in it

    def kubectl(self, *arguments: str, input: str | None = None, timeout: float = 300) -> str:
        return run([*self._kubectl, *arguments], input=input, timeout=timeout)

    def show(self, *arguments: str) -> int:
        """Runs kubectl with its output on the terminal."""
        return subprocess.run([*self._kubectl, *arguments], timeout=READY_SECONDS).returncode

    def helm(self, *arguments: str) -> str:
        return run([*self._helm, *arguments])


def own_cluster() -> Cluster:
    """The rig and all images, made side by side."""
    if sys.version_info < (3, 11):  # noqa: UP036 (it is started by whatever python3 there is)
        raise DemoError(f"this is Python {sys.version.split()[0]}, and 3.11 is needed: make demo PYTHON=python3.11")
    if os.geteuid() != 0:
        raise DemoError(
            "the demo makes a Kubernetes on this machine, which needs root. Either\n"
            "  sudo make demo               as root (afterwards only a cache in ~/.cache/octavo is left)\n"
            "  KUBE_CONTEXT=name make demo  on a cluster of yours\n"
            "  make serve                   without Kubernetes: the engine alone, at http://127.0.0.1:8000"
        )
    with step("Debian packages"):
        rig("packages")
    images: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        cluster = pool.submit(_rig_up)
        built = pool.submit(_build_images)
        try:
            for done in concurrent.futures.as_completed([cluster, built]):
                done.result()
        except BaseException:
            for process in running:  # what failed stops the other as well
                process.terminate()
            raise
    for name, image in NAMES.items():
        with step(f"{name} image to the cluster"):
            images[name] = rig("load-image", f"{image}:demo").strip().splitlines()[-1]
    kubeconfig = rig("kubeconfig").strip()
    programs = dict(line.split(maxsplit=1) for line in run([*RIG, "binaries"]).splitlines())
    return Cluster(
        [programs["kubectl"], f"--kubeconfig={kubeconfig}"],
        [programs["helm"], f"--kubeconfig={kubeconfig}"],
        images,
        f"export KUBECONFIG={kubeconfig}  # kubectl: {programs['kubectl']}",
    )


def _rig_up() -> None:
    with step("Kubernetes"):
        if not is_up():  # it may be another folder's: there is one a machine
            rig("up")


def is_up() -> bool:
    return subprocess.run([*RIG, "status"], capture_output=True).returncode == 0


def _build_images() -> None:
    for name, image in NAMES.items():
        with step(f"{name} image"):
            options = ["--build-arg", "WITH_MODEL=1"] if name == "server" else []
            rig("build", f"{image}:demo", str(ROOT), "--target", name, *options)


def foreign_cluster(context: str) -> Cluster:
    os.environ.setdefault("KUBECONFIG", str(Path.home() / ".kube/config"))
    commands = [[name] if shutil.which(name) else [*RIG, name] for name in ("kubectl", "helm")]
    variables = {name: f"OCTAVO_{name.upper()}_IMAGE" for name in NAMES}
    images = {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ}
    return Cluster(
        [*commands[0], f"--context={context}"],
        [*commands[1], f"--kube-context={context}"],
        images,
        f"kubectl config use-context {context}",
    )


# ----------------------------------------------------------------------------------------------------------- the steps


def install(cluster: Cluster) -> None:
    """The operator, for the whole cluster. Where another one is at home, it keeps to the demo's namespace."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    with step("namespace, which admits restricted pods only"):
        cluster.kubectl("apply", "-f", "-", input=json.dumps(namespace))
    values = ["--set", "crd.keep=false"]
    there = cluster.kubectl("get", "crd", CRD, "--ignore-not-found", "-o", "name")
    cluster.shared = bool(there) and not _is_ours(cluster)
    if cluster.shared:
        values = ["--set", "crd.install=false", "--set", f"watchNamespaces={{{NAMESPACE}}}"]
    for name, prefix in VALUES.items():
        if image := cluster.images.get(name):
            values += _image_values(prefix, image)
    with step("operator, installed with Helm"):
        cluster.helm(
            "upgrade",
            "--install",
            RELEASE,
            str(ROOT / "charts/octavo"),
            "--namespace",
            NAMESPACE,
            "--wait",
            "--timeout",
            "5m",
            *values,
        )


def _is_ours(cluster: Cluster) -> bool:
    owner = "jsonpath={.metadata.annotations.meta\\.helm\\.sh/release-name}"
    return cluster.kubectl("get", "crd", CRD, "-o", owner).strip() == RELEASE


def _image_values(prefix: str, image: str) -> list[str]:
    name, _, digest = image.partition("@")
    repository, _, tag = name.rpartition(":") if ":" in name.rpartition("/")[2] else (name, "", "")
    values = {"repository": repository, "tag": tag, "digest": digest}
    return [part for key, value in values.items() if value for part in ("--set-string", f"{prefix}.{key}={value}")]


def deploy(cluster: Cluster) -> None:
    """Applies the example and follows its status until it is ready."""
    with step("model, from kubectl apply to Ready"):
        apply(cluster, "examples/smollm2.yaml")
        _follow(cluster, "Ready")


def _follow(cluster: Cluster, kind: str, of: str = "llmd/smollm2") -> None:
    """Shows a condition until it is true."""
    deadline, last = time.monotonic() + READY_SECONDS, ""
    while True:
        ready = condition(cluster, kind, of)
        line = f"{ready.get('reason', 'Pending')}: {ready.get('message', 'the operator has not seen it yet')}"
        if line != last:
            say(f"    {line}")
            last = line
        if ready.get("status") == "True":
            return
        if time.monotonic() > deadline:
            raise DemoError(f"not {kind} within {READY_SECONDS} s; at last {line}")
        time.sleep(0.5)


def apply(cluster: Cluster, manifest: str) -> None:
    say(f"kubectl apply -f {manifest}")
    cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(ROOT / manifest))


def model(cluster: Cluster, name: str = "llmd/smollm2") -> dict[str, Any]:
    return dict(json.loads(cluster.kubectl("get", name, "-n", NAMESPACE, "-o", "json")))


def condition(cluster: Cluster, kind: str, of: str = "llmd/smollm2") -> dict[str, Any]:
    """Nothing while it speaks of an earlier spec."""
    found = model(cluster, of)
    conditions = found.get("status", {}).get("conditions", [])
    one: dict[str, Any] = next((each for each in conditions if each["type"] == kind), {})
    return one if one.get("observedGeneration") == found["metadata"]["generation"] else {}


def ask(cluster: Cluster) -> None:
    """A pod in the cluster asks through the Service; its image is the engine's, which has a client in it."""
    command = ["octavo", "chat", "--url", "http://smollm2/v1", "--temperature", "0", "--max-tokens", "64"]
    say(f"a client in the cluster, through the Service: {' '.join(command[:4])} ...")
    print(f"\n    > {QUESTION}\n    ", end="", flush=True)
    with step("answer, the client's start included"):
        status = cluster.show(*_pod(cluster, "client", [*command, "-q", QUESTION]), "--attach", "--rm", "--quiet")
        print(flush=True)
    if status:
        raise DemoError("the client got no answer")


def _pod(cluster: Cluster, name: str, command: list[str]) -> list[str]:
    """Arguments of `kubectl run` for a client in a pod that the namespace admits."""
    template = "jsonpath={.spec.template.spec.containers[0].image}"
    image = cluster.kubectl("get", "deployment", "smollm2", "-n", NAMESPACE, "-o", template).strip()
    cluster.kubectl("delete", "pod", name, "-n", NAMESPACE, "--ignore-not-found", "--wait", "--grace-period=1")
    hardened = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    spec = {
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": name, "image": image, "command": command, "securityContext": hardened}],
    }
    return [
        "run",
        name,
        "-n",
        NAMESPACE,
        f"--image={image}",
        "--restart=Never",
        "--override-type=strategic",
        f"--overrides={json.dumps({'spec': spec})}",
    ]


def burst(cluster: Cluster) -> None:
    """More requests than a replica takes, until there are two of them; then none, until there is one again."""
    if os.environ.get("BURST") == "0" or cluster.shared:
        if cluster.shared:
            say("no burst: the metrics that scale by it are another Octavo's in this cluster")
        return
    apply(cluster, "examples/autoscaled.yaml")
    with step("autoscaler reads the queue"):
        _wait("the autoscaler to be ready", lambda: condition(cluster, "AutoscalerReady").get("status") == "True")
        _wait("the new spec to be ready", lambda: condition(cluster, "Ready").get("status") == "True")
    load = [
        "octavo",
        "bench",
        "serve",
        "--base-url",
        "http://smollm2",
        "--model",
        "smollm2",
        "--tokenizer",
        "smollm2-135m-instruct",
        "--num-prompts",
        "2000",
        "--max-concurrency",
        "32",
        "--random-input-len",
        "64",
        "--random-output-len",
        "128",
        "--ignore-eos",
        "--disable-tqdm",
    ]
    cluster.kubectl(*_pod(cluster, "load", load))
    print("\n         requests: running  waiting   replicas: desired  ready", flush=True)
    with step("burst, from one replica to two"):
        _watch(cluster, 2)
    cluster.kubectl("delete", "pod", "load", "-n", NAMESPACE, "--wait=false", "--grace-period=1")
    with step("calm, from two replicas to one"):
        _watch(cluster, 1)


def _watch(cluster: Cluster, replicas: int) -> None:
    """A line of the table for every change, until so many are wanted and ready."""
    last: tuple[object, ...] = ()

    def reached() -> bool:
        nonlocal last
        found = model(cluster)
        now = (*_requests(cluster), found["spec"]["replicas"], found.get("status", {}).get("readyReplicas", 0))
        if now != last:
            say("            {:>7}  {:>7}            {:>7}  {:>5}".format(*now))
            last = now
        return now[2:] == (replicas, replicas)

    _wait(f"{replicas} replicas", reached)


def _requests(cluster: Cluster) -> tuple[str, str]:
    """How many run and how many wait, as the autoscaler is told."""
    try:
        labels = json.loads(cluster.kubectl("get", "--raw", QUEUE))["items"][0]["metricLabels"]
    except (DemoError, IndexError):  # for the moment nobody knows
        return "?", "?"
    return labels.get("running", "?"), labels.get("waiting", "?")


def _wait(what: str, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BURST_SECONDS
    while not done():
        if time.monotonic() > deadline:
            raise DemoError(f"waited {BURST_SECONDS} s for {what}")
        time.sleep(1)


def converse(cluster: Cluster) -> None:
    """Conversations with two replicas: every second turn finds what the first has computed."""
    apply(cluster, "examples/routed.yaml")
    with step("two replicas behind a router"):
        _follow(cluster, "Ready")
        _follow(cluster, "RouterReady")
    say("conversations, through the same Service: examples/conversations.py smollm2")
    script = (ROOT / "examples/conversations.py").read_text()
    pod = _pod(cluster, "talks", ["python", "-c", script, "smollm2"])
    if cluster.show(*pod, "--attach", "--rm", "--quiet"):
        raise DemoError("a second turn did not find its first one's prompt")
    print(flush=True)


def one_address(cluster: Cluster) -> None:
    """Two models behind a gateway: one serves, and one has no replica until it is asked."""
    apply(cluster, "examples/gateway.yaml")
    with step("gateway"):
        _follow(cluster, "Ready", "llmg/models")
    say("every model by its name, through the gateway; sleeper starts when it is asked: examples/models.py models")
    script = (ROOT / "examples/models.py").read_text()
    pod = _pod(cluster, "client", ["python", "-c", script, "models"])
    with step("all models asked"):
        if cluster.show(*pod, "--attach", "--rm", "--quiet"):
            raise DemoError("a model behind the gateway gave no answer")
    print(flush=True)


def show(cluster: Cluster) -> None:
    print("\n$ kubectl get llmd,llmg", flush=True)
    cluster.show("get", "llmd,llmg", "-n", NAMESPACE)
    print(flush=True)


def explain(cluster: Cluster, own: bool) -> None:
    """How to go on with what KEEP=1 has left."""
    end = f"helm uninstall {RELEASE} -n {NAMESPACE} && kubectl delete namespace {NAMESPACE}"
    address = cluster.kubectl("get", "service", "models", "-n", NAMESPACE, "-o", "jsonpath={.spec.clusterIP}").strip()
    here = f"  curl http://{address}/v1/models        # the Service, from this machine\n" if own else ""
    print(
        f"It stays. To reach it:\n  {cluster.hint}\n{here}"
        f"  kubectl port-forward -n {NAMESPACE} service/models 8000:80    # then http://127.0.0.1:8000/v1\n"
        f"To remove it:\n  {'make cluster-down' if own else end}"
    )


def remove(cluster: Cluster) -> None:
    with step("removing it"):
        cluster.kubectl("delete", "llmg,llmd", "--all", "-n", NAMESPACE, "--ignore-not-found", "--timeout=60s")
        cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found", "--wait", "--timeout", "2m")
        cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=120s")


def diagnose(cluster: Cluster) -> None:
    print("\nWhat the cluster says of it:", flush=True)
    for arguments in (
        ["get", "llmd,llmg,pods", "-n", NAMESPACE, "-o", "wide"],
        ["get", "events", "-n", NAMESPACE, "--sort-by=.lastTimestamp"],
        ["logs", "-n", NAMESPACE, "-l", LABEL, "--all-containers", "--tail=20", "--prefix"],
    ):
        cluster.show(*arguments)


def main() -> int:
    context, keep = os.environ.get("KUBE_CONTEXT"), os.environ.get("KEEP", "0") not in ("", "0")
    was_up = context is None and is_up()
    cluster: Cluster | None = None
    failed = True
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as after Ctrl-C
    try:
        cluster = foreign_cluster(context) if context else own_cluster()
        for act in (install, deploy, ask, show, burst, converse, one_address, show):
            act(cluster)
        failed = False
        if keep:
            explain(cluster, own=context is None)
    except DemoError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        if cluster:
            diagnose(cluster)
    except KeyboardInterrupt:
        print("\ndemo: stopped", file=sys.stderr)
    if not keep:
        clean_up(cluster, own=context is None, was_up=was_up)
    if cluster:
        say("FAILED" if failed else "done")
    return int(failed)


def clean_up(cluster: Cluster | None, own: bool, was_up: bool) -> None:
    """A rig of the demo's own goes as a whole; from any other cluster goes what was put there."""
    with contextlib.suppress(KeyboardInterrupt):
        try:
            if cluster and (was_up or not own):
                remove(cluster)
            elif own and not was_up and os.geteuid() == 0:
                rig("down")
        except (DemoError, subprocess.TimeoutExpired) as error:
            print(f"demo: cleaning up failed: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
