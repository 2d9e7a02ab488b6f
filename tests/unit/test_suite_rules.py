"""What tests/conftest.py adds to every test: seeds, blame for failures that nobody awaited, and no silent skips in CI."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_programs import RankPrograms

TESTS = Path(__file__).parents[1]
LIMIT_S = 120.0


def run(
    programs: RankPrograms, directory: Path, text: str, workers: int = 0, **environment: str
) -> dict[str, list[str]]:
    """Run a file of tests under our conftest; return the outcomes of each test, in order."""
    (directory / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nfrom suite_rules import *\n"
    )
    (directory / "test_it.py").write_text(text)
    (directory / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nmarkers =\n  gpu: a device\n  docker: an engine\n"
    )
    log = directory / "log.jsonl"
    ours = {name: "" for name in os.environ if name == "CI" or name.startswith("PYTEST_")}
    words = [
        "-q",
        "-p",
        "no:cacheprovider",
        f"--numprocesses={workers}",
        f"--rootdir={directory}",
        f"--report-log={log}",
    ]
    program = programs.start("pytest", *words, str(directory), environment=ours | environment, output=directory / "out")
    program.wait(LIMIT_S)
    outcomes: dict[str, list[str]] = {}
    for line in log.read_text().splitlines():
        report = json.loads(line)
        if report.get("when") in {"call", "setup", "teardown"} and (
            report["when"] == "call" or report["outcome"] != "passed"
        ):
            outcomes.setdefault(report["nodeid"].rpartition("::")[2], []).append(report["outcome"])
    return outcomes


LEFT_BEHIND = """
import asyncio, gc
kept = []
async def test_leaves_a_failure():
    future = asyncio.get_running_loop().create_future()
    future.set_exception(ValueError("nobody looks"))
    kept.append(future)
async def test_innocent():
    kept.clear()
    gc.collect()
"""

SKIPPED = """
import pytest
def test_skipped(): pytest.skip("no tool")
@pytest.mark.skipif(True, reason="no tool")
def test_skipped_by_mark(): pass
@pytest.mark.gpu
def test_gpu(): pytest.skip("no device")
@pytest.mark.docker
@pytest.mark.skipif(True, reason="no engine")
def test_docker(): pass
@pytest.mark.xfail(strict=True)
def test_expected(): assert False
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_failure_that_nobody_awaited_is_blamed_on_the_test_that_left_it(
    workers: int, tmp_path: Path, rank_programs: RankPrograms
) -> None:
    outcomes = run(rank_programs, tmp_path, LEFT_BEHIND, workers)
    assert outcomes == {"test_leaves_a_failure": ["passed", "failed"], "test_innocent": ["passed"]}


@pytest.mark.slow
def test_a_skip_is_red_in_ci_but_for_devices_and_containers(tmp_path: Path, rank_programs: RankPrograms) -> None:
    skipped = {"test_gpu": ["skipped"], "test_docker": ["skipped"], "test_expected": ["skipped"]}
    assert run(rank_programs, tmp_path, SKIPPED) == {
        "test_skipped": ["skipped"],
        "test_skipped_by_mark": ["skipped"],
        **skipped,
    }
    assert run(rank_programs, tmp_path, SKIPPED, CI="true") == {
        "test_skipped": ["failed"],
        "test_skipped_by_mark": ["failed"],
        **skipped,
    }


@pytest.mark.parametrize("draws", [random.random, np.random.random, lambda: float(torch.rand(()))])
def test_numbers_without_a_seed_of_their_own_are_those_of_the_test(draws, seed_generators) -> None:
    first = draws()
    seed_generators()
    assert draws() == first
