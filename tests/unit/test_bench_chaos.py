"""What `sluice bench chaos` says about a run that left too little to judge."""

import json
from pathlib import Path

import pytest

from benchmarks.chaos import Report, _Job


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
