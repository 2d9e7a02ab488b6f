"""`sluice bench adversary`, for seconds: all that the adversary sends reaches a real gateway, and honest agents lose nothing."""

from __future__ import annotations

import pytest

from benchmarks.adversary import run

pytestmark = pytest.mark.slow


def test_honest_agents_lose_nothing_beside_an_adversary(capsys) -> None:
    result = run(["--seconds=4", "--agents=2", "--half-heads=50"])
    assert result["failures"] == []
    assert result["lost"] == 0
    for name in ("before", "during", "after"):
        assert result[name]["requests"] > 0
        assert set(result[name]["mib"]) == {"gateway", "orchestrator", "replica"}
    broken = {"ConnectionResetError", "BrokenPipeError", "IncompleteReadError", "cut at the end"}
    assert set(result["sent"]["made-up keys"]) <= {"404", *broken}
    assert set(result["sent"]["large prompts"]) <= {"400", "413", "429", *broken}
    assert set(result["sent"]["branches"]) <= {"200", "400", "429", "cut at the end"}
    assert set(result["ratios"]) == {"p50_s", "p99_s"}
    assert "sent half heads" in capsys.readouterr().out
