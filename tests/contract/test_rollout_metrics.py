"""What a scrape of a replica sees."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from rollout_stack import running_engine
from small_models import save_model, staged

from rollout_svc.admin import ReplicaMetrics
from rollout_svc.config import RolloutConfig
from rollout_svc.engines.base import GenerationRequest, PauseMode, Sampling
from rollout_svc.replica import EngineSupervisor, ReplicaWeights
from sluice.config import CommonConfig
from sluice.versions import Version


async def test_a_scrape_sees_load_version_and_counts(tmp_path):
    model, second = save_model(tmp_path / "base", 1), save_model(tmp_path / "second", 2)
    registry = CollectorRegistry()
    async with running_engine(model) as engine:
        supervisor = EngineSupervisor(engine, 0, lambda _serving: None)
        weights = ReplicaWeights(CommonConfig(), RolloutConfig(follow_weights=False), supervisor)
        metrics = ReplicaMetrics(supervisor, weights, registry)

        def value(name: str) -> float | None:
            return registry.get_sample_value(f"sluice_rollout_{name}")

        before = value("generated_tokens_total")
        await engine.sample(GenerationRequest("a", [5, 6], Sampling(max_tokens=7, ignore_eos=True), n=2))
        assert value("generated_tokens_total") - before == 14
        assert (value("prompt_tokens_total"), value("running"), value("queued"), value("healthy")) == (2, 0, 0, 1)
        await engine.apply(staged(second, Version(3, 4)))
        await engine.pause(PauseMode.KEEP)
        assert (value("policy_epoch"), value("policy_number"), value("paused")) == (3, 4, 1)
        await engine.stop()
        assert value("healthy") == 0
        metrics.close()
        assert value("healthy") is None
