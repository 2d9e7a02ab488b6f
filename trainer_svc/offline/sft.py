"""Supervised fine-tuning on the training engine: demonstrations in, a Hugging Face model directory out."""

from __future__ import annotations

from trainer_svc.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective
from trainer_svc.offline.demonstrations import Demonstrations
from trainer_svc.offline.lesson import Lesson
from trainer_svc.offline.loop import train, with_length
from trainer_svc.offline.progress import Report, Summary
from trainer_svc.offline.sft_config import SftConfig
from trainer_svc.offline.start import build_engine, load_examples, renderer_of
from trainer_svc.parallel.mesh import SINGLE, Mesh

__all__ = ["fine_tune"]


def fine_tune(config: SftConfig, report: Report, mesh: Mesh = SINGLE) -> Summary:
    """Train and write the model.

    Args:
        config: The settings.
        report: Called every `log_every` steps and with each evaluation of held-out demonstrations.
        mesh: The processes that train together.

    Raises:
        FileExistsError: if the output directory exists; nothing is trained then.
        DataError: if the demonstrations cannot be used.
    """
    data = load_examples(config, Demonstrations.load, renderer_of(config))
    engine = build_engine(with_length(config, len(data.train)), mesh=mesh)
    objective = Objective.of(ObjectiveConfig(preset="sft"))
    lesson = Lesson(objective.loss, objective.weight)
    return train(engine, lesson, data, config, report)
