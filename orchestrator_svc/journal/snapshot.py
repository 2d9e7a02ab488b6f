"""The state of a run at one fact, in a file, so that a start reads only the facts after it.

    journal/snapshot.bin    magic, xxh3-128 of what follows, and a `Snapshot` of journal.proto

It holds nothing that does not follow from the facts. A snapshot that is damaged, or belongs to other facts, settings or code, is ignored:
the start reads all facts, as it does without a snapshot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import structlog
import xxhash
from google.protobuf.message import DecodeError, Message

from orchestrator_svc.journal import external, facts, ledger
from orchestrator_svc.journal.ledger import Ledger
from sluice import versions
from sluice.v1 import journal_pb2, orchestrator_pb2

log = structlog.get_logger(__name__)

FILE = "snapshot.bin"

LEAST_FACTS = 20_000
"""So many facts after a snapshot are worth another one: reading them would take a start a quarter of a second."""

_VALUES_PER_FACT = 2
"""How many values of a snapshot can be written and read in the time in which a start reads one fact."""

_MAGIC = b"sluice snapshot 1\n"
_DIGEST_BYTES = 16
_LARGE = 1 << 63

_CODE = (
    "orchestrator_svc.journal.ledger",
    "orchestrator_svc.journal.external",
    "orchestrator_svc.journal.facts",
    "orchestrator_svc.run.curriculum",
    "orchestrator_svc.run.task_stream",
    "orchestrator_svc.run.setting_aside",
    "sluice.versions",
    __name__,
)
"""Modules that turn facts into states: a snapshot that was made by other code is not used."""

State: TypeAlias = Any
"""Plain values: None, numbers, texts, bytes, and lists, tuples, sets, counters and dictionaries of them."""


class Keeper(Protocol):
    """Follows the facts, and keeps a state of its own."""

    def state(self) -> State:
        """Return the state after the facts so far."""

    def restore(self, state: State) -> None:
        """Take over a state, in place of all facts so far."""


class Snapshots:
    """Reads and writes the snapshot of one run.

    Args:
        keepers: The objects that follow the facts beside the ledger, always in the same order.
        settings: What their states depend on beside the facts. A snapshot that was made under other settings is not used.
        least_facts: Facts after a snapshot before another one is written; None: LEAST_FACTS.
    """

    def __init__(self, keepers: Sequence[Keeper], settings: Iterable[str], *, least_facts: int | None = None) -> None:
        self._keepers, self._least_facts = keepers, LEAST_FACTS if least_facts is None else least_facts
        self._values = 0  # of the last snapshot
        self._fits = _digest_of_code(settings)

    def is_due(self, facts: int) -> bool:
        """Return whether a start would read `facts` facts more slowly than it takes to write and read another snapshot."""
        return facts >= max(self._least_facts, self._values // _VALUES_PER_FACT)

    def read(self, directory: Path, fact_at: Callable[[int], bytes | None]) -> tuple[int, Ledger] | None:
        """Restore the keepers; return the number of the snapshot's last fact and the ledger after it. None: no snapshot fits.

        Args:
            directory: The directory of the journal's segments.
            fact_at: Returns the serialized fact of a number, None if there is none.
        """
        try:
            snapshot = _parsed((directory / FILE).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, DecodeError) as error:
            log.warning("the snapshot of the journal cannot be read; all facts are", error=str(error))
            return None
        fact = fact_at(snapshot.seq)
        if snapshot.fits != self._fits or fact is None or xxhash.xxh3_128_digest(fact) != snapshot.fact_digest:
            log.info("the snapshot of the journal is of other settings, code or facts; all facts are read")
            return None
        self._values = len(snapshot.values)
        found, *states = _Reader(snapshot.kinds).values(snapshot.values)
        for keeper, state in zip(self._keepers, states, strict=True):
            keeper.restore(state)
        return snapshot.seq, found

    def write(self, directory: Path, seq: int, fact: bytes, ledger: Ledger) -> None:
        """Replace the snapshot by one of the present state, after fact `seq`. If that fails, the old one stays."""
        building = directory / f".{FILE}"
        try:
            snapshot = journal_pb2.Snapshot(seq=seq, fact_digest=xxhash.xxh3_128_digest(fact), fits=self._fits)
            _Writer(snapshot).add([ledger, *(each.state() for each in self._keepers)])
            content = snapshot.SerializeToString()
            # Without a sync: the digest shows whether all of it reached the disk.
            building.write_bytes(_MAGIC + xxhash.xxh3_128_digest(content) + content)
            building.replace(directory / FILE)
            self._values = len(snapshot.values)
        except Exception as error:  # noqa: BLE001 - the run does not need a snapshot
            with contextlib.suppress(OSError):
                building.unlink(missing_ok=True)
            log.warning("the snapshot of the journal cannot be written; the next start takes longer", error=repr(error))


def _digest_of_code(settings: Iterable[str]) -> bytes:
    """Return the digest of the settings, and of the code that turns facts into states."""
    digest = xxhash.xxh3_128((version("protobuf") + sys.version).encode())
    for name in _CODE:
        digest.update(Path(importlib.import_module(name).__file__ or "").read_bytes())
    for each in settings:
        digest.update(each.encode() + b"\0")
    return digest.digest()


def _parsed(content: bytes) -> journal_pb2.Snapshot:
    """Return what a file holds.

    Raises:
        ValueError: if it is damaged.
    """
    start = len(_MAGIC) + _DIGEST_BYTES
    serialized = content[start:]
    if content[:start] != _MAGIC + xxhash.xxh3_128_digest(serialized):
        raise ValueError("it is damaged, or of another form")
    return journal_pb2.Snapshot.FromString(serialized)


# Values: containers, the classes of the ledger, and messages.

_MAPPINGS: Mapping[str, type[Any]] = {"dict": dict, "Counter": Counter, "mappingproxy": MappingProxyType}
_ITEMS: Mapping[str, type[Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MESSAGES: Mapping[str, type[Message]] = {
    each.full_name: getattr(module, name)
    for module in (orchestrator_pb2, journal_pb2)
    for name, each in module.DESCRIPTOR.message_types_by_name.items()
}
_CLASSES: Mapping[str, type[Any]] = {
    name: found
    for module in (ledger, external, facts, versions)
    for name, found in vars(module).items()
    if isinstance(found, type)
    and found.__module__ == module.__name__
    and (dataclasses.is_dataclass(found) or hasattr(found, "_fields"))
}
_STAGE = "Stage"


class _Writer:
    """Adds values to a snapshot. Each object, and each equal text or number, is added once."""

    def __init__(self, snapshot: journal_pb2.Snapshot) -> None:
        self._values, self._names = snapshot.values, snapshot.kinds
        self._kinds: dict[str, int] = {}
        self._plain: dict[tuple[type, Any], int] = {}
        self._objects: dict[int, tuple[int, object]] = {}  # with the object, so that no other object gets its id
        self._fields: dict[type, tuple[str, ...]] = {}

    def add(self, value: State) -> int:
        """Return the index of a value.

        Raises:
            TypeError: if a snapshot cannot hold this kind of value.
        """
        kind = type(value)
        if kind in {int, str, bytes, bool, type(None)}:
            index = self._plain.get((kind, value))
            if index is None:
                index = self._plain[kind, value] = self._append(value)
            return index
        if kind is float:
            return self._append(value)
        known = self._objects.get(id(value))
        if known is not None:
            return known[0]
        name, parts = self._parts(value, kind)
        indices = [self.add(each) for each in parts]
        number = self._kinds.get(name)
        if number is None:
            number = self._kinds[name] = len(self._kinds)
            self._names.append(name)
        self._values.add(object=journal_pb2.SnapshotObject(kind=number, parts=indices))
        index = len(self._values) - 1
        self._objects[id(value)] = index, value
        return index

    def _append(self, value: State) -> int:
        match value:
            case None:
                self._values.add()
            case bool():
                self._values.add(truth=value)
            case int() if value >= _LARGE:
                self._values.add(large=value)
            case int():
                self._values.add(whole=value)
            case float():
                self._values.add(real=value)
            case str():
                self._values.add(text=value)
            case _:
                self._values.add(raw=value)
        return len(self._values) - 1

    def _parts(self, value: State, kind: type) -> tuple[str, Iterable[State]]:
        """Return the name of a value's kind, and the parts that the value consists of."""
        name = kind.__name__
        if _MAPPINGS.get(name) is kind:
            return name, (part for item in value.items() for part in item)
        if _ITEMS.get(name) is kind:
            return name, value
        if _CLASSES.get(name) is kind:
            if isinstance(value, tuple):
                return name, value
            if kind not in self._fields:
                self._fields[kind] = tuple(each.name for each in dataclasses.fields(kind))
            return name, (getattr(value, field) for field in self._fields[kind])
        if kind is facts.Stage:
            return _STAGE, (value.value,)
        if isinstance(value, Message):
            return value.DESCRIPTOR.full_name, (value.SerializeToString(),)
        raise TypeError(f"no snapshot holds a {kind.__module__}.{name}")


class _Reader:
    """Makes the values of a snapshot.

    Args:
        kinds: `Snapshot.kinds`.
    """

    def __init__(self, kinds: Iterable[str]) -> None:
        self._make = [_maker(each) for each in kinds]

    def values(self, values: Iterable[journal_pb2.SnapshotValue]) -> State:
        """Return the last value."""
        made: list[State] = []
        for value in values:
            kind = value.WhichOneof("value")
            if kind == "object":
                each = value.object
                made.append(self._make[each.kind]([made[part] for part in each.parts]))
            else:
                made.append(None if kind is None else getattr(value, kind))
        return made[-1]


def _maker(kind: str) -> Callable[[list[State]], State]:
    """Return a function that makes an object from its parts."""
    if (mapping := _MAPPINGS.get(kind)) is not None:
        return lambda parts: mapping(dict(zip(parts[::2], parts[1::2], strict=True)))
    if (items := _ITEMS.get(kind)) is not None:
        return items
    if kind == _STAGE:
        return lambda parts: facts.Stage(*parts)
    if (message := _MESSAGES.get(kind)) is not None:
        return lambda parts: message.FromString(*parts)
    made = _CLASSES[kind]
    return lambda parts: made(*parts)
