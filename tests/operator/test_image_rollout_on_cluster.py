"""A new engine image on a real cluster: a broken one stops at the first that takes it, and the way back is the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from clusterrig import settings
from clusterrig.fixtures import Cluster, eventually
from support.llmd import toy

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

IMAGE, BROKEN = settings.TOOLBOX_IMAGE, "example.com/broken:2"


@pytest.fixture
def following(operator: Any) -> Iterator[Any]:
    """An operator whose engine image is the tests' own."""
    operator.restart(OCTAVO_ENGINE_IMAGE=IMAGE)
    yield operator
    operator.restart()


def follower(name: str, priority: int) -> dict[str, Any]:
    out = toy(IMAGE, name=name, engine={"imagePolicy": "Follow", "imagePriority": priority})
    del out["spec"]["engine"]["image"]
    return out


def condition(cluster: Cluster, namespace: str, name: str, kind: str) -> tuple[str, str]:
    found = cluster.get("llmd", name, namespace=namespace)["status"]["conditions"]
    return next((one["status"], one["reason"]) for one in found if one["type"] == kind)


def test_a_broken_image_stops_at_the_canary(cluster: Cluster, namespace: str, following: Any) -> None:
    cluster.apply(follower("late", 0), follower("canary", 1), toy(IMAGE, name="pinned"), namespace=namespace)
    names = ("canary", "late", "pinned")

    def all_ready() -> bool:
        return all(condition(cluster, namespace, name, "Ready")[0] == "True" for name in names)

    def pods() -> dict[str, str]:
        found = cluster.get("pods", namespace=namespace)["items"]
        return {one["metadata"]["uid"]: one["metadata"]["labels"]["octavo.dev/llmdeployment"] for one in found}

    def image(name: str) -> str:
        live = cluster.get("deployment", name, namespace=namespace)
        return str(live["spec"]["template"]["spec"]["containers"][0]["image"])

    eventually(all_ready, 60)
    before = pods()
    following.restart(OCTAVO_ENGINE_IMAGE=BROKEN)
    eventually(lambda: condition(cluster, namespace, "canary", "Degraded") == ("True", "ImagePullBackOff"), 60)
    eventually(lambda: condition(cluster, namespace, "late", "ImageUpToDate") == ("False", "RolloutQueued"), 30)
    assert [image(name) for name in names] == [BROKEN, IMAGE, IMAGE]
    assert condition(cluster, namespace, "canary", "Available")[0] == "True", "the old pod serves meanwhile"
    following.restart(OCTAVO_ENGINE_IMAGE=IMAGE)
    eventually(lambda: image("canary") == IMAGE and all_ready(), 60)
    eventually(lambda: pods() == before, 30)  # the broken one is gone, and nobody was replaced
