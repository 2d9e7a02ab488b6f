"""`allocation_mode`: one line that assigns devices to the rollout replicas and the trainer.

    vllm:d2t1+fsdp:d4t2    two replicas of one device, a trainer of 4 x 2 processes on eight other devices
    d4t2+d4p2              the same without names: rollout first, then the trainer
    d4                     one allocation for both: four replicas and four trainer processes on the same four devices
    vllm:d2t4  fsdp:d4     one side alone; the other keeps its own settings

A side is `backend:dimensions`. A dimension is a letter and a size; the order is free, and a dimension that is left out is 1: `d` data,
`t` tensor, `c` context, `p` pipeline (`e`, expert, may only be 1). The syntax is AReaL's, so that its configurations can be reused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from sluice.engines import ENGINES

TRAINER_BACKENDS = ("fsdp",)

ROLES = {"rollout": "rollout", "trainer": "trainer", "actor": "trainer"}
"""The side of each role, in the form with one backend per role."""

NAMES = {"d": "data", "t": "tensor", "c": "context", "p": "pipeline"}
"""Letters of the dimensions, in the order in which they are printed."""

MOST_PROCESSES = 1 << 20
"""A larger size is a typing mistake."""

_SIDE = re.compile(r"(?:(?P<backend>[A-Za-z_]\w*)\s*[:.]\s*)?(?P<dimensions>(?:[A-Za-z]\d+)+)", re.ASCII)
_EXAMPLE = "write it as `vllm:d2t1+fsdp:d4` (rollout + trainer), `d2t1+d4`, or `d4` for both on the same devices"


class AllocationError(ValueError):
    """The text is not an allocation; the message says what to write."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of the axes of parallelism of one side.

    Attributes:
        data: Replicas (rollout), or processes with different rows (trainer).
        tensor: Devices that share each matrix product.
        context: Devices that share each row of tokens.
        pipeline: Stages that share the layers.
    """

    data: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    def __str__(self) -> str:
        """Return the canonical form: `d` always, the others if they are above 1."""
        sizes = ((letter, getattr(self, name)) for letter, name in NAMES.items())
        return "".join(f"{letter}{size}" for letter, size in sizes if size > 1 or letter == "d")


@dataclass(frozen=True, slots=True)
class Side:
    """The part of an allocation that belongs to one side.

    Attributes:
        backend: The engine or trainer backend; if it is empty, the settings decide.
    """

    dimensions: Dimensions
    backend: str = ""

    def __str__(self) -> str:
        """The canonical form."""
        return f"{self.backend}:{self.dimensions}" if self.backend else str(self.dimensions)


@dataclass(frozen=True, slots=True)
class Allocation:
    """How the devices of a run are assigned.

    Attributes:
        rollout: The replicas; if None, the settings decide.
        trainer: The trainer; if None, the settings decide.
        shared: Whether both use the same devices.
    """

    rollout: Side | None = None
    trainer: Side | None = None
    shared: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a line.

        Raises:
            AllocationError: if it cannot be parsed, or asks for something that is not supported.
        """
        sides = [_side(part) for part in text.split("+")]
        if len(sides) > 2:
            raise AllocationError(f"allocation {text!r} has {len(sides)} sides, a run has two: {_EXAMPLE}")
        if len(sides) == 1 and not sides[0].backend:
            both = sides[0].dimensions
            return cls(_rollout(Side(both)), _trainer(Side(both)), shared=True)
        named = [_role(side) for side in sides]
        if len(sides) == 1:
            roles = [named[0]]
        else:
            first = named[0] or ("trainer" if named[1] == "rollout" else "rollout")
            roles = [first, named[1] or ("trainer" if first == "rollout" else "rollout")]
        if len(set(roles)) < len(roles):
            raise AllocationError(f"allocation {text!r} gives the {roles[0]} two sides: {_EXAMPLE}")
        return cls._of(dict(zip(roles, sides, strict=True)))

    @classmethod
    def parse_roles(cls, backends: Mapping[str, str]) -> Self:
        """Parse the form with one backend per role, such as ``{"rollout": "vllm:d2t1", "actor": "fsdp:d4"}``.

        Raises:
            AllocationError: if a role is unknown or named twice, or cannot run on its backend.
        """
        sides: dict[str, Side] = {}
        for name, text in backends.items():
            role = ROLES.get(name)
            if role is None:
                raise AllocationError(f"there is no role {name!r}: give a backend to {', '.join(ROLES)}")
            side = _side(text)
            if side.backend and _role(side) != role:
                raise AllocationError(f"role {name} cannot run on {side}: {_supported()}")
            if sides.setdefault(role, side) != side:
                raise AllocationError(f"the {role} has two backends ({sides[role]} and {side}): keep one")
        return cls._of(sides)

    @classmethod
    def _of(cls, sides: Mapping[str, Side]) -> Self:
        rollout, trainer = sides.get("rollout"), sides.get("trainer")
        return cls(_rollout(rollout) if rollout else None, _trainer(trainer) if trainer else None)

    def __str__(self) -> str:
        """Return the canonical form, which `parse` turns back into the same allocation."""
        if self.shared and self.rollout is not None:
            return str(self.rollout.dimensions)
        return "+".join(str(side) for side in (self.rollout, self.trainer) if side is not None)


def _side(text: str) -> Side:
    match = _SIDE.fullmatch(text.strip())
    if match is None:
        raise AllocationError(f"cannot read {text.strip()!r} as a side of an allocation: {_EXAMPLE}")
    side = Side(_dimensions(match["dimensions"]), (match["backend"] or "").lower())
    if side.backend and side.backend not in (*ENGINES, *TRAINER_BACKENDS):
        raise AllocationError(f"backend {side.backend!r} is not supported: {_supported()}")
    return side


def _dimensions(text: str) -> Dimensions:
    sizes: dict[str, int] = {}
    for letter, digits in re.findall(r"([A-Za-z])(\d+)", text):
        if letter not in (*NAMES, "e"):
            raise AllocationError(f"{text!r} has a dimension {letter!r}: the dimensions are {_letters()}")
        if letter in sizes:
            raise AllocationError(f"{text!r} gives dimension {letter} twice: keep one of them")
        sizes[letter] = size = int(digits)
        if not 0 < size <= MOST_PROCESSES:
            raise AllocationError(
                f"{text!r} has {letter}{size}: give 1 to {MOST_PROCESSES}, or leave {letter} out for 1"
            )
    if sizes.pop("e", 1) > 1:
        raise AllocationError(f"{text!r} asks for expert parallelism, which is not supported: leave e out")
    return Dimensions(**{NAMES[letter]: size for letter, size in sizes.items()})


def _role(side: Side) -> str:
    """Return the role of a side's backend; empty without a backend."""
    if side.backend in ENGINES:
        return "rollout"
    return "trainer" if side.backend else ""


def _rollout(side: Side) -> Side:
    for letter in ("c", "p"):
        size = getattr(side.dimensions, NAMES[letter])
        if size > 1:
            raise AllocationError(
                f"rollout replicas have no {NAMES[letter]} parallelism ({letter}{size} in {side}): give them d and t alone,"
                " and the trainer a side of its own, as in `d2t2+d2p2`"
            )
    if side.dimensions.tensor > 1 and side.backend and not ENGINES[side.backend].several_devices:
        others = " or ".join(name for name, engine in ENGINES.items() if engine.several_devices)
        raise AllocationError(f"the {side.backend} engine has one device per replica ({side}): use {others}, or t1")
    return side


def _trainer(side: Side) -> Side:
    return Side(side.dimensions, side.backend or TRAINER_BACKENDS[0])


def _supported() -> str:
    return f"rollout runs on {' or '.join(ENGINES)}, the trainer on {' or '.join(TRAINER_BACKENDS)}"


def _letters() -> str:
    return ", ".join(f"{letter} ({name})" for letter, name in NAMES.items())
