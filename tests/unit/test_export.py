"""`sluice export`: weights of a run with a model card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from orchestrator_svc.commands import export as export_command
from sluice.config import ConfigError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "outputs/mine"
    for version in ("v1.9", "v1.10"):
        weights = directory / "weights" / version
        weights.mkdir(parents=True)
        (weights / "model.safetensors").write_bytes(version.encode())
        (weights / "config.json").write_text("{}")
        (weights / "manifest.json").write_text("{}")
    (directory / "journal.sqlite").touch()
    (directory / "config.toml").write_text(
        'run = "mine"\nmodel = "Qwen/Qwen3-0.6B"\nseed = 3\n[orchestrator]\nenvironment = "env.py:A"\nbatch_size = 4\ngroup_size = 8\n'
        '[trainer]\nlr = 1e-5\n[trainer.objective]\npreset = "dapo"\n'
    )
    (directory / "report.json").write_text(json.dumps({"tokens_trained": 12345, "wall_s": 61.2}))
    lines = [{"step": 9, "reward/mean": 1.0}, {"step": 10, "eval/reward_mean": 0.75, "eval/reward_stderr": 0.1}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_the_last_weights_are_written_with_a_card_that_machines_read_too(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    assert export_command.run([str(run), str(target), "--license", "apache-2.0"]) == 0
    assert {each.name for each in target.iterdir()} == {"README.md", "model.safetensors", "config.json"}
    assert (target / "model.safetensors").read_bytes() == b"v1.10", "by number, not by name"
    _, header, card = (target / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(header)["base_model"] == "Qwen/Qwen3-0.6B"
    assert yaml.safe_load(header)["license"] == "apache-2.0"
    for row in (
        "| objective | dapo |",
        "| tasks x attempts a step | 4 x 8 |",
        "| tokens trained | 12,345 |",
        "| reward_mean | 0.7500 |",
    ):
        assert row in card
    assert "stderr" not in card


def test_another_step_can_be_chosen(run: Path, tmp_path: Path) -> None:
    assert export_command.run(["mine", str(tmp_path / "nine"), "--output-dir", str(run.parent), "--step", "9"]) == 0
    assert (tmp_path / "nine/model.safetensors").read_bytes() == b"v1.9"
    assert "held-out" not in (tmp_path / "nine/README.md").read_text()


def test_what_cannot_be_exported_is_refused_and_nothing_is_overwritten(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="has no step 7; it has 9, 10"):
        export_command.run([str(run), str(tmp_path / "x"), "--step", "7"])
    (tmp_path / "full").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        export_command.run([str(run), str(tmp_path / "full")])
    assert not list((tmp_path / "full").iterdir())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="is written, but cannot be pushed to a/b"):
        export_command.run([str(run), str(tmp_path / "pushed"), "--push", "a/b"])
    assert (tmp_path / "pushed/model.safetensors").exists()
