"""The replica's load for Prometheus, read when it is scraped; a fleet is scaled by `sluice_rollout_queued`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry

from rollout_svc.supervision import EngineSupervisor
from rollout_svc.weights import Weights

__all__ = ["ReplicaMetrics"]


class ReplicaMetrics(Collector):
    """Collects from the engine and the weight path.

    Args:
        engine: The engine under its supervision.
        weights: Its weight versions.
        registry: Where it is scraped.
    """

    def __init__(self, engine: EngineSupervisor, weights: Weights, registry: CollectorRegistry = REGISTRY) -> None:
        self._engine, self._weights, self._registry = engine, weights, registry
        registry.register(self)

    def close(self) -> None:
        """Be scraped no more."""
        self._registry.unregister(self)

    def collect(self) -> Iterator[Metric]:
        """Read the present state (prometheus_client's interface)."""
        status, weights = self._engine.current.status(), self._weights.status()
        for name, text, value in (
            ("running", "Samples being generated.", status.running),
            ("queued", "Samples waiting for a place.", status.queued),
            ("max_running", "Most samples that are generated at a time.", status.max_running),
            ("kv_cache_usage", "Share of the KV cache in use, 0 to 1.", status.kv_cache_usage),
            ("paused", "Whether sampling is paused.", status.paused),
            ("healthy", "Whether the engine samples.", status.healthy and not self._engine.recovering),
            ("policy_epoch", "Epoch of the version that serves.", status.version.epoch),
            ("policy_number", "Number of the version that serves.", status.version.number),
            ("last_pause_seconds", "Pause of the last update.", weights.last_pause_s),
        ):
            yield GaugeMetricFamily(f"sluice_rollout_{name}", text, value=float(value))
        for name, text, value in (
            ("generated_tokens", "Tokens sampled.", status.generated_tokens),
            ("prompt_tokens", "Prompt tokens processed.", status.prompt_tokens),
            ("updates_applied", "Weight updates applied.", weights.updates_applied),
            ("engine_restarts", "Engine restarts.", self._engine.restarts),
        ):
            yield CounterMetricFamily(f"sluice_rollout_{name}", text, value=float(value))
