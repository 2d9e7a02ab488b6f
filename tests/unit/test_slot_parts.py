"""The parts of the slot engine that hold no model: the KV cache, the waiting line, stop strings."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_clock import LIMIT_S

from rollout_svc.engines.base import FinishReason, GenerationRequest, ModelInfo, Sampling
from rollout_svc.engines.slots.batch import ActiveRequest, ActiveSample, WaitingQueue, completed_stop
from rollout_svc.engines.slots.model import DecodeView, KvShape, PrefillView, SlotCache
from sluice.versions import BASE, Version

SHAPE = KvShape(layers=2, heads=3, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
INFO = ModelInfo("model", "Architecture", 100, 64, "float32", (1,), "transformers")


def cache(positions: int = 10_000) -> SlotCache:
    return SlotCache(SHAPE, positions * SHAPE.position_bytes)


def filled(rows: int, length: int) -> SlotCache:
    """A cache whose rows hold their own number."""
    made = cache()
    made.reserve(rows, length, used=0)
    for name in ("keys", "values"):
        getattr(made, name)[:] = torch.arange(made.keys.shape[1])[None, :, None, None, None]
    return made


class TestSlotCache:
    @given(steps=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 200)), max_size=6))
    def test_growing_keeps_what_is_there(self, steps: list[tuple[int, int]]) -> None:
        made = filled(2, 5)
        rows, length = 2, 5
        for wanted_rows, wanted_length in steps:
            rows, length = max(rows, wanted_rows), max(length, wanted_length)
            made.reserve(rows, length, used=2)
            assert made.keys.shape[1] >= rows
            assert made.keys.shape[3] >= length
            for tensor in (made.keys, made.values):
                assert bool((tensor[:, 0, :, :5] == 0).all())
                assert bool((tensor[:, 1, :, :5] == 1).all())

    @given(rows=st.integers(1, 50), length=st.integers(1, 500))
    def test_what_fits_is_allocated_within_the_budget(self, rows: int, length: int) -> None:
        made = cache(positions=5000)
        if not made.fits(rows, length):
            return
        made.reserve(rows, length, used=0)
        assert made.keys.shape[1] * made.keys.shape[3] <= 5000

    def test_moving_takes_the_positions_that_count(self) -> None:
        made = filled(3, 8)
        made.move(2, 0, length=5)
        assert made.keys[0, 0, 0, :, 0].tolist()[:8] == [2] * 5 + [0] * 3

    def test_prompts_go_to_the_rows_that_share_them(self) -> None:
        made = filled(4, 6)
        keys = torch.stack([torch.full((3, 2, 4), 7.0), torch.full((3, 2, 4), 8.0)])
        given_keys, _ = PrefillView(made, 1, torch.tensor([0, 0, 1])).update(keys, -keys, 1)
        assert given_keys is keys
        assert made.keys[1, :4, 0, 0, 0].tolist() == [0, 7, 7, 8]
        assert made.values[1, :4, 0, 1, 0].tolist() == [0, -7, -7, -8]
        assert made.keys[1, 1:4, 0, 2, 0].tolist() == [1, 2, 3]

    def test_a_step_writes_each_row_at_its_own_position(self) -> None:
        made = filled(3, 6)
        view = DecodeView(made, torch.tensor([0, 4]), width=5)
        keys, values = view.update(torch.full((2, 3, 1, 4), 9.0), torch.full((2, 3, 1, 4), 9.0), 0)
        assert keys.shape == values.shape == (2, 3, 5, 4)
        assert keys[:, 0, :, 0].tolist() == [[9, 0, 0, 0, 0], [1, 1, 1, 1, 9]]
        assert made.keys[0, 2, 0, :, 0].tolist()[:6] == [2] * 6

    def test_a_cleaned_row_holds_no_trace(self) -> None:
        made = filled(2, 4)
        made.keys[:, 1] = made.values[:, 1] = float("nan")
        made.clean(1)
        assert bool(torch.isfinite(made.keys).all())
        assert bool(torch.isfinite(made.values).all())


async def test_who_waits_goes_by_priority_and_then_by_age() -> None:
    line = WaitingQueue()
    for name, priority in (("old", 0), ("late", 1), ("urgent", -1), ("young", 0)):
        line.add(ActiveRequest(GenerationRequest(name, [5], Sampling(), n=2, priority=priority), INFO))
    order = [line.pop() for _ in range(len(line))]
    assert [live.request.request_id for live, _ in order] == [
        *("urgent", "urgent"),
        *("old", "old"),
        *("young", "young"),
        *("late", "late"),
    ]
    assert [sample.index for _, sample in order[:2]] == [0, 1]


async def test_one_request_leaves_the_line_and_the_others_keep_their_order() -> None:
    line = WaitingQueue()
    requests = [ActiveRequest(GenerationRequest(str(i), [5], Sampling(), n=2), INFO) for i in range(3)]
    for request in requests:
        line.add(request)
    assert [live for live, _ in line.remove(requests[1])] == [requests[1]] * 2
    assert [line.pop()[0] for _ in range(len(line))] == [requests[0]] * 2 + [requests[2]] * 2


def test_chunks_carry_the_spans_that_they_cut() -> None:
    sample = ActiveSample(GenerationRequest("r", [5, 6], Sampling()), 0, INFO)
    for token, version in enumerate([BASE, BASE, Version(1, 1), Version(1, 1), Version(1, 2)]):
        sample.append(token, -1.0, [], version)
    sample.settle(None)
    assert [(span.start, span.version) for span in sample.part().spans] == [
        (0, BASE),
        (2, Version(1, 1)),
        (4, Version(1, 2)),
    ]
    assert [(span.start, span.version) for span in sample.part(3).spans] == [(3, Version(1, 1)), (4, Version(1, 2))]
    assert sample.part(5).token_ids == []


async def test_the_last_token_is_never_given_without_its_reason() -> None:
    """The reader is another thread; a caller that has the last token alone would continue a sample that has ended."""
    live = ActiveRequest(GenerationRequest("r", [5], Sampling()), INFO)
    (sample,) = live.samples
    sample.append(7, -1.0, [], BASE)
    sample.settle(None)
    sample.append(1, -1.0, [], BASE)
    sample.stop_string = "x"
    (part,) = live.parts()
    assert (part.token_ids, part.finish_reason, part.stop_string) == ([7], None, "")
    assert not live.parts()
    sample.settle(FinishReason.STOP)
    (part,) = live.parts()
    assert (part.token_ids, part.finish_reason, part.stop_string) == ([1], FinishReason.STOP, "x")


async def test_waiting_ends_when_the_request_does_or_after_the_time() -> None:
    live = ActiveRequest(GenerationRequest("r", [5], Sampling(), n=2), INFO)
    await live.wait(0.001)
    assert not live.ended
    live.sample_ended()
    await live.wait(0.001)
    assert not live.ended
    live.sample_ended()
    async with asyncio.timeout(LIMIT_S):
        await live.wait()
    assert live.ended


class Letters:
    """Token i is the letter a + i; 26 and above decode to nothing."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(97 + id_) for id_ in token_ids if id_ < 26)


@pytest.mark.parametrize(
    ("text", "stops", "found"),
    [
        ("hello", ["ell"], "ell"),
        ("hello", ["x"], ""),
        ("hello", ["lo", "ello"], "ello"),
        ("aaaa" * 50 + "stop", ["stop"], "stop"),
    ],
)
def test_stop_strings_are_found_in_the_text(text: str, stops: list[str], found: str) -> None:
    assert completed_stop(Letters(), [ord(letter) - 97 for letter in text], stops) == found


def test_stop_strings_are_found_across_tokens_without_text() -> None:
    assert completed_stop(Letters(), [0, 30, 1, 31, 2], ["abc"]) == "abc"


@pytest.mark.parametrize(
    ("before", "new", "found"),
    [("xa", "b", "ab"), ("ab", "x", ""), ("abx", "ab", "ab"), ("a", "xb", ""), ("", "ab", "ab")],
)
def test_a_stop_string_ends_in_new_text_and_may_begin_before_it(before, new, found):
    ids = [[ord(letter) - 97 for letter in text] for text in (before, new)]
    assert completed_stop(Letters(), ids[1], ["ab"], continued=ids[0]) == found
