"""Advantages by group id: closed forms, and nothing leaks between groups however ragged they are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.advantages import BATCH_SCALES, ESTIMATORS, TRAINER_ESTIMATORS, Episode, estimate

rewards = st.lists(st.floats(0, 10, allow_nan=False), min_size=1, max_size=9)
GROUP_ONLY = [name for name in ESTIMATORS if name not in BATCH_SCALES]
ragged = st.dictionaries(st.text("abc", min_size=1, max_size=3), rewards, min_size=1, max_size=6)


def episodes_of(groups: dict[str, list[float]]) -> list[Episode]:
    return [
        Episode(f"{group}/{index}", group, reward, sampled_tokens=3 + index)
        for group, values in groups.items()
        for index, reward in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("centered", [-2.0, 0.0, 2.0]),
        ("dr_grpo", [-2.0, 0.0, 2.0]),
        ("grpo", [-2 / (2 + 1e-6), 0.0, 2 / (2 + 1e-6)]),
        ("rloo", [-3.0, 0.0, 3.0]),
        ("opo", [1 - 22 / 6, 3 - 22 / 6, 5 - 22 / 6]),
        ("maxrl", [-2 / 3, 0.0, 2 / 3]),
    ],
)
def test_estimators_follow_their_formulas(name, expected):
    episodes = [
        Episode(str(i), "g", reward, sampled_tokens=length)
        for i, (reward, length) in enumerate(((1.0, 1), (3.0, 2), (5.0, 3)))
    ]
    assert list(estimate(name, episodes).values()) == pytest.approx(expected, rel=1e-12)


@given(st.sampled_from(GROUP_ONLY), ragged, st.randoms())
def test_a_group_is_judged_alone_in_whatever_order_the_episodes_come(name, groups, random):
    episodes = episodes_of(groups)
    shuffled = random.sample(episodes, len(episodes))
    together = estimate(name, shuffled)
    for group, values in groups.items():
        alone = estimate(name, episodes_of({group: values}))
        for episode, advantage in alone.items():
            assert together[episode] == pytest.approx(advantage, rel=1e-9, abs=1e-12)


@given(st.sampled_from(list(ESTIMATORS)), ragged)
def test_advantages_are_finite_and_groups_without_a_difference_have_none(name, groups):
    result = estimate(name, episodes_of(groups))
    assert all(math.isfinite(value) for value in result.values())
    flat = [group for group, values in groups.items() if len(set(values)) == 1]
    # Whitening shifts the values that it centres, but an episode alone in its group stays at 0.
    silent = [group for group in flat if len(groups[group]) == 1] if name == "reinforce_pp_baseline" else flat
    assert all(result[f"{group}/{i}"] == 0.0 for group in silent for i in range(len(groups[group])))


@given(st.sampled_from(["centered", "grpo", "rloo"]), ragged)
def test_centred_estimators_sum_to_zero_in_each_group(name, groups):
    result = estimate(name, episodes_of(groups))
    for group, values in groups.items():
        scale = sum(abs(result[f"{group}/{i}"]) for i in range(len(values)))
        assert sum(result[f"{group}/{i}"] for i in range(len(values))) == pytest.approx(
            0.0, abs=1e-9 * (1 + scale) * 1e3
        )


# Group a: rewards 1, 3 (3 and 1 tokens); group b: rewards 0, 4 (1 and 3 tokens); group c: one survivor of 5 tokens.
BATCH = [
    Episode("a0", "a", 1.0, 3),
    Episode("a1", "a", 3.0, 1),
    Episode("b0", "b", 0.0, 1),
    Episode("b1", "b", 4.0, 3),
    Episode("c0", "c", 7.0, 5),
]


def test_lite_ppo_divides_by_the_spread_of_the_whole_batch():
    spread = math.sqrt(sum((reward - 3.0) ** 2 for reward in (1.0, 3.0, 0.0, 4.0, 7.0)) / 4)
    expected = {"a0": -1.0, "a1": 1.0, "b0": -2.0, "b1": 2.0, "c0": 0.0}
    result = estimate("lite_ppo", BATCH)
    assert result == pytest.approx({name: a / (spread + 1e-6) for name, a in expected.items()}, rel=1e-12)


def test_reinforce_pp_baseline_is_whitened_over_the_tokens_of_the_batch():
    tokens = [-1.0] * 3 + [1.0] + [-2.0] + [2.0] * 3 + [0.0] * 5
    mean = sum(tokens) / 13
    spread = math.sqrt(sum((a - mean) ** 2 for a in tokens) / 12)
    expected = {name: (a - mean) / (spread + 1e-6) for name, a in {"a0": -1, "a1": 1, "b0": -2, "b1": 2}.items()}
    result = estimate("reinforce_pp_baseline", BATCH)
    assert result == pytest.approx(expected | {"c0": 0.0}, rel=1e-12)


@pytest.mark.slow
@given(st.sampled_from(sorted(BATCH_SCALES)), ragged, st.randoms())
def test_estimators_over_the_batch_do_not_depend_on_the_order(name, groups, random):
    episodes = episodes_of(groups)
    shuffled = estimate(name, random.sample(episodes, len(episodes)))
    for episode, advantage in estimate(name, episodes).items():
        assert shuffled[episode] == pytest.approx(advantage, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", TRAINER_ESTIMATORS)
def test_what_needs_more_than_rewards_is_left_to_the_trainer(name):
    with pytest.raises(ValueError, match="the trainer computes it"):
        estimate(name, BATCH)


def test_a_missing_reward_is_not_a_zero():
    episodes = [
        Episode("a", "g", 1.0),
        Episode("b", "g", None),
        Episode("c", "g", 3.0),
        Episode("d", "h", None),
        Episode("e", "h", 5.0),
    ]
    result = estimate("centered", episodes)
    assert result == {"a": -1.0, "c": 1.0, "e": 0.0}


@pytest.mark.parametrize(
    ("name", "episodes", "message"),
    [
        ("gpro", [], "no advantage estimator 'gpro'"),
        ("grpo", [Episode("a", "g", 1.0), Episode("a", "g", 2.0)], "one reward per episode"),
        ("grpo", [Episode("a", "g", float("nan"))], "None where it is missing"),
        ("maxrl", [Episode("a", "g", -1.0), Episode("b", "g", 1.0)], "at least 0"),
    ],
)
def test_what_cannot_be_estimated_is_refused(name, episodes, message):
    with pytest.raises(ValueError, match=message):
        estimate(name, episodes)


def test_maxrl_gives_nothing_where_nothing_was_rewarded():
    assert set(estimate("maxrl", episodes_of({"g": [0.0, 0.0]})).values()) == {0.0}
