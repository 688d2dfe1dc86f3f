"""`python -m octavo_operator.selftest`, run by `helm test`: the operator's RBAC suffices, and a replica leads."""

from __future__ import annotations

import asyncio
import sys
import time

from octavo_operator.api import KIND
from octavo_operator.claims.claims import claimant
from octavo_operator.config import ConfigError, OperatorConfig
from octavo_operator.kube.client import TRANSPORT_ERRORS, ApiError, KubeClient
from octavo_operator.kube.credentials import CredentialsError
from octavo_operator.times import parse_time


async def check(config: OperatorConfig) -> str:
    """One line with the result. Raises ApiError, TRANSPORT_ERRORS or RuntimeError."""
    client = KubeClient.connect()
    try:
        count = 0
        for namespace in config.watch_namespaces or (None,):
            await client.call(
                "GET",
                f"/apis/octavo.dev/v1alpha1{f'/namespaces/{namespace}' if namespace else ''}/llmdeployments?limit=1",
            )
            found = await client.list(KIND, namespace, config.selector)
            count += sum(claimant(one) in (None, config.operator_id) for one in found)
        lease = await client.get("Lease", config.namespace, config.lease_name)
        spec = (lease or {}).get("spec") or {}
        if not spec.get("holderIdentity"):
            raise RuntimeError(
                f"no operator holds the Lease {config.namespace}/{config.lease_name}: is its pod running?"
            )
        age = time.time() - parse_time(spec["renewTime"])
        if age > 2 * spec["leaseDurationSeconds"]:
            raise RuntimeError(f"{spec['holderIdentity']} renewed its Lease {age:.0f} s ago; see its logs")
        return f"{spec['holderIdentity']} is the leader and serves {count} LLMDeployments"
    finally:
        await client.close()


def main() -> int:
    """Prints the result; exit status 1 on failure."""
    try:
        print(asyncio.run(check(OperatorConfig.from_environment())))
    except (ApiError, CredentialsError, ConfigError, RuntimeError, *TRANSPORT_ERRORS) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
