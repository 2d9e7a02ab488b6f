"""Hypothesis strategies for messages of any descriptor, and for damaged bytes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

Draw: TypeAlias = Callable[[st.SearchStrategy[Any]], Any]
Descriptor: TypeAlias = Any
Field: TypeAlias = Any
"""Descriptors of two implementations of protobuf, whose stubs differ."""

Names: TypeAlias = Mapping[str, Sequence[str]]
"""Texts that mean something to the server, by name of the field. Those under "" are for every field."""

DEPTH = 4
"""Levels of messages inside of messages."""

MOST_REPEATED = 4

LONG = 70_000
"""Characters of a long text, or elements of a long list: more than any name, less than a message may have."""

WRONG_NAMES = (
    "../",
    "../../etc/passwd",
    "/etc/passwd",
    "runs/../..",
    "runs/",
    "runs/x/versions/1.1",
    "a/b/c",
    ".",
    "..",
    "-",
    "\x00",
    "a\nb: c",
    "%s%n",
    "${HOME}",
    "'; DROP TABLE facts; --",
    "\u202e\ufeff",
    "\U0010ffff",
    "127.0.0.1:1",
    "unix:/tmp",
    "[::1]:99999",
    "NaN",
    "1e999",
    "-1",
    "18446744073709551616.1",
    "x" * 300,
    "é" * LONG,
)
"""Texts that are invalid as a name, an address or a number."""

_SIGNED = {FieldDescriptor.CPPTYPE_INT32: 32, FieldDescriptor.CPPTYPE_INT64: 64}
_UNSIGNED = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}


@st.composite
def messages(draw: Draw, descriptor: Descriptor, names: Names, sound: Sequence[Message] = ()) -> Message:
    """Draw a message: a new one, or a sound one with names that the server knows and with some fields replaced."""
    message: Message = message_factory.GetMessageClass(descriptor)()
    if draw(st.booleans()):
        if sound:
            message.CopyFrom(draw(st.sampled_from(sound)))
        for field in descriptor.fields:
            plain = field.cpp_type == FieldDescriptor.CPPTYPE_STRING and not field.is_repeated
            if plain and field.containing_oneof is None and names.get(field.name) and not getattr(message, field.name):
                setattr(message, field.name, draw(st.sampled_from(names[field.name])))
        _fill(draw, message, names, DEPTH, share=8)
    else:
        _fill(draw, message, names, DEPTH, share=draw(st.sampled_from((1, 2, 4))))
    return message


def _fill(draw: Draw, message: Message, names: Names, depth: int, share: int) -> None:
    """Set one in `share` fields of a message."""
    for field in message.DESCRIPTOR.fields:
        if share > 1 and draw(st.integers(1, share)) > 1:
            continue
        if draw(st.integers(0, 15)) == 0:
            message.ClearField(field.name)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(draw, message, field, names, depth)
        elif field.is_repeated:
            _fill_list(draw, message, field, names, depth)
        elif field.message_type is not None:
            if depth:
                inner = getattr(message, field.name)
                inner.SetInParent()
                _fill(draw, inner, names, depth - 1, share=min(share, 2))
        else:
            setattr(message, field.name, draw(_scalar(field, names)))


def _fill_map(draw: Draw, message: Message, field: Field, names: Names, depth: int) -> None:
    entries = getattr(message, field.name)
    key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
    for _ in range(draw(st.integers(0, MOST_REPEATED))):
        at = draw(_scalar(key, names))
        if value.message_type is None:
            entries[at] = draw(_scalar(value, names))
        elif depth:
            _fill(draw, entries[at], names, depth - 1, share=2)


def _fill_list(draw: Draw, message: Message, field: Field, names: Names, depth: int) -> None:
    values = getattr(message, field.name)
    if field.message_type is None:
        drawn = draw(st.lists(_scalar(field, names), max_size=MOST_REPEATED))
        if drawn and draw(st.integers(0, 31)) == 0:
            drawn = drawn[:1] * (LONG if not isinstance(drawn[0], str | bytes) else LONG // (1 + len(drawn[0])))
        values.extend(drawn)
    elif depth:
        for _ in range(draw(st.integers(0, MOST_REPEATED))):
            _fill(draw, values.add(), names, depth - 1, share=2)


def _scalar(field: Field, names: Names) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind in _SIGNED or kind in _UNSIGNED:
        bits = (_SIGNED | _UNSIGNED)[kind]
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind in _SIGNED else (0, (1 << bits) - 1)
        return st.one_of(st.integers(max(low, -2), 9), st.sampled_from((low, high, high - 1)), st.integers(low, high))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        known = [each.number for each in field.enum_type.values]
        return st.one_of(st.sampled_from(known), st.sampled_from((-1, 99, 2**31 - 1, -(2**31))))
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return st.one_of(
            st.floats(width=32 if kind == FieldDescriptor.CPPTYPE_FLOAT else 64), st.sampled_from((0.0, 0.5, 1.0))
        )
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.one_of(st.binary(max_size=32), st.sampled_from((b"", b"\0" * LONG)))
    return _text(field.name, names)


def _text(name: str, names: Names) -> st.SearchStrategy[str]:
    """Draw a text for a field, often one that the server knows."""
    own, common = tuple(names.get(name, ())), tuple(names.get("", ()))
    wild = [st.text(st.characters(exclude_categories=["Cs"]), max_size=24), st.sampled_from(WRONG_NAMES)]
    known = [st.sampled_from(each) for each in (own, own, own, common) if each]
    return st.one_of(*known, *wild)


# Bytes.


@dataclass(frozen=True, slots=True)
class Damage:
    """One change of the bytes of a message.

    Attributes:
        kind: The change: flip a bit, cut the end off, insert, repeat or remove bytes.
        place: Position, as a share of the length.
        data: Bytes to insert.
    """

    kind: str
    place: float
    data: bytes

    def __call__(self, wire: bytes) -> bytes:
        """Return the changed bytes."""
        at = int(self.place * len(wire))
        match self.kind:
            case "flip":
                return (
                    wire[:at]
                    + bytes(each ^ 1 << (self.data or b"\0")[0] % 8 for each in wire[at : at + 1])
                    + wire[at + 1 :]
                )
            case "cut":
                return wire[:at]
            case "insert":
                return wire[:at] + self.data + wire[at:]
            case "repeat":
                return wire[:at] + wire[at:] * 2
            case _:
                return wire[:at] + wire[at + 1 + len(self.data) :]


_DAMAGE = st.builds(
    Damage,
    st.sampled_from(("flip", "flip", "cut", "insert", "repeat", "remove")),
    st.floats(0, 1, exclude_max=True),
    st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 10), st.just(b"\x0a\xff\xff\xff\xff\x0f")),
)


@st.composite
def wires(draw: Draw, descriptor: Descriptor, names: Names, sound: Sequence[Message] = ()) -> bytes:
    """Draw the bytes of a message, damaged half of the time, and sometimes random bytes."""
    if draw(st.integers(0, 15)) == 0:
        return bytes(draw(st.binary(max_size=64)))
    wire: bytes = draw(messages(descriptor, names, sound)).SerializeToString()
    if draw(st.booleans()):
        for each in draw(st.lists(_DAMAGE, min_size=1, max_size=3)):
            wire = each(wire)
    return wire
