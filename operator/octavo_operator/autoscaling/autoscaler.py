"""The parts of autoscaling put together, for __main__.py and controller.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from octavo_operator.api import LLMDeployment
from octavo_operator.autoscaling.condition import Scaling
from octavo_operator.autoscaling.load_reader import Reader
from octavo_operator.autoscaling.metrics_api import MetricsApi, queue_depth_route
from octavo_operator.autoscaling.registration import Registration
from octavo_operator.config import OperatorConfig
from octavo_operator.kube.client import Cluster
from octavo_operator.kube.lease import LeaseHolder
from octavo_operator.kube.store import Key, Store


class Autoscaler:
    """`look_at` is called with LLMDeployments of which there is something new to say."""

    def __init__(
        self,
        cluster: Cluster,
        config: OperatorConfig,
        store: Store,
        lease: LeaseHolder,
        look_at: Callable[[Key], None],
    ) -> None:
        self._leading, self._look_at = lease.leading, look_at
        self.reader = Reader(store, look_at, operator=config.operator_id)
        self._api = MetricsApi(cluster, store, self.reader, lease.leading)
        self._registration = Registration(
            cluster, config, self._api, self._providers, self._look_at_all, lambda: lease.is_held
        )

    def routes(self) -> list[web.RouteDef]:
        """For the plain HTTP port."""
        return [queue_depth_route(self.reader, self._leading)]

    def scaling(self, deployment: LLMDeployment) -> Scaling:
        """How it stands, as far as it is ours."""
        autoscaling = deployment.spec.autoscaling
        if autoscaling is None:
            return Scaling()
        ours = self._registration.problem if autoscaling.provider == "hpa" else None
        key = (deployment.namespace, deployment.name)
        return Scaling(ours or self.reader.problem(key), self.reader.capacity(key), self.reader.needed(key))

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(self._registration.keep(self._leading), self.reader.keep_reading(self._leading))

    async def withdraw(self) -> None:
        """Before the Lease is given back."""
        await self._registration.withdraw()

    async def close(self) -> None:
        await self._api.close()
        await self.reader.close()

    def _providers(self) -> frozenset[str]:
        return frozenset(one.spec.autoscaling.provider for one in self.reader.scaled() if one.spec.autoscaling)

    def _look_at_all(self) -> None:
        for one in self.reader.scaled():
            self._look_at((one.namespace, one.name))
