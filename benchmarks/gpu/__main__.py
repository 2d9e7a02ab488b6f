"""`python -m benchmarks.gpu`: the same as `sluice bench gpu`, from a checkout that is not installed."""

from __future__ import annotations

import sys

from benchmarks import run
from sluice.errors import ConfigError

try:
    sys.exit(run(["gpu", *sys.argv[1:]]))
except ConfigError as error:
    sys.exit(f"error: {error}")
