"""Which LoRA adapters an engine holds and which has to go: a pure state machine, without clock or I/O."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from sluice.versions import Version
from weightsync.staged import StagedAdapter

__all__ = ["Adapter", "AdapterSlots", "AdaptersFullError", "UnknownAdapterError"]

SPARE = 2
"""Places that names may not take: the policy's version, and the next one, which is loaded before that goes."""


class UnknownAdapterError(ValueError):
    """No adapter is loaded under that name."""


class AdaptersFullError(Exception):
    """Names hold as many adapters as they may."""


@dataclass(eq=False, slots=True)
class Adapter:
    """One adapter in the engine.

    Attributes:
        number: What the engine knows it by; never given twice, so that nothing cached for another is taken for its own.
        staged: Where it lies.
        requests: Requests under way on it.
    """

    number: int
    staged: StagedAdapter
    requests: int = 0

    @property
    def version(self) -> Version:
        """Its policy version, which its tokens carry."""
        return self.staged.version

    @property
    def label(self) -> str:
        """Name for the engine, as unique as the number."""
        return f"v{self.version}-{self.number}"


@dataclass
class AdapterSlots:
    """The adapters of one engine: the policy's newest version, older ones that still have requests, and named ones.

    Attributes:
        capacity: Most adapters at a time, at least two.
        current: What requests without a name run on; None for the weights alone.
        named: What requests by a name run on.
        loaded: All of them, in the order in which they came.
    """

    capacity: int
    current: Adapter | None = None
    named: dict[str, Adapter] = field(default_factory=dict)
    loaded: list[Adapter] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def choose(self, name: str) -> Adapter | None:
        """What a new request runs on; None for the weights alone.

        Raises:
            UnknownAdapterError: if nothing has that name.
        """
        if not name:
            return self.current
        if name not in self.named:
            known = ", ".join(sorted(self.named)) or "none"
            raise UnknownAdapterError(f"no adapter {name!r} is loaded (loaded: {known}); call LoadAdapter first")
        return self.named[name]

    def find(self, staged: StagedAdapter) -> Adapter | None:
        """The same content, if it is loaded already."""
        same = (staged.version, staged.base, staged.digest)
        return next(
            (each for each in self.loaded if (each.version, each.staged.base, each.staged.digest) == same), None
        )

    def check_name(self, name: str) -> None:
        """Whether one more name may hold an adapter.

        Raises:
            AdaptersFullError: if not.
        """
        if name not in self.named and len(self.named) >= self.capacity - SPARE:
            raise AdaptersFullError(
                f"{len(self.named)} names are loaded, and of {self.capacity} adapters {SPARE} are kept for the policy: "
                "unload one, or raise rollout.lora.max_loras"
            )

    def leaving(self) -> list[Adapter]:
        """What has to go before one more is loaded: what nobody needs, and if there is no place yet, the oldest in use."""
        unwanted = [each for each in self.loaded if not self._wanted(each)]
        gone = [each for each in unwanted if not each.requests]
        in_use = [each for each in unwanted if each.requests]
        too_many = len(self.loaded) - len(gone) + 1 - self.capacity
        return gone + in_use[: max(0, too_many)]

    def of_other_bases(self, base: Version) -> list[Adapter]:
        """What does not fit other weights."""
        return [each for each in self.loaded if each.staged.base != base]

    def add(self, staged: StagedAdapter) -> Adapter:
        """Note one more."""
        adapter = Adapter(next(self._numbers), staged)
        self.loaded.append(adapter)
        return adapter

    def remove(self, adapter: Adapter) -> None:
        """Forget one, and the names that it had."""
        self.loaded.remove(adapter)
        self.named = {name: each for name, each in self.named.items() if each is not adapter}
        if self.current is adapter:
            self.current = None

    def _wanted(self, adapter: Adapter) -> bool:
        return adapter is self.current or any(adapter is each for each in self.named.values())
