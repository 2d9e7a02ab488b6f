"""Unmodified clients through the real gateway: every cell of the table in docs/gateway.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from client_table import CLIENTS, failures, installed, markdown, table

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.ecosystem, pytest.mark.slow, pytest.mark.timeout(1800)]


async def test_every_client_plays_every_case_that_it_has(tmp_path: Path) -> None:
    clients = [client for client in CLIENTS if installed(client)]
    if not clients:
        pytest.skip("no client is installed: `make install-ecosystem` installs them")
    cells = await table(clients, tmp_path)
    assert not failures(cells)
    page = (ROOT / "docs/gateway.md").read_text()
    stale = [line for line in markdown(cells).splitlines() if line not in page]
    assert not stale, "run `make client-table`, and put what it prints into docs/gateway.md"
