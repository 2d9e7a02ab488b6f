"""What the files of a model tell before anything is loaded: a directory that cannot be trained is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import tiny_model

from rollout_svc.config import RolloutConfig
from rollout_svc.engines.base import EngineSettingsError
from rollout_svc.engines.slots import build
from sluice.config import CommonConfig, ConfigError
from sluice.models import INDEX, check_files

Tensors = dict[str, torch.Tensor]
WHOLE = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("saved"))


def rewritten(saved: Path, directory: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy of the model whose weights were changed."""
    path = Path(shutil.copytree(saved, directory / "model"))
    tensors = change(load_file(path / WHOLE))
    save_file({name: each.contiguous() for name, each in tensors.items()}, path / WHOLE, {"format": "pt"})
    return path


def in_two(path: Path, *, index: bool) -> Path:
    """Split the weights over two files."""
    tensors = load_file(path / WHOLE)
    (path / WHOLE).unlink()
    names = sorted(tensors)
    places = {}
    for part in (0, 1):
        file = f"model-{part + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[part::2]}, path / file, {"format": "pt"})
        places |= dict.fromkeys(names[part::2], file)
    if index:
        (path / INDEX).write_text(json.dumps({"weight_map": places}))
    return path


def test_parts_without_their_index_are_refused(saved: Path, tmp_path: Path) -> None:
    check_files(str(in_two(rewritten(saved, tmp_path / "whole", dict), index=True)))
    with pytest.raises(ConfigError, match=rf"holds model-00001-of-00002\.safetensors and no {INDEX}"):
        check_files(str(in_two(rewritten(saved, tmp_path / "parts", dict), index=False)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda all_: {name: each for name, each in all_.items() if "layers.1." not in name}, "num_hidden_layers is 2, and the files have 1"),
        (lambda all_: all_ | {"model.embed_tokens.weight": torch.zeros(40, 16)}, r"embed_tokens\.weight is \[40, 16\]"),
    ],
    ids=["fewer layers", "another vocabulary"],
)  # fmt: skip
def test_weights_of_another_model_are_refused(
    saved: Path, tmp_path: Path, change: Callable[[Tensors], Tensors], told: str
) -> None:
    with pytest.raises(ConfigError, match=f"are not those of its config.json: .*{told}"):
        check_files(str(rewritten(saved, tmp_path, change)))


def test_what_lies_beside_the_weights_is_no_weight(saved: Path, tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.layers.7.mtp.weight": torch.ones(2)}
    path = rewritten(saved, tmp_path, lambda all_: all_ | extra)
    save_file({"layers.9.wq.weight": torch.ones(2, 2)}, path / "consolidated.safetensors")
    check_files(str(path))


async def test_names_that_the_engine_does_not_know_are_no_failure_of_the_engine(saved: Path, tmp_path: Path) -> None:
    path = rewritten(saved, tmp_path, lambda all_: {f"language_{name}": each for name, each in all_.items()})
    check_files(str(path))  # only the loaded model tells
    engine = build(CommonConfig(model=str(path)), RolloutConfig(engine="transformers"))
    with pytest.raises(EngineSettingsError, match=r"does not name so: \['language_.* and lack \['"):
        await engine.start()
