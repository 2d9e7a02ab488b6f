"""`sluice eval --weights-dir` beside a live run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from orchestrator_svc.commands.eval import command as eval_command
from orchestrator_svc.commands.eval.command import evaluations
from orchestrator_svc.commands.eval.config import EvalConfig
from orchestrator_svc.commands.eval.play import Outcome
from orchestrator_svc.run.evaluation import EvalResult
from sluice.config import ConfigError


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    for name in ("v1.1", "v1.2"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_version_that_its_run_removed_meanwhile_is_left_out(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compared(config: EvalConfig) -> tuple[dict[str, object], Outcome]:
        if config.model.endswith("v1.1"):
            shutil.rmtree(config.model)
            raise ConfigError("there is no directory")
        return {}, Outcome(EvalResult(), "1.2", 1, 1, 0)

    monkeypatch.setattr(eval_command, "_compared", compared)
    monkeypatch.setattr(eval_command, "_print", lambda _: None)
    assert [
        result["checkpoint"] for result, _ in evaluations(EvalConfig(weights_dir=weights, environment="words"))
    ] == ["v1.2"]
    assert f"{weights}/v1.1 is left out: its run has removed it meanwhile" in capsys.readouterr().err


def test_other_mistakes_end_the_evaluation_and_so_does_the_loss_of_all_versions(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(config: EvalConfig) -> tuple[dict[str, object], Outcome]:
        raise ConfigError("no such engine")

    monkeypatch.setattr(eval_command, "_compared", compared)
    with pytest.raises(ConfigError, match="no such engine"):
        list(evaluations(EvalConfig(weights_dir=weights, environment="words")))

    def removed(config: EvalConfig) -> tuple[dict[str, object], Outcome]:
        shutil.rmtree(config.model)
        return compared(config)

    monkeypatch.setattr(eval_command, "_compared", removed)
    with pytest.raises(ConfigError, match="has none of the versions any more"):
        list(evaluations(EvalConfig(weights_dir=weights, environment="words")))
