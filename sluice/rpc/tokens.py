"""Bearer tokens: two roles, read from files, compared in constant time."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Literal

import grpc

from sluice.config import ConfigError, SecurityConfig
from sluice.rpc.errors import SluiceError

__all__ = ["Role", "TokenCheck", "client_token"]

Role = Literal["agent", "admin"]
"""`agent`: inference, episodes, environments. `admin`: everything."""

_SCHEME = "Bearer "


def _read(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token file {path}: {error.strerror}") from error
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise ConfigError(
            f"token file {path} must hold one line of ASCII without blanks, such as `openssl rand -hex 32` prints"
        )
    return token


def client_token(security: SecurityConfig, role: Role) -> str | None:
    """Return the token that a client of this role sends; the other role's if only that is configured; None without any."""
    preferred, other = security.admin_token_file, security.token_file
    if role == "agent":
        preferred, other = other, preferred
    path = preferred or other
    return None if path is None else _read(path)


class TokenCheck:
    """Decides whether a call's ``authorization`` metadata has the role that its service asks for."""

    def __init__(self, security: SecurityConfig) -> None:
        self._agent = None if security.token_file is None else _read(security.token_file).encode()
        self._admin = None if security.admin_token_file is None else _read(security.admin_token_file).encode()
        if self._agent is not None and self._admin is None:
            raise ConfigError(
                "security.token_file without security.admin_token_file would leave the admin RPCs unusable;"
                " set both (they may name the same file)"
            )

    @property
    def open(self) -> bool:
        """Whether no token is configured, so that every call passes."""
        return self._admin is None

    def verify(self, authorization: str | bytes | None, role: Role) -> None:
        """Check one call.

        Raises:
            SluiceError: UNAUTHENTICATED without a known token, PERMISSION_DENIED with a token of the lesser role.
        """
        if self._admin is None:
            return
        given = authorization.encode() if isinstance(authorization, str) else authorization or b""
        scheme, token = given[: len(_SCHEME)], given[len(_SCHEME) :]
        # Both comparisons always run, so that the time does not reveal which token was closer.
        is_admin = hmac.compare_digest(token, self._admin)
        is_agent = self._agent is not None and hmac.compare_digest(token, self._agent)
        if scheme.lower() != _SCHEME.lower().encode() or not (is_admin or is_agent):
            raise SluiceError(
                grpc.StatusCode.UNAUTHENTICATED,
                "TOKEN_REQUIRED",
                "send the metadata `authorization: Bearer TOKEN` with a token of this server"
                " (security.token_file or security.admin_token_file)",
            )
        if role == "admin" and not is_admin:
            raise SluiceError(
                grpc.StatusCode.PERMISSION_DENIED,
                "ADMIN_REQUIRED",
                "this call needs the admin token (security.admin_token_file); the token given has the role agent",
            )
