"""What offline training tells while it goes on and when it is done, and the lines that people read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

__all__ = ["Evaluation", "Progress", "Report", "Resumed", "Summary"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands.

    Attributes:
        step: Optimizer steps done.
        steps: Optimizer steps in all.
        loss: Mean loss since the last report.
        learning_rate: Of the last step.
        tokens_per_s: Tokens of the data per second since the last report, prompts included.
        skipped: Steps so far that were not finite and changed nothing.
        figures: Further means since the last report, by name.
    """

    step: int
    steps: int
    loss: float
    learning_rate: float
    tokens_per_s: float
    skipped: int
    figures: Mapping[str, float]

    def __str__(self) -> str:
        """The line of progress."""
        skipped = f"  skipped {self.skipped}" if self.skipped else ""
        return (
            f"step {self.step:>{len(str(self.steps))}}/{self.steps}  loss {self.loss:.4f}{_written(self.figures)}  "
            f"lr {self.learning_rate:.2e}  {self.tokens_per_s:,.0f} tokens/s{skipped}"
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The held-out examples under the weights after a step.

    Attributes:
        step: Optimizer steps done.
        loss: The loss over all held-out examples.
        figures: Further means, by name.
    """

    step: int
    loss: float
    figures: Mapping[str, float]

    def __str__(self) -> str:
        """The line of an evaluation."""
        return f"held out after {self.step} steps: loss {self.loss:.4f}{_written(self.figures)}"


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run that was to go on begins.

    Attributes:
        directory: Where its checkpoints are looked for.
        step: Optimizer steps that are done; 0 where there is no checkpoint.
    """

    directory: Path
    step: int

    def __str__(self) -> str:
        """The line of the start."""
        if not self.step:
            return f"there is no checkpoint in {self.directory} to resume: training begins at the start"
        return f"resumed from {self.directory} after {self.step} steps"


Report: TypeAlias = Callable[[Progress | Evaluation | Resumed], None]
"""Called every `log_every` steps, with each evaluation, and at the start of a run that was to be resumed."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did.

    Attributes:
        output: The model directory.
        steps: Optimizer steps.
        examples: Examples that were trained on.
        dropped_long: Examples left out as too long.
        tokens: Tokens trained on, prompts included.
        learned_tokens: Those among them that entered the loss.
        final_loss: Mean loss of the last tenth of the steps that this process made; NaN if it made none.
        skipped: Steps that were not finite and changed nothing.
        train_s: Seconds of training, evaluations included.
        evaluations: The held-out examples before, during and after training; empty where none are held out.
    """

    output: Path
    steps: int
    examples: int
    dropped_long: int
    tokens: int
    learned_tokens: int
    final_loss: float
    skipped: int
    train_s: float
    evaluations: tuple[Evaluation, ...]

    def told(self, what: str) -> str:
        """The last line.

        Args:
            what: What the examples are, in the plural.
        """
        dropped = f" ({self.dropped_long} more were too long)" if self.dropped_long else ""
        return (
            f"{self.output}: {self.steps} steps on {self.examples} {what}{dropped}, "
            f"{self.tokens:,} tokens ({self.learned_tokens:,} learned) in {self.train_s:.1f} s = "
            f"{self.tokens / self.train_s:,.0f} tokens/s, final loss {self.final_loss:.4f}"
        )


def _written(figures: Mapping[str, float]) -> str:
    return "".join(f"  {name} {value:.4f}" for name, value in figures.items())
