"""Metrics of the engine and the operator, from the registries that they expose."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from generate import markdown
from generate.source import OPERATOR, SERVER, module_defining


def page() -> str:
    return markdown.page(
        "Metrics",
        "Names, labels and buckets that begin with `vllm:` are vLLM's. A counter is exposed with `_total` behind its "
        "name, a histogram as `_bucket`, `_sum` and `_count`. Both expose `process_*` of themselves besides, the "
        "engine `octavo_core_process_*` of its core. How they are scraped: [monitoring](../monitoring.md).",
        "## Engine",
        "At `/metrics` of the main port and of the management port (8001 in pods).",
        _table(engine_registry()),
        "## Operator",
        "At `/metrics` of port 8080 of its pods. Only the leader exports metrics of LLMDeployments and LLMGateways.",
        _table(operator_registry()),
    )


def engine_registry() -> Any:
    module, configs = module_defining("EngineMetrics", SERVER), module_defining("CacheConfig", SERVER)
    config = SimpleNamespace(cache=configs.CacheConfig(), scheduler=configs.SchedulerConfig())
    config.speculative = configs.SpeculativeConfig("ngram", 1)  # its metrics are there where it is on
    config.lora, config.model = configs.LoRAConfig(), SimpleNamespace(is_recurrent=True)
    found = module.EngineMetrics(config, "MODEL")
    found.record_cache(config, 2, 1)
    progress = SimpleNamespace(alive=True, ready=True, heartbeat_age=0.0, stalled=0.0, num_steps=0, ranks=[(0.0, 0)])
    found.watch_progress(lambda: progress)
    found.watch_device_memory(lambda: (0, 0))
    module_defining("HttpMetrics", SERVER).HttpMetrics(found.registry)
    return found.registry


def operator_registry() -> Any:
    module = module_defining("Metrics", OPERATOR)
    state = module.OperatorState(is_leading=True, queue_depth=0, num_retrying=0, num_of_others=0, listing_age=0.0)
    return module.Metrics(lambda: state, 300.0).registry


def _table(registry: Any) -> str:
    rows = [
        (f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels), markdown.prose(text))
        for name, kind, labels, text in sorted(families(registry))
    ]
    return markdown.table(("metric", "type", "labels", "meaning"), rows)


def families(registry: Any) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Name, type, labels and help of every metric but those of processes."""
    for collector in registry._collector_to_names:
        declared = tuple(getattr(collector, "_labelnames", ()))
        for family in collector.collect():
            if "process_" in family.name or family.name.startswith("python_"):
                continue
            labels = declared or tuple(getattr(family, "_labelnames", ()))
            for sample in family.samples[:1]:
                labels = labels or tuple(label for label in sample.labels if label != "le")
            yield family.name, family.type, labels, family.documentation
