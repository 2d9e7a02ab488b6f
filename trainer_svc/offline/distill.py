"""Learning from a teacher on given texts: its log-probabilities once, then the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from trainer_svc.batch.rows import MicroBatch
from trainer_svc.batch.shapes import Scalar
from trainer_svc.compute_config import LoraConfig
from trainer_svc.config import ObjectiveConfig
from trainer_svc.engine.outputs import Outputs
from trainer_svc.objectives.objective import Objective
from trainer_svc.offline.demonstrations import Demonstrations
from trainer_svc.offline.distill_config import DistillConfig
from trainer_svc.offline.examples import Data, Examples
from trainer_svc.offline.frozen import ask_once
from trainer_svc.offline.lesson import Lesson
from trainer_svc.offline.loop import train, with_length
from trainer_svc.offline.progress import Report, Summary
from trainer_svc.offline.rows import DataError
from trainer_svc.offline.start import build_engine, load_examples, renderer_of, tokenizer_of
from trainer_svc.parallel.mesh import SINGLE, Mesh

__all__ = ["TeacherLoss", "distill", "teacher_figures"]

PRESETS = {"forward": "sft", "reverse": "distill"}
"""The objective of each divergence."""


class TeacherLoss:
    """The objective of a divergence, and how far the model is from the teacher; a `LossFn`.

    Args:
        divergence: "forward" or "reverse".
    """

    def __init__(self, divergence: str) -> None:
        self.objective = Objective.of(ObjectiveConfig(preset=PRESETS[divergence]))
        self.sign = 1.0 if divergence == "forward" else -1.0

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Scalar, dict[str, Scalar]]:
        """The summed loss of a micro-batch, and sums for `teacher_figures`.

        Raises:
            ValueError: if log-probabilities of the model or of the teacher are missing.
        """
        loss, sums = self.objective.loss(outputs, batch)
        if outputs.logprobs is None or batch.teacher_logprobs is None:
            raise ValueError("distillation needs log-probabilities of the model and of the teacher")
        gap = batch.teacher_logprobs - outputs.logprobs.detach()
        return loss, sums | {"teacher_gap": self.sign * gap.sum(), "distance": gap.abs().sum()}


def teacher_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over learned tokens: `kl`, the estimate of the divergence per token in nats, and `distance`, without signs.

    The estimate holds as far as the texts are samples of the distribution that it is taken under: the teacher's for the
    forward one, the model's for the reverse one, which is true of given texts before the first step alone.
    """
    return {"kl": sums["teacher_gap"] / sums["tokens"], "distance": sums["distance"] / sums["tokens"]}


def distill(config: DistillConfig, report: Report, mesh: Mesh = SINGLE) -> Summary:
    """Train and write the model.

    Args:
        config: The settings.
        report: Called every `log_every` steps and with each evaluation of held-out texts.
        mesh: The processes that train together.

    Raises:
        FileExistsError: if the output directory exists; nothing is trained then.
        DataError: if the texts cannot be used, or the teacher has another vocabulary.
    """
    renderer = renderer_of(config)
    _check_vocabulary(config, renderer.tokenizer)
    data = load_examples(config, Demonstrations.load, renderer)
    settings = with_length(config, len(data.train))
    data = _taught(settings, data, mesh)
    loss = TeacherLoss(config.divergence)
    return train(
        build_engine(settings, mesh=mesh), Lesson(loss, loss.objective.weight, teacher_figures), data, config, report
    )


def _taught(config: DistillConfig, data: Data, mesh: Mesh) -> Data:
    """The data with the teacher's log-probabilities; the teacher is gone when this returns."""
    teacher = build_engine(config.model_copy(update={"lora": LoraConfig()}), config.teacher, mesh=mesh)

    def asked(examples: Examples) -> Examples:
        return ask_once(teacher, examples, "teacher_logprobs")

    return replace(data, train=asked(data.train), held_out=data.held_out and asked(data.held_out))


def _check_vocabulary(config: DistillConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    teacher = tokenizer_of(config.teacher, "teacher")
    if teacher.get_vocab() != tokenizer.get_vocab():
        raise DataError(
            f"the teacher {config.teacher} has another vocabulary than {config.model}: choose models with one tokenizer"
        )
