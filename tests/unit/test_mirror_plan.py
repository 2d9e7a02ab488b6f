"""What is sent to a mirror, taken from it and removed from it, under any order of events."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sluice.v1 import checkpoint_pb2, mirror_pb2, trainer_pb2
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.manifest import ManifestError
from weightsync.mirror import layout
from weightsync.mirror.plan import has, next_downloads, next_upload, surplus
from weightsync.mirror.writer import checkpoint_versions
from weightsync.service.chain import Form, Forms, VersionForm, Versions, is_reachable, newest_model, next_dense
from weightsync.service.ledger import Ledger, RefusedError

COPY = 10
EVERY = 3
KINDS = {Form.DENSE: pb.VERSION_KIND_ANCHOR, Form.DELTA: pb.VERSION_KIND_DELTA, Form.ADAPTER: pb.VERSION_KIND_ADAPTER}
versions = st.builds(Version, st.integers(0, 2**40), st.integers(0, 2**40))
steps = st.builds(VersionForm, versions, st.sampled_from(list(Form)))


def manifest(step: VersionForm, forms: Forms) -> pb.Manifest:
    """Return the manifest of a form as the service would send it."""
    size = {Form.DENSE: forms.dense_bytes, Form.DELTA: forms.delta_bytes, Form.ADAPTER: forms.adapter_bytes}[step.form]
    base = None if forms.base is None or step.form is Form.DENSE else forms.base.to_proto()
    return pb.Manifest(
        run="runs/r",
        version=step.version.to_proto(),
        kind=KINDS[step.form],
        base=base,
        size_bytes=size,
        dense_bytes=forms.copy_bytes,
        digest=forms.digest,
    )


class MirrorMachine(RuleBasedStateMachine):
    """A service whose trainer pushes and starts again, its mirror over a link that is down at times, and a reader of that."""

    def __init__(self) -> None:
        super().__init__()
        self.local = Ledger(keep=2, anchor_every=EVERY)
        self.reader = Ledger(keep=2, anchor_every=EVERY)
        self.there: dict[VersionForm, pb.Manifest] = {}
        self.pins: set[Version] = set()
        self.number = 0

    @property
    def mirrored(self) -> Versions:
        return layout.describe(self.there)

    def next_version(self) -> Version:
        newest = self.local.newest or Version(1, 0)
        return Version(newest.epoch, newest.number + 1)

    def commit(self, version: Version, forms: Forms) -> None:
        self.local.commit(version, forms)
        for old in self.local.surplus(0.0):
            self.local.delete(old, 0.0)

    @rule()
    def push_dense(self) -> None:
        self.commit(self.next_version(), Forms("w", dense_bytes=COPY, copy_bytes=COPY))

    @rule(size=st.integers(1, 4), times=st.integers(1, 4))
    def push_deltas(self, size: int, times: int) -> None:
        for _ in range(times):
            base = newest_model(self.local.committed)
            if base is not None:
                self.commit(self.next_version(), Forms("w", delta_bytes=size, base=base, copy_bytes=COPY))

    @rule()
    def push_adapter(self) -> None:
        base = newest_model(self.local.committed)
        if base is not None:
            self.commit(self.next_version(), Forms("a", adapter_bytes=1, base=base))

    @rule(back=st.integers(0, 5))
    def resume_from_a_checkpoint(self, back: int) -> None:
        newest = self.local.newest or Version(1, 0)
        resumed = Version(newest.epoch + 1, max(0, newest.number - back))
        self.commit(resumed, Forms("w", dense_bytes=COPY, copy_bytes=COPY))

    @rule()
    def make_dense(self) -> None:
        path = next_dense(self.local.committed)
        if path is not None:
            self.local.add_dense(path[-1].version, COPY)
            for version in self.local.surplus_dense(0.0):
                self.local.drop_dense(version)

    @rule(forms=st.integers(1, 3))
    def send(self, forms: int) -> None:
        for _ in range(forms):
            step = next_upload(self.local.committed, self.mirrored, EVERY)
            if step is None:
                return
            assert not has(self.mirrored, step)
            self.there[step] = manifest(step, self.local.committed[step.version])
            assert is_reachable(self.mirrored, step.version), "no reader can use it"
            self.local.mirrored = newest_model(self.mirrored)

    @rule()
    def send_everything(self) -> None:
        for _ in range(50):
            if next_upload(self.local.committed, self.mirrored, EVERY) is None:
                break
            self.send(1)
            self.prune()
        else:
            pytest.fail("there is always one more form to send")
        newest = self.local.newest
        if newest is not None and is_reachable(self.local.committed, newest):
            assert newest in self.mirrored

    @rule(keep=st.integers(1, 4))
    def prune(self, keep: int = 2) -> None:
        newest = max(self.mirrored, default=None)
        pinned = {version for version in self.pins if version in self.mirrored}
        for step in surplus(self.mirrored, keep, EVERY, self.pins):
            del self.there[step]
            assert all(is_reachable(self.mirrored, version) for version in self.mirrored), "removed in the wrong order"
        assert newest is None or newest in self.mirrored
        assert pinned <= self.mirrored.keys()
        assert surplus(self.mirrored, keep, EVERY, self.pins) == []

    @rule(data=st.data())
    @precondition(lambda self: self.there)
    def pin(self, data: st.DataObject) -> None:
        self.pins.add(data.draw(st.sampled_from(sorted(self.mirrored))))

    @rule(forms=st.integers(1, 9))
    def read(self, forms: int) -> None:
        """Take the forms that lead to the newest version. A reader that stops half-way continues from the forms that it has."""
        path = next_downloads(self.mirrored, self.reader.committed)
        assert path is not None, "everything in the mirror can be reached"
        for step in path[:forms]:
            found = layout.describe({step: self.there[step]})[step.version]
            self.reader.commit(step.version, found)  # raises if it is refused
        if forms >= len(path):
            assert max(self.mirrored, default=None) in {self.reader.newest, None}
        for old in self.reader.surplus(0.0):
            self.reader.delete(old, 0.0)

    @invariant()
    def all_of_the_mirror_can_be_reached(self) -> None:
        assert all(is_reachable(self.mirrored, version) for version in self.mirrored)


TestMirrorMachine = MirrorMachine.TestCase
TestMirrorMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def chain_of(*sizes: int) -> dict[Version, Forms]:
    """Version 1.1 whole, and a delta of each size after it."""
    held = {Version(1, 1): Forms("w", dense_bytes=COPY, copy_bytes=COPY)}
    for number, size in enumerate(sizes, 2):
        held[Version(1, number)] = Forms("w", delta_bytes=size, base=Version(1, number - 1), copy_bytes=COPY)
    return held


def there_of(local: Versions, *names: tuple[int, Form]) -> dict[VersionForm, pb.Manifest]:
    found = [VersionForm(Version(1, number), form) for number, form in names]
    return {step: manifest(step, local[step.version]) for step in found}


def test_a_link_that_was_down_is_caught_up_by_deltas() -> None:
    local = chain_of(1, 1, 1, 1)
    there = there_of(local, (1, Form.DENSE), (2, Form.DELTA))
    step = next_upload(local, layout.describe(there), 16)
    assert step == VersionForm(Version(1, 3), Form.DELTA)


def test_deltas_that_outgrew_a_dense_form_are_left_out() -> None:
    local = chain_of(4, 4, 4, 4)
    local[Version(1, 5)] = Forms("w", dense_bytes=COPY, delta_bytes=4, base=Version(1, 4), copy_bytes=COPY)
    there = there_of(local, (1, Form.DENSE))
    assert next_upload(local, layout.describe(there), 16) == VersionForm(Version(1, 5), Form.DENSE)


def test_a_mirror_whose_next_delta_is_gone_waits_for_a_dense_form() -> None:
    local = chain_of(1, 1, 1)
    there = there_of(local, (1, Form.DENSE))
    del local[Version(1, 1)], local[Version(1, 2)]
    assert next_upload(local, layout.describe(there), 16) is None
    local[Version(1, 4)] = Forms("w", dense_bytes=COPY, delta_bytes=1, base=Version(1, 3), copy_bytes=COPY)
    assert next_upload(local, layout.describe(there), 16) == VersionForm(Version(1, 4), Form.DENSE)


def test_a_long_chain_gets_a_dense_form_after_the_newest_version() -> None:
    local = chain_of(1, 1, 1)
    local[Version(1, 4)] = Forms("w", dense_bytes=COPY, delta_bytes=1, base=Version(1, 3), copy_bytes=COPY)
    names = [(1, Form.DENSE), (2, Form.DELTA), (3, Form.DELTA)]
    assert next_upload(local, layout.describe(there_of(local, *names)), EVERY) == VersionForm(Version(1, 4), Form.DELTA)
    names.append((4, Form.DELTA))
    assert next_upload(local, layout.describe(there_of(local, *names)), EVERY) == VersionForm(Version(1, 4), Form.DENSE)
    assert next_upload(local, layout.describe(there_of(local, *names)), EVERY + 1) is None


def test_pruning_keeps_a_pinned_version_and_drops_retired_ones() -> None:
    local = chain_of(1, 1, 1)
    local[Version(2, 2)] = Forms("w", dense_bytes=COPY, copy_bytes=COPY)
    there = there_of(local, (1, Form.DENSE), (2, Form.DELTA), (3, Form.DELTA), (4, Form.DELTA))
    there[VersionForm(Version(2, 2), Form.DENSE)] = manifest(
        VersionForm(Version(2, 2), Form.DENSE), local[Version(2, 2)]
    )
    mirrored = layout.describe(there)
    assert [step.version for step in surplus(mirrored, 9, 16, ())] == [Version(1, 4), Version(1, 3)]
    assert [step.version for step in surplus(mirrored, 9, 16, {Version(1, 3)})] == [Version(1, 4)]


def test_a_damaged_delta_is_gone_around_by_a_dense_form_and_never_back() -> None:
    local = chain_of(1, 1, 1)
    local[Version(1, 3)] = Forms("w", dense_bytes=COPY, delta_bytes=1, base=Version(1, 2), copy_bytes=COPY)
    names = [(1, Form.DENSE), (2, Form.DELTA), (3, Form.DELTA), (3, Form.DENSE), (4, Form.DELTA)]
    mirrored = layout.describe(there_of(local, *names))
    held = {Version(1, 1): local[Version(1, 1)]}
    bad = VersionForm(Version(1, 2), Form.DELTA)
    way = next_downloads(mirrored, held, {bad})
    assert way == [VersionForm(Version(1, 3), Form.DENSE), VersionForm(Version(1, 4), Form.DELTA)]
    assert next_downloads(mirrored, held, {bad, VersionForm(Version(1, 3), Form.DENSE)}) is None


def test_a_delta_older_than_what_a_reader_has_is_never_taken() -> None:
    local = chain_of(1)
    local[Version(1, 3)] = Forms("a", adapter_bytes=1, base=Version(1, 1))
    local[Version(1, 4)] = Forms("w", dense_bytes=COPY, delta_bytes=1, base=Version(1, 2), copy_bytes=COPY)
    held = {Version(1, 1): local[Version(1, 1)], Version(1, 3): local[Version(1, 3)]}
    names = [(1, Form.DENSE), (2, Form.DELTA), (3, Form.ADAPTER), (4, Form.DELTA)]
    assert next_downloads(layout.describe(there_of(local, *names)), held) is None
    names.append((4, Form.DENSE))
    assert next_downloads(layout.describe(there_of(local, *names)), held) == [VersionForm(Version(1, 4), Form.DENSE)]


@given(step=steps, number=st.integers(0, 2**128 - 1))
def test_names_say_what_the_object_is(step: VersionForm, number: int) -> None:
    digest = f"{number:032x}"
    assert layout.parse_manifest_name("run", layout.manifest_name("run", step)) == step
    assert layout.parse_part_name("run", layout.part_name("run", step, digest)) == (step, digest)
    assert layout.parse_pin_name("run", layout.pin_name("run", step.version)) == step.version


@given(st.lists(versions, min_size=2, max_size=2))
def test_the_order_of_names_is_that_of_versions(pair: list[Version]) -> None:
    one, other = (layout.manifest_name("run", VersionForm(version, Form.DELTA)) for version in pair)
    assert (one < other) == (pair[0] < pair[1])


@given(size=st.integers(0, 1000), part_bytes=st.integers(1, 300))
def test_parts_cover_a_file(size: int, part_bytes: int) -> None:
    parts = layout.cut(size, part_bytes)
    assert [begin for begin, _ in parts] == [0, *(end for _, end in parts)][: len(parts)]
    assert sum(end - begin for begin, end in parts) == size
    assert all(0 < end - begin <= part_bytes for begin, end in parts)


def mirrored_form() -> mirror_pb2.MirroredForm:
    step = VersionForm(Version(1, 2), Form.DENSE)
    found = mirror_pb2.MirroredForm(manifest=manifest(step, Forms("w", dense_bytes=9, copy_bytes=9)), part_bytes=4)
    found.manifest.shards.add(name="model", size_bytes=9)
    found.shards.add(name="model", parts=["0" * 32, "1" * 32, "2" * 32])
    return found


def test_a_manifest_comes_back_as_it_was_written() -> None:
    written = mirrored_form()
    read = layout.read_manifest("r", VersionForm(Version(1, 2), Form.DENSE), layout.write_manifest(written))
    assert read == written
    assert layout.part_sizes(read) == {"0" * 32: 4, "1" * 32: 4, "2" * 32: 1}


@pytest.mark.parametrize(
    "damage",
    [
        lambda form: form.manifest.version.CopyFrom(Version(1, 3).to_proto()),
        lambda form: form.manifest.ClearField("kind"),
        lambda form: setattr(form.manifest, "run", "runs/other"),
        lambda form: setattr(form, "part_bytes", 0),
        lambda form: setattr(form, "part_bytes", 1 << 40),
        lambda form: form.shards[0].parts.pop(),
        lambda form: setattr(form.shards[0], "name", "other"),
        lambda form: form.shards[0].parts.__setitem__(0, "../../../secret"),
    ],
)
def test_a_manifest_that_contradicts_itself_or_its_name_is_refused(damage) -> None:
    form = mirrored_form()
    damage(form)
    with pytest.raises(ManifestError):
        layout.read_manifest("r", VersionForm(Version(1, 2), Form.DENSE), layout.write_manifest(form))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        layout.read_manifest("r", VersionForm(Version(1, 2), Form.DENSE), data)


def test_checkpoints_name_the_versions_that_stay(tmp_path: Path) -> None:
    for number in (2, 4):
        directory = tmp_path / f"step_{number}"
        directory.mkdir()
        checkpoint = trainer_pb2.Checkpoint(name=directory.name, policy_version=Version(1, number).to_proto())
        found = checkpoint_pb2.CheckpointManifest(checkpoint=checkpoint)
        (directory / "manifest.json").write_text(json_format.MessageToJson(found))
    (tmp_path / "step_6").mkdir()
    (tmp_path / "step_6" / "manifest.json").write_text("{")
    assert checkpoint_versions(tmp_path) == {Version(1, 2), Version(1, 4)}
    assert checkpoint_versions(tmp_path / "absent") == set()


def test_a_service_keeps_deltas_for_its_mirror_only_while_there_is_room() -> None:
    ledger = Ledger(keep=1, anchor_every=16)
    for version, forms in chain_of(1, 1, 1, 1).items():
        ledger.commit(version, forms)
    ledger.add_dense(Version(1, 5), COPY)
    ledger.mirrored = Version(1, 2)
    assert Version(1, 3) not in ledger.surplus(0.0)
    assert Version(1, 3) in ledger.evictable(0.0)
    for version in ledger.evictable(0.0):
        assert ledger.delete(version, 0.0)
    assert list(ledger.committed) == [Version(1, 5)]
    with pytest.raises(RefusedError):
        ledger.delete(Version(1, 5), 0.0)
