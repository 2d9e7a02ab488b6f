"""The whole update of a batch: critic, frozen models, the decoupled forms, epochs and minibatches, on a real small model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_policy import ragged_batch, row, tiny_model
from transformers import AutoModelForCausalLM

from sluice.cli.init_model import ModelShape, init_model
from sluice.versions import Version, VersionSpan
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.network import PACKED_ATTENTION
from trainer_svc.objectives.objective import Objective, keep_trainable, with_batch_facts
from trainer_svc.update.critic import with_values
from trainer_svc.update.policy import PolicyUpdate, load_frozen, update_report, with_logprobs


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("update"))


def settings(preset: str, objective: dict | None = None, **options) -> TrainerConfig:
    defaults = {"lr": 1e-3, "device": "cpu", "grad_clip": 0.0, "betas": (0.9, 0.999)}
    return TrainerConfig(objective={"preset": preset, **(objective or {})}, **(defaults | options))


def update_of(model_dir: Path, config: TrainerConfig) -> PolicyUpdate:
    return PolicyUpdate.load(config, model_dir, seed=1, frozen=load_frozen(config, model_dir))


def on_policy(update: PolicyUpdate, rows: list[TrainingRow]) -> list[TrainingRow]:
    """The rows as the current policy would have sampled them."""
    logprobs = update.engine.forward(rows)
    return [replace(each, behaviour_logprobs=values) for each, values in zip(rows, logprobs, strict=True)]


def opinionated(critic: TrainEngine) -> TrainEngine:
    """A critic with values: a new one has none but 0."""
    with torch.no_grad():
        critic.network.value_head.weight.normal_(generator=torch.Generator().manual_seed(2))
    return critic


def rewarded(rows: list[TrainingRow]) -> list[TrainingRow]:
    """The rows with rewards, every third one cut off by its length."""
    return [replace(each, reward=float(i % 4) - 1.0, truncated=i % 3 == 0) for i, each in enumerate(rows)]


def gradients(update: PolicyUpdate) -> list[torch.Tensor]:
    """Will hold the policy's gradient of each step to come."""
    taken: list[torch.Tensor] = []
    parameters = list(update.engine.network.model.parameters())
    step = update.engine.step

    def keep(record) -> None:
        taken.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]))
        step(record)

    update.engine.step = keep  # type: ignore[method-assign]
    return taken


# What other models say.


def test_the_critic_gives_each_token_the_value_of_the_state_before_it_and_a_truncated_end_its_own(model_dir):
    critic = opinionated(PolicyUpdate.load(settings("ppo"), model_dir, seed=1).critic.engine)
    whole = row([5, 6], [7, 8, 9, 10], name="whole")
    rows, after = with_values([replace(whole, truncated=True), whole], critic)
    model = critic.network.model
    alone = AutoModelForCausalLM.from_pretrained(model_dir).base_model
    alone.load_state_dict(model.base_model.state_dict())
    with torch.no_grad():
        states = model.score(alone(whole.input_ids.unsqueeze(0)).last_hidden_state[0]).squeeze(-1)
    for each in rows:
        torch.testing.assert_close(each.values[2:], states[1:5], rtol=1e-4, atol=1e-5)
        assert len(each.values) == 6
    assert after[0] == pytest.approx(float(states[5]), rel=1e-4, abs=1e-5)
    assert after[1] == 0.0


def test_rows_that_bring_a_column_keep_it(model_dir):
    engine = PolicyUpdate.load(settings("grpo"), model_dir).engine
    rows = [row([5], [6, 7], reference=-1.5, name="brings"), row([5], [8, 9], name="lacks")]
    brings, lacks = with_logprobs(rows, "reference_logprobs", engine)
    assert brings.reference_logprobs.tolist() == rows[0].reference_logprobs.tolist()
    assert torch.equal(lacks.reference_logprobs[1:], engine.forward(rows[1:])[0][1:])


def test_the_reference_is_the_policy_at_first_and_falls_behind(model_dir):
    update = update_of(model_dir, settings("grpo", {"kl_coef": 0.1}, reference={"model": "base"}, lr=3e-3))
    assert update.reference is not None
    rows = [replace(each, reference_logprobs=None) for each in ragged_batch(seed=3)]
    drift = [update.apply(on_policy(update, rows)).metrics.measured["kl"] for _ in range(3)]
    assert drift[0] == pytest.approx(0.0, abs=1e-6)
    assert drift[2] > drift[1] > 1e-5


@pytest.mark.slow
def test_a_teacher_is_followed(model_dir, tmp_path):
    config = settings("distill", teacher={"model": str(_lover_of_odd_ids(tmp_path))}, lr=1e-2)
    update = update_of(model_dir, config)
    rows = [_sampled(update, 0)]
    gaps = []
    for seed in range(12):
        gaps.append(update.apply(rows[-1]).metrics.measured["teacher_kl"])
        rows.append(_sampled(update, seed + 1))
    assert sum(gaps[-3:]) < 0.5 * sum(gaps[:3])
    odd = [sum(each.reward for each in batch) / len(batch) for batch in rows]
    assert odd[-1] > odd[0] + 0.2


def _lover_of_odd_ids(directory: Path) -> Path:
    """A teacher that is the policy but for a liking for odd ids."""
    path = tiny_model(directory)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        state = model.base_model(torch.tensor([[5, 6, 7]])).last_hidden_state[0].mean(0)
        model.lm_head.weight[1::2] += 3.0 * state / state.square().sum()
    model.save_pretrained(path)
    return path


# Advantages.


def test_gae_by_hand(model_dir):
    objective = {"gamma": 0.5, "gae_lambda": 0.5, "value_clip": 0.1}
    update = update_of(model_dir, settings("ppo", objective, lr=0.0))
    opinionated(update.critic.engine)
    ended = row([5, 6], [7, 8, 9], name="ended")
    rows = on_policy(update, [replace(ended, reward=2.0), replace(ended, reward=2.0, truncated=True)])
    judged, after = with_values(rows, update.critic.engine)
    done, cut = update._prepared(rows, {})
    for prepared, last in ((done, 0.0), (cut, after[1])):
        v = judged[0].values[2:].double().tolist()
        deltas = [0.5 * v[1] - v[0], 0.5 * v[2] - v[1], 2.0 + 0.5 * last - v[2]]
        expected = [deltas[0] + 0.25 * deltas[1] + 0.0625 * deltas[2], deltas[1] + 0.25 * deltas[2], deltas[2]]
        returns = [a + value for a, value in zip(expected, v, strict=True)]
        assert prepared.advantages[2:].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert prepared.returns[2:].tolist() == pytest.approx(returns, rel=1e-5, abs=1e-6)
    assert after[1] != 0.0


def test_gae_without_a_critic_is_refused(model_dir):
    config = settings("ppo")
    policy = PolicyUpdate.load(settings("grpo"), model_dir).engine
    with pytest.raises(ValueError, match="needs the values of a critic"):
        PolicyUpdate(policy, Objective.of(config.objective))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_critic_learns_the_returns_and_stays_out_of_the_exported_policy(model_dir, tmp_path, shared):
    critic = {"shared": True} if shared else {"lr": 3e-3}
    update = update_of(model_dir, settings("ppo", {"value_clip": 10.0}, critic=critic, lr=3e-3))
    rows = rewarded(ragged_batch(seed=5, groups=3))
    reports = [update.apply(on_policy(update, rows)).metrics.measured for _ in range(12)]
    assert reports[-1]["critic/value_loss"] < 0.75 * reports[0]["critic/value_loss"]
    assert reports[-1]["critic/explained_variance"] > reports[0]["critic/explained_variance"]
    assert ("critic/grad_norm" in reports[0]) is not shared
    update.engine.export_hf(tmp_path / "policy")
    names = set(AutoModelForCausalLM.from_pretrained(model_dir).state_dict())
    assert set(update.engine.live_tensors()) == names
    assert set(AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict()) == names


def test_reinforce_pp_needs_no_critic_and_takes_the_kl_into_the_reward(model_dir):
    config = settings("reinforce_pp", {"kl_coef": 0.1}, reference={"model": "batch"})
    update = update_of(model_dir, config)
    assert (update.critic, update.reference) == (None, None)
    rows = rewarded(ragged_batch(seed=6))
    prepared = update._prepared(rows, {})
    values = torch.cat([each.advantages[each.loss_mask] for each in prepared]).double()
    assert float(values.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(values.std()) == pytest.approx(1.0, abs=1e-4)
    assert update.apply(rows).metrics.measured["optimizer_steps"] == 1


# The proximal policy.


def test_recomputed_is_bypass_where_the_policy_itself_sampled(model_dir):
    def step(objective: dict) -> tuple[torch.Tensor, float]:
        update = update_of(model_dir, settings("grpo", objective))
        taken = gradients(update)
        metrics = update.apply(on_policy(update, ragged_batch(seed=7))).metrics
        return taken[0], metrics.loss

    bypass, loss = step({})
    decoupled, decoupled_loss = step({"proximal": "recompute", "correction": {"kind": "token_tis"}})
    assert float((decoupled - bypass).norm() / bypass.norm()) < 1e-5
    assert decoupled_loss == pytest.approx(loss, rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with sums so long that bfloat16 results depend on the number of rows of a product."""
    path = tmp_path_factory.mktemp("wide") / "model"
    init_model(
        path, ModelShape(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, mlp=384, max_positions=512), seed=3
    )
    return path


def first_ratios(update: PolicyUpdate, rows: list[TrainingRow]) -> torch.Tensor:
    """Train on the rows; return |log t - log o| of the tokens of the first optimizer step."""
    gaps: list[list[torch.Tensor]] = []
    train_batch = update.engine.train_batch

    def watched(part, loss_fn, weight_fn, **options):
        gaps.append([])

        def loss(outputs, batch):
            gaps[-1].append((outputs.logprobs.detach() - batch.proximal_logprobs).abs())
            return loss_fn(outputs, batch)

        return train_batch(part, loss, weight_fn, **options)

    update.engine.train_batch = watched  # type: ignore[method-assign]
    update.apply(rows)
    assert len(gaps[0]) > 1, "several micro-batches"
    return torch.cat(gaps[0])


RECOMPUTED = {
    "gspo": ({}, {"minibatches": 2}),
    "m2po": ({}, {}),
    "ppo": ({"proximal": "recompute", "correction": {"kind": "token_tis"}}, {"minibatches": 2, "epochs": 2}),
    "shared critic": (
        {"proximal": "recompute", "correction": {"kind": "token_tis"}},
        {"minibatches": 2, "critic": {"shared": True}},
    ),
    "KL in the reward": (
        {"proximal": "recompute", "correction": {"kind": "token_tis"}, "kl_coef": 0.1},
        {"minibatches": 2, "reference": {"model": "batch"}},
    ),
    "process": (
        {"advantage": "process", "proximal": "recompute", "correction": {"kind": "token_tis"}},
        {"minibatches": 2},
    ),
}
PRESET_OF = {"shared critic": "ppo", "KL in the reward": "reinforce_pp", "process": "grpo"}


def with_silent_rows(rows: list[TrainingRow]) -> list[TrainingRow]:
    """The rows, every third one without an advantage and a reward, so that most objectives do not forward it."""
    told = []
    for place, each in enumerate(rewarded(rows)):
        reward = 0.0 if place % 3 == 0 else each.reward
        paid = torch.full((len(each),), reward)
        silent = torch.zeros(len(each)) if place % 3 == 0 else each.advantages
        told.append(replace(each, advantages=silent, reward=reward, token_rewards=paid))
    return told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case", [each if each == "gspo" else pytest.param(each, marks=pytest.mark.slow) for each in RECOMPUTED]
)
def test_the_ratio_to_the_recomputed_policy_is_exactly_one_in_the_first_step(wide_model, case, dtype):
    """It is computed in the micro-batches of the step, so that both round alike."""
    objective, options = RECOMPUTED[case]
    config = settings(PRESET_OF.get(case, case), objective, dtype=dtype, token_budget=256, **options)
    gaps = first_ratios(update_of(wide_model, config), with_silent_rows(ragged_batch(seed=11, groups=20)))
    assert float(gaps.max()) == 0.0


@pytest.mark.slow
def test_the_ratio_is_exactly_one_where_only_some_rows_have_an_objective_that_reads_it(wide_model):
    """Rows of other objectives lie in the same micro-batches of the step."""
    narrow = {"narrow": {"preset": "gspo"}}
    config = settings("aipo", dtype="bfloat16", token_budget=256, minibatches=2, objectives=narrow)
    rows = with_silent_rows(ragged_batch(seed=11, groups=20))
    rows = [replace(each, objective="narrow" if place % 2 else "") for place, each in enumerate(rows)]
    gaps = first_ratios(update_of(wide_model, config), rows)
    read = gaps[~gaps.isnan()]
    assert 0 < len(read) < len(gaps)
    assert float(read.max()) == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_other_micro_batches_the_ratio_to_the_recomputed_policy_is_rounding(wide_model, dtype):
    update = update_of(wide_model, settings("gspo", dtype=dtype, token_budget=256, minibatches=2))
    rows = with_silent_rows(ragged_batch(seed=11, groups=20))
    alone = [values for each in rows for values in update.engine.forward([each])]
    elsewhere = [replace(each, proximal_logprobs=values) for each, values in zip(rows, alone, strict=True)]
    assert float(first_ratios(update, elsewhere).max()) > 0.0


def test_recomputed_stays_the_policy_that_the_update_began_with(model_dir):
    objective = {"proximal": "recompute", "correction": {"kind": "none"}}
    update = update_of(model_dir, settings("grpo", objective, lr=3e-3, epochs=4))
    metrics = update.apply(ragged_batch(seed=8)).metrics
    assert metrics.measured["clip_fraction_high"] + metrics.measured["clip_fraction_low"] > 0


def test_the_share_of_the_log_linear_form_follows_from_the_age_of_each_token():
    objective = Objective.of(settings("grpo", {"proximal": "loglinear", "correction": {"kind": "token_tis"}}).objective)
    spans = tuple(VersionSpan(2 + i, Version(1, number)) for i, number in enumerate((0, 2, 3, 4)))
    (shared,) = with_batch_facts(
        [replace(row([5, 6], [7, 8, 9, 10]), versions=spans)], objective.resolved, lambda version: 4 - version.number
    )
    assert shared.proximal_share[2:].tolist() == pytest.approx([3 / 4, 1 / 2, 0, 0])


def test_rows_know_their_group_before_ranks_tear_it_apart():
    objective = Objective.of(settings("grpo").objective)
    holed = row([5], [6, 7], group="g", name="b", behaviour=torch.tensor([-1.0, torch.nan]))
    kept, _ = keep_trainable([row([5], [6, 7], group="g"), holed, row([5], [6])], objective.resolved)
    rows = with_batch_facts(kept, objective.resolved, lambda _: 0)
    assert [each.group_loss_tokens for each in rows] == [3, 3, 0]


def test_a_group_is_worth_as_much_as_another_whatever_column_lacks_a_token():
    """Columns that the batch brings take a token out of the group's count as they take it out of the loss."""
    nan = torch.nan
    settings_ = {"kl_coef": 0.1, "aggregation": "prompt"}
    objective = Objective.of(settings("grpo", settings_, reference={"model": "batch"}).objective)
    member = row([5], [6, 7], group="g", reference=-1.0, behaviour=torch.tensor([nan, -1.0]))
    holes = {"reference_logprobs": torch.tensor([nan, nan, -1.0]), "advantages": torch.tensor([0.0, 1.0, nan])}
    rows = [member] + [
        replace(member, behaviour_logprobs=torch.zeros(3), **{name: values}) for name, values in holes.items()
    ]
    kept, _ = keep_trainable([*rows, row([5], [6, 7], group="h", reference=-1.0)], objective.resolved)
    trained = with_batch_facts(kept, objective.resolved, lambda _: 0)
    assert [each.group_loss_tokens for each in trained] == [3, 3, 3, 2]
    assert objective.weight(trained) == pytest.approx(2.0), "two groups"


# Epochs and minibatches.


def test_minibatches_of_one_epoch_make_the_gradient_of_the_whole_batch(model_dir):
    rows = ragged_batch(seed=9, groups=6)
    whole = update_of(model_dir, settings("grpo", {"aggregation": "token"}, lr=0.0))
    parts = update_of(model_dir, settings("grpo", {"aggregation": "token"}, lr=0.0, minibatches=3))
    taken, pieces = gradients(whole), gradients(parts)
    tokens: list[float] = []
    train_batch = parts.engine.train_batch

    def count(part, loss_fn, weight_fn, **options):
        tokens.append(weight_fn(part))
        return train_batch(part, loss_fn, weight_fn, **options)

    parts.engine.train_batch = count  # type: ignore[method-assign]
    whole.apply(rows)
    metrics = parts.apply(rows).metrics
    total = sum(part * share for part, share in zip(pieces, tokens, strict=True)) / sum(tokens)
    assert len(pieces) == 3
    assert float((total - taken[0]).norm() / taken[0].norm()) < 1e-5
    assert metrics.loss_tokens == sum(int(each.loss_mask.sum()) for each in rows)
    assert (metrics.sequences, metrics.tokens) == (len(rows), sum(map(len, rows)))


def test_every_minibatch_of_every_epoch_is_an_optimizer_step(model_dir):
    update = update_of(model_dir, settings("ppo", epochs=2, minibatches=3))
    metrics = update.apply(on_policy(update, rewarded(ragged_batch(seed=10)))).metrics
    assert metrics.measured["optimizer_steps"] == update.engine.optimizer_steps == 6
    assert update.critic.engine.optimizer_steps == 6
    assert metrics.measured["mismatch_kl"] == pytest.approx(0.0, abs=1e-6), "of the first forward pass"
    assert metrics.measured["mismatch_kl_last"] > 1e-6


def test_a_first_minibatch_that_forwards_nothing_leaves_the_first_figures_to_the_next(model_dir):
    update = update_of(model_dir, settings("grpo", lr=3e-2))
    silent = [row([5], [6, 7], advantage=0.0, name="silent")]
    told = on_policy(update, [row([5], [8, 9], name="told")])
    steps = [update._policy_step(part) for part in (silent, told, told)]
    assert steps[0].sums.get("gap_tokens", 0.0) == 0.0
    measured = update_report([steps]).measured
    assert measured["mismatch_kl"] == pytest.approx(0.0, abs=1e-6)
    assert measured["max_abs_log_difference"] == pytest.approx(0.0, abs=1e-5)
    assert measured["mismatch_kl_last"] > 1e-4


def test_a_step_that_is_not_finite_is_left_out_and_the_others_are_made(model_dir):
    update = update_of(model_dir, settings("grpo", minibatches=2))
    rows = [row([5], [6, 7], group="good", name="a"), row([5], [8, 9], group="bad", name="b", advantage=1e38)]
    updated = update.apply(on_policy(update, rows))
    assert (updated.metrics.measured["optimizer_steps"], updated.metrics.measured["skipped_steps"]) == (1, 1)
    assert not updated.metrics.skipped
    assert updated.rows.tolist() == [[2, 1], [2, 0]], "tokens and applied steps: the second row trained nothing"
    assert updated.skipped_steps == 1
    assert update.apply(on_policy(update, rows[1:])).metrics.skipped


# PPO on a task.


def _sampled(update: PolicyUpdate, seed: int, count: int = 24, length: int = 4) -> list[TrainingRow]:
    """Completions of two prompts as the policy samples them; the reward is the share of tokens with an odd id."""
    rows = [row([5 + i % 2], [6] * length, name=f"{seed}/{i}", group=f"{seed}/{i % 2}") for i in range(count)]
    ids = torch.stack([each.input_ids for each in rows])
    generator = torch.Generator().manual_seed(seed)
    model = update.engine.network.model
    model.set_attn_implementation("sdpa")  # rows side by side
    for place in range(1, length + 1):
        with torch.no_grad():
            logits = model(ids[:, :place]).logits[:, -1]
        ids[:, place] = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    model.set_attn_implementation(PACKED_ATTENTION)
    odd = (ids[:, 1:] % 2 == 1).float().mean(1).tolist()
    rows = [replace(each, input_ids=tokens, reward=reward) for each, tokens, reward in zip(rows, ids, odd, strict=True)]
    return on_policy(update, rows)


@pytest.mark.slow
@pytest.mark.parametrize("critic", [{"shared": True}, {"lr": 3e-3}], ids=["shared", "own"])
def test_ppo_learns_what_is_rewarded(model_dir, critic):
    objective = {"gae_lambda": 0.9}
    update = update_of(model_dir, settings("ppo", objective, critic=critic, lr=6e-3, epochs=2, minibatches=2))
    rewards = []
    for seed in range(14):
        rows = _sampled(update, seed)
        rewards.append(sum(each.reward for each in rows) / len(rows))
        update.apply(rows)
    assert sum(rewards[:3]) / 3 < 0.6
    assert sum(rewards[-3:]) / 3 > 0.7
