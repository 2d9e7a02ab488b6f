"""`sluice token`: make a token for a new principal, or list those of a principals file."""

from __future__ import annotations

import argparse
import os
import re
import sys
from datetime import datetime
from pathlib import Path

from sluice.config import ConfigError, Options
from sluice.rpc.principals import NAME, ROLES, Entry, add_token, now_utc, read_principals


def run(argv: list[str]) -> int:
    """Run the command.

    Raises:
        ConfigError: if a file cannot be used.
    """
    parser = Options(
        prog="sluice token", description="Principals: who may call the servers of a run (docs/security.md)."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="new | list")
    new = actions.add_parser("new", help="make a token of 256 bits, print it once, and append its digest to the file")
    new.add_argument("name", type=_name, help="name of the principal")
    new.add_argument("--role", choices=ROLES, required=True, help="what it may call")
    new.add_argument("--file", type=Path, required=True, help="principals file; it is begun if there is none")
    new.add_argument("--expires", type=_time, help="when it ceases to be valid, such as 2027-06-30T00:00:00Z")
    new.add_argument(
        "--out", type=Path, help="write the token to this new file, readable by you alone, not to the terminal"
    )
    shown = actions.add_parser("list", help="list the principals of a file")
    shown.add_argument("--file", type=Path, required=True, help="principals file")
    arguments = parser.parse_args(argv)
    if arguments.action == "list":
        for line in _table(read_principals(arguments.file)):
            print(line)
        return 0
    target = None if arguments.out is None else _begin(arguments.out)
    try:
        token = add_token(arguments.file, arguments.name, arguments.role, arguments.expires)
    except BaseException:
        if target is not None:
            os.close(target)
            arguments.out.unlink()
        raise
    if target is None:
        print(token)
    else:
        with os.fdopen(target, "w") as file:
            file.write(f"{token}\n")
    print(f"principal {arguments.name} with the role {arguments.role} is in {arguments.file}", file=sys.stderr)
    return 0


def _begin(path: Path) -> int:
    """Open a new file that only its owner may read. Refuse a symbolic link."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}; name a file that does not exist yet") from error


def _name(text: str) -> str:
    if not re.fullmatch(NAME, text):
        raise argparse.ArgumentTypeError("use lower-case letters, digits, `.`, `_` and `-`; at most 63 characters")
    return text


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise argparse.ArgumentTypeError("give a date, a time and a time zone, such as 2027-06-30T00:00:00Z")
    return time


def _table(entries: list[Entry]) -> list[str]:
    rows = [("NAME", "ROLE", "KNOWN BY", "QUOTA", "EXPIRES"), *(_row(entry) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(entry: Entry) -> tuple[str, str, str, str, str]:
    known_by = [] if entry.token_sha256 is None else [f"token {entry.token_sha256[:8]}..."]
    known_by += [] if entry.certificate is None else [f"certificate {entry.certificate}"]
    quota = [f"{name}={value:g}" for name, value in entry.quota.model_dump(exclude_none=True).items()]
    expires = "" if entry.expires is None else entry.expires.isoformat()
    if entry.expires is not None and entry.expires <= now_utc():
        expires += " (expired)"
    return entry.name, entry.role, " and ".join(known_by), " ".join(quota), expires
