"""`sluice bench orchestrator` with a small load: the simulated services keep the contracts that the orchestrator relies on."""

from __future__ import annotations

import pytest

from benchmarks.orchestrator import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("peak", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_one_orchestrator_carries_a_small_load(capsys, peak: bool) -> None:
    load = ["--in-flight=128", "--group=4", "--batch=4", "--multi-turn=16", "--also"]
    # Held at a rate that leaves the trainer seconds for each batch, so that a busy machine does not stop dispatch.
    result = run([*load, *["--peak"] * peak, "--rate=50", "--seconds=0.2"])
    assert result["episodes_per_s"] > 0
    assert 0 < result["in_flight"] <= 144
    assert result["rss_mib"] > 0
    assert result["lag_max_ms"] >= result["lag_p99_ms"] >= result["lag_p50_ms"] >= 0
    assert result["multi_turn_turns_per_s"] > result["multi_turn_episodes_per_s"] > 0
    assert set(result["levels"]) == {*["peak"] * peak, "held", "multi-turn"}
    assert all(each["cpu_ms_per_episode"]["orchestrator"] > 0 for each in result["levels"].values())
    assert "ended with code" not in capsys.readouterr().err
