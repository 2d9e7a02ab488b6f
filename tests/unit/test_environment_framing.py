"""The bytes between the orchestrator and an environment's processes, what they print, and when one is started again: all pure."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.environments.framing import MAX_FRAME_BYTES, BrokenFrameError, FrameReader, NotPlainError, encode
from sluice.environments.output import LINE_CHARACTERS, BoundedLines
from sluice.environments.processes import Restarts
from sluice.environments.worker import passed_variables

TEXTS = st.text(st.characters(), max_size=20)  # lone surrogates too
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.slow
@given(st.lists(st.dictionaries(TEXTS, PLAIN, max_size=4), max_size=5), st.lists(st.integers(1, 40), min_size=1))
def test_messages_arrive_as_they_were_sent_however_the_bytes_are_cut(messages, cuts) -> None:
    stream = b"".join(map(encode, messages))
    reader, found, place, turn = FrameReader(), [], 0, 0
    while place < len(stream):
        size = cuts[turn % len(cuts)]
        found += reader.feed(stream[place : place + size])
        place, turn = place + size, turn + 1
    assert found == messages


@given(st.binary(max_size=64))
def test_bytes_that_are_no_frames_are_refused_and_nothing_else_is_raised(data) -> None:
    with contextlib.suppress(BrokenFrameError):
        FrameReader().feed(data)


def test_a_length_beyond_the_bound_is_refused_before_the_rest_arrives() -> None:
    with pytest.raises(BrokenFrameError, match="is announced"):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))


class Number(int):
    """A number of a class of its own, as numpy's are."""


def test_values_of_derived_classes_and_tuples_become_plain() -> None:
    sent = {"n": Number(7), "pair": (1, 2.5)}
    assert FrameReader().feed(encode(sent)) == [{"n": 7, "pair": [1, 2.5]}]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {"b": [0, object()]}}, r"a\.b\[1\] is of type object"),
        ({"a": {1: 2}}, "the key 1 of type int"),
        ({"a": b"bytes"}, "a is of type bytes"),
        ({"a": {1, 2}}, "a is of type set"),
        ({"a": "x" * MAX_FRAME_BYTES}, "at most 64 MiB"),
        ({"a": 10**5000}, "integer string conversion"),
    ],
)
def test_what_is_not_plain_data_is_named_with_its_place(value, message) -> None:
    with pytest.raises(NotPlainError, match=message):
        encode(value)


def test_a_list_that_contains_itself_is_refused() -> None:
    circle: list = []
    circle.append(circle)
    with pytest.raises(NotPlainError, match="levels deep"):
        encode({"a": circle})


@given(
    st.lists(st.integers(1, 30), max_size=60),
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 30)), min_size=1),
    st.integers(1, 60),
)
def test_every_printed_line_is_logged_or_counted(sizes, cuts, per_minute) -> None:
    printed = b"".join(b"x" * size + b"\n" for size in sizes)
    lines, logged, place, now, turn = BoundedLines(per_minute, 0.0), [], 0, 0.0, 0
    while place < len(printed):
        size, pause = cuts[turn % len(cuts)]
        now += pause
        logged += lines.feed(printed[place : place + size], now)
        place, turn = place + size, turn + 1
    logged += lines.feed(b"", now)
    counts = [int(found[1]) for each in logged if (found := re.match(r"\((\d+) lines were left out", each))]
    passed = len(logged) - len(counts)
    assert passed + sum(counts) == len(sizes)
    assert passed <= max(1, per_minute / 6) + now * per_minute / 60


def test_a_line_without_an_end_is_cut() -> None:
    lines = BoundedLines(600, 0.0)
    logged = [line for _ in range(100) for line in lines.feed(b"x" * 1000, 0.0)]
    logged += lines.feed(b"\nnext\n", 0.0)
    assert [len(line) for line in logged] == [LINE_CHARACTERS, len("next")]


def test_processes_that_die_in_a_row_are_started_later_and_later_and_then_no_more() -> None:
    restarts = Restarts(5)
    assert [restarts.died(charged=False) for _ in range(6)] == [0.0, 0.1, 0.2, 0.4, 0.8, None]


@given(st.lists(st.booleans(), max_size=200))
def test_one_answer_between_deaths_is_progress(deaths) -> None:
    restarts, in_a_row = Restarts(3), 0
    for died in deaths:
        in_a_row = in_a_row + 1 if died else 0
        if died:
            assert (restarts.died(charged=False) is None) == (in_a_row > 3)
        else:
            restarts.answered()


def test_variables_with_names_of_secrets_are_withheld_unless_they_are_named() -> None:
    given_ = {"PATH": "/bin", "PWD": "/", "SLUICE_RUN": "a", "HF_TOKEN": "b", "OPENAI_API_KEY": "c", "DB_PASSWORD": "d"}
    assert set(passed_variables(given_, [])) == {"PATH", "PWD"}
    assert set(passed_variables(given_, ["OPENAI_API_KEY"])) == {"PATH", "PWD", "OPENAI_API_KEY"}
