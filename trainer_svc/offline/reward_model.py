"""Training a scorer on preferences: pairs of answers in, a sequence classifier with one label out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import AutoConfig

from sluice.render import ChatRenderer
from trainer_svc.batch.rows import MicroBatch
from trainer_svc.batch.shapes import Scalar
from trainer_svc.engine.outputs import Outputs
from trainer_svc.objectives.preferences import bradley_terry
from trainer_svc.offline.lesson import Lesson
from trainer_svc.offline.loop import train, with_length
from trainer_svc.offline.pairs import Preferences, ScoredAnswers, count_pairs, pair_places
from trainer_svc.offline.progress import Report, Summary
from trainer_svc.offline.reward_model_config import RewardModelConfig
from trainer_svc.offline.start import build_engine, load_examples, renderer_of
from trainer_svc.parallel.mesh import SINGLE, Mesh

__all__ = ["ScoreLoss", "score_figures", "train_scorer"]


class ScoreLoss:
    """The Bradley-Terry loss of pairs of scores; a `LossFn`.

    Args:
        centering: Weight of the squared sum of a pair's scores.
    """

    def __init__(self, centering: float = 0.0) -> None:
        self.centering = centering

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Scalar, dict[str, Scalar]]:
        """The summed loss of a micro-batch's pairs, and sums for `score_figures`.

        Raises:
            ValueError: if a sequence has not exactly one value, or a group is no pair.
        """
        values = outputs.values
        if values is None or len(values) != len(batch.sequences):
            raise ValueError("a reward model needs one value per answer: give it a value head and `ScoredAnswers`")
        chosen, rejected = (places.to(values.device) for places in pair_places(batch))
        losses = bradley_terry(values[chosen], values[rejected], centering=self.centering)
        better, worse = values[chosen].detach(), values[rejected].detach()
        sums = {
            "pairs": torch.tensor(float(len(chosen)), device=values.device),
            "right": (better > worse).sum(),
            "margin": (better - worse).sum(),
            "score": (better + worse).sum() / 2,
        }
        return losses.sum(), sums


def score_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over pairs: `accuracy` (chosen scored higher), `margin`, and the mean `score`."""
    return {
        name: sums[key] / sums["pairs"]
        for name, key in {"accuracy": "right", "margin": "margin", "score": "score"}.items()
    }


def train_scorer(config: RewardModelConfig, report: Report, mesh: Mesh = SINGLE) -> Summary:
    """Train and write the classifier.

    Args:
        config: The settings.
        report: Called every `log_every` steps and with each evaluation of held-out pairs.
        mesh: The processes that train together.

    Raises:
        FileExistsError: if the output directory exists; nothing is trained then.
        DataError: if the pairs cannot be used.
    """
    renderer = renderer_of(config)
    padding = AutoConfig.from_pretrained(config.model).get_text_config().pad_token_id
    if padding is None:
        padding = renderer.tokenizer.pad_token_id

    def load(data: str, split: str, renderer: ChatRenderer, *, max_length: int, drop_long: bool) -> ScoredAnswers:
        pairs = Preferences.load(data, split, renderer, max_length=max_length, drop_long=drop_long)
        return ScoredAnswers(pairs, padding)

    data = load_examples(config, load, renderer)
    engine = build_engine(with_length(config, len(data.train)), head="value", mesh=mesh)
    # transformers finds the last token of a padded batch by it, and refuses batches where it is not set.
    engine.network.model.config.get_text_config().pad_token_id = padding
    lesson = Lesson(ScoreLoss(config.centering), count_pairs, score_figures, whole_groups=True)
    return train(engine, lesson, data, config, report)
