"""What becomes of a batch whose training runs out of memory where it cannot be repeated on the spot.

    runs out                  the epoch ends, and several ranks start again; the next epoch trains the batch with half the token budget
    runs out with half of it  the next epoch refuses the batch: the rows that do not fit alone, or all of it if no row is at fault

It cannot be repeated where other ranks wait in a collective of the failed pass, or an optimizer has changed some of the weights.
The next epoch begins from weights before the batch. Each rank notes a shortage in a file, because its process may end next.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import grpc
import structlog
from google.protobuf.message import DecodeError

from sluice.rows_at_fault import ROWS, ranges, rows_of
from sluice.rpc import SluiceError
from sluice.v1.checkpoint_pb2 import MemoryShortage
from trainer_svc.batch.rows import TrainingRow, tokens_to_forward
from trainer_svc.checkpoint.saver import write_durably
from trainer_svc.engine.out_of_memory import MemoryShortError

log = structlog.get_logger(__name__)


class MemoryShortages:
    """The batches that ran out of memory and are not applied. Every method blocks.

    Args:
        directory: Where the files are, which all ranks share.
        rank: This process.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._own = directory / f"out_of_memory.{rank}.binpb"
        self._found: dict[str, MemoryShortage] = {}

    def read(self) -> None:
        """Read what all ranks noted, at the start of an epoch."""
        self._found = {}
        for path in self._directory.glob("out_of_memory.*.binpb"):
            try:
                read = MemoryShortage.FromString(path.read_bytes())
            except DecodeError:
                log.warning("a file is damaged and is ignored", path=str(path))
                continue
            self._found[read.batch_id] = max(read, self._found.get(read.batch_id, read), key=_weight)

    def note(self, batch_id: str, error: MemoryShortError) -> None:
        """Note that a batch ran out of memory, before the epoch or the process ends.

        Raises:
            OSError: if the file cannot be written.
        """
        noted = MemoryShortage(
            batch_id=batch_id,
            at_half=error.at_half,
            row_tokens=error.row_tokens,
            problem=f"batch {batch_id!r}: {error}",
        )
        what = "the next epoch refuses it" if error.at_half else "the next epoch trains it with half the token budget"
        log.error("a batch ran out of memory", batch=batch_id, then=what, error=str(error))
        self._directory.mkdir(parents=True, exist_ok=True)
        write_durably(self._own, noted.SerializeToString())

    def halves(self, batch_id: str) -> bool:
        """Return whether a batch has to be trained with half the token budget."""
        return batch_id in self._found

    def applied(self, batch_id: str) -> None:
        """Forget a batch that was trained."""
        if batch_id in self._found:
            self._forget()

    def check(self, batch_id: str, rows: Sequence[TrainingRow | None]) -> None:
        """Refuse a batch that does not fit with half the token budget. It is then forgotten: sent again, it gets another try.

        Args:
            batch_id: The batch.
            rows: The training row of each of its trajectories; None for those that are not trained.

        Raises:
            SluiceError: INVALID_ARGUMENT if some rows are too long, with their places; FAILED_PRECONDITION if no row is at fault.
        """
        found = self._found.get(batch_id)
        if found is None or not found.at_half:
            return
        sizes = {place: len(tokens_to_forward(row)) for place, row in enumerate(rows) if row is not None}
        too_long = {place: size for place, size in sizes.items() if 0 < found.row_tokens <= size}
        if found.row_tokens and not too_long:
            return  # what was too long is too old by now
        self._forget()
        if not too_long:
            raise SluiceError.failed_precondition("OUT_OF_MEMORY", found.problem)
        violations = {
            f"trajectories[{place}].token_ids": f"make a row of {size} tokens, but one of {found.row_tokens} alone does not fit"
            for place, size in too_long.items()
        }
        raise SluiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "OUT_OF_MEMORY",
            f"rows of {found.row_tokens} tokens or more do not fit in memory, {len(too_long)} of this batch; {found.problem}, or"
            " sample shorter sequences (rollout.max_model_len)",
            violations=violations,
            metadata={ROWS: ranges(rows_of(violations))},
        )

    def _forget(self) -> None:
        self._found = {}
        for path in self._directory.glob("out_of_memory.*.binpb"):
            path.unlink(missing_ok=True)


def _weight(note: MemoryShortage) -> tuple[bool, bool, int]:
    """Order what ranks note of one batch: a second failure counts more than a first; of rows, the shortest that does not fit."""
    return note.at_half, note.row_tokens > 0, -note.row_tokens
