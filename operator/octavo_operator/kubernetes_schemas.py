"""Schemas of the parts of Kubernetes' own API that a spec passes on as they are, written small: checked at
`kubectl apply`, yet a hundredth of the size of an embedded PodTemplateSpec."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def obj(description: str, required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    out: Schema = {"type": "object", "properties": properties}
    if description:
        out["description"] = description
    if required:
        out["required"] = list(required)
    return out


def text(description: str, *enum: str, limit: int = 253) -> Schema:
    out: Schema = {"type": "string", "description": description, "maxLength": limit}
    if enum:
        out = {"type": "string", "description": description, "enum": list(enum)}
    return out


def listing(description: str, items: Schema, limit: int = 32) -> Schema:
    return {"description": description, "type": "array", "maxItems": limit, "items": items}


def integer(description: str, **limits: int) -> Schema:
    return {"description": description, "type": "integer", **limits}


def strings(description: str) -> Schema:
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
    value=text("Its value.", limit=32768),
    valueFrom={
        **obj(
            "Where its value comes from instead.",
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
    operator=text("How key and value are compared.", "Exists", "Equal"),
    value=text("Value of the taint.", limit=63),
    effect=text("Effect of the taint; absent: every effect.", "NoSchedule", "PreferNoSchedule", "NoExecute"),
    tolerationSeconds=integer("How long a NoExecute taint is tolerated."),
)


def _requirement(*operators: str) -> Schema:
    return obj(
        "",
        ("key", "operator"),
        key=text("Key of the label.", limit=317),
        operator=text("How the label is compared.", *operators),
        values=strings("What it is compared with; none for Exists and DoesNotExist."),
    )


_SETS = ("In", "NotIn", "Exists", "DoesNotExist")
_REQUIREMENT = _requirement(*_SETS, "Gt", "Lt")
LABEL_SELECTOR = obj(
    "Which objects, by their labels.",
    matchLabels={
        "description": "Labels that must all be there.",
        "type": "object",
        "maxProperties": 32,
        "additionalProperties": {"type": "string", "maxLength": 63},
    },
    matchExpressions=listing("Requirements that must all hold.", _requirement(*_SETS)),
)
_NODE_TERM = obj(
    "Which nodes.",
    matchExpressions=listing("Requirements on the node's labels.", _REQUIREMENT),
    matchFields=listing("Requirements on the node's fields.", _REQUIREMENT),
)
_POD_TERM = obj(
    "Which pods, and how near.",
    ("topologyKey",),
    labelSelector=LABEL_SELECTOR,
    namespaceSelector=LABEL_SELECTOR,
    namespaces=strings("Namespaces of those pods; absent: this one."),
    topologyKey=text("Label of nodes that make up one place, such as kubernetes.io/hostname."),
)
_WEIGHT = integer("1 to 100.", minimum=1, maximum=100)


def _pod_affinity(description: str) -> Schema:
    weighted = obj("", ("weight", "podAffinityTerm"), weight=_WEIGHT, podAffinityTerm=_POD_TERM)
    return obj(
        description,
        requiredDuringSchedulingIgnoredDuringExecution=listing("Must hold.", _POD_TERM, 16),
        preferredDuringSchedulingIgnoredDuringExecution=listing("Should hold.", weighted, 16),
    )


AFFINITY = obj(
    "",
    nodeAffinity=obj(
        "Which nodes.",
        requiredDuringSchedulingIgnoredDuringExecution=obj(
            "Must hold.", ("nodeSelectorTerms",), nodeSelectorTerms=listing("One of these must match.", _NODE_TERM, 16)
        ),
        preferredDuringSchedulingIgnoredDuringExecution=listing(
            "Should hold.", obj("", ("weight", "preference"), weight=_WEIGHT, preference=_NODE_TERM), 16
        ),
    ),
    podAffinity=_pod_affinity("Near which pods."),
    podAntiAffinity=_pod_affinity("Away from which pods."),
)

TOPOLOGY_SPREAD = obj(
    "",
    ("maxSkew", "topologyKey", "whenUnsatisfiable"),
    maxSkew=integer("How uneven the spread may be.", minimum=1),
    topologyKey=text("Label of nodes that make up one place."),
    whenUnsatisfiable=text("What to do when it cannot be kept.", "DoNotSchedule", "ScheduleAnyway"),
    minDomains=integer("How many places there must be at least.", minimum=1),
    nodeAffinityPolicy=text("Whether the pod's node affinity counts.", "Honor", "Ignore"),
    nodeTaintsPolicy=text("Whether the nodes' taints count.", "Honor", "Ignore"),
)

_PORTS = listing(
    "Ports; absent: all.",
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
        "Addresses.",
        ("cidr",),
        cidr=text("Such as 10.0.0.0/8.", limit=64),
        **{"except": strings("Ranges of it to leave out.")},
    ),
)
EGRESS_RULE = obj("", to=listing("Where to; absent: anywhere.", NETWORK_PEER), ports=_PORTS)


_SCALING_POLICY = obj(
    "",
    ("type", "value", "periodSeconds"),
    type=text("What is counted.", "Pods", "Percent"),
    value=integer("How many may come or go in a period.", minimum=1),
    periodSeconds=integer("The period.", minimum=1, maximum=1800),
)


def _scaling_rules(description: str, window: str) -> Schema:
    tolerance = text("How far from the target the load may be before anything is done, such as 0.1.", limit=16)
    return obj(
        description,
        stabilizationWindowSeconds=integer(window, minimum=0, maximum=3600),
        selectPolicy=text("Which of several policies decides.", "Max", "Min", "Disabled"),
        policies=listing("How fast; absent: the autoscaler's own.", _SCALING_POLICY, 10),
        tolerance={**tolerance, "pattern": r"^(0?\.[0-9]+|[0-9]+m|0|1)$"},
    )


SCALING_BEHAVIOR = obj(
    "",
    scaleUp=_scaling_rules("When there is too much load.", "The load must last for so long; absent: 0."),
    scaleDown=_scaling_rules("When there is too little.", "The load must be gone for so long; absent: 300."),
)
