"""Configurations that `SchedulerMachine` draws."""

from __future__ import annotations

from hypothesis import strategies as st

configs = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4, 16]),
        "max_model_len": st.integers(8, 64),
        "pool": st.sampled_from([1.0, 1.0, 1.25, 1.5, 3.0]),  # sequences of max_model_len that fit
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 40),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 1, 3, 7]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "prefix_caching": st.sampled_from([True, True, True, False]),
        "max_in_flight": st.sampled_from([1, 2, 2, 3]),
        "num_stages": st.sampled_from([1, 1, 1, 2, 3]),  # of a pipeline, with a step in flight for each
        # Of groups of layers; windows of the prompts' length, of blocks, and of less than one
        "windows": st.sampled_from([(None,), (None,), (None, 5), (None, 1, 9), (None, None, 17), (3,), (8, 20)]),
        "num_speculative_tokens": st.integers(0, 4),
        "in_worker": st.booleans(),
        "adaptive": st.booleans(),
        "overlap": st.booleans(),
        "drafter": st.sampled_from(["right", "right", "wrong", "half", "half", "rubbish"]),
        "max_loras": st.integers(1, 3),
        "encoder_budget": st.sampled_from([5, 7, 20]),
        "images_beside_decodes": st.sampled_from([None, 1, 2]),
        "state_blocks": st.sampled_from([0, 0, 1, 3]),  # of recurrent layers
        "headroom": st.sampled_from([0, 0, 3]),
        "interval": st.sampled_from([0, 5, 16]),
        "gap": st.sampled_from([1, 1, 8, 64]),  # between snapshots of a sequence
        "prefix_cache_blocks": st.sampled_from([None, None, 1, 6]),
        "retention_share": st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    }
)
# Where the bounds of what a request holds are tight: many steps in flight, few positions seen, one request's room.
tight_configs = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 1, 2, 4]),
        "max_model_len": st.integers(8, 14),
        "pool": st.sampled_from([1.0, 1.0, 1.5]),
        "max_num_seqs": st.integers(1, 3),
        "max_num_batched_tokens": st.integers(1, 3),
        "long_prefill_token_threshold": st.just(0),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "prefix_caching": st.booleans(),
        "max_in_flight": st.sampled_from([2, 3]),
        "num_stages": st.sampled_from([1, 1, 2, 3]),
        "windows": st.sampled_from([(1,), (2,), (3,), (None, 1), (None, 2), (1, 4), (None, 1, 9)]),
        "num_speculative_tokens": st.integers(0, 4),
        "in_worker": st.booleans(),
        "adaptive": st.booleans(),
        "overlap": st.booleans(),
        "drafter": st.sampled_from(["right", "right", "wrong", "half", "half", "rubbish"]),
        "max_loras": st.just(1),
        "encoder_budget": st.just(5),
        "images_beside_decodes": st.just(1),
        "state_blocks": st.sampled_from([0, 0, 1, 3]),
        "headroom": st.just(0),
        "interval": st.sampled_from([0, 3]),
        "gap": st.just(1),
        "prefix_cache_blocks": st.sampled_from([None, 1]),
        "retention_share": st.sampled_from([0.0, 1.0]),
    }
)
hybrid_changes = st.fixed_dictionaries(
    {
        "state_blocks": st.integers(1, 3),
        "prefix_caching": st.just(True),
        "windows": st.sampled_from([(None,), (None,), (None, 5)]),
        "block_size": st.sampled_from([1, 2, 4]),
        "max_num_batched_tokens": st.integers(4, 60),
        "long_prefill_token_threshold": st.just(0),
        "pool": st.sampled_from([1.0, 1.5, 3.0, 6.0]),
        "gap": st.just(1),
        "headroom": st.just(0),
    }
)
