"""Checkpoints between two batches: on request, and every so many steps."""

from __future__ import annotations

from functools import partial

import structlog

from sluice.rpc import SluiceError
from sluice.v1.trainer_pb2 import Checkpoint
from sluice.versions import Version
from trainer_svc.config import TrainerConfig
from trainer_svc.service.batch_files import BatchFiles
from trainer_svc.service.compute_thread import ComputeThread
from trainer_svc.service.learner import Learner

__all__ = ["Saving"]

log = structlog.get_logger(__name__)


class Saving:
    """Writes checkpoints in the compute thread, where they fall between two batches by themselves.

    Args:
        learner: The policy.
        compute: The thread in which it lives.
        batch_files: Batches on disk, which a checkpoint makes superfluous.
        config: The trainer's settings.
    """

    def __init__(
        self, learner: Learner, compute: ComputeThread, batch_files: BatchFiles, config: TrainerConfig
    ) -> None:
        self._learner, self._compute, self._batch_files = learner, compute, batch_files
        self._deadlines = config.deadlines
        self.active = False
        self.last_error = ""

    async def save(self, journal_position: int) -> Checkpoint:
        """Write a checkpoint of the present version.

        Raises:
            SluiceError: RESOURCE_EXHAUSTED if the disk is full, DEADLINE_EXCEEDED if it takes too long.
        """
        deadline_s = self._deadlines.step_s + self._deadlines.save_s  # a step may be in progress
        self.active = True
        try:
            return await self._compute.run(
                partial(self._save, journal_position), deadline_s=deadline_s, what="writing a checkpoint"
            )
        except OSError as error:
            raise SluiceError.resource_exhausted(
                "CHECKPOINT_NOT_WRITTEN",
                f"the checkpoint could not be written ({error}); older ones are untouched: free space below {self._learner.checkpoints.directory}",
                retry_after_s=60.0,
            ) from error
        finally:
            self.active = False

    async def save_or_log(self) -> None:
        """Write a checkpoint on schedule; a full disk is told but does not end the training."""
        try:
            await self.save(journal_position=0)
        except SluiceError as error:
            self.last_error = str(error)
            log.exception("checkpoint failed, training goes on")
        else:
            self.last_error = ""

    def _save(self, journal_position: int) -> Checkpoint:
        checkpoint = self._learner.save(journal_position)
        self._batch_files.remove_covered(Version.from_proto(checkpoint.policy_version))
        return checkpoint
