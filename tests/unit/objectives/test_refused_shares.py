"""What a row lacks is refused by all ranks, before any of them waits for another one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from objective_rows import training_row
from thread_ranks import on_ranks

from trainer_svc.batch.rows import TrainingRow
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective, check_columns, keep_trainable
from trainer_svc.parallel.mesh import ALONE, Ranks, agree


@pytest.mark.parametrize(
    ("objective", "lack"),
    [
        ({"preset": "ppo"}, "has no reward"),
        ({"preset": "reinforce_pp", "kl_coef": 0.0}, "has no reward"),
        ({"preset": "grpo", "advantage": "process"}, "needs rewards per token or turn"),
        ({"preset": "grpo", "proximal": "loglinear", "correction": {"kind": "token_tis"}}, "needs proximal_share"),
        ({"preset": "grpo", "kl_coef": 0.1}, "no reference"),
        ({"preset": "distill"}, "no teacher"),
    ],
)
def test_what_a_row_of_one_rank_lacks_is_refused_by_all(objective: dict[str, Any], lack: str) -> None:
    chosen = Objective.of(ObjectiveConfig(**objective))
    lacks = training_row([0, 1, 1], name="lacks")
    columns = ("token_rewards", "proximal_share", "reference_logprobs", "teacher_logprobs")
    has = replace(lacks, **dict.fromkeys(columns, lacks.behaviour_logprobs))

    def trainable(rows: list[TrainingRow]) -> int:
        check_columns(rows, chosen.resolved)
        return len(keep_trainable(rows, chosen.resolved)[0])

    def said(rows: list[TrainingRow], ranks: Ranks) -> str:
        with pytest.raises(ValueError, match=f"rank 1 raised ValueError|{lack}") as refused:
            agree(ranks, lambda: trainable(rows))
        return str(refused.value)

    other, own = on_ranks([[has], [has, lacks]], said)
    assert "rank 1 raised ValueError" in other
    assert lack in other
    assert lack in own
    assert "'lacks'" in own
    assert agree(ALONE, lambda: trainable([has, has])) == 2
