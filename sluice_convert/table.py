"""What a table of settings is made of, and how the settings of a file go through it.

A system has one table. Each row names settings of theirs, the settings of ours that take their place, and how values are converted. Every
setting of a file ends in exactly one place: converted, the same without a setting here, not converted, or not resolved.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from sluice.config.schema import Value
from sluice.errors import ConfigError


@dataclass(frozen=True)
class Unresolved:
    """A value that the file does not contain, such as a variable of a shell that the script does not set."""

    text: str
    reason: str

    def __str__(self) -> str:
        """The text as it stands in the file."""
        return self.text


class Leaf(NamedTuple):
    """One setting of a file: its value, and its line, 0 where the format does not tell."""

    value: Value
    line: int = 0


@dataclass(frozen=True)
class Source:
    """The settings of a file by their dotted names. Tables in a list have their number as a part of the name."""

    path: str
    leaves: Mapping[str, Leaf]
    notes: Sequence[str] = ()
    """What else the user should know of the file."""

    def place(self, name: str) -> str:
        """Return where a setting stands, for messages."""
        line = self.leaves[name].line if name in self.leaves else 0
        return f"{self.path}, line {line}" if line else self.path


class NotConvertibleError(Exception):
    """A value has no counterpart here; the message says why, and what to use instead."""


@dataclass(frozen=True)
class Set:
    """One of our settings, and the settings of theirs that it comes from."""

    ours: str
    value: Value
    theirs: tuple[str, ...] = ()
    remark: str = ""


@dataclass(frozen=True)
class Drop:
    """A setting of theirs that is not converted, and why."""

    theirs: str
    why: str


@dataclass(frozen=True)
class Same:
    """A setting of theirs that changes nothing in this file, and why."""

    theirs: str
    why: str


@dataclass(frozen=True)
class Todo:
    """What the file cannot tell and the user must fill in or check."""

    ours: str
    what: str


Outcome = Set | Drop | Same | Todo


class Given:
    """What a file says, with the system's own defaults where it says nothing.

    Args:
        source: The file.
        defaults: Defaults of the system, by name.
        options: Facts that no file has: `processes` and `steps`.

    Attributes:
        leaves: Values of the file; those that are unset or not resolved are not among them.
        nulls: Settings that the file explicitly leaves without a value.
    """

    def __init__(self, source: Source, defaults: Mapping[str, Value], options: Mapping[str, int] | None = None) -> None:
        self._source, self._defaults = source, defaults
        self.options = options or {}
        self.leaves = {
            name: leaf.value
            for name, leaf in source.leaves.items()
            if leaf.value is not None and not isinstance(leaf.value, Unresolved)
        }
        self.nulls = frozenset(name for name, leaf in source.leaves.items() if leaf.value is None)

    def has(self, *names: str) -> bool:
        """Return whether the file sets one of these, or something below it."""
        return any(name in self.leaves or self.below(name) for name in names)

    def below(self, prefix: str) -> list[str]:
        """Return the settings of the file below a table."""
        return [name for name in self.leaves if name.startswith(f"{prefix}.")]

    def present(self, *names: str) -> tuple[str, ...]:
        """Return those of the names that the file sets."""
        return tuple(name for name in names if name in self.leaves)

    def value(self, name: str) -> Value:
        """Return the value of the file, else the system's default, else None."""
        return self.leaves.get(name, self._defaults.get(name))

    def text(self, name: str) -> str:
        """Return a value as text; empty if unset."""
        value = self.value(name)
        return "" if value is None else str(value)

    def number(self, name: str, unset: float = 0.0) -> float:
        """Return a number; `unset` if there is none.

        Raises:
            ConfigError: if the value is something else.
        """
        value = self.value(name)
        if value is None:
            return unset
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self._wrong(name, "a number")
        return number

    def numbers(self, name: str) -> list[float]:
        """Return a list of numbers; one number is a list of one.

        Raises:
            ConfigError: if a value is something else.
        """
        try:
            return [float(text) for text in self.texts(name)]
        except ValueError:
            raise self._wrong(name, "numbers") from None

    def whole(self, name: str, unset: int = 0) -> int:
        """Return a whole number; `unset` if there is none.

        Raises:
            ConfigError: if the value is something else.
        """
        value = self.number(name, unset)
        if value != math.floor(value):
            raise self._wrong(name, "a whole number")
        return int(value)

    def count(self, name: str, unset: int = 1) -> int:
        """Return a whole number of at least 1; `unset` if there is none.

        Raises:
            ConfigError: if the value is something else.
        """
        value = self.whole(name, unset)
        if value < 1:
            raise self._wrong(name, "a whole number of at least 1")
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean; False if unset.

        Raises:
            ConfigError: if the value is something else.
        """
        value = self.value(name)
        known = {"true": True, "false": False, "none": False, "1": True, "0": False, "": False}
        found = known.get("" if value is None else str(value).lower())
        if found is None:
            raise self._wrong(name, "true or false")
        return found

    def texts(self, name: str) -> list[str]:
        """Return a list of texts; one text is a list of one, or several with commas between them."""
        value = self.value(name)
        if value is None or value == "":
            return []
        listed = value if isinstance(value, list) else str(value).split(",")
        return [text for each in listed if (text := str(each).strip(" ,"))]

    def _wrong(self, name: str, wanted: str) -> ConfigError:
        return ConfigError(
            f"{self._source.place(name)}: {name} is {self.value(name)!r}: give {wanted}, or remove the setting"
        )


Convert = Callable[[Given], Iterable[Outcome]]


class Line(NamedTuple):
    """A line of the table on a page.

    Attributes:
        theirs: Names, where `*` is any text without a dot, and the part `**` any text.
        ours: What takes their place, with commas between; a name that begins with a dot is in the table of the one before it.
        remark: What differs; why it is not converted.
    """

    theirs: tuple[str, ...]
    ours: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Row:
    """Settings that are converted together.

    Attributes:
        lines: Which ones, and what takes their place.
        reason: Why one of them has no outcome.
        convert: Gives the outcomes. None: there is no setting here.
        same: Whether leaving it out then changes nothing.
        off: Values with which the setting does nothing, so that leaving it out changes nothing.
    """

    lines: tuple[Line, ...]
    reason: str = ""
    convert: Convert | None = None
    same: bool = False
    off: tuple[Value, ...] = (False, "", 0)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        def part(text: str) -> str:
            return ".+" if text == "**" else re.escape(text).replace(r"\*", "[^.]*")

        names = [name for line in self.lines for name in line.theirs]
        return re.compile("|".join(r"\.".join(map(part, name.split("."))) for name in names) or "(?!)")

    def names(self, setting: str) -> bool:
        """Return whether the row is about this setting."""
        return self._pattern.fullmatch(setting) is not None


Reader = Callable[[Given, str], Value]
"""Reads the value of a setting, with a check of its type."""


def to(
    theirs: str | tuple[str, ...],
    ours: str,
    read: Reader = Given.value,
    *,
    by: Callable[[Value], Value] | None = None,
    remark: str = "",
) -> Row:
    """Return a row for one setting that becomes one of ours.

    Args:
        theirs: Its name; several for those that it had in other versions.
        ours: Our name.
        read: Type of the value, such as `Given.number`.
        by: Converts the value; raises `NotConvertibleError`.
        remark: For the page and the file.
    """
    names = _names(theirs)

    def convert(given: Given) -> Iterator[Outcome]:
        found = given.present(*names)
        name = found[0] if found else names[0]
        if given.value(name) is None:
            return
        value = read(given, name)
        try:
            yield Set(ours, value if by is None else by(value), (name,), remark)
        except NotConvertibleError as error:
            yield Drop(name, str(error))
        for other in found[1:]:
            yield Drop(other, f"{name} is set as well, which is converted")

    return Row((Line(names, ours, remark),), remark, convert)


def rule(
    convert: Convert,
    *lines: tuple[str | tuple[str, ...], str] | tuple[str | tuple[str, ...], str, str],
    unread: str = "",
    lost: str = "",
) -> Row:
    """Return a row for settings that only mean something together.

    Args:
        convert: Gives the outcomes.
        lines: For the page: theirs, ours, and what differs; see `Line`.
        unread: Why the other system does not read one of them either, if it has no outcome.
        lost: In place of `unread`: why one without an outcome is not converted.
    """
    table = tuple(Line(_names(theirs), *rest) for theirs, *rest in lines)
    return Row(table, lost or unread or "it has no effect beside the rest of this file", convert, same=not lost)


def template_arguments(theirs: str) -> Row:
    """Return a row for the arguments of chat templates: settings below a name, or JSON as its value."""

    def convert(given: Given) -> Iterator[Outcome]:
        value = given.value(theirs)
        arguments: dict[str, Value] = {}
        try:
            arguments.update(json.loads(value) if isinstance(value, str) and value else value or {})
            for name in given.below(theirs):
                _put(arguments, name.removeprefix(f"{theirs}.").split("."), given.value(name))
        except (TypeError, ValueError):
            yield Drop(theirs, "it is no table: set chat_template_kwargs at the top level")
            return
        if arguments:
            yield Set("chat_template_kwargs", arguments, (*given.present(theirs), *given.below(theirs)))

    names = (theirs, f"{theirs}.**")
    return Row((Line(names, "chat_template_kwargs"),), "it is empty", convert, same=True)


def _put(table: dict[str, Value], path: Sequence[str], value: Value) -> None:
    """Put a value into tables within tables.

    Raises:
        TypeError: if something on the way is no table.
    """
    for each in path[:-1]:
        table = table.setdefault(each, {})
        if not isinstance(table, dict):
            raise TypeError(f"{each} is no table")
    table[path[-1]] = value


def template_file(theirs: str) -> Row:
    """Return a row for a chat template that is a file, or a text in the settings."""

    def convert(given: Given) -> Iterator[Outcome]:
        text = given.text(theirs)
        if not text:
            return
        if "{" in text or "\n" in text or not text.endswith(_TEMPLATE_FILES):
            yield Drop(theirs, "write the template into a file, and set chat_template to its path")
        else:
            yield Set("chat_template", text, (theirs,))

    return Row((Line(_names(theirs), "chat_template", "where it is a file"),), "it is empty", convert, same=True)


_TEMPLATE_FILES = (".jinja", ".jinja2", ".j2", ".txt")


def same(theirs: str | tuple[str, ...], remark: str) -> Row:
    """Return a row for settings that need none here; the remark says why."""
    return Row((Line(_names(theirs), "", remark),), remark, same=True)


def missing(theirs: str | tuple[str, ...], remark: str, *, off: tuple[Value, ...] = (False, "", 0)) -> Row:
    """Return a row for settings that are not converted; the remark says why, and what to use instead."""
    return Row((Line(_names(theirs), "", remark),), remark, off=off)


def _names(theirs: str | tuple[str, ...]) -> tuple[str, ...]:
    return (theirs,) if isinstance(theirs, str) else theirs


@dataclass(frozen=True)
class System:
    """Another system for RL post-training.

    Attributes:
        name: As after `--from`.
        title: As its authors write it.
        rows: The table; the first row that names a setting counts.
        defaults: Its defaults that are written where a file says nothing, because ours differ or may change.
        check: Refuses a file that is not one of this system or not of RL.
    """

    name: str
    title: str
    rows: Sequence[Row]
    defaults: Mapping[str, Value]
    check: Callable[[Source], None] = lambda _: None


class Listed(NamedTuple):
    """A setting of theirs without one of ours, and why."""

    name: str
    value: Value
    why: str


@dataclass
class Conversion:
    """What became of a file.

    Attributes:
        settings: Ours, by name.
        same: Theirs that need no setting here.
        missing: Theirs that are not converted.
        todo: What the user must fill in or check.
        unresolved: Theirs whose values the file does not contain; they are among `todo`.
        used: Names of theirs from which `settings` come.
    """

    system: System
    source: Source
    settings: dict[str, Set] = field(default_factory=dict)
    same: list[Listed] = field(default_factory=list)
    missing: list[Listed] = field(default_factory=list)
    todo: list[Todo] = field(default_factory=list)
    unresolved: list[Listed] = field(default_factory=list)
    used: set[str] = field(default_factory=set)


def convert(system: System, source: Source, options: Mapping[str, int] | None = None) -> Conversion:
    """Convert the settings of a file.

    Raises:
        ConfigError: if a value has the wrong type, or the file is not one of this system.
    """
    system.check(source)
    given = Given(source, system.defaults, options)
    done = Conversion(system, source)
    dropped: dict[str, str] = {}
    needless: dict[str, str] = {}
    for outcome in (each for row in system.rows if row.convert is not None for each in row.convert(given)):
        _take(done, outcome, dropped, needless)
    for name, (value, _) in source.leaves.items():
        if value is None:
            done.used.discard(name)
            done.same.append(Listed(name, value, "unset there as well"))
        elif isinstance(value, Unresolved):
            done.used.discard(name)
            _list(done, name, value, next((row for row in system.rows if row.names(name)), None))
        elif name in dropped:
            done.used.discard(name)
            done.missing.append(Listed(name, value, dropped[name]))
        elif name in done.used:
            pass
        elif name in needless:
            done.same.append(Listed(name, value, needless[name]))
        else:
            _list(done, name, value, next((row for row in system.rows if row.names(name)), None))
    done.used &= source.leaves.keys()
    return done


def _take(done: Conversion, outcome: Outcome, dropped: dict[str, str], needless: dict[str, str]) -> None:
    match outcome:
        case Set():
            before = done.settings.setdefault(outcome.ours, outcome)
            if before.value != outcome.value:
                for name in outcome.theirs:
                    dropped.setdefault(name, f"{outcome.ours} is {before.value} by another setting")
                return
            both = tuple(dict.fromkeys((*before.theirs, *outcome.theirs)))
            done.settings[outcome.ours] = replace(before, theirs=both)
            done.used |= set(outcome.theirs)
        case Drop():
            dropped.setdefault(outcome.theirs, outcome.why)
        case Same():
            needless.setdefault(outcome.theirs, outcome.why)
        case Todo():
            done.todo.append(outcome)


def _list(done: Conversion, name: str, value: Value, row: Row | None) -> None:
    """List a setting of which its row made nothing."""
    if isinstance(value, Unresolved):
        ours = "" if row is None else row.lines[0].ours
        done.unresolved.append(Listed(name, value, value.reason))
        done.todo.append(Todo(ours, f"{name} = {value}: {value.reason}"))
    elif row is None:
        done.missing.append(Listed(name, value, "this converter does not know it"))
    elif row.same:
        done.same.append(Listed(name, value, row.reason))
    elif _is_off(value, row.off):
        done.same.append(Listed(name, value, "off there as well"))
    else:
        done.missing.append(Listed(name, value, row.reason))


def _is_off(value: Value, off: tuple[Value, ...]) -> bool:
    return value in ([], {}) or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in off)


def groups(size: int, advantage: str, theirs: str) -> Iterator[Outcome]:
    """Give the size of a group. Estimators that compare the attempts at a task need two."""
    if size > 1 or advantage in ("gae", "reinforce_pp", "none"):
        yield Set("orchestrator.group_size", size, (theirs,))
        return
    yield Set("orchestrator.group_size", 2, (), f"not 1: {advantage} compares the attempts at a task")
    yield Drop(theirs, f"{advantage} compares the attempts at a task, so that one alone has advantage 0")
    yield Todo(
        "orchestrator.group_size",
        f"attempts at each task: {theirs} is 1, from which {advantage} learns nothing; 2 until then, 8 is usual",
    )


def run_name(text: str) -> str:
    """Return a name of a run: lower-case letters, digits, `.`, `_` and `-`."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:63] or "converted"


def home(path: str) -> str:
    """Return a path with the user's directory in place of `~`."""
    return str(Path(path).expanduser()) if path.startswith("~") else path
