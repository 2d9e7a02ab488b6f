"""What a loader reads is noted, whatever ways it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from weightsync.engine.read_recorder import Copy, ReadRecorder, Region


@pytest.fixture
def mapped(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(48.0).reshape(6, 8), "b": torch.arange(8).bfloat16()}, path)
    with safe_open(path, framework="pt") as file:
        yield {name: file.get_tensor(name) for name in ("a", "b")}


def recorded(tensors, load) -> ReadRecorder:
    recorder = ReadRecorder()
    given = dict(recorder.watch(tensors.items()))
    with recorder:
        load(given)
    assert not recorder.failure
    return recorder


def test_what_is_copied_by_slices_is_noted_by_slices(mapped):
    target = torch.empty(12, device="meta")

    def load(given):
        target[:8].copy_(given["a"].narrow(0, 2, 1)[0])
        target[8:].copy_(given["b"][4:])

    recorder = recorded(mapped, load)
    assert recorder.reads() == {"a": ((16, 24),), "b": ((4, 8),)}
    key = Copy.storage_key(target)
    assert [(copy.name, copy.storage, copy.target.offset) for copy in recorder.copies] == [("a", key, 0), ("b", key, 8)]


def test_columns_are_noted_row_by_row(mapped):
    recorder = recorded(mapped, lambda given: torch.empty(6, 4).copy_(given["a"].chunk(2, dim=1)[1]))
    assert recorder.reads()["a"] == tuple((8 * row + 4, 8 * row + 8) for row in range(6))


def test_a_transposed_read_is_noted(mapped):
    recorder = recorded(mapped, lambda given: torch.empty(8, 2).copy_(given["a"].t()[:, :2]))
    assert recorder.reads()["a"] == ((0, 16),)


@pytest.mark.parametrize(
    "read",
    [
        lambda a: a[1].to(torch.bfloat16),
        lambda a: a[1].clone(),
        lambda a: torch.cat([a[1], a[1]]),
        lambda a: a[1].sum().item(),
        lambda a: a[1].exp(),
        lambda a: a[1].view(torch.int16)[1:].clone(),
        lambda a: torch.empty(8).add_(a[1]),
        lambda a: torch.empty(8).copy_(a.as_strided((8,), (1,), a.storage_offset() + 8)),
    ],
)
def test_every_way_to_read_counts(mapped, read):
    assert recorded(mapped, lambda given: read(given["a"])).reads() == {"a": ((8, 16),), "b": ()}


def test_looking_at_a_tensor_and_reading_others_reads_nothing_of_it(mapped):
    def load(given):
        assert given["b"].unsqueeze(0).t()[2:].shape == (6, 1)
        torch.empty(8).copy_(mapped["a"][0])

    assert recorded({"b": mapped["b"]}, load).reads() == {"b": ()}


def test_a_copy_can_be_done_again_from_its_description(mapped):
    target = torch.zeros(4, 6)
    recorder = recorded(mapped, lambda given: target[1:3].copy_(given["a"].narrow(1, 4, 2).t()))
    (copy,) = recorder.copies
    again = torch.zeros(4, 6)
    copy.target.of(again).copy_(copy.source.of(mapped["a"]))
    assert again.equal(target)
    assert Region(0, (2, 2), (2, 1)).of(torch.arange(8.0)[4:]).tolist() == [[4, 5], [6, 7]]
