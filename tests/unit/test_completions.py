"""Measures of the completions of a batch: lengths by reward, equal ones, repetition."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator_svc.run.metrics import (
    MOST_TOKENS,
    NGRAM,
    completion_ids,
    duplicate_share,
    lengths_by_reward,
    repetition,
    text_metrics,
)
from sluice.v1 import tokens_pb2
from sluice.versions import sampled_tokens

ids = st.lists(st.integers(0, 3), max_size=40)


def as_array(each: list[int]) -> np.ndarray:
    return np.array(each, dtype=np.uint32)


def repeated(each: list[int]) -> float:
    """What `repetition` says it is, counted one by one."""
    ngrams = [tuple(each[place : place + NGRAM]) for place in range(len(each) - NGRAM + 1)]
    return (len(ngrams) - len(set(ngrams))) / len(ngrams) if ngrams else 0.0


@given(st.lists(ids, min_size=1, max_size=6))
def test_repetition_is_the_mean_share_of_ngrams_that_came_before(batch) -> None:
    assert repetition([as_array(each) for each in batch]) == pytest.approx(np.mean([repeated(each) for each in batch]))


@given(ids)
def test_a_completion_that_says_all_of_it_twice_repeats_more(each) -> None:
    said = list(range(100, 100 + NGRAM)) + each
    assert repetition([as_array(said + said)]) >= repetition([as_array(said)])


def test_repetition_looks_at_the_end_of_a_long_completion_alone() -> None:
    loop, prose = np.tile(as_array([7]), 3 * MOST_TOKENS), np.arange(3 * MOST_TOKENS, dtype=np.uint32)
    assert repetition([np.concatenate([prose, loop])]) > 0.99
    assert repetition([np.concatenate([loop, prose])]) == 0.0


@given(st.lists(ids.filter(bool), min_size=1, max_size=8))
def test_equal_completions_are_counted_as_they_are(batch) -> None:
    counts = Counter(map(tuple, batch))
    expected = sum(counts[tuple(each)] > 1 for each in batch) / len(batch)
    assert duplicate_share([as_array(each) for each in batch]) == pytest.approx(expected)


stretches = st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=8)
"""Of each stretch of a trajectory: whether it was sampled, and its tokens."""


@given(st.lists(st.tuples(stretches, st.integers(0, 6)), max_size=4))
def test_the_sampled_tokens_are_those_of_the_mask_behind_what_is_shared(batch) -> None:
    trajectories, before, expected = [], [], []
    for number, (parts, shared) in enumerate(batch):
        runs, mask = [], []
        for is_sampled, length in parts:
            if len(runs) % 2 != is_sampled:
                runs.append(0)
            runs.append(length)
            mask += [is_sampled] * length
        whole = list(range(1000 * number, 1000 * number + len(mask)))
        before.append(min(shared, len(whole)))
        trajectories.append(tokens_pb2.Trajectory(token_ids=whole[before[-1] :], mask_runs=runs))
        sampled = [each for each, counts in zip(whole, mask, strict=True) if counts]
        expected.append(sampled[sum(mask[: before[-1]]) :])
    assert [each.tolist() for each in completion_ids(trajectories, before)] == expected


def trajectory(group: str, reward: float | None, tokens: int) -> tokens_pb2.Trajectory:
    return tokens_pb2.Trajectory(group_id=group, reward=reward, mask_runs=[3, tokens])


def by_reward(trajectories: list[tokens_pb2.Trajectory]) -> dict[str, float]:
    return lengths_by_reward(trajectories, [sampled_tokens(each) for each in trajectories])


def test_lengths_are_compared_with_the_mean_of_their_own_group() -> None:
    found = by_reward(
        [
            trajectory("easy", 10.0, 100),
            trajectory("easy", 8.0, 20),
            trajectory("hard", 1.0, 60),
            trajectory("hard", 0.0, 10),
            trajectory("hard", None, 500),
            trajectory("all equal", 5.0, 900),
            trajectory("all equal", 5.0, 900),
        ]
    )
    assert found == {"completion/mean_tokens_rewarded": 80.0, "completion/mean_tokens_unrewarded": 15.0}


def test_a_batch_without_signal_or_without_tokens_has_no_such_measures() -> None:
    assert by_reward([trajectory("g", 1.0, 5), trajectory("g", 1.0, 9)]) == {}
    assert text_metrics([as_array([])]) == {}
    assert text_metrics([as_array([1, 2]), as_array([1, 2]), as_array([3])]) == {
        "completion/duplicate_share": pytest.approx(2 / 3),
        "completion/repetition": 0.0,
    }
