"""Writes a conversion: the file of settings with its comments, the report for the terminal, and the table of a page."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from sluice.config.schema import Value
from sluice.config.secrets import REDACTED, is_secret_name, redact_text
from sluice_convert.table import Conversion, Listed, Set, System

_WIDTH = 120
_TABLES = ("", "orchestrator", "trainer", "rollout", "agents", "gateway", "weightsync")


def document(done: Conversion, command: str) -> str:
    """Return the settings as TOML. A comment at each says where it came from; comments at the end list the rest.

    Args:
        done: What became of a file.
        command: What the user typed, for the first line.
    """
    lines = [f"# Converted from {done.system.title}: {command}", "# Check it with `sluice rl @ FILE --dry-run`."]
    if done.todo:
        lines += ["#", "# FILL IN OR CHECK", *_comments(todo_lines(done))]
    tables: dict[str, list[Set]] = {}
    for each in sorted(done.settings.values(), key=lambda each: _place(each.ours)):
        tables.setdefault(each.ours.rpartition(".")[0], []).append(each)
    for table in sorted(tables, key=_place):
        lines += ["", f"[{table}]"] if table else [""]
        for each in tables[table]:
            lines += _setting(done, each)
    lines += ["", "# NOT CONVERTED", *_comments(missing_lines(done) or ["nothing"])]
    lines += ["#", "# THE SAME WITHOUT A SETTING HERE", *_comments(_listed(done.same) or ["nothing"])]
    return "\n".join(lines) + "\n"


def _place(name: str) -> tuple[int, str]:
    first = name.partition(".")[0] if "." in name or name in _TABLES else ""
    return (_TABLES.index(first) if first in _TABLES else len(_TABLES), name)


def _setting(done: Conversion, each: Set) -> Iterator[str]:
    line = f"{each.ours.rpartition('.')[2]} = {literal(each.value)}"
    in_file = [name for name in each.theirs if name in done.source.leaves]
    came = ", ".join(f"{name} = {_shown(name, done.source.leaves[name].value)}" for name in in_file)
    if not came and each.theirs:
        came = f"{done.system.title}'s default of {each.theirs[0]}"
    comment = "; ".join(filter(None, (came, each.remark))) or f"as {done.system.title} does it"
    if len(line) + len(comment) + 4 <= _WIDTH:
        yield f"{line}  # {comment}"
    else:
        yield from _comments([comment])
        yield line


def todo_lines(done: Conversion) -> list[str]:
    """Return what the user must fill in or check, one line each."""
    lines = [redact_text(f"{each.ours}: {each.what}" if each.ours else each.what) for each in done.todo]
    return [*lines, *(redact_text(note) for note in done.source.notes)]


def missing_lines(done: Conversion) -> list[str]:
    """Return what was not converted, one line for all settings of one reason."""
    return _listed(done.missing)


def _listed(listed: Iterable[Listed]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, value, why in listed:
        reasons.setdefault(why, []).append(f"{name} = {_shown(name, value)}")
    return [f"{'; '.join(names)}: {why}" for why, names in reasons.items()]


def _comments(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield from textwrap.wrap(
            line, _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
        )


def _shown(name: str, value: Value) -> str:
    """Return a value of theirs for a comment, without secrets."""
    if any(is_secret_name(part) for part in name.split(".")):
        return REDACTED
    shown = "unset" if value is None else value if isinstance(value, str) else str(value)
    shown = "".join(each if each.isprintable() else " " for each in redact_text(shown))
    return (shown if len(shown) <= _WIDTH else f"{shown[:_WIDTH]}...") if shown else '""'


def literal(value: Value) -> str:
    """Return a value as TOML on one line."""
    match value:
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else str(value)
        case Mapping():
            inner = ", ".join(f"{_key(str(key))} = {literal(each)}" for key, each in value.items() if each is not None)
            return f"{{ {inner} }}" if inner else "{}"
        case list() | tuple():
            return f"[{', '.join(literal(each) for each in value if each is not None)}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(text: str) -> str:
    plain = text.replace("_", "").replace("-", "")
    return text if plain.isascii() and plain.isalnum() else json.dumps(text)


def page_table(system: System) -> str:
    """Return the tables of settings of a system for its page."""
    converted = [line for row in system.rows if row.convert is not None for line in row.lines if line.ours]
    needless = [line for row in system.rows if row.same and row.convert is None for line in row.lines]
    missing = [line for row in system.rows for line in row.lines if not line.ours and line not in needless]
    parts = [f"| {system.title} | Sluice | remark |", "|---|---|---|"]
    parts += [_cells(_short(theirs), _short(tuple(ours.split(", "))), remark) for theirs, ours, remark in converted]
    for title, what, lines in (
        ("Not converted", "why, and what to use instead", missing),
        ("The same without a setting", "why", needless),
    ):
        parts += ["", f"### {title}", "", f"| {system.title} | {what} |", "|---|---|"]
        parts += [_cells(_short(theirs), remark) for theirs, _, remark in lines]
    return "\n".join(parts) + "\n"


def _cells(*texts: str) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def _short(names: tuple[str, ...]) -> str:
    """Return names as code. One of the table of the name before it begins with a dot instead."""
    shown, table = [], ""
    for name in names:
        own = name.rpartition(".")[0]
        shown.append(f".{name.rpartition('.')[2]}" if own and own == table else name)
        table = own or table
    return ", ".join(f"`{name}`" for name in shown)
