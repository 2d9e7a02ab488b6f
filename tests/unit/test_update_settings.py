"""Settings of the update: an objective that lacks a model is refused when the settings are read, with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator_svc.config import OrchestratorConfig
from sluice.config import CommonConfig, ConfigError, load_run
from trainer_svc.config import TrainerConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "reverse_text"


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"objective": {"preset": "grpo", "kl_coef": 0.1}}, r"reference\.model to base"),
        ({"objective": {"preset": "reinforce_pp"}}, r"reference\.model to base"),
        ({"objective": {"preset": "distill"}}, r"set teacher\.model"),
        ({"objective": {"preset": "ppo"}, "critic": {"model": ""}}, r"set critic\.model to base"),
        ({"critic": {"shared": True}}, "remove the table critic"),
        ({"reference": {"model": "base"}}, "remove the table reference"),
        (
            {"objective": {"preset": "reinforce_pp", "kl_coef": 0.0}, "reference": {"model": "batch"}},
            "remove the table",
        ),
        ({"teacher": {"model": "somewhere"}}, "remove the table teacher"),
        ({"objective": {"preset": "ppo"}, "critic": {"schedule": "linear"}}, "ends at max_steps"),
        (
            {"objective": {"preset": "ppo"}, "critic": {"optimizer": "muon"}, "optimizer_offload": True},
            r"set critic\.optimizer to adamw",
        ),
        ({"epochs": 0}, "greater than or equal to 1"),
        ({"lora": {"alpha": 32.0}}, "alpha is set, but rank is 0, which trains all weights: set rank"),
    ],
)
def test_what_the_objective_lacks_is_told_at_the_start(settings: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValidationError, match=remedy):
        TrainerConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": {"preset": "grpo", "kl_coef": 0.1}, "reference": {"model": "batch"}},
        {"objective": {"preset": "reinforce_pp", "kl_coef": 0.0}},
        {"objective": {"preset": "distill"}, "teacher": {"model": "somewhere"}},
        {"objective": {"preset": "ppo"}},
        {"objective": {"preset": "ppo"}, "critic": {"shared": True, "model": ""}},
    ],
)
def test_what_has_all_it_needs_is_taken(settings: dict[str, Any]) -> None:
    config = TrainerConfig(**settings)
    assert TrainerConfig(**config.model_dump()) == config, "a resolved file is one that can be read again"


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("reference", {"preset": "grpo", "kl_coef": 0.1}),
        ("teacher", {"preset": "distill"}),
        ("critic", {"preset": "ppo"}),
    ],
)
def test_a_directory_that_holds_no_model_is_refused_before_the_trainer_starts(
    name: str, objective: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = TrainerConfig(objective=objective, **{name: {"model": "/nowhere"}})
    with pytest.raises(ConfigError, match=rf"trainer\.{name}\.model: there is no directory /nowhere"):
        config.check_start(CommonConfig(model=str(tmp_path)))


@pytest.mark.parametrize("advantage", ["gae", "reinforce_pp", "process", "none"])
def test_what_the_trainer_estimates_needs_no_group(advantage: str) -> None:
    assert OrchestratorConfig(advantage=advantage, group_size=1).advantage == advantage
    with pytest.raises(ValidationError, match="still learns"):
        OrchestratorConfig(advantage=advantage, filter={"drop_degenerate": True})
    with pytest.raises(ValidationError, match="set group_size to 2"):
        OrchestratorConfig(advantage="lite_ppo", group_size=1)


def test_the_example_names_one_estimator_on_both_sides() -> None:
    run = load_run(["@", str(EXAMPLE / "ppo.toml"), "--model", "anything"])
    assert run.orchestrator.advantage == run.trainer.objective.resolved.advantage == "gae"
