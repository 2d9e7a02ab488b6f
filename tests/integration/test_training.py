"""`sluice.train` in a script that nothing guards: a run of every service, and what a script may give."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import sluice
from sluice import training
from sluice.cli.init_model import ModelShape, init_model
from sluice.errors import ConfigError
from sluice.supervise.log_records import Records

SCRIPT = """
import json, sys
import sluice

print("top", flush=True)

def longer(prompts, completions, wanted, **_):
    assert len(set(wanted)) == 1
    return [float(len(each[0]["content"])) for each in completions]

def constant(completions, **_):
    return [0.5 for _ in completions]

rows = [{"prompt": [{"role": "user", "content": "abc"}], "wanted": number} for number in range(8)]
settings = {
    "orchestrator": {"batch_size": 2, "group_size": 2, "max_steps": 2, "sampling.max_tokens": 8},
    "rollout": {"engine": "transformers", "max_model_len": 64},
}
run = sluice.train(sys.argv[1], rows, [longer, constant], reward_weights=[1.0, 2.0], output_dir=sys.argv[2], settings=settings)
assert not (set(sys.modules) & {"torch", "grpc"}), "the script itself stays light"
print(json.dumps({"model": str(run.model), "rewards": run.rewards, "metrics": [dict(each) for each in run.metrics]}))
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_script_trains_with_its_own_reward_functions(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    init_model(tmp_path / "model", ModelShape(layers=1))
    argv = [sys.executable, "mine.py", "model", "runs"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("top") == 1 + sum("top" in line for line in done.stdout.splitlines() if "|" in line)
    told = json.loads(done.stdout.splitlines()[-1])
    assert (tmp_path / told["model"] / "config.json").exists()
    assert len(told["rewards"]) == 2
    for step in told["metrics"]:
        assert step["environment/constant"] == 0.5
        assert step["reward/mean"] == pytest.approx(step["environment/longer"] + 1.0)
    failed = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert failed.returncode == 1
    last = failed.stderr.splitlines()[-1]
    assert last.startswith(
        "sluice.training.TrainingFailedError: run train ended with exit code 2: run 'train' exists in runs/train"
    )


def top_level() -> None:
    """A function that other processes find."""


def test_what_other_processes_cannot_find_is_refused() -> None:
    assert training._location("file.py:name") == "file.py:name"
    assert training._location(top_level) == f"{__name__}:top_level"
    for thing in (lambda: 0, [top_level].append):
        with pytest.raises(ConfigError, match="top level of a file"):
            training._location(thing)


def test_arguments_that_exclude_each_other_or_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give either environment"):
        sluice.train("m", "rows.jsonl", environment="a.py:A")
    with pytest.raises(ConfigError, match="has no rows"):
        sluice.train("m", [], top_level, output_dir=tmp_path)
    with pytest.raises(ConfigError, match="not what JSON has"):
        sluice.train("m", [{"prompt": "?", "image": object()}], top_level, output_dir=tmp_path)


@pytest.mark.slow
def test_a_wrong_setting_is_the_reason_and_no_logs_are_named_that_there_are_not(tmp_path: Path, capsys) -> None:
    rows = [{"prompt": "hi"}] * 8
    with pytest.raises(training.TrainingFailedError) as failed:
        sluice.train("m", rows, "rewards:near", output_dir=tmp_path, settings={"trainer.lrr": 1})
    assert str(failed.value) == (
        "run train ended with exit code 2: --trainer.lrr: unknown key 'trainer.lrr'; did you mean 'trainer.lr'?"
    )
    assert "sluice: --trainer.lrr: unknown key" in capsys.readouterr().err, "it is printed, too"


def test_the_reason_of_a_run_that_failed_is_that_of_its_report_or_of_the_service_that_ended_it(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    written = Records("orchestrator")
    lines = ['{"event": "x"}', "sluice: no tasks: raised", '  File "env.py"']
    (tmp_path / "logs" / "orchestrator.log").write_text(
        "".join(f"{each}\n" for line in lines for each in written.of(line))
    )
    assert training._reason_in(tmp_path, 0.0) == 'no tasks: raised\n  File "env.py"'
    (tmp_path / "report.json").write_text('{"error": "every task is in quarantine"}')
    assert training._reason_in(tmp_path, 0.0) == "every task is in quarantine"
    assert training._reason_in(tmp_path, 1e12) == "", "of an earlier start"
