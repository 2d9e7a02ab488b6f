"""What `sluice merge-adapter` says of directories that cannot be merged: one line with the remedy, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.config import ConfigError
from trainer_svc.offline.commands import MERGE_ADAPTER


@pytest.mark.parametrize(
    ("settings", "flags", "told"),
    [
        ("{", (), r"cannot read .*adapter_config\.json: .*; give the directory of an adapter"),
        ("[]", (), "names no base model: give it with --model"),
        (json.dumps({"base_model_name_or_path": None}), (), "names no base model: give it with --model"),
        (
            json.dumps({"base_model_name_or_path": "/nowhere"}),
            (),
            "there is no directory /nowhere.*another one with --model",
        ),
        (json.dumps({"base_model_name_or_path": "a/b"}), ("--model", "/elsewhere"), "there is no directory /elsewhere"),
        (json.dumps({"base_model_name_or_path": "a/b"}), ("--output", "."), "output: . exists: remove it"),
    ],
)
def test_an_adapter_without_a_base_is_told(tmp_path: Path, settings: str, flags: tuple[str, ...], told: str) -> None:
    (tmp_path / "adapter_config.json").write_text(settings)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ConfigError, match=told) as refused:
        MERGE_ADAPTER.run(["--adapter", str(tmp_path), "--output", str(tmp_path / "out"), *flags])
    assert "\n" not in str(refused.value)


def test_a_directory_without_the_files_of_an_adapter_is_told(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        with pytest.raises(ConfigError, match=f"holds no adapter as PEFT writes it: it has no {name}"):
            MERGE_ADAPTER.run(["--adapter", str(tmp_path)])
        (tmp_path / name).touch()
