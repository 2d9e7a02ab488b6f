"""`sluice config`: the reference of all settings, and settings of other systems made into ours."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

from sluice.config import ConfigError, Options, markdown_reference, run_config_class

EXIT_FAILURE = 1

SYSTEMS = ("trl", "verl", "prime-rl", "areal")
"""Systems that `sluice_convert` knows."""


def run(argv: list[str]) -> int:
    """Run `docs` or `convert`.

    Returns:
        0 if it is done, 1 if `--check` found a page that is not up to date.

    Raises:
        ConfigError: if the words are wrong, or a file cannot be converted.
    """
    arguments = _parser(converts=argv[:1] == ["convert"]).parse_args(argv)
    return int(arguments.run(arguments))


def _parser(*, converts: bool) -> argparse.ArgumentParser:
    parser = Options(prog="sluice config", description=__doc__)
    actions = parser.add_subparsers(required=True, metavar="ACTION", parser_class=Options)
    docs = actions.add_parser("docs", help="write the reference of all settings, as Markdown")
    docs.add_argument("--output", type=Path, help="file to write; without it the page goes to standard output")
    docs.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the file is not up to date")
    docs.add_argument(
        "--system",
        choices=SYSTEMS,
        help="the table of settings of this system instead, in the page `docs/coming-from/SYSTEM.md`",
    )
    docs.set_defaults(run=_docs)
    made = actions.add_parser(
        "convert",
        help="make an rl.toml from a configuration of TRL, verl, PRIME-RL or AReaL",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if converts:
        command = _converters()
        command.add_arguments(made)
        made.set_defaults(run=command.run)
    return parser


def _converters() -> ModuleType:
    """Import the package of the converters, which is separate from `sluice`.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        return importlib.import_module("sluice_convert.command")
    except ModuleNotFoundError as error:
        if error.name != "sluice_convert":
            raise
        raise ConfigError(
            "the converters are not installed here: they are the package sluice_convert of Sluice's wheel; install it whole"
        ) from error


def _docs(arguments: argparse.Namespace) -> int:
    output: Path | None = arguments.output
    command = f"sluice config docs --output {output}"
    if arguments.system:
        page = _converters().page(arguments.system, output)
        command = f"sluice config docs --system {arguments.system} --output {output}"
    else:
        page = markdown_reference(run_config_class())
    if output is None:
        sys.stdout.write(page)
    elif not arguments.check:
        output.write_text(page, encoding="utf-8")
    elif not output.is_file() or output.read_text(encoding="utf-8") != page:
        print(f"{output} is out of date: run `{command}`", file=sys.stderr)
        return EXIT_FAILURE
    return 0
