"""What the trainer says about an objective that cannot work well on the data it gets."""

from __future__ import annotations

from pathlib import Path

from small_learner import learner, train
from structlog.testing import capture_logs
from tiny_policy import tiny_model

from trainer_svc.config import ObjectiveConfig


def test_narrow_bounds_in_the_bypass_form_are_warned_of_once_when_tokens_are_stale(tmp_path: Path) -> None:
    policy = learner(tiny_model(tmp_path), tmp_path, objective=ObjectiveConfig(preset="gspo", proximal="bypass"))
    policy.restore(1, "")
    with capture_logs() as logs:
        train(policy, 1)
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    with capture_logs() as logs:
        train(policy, 2, 3)  # all tokens are of the base version
    (warning,) = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert "objective gspo in the bypass form clips" in warning
    assert "staleness 1 makes" in warning
    assert "set proximal to recompute" in warning
