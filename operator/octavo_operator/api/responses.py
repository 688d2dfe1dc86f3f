# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""responses: where stored responses and conversations are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo_operator.api.common import KEY, SECRET_NAME
from octavo_operator.api.schema import Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class AddressSecret:
    """`spec.responses.secretRef`."""

    name: str = spec_field("Name of a Secret in the same namespace.", **SECRET_NAME)
    key: str = spec_field(
        "Key of the Secret that holds the address, as postgresql://user:password@host/database.", default="url", **KEY
    )


@dataclass(frozen=True, kw_only=True)
class Responses:
    """`spec.responses`: what /v1/responses and /v1/conversations store."""

    RULES: ClassVar = (
        Rule(
            "(self.store == 'Postgres') == has(self.secretRef)",
            "responses: store Postgres needs responses.secretRef, a Secret with the database's address, and secretRef "
            "needs store Postgres",
        ),
        Rule(
            "self.store == 'Sqlite' || !has(self.existingClaim)",
            "responses.existingClaim holds the file of store Sqlite; set that, or remove existingClaim",
        ),
    )
    store: str = spec_field(
        "Where responses are kept. Memory: until the engine ends. Sqlite: in a file of each replica, on existingClaim, "
        "or until the pod ends. Postgres: in a database that all replicas share.",
        default="Sqlite",
        enum=["Memory", "Sqlite", "Postgres"],
    )
    secret_ref: AddressSecret | None = spec_field("Secret with the address of the PostgreSQL database.", default=None)
    existing_claim: str | None = spec_field(
        "Name of an existing PersistentVolumeClaim for the file of store Sqlite, which outlives the pod then. One "
        "replica uses it, and its old pod stops before the new one starts.",
        default=None,
        **SECRET_NAME,
    )
    ttl: int | None = spec_field(
        "Seconds after its last change when a response is deleted; 0: never. Default: 2592000, 30 days.",
        default=None,
        minimum=0,
        maximum=3155760000,
    )
