"""How a side hears when to update and tells what it measured: one JSON object a line, over its standard streams."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

__all__ = ["Orders"]

UPDATE = "update"


class Orders:
    """The side's end. What libraries print from now on goes to the log instead of the pipe."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        sys.stdout.flush()
        os.dup2(2, 1)

    def wait(self) -> bool:
        """Block until the next order; False when there is none to come."""
        return sys.stdin.readline().strip() == UPDATE

    def answer(self, **measured: Any) -> None:  # noqa: ANN401 - numbers and strings
        """Send one line."""
        self._answers.write(json.dumps(measured) + "\n")
