"""The way to a version as an engine asks for it: manifests in the order in which they are applied, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.service.chain import Form, Step, damaged_on_the_way, find_path
from weightsync.service.runs import Run
from weightsync.service.stored import StoredForm

__all__ = ["describe_step", "path_to", "pulled_form"]


def path_to(run: Run, wanted: Version | None, held: Version | None) -> list[Step]:
    """What leads from what the caller holds to a version, the newest where none is wanted.

    Raises:
        SluiceError: NOT_FOUND, or DATA_LOSS where a damaged delta is in the way.
    """
    target = run.ledger.newest if wanted is None else wanted
    if target is None:
        raise SluiceError.not_found("NO_VERSION", f"nothing was committed in run {run.name} yet: push a version")
    run.find(target)
    path = find_path(run.ledger.committed, target, held)
    if path is None:
        damaged = damaged_on_the_way(run.ledger.committed, target) or "an older version"
        raise SluiceError.data_loss(
            "DELTA_DAMAGED",
            f"version {target} cannot be reached, because the delta of {damaged} gave other bytes than announced, or NaN:"
            " serve on, the trainer's next version is an anchor; to have it now, push an anchor",
        )
    return path


def describe_step(run: Run, step: Step) -> pb.GetUpdatePathResponse:
    """One step with its files as this host sees them; blocking."""
    form = _stored(run, step.version, step.form)
    return pb.GetUpdatePathResponse(manifest=form.manifest, files=_local_files(form))


def pulled_form(run: Run, version: Version, base: Version | None) -> StoredForm:
    """The form whose shards a pull asks for.

    Raises:
        SluiceError: NOT_FOUND, or FAILED_PRECONDITION NO_DELTA.
    """
    stored = run.find(version)
    if base is not None:
        delta = stored.delta
        if delta is None or Version.from_proto(delta.manifest.base) != base:
            based = "is held whole only" if delta is None else f"is based on {Version.from_proto(delta.manifest.base)}"
            raise SluiceError.failed_precondition(
                "NO_DELTA", f"version {version} {based}, there is no delta from {base}: ask GetUpdatePath for the way"
            )
        return delta
    whole = stored.dense or stored.adapter
    if whole is None:
        raise SluiceError.not_found(
            "NO_DENSE_FORM",
            f"version {version} is held as a delta only, and its dense form is still being made or was given up:"
            " ask GetUpdatePath for the way to it",
        )
    return whole


def _stored(run: Run, version: Version, form: Form) -> StoredForm:
    found = run.find(version).form(form)
    if found is None:
        raise SluiceError.not_found("NO_SUCH_VERSION", f"version {version} lost its {form.value} form: ask again")
    return found


def _local_files(form: StoredForm) -> Iterator[pb.LocalFile]:
    for shard, path in form.files.items():
        status = path.stat()
        yield pb.LocalFile(shard=shard, path=str(path.absolute()), device=status.st_dev, inode=status.st_ino)
