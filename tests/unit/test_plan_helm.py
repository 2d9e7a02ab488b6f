"""The plan as values of the chart: what follows from the settings and the machines, and what pods cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sluice.config import ConfigError, load_run
from sluice.plan import Machines, make_plan
from sluice.plan.helm import helm

SCHEMA = Path(__file__).parents[2] / "deploy/helm/sluice/values.schema.json"


def planned(
    tmp_path: Path, machines: Machines, *flags: str, text: str = 'run = "r1"\n', **options: Any
) -> dict[str, Any]:
    """The values of a file with this text and these flags."""
    file = tmp_path / "rl.toml"
    file.write_text(text)
    words = ["@", str(file), *flags]
    run = load_run(words)
    return yaml.safe_load(helm(make_plan(run, machines, **options), run, words))


def known(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> None:
    """Every key is one of the chart's."""
    for key, value in values.items():
        assert key in schema["properties"], f"{path}/{key}"
        below = schema["properties"][key]
        if isinstance(value, dict) and "properties" in below:
            known(value, below, f"{path}/{key}")


def test_a_laptop(tmp_path: Path) -> None:
    values = planned(tmp_path, Machines.alike(cores=4))
    assert values["run"] == {"name": "r1", "settings": 'run = "r1"\n', "files": {}}
    assert (values["rollout"]["replicas"], values["rollout"]["gpus"], values["rollout"]["port"]) == (1, 0, 7103)
    assert (values["trainer"]["nodes"], values["trainer"]["processes"], values["trainer"]["gpus"]) == (1, 1, 0)
    assert values["trainer"]["resources"] == {"requests": {"cpu": "2"}, "limits": {"memory": "16Gi"}}
    assert "gateway" not in values
    known(values, json.loads(SCHEMA.read_text()))


def test_four_nodes_with_a_trainer_that_spans_two(tmp_path: Path) -> None:
    words = ("--allocation-mode", "vllm:d12t1+fsdp:d16", "--rollout.server.drain-s", "33.5")
    values = planned(tmp_path, Machines.alike(4, 8, 64), *words, extra={"gateway": 3, "relay": 2})
    trainer, rollout = values["trainer"], values["rollout"]
    assert (trainer["nodes"], trainer["processes"], trainer["gpus"]) == (2, 8, 8)
    assert trainer["storage"] == {"accessModes": ["ReadWriteMany"]}
    assert (rollout["replicas"], rollout["gpus"], rollout["drainSeconds"], rollout["httpPort"]) == (12, 1, 34, 7113)
    assert (values["gateway"]["enabled"], values["gateway"]["replicas"]) == (True, 3)
    assert values["relay"]["enabled"]
    assert rollout["flags"] == trainer["flags"] == list(words)
    known(values, json.loads(SCHEMA.read_text()))


def test_further_files_are_carried_and_named_to_every_part(tmp_path: Path) -> None:
    over = tmp_path / "over.toml"
    over.write_text("seed = 7\n")
    values = planned(tmp_path, Machines(), "@", str(over))
    assert values["run"]["files"] == {"1-over.toml": "seed = 7\n"}
    assert values["orchestrator"]["flags"] == ["@", "/etc/sluice/run/1-over.toml"]


def test_pods_cannot_share_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a GPU belongs to one pod.*allocation_mode"):
        planned(tmp_path, Machines.alike(1, 1, 8))


def test_files_come_before_flags(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="files of settings before the flags"):
        planned(tmp_path, Machines(), "--seed", "3", "@", str(tmp_path / "rl.toml"))
