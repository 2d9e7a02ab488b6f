"""Before a run it is said how many tokens it samples at most, and how long earlier runs with its settings took."""

from __future__ import annotations

import json
from pathlib import Path

from sluice.cli.rl import write_settings
from sluice.config import RunConfig, load_run
from sluice.watch.estimate import estimate, short


def settings(output_dir: Path, run: str, *words: str) -> RunConfig:
    """Return settings of a run."""
    own = (
        "--orchestrator.environment",
        "sums",
        "--orchestrator.max-steps",
        "200",
        "--orchestrator.sampling.max-tokens",
        "100",
    )
    return load_run(["--output-dir", str(output_dir), "--run", run, *own, *words])


def earlier(config: RunConfig, **report: object) -> None:
    """Write the files that an earlier run with these settings left."""
    config.run_dir.mkdir(parents=True)
    write_settings(config)
    (config.run_dir / "report.json").write_text(json.dumps(report))


def test_without_an_earlier_run_the_tokens_have_a_bound_and_the_time_is_unknown(tmp_path: Path) -> None:
    assert estimate(settings(tmp_path, "new")) == (
        "200 steps of 128 trajectories, at most 2.56 M tokens a turn; how long that takes is known after a few steps"
    )


def test_an_earlier_run_with_these_settings_says_how_long_it_takes(tmp_path: Path) -> None:
    earlier(
        settings(tmp_path, "first", "--orchestrator.max-steps", "10"),
        steps=10,
        step_s_mean=1.5,
        tokens_generated=40_000,
    )
    earlier(
        settings(tmp_path, "longer", "--orchestrator.sampling.max-tokens", "900"),
        steps=10,
        step_s_mean=9.0,
        tokens_generated=1,
    )
    said = estimate(settings(tmp_path, "new"))
    assert said.endswith(f"about 800 k tokens in 0:05:00 if its steps are as those of {tmp_path / 'first'}, 1.5 s each")


def test_runs_that_left_nothing_to_go_by_are_passed_over(tmp_path: Path) -> None:
    earlier(settings(tmp_path, "failed"), steps=0, step_s_mean=None, tokens_generated=0)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "report.json").write_text("{")
    assert "is known after a few steps" in estimate(settings(tmp_path, "new"))


def test_tokens_of_agents_have_no_bound_here(tmp_path: Path) -> None:
    assert "tokens a turn" not in estimate(settings(tmp_path, "new", "--orchestrator.workflow", "external"))


def test_counts_are_short() -> None:
    assert [short(each) for each in (12, 999, 1500, 2.4e6, 3e9, 4.56e12)] == [
        "12",
        "999",
        "1.5 k",
        "2.4 M",
        "3 G",
        "4.56 T",
    ]
