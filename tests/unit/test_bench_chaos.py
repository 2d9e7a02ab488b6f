"""What `sluice bench chaos` says about a run that left too little to judge."""

import json
from pathlib import Path

import pytest

from benchmarks.chaos import Report, _Job, unlike


@pytest.mark.parametrize("rows", [[], [{"step": 1, "time": 1.0, "reward/mean": 0.5}], [{"step": 1}, {"step": 2}]])
def test_a_run_with_too_few_rows_fails_with_the_reason(rows: list[dict[str, float]], tmp_path: Path) -> None:
    directory, report = tmp_path / "chaos-1", Report(1)
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (directory / "report.json").write_text(json.dumps({"tokens_generated": 0, "tokens_lost": 0}))
    _Job(tmp_path, tmp_path, tmp_path, 9, disk=False)._judge(directory, report)
    few, steps, audit = report.failures
    assert few.startswith(
        f"metrics.jsonl has {len(rows)} rows, {'reward/mean' in str(rows):d} of them with a reward: too few"
    )
    assert steps == f"{len(rows)} steps instead of 9"
    assert audit.startswith("the run cannot be audited: ")
    assert "reward nan" in str(report)


CALM = [0.90, 0.91, 0.92]
"""Mean 0.91, standard deviation 0.01."""


@pytest.mark.parametrize(
    ("disturbed", "unlike_ones"),
    [
        ({1: 0.895}, 0),
        ({1: 0.885}, 1),
        ({1: float("nan")}, 1),
        ({1: 0.885, 2: 0.935, 3: 0.91}, 0),  # of several, one lies so far out by chance
        ({1: 0.865, 2: 0.955}, 2),
        ({1: 0.885, 2: 0.885}, 1),  # not by chance
        ({}, 0),
    ],
)
def test_rewards_are_unlike_undisturbed_ones_where_chance_does_not_explain_it(
    disturbed: dict[int, float], unlike_ones: int
) -> None:
    assert len(unlike(CALM, disturbed)) == unlike_ones
    assert unlike(CALM[:1], disturbed) == []
