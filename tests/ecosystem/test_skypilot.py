"""The SkyPilot example, as SkyPilot itself reads it, without a cloud."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from sluice.config import allocated as set_sizes
from sluice.config import load_run
from sluice.plan import Machines, make_plan
from sluice.plan.ray import seat

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-ecosystem-skypilot/bin/python"
TASK = ROOT / "deploy/skypilot/rl.yaml"

READ = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(json.dumps([task.num_nodes, resources.accelerators, task.envs]))
"""

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"{PYTHON.parent.parent.name} is not there: run `make install-ecosystem`"
    ),
]


def read(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PYTHON, "-c", READ, path], capture_output=True, text=True, check=False)


def test_the_example_asks_for_the_machines_that_its_allocation_needs() -> None:
    nodes, gpus, variables = json.loads(read(TASK).stdout.splitlines()[-1])
    (each,) = gpus.values()
    run = set_sizes(load_run([]).model_copy(update={"allocation_mode": variables["ALLOCATION"]}))
    bundles, _ = seat(make_plan(run, Machines.alike(nodes=nodes, devices=int(each), cores=8)))
    assert sum(bundle.gpus for bundle in bundles) == nodes * each


def test_a_wrong_key_is_found(tmp_path: Path) -> None:
    wrong = yaml.safe_load(TASK.read_text()) | {"node_count": 2}
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(wrong))
    refused = read(tmp_path / "wrong.yaml")
    assert refused.returncode != 0
    assert "node_count" in refused.stderr
