"""Several objectives in one batch: each trajectory is trained by its own, with its own divisor."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from thread_ranks import on_ranks
from tiny_policy import ragged_batch, tiny_model

from sluice.config import ConfigError, check_tables_fit, load_run
from sluice.v1 import tokens_pb2
from sluice.versions import BASE
from trainer_svc.batch.rows import Outputs, TrainingRow, pack
from trainer_svc.config import TrainerConfig
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective, mixed, with_group_tokens
from trainer_svc.parallel.mesh import ALONE, Ranks
from trainer_svc.service.batches import Expectations, convert
from trainer_svc.update.policy import PolicyUpdate, load_frozen

OPTIONS = {"lr": 0.0, "device": "cpu", "grad_clip": 0.0}

GRPO = {"preset": "grpo", "aggregation": "sequence"}

OTHERS = {
    "token": {"preset": "aipo"},
    "constant": {"preset": "dr_grpo", "max_tokens": 64},
    "prompt": {"preset": "cispo", "aggregation": "prompt"},
    "reference": {"preset": "grpo", "kl_coef": 0.3},
    "recomputed": {"preset": "grpo", "proximal": "recompute", "correction": {"kind": "token_tis"}},
    "selecting": {"preset": "m2po"},
    "entropy": {"preset": "grpo", "entropy_coef": 0.2},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("several"))


def gradient(model_dir: Path, rows: list[TrainingRow], **settings) -> tuple[torch.Tensor, float]:
    """The gradient of one step, and its loss."""
    reads = any(each.get("kl_coef") for each in (settings["objective"], *settings.get("objectives", {}).values()))
    settings |= {"reference": {"model": "base"}} if reads else {}
    config = TrainerConfig(**settings, **OPTIONS)
    update = PolicyUpdate.load(config, model_dir, seed=1, frozen=load_frozen(config, model_dir))
    step, parameters = update.engine.step, list(update.engine.network.model.parameters())
    taken: list[torch.Tensor] = []

    def keep(record) -> None:
        taken.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]))
        step(record)

    update.engine.step = keep  # type: ignore[method-assign]
    loss = update.apply(rows).metrics.loss
    (found,) = taken
    return found, loss


def batch() -> list[TrainingRow]:
    return [replace(each, reference_logprobs=None) for each in ragged_batch(seed=11, groups=6)]


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("token_budget", [64, 4096])
def test_the_gradient_is_the_sum_of_what_each_objective_gives_for_its_own_trajectories(
    model_dir, other, token_budget
) -> None:
    rows = [replace(each, objective="other" if each.group_id in {"g1", "g2", "g4"} else "") for each in batch()]
    named = {"other": OTHERS[other]}
    one = partial(gradient, model_dir, token_budget=token_budget)
    own, own_loss = one([each for each in rows if not each.objective], objective=GRPO)
    theirs = [replace(each, objective="") for each in rows if each.objective]
    second, second_loss = one(theirs, objective=OTHERS[other])
    both, loss = one(rows, objective=GRPO, objectives=named)
    assert float((both - own - second).norm() / both.norm()) < 1e-5
    assert loss == pytest.approx(own_loss + second_loss, rel=1e-4, abs=1e-6)
    assert float(own.norm()) > 0
    assert float(second.norm()) > 0


def test_an_objective_that_no_trajectory_names_changes_nothing(model_dir) -> None:
    alone, loss = gradient(model_dir, batch(), objective=GRPO)
    beside, same = gradient(model_dir, batch(), objective=GRPO, objectives={"other": {"preset": "aipo"}})
    assert float((alone - beside).norm() / alone.norm()) < 1e-6
    assert same == pytest.approx(loss)


def test_a_trajectory_that_names_an_unknown_objective_is_refused() -> None:
    expected = Expectations(vocabulary=10, newest=BASE, has_estimator=True)
    trajectory = tokens_pb2.Trajectory(trajectory_id="t", group_id="g", episode_id="e", objective="gone")
    _, faults = convert([trajectory], expected, {"kept": expected})
    assert faults == {"trajectories[0].objective": "is not known: 'gone'; trainer.objectives has kept; add it there"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objectives": {"other": {"preset": "ppo"}}}, "objectives.other lets the trainer estimate"),
        ({"objective": {"preset": "reinforce_pp"}, "objectives": {"o": {}}}, "objective lets the trainer estimate"),
        ({"objectives": {"other": {"preset": "grpo", "kl_coef": 0.1}}}, "there is no reference policy"),
        ({"objectives": {"other": {"preset": "sft"}}}, "needs demonstrations"),
        ({"objectives": {"Other name": {}}}, "use lower-case letters"),
        ({"reference": {"model": "base"}, "objectives": {"other": {}}}, "remove the table reference"),
    ],
)
def test_settings_that_could_not_work_are_refused(settings, message) -> None:
    settings = settings | ({"reference": {"model": "base"}} if "reinforce_pp" in str(settings) else {})
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(**settings)


def test_an_environment_that_names_an_unknown_objective_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(
        '[[orchestrator.environments]]\nenvironment = "a"\nobjective = "soft"\n[trainer.objectives.hard]\n'
    )
    run = load_run(["@", str(tmp_path / "rl.toml")])
    with pytest.raises(
        ConfigError, match=r"environment a names the objective 'soft', but trainer\.objectives has hard"
    ):
        check_tables_fit(run)
    (tmp_path / "rl.toml").write_text((tmp_path / "rl.toml").read_text().replace("objectives.hard", "objectives.soft"))
    check_tables_fit(load_run(["@", str(tmp_path / "rl.toml")]))


@pytest.mark.parametrize("aggregation", [{"aggregation": "prompt"}, {"aggregation": "token"}, {}])
def test_ranks_that_share_a_batch_add_up_to_one_that_has_it_all(aggregation) -> None:
    """Each objective is divided by the divisor of the whole batch, also on a rank without rows of this objective."""
    objectives = {
        "": Objective.of(ObjectiveConfig(preset="grpo", **aggregation)),
        "other": Objective.of(ObjectiveConfig(preset="aipo")),
    }
    rows = [replace(each, objective="other" if each.group_id == "g1" else "") for each in with_group_tokens(batch())]

    def part(own: list[TrainingRow], ranks: Ranks) -> float:
        loss, weight = mixed(objectives, own, ranks)
        total = 0.0
        for each in pack(own, 256):
            sampled = Outputs(logprobs=each.behaviour_logprobs + 0.1, entropy=torch.zeros_like(each.behaviour_logprobs))
            total += float(loss(sampled, each)[0])
        return total / ranks.total({"weight": weight(own)})["weight"]

    whole = part(rows, ALONE)
    for shares in ([rows[::2], rows[1::2]], [[r for r in rows if not r.objective], [r for r in rows if r.objective]]):
        assert sum(on_ranks(shares, part)) == pytest.approx(whole, rel=1e-5)
