"""The launcher of a trainer's ranks ends as the rank that failed first ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_wrong_settings_of_the_ranks_become_the_exit_code_of_the_launcher() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "sluice.cli.main", "ranks", "--processes", "2", "trainer", "--lr", "fast"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2
    assert "trainer.lr" in ended.stderr
