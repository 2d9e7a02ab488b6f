"""Which LoRA adapters an engine holds, and which one to unload next: a pure state machine, without clock or I/O."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from sluice.versions import Version
from weightsync.staged import StagedAdapter

__all__ = ["Adapter", "AdapterSlots", "AdaptersFullError", "UnknownAdapterError"]

SPARE = 2
"""Places that are kept for the policy: its version, and the next one, which is loaded before the first is unloaded."""


class UnknownAdapterError(ValueError):
    """No adapter is loaded under that name."""


class AdaptersFullError(Exception):
    """No more adapters can have names."""


@dataclass(eq=False, slots=True)
class Adapter:
    """One loaded adapter.

    Attributes:
        number: Its id in the engine. Ids are never reused, so that no cache entry of another adapter is read for it.
        staged: Its files.
        requests: Number of requests in progress that use it.
    """

    number: int
    staged: StagedAdapter
    requests: int = 0

    @property
    def version(self) -> Version:
        """Return its policy version, which its tokens carry."""
        return self.staged.version

    @property
    def label(self) -> str:
        """Return its name in the engine, as unique as its number."""
        return f"v{self.version}-{self.number}"


@dataclass
class AdapterSlots:
    """The adapters of one engine: the policy's newest version, older ones that still have requests, and named ones.

    Attributes:
        capacity: Maximum number of adapters, at least two.
        current: The adapter of requests that name none; None for the weights alone.
        named: The adapter for each name.
        loaded: All adapters, in the order in which they were loaded.
    """

    capacity: int
    current: Adapter | None = None
    named: dict[str, Adapter] = field(default_factory=dict)
    loaded: list[Adapter] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def choose(self, name: str) -> Adapter | None:
        """Return the adapter for a new request; None for the weights alone.

        Raises:
            UnknownAdapterError: if no adapter has that name.
        """
        if not name:
            return self.current
        if name not in self.named:
            known = ", ".join(sorted(self.named)) or "none"
            raise UnknownAdapterError(f"no adapter {name!r} is loaded (loaded: {known}); call LoadAdapter first")
        return self.named[name]

    def find(self, staged: StagedAdapter) -> Adapter | None:
        """Return the adapter with the same content if it is loaded."""
        same = (staged.version, staged.base, staged.digest)
        return next(
            (each for each in self.loaded if (each.version, each.staged.base, each.staged.digest) == same), None
        )

    def check_name(self, name: str) -> None:
        """Check that one more adapter can have a name.

        Raises:
            AdaptersFullError: if it cannot.
        """
        if name not in self.named and len(self.named) >= self.capacity - SPARE:
            raise AdaptersFullError(
                f"{len(self.named)} names are loaded, and of {self.capacity} adapters {SPARE} are kept for the policy: "
                "unload one, or raise rollout.lora.max_loras"
            )

    def leaving(self) -> list[Adapter]:
        """Return the adapters to unload before one more is loaded: unused ones, and if there is still no room, the oldest in use."""
        unwanted = [each for each in self.loaded if not self._wanted(each)]
        gone = [each for each in unwanted if not each.requests]
        in_use = [each for each in unwanted if each.requests]
        too_many = len(self.loaded) - len(gone) + 1 - self.capacity
        return gone + in_use[: max(0, too_many)]

    def of_other_bases(self, base: Version) -> list[Adapter]:
        """Return the adapters that do not fit the weights of a version."""
        return [each for each in self.loaded if each.staged.base != base]

    def add(self, staged: StagedAdapter) -> Adapter:
        """Add an adapter."""
        adapter = Adapter(next(self._numbers), staged)
        self.loaded.append(adapter)
        return adapter

    def remove(self, adapter: Adapter) -> None:
        """Remove an adapter and its names."""
        self.loaded.remove(adapter)
        self.named = {name: each for name, each in self.named.items() if each is not adapter}
        if self.current is adapter:
            self.current = None

    def _wanted(self, adapter: Adapter) -> bool:
        return adapter is self.current or any(adapter is each for each in self.named.values())
