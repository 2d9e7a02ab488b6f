"""An update makes the host wait for the device a fixed number of times, however many micro-batches it has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_policy import tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `host_waits.py` prints; it registers a device, which must not stay in the process of the other tests."""
    script = Path(__file__).with_name("host_waits.py")
    command = [sys.executable, script, str(tiny_model(tmp_path_factory.mktemp("model")))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


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
