"""The accepted batches that wait, for a loop that waits for them."""

from __future__ import annotations

import asyncio

from sluice.versions import Version
from trainer_svc.service.admission import Admission, Ticket
from trainer_svc.service.consumption import Batch

__all__ = ["BatchQueue"]


class BatchQueue:
    """Admission, with someone to wake when a batch enters.

    Args:
        capacity: Batches that may wait.
        tokenizer_digest: What every batch must carry.
    """

    def __init__(self, capacity: int, tokenizer_digest: str) -> None:
        self.admission: Admission[Batch] = Admission(capacity, tokenizer_digest)
        self._arrived = asyncio.Event()

    def admit(self, ticket: Ticket, batch: Batch) -> bool:
        """Queue a batch, or recognise it.

        Returns:
            True if it had been accepted before.

        Raises:
            RefusedError: if it may not enter.
        """
        duplicate = self.admission.admit(ticket, batch)
        self._arrived.set()
        return duplicate

    async def next(self) -> Batch:
        """Take the next batch; waits as long as there is none."""
        while (batch := self.admission.take()) is None:
            self._arrived.clear()
            await self._arrived.wait()
        return batch

    def finish(self) -> Version:
        """Count the batch that was taken last as applied.

        Returns:
            The version that it produced.
        """
        return self.admission.finish()
