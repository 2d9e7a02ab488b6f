"""Estimators that the trainer runs before its epochs: closed forms, loss tokens alone, and the same on every rank."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_rows import training_row
from thread_ranks import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_svc.objectives.advantages import (
    clipped_value_loss,
    discounted_sum,
    gae,
    token_rewards,
    turns_of,
    with_advantages,
)
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective, keep_trainable, loglinear_share, with_selection

# Two turns of 2 and 3 sampled tokens with an observation of two tokens between them, and padding-like tokens behind.
MASK = [0, 1, 1, 0, 0, 1, 1, 1, 0, 0]


def resolved(**settings_):
    return ObjectiveConfig(**settings_).resolved


def at(row, name: str) -> list[float]:
    return getattr(row, name)[row.loss_mask].tolist()


def advantages_of(rows) -> list[float]:
    return [advantage for row in rows for advantage in at(row, "advantages")]


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.9, 0.95), (0.99, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("truncated", [False, True])
def test_golden_gae_carries_over_observations_and_ends_by_the_finish_reason(gamma, gae_lambda, truncated):
    values = [0.5, -0.2, 0.3, 0.8, 0.1]
    row = training_row(MASK, reward=2.0, values=values, truncated=truncated)
    (result,) = with_advantages([row], resolved(preset="ppo", gamma=gamma, gae_lambda=gae_lambda), bootstraps=[0.7])
    following = [*values[1:], 0.7 if truncated else 0.0]
    rewards = [0.0, 0.0, 0.0, 0.0, 2.0]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    expected = [sum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in range(t, 5)) for t in range(5)]
    assert at(result, "advantages") == pytest.approx(expected, rel=1e-12)
    assert at(result, "returns") == pytest.approx([a + v for a, v in zip(expected, values, strict=True)], rel=1e-12)


def test_gae_without_a_bootstrap_takes_the_last_state_that_it_has_and_only_where_truncated():
    values = [0.5, 0.25]
    cut, ended = (training_row([0, 1, 1], reward=1.0, values=values, truncated=t) for t in (True, False))
    results = with_advantages([cut, ended], resolved(preset="ppo"))
    assert at(results[0], "advantages") == pytest.approx([1.0 + 0.25 - 0.5, 1.0 + 0.25 - 0.25])
    assert at(results[1], "advantages") == pytest.approx([0.5, 0.75])


def test_what_stands_beside_the_loss_tokens_does_not_change_an_advantage():
    values = [0.5, -0.2, 0.3, 0.8, 0.1]
    plain = training_row([0, 1, 1, 1, 1, 1], reward=2.0, values=values)
    padded = training_row([*MASK, *[0] * 50], reward=2.0, values=values)
    for preset in ("ppo", "reinforce_pp"):
        settings_ = resolved(preset=preset, **({"kl_coef": 0.0} if preset == "reinforce_pp" else {}))
        one, other = (with_advantages([row], settings_)[0] for row in (plain, padded))
        assert at(one, "advantages") == at(other, "advantages")


def test_golden_reinforce_pp_has_the_kl_in_its_rewards_and_is_whitened_over_the_batch():
    """o is the behaviour policy in the bypass form."""
    first = training_row(MASK, reward=1.0, behaviour_logprobs=[-1.0, -2.0, -1.5, -0.5, -3.0],
                         reference_logprobs=[-1.2, -1.0, -1.5, -0.9, -40.0])  # fmt: skip
    second = training_row([0, 1, 1], reward=-1.0, behaviour_logprobs=[-1.0, -1.0], reference_logprobs=[-1.1, -0.9])
    config = resolved(preset="reinforce_pp", kl_coef=0.01)
    rewards = [
        [-0.01 * 0.2, -0.01 * -1.0, 0.0, -0.01 * 0.4, 1.0 - 0.01 * 10.0],  # k1 = 37 nats counts as 10
        [-0.01 * 0.1, -1.0 - 0.01 * -0.1],
    ]
    assert token_rewards(first, config).tolist() == pytest.approx(rewards[0], abs=1e-12)
    to_go = [[sum(row[t:]) for t in range(len(row))] for row in rewards]
    flat = [value for row in to_go for value in row]
    mean = sum(flat) / 7
    std = math.sqrt(sum((value - mean) ** 2 for value in flat) / 6)
    results = with_advantages([first, second], config)
    for result, row in zip(results, to_go, strict=True):
        assert at(result, "advantages") == pytest.approx([(v - mean) / (std + 1e-6) for v in row], rel=1e-9)


def test_the_kl_in_the_reward_takes_the_recomputed_proximal_policy():
    row = training_row(
        [0, 1], reward=0.0, behaviour_logprobs=[-5.0], proximal_logprobs=[-1.0], reference_logprobs=[-2.0]
    )
    config = resolved(preset="reinforce_pp", kl_coef=0.1, proximal="recompute", correction={"kind": "token_tis"})
    assert token_rewards(row, config).tolist() == pytest.approx([-0.1])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_rewards_to_go(gamma):
    rewards = torch.tensor([1.0, -2.0, 0.5])
    assert discounted_sum(rewards, gamma).tolist() == pytest.approx(
        [1.0 - 2.0 * gamma + 0.5 * gamma**2, -2.0 + 0.5 * gamma, 0.5]
    )


DISCOUNTS = st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 1e-160, 0.5, 0.999, 1.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("discount", [0.0, 1e-30, 0.5, 0.95, 0.999, 1.0])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 63, 64, 65, 5000])
def test_golden_discounted_sums_against_the_loop(tokens, discount, dtype):
    values = torch.randn(tokens, generator=torch.Generator().manual_seed(tokens), dtype=dtype)
    kept, total, expected = values.clone(), 0.0, []
    for value in reversed(values.tolist()):
        total = value + discount * total
        expected.insert(0, total)
    sums = discounted_sum(values, discount)
    assert sums.dtype == torch.float64
    assert sums.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert torch.equal(values, kept), "the values themselves are not changed"


def test_discounted_sums_of_very_long_rows_neither_overflow_nor_lose_precision():
    ones = torch.ones(1 << 17)
    for discount in (1e-5, 0.5, 0.99, 0.9999):
        expected = (1 - discount ** len(ones)) / (1 - discount)
        assert float(discounted_sum(ones, discount)[0]) == pytest.approx(expected, rel=1e-13)
    assert float(discounted_sum(ones, 1.0)[0]) == len(ones)


class Operations(TorchDispatchMode):
    """Counts the tensor operations inside."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        return function(*arguments, **(options or {}))


def test_advantages_are_computed_without_a_look_at_single_tokens():
    """A tensor without content would refuse that; and the number of operations grows with the logarithm of the tokens."""
    counts = []
    for tokens in (1 << 8, 1 << 16):
        column_ = torch.empty(tokens, device="meta")
        with Operations() as operations:
            gae(column_, column_, bootstrap=0.0, gamma=0.99, gae_lambda=0.95)
        counts.append(operations.count)
    assert counts[1] < 2.5 * counts[0]


episodes = st.lists(
    st.tuples(
        st.lists(st.tuples(st.booleans(), st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=40),
        st.booleans(),
        st.floats(-3, 3),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60)
@given(episodes, DISCOUNTS, DISCOUNTS)
def test_gae_is_the_loop_over_the_loss_tokens_of_each_episode(drawn, gamma, gae_lambda):
    """Whatever the masks, and whether an episode ended or its length cut it off."""
    rows, expected = [], []
    for tokens, truncated, after in drawn:
        values = [value for taken, value, _ in tokens if taken]
        rewards = [reward for taken, _, reward in tokens if taken]
        mask = [0, *(int(taken) for taken, _, _ in tokens)]
        rows.append(training_row(mask, values=values, token_rewards=rewards, truncated=truncated))
        following, carried, advantages = after if truncated else 0.0, 0.0, []
        for value, reward in zip(reversed(values), reversed(rewards), strict=True):
            carried = reward + gamma * following - value + gamma * gae_lambda * carried
            following = value
            advantages.insert(0, carried)
        expected.append((advantages, [a + v for a, v in zip(advantages, values, strict=True)]))
    config = resolved(preset="ppo", gamma=gamma, gae_lambda=gae_lambda)
    results = with_advantages(rows, config, bootstraps=[after for _, _, after in drawn])
    for result, (advantages, returns) in zip(results, expected, strict=True):
        assert at(result, "advantages") == pytest.approx(advantages, rel=1e-9, abs=1e-9)
        assert at(result, "returns") == pytest.approx(returns, rel=1e-9, abs=1e-9)


def test_rewards_per_token_replace_the_reward_of_the_episode():
    row = training_row([0, 1, 1], reward=9.0, token_rewards=[0.25, 0.5])
    assert token_rewards(row, resolved(preset="ppo")).tolist() == [0.25, 0.5]


@pytest.mark.parametrize(
    ("settings_", "expected"),
    [
        ({"preset": "ppo"}, [2.0, 5.0]),
        ({"preset": "reinforce_pp", "kl_coef": 0.0}, [2.0, 5.0]),
        ({"preset": "grpo", "advantage": "process", "turn_discount": 1.0}, [2.0, 5.0]),
        ({"preset": "grpo", "advantage": "process"}, [2.0, 0.0]),
    ],
    ids=["ppo", "reinforce_pp", "turns", "each token its own"],
)
def test_the_reward_of_a_token_that_leaves_the_loss_goes_to_the_last_one_before_it(settings_, expected):
    nan = math.nan
    rewards = [7.0, 2.0, 0.0, 4.0, 1.0]
    row = training_row(MASK, token_rewards=rewards, behaviour_logprobs=[nan, -1.0, -1.0, nan, nan])
    plain = training_row(MASK, token_rewards=rewards)
    objective = Objective.of(ObjectiveConfig(**settings_))
    (narrowed, whole), dropped = keep_trainable([row, plain], objective.resolved)
    assert dropped == {"behaviour_not_finite": 3}
    assert at(narrowed, "token_rewards") == expected
    assert at(whole, "token_rewards") == rewards


def test_golden_process_rewards_credit_a_turn_with_what_follows_it():
    row = training_row(MASK, token_rewards=[0.0, 1.0, 0.0, 0.0, 4.0])
    config = resolved(preset="grpo", advantage="process", turn_discount=0.5)
    assert turns_of(row.loss_mask).tolist() == [0, 0, 1, 1, 1]
    assert turns_of(training_row([0, 1, 0, 1, 1]).loss_mask).tolist() == [0, 1, 1]
    assert at(with_advantages([row], config)[0], "advantages") == [3.0, 3.0, 4.0, 4.0, 4.0]
    undiscounted = resolved(preset="grpo", advantage="process")
    assert at(with_advantages([row], undiscounted)[0], "advantages") == [0.0, 1.0, 0.0, 0.0, 4.0]


def whitened(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return [(v - mean) / (std + 1e-6) for v in values]


def test_golden_process_rewards_are_whitened_over_the_batch_or_over_each_group():
    rows = [
        training_row([0, 1, 1], group="a", token_rewards=[1.0, 2.0]),
        training_row([0, 1], group="a", token_rewards=[6.0]),
        training_row([0, 1, 1], group="b", token_rewards=[-1.0, 1.0]),
    ]
    batch = with_advantages(rows, resolved(preset="grpo", advantage="process", process_scale="batch"))
    assert advantages_of(batch) == pytest.approx(whitened([1.0, 2.0, 6.0, -1.0, 1.0]))
    group = with_advantages(rows, resolved(preset="grpo", advantage="process", process_scale="group"))
    expected = whitened([1.0, 2.0, 6.0]) + whitened([-1.0, 1.0])
    assert advantages_of(group) == pytest.approx(expected)


@pytest.mark.parametrize(
    "settings_",
    [
        {"preset": "reinforce_pp", "kl_coef": 0.0},
        {"preset": "grpo", "advantage": "process", "process_scale": "group"},
        {"preset": "grpo", "advantage": "process", "process_scale": "batch", "turn_discount": 0.7},
    ],
    ids=["reinforce_pp", "process-group", "process-batch"],
)
def test_ranks_with_a_share_each_agree_with_one_that_has_everything(settings_):
    generator = torch.Generator().manual_seed(5)
    rows = []
    for index, tokens in enumerate([3, 1, 5, 2, 4, 1]):
        rewards = torch.randn(tokens, generator=generator).tolist()
        rows.append(
            training_row(
                [0] + [1] * tokens, name=str(index), group="ab"[index % 2], reward=rewards[0], token_rewards=rewards
            )
        )
    config = resolved(**settings_)
    whole = advantages_of(with_advantages(rows, config))
    for shares in ([rows[:2], rows[2:]], [rows[:5], rows[5:], []]):
        parts = on_ranks(shares, lambda share, ranks: with_advantages(share, config, ranks=ranks))
        assert [a for part in parts for a in advantages_of(part)] == pytest.approx(whole, rel=1e-12)


log_differences = st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=6), min_size=2, max_size=5)


@settings(max_examples=40)
@given(log_differences, st.floats(1e-4, 4.0))
def test_the_selection_of_m2po_is_exact_and_the_same_on_every_rank(gaps, tau):
    rows = [
        training_row(
            [0] + [1] * len(row), behaviour_logprobs=[-4.0] * len(row), proximal_logprobs=[-4.0 + gap for gap in row]
        )
        for row in gaps
    ]
    config = resolved(preset="m2po", tau=tau)
    whole = [row.kept[row.loss_mask].tolist() for row in with_selection(rows, config)]
    moments = [
        ((-4.0 - (-4.0 + gap)) ** 2, kept)
        for gap_row, row in zip(gaps, whole, strict=True)
        for gap, kept in zip(gap_row, row, strict=True)
    ]
    left = [moment for moment, kept in moments if kept]
    gone = [moment for moment, kept in moments if not kept]
    least = min(left + gone)
    assert left.count(least) == (left + gone).count(least), "those that moved least are kept in any case"
    assert max(left) == least or sum(left) / len(left) < tau * (1 + 1e-9)
    if gone:
        assert max(left) < min(gone)
        # One more (with its equals) would not fit.
        back = left + [moment for moment in gone if moment == min(gone)]
        assert sum(back) / len(back) >= tau * (1 - 1e-9)
    parts = on_ranks([rows[:1], rows[1:]], lambda share, ranks: with_selection(share, config, ranks))
    assert [row.kept[row.loss_mask].tolist() for part in parts for row in part] == whole


def test_the_share_of_the_loglinear_form_grows_with_the_age_of_a_token():
    assert loglinear_share(torch.tensor([0, 1, 2, 5])).tolist() == pytest.approx([0.0, 0.0, 0.5, 0.8])


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (1.0, 1.0, 0.0, 0.5, 1.0),  # inside the clip
        (2.0, 1.0, 0.0, 2.0, 2.0),  # moved away from the target: the plain error is the larger one
        (0.0, 1.0, 0.0, 0.125, 0.0),  # moved too far towards it: no gradient beyond the clip
    ],
)
def test_golden_value_loss(value, old, target, loss, slope):
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    losses, counts = clipped_value_loss(values, torch.tensor([old]), torch.tensor([target]), value_clip=0.5)
    losses.sum().backward()
    assert losses.tolist() == [loss]
    assert values.grad.tolist() == [slope]
    assert int(counts["value_clipped"]) == (slope == 0.0)
    plain, _ = clipped_value_loss(values.detach(), torch.tensor([old]), torch.tensor([target]), value_clip=None)
    assert plain.tolist() == [0.5 * (value - target) ** 2]


@pytest.mark.parametrize(
    ("settings_", "columns", "message"),
    [
        ({"preset": "ppo"}, {"reward": 1.0}, "'s' has none: set up a critic"),
        ({"preset": "ppo"}, {"values": [0.0, 0.0]}, "'s' has no reward, which is not 0"),
        ({"preset": "reinforce_pp"}, {"reward": 1.0}, "'s' has no reference log-probabilities"),
        ({"preset": "grpo", "advantage": "process"}, {"reward": 1.0}, "'s' has none: send them"),
    ],
)
def test_a_row_that_lacks_what_its_estimator_reads_is_refused_by_name(settings_, columns, message):
    with pytest.raises(ValueError, match=message):
        with_advantages([training_row([0, 1, 1], **columns)], resolved(**settings_))


def test_m2po_without_a_proximal_policy_is_refused_by_name():
    with pytest.raises(ValueError, match="'s' has no proximal log-probabilities"):
        with_selection([training_row([0, 1])], resolved(preset="m2po"))


def test_the_trainer_runs_no_estimator_that_needs_rewards_alone():
    settings_ = resolved(preset="grpo")
    assert not settings_.runs_estimator
    assert not settings_.selects_tokens
