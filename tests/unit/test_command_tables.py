"""The tables that commands print have all of their text, wherever they are printed."""

import pytest

from orchestrator_svc.commands.table import table_lines


@pytest.mark.parametrize("variables", [{}, {"TERM": "dumb", "FORCE_COLOR": "1"}, {"COLUMNS": "20"}])
def test_no_cell_is_cut_or_wrapped(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert table_lines([["a" * 90, "b"], ["c", "d" * 90]]) == [f"{'a' * 90}  b", f"c{' ' * 91}{'d' * 90}"]


def test_a_separator_of_lines_is_a_space() -> None:
    assert table_lines([["one\u2028two", "three\nfour"]]) == ["one two  three four"]


def test_numbers_stand_at_the_right() -> None:
    assert table_lines([["a", "1"], ["b", "100"]], numbers={1}) == ["a    1", "b  100"]
