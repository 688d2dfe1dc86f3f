"""Specs that break a rule of the CRD, each with the nearest one that keeps it."""

from __future__ import annotations

from typing import Any

PVC = {"mode": "pvc", "pvc": {"size": "1Gi"}}


PICTURES = {"volumes": [{"name": "p", "emptyDir": {}}], "volumeMounts": [{"name": "p", "mountPath": "/pictures"}]}


RWX = {"mode": "pvc", "pvc": {"size": "1Gi", "accessModes": ["ReadWriteMany"]}}


THEIRS = {"mode": "pvc", "pvc": {"existingClaim": "c"}}


NODE = {"mode": "node", "node": {"path": "/var/lib/octavo", "maxSize": "1Ti"}}


HF = "hf://org/name"


GROUPED = {"parallelism": {"tensor": 2, "nodes": 2}}


def model(**more: Any) -> dict[str, Any]:
    return {"model": {"uri": HF, **more}}


DIGEST = f"sha256:{'0' * 64}"


def uri(text: str) -> dict[str, Any]:
    return {"model": {"uri": text}}


def adapters(*names: str, **more: Any) -> dict[str, Any]:
    return {"adapters": [{"name": name, "uri": HF, **more} for name in names]}


# What the message must say, a spec that is wrong, and one beside it that is right.
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("model.uri: unknown source", uri("ollama://name"), uri("hf://org/name")),
    ("model.uri: s3:// and gs://", uri("s3://bucket"), uri("s3://bucket/folder/file.gguf")),
    ("model.uri: s3:// and gs://", uri("gs://Bucket/folder"), uri("gs://bucket.x/folder")),
    (
        "model.credentialsSecretRef",
        {"model": {"uri": "s3://bucket/m", "credentialsSecretRef": {"name": "s"}}},
        {**uri("s3://bucket/m"), "envFrom": [{"secretRef": {"name": "s"}}]},
    ),
    ("model.uri: neither an alias", uri("a b"), uri("org/name")),
    ("model.uri: neither an alias", uri("/models/x"), uri("file:///models/x")),
    ("model.uri: hf:// is followed", uri("hf://name"), uri("hf://org/name/file.gguf")),
    ("model.uri: hf:// is followed", uri("hf://org/name:"), uri("hf://org/name:Q4_K_M")),
    ("model.uri: pvc:// is followed", uri("pvc://claim/../x"), uri("pvc://claim/x/y")),
    ("model.uri: pvc:// is followed", uri("pvc://Claim"), uri("pvc://claim")),
    ("a digest is required", uri("oci://host/toy:1//m"), uri(f"oci://host:5000/a/toy:1@{DIGEST}//m")),
    (
        "model.uri: oci:// is followed",
        uri(f"oci://host/toy@{DIGEST}//../m"),
        uri(f"oci://toy@{DIGEST}"),
    ),
    ("model.uri: https:// is followed by host", uri("https://me:secret@host/m.gguf"), uri("https://host/folder")),
    ("model.uri: file:// is followed", uri("file://models"), uri("file:///models")),
    ("model.revision", {"model": {"uri": "file:///m", "revision": "main"}}, model(revision="main")),
    (
        "model.credentialsSecretRef",
        {"model": {"uri": "pvc://m", "credentialsSecretRef": {"name": "s"}}},
        model(credentialsSecretRef={"name": "s"}),
    ),
    ("maxLoras, maxRank and adapterCredentialsSecretRef", {"maxRank": 8}, {"maxRank": 8, "adapters": []}),
    (
        "maxLoras, maxRank and adapterCredentialsSecretRef",
        {"adapterCredentialsSecretRef": {"name": "s"}},
        {"adapterCredentialsSecretRef": {"name": "s"}, **adapters("a")},
    ),
    (
        "spec.adapters: Too many",
        adapters(*(f"a{number}" for number in range(65))),
        adapters(*(f"a{number}" for number in range(64))),
    ),
    ("spec.adapters[1]: Duplicate value", adapters("a", "a"), adapters("a", "b")),
    ("adapters: a name is the model's own", adapters("toy"), adapters("toys")),
    (
        "adapters: a name is the model's own",
        {**model(name="main"), **adapters("main")},
        {**model(name="main"), **adapters("toy")},
    ),
    (
        "adapters: a name is one of model.aliases",
        {**model(aliases=["x", "y"]), **adapters("a", "y")},
        {**model(aliases=["x", "y"]), **adapters("a", "z")},
    ),
    ("spec.adapters[0].name", adapters("a:latest"), adapters("org/a.b-c_d")),
    ("adapters: uri is hf://", adapters("a", uri="org/name"), adapters("a", uri="hf://org/name")),
    ("adapters: uri is hf://", adapters("a", uri="s3://bucket"), adapters("a", uri="s3://bucket/folder")),
    ("adapters: uri is hf://", adapters("a", uri="pvc://claim/../b"), adapters("a", uri="pvc://claim/b")),
    ("adapters: uri is hf://", adapters("a", uri="http://host/a"), adapters("a", uri="https://host/a")),
    ("adapters: uri is hf://", adapters("a", uri="file://a"), adapters("a", uri="file:///a")),
    ("adapters: uri is hf://", adapters("a", uri="pypi://dist/a"), adapters("a", uri="pypi://dist==1.0/a/")),
    ("spec.adapters[0].digest", adapters("a", digest="sha256:1"), adapters("a", digest=DIGEST)),
    (
        "adapters: revision is for adapters of a hub",
        adapters("a", uri="file:///a", revision="main"),
        adapters("a", revision="main"),
    ),
    (
        "adapters need parallelism.pipeline 1",
        {"adapters": [], "parallelism": {"pipeline": 2}},
        {"adapters": [], "parallelism": {"tensor": 2}},
    ),
    ("model.cache.mode pvc", {"model": {"uri": "file:///m", "cache": PVC}}, model(cache=PVC)),
    ("model.aliases must not", model(name="a", aliases=["a"]), model(name="a", aliases=["b"])),
    ("chatTemplate: give exactly one", model(chatTemplate={}), model(chatTemplate={"inline": "x"})),
    (
        "chatTemplate: give exactly one",
        model(chatTemplate={"inline": "x", "configMapRef": {"name": "c"}}),
        model(chatTemplate={"configMapRef": {"name": "c"}}),
    ),
    ("cache: mode pvc needs cache.pvc", model(cache={"mode": "pvc"}), model(cache=PVC)),
    ("cache: mode pvc needs cache.pvc", model(cache={"mode": "emptyDir", "pvc": {"size": "1Gi"}}), model(cache={})),
    ("cache: mode node needs", model(cache={"mode": "node"}), model(cache=NODE)),
    ("cache: mode node needs", model(cache={"node": {"path": "/a"}}), model(cache=NODE)),
    ("spec.model.cache.node.path", model(cache={"mode": "node", "node": {"path": "/a/../b"}}), model(cache=NODE)),
    ("cache.prefetch needs", model(cache={**PVC, "prefetch": True}), model(cache={**RWX, "prefetch": True})),
    ("cache.prefetch needs", model(cache={"prefetch": True}), model(cache={**THEIRS, "prefetch": True})),
    ("cache.prefetch needs", model(cache={**NODE, "prefetch": True}), model(cache={**NODE, "prefetch": False})),
    ("cache.sizeLimit", model(cache={**PVC, "sizeLimit": "1Gi"}), model(cache={"sizeLimit": "1Gi"})),
    (
        "cache.pvc: give either size",
        model(cache={"mode": "pvc", "pvc": {"size": "1Gi", "existingClaim": "c"}}),
        model(cache={"mode": "pvc", "pvc": {"existingClaim": "c"}}),
    ),
    (
        "storageClassName and retain",
        model(cache={"mode": "pvc", "pvc": {"existingClaim": "c", "retain": True}}),
        model(cache={"mode": "pvc", "pvc": {"size": "1Gi", "retain": True}}),
    ),
    (
        "responses: store Postgres needs responses.secretRef",
        {"responses": {"store": "Postgres"}},
        {"responses": {"store": "Postgres", "secretRef": {"name": "db"}}, "replicas": 3},
    ),
    (
        "secretRef needs store Postgres",
        {"responses": {"store": "Memory", "secretRef": {"name": "db"}}},
        {"responses": {"store": "Memory"}, "replicas": 3},
    ),
    (
        "responses.existingClaim holds the file of store Sqlite",
        {"responses": {"store": "Memory", "existingClaim": "c"}},
        {"responses": {"existingClaim": "c", "ttl": 0}},
    ),
    ("ttl", {"responses": {"ttl": -1}}, {"responses": {"ttl": 60}}),
    (
        "responses.store Sqlite: each replica keeps its own",
        {"responses": {"store": "Sqlite"}, "replicas": 2},
        {"responses": {"store": "Sqlite"}, "replicas": 2, "routing": {"strategy": "prefix"}},
    ),
    (
        "responses.store Sqlite: each replica keeps its own",
        {"responses": {}, "autoscaling": {"maxReplicas": 2}, "routing": {"strategy": "clientIP"}},
        {"responses": {}, "autoscaling": {"maxReplicas": 2}, "routing": {"strategy": "prefix"}},
    ),
    (
        "responses.existingClaim is for one replica",
        {"responses": {"existingClaim": "c"}, "replicas": 2, "routing": {"strategy": "prefix"}},
        {"responses": {"existingClaim": "c"}, "replicas": 1, "routing": {"strategy": "prefix"}},
    ),
    (
        "responses.existingClaim is for one replica",
        {"responses": {"existingClaim": "c"}, **GROUPED},
        {"responses": {"store": "Sqlite"}, **GROUPED},
    ),
    (
        "responses.existingClaim serves one",
        {"responses": {"existingClaim": "c"}, "rollout": {"type": "RollingUpdate"}},
        {"responses": {"existingClaim": "c"}, "rollout": {"type": "Recreate"}},
    ),
    (
        "engine.env: OCTAVO_RESPONSES_STORE",
        {"responses": {}, "engine": {"env": [{"name": "OCTAVO_RESPONSES_STORE", "value": "memory"}]}},
        {"engine": {"env": [{"name": "OCTAVO_RESPONSES_STORE", "value": "memory"}]}},
    ),
    (
        "volumeMounts: /responses",
        {"responses": {}, "volumes": PICTURES["volumes"], "volumeMounts": [{"name": "p", "mountPath": "/responses"}]},
        {"volumes": PICTURES["volumes"], "volumeMounts": [{"name": "p", "mountPath": "/responses"}]},
    ),
    (
        "volumes: the name responses",
        {"responses": {}, "volumes": [{"name": "responses", "emptyDir": {}}]},
        {"volumes": [{"name": "responses", "emptyDir": {}}]},
    ),
    (
        "replicas: a cache that is ReadWriteOnce",
        {**model(cache=PVC), "replicas": 2},
        {**model(cache=RWX), "replicas": 2},
    ),
    (
        "autoscaling.minReplicas must not be above",
        {"autoscaling": {"minReplicas": 3, "maxReplicas": 2}},
        {"autoscaling": {"minReplicas": 2, "maxReplicas": 2}},
    ),
    (
        "idleSeconds",
        {"autoscaling": {"maxReplicas": 2, "idleSeconds": 29}},
        {"autoscaling": {"maxReplicas": 2, "idleSeconds": 30}},
    ),
    (
        "routing.prefix.hold.maxSeconds",
        {"routing": {"strategy": "prefix", "prefix": {"hold": {"maxSeconds": 541}}}},
        {"routing": {"strategy": "prefix", "prefix": {"hold": {"maxSeconds": 540}}}},
    ),
    ("maxReplicas", {"autoscaling": {}}, {"autoscaling": {"maxReplicas": 1}}),
    (
        "targetPerReplica",
        {"autoscaling": {"maxReplicas": 2, "queueDepth": {"targetPerReplica": 0}}},
        {"autoscaling": {"maxReplicas": 2, "queueDepth": {"targetPerReplica": 1}}},
    ),
    (
        "provider",
        {"autoscaling": {"maxReplicas": 2, "provider": "magic"}},
        {"autoscaling": {"maxReplicas": 2, "provider": "keda"}},
    ),
    (
        "autoscaling.maxReplicas: a cache that is ReadWriteOnce",
        {**model(cache=PVC), "autoscaling": {"maxReplicas": 2}},
        {**model(cache=RWX), "autoscaling": {"maxReplicas": 2}},
    ),
    (
        "periodSeconds",
        {"autoscaling": {"maxReplicas": 2, "behavior": {"scaleUp": {"policies": [{"type": "Pods", "value": 1}]}}}},
        {"autoscaling": {"maxReplicas": 2, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}}},
    ),
    ("engine.maxModelLen", {"engine": {"maxModelLen": 0}}, {"engine": {"maxModelLen": 4096}}),
    ("engine.maxModelLen", {"engine": {"maxModelLen": "big"}}, {"engine": {"maxModelLen": "auto"}}),
    (
        "engine.speculative.model is for methods",
        {"engine": {"speculative": {"method": "draft_model"}}},
        {"engine": {"speculative": {"method": "draft_model", "model": "hf://org/small"}}},
    ),
    (
        "engine.speculative.tokens has no meaning",
        {"engine": {"speculative": {"method": "none", "tokens": 4}}},
        {"engine": {"speculative": {"method": "ngram", "tokens": 4}}},
    ),
    (
        "engine.multimodal.allowedMediaDomains: names of hosts alone",
        {"engine": {"multimodal": {"allowedMediaDomains": ["https://images.example.com"]}}},
        {
            "engine": {
                "multimodal": {
                    "allowedMediaDomains": ["images.example.com"],
                    "limitPerPrompt": {"image": 0},
                    "processorOptions": {"size": {"height": 64}, "do_resize": False, "x": 0.5},
                }
            }
        },
    ),
    (
        "engine.multimodal.allowedLocalMediaPath is in no volume",
        {"engine": {"multimodal": {"allowedLocalMediaPath": "/pictures-of-others"}}, **PICTURES},
        {"engine": {"multimodal": {"allowedLocalMediaPath": "/pictures/cats"}}, **PICTURES},
    ),
    (
        "engine.multimodal.allowedLocalMediaPath: an absolute path",
        {"engine": {"multimodal": {"allowedLocalMediaPath": "/pictures/../etc"}}, **PICTURES},
        {"engine": {"multimodal": {"allowedLocalMediaPath": "/pictures"}}, **PICTURES},
    ),
    ("engine.args: --host", {"engine": {"args": ["--port=1"]}}, {"engine": {"args": ["--portable"]}}),
    (
        "engine.args: --host",
        {"engine": {"args": ["--management_port=9001"]}},
        {"engine": {"args": ["--management_portable=1"]}},
    ),
    (
        "engine.args: --host",
        {"engine": {"args": ["--served_model-name", "x"]}},
        {"engine": {"args": ["--max_model_len=64"]}},
    ),
    (
        "give value or valueFrom",
        {"engine": {"env": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}},
        {"engine": {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}},
    ),
    (
        "engine.env: OCTAVO_API_KEY",
        {"auth": {"apiKeySecretRef": {"name": "k"}}, "engine": {"env": [{"name": "OCTAVO_API_KEY", "value": "x"}]}},
        {"auth": {"apiKeySecretRef": {"name": "k"}}, "engine": {"env": [{"name": "OTHER", "value": "x"}]}},
    ),
    (
        "engine.env: HF_TOKEN",
        {**model(credentialsSecretRef={"name": "s"}), "engine": {"env": [{"name": "HF_TOKEN", "value": "x"}]}},
        {**model(), "engine": {"env": [{"name": "HF_TOKEN", "value": "x"}]}},
    ),
    (
        "engine.gpuMemoryUtilization is a percentage",
        {"engine": {"gpuMemoryUtilization": 1}},
        {"engine": {"gpuMemoryUtilization": 10}},
    ),
    (
        "engine.gpuMemoryUtilization is a percentage",
        {"engine": {"gpuMemoryUtilization": 101}},
        {"engine": {"gpuMemoryUtilization": 100}},
    ),
    (
        "engine.args: a flag and its value in one string",
        {"engine": {"args": ["--max-num-seqs 4"]}},
        {"engine": {"args": ["--max-num-seqs", "4", "--response-role=the model", "two words"]}},
    ),
    ("use service, auth", {"engine": {"args": ["--device=cuda"]}}, {"engine": {"args": ["--devices=1"]}}),
    (
        "engine.env: NVIDIA_VISIBLE_DEVICES",
        {"engine": {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}},
        {"engine": {"env": [{"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "all"}]}},
    ),
    (
        "engine.imagePolicy Follow",
        {"engine": {"image": "a:1", "imagePolicy": "Follow"}},
        {"engine": {"imagePolicy": "Follow", "imagePriority": 10}},
    ),
    ("imagePolicy", {"engine": {"imagePolicy": "Latest"}}, {"engine": {"image": "a:1", "imagePolicy": "Pinned"}}),
    ("accelerator.count", {"accelerator": {"count": 2}}, {"accelerator": {"count": 1}}),
    ("accelerator.count", {"accelerator": {"mig": "1g.10gb", "count": 2}}, {"accelerator": {"mig": "1g.10gb"}}),
    ("nodes x accelerator.count", {"parallelism": {"tensor": 2}, "accelerator": {}}, {"parallelism": {"tensor": 2}}),
    (
        "nodes x accelerator.count",
        {"parallelism": {"tensor": 8, "pipeline": 2, "nodes": 4}, "accelerator": {"count": 2}},
        {"parallelism": {"tensor": 8, "pipeline": 2, "nodes": 2}, "accelerator": {"count": 8}},
    ),
    (
        "divisible by parallelism.nodes",
        {"parallelism": {"tensor": 3, "nodes": 2}},
        {"parallelism": {"tensor": 4, "nodes": 2}},
    ),
    (
        "tensor x pipeline must be at most 48",
        {"parallelism": {"tensor": 25, "pipeline": 2}},
        {"parallelism": {"tensor": 24, "pipeline": 2}},
    ),
    ("parallelism.nodes", {"parallelism": {"nodes": 0}}, {"parallelism": {"nodes": 1}}),
    (
        "rollout.type Recreate",
        {**GROUPED, "rollout": {"type": "Recreate"}},
        {**GROUPED, "rollout": {"type": "RollingUpdate"}},
    ),
    ("rollout.minReadySeconds", {**GROUPED, "rollout": {"minReadySeconds": 5}}, {"rollout": {"minReadySeconds": 5}}),
    ("parallelism.nodes: the pods", {**GROUPED, **model(cache=PVC)}, {**GROUPED, **model(cache=RWX)}),
    (
        "scheduling.groupTopologyKey",
        {"scheduling": {"groupTopologyKey": "example.com/rack"}},
        {**GROUPED, "scheduling": {"groupTopologyKey": "example.com/rack"}},
    ),
    ("scheduling.groupTopologyKey", {**GROUPED, "scheduling": {"groupTopologyKey": "a b"}}, GROUPED),
    ("scheduling.gang", {**GROUPED, "scheduling": {"gang": "volcano"}}, {**GROUPED, "scheduling": {"gang": "none"}}),
    ("parallelism.data", {"parallelism": {"data": 0}}, {"parallelism": {"data": 1}, "accelerator": {}}),
    ("parallelism.tensor", {"parallelism": {"tensor": 0}}, {"parallelism": {"tensor": 1}, "accelerator": {}}),
    ("parallelism.tensor", {"parallelism": {"tensor": 49}}, {"parallelism": {"tensor": 48}}),
    (
        "accelerator: mig",
        {"accelerator": {"mig": "1g.10gb", "resourceName": "a.b/c"}},
        {"accelerator": {"mig": "1g.10gb"}},
    ),
    ("rollout.maxSurge and", {"rollout": {"maxSurge": 1}}, {"rollout": {"type": "RollingUpdate", "maxSurge": 1}}),
    (
        "cannot both be 0",
        {"rollout": {"type": "RollingUpdate", "maxSurge": 0, "maxUnavailable": "0%"}},
        {"rollout": {"type": "RollingUpdate", "maxSurge": 0, "maxUnavailable": "1%"}},
    ),
    (
        "maxSurge",
        {"rollout": {"type": "RollingUpdate", "maxSurge": "1"}},
        {"rollout": {"type": "RollingUpdate", "maxSurge": "10%"}},
    ),
    (
        "above rollout.minReadySeconds",
        {"rollout": {"progressDeadlineSeconds": 1000, "minReadySeconds": 1000}},
        {"rollout": {"progressDeadlineSeconds": 1001, "minReadySeconds": 1000}},
    ),
    (
        "above probes.startup.budgetSeconds",
        {"rollout": {"progressDeadlineSeconds": 600}},
        {"rollout": {"progressDeadlineSeconds": 601}},
    ),
    (
        "lifecycle.terminationGracePeriodSeconds",
        {"lifecycle": {"terminationGracePeriodSeconds": 70}},
        {"lifecycle": {"terminationGracePeriodSeconds": 71}},
    ),
    ("routing.clientIP", {"routing": {"clientIP": {}}}, {"routing": {"strategy": "clientIP", "clientIP": {}}}),
    (
        "routing.prefix needs",
        {"routing": {"prefix": {"replicas": 1}}},
        {"routing": {"strategy": "prefix", "prefix": {"replicas": 1}}},
    ),
    (
        "spec.routing.prefix.sessionHeaders[0]",
        {"routing": {"strategy": "prefix", "prefix": {"sessionHeaders": ["a b"]}}},
        {"routing": {"strategy": "prefix", "prefix": {"sessionHeaders": ["A-b"]}}},
    ),
    ("routing.strategy", {"routing": {"strategy": "magic"}}, {"routing": {"strategy": "clientIP"}}),
    ("monitoring.interval", {"monitoring": {"interval": "0s"}}, {"monitoring": {"interval": "1m"}}),
    (
        "podDisruptionBudget: give",
        {"podDisruptionBudget": {"minAvailable": 1, "maxUnavailable": 1}},
        {"podDisruptionBudget": {"minAvailable": "50%"}},
    ),
    (
        "value",
        {"podPatches": [{"op": "add", "path": "/spec/x"}]},
        {"podPatches": [{"op": "add", "path": "/spec/x", "value": {}}]},
    ),
    (
        "podPatches: move and copy",
        {"podPatches": [{"op": "move", "path": "/spec/x"}]},
        {"podPatches": [{"op": "move", "path": "/spec/x", "from": "/spec/y"}]},
    ),
    (
        "path",
        {"podPatches": [{"op": "remove", "path": "/status/x"}]},
        {"podPatches": [{"op": "remove", "path": "/spec/x"}]},
    ),
    ("size", {"shm": {"size": "lots"}}, {"shm": {"size": "1Gi"}}),
    ("size", {"shm": {"size": "500m"}}, {"shm": {"size": "500M"}}),
    (
        "resources: memory is counted in bytes",
        {"resources": {"limits": {"memory": "500m"}}},
        {"resources": {"requests": {"memory": 500, "cpu": "500m"}, "limits": {"memory": "500Mi", "cpu": 2}}},
    ),
    (
        "requests",
        {"resources": {"requests": {"cpu": "two"}}},
        {"resources": {"requests": {"cpu": 2, "memory": "1.5Gi"}}},
    ),
    ("replicas", {"replicas": -1}, {"replicas": 0}),
    (
        "resources: a request must not be above its limit",
        {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1500Mi"}}},
        {"resources": {"requests": {"memory": "1024Mi", "cpu": 8}, "limits": {"memory": "1Gi"}}},
    ),
    (
        "resources: a request must not be above its limit",
        {"resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": 1}}},
        {"resources": {"requests": {"cpu": "1000m"}, "limits": {"cpu": 1}}},
    ),
    (
        "not a quantity: write a number",
        {"resources": {"limits": {"memory": "40GB"}}},
        {"resources": {"limits": {"memory": "40G"}}},
    ),
    ("not a size: write a number", {"shm": {"size": "1GB"}}, {"shm": {"size": "1G"}}),
    (
        "not a size: write a number",
        model(cache={"mode": "pvc", "pvc": {"size": "40GB"}}),
        model(cache={"mode": "pvc", "pvc": {"size": "40Gi"}}),
    ),
    (
        "not a size: write a number",
        model(cache={"mode": "pvc", "pvc": {"size": 0}}),
        model(cache={"mode": "pvc", "pvc": {"size": 1}}),
    ),
    ("not a size: write a number", {"shm": {"size": "0"}}, {"shm": {"size": "1Mi"}}),
    ("not a size: write a number", model(cache={"sizeLimit": "-1Gi"}), model(cache={"sizeLimit": "1Gi"})),
    (
        "replicas must not be above autoscaling.maxReplicas",
        {"replicas": 9, "autoscaling": {"maxReplicas": 2}},
        {"replicas": 2, "autoscaling": {"maxReplicas": 2}},
    ),
    (
        "rollout.type RollingUpdate needs a second pod",
        {**model(cache=PVC), "rollout": {"type": "RollingUpdate"}},
        {**model(cache=RWX), "rollout": {"type": "RollingUpdate"}},
    ),
    (
        "podDisruptionBudget.minAvailable must be below replicas",
        {"podDisruptionBudget": {"minAvailable": 1}},
        {"podDisruptionBudget": {"minAvailable": 1}, "replicas": 2},
    ),
    (
        "podDisruptionBudget.minAvailable must be below replicas",
        {"podDisruptionBudget": {"minAvailable": "100%"}, "replicas": 4},
        {"podDisruptionBudget": {"minAvailable": 1}, "suspend": True},
    ),
    (
        "podDisruptionBudget.minAvailable must be below replicas",
        {"podDisruptionBudget": {"minAvailable": 2}, "autoscaling": {"minReplicas": 2, "maxReplicas": 9}},
        {"podDisruptionBudget": {"minAvailable": 1}, "autoscaling": {"minReplicas": 2, "maxReplicas": 9}},
    ),
    (
        "podLabels: octavo.dev/",
        {"podLabels": {"octavo.dev/llmdeployment": "other"}},
        {"podLabels": {"team": "research", "app.kubernetes.io/version": "1"}},
    ),
    ("podLabels: octavo.dev/", {"podLabels": {"app.kubernetes.io/component": "x"}}, {"podAnnotations": {"a/b": "x"}}),
    (
        "volumes: the names cache",
        {"volumes": [{"name": "tmp", "emptyDir": {}}]},
        {"volumes": [{"name": "tmp2", "csi": {"driver": "x", "volumeAttributes": {"a": "b"}}}]},
    ),
    (
        "volumeMounts: /cache, /tmp",
        {"volumeMounts": [{"name": "x", "mountPath": "/cache"}]},
        {"volumeMounts": [{"name": "x", "mountPath": "/cache/lora", "subPath": "a", "readOnly": True}]},
    ),
    ("envFrom", {"envFrom": [{}]}, {"envFrom": [{"secretRef": {"name": "a", "optional": True}, "prefix": "X_"}]}),
    (
        "foreignFields",
        {"foreignFields": [{"kind": "Secret", "path": "/spec/x"}]},
        {"foreignFields": [{"kind": "Deployment", "path": "/spec/template/spec/containers/engine/env/STAKATER_*"}]},
    ),
    (
        "service.loadBalancerClass needs",
        {"service": {"loadBalancerClass": "a.b/c"}},
        {"service": {"type": "LoadBalancer", "loadBalancerClass": "a.b/c"}},
    ),
    (
        "service.externalTrafficPolicy needs",
        {"service": {"externalTrafficPolicy": "Local"}},
        {"service": {"type": "NodePort", "externalTrafficPolicy": "Local"}},
    ),
    (
        "unknown field",
        {"scheduling": {"affinity": {"nodeAffinty": {}}}},
        {"scheduling": {"affinity": {"nodeAffinity": {}}}},
    ),
]
