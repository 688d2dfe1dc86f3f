"""Environment variables: found in the source, described here. A variable without a description fails."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from generate import markdown
from generate.source import KERNELS, OPERATOR, SERVER, trees

_NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
# Names of os.sysconf and of Ray, and variables that are set for processes of ours.
_NOT_READ = re.compile(r"SC_.*|MALLOC_ARENA_MAX|TRANSFORMERS_VERBOSITY|RAY_(USAGE|AUTH|TLS)_.*|STRICT_SPREAD")

# name -> (default, meaning)
ENGINE = {
    "OCTAVO_API_KEY": ("none", "API key that requests must present, where `--api-key` gives none."),
    "VLLM_API_KEY": ("none", "As OCTAVO_API_KEY, which comes first."),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": ("none", "1 or true: `--allow-runtime-lora-updating`, with `--enable-lora`."),
    "OCTAVO_ALLOW_LONG_MAX_MODEL_LEN": (
        "none",
        "1 or true: `--max-model-len` may be above the model's positions; longer texts may be answered with nonsense.",
    ),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": ("none", "As OCTAVO_ALLOW_LONG_MAX_MODEL_LEN."),
    "OCTAVO_RESPONSES_STORE": ("none", "As `--responses-store`, which comes first."),
    "OCTAVO_SEAL_KEY": ("none", "As `--seal-key`, which comes first."),
    "OCTAVO_REPLICA_ADDRESS": ("none", "As `--replica-address`, which comes first; the operator sets it."),
    "OCTAVO_CLUSTER_TOKEN": ("none", "Secret by which the nodes of an engine know each other (`--nnodes`)."),
    "RAY_ADDRESS": ("this machine's cluster", "Ray cluster of `--distributed-executor-backend ray`."),
    "OCTAVO_CACHE": (
        "`$XDG_CACHE_HOME/octavo`",
        "Folder for models that are not from Hugging Face, and for what is derived from files; after `--download-dir`.",
    ),
    "OCTAVO_CACHE_SEED": ("none", "Read-only folder with files as in OCTAVO_CACHE; the engine's image has one."),
    "OCTAVO_HTTP_TOKEN": ("none", "Bearer token for models from `https://` and `gs://` addresses."),
    "AWS_ACCESS_KEY_ID": ("none", "Key for models from `s3://`, or HMAC key for those from `gs://`."),
    "AWS_SECRET_ACCESS_KEY": ("none", "Secret of AWS_ACCESS_KEY_ID."),
    "AWS_SESSION_TOKEN": ("none", "Session token of temporary keys."),
    "AWS_REGION": ("us-east-1", "Region of the buckets of `s3://`."),
    "AWS_DEFAULT_REGION": ("none", "Used if AWS_REGION is not set."),
    "AWS_ENDPOINT_URL": ("AWS", "Address of another store that speaks S3's protocol, such as MinIO."),
    "AWS_ENDPOINT_URL_S3": ("none", "Takes precedence over AWS_ENDPOINT_URL."),
    "AWS_WEB_IDENTITY_TOKEN_FILE": ("none", "Token of the pod's role (IRSA), for `s3://` without keys."),
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": ("none", "Source of the pod's role (EKS), for `s3://` without keys."),
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": ("none", "Source of the task's role (ECS), for `s3://` without keys."),
    "GOOGLE_APPLICATION_CREDENTIALS": ("none", "Credentials file of a service account, for `gs://` without keys."),
    "GOOGLE_SERVICE_ACCOUNT": ("none", "Path of a service account's key file, for `gs://` without keys."),
    "GOOGLE_SERVICE_ACCOUNT_KEY": ("none", "Content of such a key file."),
    "OCTAVO_CPU_ISA": (
        "the best that the CPU has and the system permits",
        "Instruction set of the CPU kernels, such as `avx2`; one that cannot run here is refused.",
    ),
    "OCTAVO_KERNEL_BACKEND": ("auto", "As `--attention-backend`, which comes first."),
    "OCTAVO_GPU_OFF": (
        "none",
        "Parts of the work on GPUs to turn off, with commas, to find one that fails: `pdl` (kernels that start early), "
        "`small-linear`, `prompt-graphs`, `captured-sampler`, `exchange` (NCCL adds instead of kernels).",
    ),
    "OCTAVO_FULL_TORCH_IMPORT": ("0", "1: import all of torch without a GPU, too (250 MB more)."),
    "XDG_CACHE_HOME": ("`~/.cache`", "Parent of all caches."),
    "XDG_STATE_HOME": ("`~/.local/state`", "Parent of the folder with stored responses: `--responses-store`."),
    "HF_HOME": ("`$XDG_CACHE_HOME/huggingface`", "Cache of Hugging Face's tools, which is shared."),
    "HF_HUB_CACHE": ("`$HF_HOME/hub`", "Folder for models from Hugging Face."),
    "HUGGINGFACE_HUB_CACHE": ("none", "HF_HUB_CACHE by its old name."),
    "HF_TOKEN": ("the one in the token file", "Access token of Hugging Face, for gated and private models."),
    "HUGGING_FACE_HUB_TOKEN": ("none", "HF_TOKEN by its old name."),
    "HF_TOKEN_PATH": ("`$HF_HOME/token`", "File with the access token."),
    "HF_ENDPOINT": ("`https://huggingface.co`", "Address of the hub, or of a mirror."),
    "HF_HUB_OFFLINE": ("off", "1: only models that were fetched before; nothing is asked of the network."),
    "TRANSFORMERS_OFFLINE": ("off", "As HF_HUB_OFFLINE."),
    "HF_HUB_ETAG_TIMEOUT": ("10", "Seconds to wait for the hub's answer about a file."),
    "HF_HUB_DOWNLOAD_TIMEOUT": ("10", "Seconds to wait for the next bytes of a download."),
    "OMP_NUM_THREADS": ("as the CPU affinity and the cgroup allow", "Maximum number of threads that compute on a CPU."),
    "GOMP_SPINCOUNT": ("1000", "How long an idle OpenMP thread spins before it sleeps."),
    "NCCL_SOCKET_IFNAME": ("lo", "Network interface by which NCCL sets itself up between the GPUs of a machine."),
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": ("1", "0: torch may set up multicast between GPUs, which is not used."),
    "OTEL_SERVICE_NAME": ("octavo", "Name of the service in traces."),
    "OPENAI_API_KEY": ("none", "Key that `octavo chat --url`, `octavo dashboard --url` and `octavo bench serve` send."),
    "TMPDIR": ("`/tmp`", "Folder for temporary files, of which the engine needs a few hundred kilobytes."),
    "NO_COLOR": ("none", "Set: `octavo chat` writes without colours."),
    "TERM": ("", "`dumb`: `octavo chat` writes without colours."),
    "CC": ("cc, gcc or clang", "C compiler for the CPU kernels."),
    "LD_BIND_NOW": ("none", "Set: torch is loaded with NVIDIA's libraries, where there is no GPU, too."),
}
OPERATOR_VARIABLES = {
    "OCTAVO_ENGINE_IMAGE": ("the release's image", "Engine image of LLMDeployments that name none: `engine.image`."),
    "OCTAVO_ROUTER_IMAGE": ("the release's image", "Image of the routers: `router.image`."),
    "OCTAVO_IMAGE_PULL_SECRETS": ("none", "Secrets for pulling it: `engine.imagePullSecrets`."),
    "OCTAVO_DEFAULTS": ("none", "What specs leave empty, as JSON: `defaults`."),
    "OCTAVO_IMAGE_POLICY": ("Pinned", "Image policy of specs that name none: `engine.imagePolicy`."),
    "OCTAVO_IMAGE_ROLLOUTS": ("1", "Maximum number of simultaneous rollouts of a new image: `engine.imageRollouts`."),
    "OCTAVO_ALLOW_PRIVILEGED_PODS": ("false", "`allowPrivilegedPods`."),
    "OCTAVO_ALLOW_SNIPPET_ANNOTATIONS": ("false", "`allowSnippetAnnotations`."),
    "OCTAVO_NODE_CACHE_PATHS": ("none", "Folders of nodes that may hold models: `cache.nodePaths`."),
    "OCTAVO_CLUSTER_ASSIGNED_IDS": ("false", "`clusterAssignedIds`."),
    "OCTAVO_MANAGEMENT_NAMESPACES": ("none", "Namespaces whose pods may read metrics: `monitoring.namespaces`."),
    "OCTAVO_CLUSTER_DOMAIN": ("cluster.local", "`clusterDomain`."),
    "OCTAVO_WATCH_NAMESPACES": ("all", "Namespaces to serve: `watchNamespaces`."),
    "OCTAVO_SELECTOR": ("all", "Labels of the LLMDeployments to serve: `selector`."),
    "OCTAVO_LEASE_NAME": ("octavo-operator", "Name of the Lease; the release's full name in the chart."),
    "OCTAVO_LEASE_SECONDS": ("15", "Duration of the Lease: `leaseSeconds`."),
    "OCTAVO_WORKERS": ("8", "LLMDeployments that are reconciled at the same time: `workers`."),
    "OCTAVO_RESYNC_SECONDS": ("300", "Seconds between complete listings: `resyncSeconds`."),
    "OCTAVO_WATCH_SECONDS": ("70", "Seconds of silence after which a watch is restarted."),
    "OCTAVO_HEALTH_PORT": ("8080", "Port of health and metrics."),
    "OCTAVO_METRICS_API": ("false", "Serve external.metrics.k8s.io: `metricsApi.enabled`."),
    "OCTAVO_METRICS_PORT": ("8443", "Port of external.metrics.k8s.io: `metricsApi.port`."),
    "OCTAVO_METRICS_SERVICE": ("octavo-operator-metrics", "Service of that port."),
    "OCTAVO_METRICS_OWNER": ("none", "ClusterRole that owns the APIService."),
    "OCTAVO_METRICS_CERTIFICATE_SECONDS": ("86400", "Lifetime of the operator's certificate."),
    "OCTAVO_LOG_LEVEL": ("info", "`log.level`."),
    "OCTAVO_LOG_FORMAT": ("text", "`log.format`."),
    "POD_NAME": ("", "Name of the operator's pod; holder of the Lease."),
    "POD_NAMESPACE": ("default", "Namespace of the operator and its Lease."),
    "POD_IP": ("127.0.0.1", "Address at which the API server reaches the operator."),
    "KUBECONFIG": ("`~/.kube/config`", "Kubeconfig, where the operator runs outside of the cluster."),
    "KUBERNETES_SERVICE_HOST": ("", "Address of the API server in pods, set by Kubernetes."),
    "KUBERNETES_SERVICE_PORT": ("443", "Its port."),
}


def page() -> str:
    return markdown.page(
        "Environment variables",
        "Flags and fields come first; a variable counts where they say nothing. Libraries read others: `HTTPS_PROXY`, "
        "`NO_PROXY` and `SSL_CERT_FILE` for downloads, `PIP_INDEX_URL` for models from Python packages, "
        "`OTEL_EXPORTER_OTLP_HEADERS` and its kin for traces.",
        "## Engine, server and commands",
        _table(ENGINE, (SERVER, KERNELS)),
        "## Operator",
        "Set by the chart; the value that sets a variable is named.",
        _table(OPERATOR_VARIABLES, (OPERATOR,)),
    )


def _table(described: dict[str, tuple[str, str]], packages: tuple[str, ...]) -> str:
    found = {name for package in packages for name in variables(package)}
    if found != set(described):
        raise LookupError(
            f"docs/generate/environment.py describes what is not read: {sorted(set(described) - found)}; "
            f"and does not describe {sorted(found - set(described))}"
        )
    rows = [(f"`{name}`", described[name][0], described[name][1]) for name in sorted(found)]
    return markdown.table(("variable", "default", "meaning"), rows)


def variables(package: str) -> Iterator[str]:
    """Names of variables that the package's modules read: what is looked up in `os.environ`, and, in modules that
    do so, every string that is written like one (a lookup may go through a loop or a function)."""
    for tree in trees(package).values():
        yield from _variables(tree)


def _variables(tree: ast.Module) -> Iterator[str]:
    nodes = list(ast.walk(tree))
    if not any(isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in nodes):
        return
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _NAME.fullmatch(node.value) and not _NOT_READ.fullmatch(node.value):
                yield node.value
        elif isinstance(node, ast.Call) and _is_environ(getattr(node.func, "value", None)) and node.args:
            yield from _text(node.args[0])
        elif isinstance(node, ast.Subscript) and _is_environ(node.value):
            yield from _text(node.slice)


def _is_environ(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def _text(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
