"""Rows are dealt out to ranks once each, groups together where that helps, and the slowest rank is bounded."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_learner import learner
from tiny_policy import ragged_batch, row, tiny_model
from transformers import Gemma4TextConfig, LlamaConfig, LlamaForCausalLM

from trainer_svc.batch.rows import TrainingRow
from trainer_svc.parallel.balance import TOKENS, Cost, balance

QUADRATIC = Cost(token=100.0, pair=1.0, loss_token=30.0)


@st.composite
def batches(draw: st.DrawFn) -> list[TrainingRow]:
    """Groups of rows with a common prompt, and rows without a group; some without a loss token."""
    rows = []
    for group in range(draw(st.integers(0, 6))):
        prompt = [group] * draw(st.integers(1, 30))
        name = draw(st.sampled_from(["", f"g{group}"]))
        sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
        rows += [row(prompt, [member + 10] * size, group=name) for member, size in enumerate(sizes)]
    return rows


def alone(each: TrainingRow, cost: Cost) -> float:
    """Return the cost of a row that shares no tokens with others."""
    trained = each.loss_mask.nonzero()
    tokens = int(trained[-1]) if len(trained) else 0
    return cost.token * tokens + cost.pair * tokens * (tokens + 1) / 2 + cost.loss_token * len(trained)


@pytest.mark.slow
@given(batches(), st.integers(1, 5), st.booleans())
def test_every_row_lies_in_one_share_and_whole_groups_stay_whole(rows, shares, whole):
    dealt = balance(rows, shares, cost=QUADRATIC, whole_groups=whole)
    assert sorted(place for share in dealt for place in share) == list(range(len(rows)))
    assert len(dealt) == shares
    assert all(share == sorted(share) for share in dealt)
    assert dealt == balance(rows, shares, cost=QUADRATIC, whole_groups=whole)
    if whole:
        groups = [{rows[place].group_id for place in share} - {""} for share in dealt]
        assert all(not one & other for one, other in combinations(groups, 2))


@pytest.mark.slow
@given(batches(), st.integers(1, 5), st.sampled_from([TOKENS, QUADRATIC]))
def test_the_slowest_rank_is_bounded_by_the_mean_and_the_heaviest_row(rows, shares, cost):
    costs = [alone(each, cost) for each in rows]
    slowest = max(sum(costs[place] for place in share) for share in balance(rows, shares, cost=cost, fold=False))
    mean, heaviest = sum(costs) / shares, max(costs, default=0.0)
    assert slowest <= mean + (1 - 1 / shares) * heaviest + 1e-6


def test_a_group_stays_together_where_its_prompt_would_be_forwarded_twice():
    long, short = [1] * 50, [2] * 50
    rows = [row(prompt, [7] * 10, group=name) for _ in range(4) for prompt, name in ((long, "a"), (short, "b"))]
    assert balance(rows, 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_group_is_split_where_one_rank_would_wait_for_it():
    rows = [row([1] * 10, [member] * 50, group="a") for member in range(4)]
    assert sorted(map(len, balance(rows, 2))) == [2, 2]
    assert sorted(map(len, balance(rows, 2, whole_groups=True))) == [0, 4]


def test_rows_that_are_not_forwarded_weigh_nothing():
    rows = [row([1] * 4, [2] * 4, advantage=advantage, name=str(advantage)) for advantage in (0.0, 1.0, 0.0, 2.0)]
    shares = balance(rows, 2, contributes=lambda each: bool(each.advantages.any()))
    assert sorted(sum(bool(rows[place].advantages.any()) for place in share) for share in shares) == [1, 1]
    assert sorted(place for share in shares for place in share) == [0, 1, 2, 3]


def test_a_trainer_deals_out_by_what_its_steps_forward(tmp_path):
    objectives = {"aipo": {}, "grpo": {"proximal": "recompute", "correction": {"kind": "none"}}}
    rows = [row([1] * 4, [2] * 40, advantage=0.0), *(row([1] * 4, [2] * 4, name=name) for name in "ab")]
    dealt = {}
    for preset, form in objectives.items():
        policy = learner(tiny_model(tmp_path / preset), tmp_path / preset, objective={"preset": preset, **form})
        dealt[preset] = policy._balance(rows, 2)
    assert [len({1, 2} & set(share)) for share in dealt["aipo"]] == [1, 1], "a row without an advantage is left out"
    assert dealt["grpo"] == [[0], [1, 2]], "its proximal policy is computed all the same"


def test_attention_makes_one_long_row_cost_more_than_its_tokens():
    rows = [row([1] * 100, [2] * 2), *(row([1] * 10, [2] * 2) for _ in range(20))]
    assert balance(rows, 2, cost=Cost(token=1.0, pair=1.0))[0] == [0]
    assert len(balance(rows, 2)[0]) > 1


def test_the_cost_of_a_token_is_twice_the_weights_it_meets():
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    matrices = sum(weight.numel() for weight in model.model.layers.parameters() if weight.ndim == 2)
    cost = Cost.of(config)
    assert cost.token == 2 * matrices
    assert cost.loss_token == 2 * model.lm_head.weight.numel()
    assert cost.pair == 2 * 2 * 32 * 2  # scores and their use, over all heads and layers


def test_layers_whose_heads_differ_in_size_cost_what_they_have():
    """transformers refuses to name a size that differs by layer."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Gemma4TextConfig(**sizes, vocab_size=100, num_hidden_layers=6, head_dim=8, global_head_dim=16)
    assert [config.per_layer_config[number].head_dim for number in range(6)] == [8, 8, 8, 8, 8, 16]
    assert Cost.of(config).pair == pytest.approx(4 * 4 * (5 * 8 + 16))
    assert Cost.of(config).token > 0


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="0 ranks"):
        balance(ragged_batch(groups=1), 0)
