"""What `sluice report` makes of the files of a run."""

import json
from pathlib import Path

import pytest

from sluice.cli import report
from sluice.config import ConfigError


def write(run_dir: Path, *lines: dict) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_step_that_was_repeated_after_a_resume_counts_once(tmp_path: Path) -> None:
    write(tmp_path, {"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.2}, {"step": 2, "reward/mean": 0.3})
    assert report.series(report.read_steps(tmp_path), "reward") == [(1, 0.1), (2, 0.3)]


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"step": 1, "reward/mean": None}, {"step": 2, "reward/mean": 0.2})
    assert report.series(report.read_steps(tmp_path), "reward") == [(2, 0.2)]


def test_the_summary_compares_the_ends_of_the_run(tmp_path: Path) -> None:
    write(tmp_path, *({"step": n, "time": 100.0 + n, "reward/mean": n / 20} for n in range(1, 21)))
    found = report.summarise(report.read_steps(tmp_path))
    assert (found["steps"], found["train_wall_s"]) == (20, 19.0)
    assert found["reward_first"] == pytest.approx(0.075)
    assert found["reward_last"] == pytest.approx(0.975)


@pytest.mark.slow
def test_the_command_prints_a_table_and_draws_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        tmp_path, *({"step": n, "time": 100.0 + n, "reward/mean": n / 20, "staleness/mean": 1.0} for n in range(1, 21))
    )
    assert report.run([str(tmp_path)]) == 0
    assert "20 steps in 19.0 s" in capsys.readouterr().out
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def environment(name: str, **figures) -> dict:
    counts = dict.fromkeys(("groups_accepted", "groups_refilled", "groups_failed", "groups_passed_on"), 0)
    return {
        "name": name,
        "wanted_share": 0.5,
        "groups": 10,
        **counts,
        "pools": {"new": 4},
        "groups_by_pool": {"new": 10},
        "overlong": {},
        "quarantined": [],
        "quarantined_count": 0,
        **figures,
    }


def test_the_command_shows_the_mix_the_pools_and_the_tasks_in_quarantine(tmp_path: Path, capsys) -> None:
    write(tmp_path, {"step": 1, "time": 1.0, "reward/mean": 0.5}, {"step": 2, "time": 2.0, "reward/mean": 0.5})
    faulty = {"task_id": "3+4", "failures": 3, "problem": "ENVIRONMENT_DIED: killed"}
    mixed = [
        environment("reverse", wanted_share=0.7, groups=37, groups_refilled=7),
        environment("sums", groups_by_pool={"new": 4, "hard": 6}, quarantined=[faulty], quarantined_count=1),
    ]
    (tmp_path / "report.json").write_text(json.dumps({"environments": mixed}))
    report.run([str(tmp_path)])
    shown = capsys.readouterr().out
    for expected in ("75.0%", "in quarantine", "0 (6)", "3+4", "ENVIRONMENT_DIED: killed"):
        assert expected in shown


def test_the_command_says_what_was_set_aside_and_why(tmp_path: Path, capsys) -> None:
    (tmp_path / report.METRICS_FILE).write_text('{"step": 1, "reward/mean": 0.5}\n')
    said = {"REWARDS_UNFIT": {"trajectories": 8, "problem": "maxrl needs rewards of at least 0"}}
    (tmp_path / "report.json").write_text(json.dumps({"set_aside": said}))
    assert report.run([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "set aside, because it can never be trained" in shown
    assert all(each in shown for each in ("REWARDS_UNFIT", "8", "maxrl needs rewards of at least 0"))


def test_the_command_says_what_was_wrong_at_the_end_and_what_to_do(tmp_path: Path, capsys) -> None:
    (tmp_path / report.METRICS_FILE).write_text('{"step": 1, "reward/mean": 0.5}\n')
    found = {
        "rule": "reward",
        "level": "broken",
        "since_step": 7,
        "what": "it fell",
        "remedy": "Go back.",
        "active": True,
    }
    (tmp_path / "report.json").write_text(
        json.dumps({"findings": [found, {**found, "rule": "length", "active": False}]})
    )
    assert report.run([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "BROKEN reward since step 7: it fell. Go back." in shown
    assert "length" not in shown


def test_a_run_with_one_environment_and_nothing_to_tell_has_no_further_tables() -> None:
    assert report.report_tables({}) == []
    assert report.report_tables({"environments": [environment("only")]}) == []


@pytest.mark.parametrize("content", [None, ""])
def test_a_directory_without_steps_is_an_error_that_names_it(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        report.run([str(tmp_path)])
