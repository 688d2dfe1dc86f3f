"""Tests that say `alone` are alone, and are not starved by the others."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from support.turns import turn


def test_nothing_runs_beside_a_test_that_is_alone(tmp_path: Path) -> None:
    """Two workers without pause leave a third its turn, and both wait while it has it."""
    beside, seen, both = 0, [], threading.Event()
    lock, alone_is_done = threading.Lock(), threading.Event()

    def many() -> None:
        nonlocal beside
        while not alone_is_done.is_set():
            with turn(tmp_path, alone=False):
                with lock:
                    beside += 1
                    if beside == 2:
                        both.set()
                time.sleep(0.01)
                with lock:
                    beside -= 1

    workers = [threading.Thread(target=many) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert both.wait(90), "others run side by side"
    for _ in range(3):
        with turn(tmp_path, alone=True):
            for _ in range(5):
                time.sleep(0.01)
                seen.append(beside)
    alone_is_done.set()
    for worker in workers:
        worker.join(90)
    assert seen == [0] * 15
