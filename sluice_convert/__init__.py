"""Converts the settings of other systems for RL post-training: `sluice config convert FILE --from SYSTEM`.

`files` and `shell` read a file, the module of each system has its table of settings, `table` applies it, and `write` writes the result.
"""

from __future__ import annotations

from collections.abc import Mapping

from sluice_convert import areal, prime_rl, trl, verl
from sluice_convert.files import read
from sluice_convert.table import Conversion, Source, System, convert
from sluice_convert.write import document, missing_lines, page_table, todo_lines

SYSTEMS: Mapping[str, System] = {each.SYSTEM.name: each.SYSTEM for each in (trl, verl, prime_rl, areal)}
"""The systems whose settings are known, by their names after `--from`."""

__all__ = [
    "SYSTEMS",
    "Conversion",
    "Source",
    "System",
    "convert",
    "document",
    "missing_lines",
    "page_table",
    "read",
    "todo_lines",
]
