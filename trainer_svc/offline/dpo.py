"""Training on preferences (DPO, IPO): pairs of answers in, a Hugging Face model directory out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from trainer_svc.batch.rows import MicroBatch
from trainer_svc.batch.shapes import PerToken, Scalar
from trainer_svc.engine.outputs import Outputs
from trainer_svc.objectives.kl import kl_estimate
from trainer_svc.objectives.preferences import dpo, ipo
from trainer_svc.offline.dpo_config import DpoConfig
from trainer_svc.offline.examples import Examples
from trainer_svc.offline.frozen import ask_once
from trainer_svc.offline.lesson import Lesson
from trainer_svc.offline.loop import train, with_length
from trainer_svc.offline.pairs import Preferences, count_pairs, pair_places
from trainer_svc.offline.progress import Report, Summary
from trainer_svc.offline.start import build_engine, load_examples, renderer_of
from trainer_svc.parallel.mesh import SINGLE, Mesh

__all__ = ["PreferenceLoss", "prefer", "preference_figures"]


class PreferenceLoss:
    """The loss of pairs against a reference; a `LossFn`.

    Args:
        config: The objective and its parameters.
    """

    def __init__(self, config: DpoConfig) -> None:
        self.config = config

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Scalar, dict[str, Scalar]]:
        """The summed loss of a micro-batch's pairs, and sums for `preference_figures`.

        Raises:
            ValueError: if log-probabilities are missing, or a group is no pair.
        """
        if outputs.logprobs is None or batch.reference_logprobs is None:
            raise ValueError("preferences need log-probabilities of the policy and of the reference")
        beta = self.config.beta
        chosen, rejected = (places.to(batch.owners.device) for places in pair_places(batch))
        drift = outputs.logprobs - batch.reference_logprobs
        gains = _sequence_sums(drift, batch)
        lengths = _sequence_sums(torch.ones_like(drift), batch)
        if self.config.objective == "ipo":
            means = gains / lengths
            losses = ipo(means[chosen], means[rejected], beta=beta)
        else:
            losses = dpo(gains[chosen], gains[rejected], beta=beta, label_smoothing=self.config.label_smoothing)
        if self.config.sft_weight:
            likelihood = _sequence_sums(outputs.logprobs, batch) / lengths
            losses = losses - self.config.sft_weight * likelihood[chosen]
        better, worse = beta * gains[chosen].detach(), beta * gains[rejected].detach()
        sums = {
            "pairs": torch.tensor(float(len(chosen)), device=losses.device),
            "tokens": torch.tensor(float(len(drift)), device=losses.device),
            "right": (better > worse).sum(),
            "margin": (better - worse).sum(),
            "reward_chosen": better.sum(),
            "reward_rejected": worse.sum(),
            "kl": kl_estimate("k3", outputs.logprobs.detach(), batch.reference_logprobs).sum(),
        }
        return losses.sum(), sums


def _sequence_sums(values: PerToken, batch: MicroBatch) -> torch.Tensor:
    """Sums over the loss tokens of each sequence."""
    return torch.zeros(len(batch.sequences), dtype=values.dtype, device=values.device).index_add(
        0, batch.owners, values
    )


def preference_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over pairs: `accuracy` (chosen rewarded more), `margin`, rewards (beta times the gain); `kl` (k3) per token."""
    names = {"accuracy": "right", "margin": "margin", "chosen": "reward_chosen", "rejected": "reward_rejected"}
    return {name: sums[key] / sums["pairs"] for name, key in names.items()} | {"kl": sums["kl"] / sums["tokens"]}


def prefer(config: DpoConfig, report: Report, mesh: Mesh = SINGLE) -> Summary:
    """Train and write the model.

    Args:
        config: The settings.
        report: Called every `log_every` steps and with each evaluation of held-out pairs.
        mesh: The processes that train together.

    Raises:
        FileExistsError: if the output directory exists; nothing is trained then.
        DataError: if the pairs cannot be used.
    """
    data = load_examples(config, Preferences.load, renderer_of(config))
    engine = build_engine(with_length(config, len(data.train)), mesh=mesh)

    def referred(examples: Examples) -> Examples:
        return ask_once(engine, examples, "reference_logprobs")

    data = replace(data, train=referred(data.train), held_out=data.held_out and referred(data.held_out))
    lesson = Lesson(PreferenceLoss(config), count_pairs, preference_figures, whole_groups=True)
    return train(engine, lesson, data, config, report)
