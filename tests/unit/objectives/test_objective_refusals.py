"""Combinations that would silently train something else are refused, with the reason and the remedy."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from trainer_svc.config import TrainerConfig
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import bypass_warning
from trainer_svc.objectives.presets import CORRECTIONS, PRESETS

TIS = {"kind": "token_tis"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "gpro"}, "no objective 'gpro'; choose one of aipo, grpo"),
        ({"preset": "grpo", "delta": 3.0}, "grpo has no delta; it takes eps_low, eps_high, dual_clip"),
        ({"preset": "sft", "cap": 3.0}, "sft has no cap; it takes no parameters: remove it"),
        ({"preset": "grpo", "params": {"x": 1.0}}, "write the parameters of .* beside preset"),
        ({"preset": "my module:f"}, "is not an import path"),
        ({"preset": "my.module:f", "delta": 1.0}, "put it into params"),
        ({"preset": "dr_grpo"}, "set it to the longest completion"),
        ({"preset": "aipo", "aggregation": "constant"}, "set it to the longest completion"),
        ({"preset": "aipo", "max_tokens": 5}, "only aggregation constant has max_tokens"),
        ({"preset": "icepop", "low": 3.0, "high": 2.0}, "swap them"),
        ({"preset": "ppo", "dual_clip": 0.9}, "greater than 1"),
        # The weight would be lost, or counted twice.
        ({"preset": "grpo", "proximal": "recompute"}, "silently loses the weight f"),
        ({"preset": "grpo", "proximal": "loglinear"}, "silently loses the weight f"),
        ({"preset": "grpo", "correction": TIS}, "which is 1 in the bypass form"),
        ({"preset": "gspo", "proximal": "bypass", "correction": TIS}, "which is 1 in the bypass form"),
        ({"preset": "grpo", "proximal": "bypass", "correction": {"kind": "geometric_mask"}}, "1 in the bypass form"),
        *(
            ({"preset": name, **extra}, "would correct twice")
            for name, preset in PRESETS.items()
            if preset.anchor == "behaviour"
            for extra in ({"correction": TIS}, {"proximal": "recompute"}, {"proximal": "recompute", "correction": TIS})
        ),
        ({"preset": "sft", "proximal": "recompute"}, "has no ratio"),
        ({"preset": "m2po", "proximal": "bypass"}, "0 everywhere: set proximal to recompute"),
        ({"preset": "m2po", "proximal": "loglinear"}, "0 everywhere: set proximal to recompute"),
        # Bounds and masks that nothing reads.
        ({"preset": "grpo", "correction": {"cap": 3.0}}, "correction none has no cap"),
        ({"preset": "gspo", "correction": {"low": 0.5}}, "token_tis has no low; it takes cap"),
        ({"preset": "grpo", "correction": {"veto": 1e-4}}, "this form does not have"),
        ({"preset": "aipo", "correction": {"veto": 1e-4}}, "this form does not have"),
        ({"preset": "sft", "correction": {"off_policy_sequence_mask": 0.5}}, "reads no behaviour policy"),
        # Estimators and the KL in the reward.
        ({"preset": "grpo", "advantage": "rloo"}, "set orchestrator.advantage"),
        ({"preset": "sft", "advantage": "gae"}, "reads no advantages"),
        ({"preset": "grpo", "gamma": 0.9}, "is a parameter of gae, reinforce_pp"),
        ({"preset": "reinforce_pp", "gae_lambda": 0.9}, "is a parameter of gae"),
        ({"preset": "ppo", "process_scale": "group"}, "set advantage to process"),
        ({"preset": "grpo", "kl_coef": 0.1, "kl_where": "reward"}, "kl_where to loss"),
        # A term of the loss without an effect.
        ({"preset": "grpo", "kl_coef": 0.1, "kl_kind": "k1"}, "expected gradient is zero"),
        ({"preset": "reinforce_pp", "kl_where": "loss"}, "set kl_kind to k2 or k3"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(settings, message):
    with pytest.raises(ValidationError, match=message):
        ObjectiveConfig(**settings)


def test_k1_is_allowed_in_the_reward() -> None:
    resolved = ObjectiveConfig(preset="ppo", kl_coef=0.1, kl_kind="k1", kl_where="reward").resolved
    assert (resolved.kl_kind, resolved.kl_where) == ("k1", "reward")


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if preset.anchor == "proximal"])
@pytest.mark.parametrize("proximal", ["recompute", "loglinear"])
def test_every_correction_goes_with_every_ratio_to_the_proximal_policy(preset, kind, proximal):
    if preset == "m2po":
        proximal = "recompute"  # its selection of tokens needs it
    tokens = {"max_tokens": 8} if preset == "dr_grpo" else {}
    resolved = ObjectiveConfig(preset=preset, proximal=proximal, correction={"kind": kind}, **tokens).resolved
    assert (resolved.proximal, resolved.correction, resolved.bounds) == (proximal, kind, CORRECTIONS[kind].bounds)


def test_presets_with_bounds_as_narrow_as_rounding_recompute_the_proximal_policy():
    gspo = ObjectiveConfig(preset="gspo").resolved
    assert (gspo.proximal, gspo.correction, gspo.bounds) == ("recompute", "token_tis", {"cap": 2.0})
    for kind in ("geometric_mask", "k3_mask"):
        assert ObjectiveConfig(preset="dapo", correction={"kind": kind}).resolved.proximal == "recompute"
    assert ObjectiveConfig(preset="gspo", proximal="bypass").resolved.correction == "none"


def test_bypass_with_narrow_bounds_warns_with_the_measured_share():
    gspo = ObjectiveConfig(preset="gspo", proximal="bypass").resolved
    measured = {"clip_fraction_low": 0.25, "clip_fraction_high": 0.11}
    assert "clips 36.0% of the tokens" in bypass_warning(gspo, measured, bf16=True, staleness=0)
    assert "staleness 3" in bypass_warning(gspo, measured, bf16=False, staleness=3)
    assert bypass_warning(gspo, measured, bf16=False, staleness=0) is None
    assert bypass_warning(ObjectiveConfig(preset="gspo").resolved, measured, bf16=True, staleness=3) is None
    assert bypass_warning(ObjectiveConfig(preset="grpo").resolved, measured, bf16=True, staleness=3) is None


RECOMPUTED = {"proximal": "recompute", "correction": {"kind": "token_tis"}}
BYPASS, TWO_STEPS = "proximal to bypass", "to 2 or more"


@pytest.mark.parametrize(
    ("settings", "bounds", "remedies"),
    [
        ({"preset": "gspo"}, "eps_low, eps_high", {TWO_STEPS}),  # in the bypass form it would clip rounding
        ({"preset": "m2po"}, "eps_low, eps_high", {TWO_STEPS}),  # its selection needs recompute
        ({"preset": "gspo", "eps_low": 0.2, "eps_high": 0.2}, "eps_low, eps_high", {TWO_STEPS, BYPASS}),
        ({"preset": "grpo", "dual_clip": 3.0, **RECOMPUTED}, "eps_low, eps_high, dual_clip", {TWO_STEPS, BYPASS}),
        ({"preset": "sapo", **RECOMPUTED}, "tau_pos, tau_neg", {TWO_STEPS, BYPASS}),
        ({"preset": "grpo", "correction": {"kind": "k3_mask"}}, "eps_low, eps_high", {TWO_STEPS, BYPASS}),
    ],
)
def test_bounds_without_an_effect_are_warned_of_with_what_helps(settings, bounds, remedies):
    warning = ObjectiveConfig(**settings).resolved.dead_clip(1)
    assert warning is not None
    assert warning.startswith(f"{bounds} of {settings['preset']} have no effect")
    assert {each for each in (BYPASS, TWO_STEPS) if each in warning} == remedies
    assert ObjectiveConfig(**settings).resolved.dead_clip(2) is None
    if BYPASS in remedies:
        changed = settings | {"proximal": "bypass"}
        changed.pop("correction", None)
        assert ObjectiveConfig(**changed).resolved.dead_clip(1) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "grpo"},  # t / b: stale tokens are clipped
        {"preset": "dppo"},
        {"preset": "grpo", "proximal": "loglinear", "correction": {"kind": "none"}},
        {"preset": "my.module:loss", "proximal": "recompute"},
    ],
)
def test_bounds_that_act_in_one_optimizer_step_are_not_warned_of(settings):
    assert ObjectiveConfig(**settings).resolved.dead_clip(1) is None


def test_each_objective_of_a_trainer_is_judged_with_its_optimizer_steps():
    objectives = {"narrow": ObjectiveConfig(preset="gspo"), "soft": ObjectiveConfig(preset="aipo")}
    (warning,) = TrainerConfig(objectives=objectives).dead_clips
    assert warning.startswith("trainer.objectives.narrow: eps_low, eps_high of gspo")
    assert not TrainerConfig(objectives=objectives, epochs=2).dead_clips


def test_the_trainer_takes_samples_and_not_demonstrations():
    with pytest.raises(ValidationError, match="sluice sft"):
        TrainerConfig(objective=ObjectiveConfig(preset="sft"))


def test_settings_of_objectives_are_read_without_torch():
    code = "import sys, trainer_svc.config, trainer_svc.objectives.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
