"""A run that an earlier version left, killed on its way, is audited and continued by this one."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SLUICE = (sys.executable, "-m", "sluice.cli.main")
FIXTURES = Path(__file__).parents[1] / "fixtures"

FURTHER_STEPS = 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("archive", sorted(FIXTURES.glob("run_v*.tar.gz")), ids=lambda each: each.name)
def test_a_run_of_an_earlier_version_goes_on(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    assert audited(tmp_path)["differences"] == []
    rows = (tmp_path / "outputs/first/metrics.jsonl").read_text().splitlines()
    before = max(json.loads(row)["step"] for row in rows)
    steps = before + FURTHER_STEPS
    words = ("rl", "@", "rl.toml", "--resume", "--plain", "--orchestrator.max-steps", str(steps))
    done = subprocess.run([*SLUICE, *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads((tmp_path / "outputs/first/report.json").read_text())
    assert (report["state"], report["steps"]) == ("succeeded", steps)
    result = audited(tmp_path)
    assert result["differences"] == []
    assert result["trained"] >= FURTHER_STEPS


def audited(directory: Path) -> dict:
    words = ("audit", "first", "--json")
    done = subprocess.run([*SLUICE, *words], cwd=directory, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout)
