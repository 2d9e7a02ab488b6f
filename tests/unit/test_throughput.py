"""What a step says of its speed, against a model whose operations are counted by hand."""

from __future__ import annotations

import pytest
import torch
from tiny_policy import row, tiny_model
from transformers import Qwen3Config

from trainer_svc.batch.rows import pack
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.metrics import Meter
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective
from trainer_svc.update.policy import Passes, PolicyUpdate

SMALL = Qwen3Config(
    hidden_size=4,
    intermediate_size=6,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=3,
    vocab_size=10,
)
CPU = torch.device("cpu")


def samples_of_one_prompt() -> list:
    """A prompt of three tokens with samples of two and three."""
    return [row([1, 2, 3], [4, 5], group="g", name="a"), row([1, 2, 3], [6, 7, 8], group="g", name="b")]


def test_operations_are_those_counted_by_hand():
    (batch,) = pack(samples_of_one_prompt(), 100)
    # Weights of a layer: queries 4 x 6, keys and values 4 x 3 each, output 6 x 4, feed-forward 3 x 4 x 6: 144.
    token = 2 * 2 * 144
    pair = 2 * 2 * (2 * 3) * 2  # products of scores and of values, 2 operations each, 2 heads of 3, in 2 layers
    scored = 2 * 4 * 10
    # The prompt is forwarded once, the last token of a sample never: 3 + 1 + 2 tokens, at positions 0 1 2 | 3 | 3 4.
    assert (batch.packed_tokens, batch.attention.pairs, len(batch.predictors)) == (6, 1 + 2 + 3 + 4 + 4 + 5, 5)
    work = (6, 19, 5)
    assert Meter.of(SMALL, CPU).flops(*work) == 3 * (token * 6 + pair * 19 + scored * 5)
    # An adapter's base has no gradient of its weights: one product backward instead of two.
    assert Meter.of(SMALL, CPU, frozen=True).flops(*work) == 2 * (token * 6 + scored * 5) + 3 * pair * 19


def test_a_model_of_unknown_sizes_has_no_operations_to_tell():
    assert Meter.of(object(), CPU).flops(6, 19, 5) is None


def test_the_peak_is_that_of_all_devices():
    assert Meter.of(SMALL, CPU).peak is None
    assert Meter.of(SMALL, CPU, devices=4, peak_tflops=2.0).peak == 8e12


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_step_reports_real_tokens_and_the_share_of_the_peak(tmp_path, epochs):
    config = TrainerConfig(device="cpu", peak_tflops=0.5, objective=ObjectiveConfig(preset="grpo"))
    update = PolicyUpdate(
        TrainEngine(config, tiny_model(tmp_path)), Objective.of(config.objective), Passes(epochs=epochs)
    )
    rows = [*samples_of_one_prompt(), row([5] * 7, [6] * 4, advantage=0.0, group="silent", name="c")]
    metrics = update.apply(rows).metrics
    flat, seconds = metrics.as_flat(), metrics.seconds["total"]
    assert flat["tokens_per_s"] == pytest.approx((5 + 6 + 11) / seconds)  # each epoch's work, the batch's tokens once
    assert flat["forward_tokens_per_s"] == pytest.approx(6 * epochs / seconds)
    meter = Meter.of(update.engine.network.model.config, CPU)
    assert flat["flops"] == epochs * meter.flops(6, 19, 5)
    assert flat["mfu"] == pytest.approx(flat["flops"] / (seconds * 0.5e12))
    assert 0 < flat["packing_efficiency"] <= 1
    assert flat["peak_memory_bytes"] > 1 << 20
    without = TrainerConfig(device="cpu", objective=ObjectiveConfig(preset="grpo"))
    engine = TrainEngine(without, update.engine.model_dir)
    assert "mfu" not in PolicyUpdate(engine, update.objective).apply(rows).metrics.as_flat()
