"""What holds of every objective whatever the numbers, the packing and the order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from by_hand import BATCH, as_case
from golden import result_of
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_rows import training_row

from trainer_svc.batch.rows import Outputs, pack
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective, with_group_tokens
from trainer_svc.objectives.presets import PRESETS

RATIO_PRESETS = [name for name, preset in PRESETS.items() if preset.needs_behaviour]
AGGREGATIONS = ["token", "sequence", "prompt", "constant"]
ragged = st.lists(st.lists(st.floats(-15, -1e-3), min_size=1, max_size=8), min_size=1, max_size=4)


def with_aggregation(preset: str, aggregation: str) -> dict:
    return {"aggregation": aggregation} | ({"max_tokens": 8} if aggregation == "constant" else {})


@settings(max_examples=100)
@given(st.sampled_from(RATIO_PRESETS), st.booleans(), ragged)
def test_on_policy_with_advantage_one_the_gradient_is_that_of_the_log_likelihood(preset, decoupled, logps):
    sequences = [
        {"logp": row, "behaviour_logp": row, "advantage": 1.0} | ({"proximal_logp": row} if decoupled else {})
        for row in logps
    ]
    result = result_of({"preset": preset, "params": with_aggregation(preset, "token"), "sequences": sequences})
    tokens = sum(map(len, logps))
    assert result["grad"] == [pytest.approx([-1.0 / tokens] * len(row), rel=1e-9) for row in logps]


@settings(max_examples=15)
@given(st.floats(5.5, 1000.0), st.floats(0.1, 3.0))
def test_a_clipped_token_keeps_a_gradient_in_aipo_and_cispo_and_none_in_ppos_clip(ratio, advantage):
    def slope(preset: str) -> float:
        sequence = {"logp": [-9.0 + math.log(ratio)], "behaviour_logp": [-9.0], "advantage": advantage}
        return result_of({"preset": preset, "params": with_aggregation(preset, "token"), "sequences": [sequence]})[
            "grad"
        ][0][0]

    assert slope("aipo") == pytest.approx(-4.0 * advantage)
    assert slope("cispo") == pytest.approx(-5.0 * advantage)
    assert slope("rloo") == pytest.approx(-2.0 * advantage)
    assert [slope(preset) for preset in ("grpo", "dapo", "dr_grpo", "gspo", "ppo", "reinforce_pp", "m2po")] == [0.0] * 7


@pytest.mark.parametrize("preset", RATIO_PRESETS)
def test_tokens_without_an_advantage_have_neither_loss_nor_gradient(preset):
    """Which is why the trainer does not forward them."""
    silent = [[replace(token, a=0.0) for token in row] for row in BATCH]
    params = with_aggregation(preset, "token")
    if "kl_tau" in PRESETS[preset].other_parameters:
        params["kl_tau"] = 0.5
    for proximal in (False, True):
        result = result_of(as_case(preset, params, proximal=proximal, batch=silent))
        assert result["loss"] == 0.0
        assert not any(any(row) for row in result["grad"])


def random_rows(generator: torch.Generator) -> list:
    """Groups of rows with several turns, every column set, and some tokens not kept."""

    def normal(count: int, scale: float = 1.0) -> list[float]:
        return (scale * torch.randn(count, generator=generator)).tolist()

    rows = []
    for index in range(9):
        mask = [0, *(torch.rand(3 + index, generator=generator) < 0.7).int().tolist(), 1]
        count = sum(mask)
        behaviour = [-3.0 + x for x in normal(count)]
        rows.append(
            training_row(
                mask,
                name=str(index),
                group=("a", "b", "")[index % 3],
                behaviour_logprobs=behaviour,
                proximal_logprobs=[b + x for b, x in zip(behaviour, normal(count, 0.3), strict=True)],
                proximal_share=[abs(math.sin(x)) for x in normal(count)],
                reference_logprobs=[-3.0 + x for x in normal(count)],
                teacher_logprobs=[-3.0 + x for x in normal(count)],
                advantages=normal(count),
                kept=torch.rand(len(mask), generator=generator) < 0.8,
            )
        )
    return rows


def gradient(objective: Objective, rows: list, logp: dict[str, torch.Tensor], budget: int) -> tuple[dict, float]:
    """d loss / d log t by trajectory, of rows that are packed into micro-batches of this size."""
    leaves = {name: values.clone().requires_grad_() for name, values in logp.items()}
    weight = objective.weight(rows)
    total = 0.0
    for batch in pack(rows, budget):
        current = torch.cat([leaves[row.trajectory_id] for row in batch.sequences])
        loss, _ = objective.loss(Outputs(current, -current * 0.5), batch)
        (loss / weight).backward()
        total += float(loss.detach()) / weight
    return {name: leaf.grad for name, leaf in leaves.items()}, total


FORMS = {
    "bypass": {},
    "recompute": {
        "proximal": "recompute",
        "correction": {"kind": "geometric_mask", "low": 0.8, "high": 1.1, "veto": 0.4},
    },
    "loglinear": {"proximal": "loglinear", "correction": {"kind": "sequence_tis"}},
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_do_not_depend_on_micro_batches_or_order(preset, aggregation):
    generator = torch.Generator().manual_seed(11)
    rows = with_group_tokens(random_rows(generator))
    logp = {
        row.trajectory_id: row.behaviour_logprobs[row.loss_mask]
        + 0.4 * torch.randn(int(row.loss_mask.sum()), generator=generator, dtype=torch.float64)
        for row in rows
    }
    forms = FORMS if PRESETS[preset].anchor == "proximal" else {"bypass": {}}
    for name, form in forms.items():
        if preset == "m2po" and name != "recompute":
            continue
        extra = (
            {"correction": {"off_policy_sequence_mask": 0.1}} if name == "bypass" and preset in RATIO_PRESETS else {}
        )
        if "kl_tau" in PRESETS[preset].other_parameters:
            extra["kl_tau"] = 0.05
        config = ObjectiveConfig(
            preset=preset,
            kl_coef=0.05,
            kl_where="loss",
            kl_kind="k3",
            entropy_coef=0.01,
            **with_aggregation(preset, aggregation),
            **form,
            **extra,
        )
        objective = Objective.of(config)
        whole, value = gradient(objective, rows, logp, 10_000)
        scale = max(float(each.abs().max()) for each in whole.values())
        assert scale > 0
        for budget, order in ((1, rows), (14, rows[::-1]), (30, rows[4:] + rows[:4])):
            parts, split_value = gradient(objective, order, logp, budget)
            assert split_value == pytest.approx(value, rel=1e-12)
            assert all(torch.allclose(parts[key], whole[key], rtol=1e-12, atol=1e-12 * scale) for key in whole)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_shares_of_ranks_add_up_to_the_divisor_of_the_whole_batch(aggregation):
    """Also where a group lies on several ranks."""
    rows = with_group_tokens(random_rows(torch.Generator().manual_seed(2)))
    silent = training_row([0, 0, 0], name="silent", group="c")
    objective = Objective.of(ObjectiveConfig(preset="dapo", **with_aggregation("dapo", aggregation)))
    whole = objective.weight([*rows, silent])
    assert whole == objective.weight(rows)
    for ranks in (2, 3, 9):
        assert sum(objective.weight(rows[rank::ranks]) for rank in range(ranks)) == pytest.approx(whole, rel=1e-12)
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    assert whole == pytest.approx({"token": tokens, "sequence": 9, "prompt": 5, "constant": 72}[aggregation])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_micro_batch_without_loss_tokens_gives_nothing_and_the_same_names(preset):
    """A rank that has fewer rows than others fills up with such micro-batches, and sums go by name."""
    config = ObjectiveConfig(preset=preset, **with_aggregation(preset, "token"))
    objective = Objective.of(config)
    (batch,) = pack(random_rows(torch.Generator().manual_seed(1))[:1], 100)
    empty = replace(
        batch,
        owners=batch.owners[:0],
        **{
            name: value[:0]
            for name in (
                "behaviour_logprobs",
                "advantages",
                "proximal_logprobs",
                "reference_logprobs",
                "teacher_logprobs",
                "kept",
            )
            if (value := getattr(batch, name)) is not None
        },
    )
    full_sums = objective.loss(Outputs(torch.zeros(len(batch.owners), dtype=torch.float64)), batch)[1]
    loss, sums = objective.loss(Outputs(torch.zeros(0, dtype=torch.float64)), empty)
    assert float(loss) == 0.0
    assert sums.keys() == full_sums.keys()
    assert all(float(value) == 0.0 for value in sums.values())
