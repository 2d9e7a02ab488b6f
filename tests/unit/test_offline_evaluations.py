"""Evaluations of an offline run: which one is the best, what is kept of it, and when training ends."""

from __future__ import annotations

import json
import threading
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_policy import tiny_model

from sluice.config import ConfigError
from trainer_svc.offline.checkpoints import checkpoint_directory
from trainer_svc.offline.commands import SFT, load_offline
from trainer_svc.offline.config import RewardModelConfig, SftConfig
from trainer_svc.offline.evaluations import BEST, OLD, Standing
from trainer_svc.offline.playing import _command, mean_results, shown
from trainer_svc.offline.runs import run


def chat(question: str, answer: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("evaluations"))


def settings(model: Path, directory: Path, *, held_out: str = "no", **changes: object) -> SftConfig:
    """A run that learns "yes"; that makes the loss of "no" worse."""
    (directory / "rows.jsonl").write_text(chat("a", "yes"))
    (directory / "held.jsonl").write_text(chat("a", held_out))
    given: dict[str, object] = {"model": str(model), "output": directory / "out", "device": "cpu", "lr": 1e-2}
    given |= {"data": str(directory / "rows.jsonl"), "eval_data": str(directory / "held.jsonl"), "batch_size": 4}
    return SftConfig(**{**given, "max_steps": 30, "eval_every": 5, "log_every": 5, **changes})


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture(scope="module")
def after_5_steps(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of the best model: the loss of "no" falls while the model learns how turns end."""
    directory = tmp_path_factory.mktemp("best")
    run(settings(model, directory, max_steps=5), lambda _: None)
    return weights(directory / "out")


def test_of_the_loss_the_lower_one_is_better_and_of_rewards_the_higher_one() -> None:
    loss, reward = Standing("loss"), Standing("reward_mean")
    assert [loss.take(step, {"loss": value}) for step, value in enumerate([3.0, 2.0, 2.5])] == [True, True, False]
    assert (loss.best, loss.best_step, loss.since) == (2.0, 1, 1)
    assert [reward.take(step, {"reward_mean": value}) for step, value in enumerate([0.0, 0.5, 0.5])] == [
        True,
        True,
        False,
    ]


def test_a_gain_must_exceed_the_least_one() -> None:
    standing = Standing("reward_mean", min_gain=0.1)
    assert [standing.take(step, {"reward_mean": value}) for step, value in enumerate([0.5, 0.55, 0.7])] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(("own", "said"), [({}, {"date": "May"}), ({"date": "June"}, {"date": "June"})])
def test_an_evaluation_renders_as_the_run_unless_it_says_otherwise(tmp_path: Path, own: dict, said: dict) -> None:
    (tmp_path / "t.jinja").write_text("{{ date }}")
    evaluation = {"environment": "m:E", **({"chat_template_kwargs": own} if own else {})}
    template = {"chat_template": tmp_path / "t.jinja", "chat_template_kwargs": {"date": "May"}}
    _command(SftConfig(model="m", data="d.jsonl", evaluation=evaluation, eval_every=1, **template), "m", tmp_path)
    written = tomllib.loads((tmp_path / "eval.toml").read_text())
    assert (written["chat_template"], written["chat_template_kwargs"]) == (str(tmp_path / "t.jinja"), said)


def test_an_evaluation_without_the_metric_is_not_compared() -> None:
    standing = Standing("reward_mean")
    standing.take(0, {"reward_mean": 0.5})
    assert not standing.take(5, {"loss": 1.0})
    assert not standing.take(10, {"reward_mean": float("nan")})
    assert (standing.since, standing.last_step) == (0, 10)


def test_results_of_several_environments_are_their_means() -> None:
    found = mean_results([{"reward_mean": 0.0, "adds/length": 3.0}, {"reward_mean": 1.0}])
    assert found == {"reward_mean": 0.5}
    assert shown({"reward_mean": 0.5, "reward_stderr": 0.1, "failed_tasks": 0.0}) == "  reward_mean 0.5000"
    assert "failed_tasks 2" in shown({"failed_tasks": 2.0})


@pytest.mark.slow
def test_the_best_model_is_written_and_training_ends_when_it_stops_gaining(
    model: Path, tmp_path: Path, after_5_steps: dict[str, torch.Tensor]
) -> None:
    said: list[str] = []
    run(settings(model, tmp_path, keep_best=True, patience=2), said.append)
    assert [line.split(":")[0] for line in said if line.startswith("held out")] == [
        "held out after 0 steps",
        "held out after 5 steps",
        "held out after 10 steps",
        "held out after 15 steps",
    ]
    assert said[-1].startswith(f"{tmp_path / 'out'}: 15 steps on 1 demonstrations")
    assert ", written: loss " in said[-1]
    assert said[-1].endswith("after 5 steps; ended by patience, 2 evaluations without a better one")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["held.jsonl", "out", "rows.jsonl"]
    assert same(weights(tmp_path / "out"), after_5_steps)


@pytest.mark.slow
def test_without_keep_best_the_last_model_is_written(
    model: Path, tmp_path: Path, after_5_steps: dict[str, torch.Tensor]
) -> None:
    said: list[str] = []
    run(settings(model, tmp_path, patience=2), said.append)
    assert ", best: loss " in said[-1]
    assert not same(weights(tmp_path / "out"), after_5_steps)


@pytest.mark.slow
def test_the_last_model_is_the_best_one_while_it_gains(model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    run(settings(model, tmp_path, held_out="yes", keep_best=True, patience=2), said.append)
    assert said[-1].endswith("after 30 steps")
    (tmp_path / "other").mkdir()
    run(settings(model, tmp_path / "other", held_out="yes"), lambda _: None)
    assert same(weights(tmp_path / "out"), weights(tmp_path / "other" / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("between_renames", [False, True])
def test_a_resumed_run_knows_the_best_model(
    model: Path, tmp_path: Path, after_5_steps: dict[str, torch.Tensor], *, between_renames: bool
) -> None:
    def killed(line: str) -> None:
        if line.startswith("step 15/"):
            raise KeyboardInterrupt

    changes = {"keep_best": True, "patience": 4, "checkpoint_every": 5}
    with pytest.raises(KeyboardInterrupt):
        run(settings(model, tmp_path, **changes), killed)
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    assert {each.name for each in checkpoint_directory(tmp_path / "out").iterdir()} >= {"best", "best.json"}
    if between_renames:
        (checkpoint_directory(tmp_path / "out") / BEST).rename(checkpoint_directory(tmp_path / "out") / OLD)
    other = tmp_path / "other.jsonl"
    other.write_text(chat("a", "maybe"))
    with pytest.raises(ConfigError, match=r"the checkpoint was written with eval_data = .*held\.jsonl"):
        run(settings(model, tmp_path, resume=True, eval_data=str(other), **changes), lambda _: None)
    said: list[str] = []
    run(settings(model, tmp_path, resume=True, **changes), said.append)
    assert said[-1].endswith("after 5 steps; ended by patience, 4 evaluations without a better one")
    assert same(weights(tmp_path / "out"), after_5_steps)
    held_out = [int(line.split()[3]) for line in said if line.startswith("held out")]
    assert held_out == [15, 20, 25]  # evaluations of repeated steps are known already


@pytest.mark.slow
def test_a_run_that_had_ended_ends_at_the_same_step_when_it_is_resumed(model: Path, tmp_path: Path) -> None:
    def killed(line: str) -> None:
        if line.startswith("held out after 15"):
            raise KeyboardInterrupt

    changes = {"patience": 2, "checkpoint_every": 10}
    with pytest.raises(KeyboardInterrupt):
        run(settings(model, tmp_path, **changes), killed)
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    said: list[str] = []
    run(settings(model, tmp_path, resume=True, **changes), said.append)
    assert said[-1].endswith("ended by patience, 2 evaluations without a better one")
    assert not [line for line in said if line.startswith("held out")]


def test_files_of_others_beside_the_output_stay(model: Path, tmp_path: Path) -> None:
    theirs = [tmp_path / name for name in ("out.evaluated", ".out.evaluated")]
    for each in theirs:
        each.mkdir()
    run(settings(model, tmp_path, max_steps=1), lambda _: None)
    assert all(each.is_dir() for each in theirs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--keep-best", "true"], "set eval_data or eval_share, or metric to a result of evaluation"),
        (["--eval-share", "0.5", "--patience", "2"], "patience counts evaluations between steps: set eval_every"),
        (["--metric", "reward_mean"], "metric reward_mean is a result of an environment: set evaluation"),
        (["--evaluation", '{"model": "x"}'], r"evaluation\.model is not for an evaluation inside of a run"),
        (["--evaluation", '{"environment": "none.py:X"}'], r"evaluation: .*none\.py"),
        (["--evaluation", '{"enviroment": "none.py:X"}'], "evaluation: .*did you mean 'environment'"),
    ],
)
def test_evaluations_that_cannot_work_are_refused_before_anything_is_loaded(
    model: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "r.jsonl").write_text(chat("a", "b"))
    with pytest.raises(ConfigError, match=message) as refused:
        load_offline(
            SftConfig, ["--model", str(model), "--data", str(tmp_path / "r.jsonl"), *words, "--dry-run"], "sft"
        )
    assert "\n" not in str(refused.value)


def test_a_reward_model_plays_no_environment() -> None:
    with pytest.raises(ValueError, match="a reward model plays no environment"):
        RewardModelConfig(model="m", data="d", evaluation={"environment": "e"})


ENVIRONMENT = """
from sluice.environments import Task

class Says:
    name = "says"
    def tasks(self, split, seed):
        return [Task(str(n)) for n in range(3)]
    def messages(self, task):
        return [{"role": "user", "content": "a"}]
    def score(self, task, completion):
        return float(completion == "yes")
"""


def playing(directory: Path) -> dict[str, object]:
    (directory / "env.py").write_text(ENVIRONMENT)
    return {"environment": f"{directory}/env.py:Says", "samples": 0, "greedy": True, "max_tokens": 6}


@pytest.mark.slow
def test_the_rewards_of_an_environment_say_which_model_is_the_best(
    model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that says "yes" learns "no", so the model before the training is the best."""
    yes = tmp_path_factory.mktemp("yes")
    run(settings(model, yes, max_steps=20, eval_data="", eval_every=0), lambda _: None)
    (tmp_path / "rows.jsonl").write_text(chat("a", "no"))
    words = ["--model", str(yes / "out"), "--data", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "out")]
    words += ["--evaluation", json.dumps(playing(tmp_path)), "--metric", "greedy_reward_mean", "--keep-best", "true"]
    words += ["--device", "cpu", "--lr", "1e-2", "--max-steps", "60", "--eval-every", "20", "--patience", "1"]
    assert SFT.run([*words, "--batch-size", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    evaluated = [line for line in lines if line.startswith("evaluated")]
    assert evaluated[0].startswith("evaluated after 0 steps:  greedy_reward_mean 1.0000")
    assert evaluated[1].startswith("evaluated after 20 steps:  greedy_reward_mean 0.0000")
    assert len(evaluated) == 2
    assert "written: greedy_reward_mean 1.0000 after 0 steps; ended by patience, 1 evaluations" in lines[-1]
    assert same(weights(tmp_path / "out"), weights(yes / "out"))
    left = {each.name for each in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"env.py", "out", "rows.jsonl"}


@pytest.mark.slow
def test_an_evaluation_that_fails_at_first_ends_the_run_with_the_reason(model: Path, tmp_path: Path) -> None:
    given = playing(tmp_path) | {"environment_args": {"no": 1}}
    with pytest.raises(
        ConfigError, match=r"evaluation after 0 steps: `sluice eval` ended with code 2: .*takes no arguments"
    ):
        run(settings(model, tmp_path, evaluation=given), lambda _: None)
    assert not (tmp_path / ".out.evaluated").exists()
