"""Renderers: the same spec gives the same objects whatever the operator, and every object keeps its promises."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from support.llmd import parsed
from support.llmd_strategies import specs
from support.rendered_specs import CASES
from support.worlds import world

from octavo.engine.args import EngineArgs
from octavo.engine.spec_decode.config import parse_speculative_config
from octavo.entrypoints.args import ServerArgs
from octavo.flags.fields import from_flags
from octavo.flags.serve_flags import add_serve_flags
from octavo_operator import __version__
from octavo_operator.config import OperatorConfig
from octavo_operator.defaults import Defaults
from octavo_operator.deployment.reconcile import reconcile
from octavo_operator.diff import quantity
from octavo_operator.kube.resources import IMAGE_VOLUMES
from octavo_operator.render import InvalidTemplateError, expected_template, render
from octavo_operator.render.pod_patches import InvalidPodPatchError
from octavo_operator.render.restricted import violations

CONFIG = OperatorConfig(
    engine_image="example.com/engine:1", management_namespaces=("monitoring",), node_cache_paths=("/var/lib/octavo",)
)
APIS = frozenset({"LeaderWorkerSet", "PodMonitor", "ServiceMonitor", "InferencePool"})
GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    """A difference here replaces pods of users who change anything: if it is wanted, delete the file and run again."""
    made = render(parsed(**CASES[name]), CONFIG, apis=APIS)
    for manifest in made:
        if manifest["kind"] == "ConfigMap":  # Envoy's configuration has tests of its own
            manifest["data"] = dict.fromkeys(manifest["data"], "...")
            manifest["metadata"]["annotations"] = dict.fromkeys(manifest["metadata"]["annotations"], "...")
    text = yaml.safe_dump_all(made, sort_keys=False, width=120)
    path = GOLDEN / f"{name}.yaml"
    if not path.exists():
        path.write_text(text)
        pytest.fail(f"{path.name} is new: look at it and commit it")
    assert text == path.read_text()


def deployment_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    return next(manifest for manifest in manifests if manifest["kind"] == "Deployment")


@given(specs)
def test_every_pod_is_restricted_and_gets_time_to_drain(spec: dict[str, Any]) -> None:
    deployment = parsed(**spec)
    made = [one["spec"]["template"] for one in render(deployment, CONFIG) if one["kind"] == "Deployment"]
    assert len(made) == 1 + (deployment.spec.routing.routers is not None)
    for template in made:
        assert list(violations(template, "toy")) == []
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        lifecycle = deployment.spec.lifecycle
        assert pod["terminationGracePeriodSeconds"] > lifecycle.pre_stop_seconds + lifecycle.drain_seconds
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            names = [variable["name"] for variable in container.get("env", [])]
            assert len(names) == len(set(names)), "a variable that is named twice is a riddle"
            mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounts <= {volume["name"] for volume in pod["volumes"]}
    startup = made[0]["spec"]["containers"][0]["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= deployment.spec.probes.startup.budget_seconds


@given(specs)
def test_every_object_is_ours_and_says_so(spec: dict[str, Any]) -> None:
    deployment = parsed(**spec)
    manifests = render(deployment, CONFIG, apis=APIS)
    assert len({(m["kind"], m["metadata"]["name"]) for m in manifests}) == len(manifests)
    pvc = deployment.spec.model.cache.pvc
    for manifest in manifests:
        assert manifest["metadata"]["labels"]["octavo.dev/llmdeployment"] == "toy"
        retained = manifest["kind"] == "PersistentVolumeClaim" and pvc is not None and pvc.retain
        assert bool(manifest["metadata"].get("ownerReferences")) is not retained
    assert json.loads(json.dumps(manifests)) == manifests


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"op": "remove", "path": "/spec/containers/3"}, "podPatches[0]: remove /spec/containers/3"),
        ({"op": "test", "path": "/spec/hostNetwork", "value": True}, "podPatches[0]"),
        ({"op": "replace", "path": "/spec/nothing/here", "value": 1}, "podPatches[0]: replace /spec/nothing/here"),
        ({"op": "add", "path": "/metadata/labels", "value": {}}, "labels"),
        ({"op": "replace", "path": "/metadata/labels/octavo.dev~1llmdeployment", "value": "x"}, "labels"),
    ],
)
def test_patches_that_do_not_fit_are_named(patch: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPodPatchError, match=message.replace("[", r"\[").replace("]", r"\]")):
        expected_template(parsed(podPatches=[patch]), CONFIG)


@given(specs)
def test_the_engine_understands_its_arguments(spec: dict[str, Any]) -> None:
    """Rendered for the very parser that reads them: no flag of the CRD is made up."""
    from octavo.cli import fetch, serve

    deployment = parsed(**spec)
    pod = deployment_of(render(deployment, CONFIG))["spec"]["template"]["spec"]
    for container, command in ((pod["containers"][0], serve), *((one, fetch) for one in pod.get("initContainers", []))):
        parser = argparse.ArgumentParser(exit_on_error=False)
        command.add_arguments(parser)
        read = parser.parse_args(container["args"])
        if command is serve:
            assert read.model_tag == container["args"][0]
            assert read.served_model_name == deployment.served_names
            assert (read.port, read.management_port) == (8000, 8001)
            assert getattr(read, "enable_prefix_caching", True) is deployment.spec.engine.prefix_caching


def expanded(argument: str, env: dict[str, str]) -> str:
    """What the kubelet makes of an argument: $$ is a dollar, $(NAME) a variable where there is one."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)", lambda found: "$" if found[0] == "$$" else env.get(found[1], found[0]), argument
    )


@pytest.mark.parametrize(
    "text", ["$$x^2$$ for $5", "$(HOME)", "$$(HOME)", "$$$(HOME)$$$$", "ends with $", "no dollar at all"]
)
def test_the_engine_gets_what_was_written_dollars_included(text: str) -> None:
    spec = {"model": {"uri": f"https://host/{text}", "name": text, "chatTemplate": {"inline": text}}}
    pod = deployment_of(render(parsed(**spec), CONFIG))["spec"]["template"]["spec"]
    args = [expanded(argument, {"HOME": "/tmp"}) for argument in pod["containers"][0]["args"]]
    assert args[0] == f"https://host/{text}"
    assert args[args.index("--served-model-name") + 1] == text
    assert args[args.index("--chat-template") + 1] == text
    assert expanded(pod["initContainers"][0]["args"][0], {"HOME": "/tmp"}) == args[0]


@pytest.mark.parametrize("port", [80, 8000, 8001, 8002])
def test_a_service_monitor_finds_its_port_whatever_clients_use(port: int) -> None:
    made = render(parsed(service={"port": port}, monitoring={"kind": "ServiceMonitor"}), CONFIG, apis=APIS)
    by_kind = {manifest["kind"]: manifest.get("spec", {}) for manifest in made}
    ports = {one["name"]: one for one in by_kind["Service"]["ports"]}
    assert [endpoint["port"] for endpoint in by_kind["ServiceMonitor"]["endpoints"]] == ["management"]
    assert ports["management"]["targetPort"] == "management"
    assert ports["http"]["port"] == port != ports["management"]["port"]


@pytest.mark.parametrize(
    ("accelerator", "taint"),
    [
        ({}, "nvidia.com/gpu"),
        ({"resourceName": "nvidia.com/gpu.shared"}, "nvidia.com/gpu"),
        ({"resourceName": "nvidia.com/mig-1g.10gb"}, "nvidia.com/gpu"),
        ({"mig": "1g.10gb"}, "nvidia.com/gpu"),
        ({"resourceName": "amd.com/gpu"}, "amd.com/gpu"),
    ],
)
def test_gpu_nodes_are_tolerated_by_the_key_of_their_taint(accelerator: dict[str, Any], taint: str) -> None:
    pod = expected_template(parsed(accelerator=accelerator), CONFIG)["spec"]
    assert [one["key"] for one in pod["tolerations"]] == [taint]


def pod_of(config: OperatorConfig = CONFIG, **spec: Any) -> dict[str, Any]:
    return expected_template(parsed(**spec), config)["spec"]


def variables(container: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value") for one in container["env"]}


@pytest.mark.parametrize("accelerator", [None, {}, {"mig": "1g.10gb"}, {"resourceName": "amd.com/gpu"}])
def test_a_model_runs_where_the_spec_says_and_takes_no_gpu_that_is_not_its_own(accelerator: Any) -> None:
    pod = pod_of(**({} if accelerator is None else {"accelerator": accelerator}))
    engine, fetch = pod["containers"][0], pod["initContainers"][0]
    device = engine["args"][engine["args"].index("--device") + 1]
    assert device == ("cpu" if accelerator is None else "cuda")
    assert variables(engine).get("NVIDIA_VISIBLE_DEVICES") == ("void" if accelerator is None else None)
    assert variables(fetch)["NVIDIA_VISIBLE_DEVICES"] == "void", "fetching needs none, and would share the engine's"
    assert not [name for part in fetch["resources"].values() for name in part if "/" in name]


@pytest.mark.parametrize(
    ("resources", "fetch"),
    [
        ({}, {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}),
        (
            {"requests": {"cpu": 4, "memory": "32Gi"}},
            {"requests": {"cpu": "4", "memory": "32Gi"}, "limits": {"memory": "32Gi"}},
        ),
        ({"limits": {"cpu": 2, "memory": "4Gi"}}, {"limits": {"cpu": "2", "memory": "4Gi"}}),
        (
            {"requests": {"cpu": 1, "rdma/hca": 1}, "limits": {"cpu": 1, "memory": "200Mi", "rdma/hca": 1}},
            {"requests": {"cpu": "1"}, "limits": {"cpu": "1", "memory": "200Mi"}},
        ),
    ],
)
def test_fetching_has_the_engines_resources(resources: Any, fetch: Any) -> None:
    """A quota wants them of every container, and a pod is Guaranteed only if every container is."""
    pod = pod_of(resources=resources, accelerator={})
    assert pod["initContainers"][0]["resources"] == fetch


@given(specs)
def test_fetching_makes_no_pod_less_than_guaranteed_nor_asks_for_more_than_its_limits(spec: dict[str, Any]) -> None:
    pod = expected_template(parsed(**spec), CONFIG)["spec"]
    for fetch in pod.get("initContainers", []):
        engine = pod["containers"][0]["resources"]
        assert not is_guaranteed(engine) or is_guaranteed(fetch["resources"])
        requests, limits = fetch["resources"].get("requests", {}), fetch["resources"]["limits"]
        assert all(quantity(value) <= quantity(limits[name]) for name, value in requests.items() if name in limits)


def is_guaranteed(resources: dict[str, Any]) -> bool:
    limits = resources.get("limits", {})
    requests = {**limits, **resources.get("requests", {})}
    return all(name in limits and quantity(requests[name]) == quantity(limits[name]) for name in ("cpu", "memory"))


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("specs_own", [None, False, True])
def test_ids_are_left_to_the_cluster_where_the_spec_or_else_the_operator_says_so(
    operators: bool, specs_own: bool | None
) -> None:
    config = dataclasses.replace(CONFIG, cluster_assigned_ids=operators)
    spec = {} if specs_own is None else {"clusterAssignedIds": specs_own}
    context = pod_of(config, **spec)["securityContext"]
    left = operators if specs_own is None else specs_own
    assert {"runAsUser", "runAsGroup", "fsGroup"}.isdisjoint(context) is left
    assert context["runAsNonRoot"] is True


def test_fields_with_kubernetes_own_names_reach_the_pods_and_the_service() -> None:
    mount = {"name": "ca", "mountPath": "/etc/ca", "readOnly": True}
    source = {"secretRef": {"name": "proxy"}, "prefix": "P_"}
    deployment = parsed(
        podLabels={"team": "research"},
        podAnnotations={"a/b": "c"},
        volumes=[{"name": "ca", "configMap": {"name": "ca"}}],
        volumeMounts=[mount],
        envFrom=[source],
        service={"type": "LoadBalancer", "loadBalancerClass": "x/y", "externalTrafficPolicy": "Local"},
    )
    made = {one["kind"]: one for one in render(deployment, CONFIG)}
    template = made["Deployment"]["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "research"
    assert template["metadata"]["annotations"] == {"a/b": "c"}
    assert "team" not in made["Deployment"]["spec"]["selector"]["matchLabels"]
    assert {"name": "ca", "configMap": {"name": "ca"}} in template["spec"]["volumes"]
    for container in (template["spec"]["containers"][0], template["spec"]["initContainers"][0]):
        assert mount in container["volumeMounts"]
        assert container["envFrom"] == [source]
    service = made["Service"]["spec"]
    assert (service["loadBalancerClass"], service["externalTrafficPolicy"]) == ("x/y", "Local")


@pytest.mark.parametrize(
    ("speculative", "config"),
    [
        ({"method": "none"}, {"method": "none"}),
        (
            {"method": "ngram"},
            {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        ),
        ({"method": "suffix"}, {"method": "suffix"}),
        ({"method": "mtp"}, {"method": "mtp"}),
        ({"method": "suffix", "tokens": 8}, {"method": "suffix", "num_speculative_tokens": 8}),
        (
            {"method": "draft_model", "model": "hf://a/b$(c)", "tokens": 2},
            {"method": "draft_model", "model": "hf://a/b$$(c)", "num_speculative_tokens": 2},
        ),
        ({"method": "eagle3", "model": "a/b"}, {"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3}),
    ],
)
def test_speculation_is_asked_for_in_the_engines_own_words(speculative: Any, config: dict[str, Any]) -> None:
    args = pod_of(engine={"speculative": speculative})["containers"][0]["args"]
    assert json.loads(args[args.index("--speculative-config") + 1]) == config
    if "draft" not in config["method"]:
        parse_speculative_config(config)


def test_images_are_limited_and_fetched_as_the_spec_says() -> None:
    mounted = {"volumes": [{"name": "p", "emptyDir": {}}], "volumeMounts": [{"name": "p", "mountPath": "/pictures"}]}
    said = {
        "limitPerPrompt": {"image": 4},
        "encoderCacheTokens": 4096,
        "allowedMediaDomains": ["a.example", "b.example"],
        "allowedLocalMediaPath": "/pictures",
        "processorOptions": {"max_pixels": 9, "size": {"longest_edge": "$(X)"}},
    }
    args = pod_of(engine={"multimodal": said, "args": ["--seed", "1"]}, **mounted)["containers"][0]["args"]
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    flags = parser.parse_args([one.replace("$$", "$") for one in args])
    engine, server = from_flags(EngineArgs, flags), from_flags(ServerArgs, flags)
    assert (engine.limit_mm_per_prompt, engine.mm_processor_kwargs) == ({"image": 4}, said["processorOptions"])
    assert engine.mm_encoder_cache_tokens == 4096
    assert server.allowed_media_domains == ["a.example", "b.example"]
    assert server.allowed_local_media_path == "/pictures"
    plain = pod_of()["containers"][0]["args"]
    assert pod_of(engine={"multimodal": {"limitPerPrompt": {}}})["containers"][0]["args"] == plain
    assert not any("mm" in one or "media" in one for one in plain)


def test_pods_that_fetch_images_reach_public_addresses_and_no_others() -> None:
    def policy(**spec: Any) -> Any:
        return next(one["spec"] for one in render(parsed(**spec), CONFIG) if one["kind"] == "NetworkPolicy")

    fetching = {"engine": {"multimodal": {"allowedMediaDomains": ["a.example"]}}}
    assert "egress" not in policy(**fetching), "everything is allowed"
    assert policy(networkPolicy={"egress": []}, engine={"multimodal": {"limitPerPrompt": {"image": 1}}})["egress"] == []
    own = {"ports": [{"port": 1, "protocol": "TCP"}]}
    first, https, dns = policy(networkPolicy={"egress": [own]}, **fetching)["egress"]
    assert first == own
    assert https["ports"] == [{"port": 443, "protocol": "TCP"}]
    assert dns["ports"] == [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
    blocks = [peer["ipBlock"] for peer in https["to"]]
    assert [one["cidr"] for one in blocks] == ["0.0.0.0/0", "::/0"]
    for address in (
        "10.96.0.1",
        "172.31.0.9",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "127.0.0.1",
        "::1",
        "fd00::1",
        "fe80::1",
    ):
        ip = ip_address(address)
        networks = [ip_network(private) for one in blocks for private in one["except"]]
        assert any(ip in network for network in networks if network.version == ip.version), address


@pytest.mark.parametrize(
    ("engine", "wrong"),
    [
        (["--no-such-flag"], "spec.engine.args[0]: the engine has no flag --no-such-flag"),
        (
            ["--seed", "1", "--max-model-length=4"],
            "args[2]: the engine has no flag --max-model-length; did you mean --max-model-len?",
        ),
        (["--max_model_len=64", "--seed", "-1", "-tp", "1", "--no-enforce-eager"], None),
        (["--chat-template", "{{ a }}", "--default-chat-template-kwargs", '{"--x": 1}'], None),
    ],
)
def test_flags_that_the_engine_does_not_know_are_named_before_it_crashes(engine: list[str], wrong: str | None) -> None:
    known = dataclasses.replace(CONFIG, engine_image=f"mirror:5000/octavo-server:{__version__}@sha256:{'0' * 64}")
    if wrong is None:
        assert pod_of(known, engine={"args": engine})
        return
    with pytest.raises(InvalidTemplateError) as refused:
        pod_of(known, engine={"args": engine})
    assert refused.value.reason == "UnknownArgument"
    assert wrong in str(refused.value)
    for other in ("octavo-server", "octavo-server:9.9", f"octavo-server:{__version__}-rc1"):
        assert pod_of(known, engine={"args": engine, "image": other}), "what other versions know is not known here"


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ({"engine": {"env": [{"name": "HF_HOME", "value": "/data/hf"}]}}, "HF_HOME=/data/hf"),
        ({"engine": {"env": [{"name": "TMPDIR", "value": "/tmp/../var/tmp"}]}}, "TMPDIR=/var/tmp"),
        ({"engine": {"env": [{"name": "XDG_CACHE_HOME", "value": "/cachet"}]}}, "XDG_CACHE_HOME=/cachet"),
        ({"engine": {"env": [{"name": "HF_HOME", "value": "/cache/hf"}, {"name": "TMPDIR", "value": "/tmp"}]}}, None),
        (
            {"engine": {"env": [{"name": "HF_HOME", "value": "/opt/hf"}, {"name": "HF_HUB_OFFLINE", "value": "1"}]}},
            None,  # baked into the image, and nothing is written
        ),
        (
            {
                "engine": {"env": [{"name": "HF_HOME", "value": "/data/hf"}]},
                "volumes": [{"name": "data", "emptyDir": {}}],
                "volumeMounts": [{"name": "data", "mountPath": "/data/"}],
            },
            None,
        ),
    ],
)
def test_caches_on_the_read_only_root_are_told_before_they_fail(spec: dict[str, Any], wrong: str | None) -> None:
    if wrong is None:
        assert pod_of(**spec)
        return
    with pytest.raises(InvalidTemplateError, match=f"spec.engine.env: {wrong} is on the read-only root") as refused:
        pod_of(**spec)
    assert refused.value.reason == "ReadOnlyPath"


DEFAULTS = Defaults.parse(
    json.dumps(
        {
            "images": {"cpu": "example.com/engine-cpu:1"},
            "scheduling": {"priorityClassName": "models", "nodeSelector": {"pool": "models"}},
            "resourcesByAccelerator": {
                "cpu": {"requests": {"cpu": 4}, "limits": {"memory": "8Gi"}},
                "nvidia.com/gpu": {"requests": {"memory": "64Gi"}},
            },
        }
    )
)


@pytest.mark.parametrize(
    ("spec", "image", "resources", "pool"),
    [
        ({}, "example.com/engine-cpu:1", {"requests": {"cpu": "4"}, "limits": {"memory": "8Gi"}}, "models"),
        (
            {"accelerator": {}, "scheduling": {"nodeSelector": {"pool": "gpus"}}},
            "example.com/engine:1",
            {"requests": {"memory": "64Gi", "nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}},
            "gpus",
        ),
        (
            {"engine": {"image": "mine:1"}, "resources": {"requests": {"memory": "16Gi"}}},
            "mine:1",
            {"requests": {"memory": "16Gi"}},
            "models",
        ),
        (
            {"accelerator": {"mig": "1g.10gb"}},
            "example.com/engine:1",
            {"requests": {"nvidia.com/mig-1g.10gb": "1"}, "limits": {"nvidia.com/mig-1g.10gb": "1"}},
            "models",
        ),
    ],
)
def test_the_cluster_s_defaults_fill_empty_fields(
    spec: dict[str, Any], image: str, resources: dict[str, Any], pool: str
) -> None:
    pod = expected_template(parsed(**spec), dataclasses.replace(CONFIG, defaults=DEFAULTS))["spec"]
    (engine,) = pod["containers"]
    assert (engine["image"], engine["resources"]) == (image, resources)
    assert pod["nodeSelector"] == {"pool": pool}, "one map or the other, no mixture of both"
    assert pod["priorityClassName"] == "models"


def test_a_cluster_that_mounts_no_images_starts_no_pods_without_the_model() -> None:
    """An older API server drops the volume's source, and the pods would get an empty folder."""
    spec = CASES["model-in-an-image"]
    with pytest.raises(InvalidTemplateError, match="oci:// needs Kubernetes") as error:
        expected_template(parsed(**spec), CONFIG, image_volumes=False)
    assert error.value.reason == "ImageVolumesUnsupported"
    outcome = reconcile(parsed(**spec), world(), CONFIG)
    assert not outcome.plan.actions
    outcome = reconcile(parsed(**spec), world(apis={IMAGE_VOLUMES}), CONFIG)
    assert outcome.plan.actions


def test_a_bound_on_the_cache_of_a_node_is_the_fetchs() -> None:
    def arguments(**node: str) -> list[str]:
        cache = {"mode": "node", "node": {"path": "/var/lib/octavo", **node}}
        template = expected_template(parsed(model={"uri": "org/name", "cache": cache}), CONFIG)
        return list(template["spec"]["initContainers"][0]["args"])

    assert arguments(maxSize="1500Mi")[1:] == ["--max-cache-size", str(1500 << 20), "--quiet"]
    assert arguments() == ["org/name", "--quiet"]
