"""`sluice config`: the reference of all settings, and settings of other systems made into ours."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import sys
import tempfile
from pathlib import Path

from sluice import host_files
from sluice.config import ConfigError, Options, load_run, markdown_reference, run_config_class, whole_number
from sluice.config.convert import SYSTEMS, Conversion, convert, document, missing_lines, page_table, read, todo_lines

EXIT_FAILURE = 1

TABLE_BEGINS = "<!-- The table is generated: `sluice config docs --system {name} --output {page}`. -->\n"
TABLE_ENDS = "<!-- End of the generated table. -->\n"


def run(argv: list[str]) -> int:
    """Run `docs` or `convert`.

    Returns:
        0 if it is done, 1 if `--check` found a page that is not up to date.

    Raises:
        ConfigError: if the words are wrong, or a file cannot be converted.
    """
    arguments = _parser().parse_args(argv)
    return int(arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = Options(prog="sluice config", description=__doc__)
    actions = parser.add_subparsers(required=True, metavar="ACTION", parser_class=Options)
    docs = actions.add_parser("docs", help="write the reference of all settings, as Markdown")
    docs.add_argument("--output", type=Path, help="file to write; without it the page goes to standard output")
    docs.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the file is not up to date")
    docs.add_argument(
        "--system",
        choices=list(SYSTEMS),
        help="the table of settings of this system instead, in the page `docs/coming-from/SYSTEM.md`",
    )
    docs.set_defaults(run=_docs)
    made = actions.add_parser(
        "convert",
        help="make an rl.toml from a configuration of TRL, verl, PRIME-RL or AReaL",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Make an rl.toml from the configuration of another system. A comment at each setting says where it came from. What\n"
        "you must fill in is listed at the top, what was not converted and why at the end, and both on standard error.\n"
        "No setting of the file is left out of these lists.",
        epilog="""FILE is what the system itself takes:
  trl        YAML or JSON of GRPOConfig and the script's arguments, or a shell script with `--flag value`
  verl       a shell script with `a.b=value` (variables that it sets are put in), or the whole configuration as YAML
  prime-rl   rl.toml
  areal      YAML, with its references ${...}

  sluice config convert run_grpo.sh --from verl --steps 500 --output rl.toml
  sluice config convert gsm8k_grpo.yaml actor.optimizer.lr=1e-5 --from areal --output rl.toml
  sluice rl @ rl.toml --dry-run

docs/coming-from/SYSTEM.md has the table of settings of each.""",
    )
    made.add_argument("file", type=Path, metavar="FILE", help="the configuration")
    made.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    made.add_argument("--from", dest="system", required=True, choices=list(SYSTEMS), help="the system that it is of")
    made.add_argument("--output", type=Path, help="file to write; without it the settings go to standard output")
    made.add_argument(
        "--steps", type=whole_number(1, 10**9), help="batches of the run, where the file has passes over the data"
    )
    made.add_argument(
        "--processes", type=whole_number(1), help="trl: processes that trained (accelerate's num_processes)"
    )
    made.set_defaults(run=_convert)
    return parser


def _docs(arguments: argparse.Namespace) -> int:
    output: Path | None = arguments.output
    page = markdown_reference(run_config_class())
    command = f"sluice config docs --output {output}"
    if arguments.system:
        table = page_table(SYSTEMS[arguments.system])
        command = f"sluice config docs --system {arguments.system} --output {output}"
        page = table if output is None else _with_table(output, arguments.system, table)
    if output is None:
        sys.stdout.write(page)
    elif not arguments.check:
        output.write_text(page, encoding="utf-8")
    elif not output.is_file() or output.read_text(encoding="utf-8") != page:
        print(f"{output} is out of date: run `{command}`", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def _with_table(page: Path, system: str, table: str) -> str:
    """Return a page with a table in place of the one between its two marks.

    Raises:
        ConfigError: if the page cannot be read or lacks the marks.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read {page}: {error.strerror}; the table goes into a page that has its marks"
        ) from error
    begins = TABLE_BEGINS.format(name=system, page=f"docs/coming-from/{system}.md")
    before, mark, rest = text.partition(begins)
    _, end, after = rest.partition(TABLE_ENDS)
    if not mark or not end:
        raise ConfigError(
            f"{page} has no place for the table: put the lines {begins.strip()!r} and {TABLE_ENDS.strip()!r} into it"
        )
    return before + mark + "\n" + table + "\n" + end + after


def _convert(arguments: argparse.Namespace) -> int:
    options = {name: getattr(arguments, name) for name in ("steps", "processes") if getattr(arguments, name)}
    done = convert(SYSTEMS[arguments.system], read(arguments.file, arguments.overrides), options)
    words = [str(arguments.file), *arguments.overrides, "--from", arguments.system]
    words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    text = document(done, shlex.join(["sluice", "config", "convert", *words]))
    refused = check(text, str(arguments.file))
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        host_files.write_whole(arguments.output, text)
    _report(done, str(arguments.output or "the settings"), refused)
    return 0


def check(text: str, source: str) -> str:
    """Load settings as `sluice rl` does; return why it would not start with them yet, empty if it would.

    Raises:
        ConfigError: if they are no settings at all, which is a fault of the file that they were made from.
    """
    from sluice.cli.rl import check_run  # noqa: PLC0415 - the supervisor, which `sluice config docs` does not need

    with tempfile.TemporaryDirectory(prefix="sluice-convert-") as name, contextlib.redirect_stdout(io.StringIO()):
        file = Path(name) / "rl.toml"
        file.write_text(text, encoding="utf-8")
        try:
            load_run(["@", str(file)])
        except ConfigError as error:
            raise ConfigError(
                f"{source} has values that Sluice refuses; change them, and convert again:\n{_plain(error, file)}"
            ) from error
        try:
            load_run(["@", str(file)], check=check_run)
        except ConfigError as error:
            return _plain(error, file)
    return ""


def _plain(error: ConfigError, file: Path) -> str:
    return str(error).replace(f" (from {file})", "").replace(f"{file}: ", "")


def _report(done: Conversion, where: str, refused: str) -> None:
    """Print what was done, what is missing and what to do next, to standard error."""
    counts = f"{len(done.used)} are converted, {len(done.same)} need none here, {len(done.missing)} are not converted"
    unknown = f", {len(done.unresolved)} hold what the file does not say" if done.unresolved else ""
    lines = [f"{done.source.path}: of {len(done.source.leaves)} settings of {done.system.title}, {counts}{unknown}"]
    for title, entries in (("not converted", missing_lines(done)), ("fill in or check", todo_lines(done))):
        lines += [f"{title}:", *(f"  {entry}" for entry in entries)] if entries else []
    if refused:
        lines.append(f"`sluice rl --dry-run` does not accept {where} yet: {refused}")
    else:
        lines.append(f"`sluice rl --dry-run` accepts {where}")
    print("\n".join(lines), file=sys.stderr)
