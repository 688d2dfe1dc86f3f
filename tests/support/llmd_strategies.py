"""Random specs that the CRD accepts."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]

_bytes = st.sampled_from(["1", "1Gi", "1024Mi", "1.5Gi", "2e3", 3])
_quantity = st.one_of(_bytes, st.just("500m"))
_seconds = st.integers(1, 300)


def _some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({}, optional=fields)


_fetched = st.fixed_dictionaries(
    {
        "uri": st.sampled_from(
            ["smollm2-135m-instruct", "hf://org/name", "org/name", "hf://org/name/f.gguf", "https://host/m"]
        )
    },
    optional={
        "name": st.sampled_from(["gpt", "m/x"]),
        "aliases": st.lists(st.sampled_from(["a", "b", "c"]), unique=True),
        "revision": st.just("main"),
        "credentialsSecretRef": st.just({"name": "hub"}),
        "chatTemplate": st.sampled_from([{"inline": "{{ $(x) }}"}, {"configMapRef": {"name": "t"}}]),
        "cache": st.sampled_from(
            [
                {"mode": "emptyDir", "sizeLimit": "5Gi"},
                {"mode": "pvc", "pvc": {"size": "5Gi", "accessModes": ["ReadWriteMany"], "retain": True}},
                {"mode": "pvc", "pvc": {"size": "5Gi", "accessModes": ["ReadWriteMany"]}, "prefetch": True},
                {"mode": "pvc", "pvc": {"existingClaim": "theirs", "accessModes": ["ReadWriteMany"]}},
            ]
        ),
    },
)
OCI = f"oci://registry.example.com:5000/models/toy@sha256:{'0' * 64}//models/toy"
_placed = st.fixed_dictionaries({"uri": st.sampled_from(["pvc://claim", "pvc://claim/a/b", OCI, "file:///models/x"])})


def _valid(spec: Json) -> Json:
    """What rules over several groups allow: without a replica, routers hold requests."""
    if "accelerator" in spec:  # several ranks are for CPUs
        spec = {name: value for name, value in spec.items() if name != "parallelism"}
    if "parallelism" in spec:  # as many ranks as the engine has at most
        tensor, pipeline = spec["parallelism"].get("tensor", 1), spec["parallelism"].get("pipeline", 1)
        spec["parallelism"] = {**spec["parallelism"], "pipeline": min(pipeline, 48 // tensor)}
    if spec.get("parallelism", {}).get("pipeline", 1) > 1:  # which takes no adapters
        spec = {name: value for name, value in spec.items() if name != "adapters"}
    at_zero = (spec.get("autoscaling") or {}).get("minReplicas") == 0
    in_files = spec.get("responses") == {}  # of each replica
    return {**spec, "routing": {"strategy": "prefix"}} if at_zero or in_files else spec


specs = st.fixed_dictionaries(
    {"model": st.one_of(_fetched, _placed)},
    optional={
        "engine": _some(
            image=st.sampled_from(["a/b:1", "a@sha256:" + "0" * 64]),
            imagePullSecrets=st.just(["s"]),
            dtype=st.sampled_from(["auto", "float32"]),
            quantization=st.just("int8"),
            maxModelLen=st.sampled_from([1, 4096, "auto"]),
            maxNumSeqs=st.integers(1, 512),
            gpuMemoryUtilization=st.integers(10, 100),
            imagePriority=st.integers(-1, 1),
            prefixCaching=st.booleans(),
            speculative=st.sampled_from([{"method": "ngram"}, {"method": "suffix", "tokens": 8}]),
            args=st.just(["--seed", "1"]),
            env=st.sampled_from([[{"name": "A", "value": "1"}], [{"name": "HF_HOME", "value": "/tmp/x"}]]),
        ),
        "adapters": st.sampled_from(
            [
                [],
                [{"name": "sql", "uri": "hf://org/sql", "revision": "abc"}],
                [{"name": "chat", "uri": "pvc://claim/a"}],
            ]
        ),
        "responses": st.sampled_from(
            [{"store": "Memory", "ttl": 0}, {}, {"store": "Postgres", "secretRef": {"name": "db", "key": "address"}}]
        ),
        "accelerator": st.sampled_from([{}, {"count": 1}, {"mig": "1g.10gb"}, {"resourceName": "amd.com/gpu"}]),
        "parallelism": _some(tensor=st.integers(1, 48), pipeline=st.integers(1, 48), data=st.integers(1, 48)),
        "resources": _some(
            requests=st.fixed_dictionaries({}, optional={"cpu": _quantity, "memory": _bytes}),
            limits=st.sampled_from([{"memory": "9Gi"}, {"memory": "9Gi", "cpu": "2Gi"}]),
        ),
        "shm": _some(size=_bytes),
        "scheduling": _some(
            nodeSelector=st.just({"a": "b"}),
            tolerations=st.just([{"key": "k", "operator": "Exists"}]),
            topologySpreadConstraints=st.just(
                [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}]
            ),
            priorityClassName=st.just("high"),
            runtimeClassName=st.just("nvidia"),
        ),
        "replicas": st.integers(0, 5),
        "autoscaling": st.fixed_dictionaries(
            {"maxReplicas": st.integers(5, 9)},
            optional={
                "minReplicas": st.integers(0, 3),
                "queueDepth": _some(targetPerReplica=st.integers(1, 100)),
                "provider": st.sampled_from(["hpa", "keda"]),
                "behavior": st.just({"scaleDown": {"stabilizationWindowSeconds": 60}}),
            },
        ),
        "rollout": st.one_of(
            _some(surgePatienceSeconds=_seconds, minReadySeconds=st.integers(0, 60)),
            st.fixed_dictionaries(
                {"type": st.just("RollingUpdate")},
                optional={"maxSurge": st.sampled_from([1, "25%"]), "maxUnavailable": st.sampled_from([0, "10%"])},
            ),
            st.just({"type": "Recreate"}),
        ),
        "lifecycle": _some(preStopSeconds=st.integers(0, 60), drainSeconds=st.integers(0, 600)),
        "probes": _some(startup=_some(budgetSeconds=st.integers(10, 7200), periodSeconds=st.integers(1, 60))),
        "routing": st.sampled_from(
            [
                {},
                {"strategy": "clientIP"},
                {"strategy": "clientIP", "clientIP": {"timeoutSeconds": 9}},
                {"strategy": "prefix"},
                {"strategy": "prefix", "prefix": {"replicas": 1, "resources": {"limits": {"cpu": 2}}}},
            ]
        ),
        "service": _some(port=st.integers(1, 65535), type=st.sampled_from(["ClusterIP", "NodePort"])),
        "inferencePool": st.just({"endpointPickerRef": {"name": "epp", "port": 9}}),
        "auth": st.just({"apiKeySecretRef": {"name": "keys"}}),
        "monitoring": _some(enabled=st.booleans(), kind=st.sampled_from(["PodMonitor", "ServiceMonitor"])),
        "networkPolicy": _some(
            enabled=st.booleans(),
            egress=st.just([]),
            ingressFrom=st.just([{"podSelector": {"matchLabels": {"a": "b"}}}]),
        ),
        "podDisruptionBudget": st.sampled_from(
            [{}, {"enabled": False}, {"minAvailable": "50%"}, {"maxUnavailable": "50%"}]
        ),
        "podPatches": st.just(
            [{"op": "add", "path": "/spec/containers/0/env/-", "value": {"name": "P", "value": "1"}}]
        ),
        "podLabels": st.just({"team": "research"}),
        "podAnnotations": st.just({"prometheus.io/scrape": "true"}),
        "volumes": st.just([{"name": "ca", "configMap": {"name": "ca"}}]),
        "envFrom": st.just([{"secretRef": {"name": "proxy", "optional": True}, "prefix": "P_"}]),
        "clusterAssignedIds": st.booleans(),
        "foreignFields": st.just([{"kind": "Service", "path": "/spec/loadBalancerIP"}]),
        "suspend": st.booleans(),
    },
).map(_valid)
