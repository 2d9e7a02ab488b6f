"""What a worker can be asked about its weights: whether they are those of a version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightsync.engine.vllm_live import LiveCheck

__all__ = ["InspectExtension"]

Answer = tuple[str, Any]


class InspectExtension:
    """Methods of vLLM's worker, called by `collective_rpc`. They answer ("ok" | "refused" | "err", value) and never raise."""

    weight_transfer_engine: Any

    _live_check: LiveCheck | None = None

    def sluice_check(self, paths: list[str], names: list[str]) -> Answer:
        """Whether a version's files hold every tensor of the model: ("ok", None) or ("refused", why)."""
        answer: Answer = self._engine.check(paths, names)
        return answer

    def sluice_verify(self, paths: list[str], names: list[str], share: float, seed: int) -> Answer:
        """Begin to compare the live weights with a version's files; continue with `sluice_verified`."""
        refused = self.sluice_check(paths, names)
        if refused[0] != "ok":
            return refused
        if self._live_check is not None:
            self._live_check.close()

        def begin() -> None:
            self._live_check = LiveCheck(self._engine.model, self._engine.plan(paths), paths, share, seed)

        return guarded(begin)

    def sluice_verified(self, budget_s: float) -> Answer:
        """Compare for so many seconds: ("pending", None), or ("ok", [tensors that differ, tensors of unknown form])."""
        check = self._live_check
        if check is None:
            return ("err", "nothing is being compared")
        answer = guarded(lambda: check.advance(budget_s))
        if answer[0] == "err":
            return answer
        if not answer[1]:
            return ("pending", None)
        if check.different:
            self._engine.forget_loaded()
        return ("ok", [sorted(check.different), sorted(check.unchecked)])

    @property
    def _engine(self) -> Any:  # noqa: ANN401 - `StagedFileEngine`, which imports this module's user
        return self.weight_transfer_engine


def guarded(work: Callable[[], Any]) -> Answer:
    """Run something that must not raise into vLLM."""
    try:
        return ("ok", work())
    except Exception as error:  # noqa: BLE001 - see the docstring
        return ("err", f"{type(error).__name__}: {error}")
