"""What the quickstart says at its end, from files as the services write them."""

import io
import json
import runpy
from pathlib import Path

import pytest
from rich.console import Console

from sluice.cli import quickstart
from sluice.cli.rl import claim
from sluice.config import ConfigError, load_run

ROOT = Path(__file__).parents[2]

EVALUATION = {"reward_mean": 0.5, "exact_share": 0.3, "greedy_reward_mean": 0.45, "greedy_exact_share": 0.35}

BY_ORCHESTRATOR = {
    "seed": 3,
    "steps": 8,
    "wall_s": 9.9,
    "tokens_generated": 9000,
    "tokens_trained": 6400,
    "max_staleness_seen": 2,
    "staleness_share_ge_1": 0.75,
    "requests_spanning_versions": 5,
    "mismatch_kl_mean": 1e-6,
}
"""What `orchestrator_svc.run.report` writes and the quickstart reads."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for name, gain in (("before", 0.0), ("after", 0.4)):
        metrics = {key: value + gain for key, value in EVALUATION.items()}
        (tmp_path / f"eval_{name}.json").write_text(json.dumps({"metrics": metrics}))
    lines = [{"step": n, "time": 100.0 + n, "reward/mean": 0.5 + n / 20, "staleness/mean": 0.75} for n in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "report.json").write_text(json.dumps(BY_ORCHESTRATOR))
    return tmp_path


def job_in(directory: Path) -> quickstart.Quickstart:
    return quickstart.Quickstart(quickstart.TASKS["sums"], Path("examples/sums"), directory, seed=3)


@pytest.mark.slow
def test_the_report_completes_the_one_of_the_orchestrator(run_dir: Path) -> None:
    report = quickstart.write_report(job_in(run_dir), wall_s=12.34, stages={"rl": 10.0})
    assert report == json.loads((run_dir / "report.json").read_text())
    assert report["stages_s"] == {"rl": 10.0}
    expected = BY_ORCHESTRATOR | {"reward_before": 0.5, "reward_after": 0.9, "wall_s": 12.3, "rl_wall_s": 9.9}
    assert {key: report[key] for key in expected} == expected
    assert (run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_shows_before_and_after_and_the_paths_of_all_files(run_dir: Path) -> None:
    (run_dir / "weights" / "v1.8").mkdir(parents=True)
    quickstart.write_report(job_in(run_dir), wall_s=12.3, stages={})
    out = io.StringIO()
    quickstart.show_report(Console(file=out, width=200), job_in(run_dir))
    text = out.getvalue()
    for expected in ("0.500", "0.900", "0.450", "tensorboard", "trajectories", "reward.png", "v1.8", "sluice eval"):
        assert expected in text


def test_the_trained_model_is_the_newest_version_by_number(tmp_path: Path) -> None:
    for name in ("v1.9", "v1.10", "v2.3", ".incoming"):
        (tmp_path / "weights" / name).mkdir(parents=True)
    job = quickstart.Quickstart(task=quickstart.TASKS["reverse_text"], example=Path(), directory=tmp_path, seed=0)
    assert job.trained() == tmp_path / "weights" / "v2.3"


def test_without_the_example_the_error_says_where_to_run_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="root of the repository"):
        quickstart.run(["--example", str(tmp_path)])


def test_an_earlier_quickstart_is_moved_aside_and_never_overwritten(tmp_path: Path) -> None:
    directory, out = tmp_path / "quickstart", io.StringIO()
    for number in (1, 2):
        directory.mkdir()
        (directory / "report.json").write_text(str(number))
        quickstart.make_room(directory, Console(file=out, width=300))
        assert not directory.exists()
        assert (tmp_path / f"quickstart.{number}" / "report.json").read_text() == str(number)
    assert out.getvalue().splitlines()[1] == f"moved the earlier {directory} to {directory}.2"


def test_a_quickstart_that_another_process_runs_is_left_alone(tmp_path: Path) -> None:
    run = load_run(["--output-dir", str(tmp_path), "--run", "quickstart"])
    with claim(run, resume=True) as directory, pytest.raises(ConfigError, match="another process"):
        quickstart.make_room(directory, Console(file=io.StringIO()))


def test_the_picture_shows_what_a_terminal_shows_at_the_end() -> None:
    screen = runpy.run_path(str(ROOT / "docs/images/draw_quickstart.py"))["screen"]
    redrawn = "\r\x1b[2K\x1b[1A\x1b[2K"  # as rich redraws a panel of two lines
    assert screen(f"one\r\ntwo\r\n3{redrawn}\x1b[1mTWO\x1b[0m\r\nTHREE\r\n") == [
        "one",
        "\x1b[1mTWO\x1b[0m",
        "THREE",
        "",
    ]
