"""Principals: who may call, by which token or certificate, in which role and how often.

A principals file is TOML with one table per principal:

    [[principal]]
    name = "replica-0"
    role = "replica"
    token_sha256 = "..."                  # hex digest of the token; the token itself is in no file of a server
    certificate = "spiffe://site/replica" # common name, or URI among the alternative names, of the client certificate
    expires = 2027-06-30T00:00:00Z
    quota = { requests_per_s = 20, burst = 40, in_flight = 8 }

A principal has a token, a certificate, or both; then a call must bring both. Tables may share a name if they agree in role and
quota: two tokens are valid side by side while one replaces the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import tempfile
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, Self, get_args

import grpc
import tomli_w
from pydantic import AwareDatetime, Field, ValidationError, model_validator

from sluice.config import ConfigError, Section, SecurityConfig
from sluice.rpc.client_security import read_token
from sluice.rpc.errors import SluiceError

Role = Literal["admin", "agent", "dispatcher", "gateway", "replica", "tenant", "trainer", "viewer"]
"""What a principal is for; `sluice.rpc.access.ACCESS` says what each role may call. `admin` may call everything."""

ROLES: tuple[Role, ...] = get_args(Role)

NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"

_TOKEN_BYTES = 32

_FILE_BYTES = 4 << 20
_MOST_PRINCIPALS = 10_000

_PROBLEMS = 5
"""Mistakes in a file that one error lists."""

OVERLAP_S = 60.0
"""Seconds for which a server admits the old token of a token file that has changed: callers on its machine read the file too."""

_BEARER = re.compile(rb"bearer ([\x21-\x7e]+)", re.IGNORECASE)


class Quota(Section):
    """How much one principal may ask of one server, all its connections together."""

    requests_per_s: float | None = Field(None, gt=0, description="Calls per second in the long run. Unset: no limit.")
    burst: int | None = Field(
        None,
        ge=1,
        description="Calls that may come at once after a pause. Unset: what comes in one second, at least 1.",
    )
    in_flight: int | None = Field(
        None, ge=1, description="Calls in progress at once, streams included. Unset: no limit."
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.burst is not None and self.requests_per_s is None:
            raise ValueError("burst needs requests_per_s: it says how many calls may come at once at that rate")
        return self


class Entry(Section):
    """One table of a principals file."""

    name: str = Field(pattern=NAME, description="Name in logs, in the journal and in the log of calls.")
    role: Role = Field(description="What it may call.")
    token_sha256: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="SHA-256 of its token, as 64 hexadecimal digits."
    )
    certificate: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="Its client certificate: a URI among the alternative names if this has `://`, else the common name.",
    )
    quota: Quota = Field(default_factory=Quota, description="How much it may ask.")
    expires: AwareDatetime | None = Field(None, description="When it ceases to be valid, with a time zone.")

    @model_validator(mode="after")
    def _known_by_something(self) -> Self:
        if self.token_sha256 is None and self.certificate is None:
            raise ValueError("give token_sha256, certificate or both; `sluice token new` makes a token")
        return self


class _File(Section):
    principal: list[Entry] = Field(min_length=1, max_length=_MOST_PRINCIPALS, description="The principals.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        first: dict[str, Entry] = {}
        for entry in self.principal:
            same = first.setdefault(entry.name, entry)
            if (same.role, same.quota) != (entry.role, entry.quota):
                raise ValueError(f"the tables of principal {entry.name!r} must agree in role and quota")
        for what, values in (
            ("token_sha256", [entry.token_sha256 for entry in self.principal]),
            ("certificate", [entry.certificate for entry in self.principal if entry.token_sha256 is None]),
        ):
            given = [value for value in values if value is not None]
            if len(set(given)) != len(given):
                raise ValueError(f"two tables have the same {what}: nobody could tell them apart")
        return self


@dataclass(frozen=True, slots=True)
class Principal:
    """Who makes a call.

    Attributes:
        name: Its name in logs.
        role: What it may call.
        quota: How much it may ask.
        listed: Whether it comes from a principals file. If not, services may share its token.
    """

    name: str
    role: Role
    quota: Quota
    listed: bool = False


ANYONE = Principal("anyone", "admin", Quota())
"""Every caller of a server that knows no principals."""


def digest_of(token: str | bytes) -> str:
    """Return the digest of a token, as in a principals file. Tokens have 256 random bits, so a plain hash cannot be inverted."""
    return hashlib.sha256(token.encode() if isinstance(token, str) else token).hexdigest()


def parse_principals(text: str, source: str) -> list[Entry]:
    """Parse the text of a principals file.

    Args:
        text: The text.
        source: Its name in errors.

    Raises:
        ConfigError: if it does not have the format. The message repeats no value of the file, since a value may be a token.
    """
    try:
        return _File.model_validate(tomllib.loads(text)).principal
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{source} is not TOML: {str(error) or 'nested too deep'}") from None
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        lines = [_describe(problem["loc"], problem["type"], problem["msg"]) for problem in problems[:_PROBLEMS]]
        raise ConfigError(f"{source}: {'; '.join(lines)}") from None


def _describe(location: tuple[int | str, ...], kind: str, message: str) -> str:
    place = ".".join(str(part + 1) if isinstance(part, int) else part for part in location)
    if kind == "extra_forbidden":
        keys = Entry.model_fields if len(location) > 1 else _File.model_fields
        message = f"unknown key; there are {', '.join(keys)}"
    elif kind == "string_pattern_mismatch":
        fields = {"name": Entry.model_fields["name"], "token_sha256": Entry.model_fields["token_sha256"]}
        field = fields.get(str(location[-1]))
        message = "must be lower-case letters, digits, `.`, `_`, `-`" if field is fields["name"] else message
        message = "must be 64 hexadecimal digits in lower case" if field is fields["token_sha256"] else message
    return f"{place}: {message.removeprefix('Value error, ')}" if place else message.removeprefix("Value error, ")


def read_principals(path: Path) -> list[Entry]:
    """Read a principals file.

    Raises:
        ConfigError: if it cannot be read, if any user may write to it, or if it does not have the format.
    """
    return parse_principals(_read(path), f"the principals file {path}")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & 0o002:
                raise ConfigError(f"any user may write to the principals file {path}: `chmod o-w {path}`")
            content = file.read(_FILE_BYTES + 1)
        if len(content) > _FILE_BYTES:
            raise ConfigError(f"the principals file {path} has more than {_FILE_BYTES >> 20} MiB; is it another file?")
        return content.decode()
    except OSError as error:
        raise ConfigError(
            f"cannot read the principals file {path}: {error.strerror}; correct security.principals_file, or begin one"
            " with `sluice token new`"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the principals file {path} is not UTF-8 text, at byte {error.start}") from error


class Principals:
    """The principals that a server knows.

    Args:
        entries: The tables of a principals file.
        shared: Entries whose tokens are in files that callers read, too.

    Attributes:
        expire: Whether any of them expires.
        know_certificates: Whether any of them is known by a certificate.
    """

    def __init__(self, entries: Sequence[Entry], shared: Sequence[Entry] = ()) -> None:
        self.shared = tuple(shared)
        self._by_digest = {entry.token_sha256: entry for entry in entries if entry.token_sha256 is not None}
        self._by_certificate = {
            entry.certificate: entry
            for entry in entries
            if entry.token_sha256 is None and entry.certificate is not None
        }
        self._principals = {
            entry.name: Principal(entry.name, entry.role, entry.quota, listed=entry not in self.shared)
            for entry in entries
        }
        self.expire = any(entry.expires is not None for entry in entries)
        self.know_certificates = any(entry.certificate is not None for entry in entries)

    @property
    def names(self) -> Collection[str]:
        """The names."""
        return self._principals.keys()

    @classmethod
    def of(cls, security: SecurityConfig, before: Principals | None = None) -> Self | None:
        """Return the principals that a server with these settings admits; None if it admits everyone.

        Without a principals file, the token files are the tokens of the principals `agent` and `admin`. In both cases
        `security.dispatcher_token_file` adds the principal `dispatcher`.

        Args:
            security: The settings.
            before: The principals so far. If a token file of theirs has changed, its old token is admitted for `OVERLAP_S` more, since
                callers may read the file a moment later than this server.

        Raises:
            ConfigError: if a file cannot be used, or if with these settings there is a call that nobody could make.
        """
        if security.principals_file is not None:
            entries, shared = read_principals(security.principals_file), []
        else:
            entries = shared = _of_token_files(security)
            if not entries:
                return None
        shared = [*shared, *_dispatcher(entries, security)]
        shared += _leaving(shared, before)
        principals = cls([*(entry for entry in shared if entry not in entries), *entries], shared)
        if principals.know_certificates and not security.require_client_cert:
            raise ConfigError(
                f"{security.principals_file} names certificates, which clients show only if"
                " security.require_client_cert is set, with tls_cert, tls_key and tls_ca"
            )
        return principals

    def identify(self, authorization: str | bytes | None, certificate: Collection[str], now: datetime) -> Principal:
        """Return the principal that makes a call.

        A call with a wrong token is refused: it is not identified by its certificate instead.

        Args:
            authorization: The call's `authorization` metadata or header.
            certificate: Common name and URIs of the verified client certificate, if there is one.
            now: The present time.

        Raises:
            SluiceError: UNAUTHENTICATED.
        """
        entry = self._of_token(authorization) if authorization else self._of_certificate(certificate)
        if entry is None:
            raise SluiceError(
                grpc.StatusCode.UNAUTHENTICATED,
                "TOKEN_REQUIRED",
                "this server knows no principal with "
                + ("this token" if authorization else "this certificate" if certificate else "no token")
                + ": send the metadata `authorization: Bearer TOKEN` with the token of one of its principals"
                " (security.token_file of the caller; security.principals_file, or token_file and admin_token_file,"
                " of this server)",
            )
        if entry.token_sha256 is not None and entry.certificate is not None and entry.certificate not in certificate:
            raise SluiceError(
                grpc.StatusCode.UNAUTHENTICATED,
                "CERTIFICATE_REQUIRED",
                f"principal {entry.name!r} must show its client certificate beside its token: set security.tls_cert and"
                " tls_key of the caller to the certificate that the principals file names",
            )
        if entry.expires is not None and now >= entry.expires:
            raise SluiceError(
                grpc.StatusCode.UNAUTHENTICATED,
                "PRINCIPAL_EXPIRED",
                f"this entry of principal {entry.name!r} expired at {entry.expires.isoformat()}: get another token, or have"
                " `expires` in the principals file moved",
            )
        return self._principals[entry.name]

    def _of_token(self, authorization: str | bytes) -> Entry | None:
        given = authorization.encode(errors="replace") if isinstance(authorization, str) else authorization
        match = _BEARER.fullmatch(given)
        if match is None:
            return None
        # The table is looked up by a digest, whose bits a caller cannot choose. So the time of the look-up reveals nothing.
        digest = digest_of(match[1])
        entry = self._by_digest.get(digest)
        if entry is None or entry.token_sha256 is None or not hmac.compare_digest(entry.token_sha256, digest):
            return None
        return entry

    def _of_certificate(self, names: Collection[str]) -> Entry | None:
        return next((self._by_certificate[name] for name in names if name in self._by_certificate), None)


def files_of(security: SecurityConfig) -> list[Path]:
    """Return the files that `Principals.of` reads."""
    tokens = (security.token_file, security.admin_token_file) if security.principals_file is None else ()
    paths = (security.principals_file, *tokens, security.dispatcher_token_file)
    return [path for path in paths if path is not None]


def _of_token_files(security: SecurityConfig) -> list[Entry]:
    """Return the principals `agent` and `admin`. If both files hold the same token, it belongs to `admin`.

    Raises:
        ConfigError: if a file cannot be used, or there is no admin.
    """
    if security.admin_token_file is None:
        if security.token_file is not None:
            raise ConfigError(
                "security.token_file without security.admin_token_file would leave the admin RPCs unusable;"
                " set both (they may name the same file), or security.principals_file"
            )
        return []
    admin = Entry(name="admin", role="admin", token_sha256=digest_of(read_token(security.admin_token_file)))
    if security.token_file is None:
        return [admin]
    return [Entry(name="agent", role="agent", token_sha256=digest_of(read_token(security.token_file))), admin]


def _dispatcher(entries: list[Entry], security: SecurityConfig) -> list[Entry]:
    """Return the principal `dispatcher`, if its token file is set and no entry has that token.

    Raises:
        ConfigError: if the token belongs to a principal with another role, or another principal has the name.
    """
    path = security.dispatcher_token_file
    if path is None:
        return []
    own = Entry(name="dispatcher", role="dispatcher", token_sha256=digest_of(read_token(path)))
    for entry in entries:
        if entry.token_sha256 == own.token_sha256 and entry.role != own.role:
            raise ConfigError(
                f"security.dispatcher_token_file {path} holds the token of principal {entry.name!r} with the role"
                f" {entry.role}, which replicas must not get: give the role dispatcher a token of its own"
            )
    if any(entry.token_sha256 == own.token_sha256 for entry in entries):
        return []
    if any(entry.name == own.name for entry in entries):
        raise ConfigError(
            f"{security.principals_file} has a principal 'dispatcher' with another token than"
            f" security.dispatcher_token_file {path}: rename that principal, or correct the file"
        )
    return [own]


def _leaving(shared: list[Entry], before: Principals | None) -> list[Entry]:
    """Return the entries of tokens that were in a token file until now. They expire soon."""
    if before is None:
        return []
    now = now_utc()
    until = now + timedelta(seconds=OVERLAP_S)
    known = {entry.token_sha256 for entry in shared}
    return [
        entry if entry.expires is not None else entry.model_copy(update={"expires": until})
        for entry in before.shared
        if entry.token_sha256 not in known and (entry.expires is None or entry.expires > now)
    ]


def now_utc() -> datetime:
    """Return the time that `Principals.identify` compares with `expires`."""
    return datetime.now(UTC)


def new_token() -> str:
    """Return a token that nobody can guess."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


def add_token(path: Path, name: str, role: Role, expires: datetime | None = None) -> str:
    """Make a token for a new principal and append its digest to a principals file. The file is created if there is none.

    Returns:
        The token. It is not written to any file.

    Raises:
        ConfigError: if the file cannot be changed, is a symbolic link, or has a principal of that name.
    """
    token = new_token()
    table: dict[str, object] = {"name": name, "role": role, "token_sha256": digest_of(token)}
    if expires is not None:
        table["expires"] = expires
    with locked_folder(path.parent):
        if path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link: name the file that it points to")
        before = _read(path) if path.exists() else ""
        if before and name in {entry.name for entry in parse_principals(before, f"the principals file {path}")}:
            raise ConfigError(f"{path} has a principal {name!r}: choose another name, or remove its table first")
        text = before + ("\n" if before and not before.endswith("\n") else "") + ("\n" if before else "")
        text += "[[principal]]\n" + tomli_w.dumps(table)
        parse_principals(text, f"the principals file {path} with the new table")
        try:
            replace_private(path, text.encode())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return token


def replace_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, in one step: a reader sees the old content or the new."""
    replace_files({path: (content, 0o600)})


def replace_files(contents: Mapping[Path, tuple[bytes, int]]) -> None:
    """Write files of one folder with their modes: first all to temporary files, then rename each.

    Raises:
        OSError: if a file cannot be written. Then none is replaced, unless the disk fails between two renames.
    """
    written: dict[Path, Path] = {}
    try:
        for path, (content, mode) in contents.items():
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
            written[path] = Path(name)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
        for path, new in written.items():
            new.rename(path)
    except BaseException:
        for new in written.values():
            new.unlink(missing_ok=True)
        raise
    for folder in {path.parent for path in contents}:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock this folder against other processes that change its files, so that no change is lost."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cannot use the folder {folder}: {error.strerror}; make it first") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
