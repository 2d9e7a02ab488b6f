"""`sluice objective --case case.json`: the loss and its gradient for numbers that the user gives. This module imports no torch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sluice.config import Command, ConfigError, Options
from sluice.progress import doing

_EXAMPLE = """\
a case:
  {"preset": "grpo", "params": {"eps_high": 0.28, "kl_coef": 0.04},
   "sequences": [{"logp": [-1.0, -0.5], "behaviour_logp": [-1.2, -0.5], "ref_logp": [-1.1, -0.6],
                  "advantage": 1.0, "mask": [1, 1], "group_id": "a"}]}
docs/objectives.md lists presets, parameters and further fields.
"""


def run(argv: list[str]) -> int:
    """Print one JSON object: `loss`, `grad` (d loss / d logp, one list per sequence) and `metrics`."""
    parser = Options(
        prog="sluice objective",
        description="Evaluate an objective on given numbers, in float64, with the code that trains.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--case", required=True, metavar="FILE", help="JSON file with the numbers; - is standard input")
    text = _read(parser.parse_args(argv).case)
    with doing("load PyTorch"):  # `--help` must not import it
        from trainer_svc.objectives.evaluate import Case, evaluate  # noqa: PLC0415

    try:
        result = evaluate(Case.parse(text))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        answer = json.dumps(result, allow_nan=False)
    except ValueError as error:
        raise ConfigError("the result is not finite: numbers of the case are too large to be added up") from error
    sys.stdout.write(answer + "\n")
    return 0


def _read(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the case {name}: {error}") from error


COMMAND = Command("objective", "evaluate an objective and its gradient on given numbers", run)
