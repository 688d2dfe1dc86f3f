"""Snapshots over whole conversations: how much of what attention alone would hit is hit, in pools of any size."""

from __future__ import annotations

import random

import pytest
from core_helpers import EOS, request
from served_prompts import Server

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.states.manager import StateSettings


def talk(server: Server, noise: int, keeps_thoughts: bool = False, agents: int = 3, seed: int = 0) -> None:
    """Agents take turns of several rounds each; templates drop thoughts at each of a user's messages, and render half
    of the answers anew. Between any two of their requests come ten others, of ``noise`` tokens."""
    rng = random.Random(seed)

    def text(size: int) -> list[int]:
        return [rng.randrange(EOS + 1, 10**6) for _ in range(max(1, size // 8))]

    system, history, live, user = text(6000), [[] for _ in range(agents)], [[] for _ in range(agents)], [[]] * agents
    for _ in range(4):
        for agent in range(agents):
            for thought, answer, tool in live[agent]:
                history[agent] += [1, *(thought if keeps_thoughts else []), *answer, *tool]
            live[agent] = []
            user[agent] = text(rng.randrange(50, 600))
            history[agent] += user[agent]
        for turn in range(6):
            for agent in range(agents):
                before = system + history[agent]
                prompt = before + [t for th, an, tool in live[agent] for t in (1, *th, *an, *tool)]
                thought, answer = text(rng.randrange(50, 500)), text(rng.randrange(40, 300))
                tool = text(rng.randrange(100, 2500)) if turn < 5 else []
                boundaries = sorted({len(system), len(before), len(prompt)})
                server.serve([*prompt, 1, 2, 3], [*thought, *answer, EOS], boundaries)
                if rng.random() < 0.5:
                    answer = [7, *answer]
                live[agent].append((thought, answer, tool))
                for _ in range(10):
                    server.serve(text(noise * 8), [EOS], counts=False)


@pytest.mark.parametrize(("num_blocks", "least", "share"), [(4000, 0.99, 0.88), (1400, 0.97, 0.86), (1250, 0.95, 0.85)])
def test_agents_hit_nearly_what_attention_alone_would(num_blocks: int, least: float, share: float) -> None:
    server = Server(num_blocks)
    talk(server, 100)
    assert server.hits / server.found >= least, (server.hits, server.found, server.prompt_tokens)
    assert server.hits / server.prompt_tokens >= share


def test_a_flood_of_single_requests_does_not_evict_a_long_conversation() -> None:
    """As long as the memory holds their keys and values beside what is kept of the conversation."""
    server, rng = Server(1000), random.Random(0)
    prompt = [rng.randrange(10, 10**6) for _ in range(30_000 // 8)]
    for boundaries in (None, [len(prompt) - 5]):
        server.serve(prompt, [1, 2, 3, EOS], boundaries)
        for _ in range(500):
            server.serve([rng.randrange(10, 10**6) for _ in range(100 // 8)], [EOS])
        assert server.serve([*prompt, 1, 2, 3], [EOS], boundaries) >= 0.99 * len(prompt)


def test_no_sequence_is_preempted_for_a_snapshot() -> None:
    """In a pool that holds one sequence and its state, and nothing else."""
    server, rng = Server(300), random.Random(1)
    prompt = [rng.randrange(10, 10**6) for _ in range(1000)]
    for _ in range(5):
        server.serve(prompt, [1] * 20)
        prompt += [1] * 20
    assert server.num_preemptions == 0
    server.scheduler.check_integrity()


def test_a_state_takes_no_block_of_the_prefix_that_its_sequence_begins_with() -> None:
    """Also where that is what would be evicted next, and no snapshot was kept of it."""
    kv = KVCacheManager(12, 16, True, 1, states=StateSettings(2))
    tokens = list(range(64))
    first, second = request("first", [*tokens, 1]), request("second", [*tokens, 2])
    assert kv.allocate_slots(first, 65, kv.get_computed_blocks(first)) is not None
    kv.confirm(first, 65)
    kv.free(first)
    other = request("other", [5] * 8)
    assert kv.allocate_slots(other, 8, kv.get_computed_blocks(other)) is not None
    hit = kv.get_computed_blocks(second)
    assert (hit.num_tokens, hit.num_found, hit.num_blocks) == (0, 64, 4)
    assert kv.allocate_slots(second, 65, hit) is not None
    assert not set(kv.state_pages(second)) & set(kv.block_ids(second)[0])
    kv.check_integrity()
