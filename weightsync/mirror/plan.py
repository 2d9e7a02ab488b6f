"""Which forms to send to a mirror, to take from it, and to remove from it. Pure: no clock, no I/O.

The versions of the mirror and of a service are described in the same way, so that chains of deltas, anchors and retention follow
the rules of `weightsync.service.chain` on both sides.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from sluice.versions import BASE, Version
from weightsync.service import chain
from weightsync.service.chain import Form, Forms, VersionForm, Versions


def next_upload(local: Versions, mirrored: Versions, anchor_every: int) -> VersionForm | None:
    """Return the form that the mirror needs next; None if the service has no form now that the mirror needs.

    First come the forms that lead to the newest version: deltas while their chain is unbroken and smaller than a dense form.
    A dense version or an adapter that a newer one replaced while it waited is left out. Then comes a dense form from which
    shorter chains start, once the service has one.

    Args:
        local: The versions that the service holds.
        mirrored: The versions that the mirror holds.
        anchor_every: Most deltas between two dense forms in the mirror.
    """
    newest = max(local, default=None)
    if newest is None:
        return None
    for step in _way_to_newest(local, mirrored, newest):
        if not has(mirrored, step):
            return step
    return _next_anchor(local, mirrored, anchor_every)


def has(versions: Versions, step: VersionForm) -> bool:
    """Return whether a form is there."""
    forms = versions.get(step.version)
    return forms is not None and _bytes_of(forms, step.form) is not None


def without(versions: Versions, damaged: Collection[VersionForm]) -> Versions:
    """Return the versions without the damaged forms, and without versions that have no form left."""
    left = dict(versions)
    for step in damaged:
        if (forms := left.get(step.version)) is None:
            continue
        match step.form:
            case Form.DENSE:
                forms = replace(forms, dense_bytes=None)
            case Form.DELTA:
                forms = replace(forms, delta_bytes=None)
            case Form.ADAPTER:
                forms = replace(forms, adapter_bytes=None)
        left[step.version] = forms
    return {
        version: forms for version, forms in left.items() if any(_bytes_of(forms, form) is not None for form in Form)
    }


def _bytes_of(forms: Forms, form: Form) -> int | None:
    return {Form.DENSE: forms.dense_bytes, Form.DELTA: forms.delta_bytes, Form.ADAPTER: forms.adapter_bytes}[form]


def _way_to_newest(local: Versions, mirrored: Versions, target: Version) -> list[VersionForm]:
    if chain.is_reachable(mirrored, target):
        return []
    forms = local[target]
    if forms.is_adapter:
        if forms.base is None or forms.base == BASE or forms.base in mirrored:
            return [VersionForm(target, Form.ADAPTER)]
        before = _way_to_newest(local, mirrored, forms.base) if forms.base in local else []
        return [*before, VersionForm(target, Form.ADAPTER)] if before else []
    return chain.find_path(local, target, _newest_reachable(mirrored)) or []


def _newest_reachable(versions: Versions) -> Version | None:
    models = (version for version, forms in versions.items() if not forms.is_adapter)
    return max((version for version in models if chain.is_reachable(versions, version)), default=None)


def _next_anchor(local: Versions, mirrored: Versions, anchor_every: int) -> VersionForm | None:
    """Return a dense form that the service has and that the mirror needs because its chain to that version has grown long."""
    for version in sorted(local, reverse=True):
        if local[version].dense_bytes is None or version not in mirrored:
            continue
        path = chain.find_path(mirrored, version) or []
        deltas = [mirrored[step.version].delta_bytes or 0 for step in path if step.form is Form.DELTA]
        if len(deltas) >= anchor_every or 2 * sum(deltas) > local[version].copy_bytes:
            return VersionForm(version, Form.DENSE)
        return None
    return None


def surplus(mirrored: Versions, keep: int, anchor_every: int, pins: Collection[Version]) -> list[VersionForm]:
    """Return the forms that the mirror no longer needs, in an order in which they can be removed.

    The newest `keep` versions that are not retired and the pinned versions stay, with all versions through which these are reached.
    """
    newest = chain.newest(mirrored)
    if newest is None:
        return []
    retired = chain.retired(mirrored)
    wanted = sorted((version for version in mirrored if version not in retired), reverse=True)[:keep]
    pinned = [version for version in pins if version in mirrored]
    kept = chain.keep(mirrored, [newest, *wanted, *pinned], (), (), anchor_every)
    doomed = [
        VersionForm(version, form)
        for version in chain.removal_order(mirrored, mirrored.keys() - kept.versions)
        for form in (Form.DELTA, Form.DENSE, Form.ADAPTER)  # a delta alone would lead nowhere
        if _bytes_of(mirrored[version], form) is not None
    ]
    dense = [
        VersionForm(version, Form.DENSE)
        for version in sorted(kept.versions - kept.dense)
        if mirrored[version].dense_bytes is not None and mirrored[version].delta_bytes is not None
    ]
    return doomed + dense


def next_downloads(
    mirrored: Versions, held: Versions, damaged: Collection[VersionForm] = ()
) -> list[VersionForm] | None:
    """Return, in order, the forms that lead a service to the newest version of the mirror that can be reached.

    Args:
        mirrored: The versions that the mirror holds.
        held: The versions that the service holds. Versions older than its newest one are never taken.
        damaged: Forms of the mirror that cannot be used.

    Returns:
        The forms. Empty if the service has the newest version. None if there is a newer version, but no way to it.
    """
    usable = without(mirrored, damaged)
    newest = chain.newest(mirrored)
    floor = chain.newest(held)
    if newest is None or (floor is not None and newest <= floor):
        return []
    for target in sorted(usable, reverse=True):
        if floor is not None and target <= floor:
            break
        path = _way_down(usable, held, target, floor)
        if path:
            return path
    return None


def _way_down(usable: Versions, held: Versions, target: Version, floor: Version | None) -> list[VersionForm]:
    def is_newer(version: Version) -> bool:
        return floor is None or version > floor

    forms = usable[target]
    if forms.is_adapter:
        if forms.base is None or forms.base == BASE or forms.base in held:
            return [VersionForm(target, Form.ADAPTER)]
        before = _way_down(usable, held, forms.base, floor) if forms.base in usable and is_newer(forms.base) else []
        return [*before, VersionForm(target, Form.ADAPTER)] if before else []
    model = chain.newest_model(held)
    if model is not None and not chain.is_reachable(held, model):
        model = None  # a delta on the service's disk is damaged, so no delta can build on it
    dense = {version for version in usable if is_newer(version)}
    for start in (model, None):
        path = chain.find_path(usable, target, start, dense=dense) or []
        if path and all(is_newer(step.version) for step in path):
            return path
    return []
