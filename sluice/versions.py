"""Policy versions: how many batches the weights have absorbed, and in which life of the trainer."""

from __future__ import annotations

from typing import NamedTuple, Self

from sluice.v1 import common_pb2

__all__ = ["BASE", "Version"]


class Version(NamedTuple):
    """A policy version, ordered by epoch, then by number.

    Attributes:
        epoch: Which start of the trainer produced it; 0 is the base model as it lies on disk.
        number: Batches applied to the weights since the base model.
    """

    epoch: int
    number: int

    def __str__(self) -> str:
        """The form used in file names, logs and as the engine's weight version: ``epoch.number``."""
        return f"{self.epoch}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the ``epoch.number`` form.

        Raises:
            ValueError: if the text has another form.
        """
        epoch, separator, number = text.partition(".")
        if not (separator and epoch.isdecimal() and number.isdecimal()):
            raise ValueError(f"{text!r} is not a policy version; expected epoch.number, such as 1.42")
        return cls(int(epoch), int(number))

    @classmethod
    def from_proto(cls, message: common_pb2.PolicyVersion) -> Self:
        """Read the wire form."""
        return cls(message.epoch, message.number)

    def to_proto(self) -> common_pb2.PolicyVersion:
        """Write the wire form."""
        return common_pb2.PolicyVersion(epoch=self.epoch, number=self.number)


BASE = Version(0, 0)
"""The base model before any trainer took part."""
