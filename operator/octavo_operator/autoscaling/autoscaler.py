"""Autoscaling as a whole, for __main__.py and controller.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from octavo_operator.api import LLMDeployment
from octavo_operator.autoscaling.condition import Scaling
from octavo_operator.autoscaling.load_reader import LoadReader
from octavo_operator.autoscaling.metrics_api import MetricsApi, queue_depth_route
from octavo_operator.autoscaling.registration import Registration
from octavo_operator.config import OperatorConfig
from octavo_operator.kube.client import KubeClient
from octavo_operator.kube.lease import LeaderElector
from octavo_operator.kube.store import Key, Store


class Autoscaler:
    """`requeue` is called with LLMDeployments whose status may change."""

    def __init__(
        self,
        client: KubeClient,
        config: OperatorConfig,
        store: Store,
        lease: LeaderElector,
        requeue: Callable[[Key], None],
    ) -> None:
        self._leading, self._requeue = lease.leading, requeue
        self.reader = LoadReader(store, requeue, operator=config.operator_id)
        self._api = MetricsApi(client, store, self.reader, lease.leading)
        self._registration = Registration(
            client, config, self._api, self._providers, self._requeue_all, lambda: lease.is_held
        )

    def routes(self) -> list[web.RouteDef]:
        """Routes for the operator's HTTP port."""
        return [queue_depth_route(self.reader, self._leading)]

    def scaling(self, deployment: LLMDeployment) -> Scaling:
        """Return what the operator knows about the scaling of an LLMDeployment."""
        autoscaling = deployment.spec.autoscaling
        if autoscaling is None:
            return Scaling()
        ours = self._registration.problem if autoscaling.provider == "hpa" else None
        key = (deployment.namespace, deployment.name)
        return Scaling(ours or self.reader.problem(key), self.reader.capacity(key), self.reader.needed(key))

    async def run(self) -> None:
        """Runs until cancelled."""
        await asyncio.gather(self._registration.run(self._leading), self.reader.run(self._leading))

    async def unregister(self) -> None:
        """Delete the registration. Call this before the Lease is released."""
        await self._registration.unregister()

    async def close(self) -> None:
        """Closes servers and connections."""
        await self._api.close()
        await self.reader.close()

    def _providers(self) -> frozenset[str]:
        return frozenset(one.spec.autoscaling.provider for one in self.reader.scaled() if one.spec.autoscaling)

    def _requeue_all(self) -> None:
        for one in self.reader.scaled():
            self._requeue((one.namespace, one.name))
