"""Offline training by two processes gives what one gives, here preferences and a sharded adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_programs import RankPrograms
from safetensors.torch import load_file

from sluice.cli.init_model import ModelShape, init_model
from trainer_svc.offline.commands import DPO

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
SHAPE = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=64)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The model, its data and the settings; the batch does not divide by two."""
    directory = tmp_path_factory.mktemp("ranks")
    init_model(directory / "model", SHAPE, seed=3)
    rows = (f'{{"prompt": "{word}", "chosen": "{word[::-1]}", "rejected": "{word * 2}"}}' for word in NAMES)
    (directory / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    settings = {"data": directory / "rows.jsonl", "model": directory / "model", "device": "cpu", "threads": 1}
    settings |= {
        "lr": 3e-3,
        "eps": 1e-6,
        "batch-size": 7,
        "max-steps": 4,
        "eval-share": 0.2,
        "log-every": 2,
        "token-budget": 32,
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


NAMES = [first + second for first in "abcdefg" for second in ("xy", "z", "uvwxyz")]


def of_two(programs: RankPrograms, directory: Path, *words: str) -> str:
    """What two processes say."""
    outputs = [directory / f"rank-{rank}.log" for rank in range(2)]
    with programs.group(2, "sluice.cli.main", *words, outputs=outputs) as ranks:
        codes = [rank.wait(TIMEOUT_S) for rank in ranks]
    said = "".join(each.read_text() for each in outputs)
    assert codes == [0, 0], said
    return said


def facts(said: str) -> list[str]:
    """Losses and figures, without what depends on the machine."""
    return [line.partition("  lr ")[0] for line in said.splitlines() if line.startswith(("step", "held out"))]


def test_two_processes_learn_what_one_learns(words, tmp_path, capsys, rank_programs):
    words = [*words, "--lora.rank", "4"]
    assert DPO.run([*words, "--output", str(tmp_path / "one")]) == 0
    alone = capsys.readouterr().out
    together = of_two(rank_programs, tmp_path, "dpo", *words, "--output", str(tmp_path / "two"))
    assert facts(together) == facts(alone)
    assert len(facts(alone)) == 4
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-5, rtol=1e-5)
