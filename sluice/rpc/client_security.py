"""Tokens and certificates of a client, for programs without a run's settings. Imports only the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from sluice.errors import ConfigError

if TYPE_CHECKING:
    from sluice.config import SecurityConfig

Security: TypeAlias = "SecurityConfig | ClientSecurity"
"""Source of tokens and certificates: the settings of a process, or those of a client."""


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """What a client sends and checks: the part of `sluice.config.SecurityConfig` that clients use, under the same names.

    Attributes:
        token_file: File with the bearer token of a principal.
        admin_token_file: File with the token that is sent instead if the role `agent` is not enough.
        dispatcher_token_file: File with the token that the orchestrator and gateways send to replicas.
        tls_ca: PEM authorities that the server's certificate is checked against. TLS is used if this or `tls_cert` is set.
        tls_cert: PEM certificate chain of the client, where the server asks for one.
        tls_key: PEM private key of `tls_cert`.
        tls_address_name: Name in the certificates of servers that are called by an IP address.
    """

    token_file: Path | None = None
    admin_token_file: Path | None = None
    dispatcher_token_file: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_address_name: str | None = None

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: if a certificate has no key, or a key no certificate.
        """
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together: set both or neither")


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: if the file cannot be read, or does not hold exactly one token.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the token file {path}: {error.strerror}; correct security.token_file, admin_token_file or"
            " dispatcher_token_file"
        ) from error
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise ConfigError(
            f"token file {path} must hold one line of ASCII without blanks, such as `openssl rand -hex 32` prints"
        )
    return token
