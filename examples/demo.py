#!/usr/bin/env python3
"""`make demo`: from a bare machine to tokens out of a Kubernetes Service, with what each step takes.

A cluster and both images are made here, the operator is installed with Helm, examples/smollm2.yaml is applied, and a
client in the cluster asks the model a question. Then everything is removed again.

    KEEP=1              leave it running, and say how to reach it
    KUBE_CONTEXT=name   use a cluster of yours (kubectl's context of that name); nothing is built then
    OCTAVO_OPERATOR_IMAGE, OCTAVO_SERVER_IMAGE
                        images that the cluster can pull (default: those of the chart)
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RIG = [sys.executable, str(ROOT / "tests/cluster/rig.py")]
NAMESPACE = "octavo-demo"
RELEASE = "octavo-demo"
LABEL = "octavo.dev/llmdeployment"  # on every object and pod of a model
CRD = "llmdeployments.octavo.dev"
NAMES = {"operator": "ghcr.io/octavo-dev/octavo-operator", "server": "ghcr.io/octavo-dev/octavo-server"}
QUESTION = "What is the capital of France?"
READY_SECONDS = 600
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
        if "STEP" not in text or "RUN" in text:
            say(f"    {text[:130]}")
    output = process.stdout.read()
    if process.wait():
        raise DemoError("\n".join(said[-30:]))
    return output


# --------------------------------------------------------------------------------------------------------- the cluster


class Cluster:
    """Where the demo runs. `images`: operator and server as name@digest, or nothing for the chart's own."""

    def __init__(self, kubectl: list[str], helm: list[str], images: dict[str, str], hint: str) -> None:
        self._kubectl, self._helm, self.images, self.hint = kubectl, helm, images, hint

    def kubectl(self, *arguments: str, input: str | None = None, timeout: float = 300) -> str:
        return run([*self._kubectl, *arguments], input=input, timeout=timeout)

    def show(self, *arguments: str) -> int:
        """Runs kubectl with its output on the terminal."""
        return subprocess.run([*self._kubectl, *arguments], timeout=READY_SECONDS).returncode

    def helm(self, *arguments: str) -> str:
        return run([*self._helm, *arguments])


def own_cluster() -> Cluster:
    """The rig and both images, made side by side."""
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
        [programs["kubectl"], f"--kubeconfig={kubeconfig}"], [programs["helm"], f"--kubeconfig={kubeconfig}"], images,
        f"export KUBECONFIG={kubeconfig}  # kubectl: {programs['kubectl']}",
    )  # fmt: skip


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
        [*commands[0], f"--context={context}"], [*commands[1], f"--kube-context={context}"], images,
        f"kubectl config use-context {context}",
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- the steps


def install(cluster: Cluster) -> None:
    """The operator, with rights in the demo's namespace alone, so that it disturbs no other one."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    with step("namespace, which admits restricted pods only"):
        cluster.kubectl("apply", "-f", "-", input=json.dumps(namespace))
    values = ["--set", f"watchNamespaces={{{NAMESPACE}}}", "--set", "crd.keep=false"]
    if cluster.kubectl("get", "crd", CRD, "--ignore-not-found", "-o", "name") and not _is_ours(cluster):
        values += ["--set", "crd.install=false"]  # another release's, which looks after it
    for prefix, name in (("image", "operator"), ("engine.image", "server")):
        if image := cluster.images.get(name):
            values += _image_values(prefix, image)
    with step("operator, installed with Helm"):
        cluster.helm(
            "upgrade", "--install", RELEASE, str(ROOT / "charts/octavo"), "--namespace", NAMESPACE, "--wait",
            "--timeout", "5m", *values,
        )  # fmt: skip


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
    manifest = ROOT / "examples/smollm2.yaml"
    say(f"kubectl apply -f {manifest.relative_to(ROOT)}")
    with step("model, from kubectl apply to Ready"):
        cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(manifest))
        deadline, last = time.monotonic() + READY_SECONDS, ""
        while True:
            found = json.loads(cluster.kubectl("get", "llmd", "smollm2", "-n", NAMESPACE, "-o", "json"))
            conditions = found.get("status", {}).get("conditions", [])
            ready: dict[str, Any] = next((one for one in conditions if one["type"] == "Ready"), {})
            line = f"{ready.get('reason', 'Pending')}: {ready.get('message', 'the operator has not seen it yet')}"
            if line != last:
                say(f"    {line}")
                last = line
            if ready.get("status") == "True":
                return
            if time.monotonic() > deadline:
                raise DemoError(f"the model was not ready within {READY_SECONDS} s; at last {line}")
            time.sleep(0.5)


def ask(cluster: Cluster) -> None:
    """A pod in the cluster asks through the Service; its image is the engine's, which has a client in it."""
    template = "jsonpath={.spec.template.spec.containers[0].image}"
    image = cluster.kubectl("get", "deployment", "smollm2", "-n", NAMESPACE, "-o", template).strip()
    command = ["octavo", "chat", "--url", "http://smollm2/v1", "--temperature", "0", "--max-tokens", "64"]
    hardened = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "client", "image": image, "command": [*command, "-q", QUESTION], "securityContext": hardened}
    spec = {
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    cluster.kubectl("delete", "pod", "client", "-n", NAMESPACE, "--ignore-not-found", "--wait")
    say(f"a client in the cluster, through the Service: {' '.join(command[:4])} ...")
    print(f"\n    > {QUESTION}\n    ", end="", flush=True)
    with step("answer, the client's start included"):
        status = cluster.show(
            "run", "client", "-n", NAMESPACE, f"--image={image}", "--restart=Never", "--attach", "--rm", "--quiet",
            "--override-type=strategic", f"--overrides={json.dumps({'spec': spec})}",
        )  # fmt: skip
        print(flush=True)
    if status:
        raise DemoError("the client got no answer")


def show(cluster: Cluster) -> None:
    print("\n$ kubectl get llmd", flush=True)
    cluster.show("get", "llmd", "-n", NAMESPACE)
    print(flush=True)


def explain(cluster: Cluster, own: bool) -> None:
    """How to go on with what KEEP=1 has left."""
    end = f"helm uninstall {RELEASE} -n {NAMESPACE} && kubectl delete namespace {NAMESPACE}"
    address = cluster.kubectl("get", "service", "smollm2", "-n", NAMESPACE, "-o", "jsonpath={.spec.clusterIP}").strip()
    here = f"  curl http://{address}/v1/models        # the Service, from this machine\n" if own else ""
    print(
        f"It stays. To reach it:\n  {cluster.hint}\n{here}"
        f"  kubectl port-forward -n {NAMESPACE} service/smollm2 8000:80    # then http://127.0.0.1:8000/v1\n"
        f"To remove it:\n  {'make cluster-down' if own else end}"
    )


def remove(cluster: Cluster) -> None:
    with step("removing it"):
        cluster.kubectl("delete", "llmd", "--all", "-n", NAMESPACE, "--ignore-not-found", "--timeout=60s")
        cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found", "--wait", "--timeout", "2m")
        cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=120s")


def diagnose(cluster: Cluster) -> None:
    print("\nWhat the cluster says of it:", flush=True)
    for arguments in (
        ["get", "llmd,pods", "-n", NAMESPACE, "-o", "wide"],
        ["get", "events", "-n", NAMESPACE, "--sort-by=.lastTimestamp"],
        ["logs", "-n", NAMESPACE, "-l", LABEL, "--all-containers", "--tail=20", "--prefix"],
    ):
        cluster.show(*arguments)


def main() -> int:
    context, keep = os.environ.get("KUBE_CONTEXT"), os.environ.get("KEEP", "0") not in ("", "0")
    was_up = context is None and is_up()
    cluster: Cluster | None = None
    failed = True
    try:
        cluster = foreign_cluster(context) if context else own_cluster()
        for act in (install, deploy, ask, show):
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
