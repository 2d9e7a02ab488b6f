"""How machines are described, on a command line and in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config import ConfigError
from sluice.plan import Machine, Machines
from sluice.plan.machines import machines_of, text_of

NUMBERS = st.floats(1, 4096).map(lambda value: round(value, 1))
MACHINES = st.builds(
    Machine,
    st.integers(0, 16),
    st.integers(1, 256),
    st.from_regex(r"[A-Z][A-Z0-9]{0,8}", fullmatch=True),
    st.none() | NUMBERS,
    st.none() | NUMBERS,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4x4xH100-80", Machines.alike(4, 4, 32, kind="H100", device_gb=80)),
        ("8xH200-141", Machines.alike(1, 8, 64, kind="H200", device_gb=141)),
        ("2x8", Machines.alike(2, 8, 64)),
        ("8xRTX4090", Machines.alike(1, 8, 64, kind="RTX4090")),
        ("1", Machines.alike(1, 1, 8)),
        ("3x0", Machines.alike(3, 0, 8)),
    ],
)
def test_the_short_form(text: str, expected: Machines) -> None:
    assert machines_of(text) == expected
    assert set(machines_of(text, 5).cores) == {5}


@given(st.lists(MACHINES, min_size=1, max_size=6))
def test_a_file_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, each: list[Machine]) -> None:
    machines = Machines(tuple(each))
    file = tmp_path_factory.mktemp("machines") / "machines.toml"
    file.write_text(text_of(machines))
    assert machines_of(str(file)) == machines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4xH100x4", "No such file or directory: give NODESxDEVICESxKIND-GB such as 4x4xH100-80"),
        ("0x8", "nodes: Input should be greater than or equal to 1"),
        ("9999x8", "nodes: Input should be less than or equal to 4096"),
    ],
)
def test_what_describes_no_machines_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        machines_of(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("machines = []", "machines: List should have at least 1 item"),
        ("[[machines]]\ngpus = 8", r"machines\.0\.gpus: Extra inputs are not permitted"),
        ("[[machines]\n", "Expected"),
        ("[[machines]]\nnodes = 4000\n[[machines]]\nnodes = 200", "these are 4200 machines, more than 4096"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "machines.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        machines_of(str(file))


def test_machines_in_words() -> None:
    assert str(Machines.alike(cores=2)) == "1 machine of 2 cores"
    mixed = Machines((Machine(4, 32, "L40S", 48), Machine(4, 32, "L40S", 48), Machine(8, 1, memory_gb=512)))
    assert str(mixed) == "2 machines of 4 GPUs (L40S, 48 GB) and 32 cores each, 1 machine of 8 GPUs and 1 core, 512 GB"
