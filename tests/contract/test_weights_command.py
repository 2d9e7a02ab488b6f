"""`sluice weights`: what an operator sees of a run's versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from weightsync_stack import RUN, Stack, running_stack

from sluice.config import ConfigError
from sluice.versions import Version
from weightsync.inspect.weights_command import COMMAND

CHANGED = 7
"""Values of the matrix that differ between the two versions."""


def weights(number: int) -> dict[str, torch.Tensor]:
    matrix = torch.linspace(-1, 1, 64 * 1024).reshape(64, 1024).bfloat16()
    matrix.view(-1)[:CHANGED] += number
    return {"model.layers.0.mlp.up_proj.weight": matrix, "model.norm.weight": torch.ones(64)}


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path / "out", keep=5) as running:
        for number in (1, 2):
            await running.publisher.update(Version(1, number), weights(number), deadline_s=30)
        yield running


async def sluice_weights(stack: Stack, *words: str) -> int:
    return await asyncio.to_thread(COMMAND.run, [*words, "--address", stack.target, "--run", RUN])


async def test_lists_versions_with_what_they_cost(stack: Stack, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert await sluice_weights(stack, "ls") == 0
    newest, oldest = (line.split() for line in capsys.readouterr().out.splitlines()[1:3])
    assert newest[:2] == ["1.2", "delta"]
    assert oldest[:2] == ["1.1", "anchor"]


async def test_shows_the_newest_version_and_an_older_one(stack: Stack, capsys) -> None:
    assert await sluice_weights(stack, "show") == 0
    shown = capsys.readouterr().out
    assert "version 1.2" in shown
    assert "base    1.1" in shown
    assert "1 unchanged" in shown
    assert await sluice_weights(stack, "show", "1.1") == 0
    assert "anchor" in capsys.readouterr().out


async def test_verifies_every_byte_and_finds_damage(stack: Stack, capsys) -> None:
    assert await sluice_weights(stack, "verify", "1.2") == 0
    assert "is whole" in capsys.readouterr().out
    anchor = stack.directory / "v1.1" / "model.safetensors"
    content = bytearray(anchor.read_bytes())
    content[-1] ^= 1
    anchor.write_bytes(content)
    assert await sluice_weights(stack, "verify", "1.1") == 1
    assert "DAMAGED" in capsys.readouterr().out


async def test_compares_two_versions(stack: Stack, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert await sluice_weights(stack, "diff", "1.1", "1.2") == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split()[:3] == ["model.layers.0.mlp.up_proj.weight", "65,536", f"{CHANGED / 65536:.3%}"]
    assert "1 of 2 tensors" in rows[-1]


async def test_comparing_with_a_damaged_version_says_so(stack: Stack, capsys) -> None:
    anchor = stack.directory / "v1.1" / "model.safetensors"
    content = bytearray(anchor.read_bytes())
    content[-1] ^= 1
    anchor.write_bytes(content)
    assert await sluice_weights(stack, "diff", "1.1", "1.2") == 1
    assert "DAMAGED: version 1.1" in capsys.readouterr().out


async def test_a_tensor_of_another_shape_is_no_nan(stack: Stack, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    reshaped = {**weights(2), "model.norm.weight": torch.ones(2, 32)}
    await stack.publisher.update(Version(1, 3), reshaped, deadline_s=30)
    assert await sluice_weights(stack, "diff", "1.2", "1.3") == 0
    shown = capsys.readouterr().out
    assert "other type, shape or name" in shown
    assert "nan" not in shown


@pytest.mark.parametrize("verb", ["ls", "diff"])
def test_each_verb_has_help(verb: str, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        COMMAND.run([verb, "--help"])
    assert left.value.code == 0
    assert "diff VERSION VERSION" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no action is given"),
        (["forget"], "no action is given"),
        (["diff", "1.1"], "takes 2 versions, not 1"),
        (["diff", "--run", "r", "1.1", "1.2"], "come before the settings"),
        (["ls", "1.1"], "takes 0 versions, not 1"),
        (["show", "newest"], "expected epoch.number"),
    ],
)
def test_says_what_is_wrong_with_the_words(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        COMMAND.run(words)


async def test_a_version_that_is_not_there_is_named(stack: Stack) -> None:
    with pytest.raises(ConfigError, match=r"no version 9\.9"):
        await sluice_weights(stack, "show", "9.9")


@pytest.mark.slow
def test_a_service_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1"):
        COMMAND.run(["ls", "--address", "127.0.0.1:1", "--deadline-s", "3"])
