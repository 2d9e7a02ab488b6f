"""An update makes the host wait for the device a fixed number of times, however many micro-batches it has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rank_programs import RankPrograms
from tiny_policy import tiny_model

pytestmark = pytest.mark.slow

LIMIT_S = 300.0


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, rank_programs: RankPrograms) -> dict[str, Any]:
    """What `host_waits.py` writes; it registers a device, which must not stay in the process of the other tests."""
    directory = tmp_path_factory.mktemp("waits")
    found, output = directory / "found.json", directory / "output"
    program = rank_programs.start("host_waits", str(tiny_model(directory)), str(found), environment={}, output=output)
    assert program.wait(LIMIT_S) == 0, output.read_text()[-4000:]
    return json.loads(found.read_text())


@pytest.mark.parametrize("preset", ["grpo", "aipo", "recomputed", "every mask"])
def test_the_host_waits_for_the_device_as_often_for_many_micro_batches_as_for_few(measured, preset):
    few, many = measured["updates"][preset]
    assert not few["skipped"]
    assert not many["skipped"]
    assert many["micro_batches"] > 3 * few["micro_batches"]
    assert many["waits"] == few["waits"]
    assert sum(many["waits"].values()) > 0  # the loss is read at the end of a step


def test_the_fake_device_counts_what_makes_a_host_wait(measured):
    assert sum(measured["operations"].values()) == 6
