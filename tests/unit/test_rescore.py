"""`sluice rescore`: another reward for the trajectories that a run has stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator_svc.commands import rescore as rescore_command
from sluice.config import ConfigError

ENVIRONMENTS = """
from sluice.environments import Score, Task

class Words:
    name = "words"
    def __init__(self, worth=1.0):
        self.worth = worth
    def tasks(self, split, seed):
        return [Task(f"{split}-{seed}-{n}") for n in range(2)]
    def messages(self, task):
        return [{"role": "user", "content": "Say."}]
    def score(self, task, completion):
        if completion == "unknown":
            raise ValueError("no idea")
        return Score(self.worth * len(completion), {"letters": len(completion)})

class Turns:
    name = "turns"
    def tasks(self, split, seed):
        return []
    def reset(self, task, seed): ...
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "env.py").write_text(ENVIRONMENTS)
    directory = tmp_path / "outputs/mine"
    (directory / "trajectories").mkdir(parents=True)
    (directory / "journal.sqlite").touch()
    (directory / "config.toml").write_text(
        f'seed = 7\n[orchestrator]\nenvironment = "{tmp_path}/env.py:Words"\n[orchestrator.environment_args]\nworth = 1.0\n'
        "[orchestrator.environment_processes]\nlog_lines_per_minute = 600\n"  # a setting of earlier versions
    )
    said = {2: ["a", "bb", "ccc", "dddd"], 10: ["eeeee", "eeeee"]}
    for step, words in said.items():
        rows = [
            {
                "step": step,
                "trajectory_id": f"g{step}-{n}",
                "group_id": f"g{step}",
                "task_id": "train-7-1",
                "completion": word,
                "reward": float(len(word)),
            }
            for n, word in enumerate(words)
        ]
        (directory / f"trajectories/step_{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Trajectories that never reached a batch are in the same directory, but do not belong to a step.
    lost = {
        "step": None,
        "trajectory_id": "g3-0",
        "group_id": "g3",
        "task_id": "train-7-1",
        "completion": "f",
        "reward": 9.0,
    }
    for name in ("dropped.jsonl", "dropped.1.jsonl"):
        (directory / f"trajectories/{name}").write_text(json.dumps(lost) + "\n")
    return directory


def test_the_reward_of_the_run_is_found_again_and_another_one_beside_it(run: Path, tmp_path: Path, capsys) -> None:
    assert rescore_command.run([str(run)]) == 0
    told = capsys.readouterr().out
    assert "6 trajectories of 2 groups" in told
    assert "correlation        1.0000" in told
    output = tmp_path / "new/rewards.jsonl"
    words = ["--environment-args", '{"worth": -2.0}', "--output", str(output)]
    assert rescore_command.run(["mine", "--output-dir", str(run.parent), *words]) == 0
    told = capsys.readouterr().out
    assert "other reward       mean -6.6667" in told
    assert told.count("groups with a signal 50.0%") == 2
    assert "correlation        -1.0000" in told
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["step"], row["reward"], row["new_reward"], row["metrics"]["letters"]) for row in rows[-2:]] == [
        (10, 5.0, -10.0, 5.0)
    ] * 2, "by number of the step, not by name"


def test_steps_can_be_chosen_and_a_missing_reward_is_not_zero(run: Path, capsys) -> None:
    file = run / "trajectories/step_2.jsonl"
    file.write_text(file.read_text().replace('"dddd"', '"unknown"'))
    assert rescore_command.run([str(run), "--steps", "2,3"]) == 1
    told = capsys.readouterr().out
    assert "4 trajectories of 1 groups" in told
    assert "other reward       mean 2.0000" in told
    assert "1 missing" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give the run first"),
        (["none"], "no run 'none'"),
        (["{run}", "--steps", "5,6"], "no trajectories of these steps"),
        (["{run}", "--split", "eval"], "1 tasks of the run are not among those of split eval, such as train-7-1"),
        (["{run}", "--environment", "{env}:Turns"], "has no `score`"),
    ],
)
def test_what_cannot_be_rescored_is_refused(run: Path, tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rescore_command.run([word.format(run=run, env=tmp_path / "env.py") for word in words])
