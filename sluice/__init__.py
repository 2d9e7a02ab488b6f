"""What every Sluice service shares, and the SDK that users import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.training import TrainedRun, TrainingFailedError, train

__all__ = ["TrainedRun", "TrainingFailedError", "train"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the names above
    """Import what scripts use when they use it: every process imports this package."""
    if name in __all__:
        from sluice import training  # noqa: PLC0415

        return getattr(training, name)
    raise AttributeError(f"module 'sluice' has no attribute {name!r}")
