"""This version audits and continues a run of an earlier version that was killed midway."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from sluice.cli.main import main

SLUICE = (sys.executable, "-m", "sluice.cli.main")
FIXTURES = Path(__file__).parents[1] / "fixtures"

FURTHER_STEPS = 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("archive", sorted(FIXTURES.glob("run_v*.tar.gz")), ids=lambda each: each.name)
def test_a_run_of_an_earlier_version_goes_on(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    assert audited(capsys)["differences"] == []
    rows = (tmp_path / "outputs/first/metrics.jsonl").read_text().splitlines()
    before = max(json.loads(row)["step"] for row in rows)
    steps = before + FURTHER_STEPS
    words = ("rl", "@", "rl.toml", "--resume", "--plain", "--orchestrator.max-steps", str(steps))
    done = subprocess.run([*SLUICE, *words], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    *_, last = done.stdout.splitlines()
    assert last.startswith(f"run first done: {steps} steps"), "it ends by itself"
    report = json.loads((tmp_path / "outputs/first/report.json").read_text())
    assert (report["state"], report["steps"]) == ("succeeded", steps)
    result = audited(capsys)
    assert result["differences"] == []
    assert result["trained"] >= FURTHER_STEPS


def audited(capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    assert main(["audit", "first", "--json"]) == 0
    return json.loads(capsys.readouterr().out)
