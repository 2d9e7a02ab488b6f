"""Page tokens that are numbers: where the next page of a list begins."""

from __future__ import annotations

from sluice.rpc import SluiceError

_MOST_DIGITS = 18
"""Digits of a token: no list is longer, and Python refuses to read a number of more than 4,300 digits."""


def page_start(token: str, rpc: str) -> int | None:
    """Return the number in a page token; None for the empty one, which asks for the first page.

    Args:
        token: The token, which the client may have made up.
        rpc: Name of the RPC that gives such tokens, for the error.

    Raises:
        SluiceError: INVALID_ARGUMENT if the server cannot have given it.
    """
    if not token:
        return None
    if len(token) > _MOST_DIGITS or not (token.isascii() and token.isdecimal()) or int(token) == 0:
        raise SluiceError.invalid_argument(
            "page_token", f"is not one that {rpc} gave: begin with an empty one, then send back `next_page_token`"
        )
    return int(token)
