"""What `sluice config convert` does, and the tables of settings in the pages `docs/coming-from/SYSTEM.md`."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import sys
import tempfile
from pathlib import Path

from sluice import host_files
from sluice.config import ConfigError, load_run, whole_number
from sluice_convert import SYSTEMS
from sluice_convert.files import read
from sluice_convert.table import Conversion, convert
from sluice_convert.write import document, missing_lines, page_table, todo_lines

TABLE_BEGINS = "<!-- The table is generated: `sluice config docs --system {name} --output {page}`. -->\n"
TABLE_ENDS = "<!-- End of the generated table. -->\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words of `sluice config convert`."""
    parser.description = """Make an rl.toml from the configuration of another system. A comment at each setting says where it came from. What
you must fill in is listed at the top, what was not converted and why at the end, and both on standard error.
No setting of the file is left out of these lists."""
    parser.epilog = """FILE is what the system itself takes:
  trl        YAML or JSON of GRPOConfig and the script's arguments, or a shell script with `--flag value`
  verl       a shell script with `a.b=value` (variables that it sets are put in), or the whole configuration as YAML
  prime-rl   rl.toml
  areal      YAML, with its references ${...}

  sluice config convert run_grpo.sh --from verl --steps 500 --output rl.toml
  sluice config convert gsm8k_grpo.yaml actor.optimizer.lr=1e-5 --from areal --output rl.toml
  sluice rl @ rl.toml --dry-run

docs/coming-from/SYSTEM.md has the table of settings of each."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the configuration")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    parser.add_argument("--from", dest="system", required=True, choices=list(SYSTEMS), help="the system that it is of")
    parser.add_argument("--output", type=Path, help="file to write; without it the settings go to standard output")
    parser.add_argument(
        "--steps", type=whole_number(1, 10**9), help="batches of the run, where the file has passes over the data"
    )
    parser.add_argument(
        "--processes", type=whole_number(1), help="trl: processes that trained (accelerate's num_processes)"
    )


def page(system: str, output: Path | None) -> str:
    """Return the table of settings of a system, or the page `output` with it in place of the one between its two marks.

    Raises:
        ConfigError: if the page cannot be read or lacks the marks.
    """
    table = page_table(SYSTEMS[system])
    return table if output is None else _with_table(output, system, table)


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


def run(arguments: argparse.Namespace) -> int:
    """Convert a file, and print what became of its settings.

    Raises:
        ConfigError: if it cannot be converted.
    """
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
    from sluice.cli.rl import check_run  # noqa: PLC0415 - the supervisor, which the table of a page does not need

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
