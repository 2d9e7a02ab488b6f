"""Rows on their way to another rank: what arrives is what was sent."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.versions import Version, VersionSpan
from trainer_svc.batch.rows import OPTIONAL_COLUMNS, TrainingRow
from trainer_svc.service.rank_group import decode_rows, encode_rows

names = st.text(max_size=12)
numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)


def column(name: str, length: int) -> st.SearchStrategy[torch.Tensor]:
    if name in ("loss_mask", "kept"):
        return st.lists(st.booleans(), min_size=length, max_size=length).map(
            lambda bits: torch.tensor([False, *bits[1:]])
        )
    return st.lists(numbers, min_size=length, max_size=length).map(torch.tensor)


@st.composite
def rows(draw: st.DrawFn) -> TrainingRow:
    length = draw(st.integers(1, 6))
    columns = {name: draw(column(name, length)) for name in ("loss_mask", "behaviour_logprobs", "advantages")}
    columns |= {name: draw(column(name, length)) for name in draw(st.sets(st.sampled_from(OPTIONAL_COLUMNS)))}
    return TrainingRow(
        input_ids=torch.tensor(draw(st.lists(st.integers(0, 2**31), min_size=length, max_size=length))),
        versions=tuple(
            VersionSpan(start, Version(epoch, 1 << 40))
            for start, epoch in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9))))
        ),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        truncated=draw(st.booleans()),
        group_loss_tokens=draw(st.integers(0, 1 << 40)),
        temperature=draw(st.floats(min_value=1e-6, max_value=10)),
        group_id=draw(names),
        episode_id=draw(names),
        trajectory_id=draw(names),
        **columns,
    )


def alike(one: TrainingRow, other: TrainingRow) -> bool:
    for name in (field.name for field in fields(TrainingRow)):
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            if left.dtype != right.dtype or not torch.equal(left.nan_to_num(7.0), right.nan_to_num(7.0)):
                return False
        elif left != right or isinstance(left, torch.Tensor) != isinstance(right, torch.Tensor):
            return False
    return True


@settings(max_examples=30)
@given(st.lists(rows(), max_size=5))
def test_rows_arrive_as_they_were_sent(sent: list[TrainingRow]) -> None:
    arrived = decode_rows(encode_rows(sent))
    assert len(arrived) == len(sent)
    assert all(map(alike, arrived, sent))


@pytest.mark.parametrize("data", [b"", b"\x08\0\0\0\0\0\0\0{}", b"\xff" * 64])
def test_bytes_that_are_no_rows_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not encoded rows"):
        decode_rows(data)
