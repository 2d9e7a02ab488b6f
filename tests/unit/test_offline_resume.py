"""An offline run that was killed: what --resume continues, what it says, and that it never costs a finished model."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_policy import tiny_model

from sluice.config import ConfigError
from trainer_svc.checkpoint import saver
from trainer_svc.offline import checkpoints as offline_checkpoints
from trainer_svc.offline.checkpoints import checkpoint_directory
from trainer_svc.offline.commands import SFT
from trainer_svc.offline.config import SftConfig
from trainer_svc.offline.runs import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("resume"))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} ", "completion": f"is {i}"}) + "\n" for i in range(12)))
    return path


def config(model: Path, rows: Path, output: Path, **changes: object) -> SftConfig:
    settings = {"max_steps": 6, "batch_size": 4, "lr": 1e-3, "checkpoint_every": 2, "log_every": 1, "device": "cpu"}
    return SftConfig(**{**settings, "model": str(model), "data": str(rows), "output": output, **changes})


def words(model: Path, rows: Path, output: Path, *more: str) -> list[str]:
    return [
        *("--model", str(model), "--data", str(rows), "--output", str(output), "--device", "cpu", "--lr", "1e-3"),
        *("--max-steps", "6", "--batch-size", "4", "--checkpoint-every", "2", "--resume", *more),
    ]


def killed_in_step(number: int, settings: SftConfig) -> None:
    def report(line: str) -> None:
        if line.startswith(f"step {number}/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings, report)
    for thread in threading.enumerate():  # a checkpoint that was being written is whole
        if thread.name == "checkpoint":
            thread.join()


def killed_before_its_checkpoints_go(settings: SftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(offline_checkpoints, "remove_checkpoints", kill)
        with pytest.raises(KeyboardInterrupt):
            run(settings, lambda _: None)


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model.safetensors")


def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config(model, rows, tmp_path / "straight"), lambda _: None)
    killed_in_step(5, config(model, rows, tmp_path / "killed"))
    assert SFT.run(words(model, rows, tmp_path / "killed")) == 0
    assert "resumed from" in capsys.readouterr().out
    resumed = weights(tmp_path / "killed")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights(tmp_path / "straight").items())
    assert not checkpoint_directory(tmp_path / "killed").exists()


def test_a_kill_between_the_model_and_the_removal_of_checkpoints_costs_nothing(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    killed_before_its_checkpoints_go(config(model, rows, output), monkeypatch)
    assert checkpoint_directory(output).exists()
    finished = weights(output)
    with pytest.raises(ConfigError, match="finished model of an earlier run: keep it"):
        SFT.run([each for each in words(model, rows, output) if each != "--resume"])
    assert SFT.run(words(model, rows, output)) == 0
    assert "the run had finished; its model is complete" in capsys.readouterr().out
    assert all(torch.equal(tensor, weights(output)[name]) for name, tensor in finished.items())
    assert not checkpoint_directory(output).exists()
    with pytest.raises(ConfigError, match="no checkpoint to resume from") as refused:
        SFT.run(words(model, rows, output))
    assert "remove" not in str(refused.value)


def test_a_directory_of_somebody_else_is_not_taken_for_the_model(model: Path, rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    killed_in_step(5, config(model, rows, output))
    output.mkdir()
    with pytest.raises(ConfigError, match="did not write it: move it away"):
        SFT.run(words(model, rows, output))
    assert checkpoint_directory(output).exists()


def test_a_damaged_checkpoint_is_told_with_what_to_do(model: Path, rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    killed_in_step(6, config(model, rows, output))
    newest = max(checkpoint_directory(output).glob("step_*"))
    shard = next((newest / "state").iterdir())
    whole = shard.read_bytes()
    for content, problem in ((whole[:-1], f"has {len(whole) - 1} bytes"), (whole[:-1] + b"?", "was changed")):
        shard.write_bytes(content)
        with pytest.raises(ConfigError, match=f"{shard.name}.* {problem}.*remove {newest}") as told:
            SFT.run(words(model, rows, output))
        assert "\n" not in str(told.value)


def test_other_settings_are_refused_with_those_of_the_checkpoint(model: Path, rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    killed_in_step(5, config(model, rows, output))
    with pytest.raises(ConfigError, match=r"the checkpoint was written with lr = 0\.001: resume with the same"):
        SFT.run(words(model, rows, output, "--lr", "1e-4"))


def test_a_checkpoint_of_a_release_with_fewer_settings_is_resumed(model: Path, rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    killed_in_step(5, config(model, rows, output))
    for path in checkpoint_directory(output).glob("step_*/manifest.json"):
        manifest = json.loads(path.read_text())
        assert manifest["settings"].pop("learn_roles") == '["assistant"]'
        path.write_text(json.dumps(manifest))
    assert SFT.run(words(model, rows, output)) == 0


def test_a_full_disk_ends_the_run_with_what_to_do(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> list[Path]:
        raise OSError("No space left on device")

    monkeypatch.setattr(saver, "write_slices", full)
    with pytest.raises(ConfigError, match=r"No space left on device\): free space for .*out.checkpoints"):
        SFT.run(words(model, rows, tmp_path / "out"))
