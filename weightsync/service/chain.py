"""Chains of versions: which forms lead to a version, and which of them must stay. Pure: no clock, no I/O.

A version is reached from its own dense form, or from an older version's dense form through the deltas that follow it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from sluice.versions import Version


class Form(Enum):
    """The forms in which a version travels."""

    DENSE = "dense"
    DELTA = "delta"
    ADAPTER = "adapter"


class VersionForm(NamedTuple):
    """One form on the way to a version."""

    version: Version
    form: Form


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of one version that a service holds. Sizes are bytes on disk, None if it does not hold the form.

    Attributes:
        base: Version that the delta or adapter is based on, always an older one.
        copy_bytes: Size of a dense copy of the model.
        damaged: Whether applying the delta gave other bytes than announced.
    """

    digest: str
    dense_bytes: int | None = None
    delta_bytes: int | None = None
    adapter_bytes: int | None = None
    base: Version | None = None
    copy_bytes: int = 0
    damaged: bool = False

    @property
    def size_bytes(self) -> int:
        """Return the bytes on disk of all forms."""
        return (self.dense_bytes or 0) + (self.delta_bytes or 0) + (self.adapter_bytes or 0)

    @property
    def is_adapter(self) -> bool:
        """Return whether it is a LoRA adapter."""
        return self.adapter_bytes is not None

    @property
    def stands_on_base(self) -> bool:
        """Return whether the version is lost without its base."""
        return self.base is not None and self.dense_bytes is None and not self.damaged


Versions = Mapping[Version, Forms]


class Kept(NamedTuple):
    """The versions that must stay visible, and the subset whose dense form must stay."""

    versions: set[Version]
    dense: set[Version]


def newest(versions: Versions) -> Version | None:
    """Return the newest version."""
    return max(versions, default=None)


def retired(versions: Versions) -> set[Version]:
    """Return the versions of older epochs with numbers above the first of the newest epoch: the resumed trainer replaces them."""
    latest = newest(versions)
    if latest is None:
        return set()
    resumed_at = min(version.number for version in versions if version.epoch == latest.epoch)
    return {version for version in versions if version.epoch < latest.epoch and version.number > resumed_at}


def newest_dense(versions: Versions) -> Version | None:
    """Return the newest version that has a dense form."""
    return max((version for version, forms in versions.items() if forms.dense_bytes is not None), default=None)


def newest_model(versions: Versions) -> Version | None:
    """Return the newest version that is no adapter."""
    return max((version for version, forms in versions.items() if not forms.is_adapter), default=None)


def next_dense(versions: Versions) -> list[VersionForm] | None:
    """Return the way to the newest version that can be reached, if it has no dense form yet.

    None if there is nothing to make.
    """
    for version in sorted(versions, reverse=True):
        if versions[version].dense_bytes is not None:
            return None
        path = None if versions[version].is_adapter else find_path(versions, version)
        if path is not None:
            return path
    return None


def find_path(
    versions: Versions, target: Version, held: Version | None = None, *, dense: Collection[Version] | None = None
) -> list[VersionForm] | None:
    """Return the way with the fewest bytes to a visible version.

    Args:
        versions: The versions that exist.
        target: The version.
        held: The version that the receiver holds already.
        dense: Dense forms that may be used; None: all.

    Returns:
        The forms to apply, in order: empty if the receiver holds the version. None if no chain leads to it.
    """
    if target == held:
        return []
    if versions[target].is_adapter:
        return [VersionForm(target, Form.ADAPTER)]
    best: list[VersionForm] | None = None
    best_bytes = float("inf")
    chain: list[VersionForm] = []
    chain_bytes = 0
    for version, forms in _towards_the_past(versions, target):
        usable = forms.dense_bytes is not None and (dense is None or version in dense)
        if usable and forms.dense_bytes is not None and chain_bytes + forms.dense_bytes < best_bytes:
            best, best_bytes = [VersionForm(version, Form.DENSE), *reversed(chain)], chain_bytes + forms.dense_bytes
        if forms.delta_bytes is None or forms.damaged:
            break
        chain.append(VersionForm(version, Form.DELTA))
        chain_bytes += forms.delta_bytes
        if forms.base == held and chain_bytes < best_bytes:
            return list(reversed(chain))
    return best


def _towards_the_past(versions: Versions, start: Version | None) -> Iterator[tuple[Version, Forms]]:
    while start is not None and start in versions:
        yield start, versions[start]
        start = versions[start].base


def is_reachable(versions: Versions, version: Version) -> bool:
    """Return whether there is a way to the version for a receiver that holds nothing."""
    return version in versions and find_path(versions, version) is not None


def damaged_on_the_way(versions: Versions, version: Version) -> Version | None:
    """Return the version whose damaged delta blocks the way; None if there is none."""
    for each, forms in _towards_the_past(versions, version):
        if forms.dense_bytes is not None:
            return None
        if forms.damaged:
            return each
    return None


def delta_chain(versions: Versions, held: Version, target: Version) -> list[Version] | None:
    """Return the versions whose deltas lead from one version to another, oldest first; None if there is no such chain."""
    chain: list[Version] = []
    at = target
    while at != held:
        forms = versions.get(at)
        if forms is None or forms.delta_bytes is None or forms.damaged or forms.base is None:
            return None
        chain.append(at)
        at = forms.base
    return chain[::-1]


def chain_starts(versions: Versions, every: int) -> set[Version]:
    """Return the versions whose dense forms chains start from.

    These are the versions that were pushed whole. Of the others, a version starts a chain if it is `every` versions after the
    previous start, or if the deltas since then outgrew half a dense copy.
    """
    chosen: set[Version] = set()
    for version in sorted(version for version, forms in versions.items() if forms.dense_bytes is not None):
        steps = grown = 0
        for at, forms in _towards_the_past(versions, version):
            if at in chosen and steps < every and 2 * grown <= versions[version].copy_bytes:
                break
            if forms.delta_bytes is None or at in chosen:
                chosen.add(version)
                break
            steps, grown = steps + 1, grown + forms.delta_bytes
        else:
            chosen.add(version)
    return chosen


def keep(
    versions: Versions, wanted: Iterable[Version], held: Collection[Version], served: Iterable[Version], every: int
) -> Kept:
    """Return the versions and dense forms that must stay. The rest can be removed.

    Args:
        versions: The versions that exist.
        wanted: Versions that must stay reachable.
        held: Versions that are being transferred; every form of them must stay.
        served: Versions that live replicas have. The deltas from these versions to the newest stay while they are smaller
            than a dense copy.
        every: See `chain_starts`.
    """
    latest = newest_dense(versions)
    dense = {version for version in held if version in versions and versions[version].dense_bytes is not None}
    if latest is not None:
        dense.add(latest)
    sources = chain_starts(versions, every) | dense
    kept = Kept(set(dense), dense)
    for version in {*wanted, *held, *served}:
        _keep_reachable(versions, version, sources, kept)
    target = newest_model(versions)
    for version in served:
        chain = delta_chain(versions, version, target) if target is not None and version in kept.versions else None
        if chain and sum(versions[each].delta_bytes or 0 for each in chain) < versions[chain[-1]].copy_bytes:
            kept.versions.update(chain)
    return kept


def _keep_reachable(versions: Versions, version: Version, sources: set[Version], kept: Kept) -> None:
    if version not in versions:
        return
    kept.versions.add(version)
    forms = versions[version]
    if forms.is_adapter:
        if forms.base is not None:
            _keep_reachable(versions, forms.base, sources, kept)
        return
    for step in find_path(versions, version, dense=sources) or find_path(versions, version) or ():
        kept.versions.add(step.version)
        if step.form is Form.DENSE:
            kept.dense.add(step.version)


def removal_order(versions: Versions, doomed: Collection[Version]) -> list[Version]:
    """Return the doomed versions, oldest first, but each version only after the versions that are lost without it."""
    children: defaultdict[Version, list[Version]] = defaultdict(list)
    for version in sorted(doomed):
        base = versions[version].base
        if base is not None and versions[version].stands_on_base:
            children[base].append(version)
    order: dict[Version, None] = {}
    for version in sorted(doomed):
        waiting = [version]
        while waiting:
            before = [each for each in children[waiting[-1]] if each not in order]
            if before:
                waiting.extend(before)
            else:
                order.setdefault(waiting.pop())
    return list(order)
