"""Unmodified clients through the real gateway: each plays one case of the table in docs/gateway.md; `make client-table` plays all."""

from __future__ import annotations

from pathlib import Path

import pytest
from client_table import CLIENTS, all_cases, failures, installed, read_table, table

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.ecosystem, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_every_client_is_installed() -> None:
    """Fails where `make install-ecosystem` has not run, or left one out."""
    assert [client.name for client in CLIENTS if not installed(client)] == []


async def test_every_client_plays_a_case_as_the_page_says(tmp_path: Path) -> None:
    cases = {}
    for number, client in enumerate(CLIENTS):
        able = all_cases(client)
        cases[client] = [able[number % len(able)]]  # neighbours play different cases
    cells = await table(cases, tmp_path)
    assert not failures(cells)
    page = read_table((ROOT / "docs/gateway.md").read_text())
    for client, row in cells.items():
        for case, cell in row.items():
            assert page[client.name, client.route][case] == cell, (
                "run `make client-table`, and put it into docs/gateway.md"
            )
