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


def dead_clips(logs: list[dict[str, str]]) -> list[str]:
    return [entry["event"] for entry in logs if "have no effect" in entry["event"]]


def test_a_clip_that_its_settings_make_dead_is_warned_of_once_at_the_start(tmp_path: Path) -> None:
    with capture_logs() as logs:
        policy = learner(tiny_model(tmp_path), tmp_path, objective=ObjectiveConfig(preset="gspo"))
        policy.restore(1, "")
        train(policy, 1, 2)
    (warning,) = dead_clips(logs)
    assert warning.startswith("trainer.objective: eps_low, eps_high of gspo have no effect")
    assert "set trainer.minibatches or trainer.epochs to 2 or more" in warning


def test_a_second_optimizer_step_brings_the_clip_to_life(tmp_path: Path) -> None:
    with capture_logs() as logs:
        learner(tiny_model(tmp_path), tmp_path, objective=ObjectiveConfig(preset="gspo"), minibatches=2)
    assert not dead_clips(logs)
