"""Which layers a stage of a pipeline has, and what is left of a model there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import tiny_model
from transformers import AutoModelForCausalLM

from trainer_svc.compute_config import stage_layers
from trainer_svc.parallel.sharding import cut_stage, tied_weight


@given(st.integers(1, 200), st.integers(1, 16))
def test_stages_share_all_layers_in_order_and_evenly(layers: int, stages: int) -> None:
    if layers < stages:
        with pytest.raises(ValueError, match=r"set trainer\.parallel\.pp"):
            stage_layers(layers, stages)
        return
    shares = stage_layers(layers, stages)
    assert [layer for share in shares for layer in share] == list(range(layers))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


@pytest.mark.parametrize("tie", [False, True])
def test_stages_hold_each_weight_once_under_its_own_name_but_for_a_tied_one(tmp_path: Path, tie: bool) -> None:
    path = tiny_model(tmp_path, tie=tie)
    whole = AutoModelForCausalLM.from_pretrained(path)
    stages = [AutoModelForCausalLM.from_pretrained(path) for _ in range(2)]
    for number, model in enumerate(stages):
        cut_stage(model, number, 2)
    held = [dict(model.named_parameters()) for model in stages]
    assert set(held[0]) & set(held[1]) == ({"model.embed_tokens.weight"} if tie else set())
    assert set(held[0]) | set(held[1]) == set(dict(whole.named_parameters()))
    tied = [tied_weight(model, number, 2) for number, model in enumerate(stages)]
    assert (tied[0] is not None and tied[1] is not None and torch.equal(tied[0], tied[1])) == tie


def test_a_model_of_other_parts_cannot_be_cut() -> None:
    from transformers import MambaConfig

    config = MambaConfig(vocab_size=16, hidden_size=8, state_size=4, num_hidden_layers=2)
    with pytest.raises(ValueError, match="cannot be cut into stages"):
        cut_stage(AutoModelForCausalLM.from_config(config), 0, 2)
