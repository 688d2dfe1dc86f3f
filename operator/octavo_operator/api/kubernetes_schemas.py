"""Abridged schemas of parts of Kubernetes' own API that a spec passes on unchanged: `kubectl apply` validates them, at
a hundredth of the size of an embedded PodTemplateSpec."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def obj(description: str, required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """An object."""
    out: Schema = {"type": "object", "properties": properties}
    if description:
        out["description"] = description
    if required:
        out["required"] = list(required)
    return out


def text(description: str, *enum: str, limit: int = 253) -> Schema:
    """A string of at most `limit` characters, or one of `enum`."""
    out: Schema = {"type": "string", "description": description, "maxLength": limit}
    if enum:
        out = {"type": "string", "description": description, "enum": list(enum)}
    return out


def listing(description: str, items: Schema, limit: int = 32) -> Schema:
    """A list of at most `limit` items."""
    return {"description": description, "type": "array", "maxItems": limit, "items": items}


def integer(description: str, **limits: int) -> Schema:
    """An integer; `limits`: minimum, maximum."""
    return {"description": description, "type": "integer", **limits}


def strings(description: str) -> Schema:
    """A list of strings."""
    return listing(description, {"type": "string", "maxLength": 253}, 64)


def _key_in(description: str, name: str) -> Schema:
    return obj(
        description,
        ("name", "key"),
        name=text(f"Name of the {name}."),
        key=text(f"Key in the {name}."),
        optional={"description": f"Start without it when the {name} or the key is missing.", "type": "boolean"},
    )


ENV_VAR = obj(
    "",
    ("name",),
    name={
        "description": "Name of the variable.",
        "type": "string",
        "maxLength": 253,
        "pattern": "^[-._a-zA-Z][-._a-zA-Z0-9]*$",
    },
    value=text("Value.", limit=32768),
    valueFrom={
        **obj(
            "Source of the value.",
            secretKeyRef=_key_in("A key of a Secret in this namespace.", "Secret"),
            configMapKeyRef=_key_in("A key of a ConfigMap in this namespace.", "ConfigMap"),
            fieldRef=obj(
                "A field of the pod.", ("fieldPath",), fieldPath=text("Such as metadata.name or status.podIP.")
            ),
        ),
        "minProperties": 1,
        "maxProperties": 1,
    },
)
ENV_VAR["x-kubernetes-validations"] = [
    {"rule": "!(has(self.value) && has(self.valueFrom))", "message": "env: give value or valueFrom, not both"}
]

TOLERATION = obj(
    "",
    key=text("Key of the taint; empty with operator Exists tolerates every taint.", limit=317),
    operator=text("Operator.", "Exists", "Equal"),
    value=text("Value of the taint.", limit=63),
    effect=text("Effect of the taint. Default: all effects.", "NoSchedule", "PreferNoSchedule", "NoExecute"),
    tolerationSeconds=integer("Seconds that a NoExecute taint is tolerated."),
)


def _requirement(*operators: str) -> Schema:
    return obj(
        "",
        ("key", "operator"),
        key=text("Key of the label.", limit=317),
        operator=text("Operator.", *operators),
        values=strings("Values; none for Exists and DoesNotExist."),
    )


_SETS = ("In", "NotIn", "Exists", "DoesNotExist")
_REQUIREMENT = _requirement(*_SETS, "Gt", "Lt")
LABEL_SELECTOR = obj(
    "Label selector.",
    matchLabels={
        "description": "Required labels.",
        "type": "object",
        "maxProperties": 32,
        "additionalProperties": {"type": "string", "maxLength": 63},
    },
    matchExpressions=listing("Requirements, all of which must be met.", _requirement(*_SETS)),
)
_NODE_TERM = obj(
    "Node selector term.",
    matchExpressions=listing("Requirements on the node's labels.", _REQUIREMENT),
    matchFields=listing("Requirements on the node's fields.", _REQUIREMENT),
)
_POD_TERM = obj(
    "Pod affinity term.",
    ("topologyKey",),
    labelSelector=LABEL_SELECTOR,
    namespaceSelector=LABEL_SELECTOR,
    namespaces=strings("Namespaces of those pods. Default: this one."),
    topologyKey=text("Node label of the topology domain, such as kubernetes.io/hostname."),
)
_WEIGHT = integer("Weight, 1 to 100.", minimum=1, maximum=100)


def _pod_affinity(description: str) -> Schema:
    weighted = obj("", ("weight", "podAffinityTerm"), weight=_WEIGHT, podAffinityTerm=_POD_TERM)
    return obj(
        description,
        requiredDuringSchedulingIgnoredDuringExecution=listing("Required terms.", _POD_TERM, 16),
        preferredDuringSchedulingIgnoredDuringExecution=listing("Preferred terms.", weighted, 16),
    )


AFFINITY = obj(
    "",
    nodeAffinity=obj(
        "Affinity to nodes.",
        requiredDuringSchedulingIgnoredDuringExecution=obj(
            "Required terms.",
            ("nodeSelectorTerms",),
            nodeSelectorTerms=listing("Terms, of which one must match.", _NODE_TERM, 16),
        ),
        preferredDuringSchedulingIgnoredDuringExecution=listing(
            "Preferred terms.", obj("", ("weight", "preference"), weight=_WEIGHT, preference=_NODE_TERM), 16
        ),
    ),
    podAffinity=_pod_affinity("Affinity to pods."),
    podAntiAffinity=_pod_affinity("Anti-affinity to pods."),
)

TOPOLOGY_SPREAD = obj(
    "",
    ("maxSkew", "topologyKey", "whenUnsatisfiable"),
    maxSkew=integer("Maximum difference between topology domains.", minimum=1),
    topologyKey=text("Node label of the topology domain."),
    whenUnsatisfiable=text("Behaviour when the constraint cannot be met.", "DoNotSchedule", "ScheduleAnyway"),
    minDomains=integer("Minimum number of topology domains.", minimum=1),
    nodeAffinityPolicy=text("Whether node affinity is honoured.", "Honor", "Ignore"),
    nodeTaintsPolicy=text("Whether taints are honoured.", "Honor", "Ignore"),
)

_PORTS = listing(
    "Ports. Default: all.",
    obj(
        "",
        protocol=text("Protocol.", "TCP", "UDP", "SCTP"),
        port={"description": "Number or name.", "x-kubernetes-int-or-string": True},
        endPort=integer("Last port of a range.", minimum=1, maximum=65535),
    ),
)
NETWORK_PEER = obj(
    "",
    podSelector=LABEL_SELECTOR,
    namespaceSelector=LABEL_SELECTOR,
    ipBlock=obj(
        "IP block.", ("cidr",), cidr=text("Such as 10.0.0.0/8.", limit=64), **{"except": strings("Excluded ranges.")}
    ),
)
EGRESS_RULE = obj("", to=listing("Destinations. Default: all.", NETWORK_PEER), ports=_PORTS)


_SCALING_POLICY = obj(
    "",
    ("type", "value", "periodSeconds"),
    type=text("Unit of value.", "Pods", "Percent"),
    value=integer("Maximum change per period.", minimum=1),
    periodSeconds=integer("Period in seconds.", minimum=1, maximum=1800),
)


def _scaling_rules(description: str, window: str) -> Schema:
    tolerance = text("Tolerated deviation from the target, such as 0.1.", limit=16)
    return obj(
        description,
        stabilizationWindowSeconds=integer(window, minimum=0, maximum=3600),
        selectPolicy=text("Policy that decides when there are several.", "Max", "Min", "Disabled"),
        policies=listing("Scaling policies. Default: the autoscaler's.", _SCALING_POLICY, 10),
        tolerance={**tolerance, "pattern": r"^(0?\.[0-9]+|[0-9]+m|0|1)$"},
    )


SCALING_BEHAVIOR = obj(
    "",
    scaleUp=_scaling_rules("Scaling up.", "Stabilization window in seconds. Default: 0."),
    scaleDown=_scaling_rules("Scaling down.", "Stabilization window in seconds. Default: 300."),
)
