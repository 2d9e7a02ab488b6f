"""What `sluice config convert` makes of a loss is the loss: against the formulas of TRL, verl, PRIME-RL and AReaL in plain floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import pytest
from golden import result_of

from sluice_convert import SYSTEMS, Source, convert
from sluice_convert.table import Leaf

# Log-probabilities of three sequences: now (t), at the start of the update (o), when sampled (b); and their advantages.
NOW = [[-0.8, -1.0, -2.5], [-2.0, -0.3], [-0.7, -1.9, -0.2, -3.0]]
OLD = [[-1.3, -1.1, -2.0], [-1.5, -0.9], [-0.9, -1.2, -1.9, -1.1]]
SAMPLED = [[-1.2, -1.6, -2.1], [-1.4, -1.0], [-2.9, -1.1, -1.8, -1.2]]
ADVANTAGES = [1.0, -1.5, 0.5]

Token = Callable[[float, float], float]
"""The loss of a token, of its ratio t / o and its advantage."""


def clip(ratio: float, low: float, high: float) -> float:
    return min(max(ratio, 1 - low), 1 + high)


def ppo(low: float, high: float, dual: float | None = None) -> Token:
    def loss(ratio: float, advantage: float) -> float:
        least = -min(ratio * advantage, clip(ratio, low, high) * advantage)
        return min(least, -dual * advantage) if dual is not None and advantage < 0 else least

    return loss


def trl_two_sided(low: float, high: float, delta: float) -> Token:
    return lambda ratio, advantage: -min(min(ratio, delta) * advantage, clip(ratio, low, high) * advantage)


def soft(positive: float, negative: float) -> Token:
    def loss(ratio: float, advantage: float) -> float:
        tau = positive if advantage > 0 else negative
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage

    return loss


def tokens(loss: Token, old: Sequence[Sequence[float]] = OLD) -> list[list[float]]:
    return [
        [loss(math.exp(now - then), advantage) for now, then in zip(sequence, before, strict=True)]
        for sequence, before, advantage in zip(NOW, old, ADVANTAGES, strict=True)
    ]


def by_sequence(loss: Token) -> list[list[float]]:
    """GSPO: the ratio of a token is the geometric mean over its sequence."""
    return [
        [loss(math.exp(sum(n - o for n, o in zip(now, old, strict=True)) / len(now)), advantage)] * len(now)
        for now, old, advantage in zip(NOW, OLD, ADVANTAGES, strict=True)
    ]


def weighted(losses: list[list[float]], weight: Callable[[float], float]) -> list[list[float]]:
    """Multiply the loss of each token by a function of o / b."""
    return [
        [loss * weight(math.exp(o - b)) for loss, o, b in zip(*each, strict=True)]
        for each in zip(losses, OLD, SAMPLED, strict=True)
    ]


def by_token(losses: list[list[float]]) -> float:
    return sum(map(sum, losses)) / sum(map(len, losses))


def by_mean(losses: list[list[float]]) -> float:
    return sum(sum(each) / len(each) for each in losses) / len(losses)


def by_constant(length: int) -> Callable[[list[list[float]]], float]:
    return lambda losses: sum(map(sum, losses)) / len(losses) / length


def cispo(low: float, high: float, old: Sequence[Sequence[float]] = OLD) -> list[list[float]]:
    return [
        [-min(max(math.exp(n - o), low), high) * advantage * n for n, o in zip(now, before, strict=True)]
        for now, before, advantage in zip(NOW, old, ADVANTAGES, strict=True)
    ]


def probabilities_kept(
    keep: Callable[[float, float], bool], *, kl_tau: float = 1e-3, adv_tau: float = 1.0
) -> list[list[float]]:
    """PRIME-RL: -adv_tau q A of the tokens whose change of probability is kept, and kl_tau (log q)^2 of all."""
    return [
        [
            (-adv_tau * math.exp(n - b) * advantage if keep(math.exp(n) - math.exp(b), advantage) else 0.0)
            + kl_tau * (n - b) ** 2
            for n, b in zip(now, sampled, strict=True)
        ]
        for now, sampled, advantage in zip(NOW, SAMPLED, ADVANTAGES, strict=True)
    ]


ACTOR = "actor_rollout_ref.actor"
GRPO = {"algorithm.adv_estimator": "grpo"}
VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": False}

CASES: list[tuple[str, Mapping[str, object], float]] = [
    ("trl", {**VLLM}, by_token(tokens(ppo(0.2, 0.2)))),  # the defaults
    ("trl", {**VLLM, "loss_type": "dapo", "epsilon_high": 0.28}, by_token(tokens(ppo(0.2, 0.28)))),
    ("trl", {**VLLM, "loss_type": "grpo", "epsilon": 0.1}, by_mean(tokens(ppo(0.1, 0.1)))),
    ("trl", {**VLLM, "loss_type": "dr_grpo", "max_completion_length": 99}, by_constant(99)(tokens(ppo(0.2, 0.2)))),
    ("trl", {**VLLM, "loss_type": "grpo", "delta": 1.5}, by_mean(tokens(trl_two_sided(0.2, 0.2, 1.5)))),
    ("trl", {**VLLM, "loss_type": "cispo", "epsilon_high": 5.0}, by_token(cispo(0.0, 5.0))),
    ("trl", {**VLLM, "loss_type": "sapo", "sapo_temperature_neg": 2.0}, by_mean(tokens(soft(1.0, 2.0)))),
    (
        "trl",
        {**VLLM, "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        by_mean(by_sequence(ppo(3e-4, 4e-4))),
    ),
    (
        "trl",
        {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.5},
        by_token(weighted(tokens(ppo(0.2, 0.2)), lambda rho: min(rho, 1.5))),
    ),
    (
        "trl",
        {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.5},
        by_token(weighted(tokens(ppo(0.2, 0.2)), lambda rho: rho if rho <= 1.5 else 0.0)),
    ),
    ("verl", GRPO, by_token(tokens(ppo(0.2, 0.2, 3.0)))),
    ("verl", {**GRPO, f"{ACTOR}.clip_ratio_high": 0.28, f"{ACTOR}.clip_ratio_c": 1.2}, by_token(tokens(ppo(0.2, 0.28, 1.2)))),
    ("verl", {**GRPO, f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}, by_mean(tokens(ppo(0.2, 0.2, 3.0)))),
    ("verl", {**GRPO, f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum"}, by_constant(1)(tokens(ppo(0.2, 0.2, 3.0)))),
    (
        "verl",
        {**GRPO, f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", "data.max_response_length": 64},
        by_constant(64)(tokens(ppo(0.2, 0.2, 3.0))),
    ),
    (
        "verl",
        {**GRPO, f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.clip_ratio_low": 3e-4, f"{ACTOR}.clip_ratio_high": 4e-4},
        by_mean(by_sequence(ppo(3e-4, 4e-4))),
    ),
    ("verl", {**GRPO, f"{ACTOR}.policy_loss.loss_mode": "sapo"}, by_mean(tokens(soft(1.0, 1.05)))),
    (
        "verl",
        {**GRPO, f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.clip_ratio_low": 10, f"{ACTOR}.clip_ratio_high": 0.2},
        by_token(cispo(-9.0, 1.2)),
    ),
    (
        "verl",
        {**GRPO, "algorithm.rollout_correction.rollout_is": "token", "algorithm.rollout_correction.rollout_is_threshold": 1.5},
        by_token(weighted(tokens(ppo(0.2, 0.2, 3.0)), lambda rho: min(rho, 1.5))),
    ),
    (
        "verl",
        {**GRPO, "algorithm.rollout_correction.bypass_mode": True},
        by_token(tokens(ppo(0.2, 0.2, 3.0), SAMPLED)),
    ),
    (
        "prime-rl",
        {"trainer.loss.dppo_mask_low": 0.1},
        by_token(probabilities_kept(lambda moved, advantage: moved <= 0.2 if advantage > 0 else moved >= -0.1)),
    ),
    ("prime-rl", {"trainer.loss.type": "ipo"}, by_token(probabilities_kept(lambda moved, _: abs(moved) <= 0.1))),
    (
        "prime-rl",
        {"trainer.loss.type": "ipo", "trainer.loss.kl_tau": 0.5},
        by_token(probabilities_kept(lambda moved, _: abs(moved) <= 0.1, kl_tau=0.5)),
    ),
    (
        "prime-rl",
        {"trainer.loss.type": "ipo", "trainer.loss.kl_tau": 0},
        by_token(probabilities_kept(lambda moved, _: abs(moved) <= 0.1, kl_tau=0.0)),
    ),
    (
        "prime-rl",
        {"trainer.loss.type": "ipo", "trainer.loss.kl_tau": 0.5, "trainer.loss.adv_tau": 4.0},
        by_token(probabilities_kept(lambda moved, _: abs(moved) <= 0.1, kl_tau=0.5, adv_tau=4.0)) / 4.0,
    ),
    ("areal", {"actor.eps_clip": 0.4}, by_token(tokens(ppo(0.4, 0.4), SAMPLED))),
    ("areal", {"actor.recompute_logprob": True, "actor.c_clip": 1.3}, by_token(tokens(ppo(0.2, 0.2, 1.3)))),
    ("areal", {"actor.use_decoupled_loss": True}, by_token(tokens(ppo(0.2, 0.2)))),
    (
        "areal",
        {"actor.use_decoupled_loss": True, "actor.rejection_sampling.metric": "ratio", "actor.rejection_sampling.upper": 1.5},
        by_token(weighted(tokens(ppo(0.2, 0.2)), lambda rho: rho if rho <= 1.5 else 0.0)),
    ),
    (
        "areal",
        {"actor.use_decoupled_loss": True, "actor.rejection_sampling.action": "clamp", "actor.rejection_sampling.upper": 1.5},
        by_token(weighted(tokens(ppo(0.2, 0.2)), lambda rho: min(rho, 1.5))),
    ),
    ("areal", {"actor.use_sapo_loss": True}, by_token(tokens(soft(1.0, 1.05), SAMPLED))),
]  # fmt: skip

NEEDED: Mapping[str, Mapping[str, object]] = {
    "trl": {},
    "verl": {},
    "prime-rl": {"orchestrator.group_size": 8},
    "areal": {"actor.path": "x", "gconfig.n_samples": 4, "actor.reward_norm.mean_level": "group"},
}


@pytest.mark.parametrize(("system", "given", "loss"), CASES, ids=lambda case: str(case)[:60])
def test_the_converted_objective_gives_the_loss_of_the_other_system(system, given, loss):
    leaves = {name: Leaf(value) for name, value in {**NEEDED[system], **given}.items()}
    done = convert(SYSTEMS[system], Source("file", leaves))
    prefix = "trainer.objective."
    params = {name.removeprefix(prefix): each.value for name, each in done.settings.items() if name.startswith(prefix)}
    preset = params.pop("preset")
    recomputed = params.get("proximal") == "recompute"
    sequences = [
        {
            "logp": now,
            "behaviour_logp": sampled,
            "advantage": advantage,
            **({"proximal_logp": old} if recomputed else {}),
        }
        for now, old, sampled, advantage in zip(NOW, OLD, SAMPLED, ADVANTAGES, strict=True)
    ]
    assert result_of({"preset": preset, "params": params, "sequences": sequences})["loss"] == pytest.approx(loss)
