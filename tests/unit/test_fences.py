"""Which program is taken out of a completion."""

from __future__ import annotations

import pytest

from sluice.environments.rewards import last_program

F = "`" * 3
GOOD = "def double(x):\n    return 2 * x"


@pytest.mark.parametrize(
    "completion",
    [
        GOOD,
        f"Here:\n{F}python\n{GOOD}\n{F}\nDone.",
        f"Here:\n{F}python3\n{GOOD}\n{F}",
        f"Here:\n{F}Python\n{GOOD}\n{F}",
        f"Here:\n{F} python\n{GOOD}\n{F}",
        f'Here:\n{F}python title="a.py"\n{GOOD}\n{F}',
        f"Here:\n{F}{{.python}}\n{GOOD}\n{F}",
        f"Here:\n{F}\n{GOOD}\n{F}",
        f"Here:\n~~~python\n{GOOD}\n~~~",
        f"Here:\n{F}`python\n{GOOD}\n{F}`",
        f"Here:\r\n{F}python\r\n{GOOD}\r\n{F}\r\n".replace("\n    ", "\r\n    "),
        f"1. so:\n     {F}python\n     def double(x):\n         return 2 * x\n     {F}",
        f"I write it.\n{F}python\n{GOOD}",
        f"{F}python\nwrong\n{F}\nNo:\n{F}python\n{GOOD}\n{F}",
        f"{F}python\n{GOOD}\n{F}\nIt prints:\n{F}\n6\n{F}",
        f"{F}python\n{GOOD}\n{F}\nIt prints:\n{F}text\n6\n{F}",
        f"{F}python\n{GOOD}\n{F}\nSo:\n{F}pycon\n>>> double(3)\n6\n{F}",
        f"{F}python\n{GOOD}\n{F}\n{F}python\n{F}",
        f"{GOOD}\n{F}",
        f"{GOOD}\n{F}\n",
    ],
)
def test_a_program_is_found_however_its_fence_is_written(completion: str) -> None:
    assert last_program(completion).rstrip() == GOOD


def test_fences_inside_of_a_program_are_a_part_of_it() -> None:
    code = f"text = '''{F}'''\ndef f():\n    \"\"\"Doubles.\n\n    {F}python\n    f()\n    {F}\n    \"\"\""
    assert last_program(f"{F}python\n{code}\n{F}") == code


@pytest.mark.parametrize("language", ["cpp", "json", "text", "bash"])
def test_blocks_in_other_languages_alone_are_no_program(language: str) -> None:
    assert not last_program(f"{F}{language}\nx = 1\n{F}")
