"""The table of crash points names every durable write of the code; small files survive a kill at theirs."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from weight_faults.cells import CELLS

from sluice.config.schema import SecurityConfig
from sluice.host_files import whole_directory, write_whole
from sluice.rpc.call_log import CallLog
from sluice.rpc.principals import replace_private

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/crash-points.md"
PACKAGES = ("sluice", "sluice_convert", "orchestrator_svc", "trainer_svc", "rollout_svc", "weightsync")

OF_OS = frozenset({"fsync", "fdatasync", "rename", "replace", "link"})
OURS = frozenset({"write_whole", "whole_directory", "write_text", "write_bytes", "commit"})

AT_A_TERMINAL = frozenset(
    {
        "sluice/certificates.py:use_authority",
        "sluice/cli/config.py:_docs",
        "sluice/cli/fetch_model.py:fetch_model",
        "sluice/cli/init_model.py:init_model",
        "sluice/cli/quickstart.py:make_room",
        "sluice/cli/quickstart.py:write_report",
        "sluice/cli/ray.py:_probe",
        "orchestrator_svc/commands/eval/command.py:_write",
        "orchestrator_svc/commands/export.py:run",
        "orchestrator_svc/commands/rescore.py:run",
        "orchestrator_svc/commands/synthesize.py:run",
        "sluice_convert/command.py:check",
        "sluice_convert/command.py:run",
        "trainer_svc/engine/lora.py:merge_adapter",
    }
)
"""Writes of commands that a user starts again. The page says so."""


def writes(path: Path) -> Iterator[str]:
    """Yield ``file:function`` for every function that makes a file durable or gives it its name."""

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if isinstance(child, ast.Call) and makes_durable(child):
                yield f"{path.relative_to(ROOT)}:{'.'.join(names)}"
            yield from visit(child, (*names, child.name) if named else names)

    text = path.read_text()
    if any(name in text for name in OF_OS | OURS):  # most files have none of the names, and to visit a tree takes long
        yield from visit(ast.parse(text), ())


def makes_durable(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id in OURS
    if not isinstance(function, ast.Attribute):
        return False
    if isinstance(function.value, ast.Name) and function.value.id == "os":
        return function.attr in OF_OS
    return function.attr in OURS or (function.attr in {"rename", "replace"} and len(call.args) == 1)


def rows() -> list[tuple[str, str]]:
    """Return the columns "code" and "killed there by"."""
    lines = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [(line[3], line[4]) for line in lines[2:]]


def test_the_page_names_every_durable_write_of_the_code() -> None:
    found = {each for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) for each in writes(path)}
    named = {each for code, _ in rows() for each in re.findall("`([^`]+:[^`]+)`", code)}
    assert found - named == AT_A_TERMINAL, "add a row with what kills a process there"
    assert named <= found, "no such write is left: remove it from the page"


def test_every_test_and_cell_that_the_page_names_exists() -> None:
    cells = {cell.id for cell in CELLS}
    for code, killed_by in rows():
        named = re.findall("`([^`]+)`", killed_by)
        assert named, f"nothing kills a process at {code}"
        for each in named:
            file, _, test = each.partition("::")
            if test:
                assert re.search(rf"^(async )?(def )?{test}\b", (ROOT / file).read_text(), re.MULTILINE), each
            else:
                assert each in cells


class Killed(BaseException):
    """The process was killed."""


def dies(*_: object, **__: object) -> None:
    raise Killed


@pytest.mark.parametrize("write", [write_whole, lambda path, text: replace_private(path, text.encode())])
def test_a_small_file_that_is_replaced_is_the_old_one_or_the_new_one(
    write: Callable[[Path, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write(path, "old")
    with monkeypatch.context() as killed:
        for name in ("rename", "replace", "unlink"):
            killed.setattr(Path, name, dies)
        with pytest.raises(Killed):
            write(path, "new")
    assert path.read_text() == "old"
    write(path, "newer")
    assert path.read_text() == "newer"


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"

    def make() -> None:
        with whole_directory(target) as staging:
            (staging / "weights").write_text("1")

    with monkeypatch.context() as killed:
        killed.setattr(Path, "rename", dies)
        killed.setattr("shutil.rmtree", dies)  # a killed process removes nothing
        with pytest.raises(Killed):
            make()
    assert not target.exists()
    make()
    assert [each.name for each in target.iterdir()] == ["weights"]


@pytest.mark.parametrize("survived", [0, 1, 2])
def test_a_log_of_calls_whose_rotation_was_killed_loses_no_line(
    survived: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CallLog(tmp_path / "calls.jsonl", SecurityConfig(call_log_mb=1, call_log_files=3))
    lines = [f"{number}".encode().ljust(600_000) + b"\n" for number in range(4)]
    for line in lines[:3]:
        log._append(line)
    renames, rename = [], Path.rename

    def counted(path: Path, target: Path) -> Path:
        if path.exists() and len(renames) == survived:
            raise Killed
        renamed = rename(path, target)
        renames.append(path)
        return renamed

    with monkeypatch.context() as killed:
        killed.setattr(Path, "rename", counted)
        with pytest.raises(Killed):
            log._append(lines[3])
    log._append(lines[3])
    kept = sorted(
        each for path in tmp_path.glob("calls*.jsonl") for each in path.read_bytes().splitlines(keepends=True)
    )
    assert kept == lines
