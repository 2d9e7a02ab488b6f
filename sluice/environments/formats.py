r"""Formats of data sets. A format says how a row becomes a question and an answer, which reward judges it, and where the data set is.

The environment `question_answer` takes one by name (``format = "gsm8k"``), from a file of yours (``format = "my/formats.py:read"``, a
function of a row, or a `Format`), or from an installed package that names it among its entry points ``sluice.formats``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from sluice.environments.datasets import Row
from sluice.errors import ConfigError
from sluice.loading import load_attribute

GROUP = "sluice.formats"
"""Entry points of this group are formats by their names."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of data sets.

    Attributes:
        read: Returns ``question`` (a text or messages), ``answer`` and, if the row has one, ``id``. None leaves the row out. For a row
            that does not fit, it raises a ValueError or KeyError that says why.
        reward: The reward if the settings name none; see `sluice.environments.rewards`.
        dataset: Hub id of the data set, if the settings name none.
        name: Its configuration on the hub.
    """

    read: Callable[[Row], Mapping[str, Any] | None]
    reward: str = "exact"
    dataset: str = ""
    name: str | None = None


def read_gsm8k(row: Row) -> Mapping[str, Any]:
    """Return question and number of a row of GSM8K: the ``answer`` ends with ``#### 1,234``."""
    before, mark, number = str(row["answer"]).rpartition("####")
    number = number.strip().replace(",", "")
    if not mark or not number:
        raise ValueError(f"the answer {before[-40:] or number!r} does not end with #### and a number")
    return {"question": row["question"], "answer": number}


def read_hendrycks_math(row: Row) -> Mapping[str, Any]:
    r"""Return problem and result of a row of Hendrycks' MATH: the ``solution`` has the result in its last ``\boxed{}``."""
    return {"question": row["problem"], "answer": last_boxed(str(row["solution"]))}


def last_boxed(text: str) -> str:
    r"""Return the last ``\boxed{...}`` of a text, with all braces inside it; also ``\fbox{...}`` and ``\boxed 5``.

    Raises:
        ValueError: if there is none, or its braces do not end.
    """
    begin = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if begin < 0:
        raise ValueError(f"the solution {text[-40:]!r} has no \\boxed{{}}")
    inside = text[begin:].partition("ox")[2].removeprefix("ed")
    if not inside.startswith("{"):
        word = inside.split("$")[0].split()
        if not word:
            raise ValueError(f"the solution {text[-40:]!r} has an empty \\boxed")
        return f"\\boxed{{{word[0]}}}"
    depth = 0
    for index, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0) if index == 0 or inside[index - 1] != "\\" else 0
        if not depth:
            return f"\\boxed{inside[: index + 1]}"
    raise ValueError(f"the braces of {text[begin : begin + 40]!r} do not end")


FORMATS: Mapping[str, Format] = {
    "gsm8k": Format(read_gsm8k, "gsm8k", "openai/gsm8k", "main"),
    "hendrycks_math": Format(read_hendrycks_math, "math", "DigitalLearningGmbH/MATH-lighteval"),
}
"""Formats that come with Sluice, by their names."""


def find_format(name: str) -> Format:
    """Return a format by its name, or from a file or module.

    Raises:
        ConfigError: if there is none.
    """
    if ":" in name:
        found = load_attribute(name, "format")
    elif name in FORMATS:
        return FORMATS[name]
    else:
        points = {each.name: each for each in entry_points(group=GROUP)}
        if name not in points:
            known = ", ".join(sorted({*FORMATS, *points}))
            raise ConfigError(
                f"there is no format {name!r}; there are {known}, and functions as path/to/file.py:function"
            )
        found = points[name].load()
    if isinstance(found, Format):
        return found
    if not callable(found):
        raise ConfigError(f"the format {name} is neither a function of a row nor a sluice.environments.formats.Format")
    return Format(found)
