"""The kept copy of a shard: one, renewed in place, and a difference that leads to it bit for bit."""

import gc
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load
from weightsync_stack import equal_bits, make_chunk, read_source, weights

from sluice.slices import TensorSlice
from sluice.v1 import weightsync_pb2 as pb
from weightsync.codec.slices import Encoding, apply
from weightsync.format.chunks import push_request
from weightsync.format.manifest import ManifestError, entry_name
from weightsync.publish.shards import (
    Diff,
    KeptCopy,
    KeptFile,
    local_slices,
    share_out,
    sweep,
    tensor_bytes,
    total_bytes,
)
from weightsync.publisher import Trials

WHOLE = 1 << 40
"""A limit on encoded bytes that nothing here reaches."""


def baseline_of(
    tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None, directory: Path | None = None
) -> tuple[KeptCopy, list[tuple[pb.TensorSlice, torch.Tensor]]]:
    held = local_slices(tensors, dtype)
    return KeptCopy("model", [each for each, _ in held], directory), held


def address_of(kept: KeptCopy) -> int:
    return int(kept._file.bytes.ctypes.data)


def nudged(tensors: dict[str, torch.Tensor], share: float = 0.02, seed: int = 0) -> None:
    """Change a few values of each tensor by little, in place."""
    random = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        if tensor.is_floating_point():
            mask = torch.rand(tensor.shape, generator=random) < share
            tensor.add_((tensor * 0.01).where(mask, 0))


def anchor(kept: KeptCopy, diff: Diff) -> dict[str, torch.Tensor]:
    source, _ = kept.dense(diff)
    return load(read_source(source, 0, source.size))


def applied(before: dict[str, torch.Tensor], kept: KeptCopy, diff: Diff) -> dict[str, torch.Tensor]:
    """Return the tensors that a receiver gets from a delta: read it as an ordinary safetensors file, and apply it to `before`."""
    source, shard = kept.delta(diff)
    entries = load(read_source(source, 0, source.size))
    assert shard.size_bytes == source.size
    after = {name: tensor.clone() for name, tensor in before.items()}
    for tensor in shard.tensors:
        target = tensor_bytes(after[tensor.name])
        if tensor.encoding == pb.TENSOR_ENCODING_UNCHANGED:
            assert entry_name(tensor) not in entries
            continue
        apply(Encoding(tensor.encoding), tensor_bytes(entries[entry_name(tensor)]).data, target, tensor.dtype)
    return after


def test_an_anchor_is_a_safetensors_file_of_the_live_tensors() -> None:
    kept, live = baseline_of(weights())
    diff = kept.renew(live, compare=False, most_bytes=WHOLE)
    assert not diff.compared
    assert diff.changed_fraction == 1
    assert equal_bits(anchor(kept, diff), weights())


def test_deltas_lead_from_each_version_to_the_next() -> None:
    tensors = {name: tensor.contiguous() for name, tensor in weights().items()}
    kept, live = baseline_of(tensors)
    received = anchor(kept, kept.renew(live, compare=False, most_bytes=WHOLE))
    for version in range(4):
        nudged(tensors, seed=version)
        diff = kept.renew(live, compare=True, most_bytes=WHOLE)
        assert diff.compared
        received = applied(received, kept, diff)
        assert equal_bits(received, tensors)
        assert equal_bits(anchor(kept, diff), tensors)


def test_what_did_not_change_has_no_entry() -> None:
    kept, live = baseline_of(weights())
    kept.renew(live, compare=False, most_bytes=WHOLE)
    diff = kept.renew(live, compare=True, most_bytes=WHOLE)
    source, shard = kept.delta(diff)
    assert load(read_source(source, 0, source.size)) == {}
    assert {each.encoding for each in shard.tensors} == {pb.TENSOR_ENCODING_UNCHANGED}
    assert (diff.encoded_bytes, diff.changed_fraction) == (0, 0)


def test_the_precision_is_cast_slice_by_slice_and_ints_stay() -> None:
    tensors = weights()
    kept, live = baseline_of(tensors, torch.bfloat16)
    diff = kept.renew(live, compare=False, most_bytes=WHOLE)
    expected = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    assert equal_bits(anchor(kept, diff), expected)


def test_tied_weights_travel_once_under_their_first_name() -> None:
    shared = torch.randn(8, 4)
    held = local_slices({"embed": shared, "head": shared, "transposed": shared.t(), "other": torch.randn(8, 4)})
    assert [each.name for each, _ in held] == ["embed", "transposed", "other"]


def test_a_diff_that_grows_too_large_is_given_up_and_the_copy_is_right_all_the_same() -> None:
    tensors = {f"w{index}": torch.randn(64, 64) for index in range(20)}
    kept, live = baseline_of(tensors)
    kept.renew(live, compare=False, most_bytes=WHOLE)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(64, 64))
    diff = kept.renew(live, compare=True, most_bytes=kept.dense_bytes // 4)
    assert not diff.compared
    assert all(not each.data for each in diff.slices), "streams that are not pushed are not held"
    assert equal_bits(anchor(kept, diff), tensors)


@pytest.mark.slow
def test_there_is_one_copy_which_stays_where_it_is() -> None:
    tensors = {"embed": torch.randn(1 << 18, 16), "head": torch.randn(1 << 18, 16)}  # 16 MiB each
    size = sum(tensor.nbytes for tensor in tensors.values())
    kept, live = baseline_of(tensors)
    address, taken = address_of(kept), kept._file.bytes.nbytes
    assert size <= taken < size + 4096
    for version in range(3):
        nudged(tensors, seed=version)
        diff = kept.renew(live, compare=version > 0, most_bytes=size // 2)
        assert address_of(kept) == address
        for source, _ in (kept.dense(diff), kept.delta(diff)):
            held = sum(len(view) for view in source.views(0, source.size))
            own = [np.frombuffer(view, dtype=np.uint8) for view in source.views(0, source.size)]
            outside = sum(part.nbytes for part in own if not np.shares_memory(part, kept._file.bytes))
            assert held == source.size
            assert outside < size // 2, "what is not read from the copy is small"


HOST = Path("/dev/shm")
needs_shared_memory = pytest.mark.skipif(KeptFile(1, HOST).path is None, reason="no shared memory to keep files in")


@needs_shared_memory
def test_the_copy_is_readable_as_a_file_where_it_lies_in_shared_memory() -> None:
    kept, live = baseline_of(weights(), directory=HOST)
    kept.renew(live, compare=False, most_bytes=WHOLE)
    local = kept.local
    assert local is not None
    status = Path(local.path).stat()
    assert (status.st_ino, status.st_dev, local.shard) == (local.inode, local.device, "model")
    with safe_open(local.path, framework="pt") as file:
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    assert equal_bits(read, weights())


@pytest.mark.slow
@needs_shared_memory
def test_files_in_shared_memory_go_with_their_objects() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # of what other tests left open
    before = open_files()
    files = [KeptFile(4096, HOST) for _ in range(5)]
    paths = [file.path for file in files]
    assert all(path is not None and path.exists() for path in paths)
    files[0].close()
    assert not paths[0].exists()
    del files
    gc.collect()
    assert not any(path.exists() for path in paths)
    assert open_files() == before


@pytest.mark.slow
@needs_shared_memory
def test_what_a_killed_process_left_is_removed_and_what_a_live_one_uses_is_not() -> None:
    program = """
import os, signal, sys
from pathlib import Path
from weightsync.publish.shards import KeptFile
file = KeptFile(4096, Path("/dev/shm"))
print(file.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    left = Path(killed.stdout.strip())
    assert killed.returncode == -signal.SIGKILL
    assert left.exists()
    alive = KeptFile(4096, HOST)
    sweep(HOST)
    assert not left.exists()
    assert alive.path is not None
    assert alive.path.exists()


def test_a_directory_without_room_gives_ordinary_memory(tmp_path: Path) -> None:
    file = KeptFile(4096, tmp_path / "missing")
    assert file.local("model") is None
    file.bytes[:] = 7
    assert int(file.bytes.sum()) == 7 * 4096


def part(name: str, shape: tuple[int, ...], begin: int = 0, rows: int | None = None) -> pb.TensorSlice:
    sizes = (shape[0] if rows is None else rows, *shape[1:])
    offsets = (begin, *(0 for _ in shape[1:]))
    return pb.TensorSlice(name=name, dtype="BF16", global_shape=shape, offsets=offsets, sizes=sizes)


def shard(slices: list[pb.TensorSlice]) -> pb.Shard:
    return pb.Shard(name="s", tensors=slices)


def names(shares: list[set[TensorSlice]]) -> list[list[str]]:
    return [sorted(each.name for each in share) for share in shares]


def test_what_all_ranks_hold_is_sent_once_by_whoever_has_least_to_send() -> None:
    cut = [[part("cut", (8, 4), 0, 6)], [part("cut", (8, 4), 6, 2)]]
    common = [part("big", (5, 4)), part("small", (1, 4)), part("tiny", (1, 2))]
    held = [shard(rows + common) for rows in cut]
    assert names(share_out(held)) == [["cut", "small", "tiny"], ["big", "cut"]]
    assert total_bytes(held) == 2 * (32 + 20 + 4 + 2)


def test_every_slice_is_sent_by_one_rank() -> None:
    pairs = [[part("cut", (4, 2), 2 * (rank % 2), 2)] for rank in range(4)]  # ranks 0 and 2 hold the same, 1 and 3 too
    shares = share_out([shard(rows) for rows in pairs])
    assert [len(share) for share in shares] == [1, 1, 0, 0]


def test_slices_that_leave_a_hole_are_found_before_anything_is_sent() -> None:
    held = [shard([part("cut", (8, 4), 0, 3)]), shard([part("cut", (8, 4), 4, 4)])]
    with pytest.raises(ManifestError, match="cover 28 of its 32"):
        share_out(held)


def test_trials_in_vain_become_rare_and_one_that_pays_ends_the_pause() -> None:
    trials = Trials()
    tried = []
    for version in range(40):
        if trials.due():
            tried.append(version)
            trials.note(worth=False)
    assert tried == [0, 2, 5, 10, 19, 36]
    while not trials.due():
        pass
    trials.note(worth=True)
    assert trials.due()
    assert trials.due()


@pytest.mark.parametrize("offset", [0, 1, 127, 128, 1 << 20, (1 << 40) + 5])
@pytest.mark.parametrize("sizes", [[1], [3, 0, 200], [1 << 16, 1]])
def test_a_chunk_is_written_as_protobuf_writes_it(offset: int, sizes: list[int]) -> None:
    pieces = [memoryview(bytes(range(256)) * (size // 256 + 1))[:size] for size in sizes]
    expected = pb.PushWeightsRequest(chunk=make_chunk(offset, b"".join(pieces)))
    assert push_request(offset, pieces) == expected.SerializeToString(deterministic=True)
