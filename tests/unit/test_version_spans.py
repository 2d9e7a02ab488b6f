"""Which policy version sampled which tokens: spans are cut, counted and joined without losing a token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.v1 import tokens_pb2
from sluice.versions import Version, VersionSpan, append_spans, span_lengths, spans_between


def version_of_each(spans: list[VersionSpan], tokens: int) -> list[Version]:
    lengths = span_lengths([span.start for span in spans], tokens)
    return [span.version for span, length in zip(spans, lengths, strict=True) for _ in range(length)]


def spans_of(versions: list[int]) -> list[VersionSpan]:
    return [
        VersionSpan(index, Version(1, number))
        for index, number in enumerate(versions)
        if index == 0 or versions[index - 1] != number
    ]


versions = st.lists(st.integers(0, 3), min_size=1, max_size=20)


@given(versions, st.data())
def test_a_cut_of_the_spans_covers_exactly_the_tokens_cut_out(numbers: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(numbers)))
    end = data.draw(st.integers(first, len(numbers)))
    cut = spans_between(spans_of(numbers), first, end)
    moved = [VersionSpan(span.start - first, span.version) for span in cut]
    assert version_of_each(moved, end - first) == [Version(1, number) for number in numbers[first:end]]


@given(versions, versions)
def test_spans_that_follow_each_other_join_and_no_version_is_repeated(before: list[int], after: list[int]) -> None:
    joined = [span.to_proto() for span in spans_of(before)]
    append_spans(joined, [span.to_proto() for span in spans_of(after)], len(before))
    assert [VersionSpan.from_proto(span) for span in joined] == spans_of(before + after)


def test_before_the_first_token_there_is_no_span() -> None:
    assert spans_between([], 0, 0) == []
    assert span_lengths([], 0) == []


def test_spans_join_in_a_message_too() -> None:
    trajectory = tokens_pb2.Trajectory()
    append_spans(trajectory.version_spans, [VersionSpan(0, Version(1, 2)).to_proto()], 0)
    append_spans(trajectory.version_spans, [VersionSpan(0, Version(1, 3)).to_proto()], 4)
    assert [span.start for span in trajectory.version_spans] == [0, 4]


def test_before_the_first_token_there_are_no_spans():
    assert spans_between([], 0, 0) == []
