"""A weight service whose directory cannot hold anything does not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config import CommonConfig, ConfigError, ServerConfig
from weightsync.app import serving
from weightsync.config import WeightSyncConfig


@pytest.mark.parametrize("kind", ["a file", "read-only"])
async def test_a_directory_that_cannot_be_used_is_named_at_the_start(kind: str, tmp_path: Path) -> None:
    directory = tmp_path / "file" if kind == "a file" else Path("/proc/versions")
    if kind == "a file":
        directory.write_text("in the way")
    config = WeightSyncConfig(server=ServerConfig(port=0), directory=directory)
    with pytest.raises(ConfigError, match=r"weightsync\.directory"):
        async with serving(CommonConfig(), config):
            pass
