"""Messages of a pull, read by hand: the same as protobuf reads them, or an error."""

from __future__ import annotations

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weightsync_stack import make_chunk

from sluice.v1 import weightsync_pb2 as pb
from weightsync.format.chunks import MAX_CHUNK_BYTES, ChunkError, ChunkSizeError, read_pull_response
from weightsync.service.upload import ChunkSums

OFFSETS = st.one_of(st.integers(0, 300), st.integers(0, 2**63))


@given(offset=OFFSETS, data=st.binary(min_size=1, max_size=300))
def test_a_message_is_read_as_protobuf_writes_it(offset: int, data: bytes) -> None:
    message = pb.PullWeightsResponse(chunk=make_chunk(offset, data)).SerializeToString()
    assert read_pull_response(message) == (offset, data)


@given(offset=OFFSETS, data=st.binary(min_size=1, max_size=300), extra=st.binary(max_size=20))
def test_fields_in_another_order_and_unknown_ones_are_read_too(offset: int, data: bytes, extra: bytes) -> None:
    chunk = make_chunk(offset, data)
    parts = [
        pb.Chunk(crc32c=chunk.crc32c).SerializeToString(),
        pb.Chunk(data=data).SerializeToString(),
        pb.Chunk(offset=offset).SerializeToString(),
        b"\x7a" + bytes([len(extra)]) + extra,  # field 15, length-delimited
    ]
    body = b"".join(parts)
    message = b"\x0a" + bytes([len(body) & 0x7F | 0x80, len(body) >> 7]) + body
    assert read_pull_response(message) == (offset, data)


@given(message=st.binary(max_size=60))
def test_any_other_bytes_are_refused_or_read_as_protobuf_reads_them(message: bytes) -> None:
    try:
        _, data = read_pull_response(message)
    except (ChunkError, ChunkSizeError):
        return
    assert data == pb.PullWeightsResponse.FromString(message).chunk.data


def test_damage_and_wrong_sizes_are_told_apart() -> None:
    message = bytearray(pb.PullWeightsResponse(chunk=make_chunk(0, b"abc")).SerializeToString())
    message[-7] ^= 1  # in the data, before the checksum's tag and four bytes
    with pytest.raises(ChunkError, match="crc32c"):
        read_pull_response(bytes(message))
    empty = pb.PullWeightsResponse(chunk=pb.Chunk(offset=3)).SerializeToString()
    with pytest.raises(ChunkSizeError):
        read_pull_response(empty)


def test_a_number_of_more_bytes_than_protobuf_allows_is_refused() -> None:
    number = b"\x80" * 10 + b"\x00"  # zero in eleven bytes: protobuf reads at most ten
    body = b"\x08" + number + make_chunk(0, b"abc").SerializeToString()
    message = b"\x0a" + bytes([len(body)]) + body
    with pytest.raises(ChunkError):
        read_pull_response(message)


def test_checksums_of_a_file_are_bounded_by_its_size_whatever_ranges_are_asked_for() -> None:
    data = bytes(3 * 1024)
    sums = ChunkSums(len(data))
    for length in range(1, len(data) + 1):
        assert sums.of(0, data[:length]) == google_crc32c.value(data[:length])
    assert len(sums) == 1


def test_a_checksum_that_is_known_is_not_computed_again() -> None:
    sums = ChunkSums(MAX_CHUNK_BYTES + 5)
    sums.note(0, MAX_CHUNK_BYTES, 17)
    sums.note(MAX_CHUNK_BYTES, 5, 18)
    sums.note(0, 7, 19)  # a shorter chunk than the file is cut into
    assert sums.of(0, bytes(MAX_CHUNK_BYTES)) == 17
    assert sums.of(MAX_CHUNK_BYTES, b"12345") == 18
    assert sums.of(0, b"1234567") == google_crc32c.value(b"1234567")
