"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.engines.base import Sampling
from rollout_svc.engines.slots.sampling import RowSampling, draw, logprobs_of

VOCABULARY = 50
PLAIN = Sampling()


def row(
    sampling: Sampling = PLAIN,
    *,
    prompt: Sequence[int] = (),
    sampled: Sequence[int] = (),
    ends: Sequence[int] = (),
    seed: int | None = None,
) -> RowSampling:
    generator = None if seed is None else np.random.default_rng(seed)
    return RowSampling(sampling, list(prompt), list(sampled), frozenset(ends), generator)


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def policy(sampling: Sampling, **more: Sequence[int]) -> torch.Tensor:
    """Probabilities of one row's tokens."""
    return logprobs_of(logits(), [row(sampling, **more)])[0].exp()


class Grid:
    """Random numbers that cover [0, 1) evenly."""

    def random(self, count: int) -> np.ndarray:
        return (np.arange(count) + 0.5) / count


def test_tokens_come_as_often_as_they_are_probable() -> None:
    count = 20_000
    one = logits()
    drawn = draw(one.repeat(count, 1), [row()] * count, Grid())
    expected = one[0].softmax(-1)
    frequencies = torch.bincount(torch.tensor(drawn.token_ids), minlength=VOCABULARY) / count
    torch.testing.assert_close(frequencies, expected, atol=2 / count, rtol=0)
    torch.testing.assert_close(torch.tensor(drawn.logprobs), expected.log()[torch.tensor(drawn.token_ids)])


@given(temperature=st.floats(0.05, 5.0))
def test_logprobs_are_after_temperature(temperature: float) -> None:
    expected = torch.log_softmax(logits() / temperature, -1)
    torch.testing.assert_close(logprobs_of(logits(), [row(replace(PLAIN, temperature=temperature))]), expected)


def test_rows_differ_in_temperature() -> None:
    both = logprobs_of(logits(2), [row(replace(PLAIN, temperature=0.5)), row(replace(PLAIN, temperature=2.0))])
    torch.testing.assert_close(both[0], torch.log_softmax(logits(2)[0] / 0.5, -1))
    torch.testing.assert_close(both[1], torch.log_softmax(logits(2)[1] / 2.0, -1))


def test_greedy_rows_take_the_most_likely_token_among_others() -> None:
    greedy = replace(PLAIN, temperature=0.0)
    for number in range(20):
        drawn = draw(logits(3), [row(greedy), row(), row(greedy)], np.random.default_rng(number))
        assert drawn.token_ids[0] == logits(3)[0].argmax()
        assert drawn.token_ids[2] == logits(3)[2].argmax()
    assert drawn.logprobs[0] == pytest.approx(torch.log_softmax(logits(3)[0], -1).max().item())


def test_a_seeded_row_does_not_depend_on_its_neighbours() -> None:
    one = logits(4)

    def sequence(neighbours: int) -> list[int]:
        mine = row(seed=7)
        shared = np.random.default_rng(neighbours)
        batch = [mine, *[row(seed=8 + other) for other in range(neighbours)]]
        return [draw(one[: 1 + neighbours].clone(), batch, shared).token_ids[0] for _ in range(50)]

    assert sequence(0) == sequence(3)


class TestTruncation:
    @given(top_k=st.integers(1, VOCABULARY + 5))
    def test_top_k_leaves_the_k_most_likely(self, top_k: int) -> None:
        kept = policy(replace(PLAIN, top_k=top_k))
        assert int((kept > 0).sum()) == min(top_k, VOCABULARY)
        assert kept.sum().item() == pytest.approx(1, abs=1e-5)
        assert kept.argmax() == logits()[0].argmax()

    @given(top_p=st.floats(0.01, 0.999))
    def test_top_p_leaves_the_fewest_tokens_that_reach_the_mass(self, top_p: float) -> None:
        whole = policy(PLAIN)
        kept = policy(replace(PLAIN, top_p=top_p)) > 0
        least = whole[kept].min()
        assert whole[kept].sum() >= top_p - 1e-5
        assert whole[kept].sum() - least < top_p + 1e-5
        assert bool((whole[~kept] <= least).all())

    @given(min_p=st.floats(0.001, 1.0))
    def test_min_p_is_relative_to_the_most_likely(self, min_p: float) -> None:
        whole = policy(PLAIN)
        kept = policy(replace(PLAIN, min_p=min_p)) > 0
        assert bool((whole[kept] >= whole.max() * min_p * (1 - 1e-4)).all())
        assert bool((whole[~kept] <= whole.max() * min_p * (1 + 1e-4)).all())

    def test_what_is_ruled_out_is_never_drawn(self) -> None:
        count = 5000
        sampling = replace(PLAIN, top_k=3)
        allowed = set(logits()[0].topk(3).indices.tolist())
        drawn = draw(logits().repeat(count, 1), [row(sampling)] * count, Grid())
        assert set(drawn.token_ids) == allowed

    def test_neighbours_are_not_truncated(self) -> None:
        both = logprobs_of(logits(2), [row(replace(PLAIN, top_k=1)), row()])
        torch.testing.assert_close(both[1], torch.log_softmax(logits(2)[1], -1))


class TestEdits:
    def test_bias_adds_to_logits(self) -> None:
        expected = logits()[0]
        expected[3] += 5
        torch.testing.assert_close(policy(replace(PLAIN, logit_bias={3: 5.0})), expected.softmax(-1))

    def test_end_tokens_wait_for_min_tokens(self) -> None:
        sampling = replace(PLAIN, min_tokens=2)
        assert policy(sampling, sampled=[5], ends=[4, 9])[[4, 9]].tolist() == [0, 0]
        assert bool((policy(sampling, sampled=[5, 5], ends=[4, 9])[[4, 9]] > 0).all())

    def test_presence_and_frequency_count_sampled_tokens_alone(self) -> None:
        expected = logits()[0]
        expected[5] -= 0.5 + 2 * 0.25
        expected[6] -= 0.5 + 0.25
        sampling = replace(PLAIN, presence_penalty=0.5, frequency_penalty=0.25)
        given_policy = policy(sampling, prompt=[7, 7], sampled=[5, 6, 5])
        torch.testing.assert_close(given_policy, expected.softmax(-1))

    def test_repetition_divides_or_multiplies_by_sign(self) -> None:
        expected = logits()[0]
        for token in (7, 5):
            expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
        given_policy = policy(replace(PLAIN, repetition_penalty=1.5), prompt=[7, 7], sampled=[5])
        torch.testing.assert_close(given_policy, expected.softmax(-1))


def test_alternatives_are_given_to_who_asks() -> None:
    drawn = draw(logits(3), [row(replace(PLAIN, top_logprobs=n)) for n in (0, 2, 4)], np.random.default_rng(3))
    assert [len(each) for each in drawn.top] == [0, 2, 4]
    expected = torch.log_softmax(logits(3)[1], -1).topk(2)
    assert [token for token, _ in drawn.top[1]] == expected.indices.tolist()
    assert [value for _, value in drawn.top[1]] == pytest.approx(expected.values.tolist())


def test_what_is_not_finite_shows_in_its_row_alone() -> None:
    poisoned = logits(2)
    poisoned[0, 4] = float("nan")
    drawn = draw(poisoned, [row(), row()], np.random.default_rng(2))
    assert np.isnan(drawn.logprobs).tolist() == [True, False]
