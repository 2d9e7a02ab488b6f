"""The rules over recorded runs (`tests/fixtures/record_runs.py`): nothing is found in healthy ones, and in each broken one its fault."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from google.protobuf.json_format import ParseDict

from sluice.v1 import orchestrator_pb2
from sluice.watch.live import LoadReader
from sluice.watch.rules import Row
from sluice.watch.watch import Finding, Watch

RUNS = Path(__file__).parents[1] / "fixtures/runs"
STALENESS = 2

BROKEN = {
    "lr-x100": ("effective-samples", 2),
    "pays-for-length": ("length", 45),
    "slow-replica": ("slow-replica", 120),
    "dying-environment": ("failed-calls", 1),
    "other-precision": ("precision", 1),
}
"""By recording: the rule that must find its fault before any other finds anything, and the last step after which that may begin."""

HEALTHY = sorted({path.name.removesuffix(".jsonl.gz") for path in RUNS.glob("*.jsonl.gz")} - BROKEN.keys())


def found_in(name: str) -> list[Finding]:
    """Return the findings of the rules in a recorded run, in the order in which they begin."""
    watch, reader = Watch(max_staleness=STALENESS), LoadReader()
    begun: list[Finding] = []
    with gzip.open(RUNS / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for each in map(json.loads, lines):
            if "step" in each:
                step = int(each["step"].pop("step"))
                begun += watch.step(Row(step, each["time"], each["step"]))
            else:
                run = ParseDict(each["run"], orchestrator_pb2.Run())
                begun += watch.load(reader.read(run, each["time"]))
    return begun


def test_five_tasks_on_two_engines_are_recorded() -> None:
    assert len(HEALTHY) == 10


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_run(name: str) -> None:
    assert [(each.rule.name, each.since_step, each.what) for each in found_in(name)] == []


@pytest.mark.parametrize("name", BROKEN)
def test_the_fault_of_a_broken_run_is_found_first_and_by_no_other_family(name: str) -> None:
    rule, step = BROKEN[name]
    found = found_in(name)
    assert found[0].rule.name == rule
    assert found[0].since_step <= step
    assert {each.rule.family for each in found} == {found[0].rule.family}
