"""Looks all the time, while faults happen, for a version that is half there, unknown, or wrong by a bit."""

from __future__ import annotations

import threading
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from sluice.versions import BASE, Version
from weight_faults.process import GoneError, Program
from weight_faults.versions import digest, expected_digest
from weightsync.format.manifest import parse_version_directory

__all__ = ["Observer"]

_PERIOD_S = 0.01


class Observer:
    """Asks the engine what it answers with, and loads each version's directory as soon as it is in sight.

    Args:
        engine: The program to ask; it may die and come back.
        stores: Directories of versions.

    Attributes:
        served: Versions that the engine answered with, each checked bit for bit.
        loaded: Version directories that were loaded and checked.
        wrong: What should never have been seen.
    """

    def __init__(self, engine: Program, stores: list[Path]) -> None:
        self._engine, self._stores = engine, stores
        self.served: list[Version] = []
        self.loaded: set[Path] = set()
        self.wrong: list[str] = []
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._observe, daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    def await_served(self, version: Version, deadline_s: float) -> None:
        """Return when the engine answers with a version.

        Raises:
            TimeoutError: if it does not in time.
        """
        with self._news:
            if not self._news.wait_for(lambda: bool(self.served) and self.served[-1] == version, deadline_s):
                serves = self.served[-1] if self.served else "nothing"
                raise TimeoutError(f"the engine serves {serves} and not {version} after {deadline_s:g} s")

    def served_after(self, version: Version, within_s: float) -> Version | None:
        """Wait until the engine answers with a later version, and return that; None if it does not in time."""
        with self._news:
            found = self._news.wait_for(lambda: bool(self.served) and self.served[-1] > version, within_s)
            return self.served[-1] if found else None

    def await_loaded(self, version: Version, deadline_s: float) -> None:
        """Return when every store shows a version as a directory of the right bits.

        Raises:
            TimeoutError: if one does not in time.
        """
        wanted = {store / f"v{version}" for store in self._stores}
        with self._news:
            if not self._news.wait_for(lambda: wanted <= self.loaded, deadline_s):
                raise TimeoutError(f"{wanted - self.loaded} did not come into sight within {deadline_s:g} s")

    def _observe(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._ask_engine()
            for store in self._stores:
                self._load_new(store)

    def _ask_engine(self) -> None:
        try:
            answer = self._engine.ask("probe", 5.0)
        except (GoneError, TimeoutError):
            return
        if "paused" in answer:
            return
        version = Version.parse(answer["version"])
        if answer["digest"] != expected_digest(version):
            self.wrong.append(f"the engine answers as {version} with other bits")
        with self._news:
            if not self.served or self.served[-1] != version:
                if version == BASE and not self.served:
                    return
                self.served.append(version)
            self._news.notify_all()

    def _load_new(self, store: Path) -> None:
        if not store.is_dir():
            return
        for directory in store.iterdir():
            version = parse_version_directory(directory.name)
            if version is None or directory in self.loaded:
                continue
            try:
                right = digest(load_file(directory / "model.safetensors")) == expected_digest(Version(*version))
            except (OSError, SafetensorError) as error:
                if not directory.exists():  # retention was faster
                    continue
                self.wrong.append(f"{directory} is in sight and cannot be loaded: {error}")
                right = False
            if not right:
                self.wrong.append(f"{directory} is in sight with other bits")
            with self._news:
                self.loaded.add(directory)
                self._news.notify_all()
