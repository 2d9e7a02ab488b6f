"""What the trainer says about an objective that cannot work well on the data it gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_learner import learner, train
from structlog.testing import capture_logs
from tiny_policy import tiny_model

from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import estimator_warning


@pytest.mark.parametrize(
    ("preset", "estimator", "warned"),
    [
        ("grpo", "centered", True),
        ("rloo", "grpo", True),
        ("grpo", "grpo", False),
        ("grpo", "", False),
        ("aipo", "dr_grpo", False),
        ("my.module:loss", "grpo", False),
        ("distill", "grpo", False),
    ],
)
def test_other_advantages_than_a_preset_was_published_with_are_warned_of(preset, estimator, warned):
    warning = estimator_warning(ObjectiveConfig(preset=preset).resolved, estimator)
    assert bool(warning) == warned
    assert warning is None or "set orchestrator.advantage to " in warning


def bypass_warnings(logs: list[dict[str, str]]) -> list[str]:
    return [entry["event"] for entry in logs if "in the bypass form" in entry["event"]]


def test_narrow_bounds_in_the_bypass_form_are_warned_of_once_when_tokens_are_stale(tmp_path: Path) -> None:
    policy = learner(tiny_model(tmp_path), tmp_path, objective=ObjectiveConfig(preset="gspo", proximal="bypass"))
    policy.restore(1, "")
    with capture_logs() as logs:
        train(policy, 1)
    assert not bypass_warnings(logs)
    with capture_logs() as logs:
        train(policy, 2, 3)  # all tokens are of the base version
    (warning,) = bypass_warnings(logs)
    assert "objective gspo in the bypass form clips" in warning
    assert "staleness 1 makes" in warning
    assert "set proximal to recompute" in warning
