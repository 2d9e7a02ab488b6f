"""The ranks of a trainer as rank 0 leads them: every command that changes weights is carried out by all, or ends all.

Rank 0 says what is done, does its own part, and waits until the others have done theirs. After a failure of any of them
their weights may differ and their collectives no longer match, so the crew is broken for good: the process ends, torchrun
starts all ranks again, and they go on from the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from sluice.rpc import SluiceError
from trainer_svc.batch.rows import Sequence
from trainer_svc.parallel.balance import balance
from trainer_svc.service.crew_link import CrewLink, RankFailedError

__all__ = ["OUT_OF_STEP", "Crew", "Dealt"]

OUT_OF_STEP = {"COMPUTE_DEADLINE", "RANK_LOST"}
"""Errors after which ranks do different things: one is gone, or none knows how far the others are."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Dealt:
    """Rows as they are shared out.

    Attributes:
        rows: This rank's share.
        places: For each data-parallel rank the places of its rows in the batch.
    """

    rows: list[Sequence]
    places: list[list[int]]


class Crew:
    """The ranks behind one learner.

    Args:
        link: To the other ranks, where this process leads them; None: it is alone, or follows.
        leads: Whether this process writes what is written once per run.
    """

    def __init__(self, link: CrewLink | None = None, *, leads: bool = True) -> None:
        self._link = link
        self.leads = leads
        self.deal: Callable[[Rows[Sequence], int], list[list[int]]] = balance
        """Which rows of a batch each data-parallel rank gets, by their places."""
        self.broken: SluiceError | None = None
        self.on_broken: Callable[[], object] = lambda: None
        """Called once, from any thread, when the ranks cannot go on."""

    @property
    def several(self) -> bool:
        """Whether other ranks wait for what this one says."""
        return self._link is not None

    @contextmanager
    def together(
        self,
        do: str,
        rows: Rows[Sequence] | None = None,
        *,
        may_fail: bool = False,
        **arguments: Any,  # noqa: ANN401  JSON values
    ) -> Iterator[Dealt]:
        """Have every rank do something: the others what the command says, this one the body of the block.

        Args:
            do: Name of the command.
            rows: Rows to share out among the data-parallel ranks.
            may_fail: Whether the ranks stay together after a failure of the body, as it is one of all.
            arguments: What else the others must know: JSON values.

        Yields:
            How the rows are dealt out.

        Raises:
            SluiceError: UNAVAILABLE RANK_LOST if another rank failed, or did not answer in time.
        """
        if self._link is None:
            yield Dealt(list(rows or ()), [list(range(len(rows or ())))])
            return
        if self.broken is not None:
            raise self.broken
        failure: Exception | None = None
        try:
            command = {"do": do, "rows": rows is not None, "may_fail": may_fail, **arguments}
            number = self._link.post("compute", command)
            dealt = Dealt([], []) if rows is None else self._share(self._link, rows)
            try:
                yield dealt
            except Exception as error:
                if not may_fail:
                    raise
                failure = error
            self._link.wait_done(number)
        except BaseException as error:
            reason = self.break_up(error)
            if reason is error:
                raise
            raise reason from error
        if failure is not None:
            raise failure

    def publish(self, **arguments: Any) -> None:  # noqa: ANN401  JSON values
        """Have the other ranks publish beside this one."""
        if self._link is not None:
            self._link.post("publish", {"do": "publish", **arguments})

    def dismiss(self) -> None:
        """Let the other ranks end; this process ends next."""
        if self._link is not None and self.broken is None:
            for stream in ("compute", "publish"):
                self._link.post(stream, {"do": "stop"})

    def break_up(self, error: BaseException) -> SluiceError:
        """Note that the ranks cannot go on.

        Returns:
            What to raise: the error itself if it says all.
        """
        if self._link is None:
            return error if isinstance(error, SluiceError) else _lost(str(error))
        if self.broken is None:
            self.broken = _explain(error, self._link)
            log.error("the ranks cannot go on", error=str(self.broken), exc_info=error)
            self.on_broken()
        return self.broken

    def _share(self, link: CrewLink, rows: Rows[Sequence]) -> Dealt:
        places = self.deal(rows, link.dims.data_parallel)
        shares = [[rows[place] for place in share] for share in places]
        link.send_rows(shares)
        return Dealt(shares[link.dims.data_rank(link.rank)], places)


def _explain(error: BaseException, link: CrewLink) -> SluiceError:
    """What to tell of a failure: what the rank that failed first could say, else what this one saw."""
    if isinstance(error, SluiceError):
        return _lost(error.message) if error.reason in OUT_OF_STEP else error
    if isinstance(error, RankFailedError):
        return _lost(str(error))
    seen = str(error).partition("\n")[0].partition(". ")[0]  # the first sentence; gloo adds advice
    return _lost(link.failure() or f"{type(error).__name__}: {seen}")


def _lost(reason: str) -> SluiceError:
    return SluiceError.unavailable(
        "RANK_LOST",
        f"a rank of the trainer failed ({reason}); all ranks start again and go on from the newest checkpoint",
        retry_after_s=1.0,
    )
