"""Every parser of bytes and texts from outside, under atheris: only documented errors may be raised.

Each parser is fuzzed in a process of its own, since libFuzzer ends its process at the first finding: this module is that program.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from benchmarks.fuzz.findings import Findings
from benchmarks.fuzz.routes import VENV
from sluice.config import ConfigError

Parse: TypeAlias = Callable[[bytes], None]

MAX_BYTES = 4096
"""Longest input. A parser that takes more than a few seconds for it is a finding, too."""

MOST_MIB = 2048
"""Memory at which libFuzzer ends the process with a finding."""

ONE_INPUT_S = 10

START_S = 120.0
"""Seconds for imports and instrumentation, in addition to the fuzzing."""


@dataclass(frozen=True, slots=True)
class Target:
    """A parser.

    Attributes:
        load: Imports the parser and returns a function that takes the bytes. An error that the function raises is a finding.
        packages: Modules whose branches guide the inputs.
        seeds: Sound inputs to begin with.
    """

    load: Callable[[], Parse]
    packages: Sequence[str]
    seeds: Callable[[], Sequence[bytes]] = field(default=lambda: ())


def _safetensors() -> Parse:
    from weightsync.format.safetensors import BadNameError, LayoutError, Scan, parse_header, parse_layout  # noqa: PLC0415

    def parse(data: bytes) -> None:
        for attempt in (lambda: parse_header(data), lambda: parse_layout(data, len(data)), lambda: _scan(data)):
            try:
                attempt()
            except (LayoutError, BadNameError):
                continue

    def _scan(data: bytes) -> None:
        scan, cut = Scan(len(data)), len(data) // 3
        scan.feed(data[:cut])
        scan.feed(data[cut:])

    return parse


def _safetensors_seeds() -> Sequence[bytes]:
    from weightsync.format.safetensors import place, render_header  # noqa: PLC0415

    entries = place([("a.weight", "F32", (2, 2)), ("b", "BF16", (3,)), ("c", "I64", ())])
    return [render_header(entries, {"format": "pt"}) + b"\x01" * sum(each.size for each in entries)]


def _delta() -> Parse:
    import numpy as np  # noqa: PLC0415

    from weightsync.codec.slices import Encoding, apply  # noqa: PLC0415
    from weightsync.codec.streams import CodecError  # noqa: PLC0415

    def parse(data: bytes) -> None:
        if not data:
            return
        dtype, width = (("BF16", 2), ("F16", 2), ("F32", 4), ("U8", 1))[data[0] % 4]
        for encoding in Encoding:
            try:
                apply(encoding, data[1:], np.zeros(64 * width, np.uint8), dtype)
            except CodecError:
                continue

    return parse


def _delta_seeds() -> Sequence[bytes]:
    import numpy as np  # noqa: PLC0415

    from weightsync.codec.slices import encode_delta  # noqa: PLC0415

    base = np.zeros(64, np.uint16)
    return [
        b"\0" + encode_delta(base + (np.arange(64) % step == 0).astype(np.uint16) * step, base)[0]
        for step in (1, 7, 40)
    ]


def _manifest() -> Parse:
    from google.protobuf.message import DecodeError  # noqa: PLC0415

    from sluice.v1 import weightsync_pb2  # noqa: PLC0415
    from weightsync.format.manifest import ManifestError, check_manifest, from_json, manifest_digest  # noqa: PLC0415
    from weightsync.format.safetensors import BadNameError  # noqa: PLC0415

    def parse(data: bytes) -> None:
        with contextlib.suppress(ManifestError, BadNameError):
            check_manifest(from_json(data.decode(errors="replace")))
        try:
            manifest = weightsync_pb2.Manifest.FromString(data)
        except DecodeError:
            return
        manifest_digest(manifest)
        with contextlib.suppress(ManifestError, BadNameError):
            check_manifest(manifest)

    return parse


def _manifest_seeds() -> Sequence[bytes]:
    from sluice.v1 import common_pb2  # noqa: PLC0415
    from sluice.v1 import weightsync_pb2 as pb  # noqa: PLC0415
    from weightsync.format.manifest import to_json  # noqa: PLC0415

    tensor = pb.TensorSlice(
        name="a",
        dtype="F32",
        global_shape=[4],
        offsets=[0],
        sizes=[4],
        encoding=pb.TENSOR_ENCODING_DENSE,
        digest="0" * 32,
    )
    shard = pb.Shard(name="model", size_bytes=80, digest="0" * 32, tensors=[tensor])
    manifest = pb.Manifest(
        run="runs/r", kind=pb.VERSION_KIND_ANCHOR, shards=[shard], version=common_pb2.PolicyVersion(epoch=1, number=2)
    )
    return [manifest.SerializeToString(), to_json(manifest).encode()]


def _chunks() -> Parse:
    from weightsync.format.chunks import ChunkError, ChunkSizeError, read_pull_response  # noqa: PLC0415

    def parse(data: bytes) -> None:
        with contextlib.suppress(ChunkError, ChunkSizeError):
            read_pull_response(data)

    return parse


def _chunk_seeds() -> Sequence[bytes]:
    from sluice.v1 import weightsync_pb2 as pb  # noqa: PLC0415
    from weightsync.format.chunks import fill_chunk  # noqa: PLC0415

    response = pb.PullWeightsResponse()
    fill_chunk(response.chunk, 7, b"abc")
    return [response.SerializeToString()]


def _segments() -> Parse:
    from orchestrator_svc.journal.facts import Place  # noqa: PLC0415
    from orchestrator_svc.journal.segments import SegmentError, read_payload, segment_path  # noqa: PLC0415

    directory = Path(tempfile.mkdtemp(dir="."))

    def parse(data: bytes) -> None:
        segment_path(directory, 1).write_bytes(data[2:])
        with contextlib.suppress(SegmentError):
            read_payload(directory, Place(1, int.from_bytes(data[:2], "big") % 64, b""))

    return parse


def _segment_seeds() -> Sequence[bytes]:
    import struct  # noqa: PLC0415

    import google_crc32c  # noqa: PLC0415

    return [b"\0\x08SLUICEJ1" + struct.pack("<II", 3, google_crc32c.value(b"abc")) + b"abc"]


def _facts() -> Parse:
    from google.protobuf.message import DecodeError  # noqa: PLC0415

    from orchestrator_svc.journal.facts import LedgerError  # noqa: PLC0415
    from orchestrator_svc.journal.ledger import folded  # noqa: PLC0415
    from sluice.v1 import journal_pb2  # noqa: PLC0415

    def parse(data: bytes) -> None:
        facts = []
        for seq, part in enumerate(data.split(b"\xff\xfe"), 1):
            try:
                facts.append((seq, journal_pb2.Fact.FromString(part)))
            except DecodeError:
                return
        with contextlib.suppress(LedgerError):
            folded(facts)

    return parse


def _allocation() -> Parse:
    from sluice.config.allocation import Allocation  # noqa: PLC0415

    def parse(data: bytes) -> None:
        with contextlib.suppress(ConfigError, ValueError):
            str(Allocation.parse(data.decode(errors="replace")))

    return parse


def _settings() -> Parse:
    from sluice.config import load_run  # noqa: PLC0415

    file = Path(tempfile.mkdtemp(dir=".")) / "run.toml"

    def parse(data: bytes) -> None:
        file.write_bytes(data)
        with contextlib.suppress(ConfigError):
            load_run(["@", str(file)])

    return parse


def _convert() -> Parse:
    from sluice_convert import SYSTEMS, convert, document, missing_lines, read, todo_lines  # noqa: PLC0415

    directory, systems = Path(tempfile.mkdtemp(dir=".")), tuple(SYSTEMS.values())

    def parse(data: bytes) -> None:
        if len(data) < 2:
            return
        file = directory / f"settings{('.yaml', '.toml', '.json', '.sh')[data[0] % 4]}"
        file.write_bytes(data[2:])
        try:
            done = convert(systems[data[1] % len(systems)], read(file))
            document(done, "sluice config convert")
            missing_lines(done)
            todo_lines(done)
        except ConfigError:
            pass

    return parse


def _dialects() -> Parse:
    from gateway_svc.canonical import conversation_keys  # noqa: PLC0415
    from gateway_svc.http import EndBody, OpenBody, RewardBody  # noqa: PLC0415
    from gateway_svc.recording import Unsupported, settle_sampling  # noqa: PLC0415
    from sluice.openai import chat, completions, messages, responses  # noqa: PLC0415
    from sluice.openai.bodies import ClientRequest, read_body  # noqa: PLC0415
    from sluice.rpc import SluiceError  # noqa: PLC0415

    def settled(request: ClientRequest, unsupported: Unsupported) -> ClientRequest:
        settle_sampling(request, unsupported)
        return request

    parsers = (
        lambda raw: settled(chat.parse(read_body(chat.ChatBody, raw)), "override"),
        lambda raw: settled(completions.parse(read_body(completions.CompletionBody, raw)), "not_trained"),
        lambda raw: settled(responses.parse(read_body(responses.ResponsesBody, raw)), "reject"),
        lambda raw: settled(messages.parse(read_body(messages.MessagesBody, raw)), "allow"),
        lambda raw: messages.counted(read_body(messages.CountBody, raw)),
        lambda raw: settled(completions.parse_tokens(read_body(completions.TokensBody, raw)), "override"),
        lambda raw: [read_body(kind, raw) for kind in (OpenBody, RewardBody, EndBody)],
    )

    def parse(data: bytes) -> None:
        for each in parsers:
            try:
                request = each(data)
            except SluiceError:
                continue
            generate = getattr(request, "generate", None)
            if generate is not None:
                conversation_keys(generate.conversation)
                generate.SerializeToString()

    return parse


def _dialect_seeds() -> Sequence[bytes]:
    return [
        (
            b'{"model":"m","messages":[{"role":"user","content":"a"},{"role":"assistant","tool_calls":[{"id":"c","type":"function",'
            b'"function":{"name":"f","arguments":"{\\"a\\":1}"}}]},{"role":"tool","tool_call_id":"c","content":"x"}],"max_tokens":4,'
            b'"tools":[{"type":"function","function":{"name":"f","parameters":{}}}],"temperature":0.5,"stream":true}'
        ),
        b'{"model":"m","prompt":[1,2],"max_tokens":1,"stop":["a"],"logit_bias":{"3":1},"n":2}',
        (
            b'{"model":"m","input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"a"}]},{"type":'
            b'"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"1"}]}'
        ),
        (
            b'{"model":"m","max_tokens":4,"system":"s","messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":'
            b'"tool_result","tool_use_id":"t","content":"x"}]},{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f",'
            b'"input":{}}]}]}'
        ),
        b'{"token_ids":[1,2],"sampling_params":{"max_tokens":2}}',
        b'{"reward":1.0,"branch":"r/0","truncated":true,"wait_s":1}',
    ]


def _openai() -> Parse:
    from pydantic import ValidationError  # noqa: PLC0415

    from sluice.openai import chat, completions  # noqa: PLC0415
    from sluice.rpc import SluiceError  # noqa: PLC0415

    def parse(data: bytes) -> None:
        with contextlib.suppress(ValidationError, SluiceError):
            chat.parse(chat.StrictChatBody.model_validate_json(data))
        with contextlib.suppress(ValidationError, SluiceError):
            completions.parse_each(completions.StrictCompletionBody.model_validate_json(data))

    return parse


def _replies() -> Parse:
    from rollout_svc.replies import read_json_calls, split_thinking  # noqa: PLC0415
    from sluice.openai.answers import StopStringFilter  # noqa: PLC0415
    from sluice.v1 import tokens_pb2  # noqa: PLC0415

    def parse(data: bytes) -> None:
        text = data.decode(errors="replace")
        reasoning, rest = split_thinking(text, opened=len(data) % 2 == 1)
        said = read_json_calls(rest, ())
        message = tokens_pb2.ChatMessage(role="assistant", content=said.content, reasoning=reasoning)
        for call in said.calls:
            message.tool_calls.add(name=call.name, arguments=call.arguments)
        stops = StopStringFilter(["</s>", "a"])
        for part in text.split("b"):
            stops.after(part, "", last=False)

    return parse


def _reply_seeds() -> Sequence[bytes]:
    call = b'<tool_call>{"name": "f", "arguments": {"a": [1, "\\ud83d\\ude00"]}}</tool_call>'
    return [
        b"<think>\na\n</think>\n\nb" + call,
        call * 2,
        b'<tool_call>{"name": "f", "parameters": "{\\"a\\": 1}"}',
        b'<tool_call>{"name": "\\ud800", "arguments": "{\\"\\ud800\\": 1}"}</tool_call>',
    ]


def _frames() -> Parse:
    from sluice.environments.framing import BrokenFrameError, FrameReader, encode  # noqa: PLC0415

    def parse(data: bytes) -> None:
        reader, cut = FrameReader(), len(data) // 2
        try:
            for message in (*reader.feed(data[:cut]), *reader.feed(data[cut:])):
                if FrameReader().feed(encode(message)) != [message] and message == message:  # noqa: PLR0124 - not NaN
                    raise AssertionError(f"{message!r} changes on its way")
        except BrokenFrameError:
            pass

    return parse


def _frame_seeds() -> Sequence[bytes]:
    from sluice.environments.framing import encode  # noqa: PLC0415

    return [encode({"call": "score", "task": {"id": "a", "data": [1, 2.5, None, True]}}) * 2]


def _principals() -> Parse:
    from datetime import UTC, datetime  # noqa: PLC0415

    from sluice.rpc import SluiceError  # noqa: PLC0415
    from sluice.rpc.principals import Principals, parse_principals  # noqa: PLC0415

    known = Principals(
        parse_principals('[[principal]]\nname = "a"\nrole = "agent"\ntoken_sha256 = "' + "0" * 64 + '"', "file")
    )

    def parse(data: bytes) -> None:
        text = data.decode(errors="replace")
        with contextlib.suppress(ConfigError):
            Principals(parse_principals(text, "file"))
        for authorization in (data, text, b"Bearer " + data):
            try:
                known.identify(authorization, (text,), datetime.now(UTC))
            except SluiceError:
                continue

    return parse


def _principal_seeds() -> Sequence[bytes]:
    return [
        b'[[principal]]\nname = "a"\nrole = "agent"\ntoken_sha256 = "'
        + b"0" * 64
        + b'"\nexpires = 2027-06-30T00:00:00Z\n'
        b"quota = { requests_per_s = 50, burst = 100, in_flight = 64 }\n"
    ]


def _checkpoints() -> Parse:
    import logging  # noqa: PLC0415

    from sluice.batch_record import read_record_file  # noqa: PLC0415
    from sluice.checkpoint_files import complete_checkpoints  # noqa: PLC0415
    from sluice.telemetry import configure_logging  # noqa: PLC0415

    configure_logging("fuzz", "critical")
    logging.disable(logging.CRITICAL)
    directory = Path(tempfile.mkdtemp(dir="."))
    (directory / "step_1").mkdir()

    def parse(data: bytes) -> None:
        (directory / "step_1" / "manifest.json").write_bytes(data)
        complete_checkpoints(directory)
        (directory / "a.record").write_bytes(data)
        read_record_file(directory / "a.record")

    return parse


def _checkpoint_seeds() -> Sequence[bytes]:
    from sluice.batch_record import frame  # noqa: PLC0415
    from sluice.v1 import checkpoint_pb2, common_pb2  # noqa: PLC0415

    record = checkpoint_pb2.BatchRecord(policy_version=common_pb2.PolicyVersion(epoch=1, number=2))
    return [
        b'{"checkpoint": {"name": "step_1", "policyVersion": {"epoch": "1", "number": "1"}}, "files": [{"path": "a", "sizeBytes": "1"}]}',
        frame(record) * 2,
    ]


def _names() -> Parse:
    from sluice.versions import Version  # noqa: PLC0415
    from weightsync.format.manifest import check_shard, parse_run, parse_version_directory  # noqa: PLC0415
    from weightsync.format.safetensors import BadNameError, check_tensor  # noqa: PLC0415

    def parse(data: bytes) -> None:
        text = data.decode(errors="replace")
        parse_version_directory(text)
        for attempt in (lambda: parse_run(text), lambda: check_shard(text), lambda: check_tensor(text)):
            try:
                attempt()
            except BadNameError:
                continue
        with contextlib.suppress(ValueError):
            Version.parse(text)

    return parse


TARGETS: Mapping[str, Target] = {
    "safetensors": Target(_safetensors, ("weightsync.format",), _safetensors_seeds),
    "delta": Target(_delta, ("weightsync.codec",), _delta_seeds),
    "manifest": Target(_manifest, ("weightsync.format",), _manifest_seeds),
    "chunks": Target(_chunks, ("weightsync.format",), _chunk_seeds),
    "segments": Target(_segments, ("orchestrator_svc.journal",), _segment_seeds),
    "facts": Target(_facts, ("orchestrator_svc.journal",)),
    "allocation": Target(
        _allocation, ("sluice.config.allocation",), lambda: [b"vllm:d2t1+fsdp:d4", b"d4", b"vllm:d1|fsdp:d2c2p1"]
    ),
    "settings": Target(
        _settings,
        ("sluice.config",),
        lambda: [b'run = "r"\nmodel = "m"\n[trainer]\nlr = 1e-3\n[peers]\nrollout = ["a:1"]\n'],
    ),
    "convert": Target(
        _convert,
        ("sluice_convert",),
        lambda: (
            [b"\0" + bytes([n]) + b"a: 1\nlr: 1e-5\nmodel: m\n" for n in range(4)]
            + [b"\x03\x01python -m verl.trainer.main_ppo data.train_files=a trainer.nnodes=1 \\\n  a.b=c\n"]
        ),
    ),
    "dialects": Target(_dialects, ("gateway_svc", "sluice.openai"), _dialect_seeds),
    "openai": Target(_openai, ("sluice.openai",), _dialect_seeds),
    "replies": Target(_replies, ("rollout_svc.replies", "sluice.openai.answers"), _reply_seeds),
    "frames": Target(_frames, ("sluice.environments.framing",), _frame_seeds),
    "principals": Target(_principals, ("sluice.rpc.principals",), _principal_seeds),
    "checkpoints": Target(_checkpoints, ("sluice.checkpoint_files", "sluice.batch_record"), _checkpoint_seeds),
    "names": Target(_names, ("sluice.versions", "weightsync.format"), lambda: [b"1.2", b"runs/r", b"model.layers.0"]),
}


# One target in a process of its own.


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """The outcome for one parser.

    Attributes:
        inputs: Number of inputs that it took.
        before: Resident memory after its first inputs, in MiB.
        after: Resident memory at the end, in MiB.
    """

    inputs: int
    before: int
    after: int


def fuzz(name: str, directory: Path, findings: Findings, *, seconds: int, seed: int) -> Fuzzed:
    """Fuzz one parser for `seconds` seconds.

    Raises:
        ConfigError: if atheris is not installed.
    """
    if not any(VENV.glob("lib/python*/site-packages/atheris")):
        raise ConfigError(f"there is no atheris in {VENV}: run `make install-ecosystem` first")
    corpus = directory / f"corpus-{name}"
    corpus.mkdir()
    for number, data in enumerate(TARGETS[name].seeds()):
        (corpus / str(number)).write_bytes(data)
    command = [sys.executable, "-m", "benchmarks.fuzz.codecs", name, str(corpus), str(seconds), str(seed)]
    ended = subprocess.run(  # noqa: S603 - this module
        command, capture_output=True, timeout=START_S + seconds * 2, check=False, cwd=directory, env=_environment()
    )
    output = ended.stderr.decode(errors="replace") + ended.stdout.decode(errors="replace")
    if ended.returncode:
        raised = re.findall(r"^ === Uncaught Python exception: ===\n(.*)", output, re.MULTILINE)
        data = next(
            (path.read_bytes() for pattern in ("crash-*", "timeout-*", "oom-*") for path in directory.glob(pattern)),
            b"",
        )
        findings.add(f"codec {name}", raised[0] if raised else output[-300:], f"{data[:600]!r}\n{output[-1800:]}")
        for pattern in ("crash-*", "timeout-*", "oom-*"):
            for path in directory.glob(pattern):
                path.unlink()
    sizes = [int(each) for each in re.findall(r"rss: (\d+)Mb", output)]
    units = [int(each) for each in re.findall(r"^#(\d+)", output, re.MULTILINE)]
    return Fuzzed(max(units, default=0), sizes[0] if sizes else 0, sizes[-1] if sizes else 0)


def _environment() -> dict[str, str]:
    import os  # noqa: PLC0415

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def _packages() -> Iterator[str]:
    yield from map(str, VENV.glob("lib/python*/site-packages"))


def main(words: Sequence[str]) -> None:
    """Fuzz one parser in this process, with the words: its name, the folder of its inputs, seconds and seed."""
    name, corpus, seconds, seed = words
    sys.path += _packages()  # after our own: only packages that are nowhere else come from there
    import atheris  # noqa: PLC0415

    target = TARGETS[name]
    with atheris.instrument_imports(include=list(target.packages)):
        parse = target.load()
    options = [f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={MAX_BYTES}", f"-rss_limit_mb={MOST_MIB}"]
    options += [f"-timeout={ONE_INPUT_S}", "-print_final_stats=1"]
    atheris.Setup([name, *options, corpus], parse)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
