"""`sluice certs`: make an authority and certificates for mutual TLS, renew them, show when they expire, and replace the authority."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime
from pathlib import Path

from sluice import certificates
from sluice.certificates import Leaf
from sluice.config import Options

DIRECTORY = Path("certs")


def run(argv: list[str]) -> int:
    """Run the command.

    Returns:
        0; 1 if `list` shows a certificate that has expired.

    Raises:
        ConfigError: if a file to read cannot be used, or a file to write exists already.
    """
    arguments = _parser().parse_args(argv)
    now, directory = certificates.now_utc(), arguments.dir
    match arguments.action:
        case "init":
            made = certificates.begin(directory, arguments.host, domain=arguments.domain, days=arguments.days, now=now)
            _say(
                f"{directory} has an authority and {len(made)} certificates; keep {certificates.SIGNING_KEY} to yourself"
            )
        case "issue":
            hosts = [*certificates.usual_hosts(arguments.name), *arguments.host]
            leaf = certificates.issue(
                directory,
                arguments.name,
                hosts,
                uri=arguments.uri,
                days=arguments.days,
                now=now,
                overwrite=arguments.overwrite,
            )
            _say(f"{directory / leaf.name}.pem is valid until {leaf.expires:%Y-%m-%d %H:%M} UTC")
        case "renew":
            _say_renewed(certificates.renew(directory, now, every=arguments.all))
        case "list":
            return _list(directory, now, as_json=arguments.json)
        case _:
            _replace_authority(arguments.step, directory, now)
    return 0


def _replace_authority(step: str, directory: Path, now: datetime) -> None:
    if step == "add":
        name = certificates.add_authority(directory, now)
        _say(
            f"{directory / certificates.AUTHORITIES} trusts {name!r} as well: give it to every process, then `sluice certs authority use`"
        )
    elif step == "use":
        _say_renewed(certificates.use_authority(directory, now))
        _say("give every process its new certificate, then `sluice certs authority drop`")
    else:
        for name in certificates.drop_authority(directory):
            _say(f"{name!r} is trusted no longer: give {directory / certificates.AUTHORITIES} to every process")


def _parser() -> argparse.ArgumentParser:
    parser = Options(prog="sluice certs", description=f"{__doc__} docs/security.md shows how they are used.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="init | issue | renew | list | authority")
    init = actions.add_parser(
        "init", help="begin a folder: an authority, a certificate for each service and for commands, and principals"
    )
    issue = actions.add_parser("issue", help="issue one more certificate")
    issue.add_argument("name", help="common name, and name of the files NAME.pem and NAME.key")
    issue.add_argument("--uri", default="", help="URI by which a principal is known, such as spiffe://sluice/replica-7")
    issue.add_argument("--overwrite", action="store_true", help="replace a certificate of that name")
    for each in (init, issue):
        each.add_argument(
            "--host",
            action="append",
            default=[],
            help="a host name or address that it is valid for, beside its name, localhost and this machine; may be repeated",
        )
        each.add_argument(
            "--days",
            type=_days,
            default=certificates.LEAF_DAYS,
            help=f"days that it is valid (default: {certificates.LEAF_DAYS:g})",
        )
    init.add_argument(
        "--domain", default="sluice", help="first part of the URIs: spiffe://DOMAIN/trainer (default: sluice)"
    )
    renew = actions.add_parser(
        "renew", help="issue again, with new keys, what has passed two thirds of its life; run it daily"
    )
    renew.add_argument("--all", action="store_true", help="renew all of them")
    shown = actions.add_parser("list", help="show names and expiry; exit code 1 if one has expired")
    shown.add_argument("--json", action="store_true", help="print JSON")
    authority = actions.add_parser(
        "authority", help="replace the authority in three steps: add the next one, use it, drop the one before"
    )
    authority.add_argument("step", choices=("add", "use", "drop"), help="the step")
    for each in (init, issue, renew, shown, authority):
        each.add_argument("--dir", type=Path, default=DIRECTORY, help=f"the folder (default: {DIRECTORY})")
    return parser


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days <= certificates.AUTHORITY_DAYS:
        raise argparse.ArgumentTypeError(f"give a number of days between 0 and {certificates.AUTHORITY_DAYS:g}")
    return days


def _list(directory: Path, now: datetime, *, as_json: bool) -> int:
    leaves, authorities = certificates.leaves(directory), certificates.authorities(directory)
    if as_json:
        shown = [
            {
                "name": leaf.name,
                "hosts": leaf.hosts,
                "uri": leaf.uri,
                "expires": leaf.expires.isoformat(),
                "issuer": leaf.issuer,
            }
            for leaf in leaves
        ]
        print(json.dumps(shown, indent=2))
    else:
        rows = [("NAME", "EXPIRES (UTC)", "LEFT", "VALID FOR", "URI", "ISSUER")]
        rows += [(name, f"{until:%Y-%m-%d %H:%M}", _left(until, now), "", "", "") for name, until in authorities]
        rows += [_row(leaf, now) for leaf in leaves]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return int(any(leaf.expires <= now for leaf in leaves))


def _row(leaf: Leaf, now: datetime) -> tuple[str, str, str, str, str, str]:
    until = f"{leaf.expires:%Y-%m-%d %H:%M}"
    left = _left(leaf.expires, now) + (", renew" if leaf.is_due(now) else "")
    return leaf.name, until, left, ",".join(leaf.hosts), leaf.uri, leaf.issuer


def _left(until: datetime, now: datetime) -> str:
    hours = (until - now).total_seconds() / 3600
    if hours <= 0:
        return "expired"
    return f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} hours"


def _say_renewed(renewed: list[Leaf]) -> None:
    for leaf in renewed:
        _say(f"renewed {leaf.name}: valid until {leaf.expires:%Y-%m-%d %H:%M} UTC")
    if not renewed:
        _say("nothing is due")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
