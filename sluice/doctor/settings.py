"""Checks of a run's settings on this machine: model, disk, shared memory, ports, certificates and tokens."""

from __future__ import annotations

import errno
import shutil
import socket
import ssl
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from sluice.certificates import now_utc, read_leaf
from sluice.chat_template import set_chat_template, template_text
from sluice.config import ConfigError, RunConfig, SecurityConfig, ServerConfig
from sluice.doctor.finding import Finding, ok, warning, wrong
from sluice.doctor.machine import GIB, size_text
from sluice.end_tokens import find_padding, read_end_tokens
from sluice.errors import reason_of
from sluice.file_systems import check_file_system
from sluice.rpc.access import Access
from sluice.run_files import uses

VERSIONS_IN_MEMORY = 2
"""Versions of the weights that a replica stages: the served one and the next."""

COPIES_ON_DISK = 8
"""Least disk space of a run, in sizes of the model: two checkpoints with the state of the optimizer, and two versions."""


def check_settings(run: RunConfig, services: Sequence[str], directory: Path | None = None) -> Iterator[Finding]:
    """Check the files, directories and ports on this machine that the settings name.

    Args:
        run: The settings.
        services: Services to be started here one by one. Their ports must be free.
        directory: The run's directory, if it differs from the one in the settings.
    """
    size, least, run_dir = weight_bytes(run.model), least_free(run), directory or run.run_dir
    if run.model:
        yield check_ends(run.model, run.chat_template, run.chat_template_kwargs)
    yield check_disk(directory or run.output_dir, size, least)
    versions = versions_of(run)
    if versions is not None and versions.exists() and not _same_disk(versions, run_dir):
        yield check_disk(versions, 0, least)
    yield from check_file_systems(run_dir)
    yield from check_files(run_dir, versions)
    stage = getattr(run.section("rollout"), "stage_dir", None)
    if stage is not None:
        yield check_stage(stage, size)
    for name in services:
        yield from check_ports(name, getattr(run.section(name), "server", None))
    yield from check_certificates(run.security)
    yield from check_tokens(run.security)


def check_ends(model: str, template: Path | None = None, arguments: Mapping[str, Any] | None = None) -> Finding:
    """Show which tokens end a turn of the model, which token pads, and which files name them. The hub is not asked.

    Args:
        model: Its directory or hub id.
        template: File of a chat template that replaces the model's.
        arguments: Arguments of the chat template.
    """
    from transformers import AutoConfig, AutoTokenizer  # noqa: PLC0415 - takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        config = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config()
        set_chat_template(tokenizer, template_text(template), arguments or {})
        ends = read_end_tokens(model, tokenizer, arguments, offline=True)
    except ConfigError as error:
        return wrong("end tokens", str(error), "correct the template, or the setting")
    except (OSError, ValueError, KeyError) as error:
        if Path(model).is_dir():
            return wrong("end tokens", f"{model}: {reason_of(error)}", "give the directory of a whole model")
        return warning("end tokens", f"{model} is not here yet", "`sluice fetch-model` downloads it")
    if not ends.ids:
        return wrong(
            "end tokens",
            f"no token ends a turn of {model}: only the maximum length ends a sample, and training refuses the model",
            "set eos_token in its tokenizer_config.json, or eos_token_id in its generation_config.json",
        )

    def shown(id_: int, places: Iterable[str]) -> str:
        return f"{tokenizer.convert_ids_to_tokens(id_)} ({id_}: {', '.join(places)})"

    found = "; ".join(shown(id_, ends.sources[id_]) for id_ in ends.ids)
    pad = find_padding(tokenizer, config)
    padding = "none" if pad is None else shown(pad[0], pad[1:])
    return ok("end tokens", f"sampling stops at, and training teaches: {found}; padding: {padding}")


def weight_bytes(model: str) -> int:
    """Return the size of a model's weights; 0 if it is not a directory."""
    return sum(each.stat().st_size for each in Path(model).glob("*.safetensors")) if model else 0


def least_free(run: RunConfig) -> int:
    """Return the bytes that must stay free on a run's disks. With less the run pauses."""
    disk = getattr(run.section("orchestrator"), "disk", None)
    return 0 if disk is None else int(disk.min_free_mb) << 20


def versions_of(run: RunConfig) -> Path | None:
    """Return the directory of the run's versions; None if it is ``weights`` in the run's directory."""
    directory: Path | None = getattr(run.section("weightsync"), "directory", None)
    return None if directory is None else directory / run.run


def _existing(directory: Path) -> Path:
    return next(each for each in (directory.absolute(), *directory.absolute().parents) if each.exists())


def _same_disk(one: Path, other: Path) -> bool:
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def check_disk(directory: Path, model_bytes: int, least_bytes: int = 0) -> Finding:
    """Check whether a run can write its files, and whether they have room.

    Args:
        directory: Where it writes them.
        model_bytes: Size of the model's weights.
        least_bytes: Bytes that must stay free.
    """
    existing = _existing(directory)
    if not existing.is_dir():
        return wrong("disk", f"{existing} is no directory", "choose another --output-dir")
    try:
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"x")
    except OSError as error:
        return wrong(
            "disk",
            f"{existing} cannot be written to: {error.strerror}",
            "choose another --output-dir, or change its rights",
        )
    free, needed = shutil.disk_usage(existing).free, max(COPIES_ON_DISK * model_bytes, GIB // 4)
    bound = f"; with less than {size_text(least_bytes)} a run pauses (orchestrator.disk.min_free_mb)"
    text = f"{directory}: {size_text(free)} free" + (bound if least_bytes else "")
    if free < least_bytes:
        return wrong(
            "disk", text, "make room (the lines `files` of a run show what takes how much), or lower that setting"
        )
    if free < needed:
        return wrong(
            "disk",
            text,
            f"this run needs {size_text(needed)} for checkpoints and weights: make room, or choose another --output-dir",
        )
    return ok("disk", text)


def check_file_systems(run_dir: Path) -> Iterator[Finding]:
    """Check whether the file system of the run's directory supports the journal. The directory need not exist yet."""
    problem = check_file_system(run_dir)
    if problem is not None:
        yield (wrong if problem.fatal else warning)("file system", problem.found, problem.remedy)


def check_files(run_dir: Path, versions: Path | None) -> Iterator[Finding]:
    """Show the disk usage of a run's files by kind, the largest first; nothing if there is no such run.

    Args:
        run_dir: Its directory.
        versions: The directory of its versions; None: ``weights`` in its directory.
    """
    if not run_dir.is_dir():
        return
    found = uses(run_dir, versions)
    yield ok("files", f"{run_dir} takes {size_text(sum(each.size_bytes for each in found))}")
    for each in found:
        count = "1 file" if each.files == 1 else f"{each.files:,} files"
        yield ok("files", f"{size_text(each.size_bytes):>10}  {each.kind.name}, {count}; {each.kind.bound}")


def check_stage(directory: Path, model_bytes: int) -> Finding:
    """Check whether staged versions have room in shared memory."""
    if not directory.is_dir():
        return wrong(
            "shared memory",
            f"there is no {directory}",
            "set rollout.stage_dir to a directory in memory, or on a fast disk",
        )
    free, needed = shutil.disk_usage(directory).free, VERSIONS_IN_MEMORY * model_bytes
    text = f"{directory}: {size_text(free)} free"
    if free < needed:
        return wrong(
            "shared memory",
            text,
            f"two versions of this model take {size_text(needed)}: give the container more (--shm-size), or set rollout.stage_dir to a disk",
        )
    return ok("shared memory", text)


def check_ports(service: str, server: ServerConfig | None) -> Iterator[Finding]:
    """Check whether the ports of a service are free."""
    if server is None:
        return
    ports = {"port": server.port, "http_port": getattr(server, "http_port", None), "metrics_port": server.metrics_port}
    for name, port in ports.items():
        if not port:
            continue
        setting = f"{service}.server.{name}"
        problem = _busy(server.host, port)
        if problem:
            yield wrong(
                "ports",
                f"{setting}: {server.host}:{port} cannot be used: {problem}",
                f"end that process, or set {setting}; 0 takes any free port",
            )
        else:
            yield ok("ports", f"{setting}: {port} is free")


def _busy(host: str, port: int) -> str:
    """Return why a server cannot listen there; empty if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return _listener(port) if error.errno == errno.EADDRINUSE else str(error.strerror)
    return ""


def _listener(port: int) -> str:
    for each in psutil.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
            return f"process {each.pid} ({' '.join(psutil.Process(each.pid).cmdline())[:80]}) listens there"
    return "another process listens there"


def check_certificates(security: SecurityConfig) -> Iterator[Finding]:
    """Check this process's certificate against its own authorities, as a peer with the same authorities would."""
    if security.tls_cert is None or security.tls_key is None:
        return
    problem = ""
    if security.tls_ca is not None:
        problem = handshake_problem(security.tls_cert, security.tls_key, security.tls_ca)
    try:
        leaf = read_leaf(security.tls_cert)
    except ConfigError as error:
        yield wrong("certificate", str(error), "correct security.tls_cert")
        return
    until = f"{security.tls_cert} expires at {leaf.expires:%Y-%m-%d %H:%M} UTC"
    if problem:
        yield wrong(
            "certificate",
            f"{security.tls_cert}: {problem}",
            "issue it again by the authority in security.tls_ca (`sluice certs renew`), and see that key, certificate and authority"
            " belong together",
        )
    elif leaf.is_due(now_utc()):
        yield warning(
            "certificate", until, "renew it: `sluice certs renew`, daily; running services take the new one up"
        )
    elif security.tls_ca is None:
        yield ok("certificate", f"{until}; there are no authorities (security.tls_ca) to check it against")
    else:
        yield ok("certificate", f"{until}, and is valid for the authorities in {security.tls_ca}")
    if security.tls_key.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield warning(
            "certificate", f"others can read the private key {security.tls_key}", f"chmod 600 {security.tls_key}"
        )


def handshake_problem(certificate: Path, key: Path, authorities: Path) -> str:
    """Shake hands in memory; return why the client refuses the certificate, or why there is nothing to show."""
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(certificate, key)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.load_verify_locations(authorities)
    except (OSError, ssl.SSLError) as error:
        return _ssl_text(error)
    client.check_hostname = False
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    done: set[ssl.SSLObject] = set()
    while len(done) < len(sides):
        for side in sides:
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                return _ssl_text(error)
    return ""


def _ssl_text(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return str(reason).lower().replace("_", " ")


def check_tokens(security: SecurityConfig) -> Iterator[Finding]:
    """Look at the files of tokens and principals."""
    if security.principals_file is not None:
        try:
            Access(security)
        except ConfigError as error:
            yield wrong("tokens", str(error), "`sluice token new` makes tokens and principals")
            return
    files = {
        "principals_file": security.principals_file,
        "token_file": security.token_file,
        "admin_token_file": security.admin_token_file,
        "dispatcher_token_file": security.dispatcher_token_file,
        **{f"service_token_files.{name}": path for name, path in security.service_token_files.items()},
    }
    for name, path in files.items():
        if path is None:
            continue
        try:
            mode = path.stat().st_mode
        except OSError as error:
            yield wrong(
                "tokens", f"security.{name}: {path}: {error.strerror}", "correct the path, or `sluice token new`"
            )
            continue
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            yield warning("tokens", f"security.{name}: others can read {path}", f"chmod 600 {path}")
        else:
            yield ok("tokens", f"security.{name}: {path}")
