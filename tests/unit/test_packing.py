"""Packing: every sequence whole, in exactly one micro-batch, and as if it were alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_policy import policy_step, ragged_batch, row, tiny_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3MoeConfig,
)

from trainer_svc.batch.rows import TrainingRow, pack
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.loading import load_network

lengths = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=25)


def rows_of(sizes: list[tuple[int, int, int]]) -> list[TrainingRow]:
    """Rows whose prompts are equal within a group and differ between groups."""
    return [
        row([10 + group] * prompt, [50 + index % 50] * completion, group=f"g{group}", name=str(index))
        for index, (prompt, completion, group) in enumerate(sizes)
    ]


@settings(max_examples=60)
@given(lengths, st.integers(1, 120), st.booleans())
def test_each_sequence_lies_in_exactly_one_micro_batch_with_all_its_loss_tokens(sizes, budget, fold):
    rows = rows_of(sizes)
    batches = pack(rows, budget, fold=fold)
    assert sorted(index for batch in batches for index in batch.order) == list(range(len(rows)))
    for batch in batches:
        counts = torch.bincount(batch.owners, minlength=len(batch.sequences))
        assert counts.tolist() == [int(sequence.loss_mask.sum()) for sequence in batch.sequences]
        expected = torch.cat([sequence.input_ids[sequence.loss_mask] for sequence in batch.sequences])
        assert torch.equal(batch.targets, expected)


@settings(max_examples=60)
@given(lengths, st.integers(1, 120), st.booleans())
def test_only_a_single_long_sequence_exceeds_the_budget(sizes, budget, fold):
    for batch in pack(rows_of(sizes), budget, fold=fold):
        assert batch.packed_tokens <= budget or len(batch.sequences) == 1


@settings(max_examples=60)
@given(lengths, st.integers(1, 120), st.booleans())
def test_a_loss_token_is_predicted_by_the_token_before_it_at_its_own_position(sizes, budget, fold):
    for batch in pack(rows_of(sizes), budget, fold=fold):
        places = torch.cat([sequence.loss_mask.nonzero().squeeze(1) for sequence in batch.sequences])
        before = torch.cat([s.input_ids[s.loss_mask.nonzero().squeeze(1) - 1] for s in batch.sequences])
        assert torch.equal(batch.position_ids[0, batch.predictors], places - 1)
        assert torch.equal(batch.input_ids[0, batch.predictors], before)


def test_a_prompt_shared_by_a_group_is_forwarded_once():
    rows = [row([7] * 20, [30 + i] * 5, group="g", name=str(i)) for i in range(4)]
    (batch,) = pack(rows, 1000)
    assert batch.packed_tokens == 20 + 4 * 4  # the last token of a completion predicts nothing
    (apart,) = pack(rows, 1000, fold=False)
    assert apart.packed_tokens == 4 * 24


def test_sequences_without_loss_tokens_are_not_forwarded():
    silent = row([5, 6, 7], [8], name="silent")
    silent.loss_mask[:] = False
    assert [batch.order for batch in pack([silent, row([5], [6])], 100)] == [(1,)]
    assert pack([silent], 100) == []


def test_malformed_sequences_are_refused_with_their_name():
    good = row([1, 2], [3], name="bad-row")
    with pytest.raises(ValueError, match=r"bad-row.*first token"):
        TrainingRow(
            good.input_ids,
            torch.ones(3, dtype=torch.bool),
            good.behaviour_logprobs,
            good.advantages,
            trajectory_id="bad-row",
        )
    with pytest.raises(ValueError, match="advantages of sequence"):
        TrainingRow(good.input_ids, good.loss_mask, good.behaviour_logprobs, good.advantages[:2])
    with pytest.raises(ValueError, match="temperature"):
        row([1], [2], temperature=0.0)
    with pytest.raises(ValueError, match="token_budget"):
        pack([good], 0)


SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ARCHITECTURES = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=9),
    "granite": GraniteConfig(**SIZES, logits_scaling=8.0),  # its logits are more than the output embedding
    "qwen3_moe": Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "gemma2": Gemma2Config(**SIZES, head_dim=8),
    "gpt2": GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5),
    "mamba": MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2),
    "dynamic": LlamaConfig(
        **SIZES,
        max_position_embeddings=32,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
    ),
    "longrope": Phi3Config(
        **SIZES,
        pad_token_id=0,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
        },
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, config in ARCHITECTURES.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    return {"qwen3": tiny_model(root), **{name: root / name for name in ARCHITECTURES}}


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "mistral", "granite", "qwen3_moe"])
@pytest.mark.parametrize("fold", [True, False])
def test_packed_log_probabilities_equal_those_of_each_sequence_alone(models, architecture, fold):
    rows = ragged_batch(seed=1)
    engine = TrainEngine(TrainerConfig(token_budget=150, fold_prompts=fold, device="cpu"), models[architecture])
    packed = engine.forward(rows)
    plain = AutoModelForCausalLM.from_pretrained(models[architecture], attn_implementation="eager").eval()
    for sequence, values in zip(rows, packed, strict=True):
        with torch.no_grad():
            logits = plain(sequence.input_ids.unsqueeze(0)).logits[0, :-1]
        alone = torch.log_softmax(logits / sequence.temperature, -1).gather(1, sequence.input_ids[1:, None]).squeeze(1)
        mask = sequence.loss_mask[1:]
        assert (values[1:][mask] - alone[mask]).abs().max() < 1e-5
        assert values[~sequence.loss_mask].isnan().all()


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_a_sequence_whose_length_changes_the_rope_frequencies_of_its_neighbours_is_refused(models, rope):
    short, long = row([5, 6], [7, 8, 9], name="short"), row([3] * 20, [4] * 20, name="long")
    engine = TrainEngine(TrainerConfig(device="cpu"), models[rope])
    with pytest.raises(ValueError, match=rf"'long' has 40 tokens.*{rope}.*32"):
        engine.forward([short, long])
    plain = AutoModelForCausalLM.from_pretrained(models[rope], attn_implementation="eager").eval()
    (values,) = engine.forward([short])
    with torch.no_grad():
        alone = torch.log_softmax(plain(short.input_ids.unsqueeze(0)).logits[0, :-1], -1)
    assert torch.allclose(values[2:], alone.gather(1, short.input_ids[1:, None]).squeeze(1)[1:], atol=1e-5)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rows_up_to_the_original_length_train_whatever_lies_beside_them(models, rope):
    rows = [row([5, 6], [7, 8, 9], name="short"), row([3] * 20, [4] * 12, name="as long as allowed")]
    engine = TrainEngine(TrainerConfig(device="cpu"), models[rope])
    together = engine.forward(rows)
    assert torch.allclose(together[0], engine.forward(rows[:1])[0], atol=1e-6, equal_nan=True)


def test_logits_in_parts_give_the_same_gradient(models):
    rows = ragged_batch(seed=2)

    def gradient(cells: int) -> torch.Tensor:
        policy = load_network(str(models["qwen3"]), torch.device("cpu"), logit_cells=cells)
        policy.model.double()
        for batch in pack(rows, 10_000):
            policy.outputs(batch, entropy="train").main.sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])

    assert torch.allclose(gradient(1 << 25), gradient(128 * 7), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("architecture", "reason"), [("mamba", "packed"), ("gemma2", "softcap")])
def test_an_architecture_that_packing_would_change_is_refused_at_load(models, architecture, reason):
    with pytest.raises(ValueError, match=reason):
        load_network(str(models[architecture]), torch.device("cpu"))


def test_fused_experts_are_published_under_the_names_of_the_file(models):
    engine = TrainEngine(TrainerConfig(device="cpu"), models["qwen3_moe"])
    stored = load_file(models["qwen3_moe"] / "model.safetensors")
    published = engine.named_tensors()
    assert published.keys() == stored.keys()
    assert all(torch.equal(published[name], stored[name]) for name in stored)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])  # the latter has dropout, which must not come along
def test_recomputed_activations_give_the_same_gradient(models, architecture):
    def gradient(recompute: bool) -> torch.Tensor:
        policy = load_network(str(models[architecture]), torch.device("cpu"), gradient_checkpointing=recompute)
        for batch in pack(ragged_batch(seed=2), 10_000):
            policy.outputs(batch).main.mean().backward()
        return torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])

    assert torch.allclose(gradient(True), gradient(False), rtol=1e-5, atol=1e-7)


def test_bfloat16_stays_close_to_float32_and_keeps_float32_weights(models):
    rows = ragged_batch(seed=2)
    exact, rounded = (
        TrainEngine(TrainerConfig(device="cpu", dtype=d), models["qwen3"]) for d in ("float32", "bfloat16")
    )
    pairs = zip(exact.forward(rows), rounded.forward(rows), rows, strict=True)
    gaps = torch.cat([(a - b)[sequence.loss_mask].abs() for a, b, sequence in pairs])
    assert 0 < gaps.max() < 0.05
    assert not policy_step(rounded, rows).skipped
    assert {parameter.dtype for parameter in rounded.network.model.parameters()} == {torch.float32}


def test_values_have_more_digits_than_the_layers_below(models):
    critic = TrainEngine(TrainerConfig(device="cpu", dtype="bfloat16"), models["qwen3"], head="value")
    torch.nn.init.normal_(critic.network.model.score.weight)
    rows = ragged_batch(seed=2)
    values = torch.cat([each[row.loss_mask] for each, row in zip(critic.forward(rows), rows, strict=True)])
    assert not torch.equal(values, values.bfloat16().float())
