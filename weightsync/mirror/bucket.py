"""The object store behind a URL: whole objects in and out, each call with a deadline and a bounded number of attempts."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from sluice.backoff import Backoff
from sluice.config import ConfigError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

_ATTEMPTS = 4
"""Attempts of one request, within seconds, against short failures. For longer ones the caller retries, with longer pauses."""

_CONNECT_S = 10
"""Seconds to connect, after which a broken link is noticed."""

_PAGE = 1000
"""Names per list request, the maximum that S3 returns."""

_LONGEST_REASON = 300

_HTTP_ALLOWED = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")


class BucketError(Exception):
    """A request to the store failed. The message says what to do, and holds no credentials."""


class BucketUnreachableError(BucketError):
    """The store could not be reached, or failed, in several attempts; the same call may succeed later."""


class ObjectMissingError(BucketError):
    """There is no object of this name."""


class ObjectTooLargeError(BucketError):
    """The object is larger than allowed."""


class StoredObject(NamedTuple):
    """An object as a list shows it."""

    name: str
    size: int
    modified: datetime


class Bucket:
    """An object store, or a folder of one.

    Args:
        store: The store; names are relative to it.
        url: Name of the store in messages.
        deadline_s: Seconds that one request may take.
    """

    def __init__(self, store: ObjectStore, url: str, deadline_s: float) -> None:
        import obstore  # noqa: PLC0415 - an extra: only services with an object store need it

        self.url = url
        self._obstore = obstore
        self._store = store
        self._deadline_s = deadline_s

    @classmethod
    def open(cls, url: str, deadline_s: float) -> Bucket:
        """Return the store behind a URL that `sluice.config` accepted. Credentials come from the environment.

        Raises:
            ConfigError: if obstore is not installed, or the environment and the URL do not make a store.
        """
        try:
            from obstore import store as stores  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                f"{url} needs the package obstore: install it with pip install 'sluice[objectstore]'"
            ) from error
        try:
            if url.startswith("file:"):
                return cls(stores.from_url(url, mkdir=True), url, deadline_s)
            allow_http = any(os.environ.get(name, "").lower() in {"1", "true"} for name in _HTTP_ALLOWED)
            store = stores.from_url(
                url,
                client_options={
                    "allow_http": allow_http,
                    "connect_timeout": f"{min(_CONNECT_S, deadline_s):g}s",
                    "timeout": f"{deadline_s:g}s",
                },
                retry_config={"max_retries": 0},  # `_attempt` retries
            )
        except Exception as error:
            raise ConfigError(
                f"no object store at {url}: {_reason(error)}; check the URL and the variables AWS_..., GOOGLE_... or AZURE_..."
            ) from error
        return cls(store, url, deadline_s)

    async def read(self, name: str, size_limit: int) -> memoryview:
        """Return an object's bytes.

        Raises:
            ObjectMissingError: if there is no such object.
            ObjectTooLargeError: if it has more bytes than the limit; none are read then.
            BucketError: if the store fails.
        """

        async def get() -> memoryview:
            found = await self._obstore.get_async(self._store, name)
            if found.meta["size"] > size_limit:
                raise ObjectTooLargeError(
                    f"{self.url}/{name} has {found.meta['size']} bytes, at most {size_limit} are expected: remove it"
                )
            return memoryview(await found.bytes_async())

        return await self._attempt("read", name, get)

    async def write(self, name: str, data: bytes) -> None:
        """Store an object, or the same one again. Raises BucketError."""

        async def put() -> None:
            await self._obstore.put_async(self._store, name, data, use_multipart=False)

        await self._attempt("write", name, put)

    async def create(self, name: str, data: bytes) -> bool:
        """Store an object if there is none of this name; return False if there is one. Raises BucketError.

        False may also mean that an earlier attempt stored it but its answer was lost: compare the stored object.
        """

        async def put() -> bool:
            try:
                await self._obstore.put_async(self._store, name, data, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            return True

        return await self._attempt("create", name, put)

    async def list(self, folder: str, *, after: str | None = None) -> list[StoredObject]:
        """Return the objects of a folder in the order of their names, only those after `after`. Raises BucketError."""

        async def collect() -> list[StoredObject]:
            found = []
            async for page in self._obstore.list(self._store, folder, offset=after, chunk_size=_PAGE):
                found += [StoredObject(each["path"], each["size"], each["last_modified"]) for each in page]
            return sorted(found)

        return await self._attempt("list", folder, collect)

    async def delete(self, names: Sequence[str]) -> None:
        """Remove objects; ignore missing ones. Raises BucketError."""
        for begin in range(0, len(names), _PAGE):
            page = list(names[begin : begin + _PAGE])

            async def remove(page: Sequence[str] = page) -> None:
                await self._obstore.delete_async(self._store, page)

            try:
                await self._attempt("delete", page[0], remove)
            except ObjectMissingError:  # stores without bulk deletes stop there
                for name in page:
                    await self._delete_one(name)

    async def _delete_one(self, name: str) -> None:
        async def remove() -> None:
            await self._obstore.delete_async(self._store, name)

        try:
            await self._attempt("delete", name, remove)
        except ObjectMissingError:
            return

    async def _attempt(self, verb: str, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call up to `_ATTEMPTS` times."""
        what = f"cannot {verb} {self.url}/{name}"
        backoff = Backoff()
        while True:
            try:
                async with asyncio.timeout(self._deadline_s):
                    return await call()
            except TimeoutError:
                reason = f"no answer within {self._deadline_s:g} s"
            except FileNotFoundError as error:
                raise ObjectMissingError(f"{what}: there is no such object") from error
            except self._obstore.exceptions.BaseError as error:
                reason = _reason(error)
                if isinstance(error, self._final):
                    raise BucketError(
                        f"{what}: {reason}; check the credentials in the environment and what they allow"
                    ) from None
            pause_s = backoff.fail()
            if backoff.failures >= _ATTEMPTS:
                raise BucketUnreachableError(f"{what} in {_ATTEMPTS} attempts: {reason}") from None
            await asyncio.sleep(pause_s)

    @property
    def _final(self) -> tuple[type[Exception], ...]:
        """Return the errors that retrying does not fix."""
        exceptions = self._obstore.exceptions
        return (
            exceptions.PermissionDeniedError,
            exceptions.UnauthenticatedError,
            exceptions.InvalidPathError,
            exceptions.NotSupportedError,
            exceptions.UnknownConfigurationKeyError,
        )


def _reason(error: Exception) -> str:
    """Return the message of a store's error on one line, without parts that may hold a key or a signature.

    From an XML body, take only the code and the message. Otherwise leave out the dump of the error's internals and the queries of
    URLs.
    """
    text = str(error).split("\n\nDebug source", 1)[0]
    told = re.findall(r"<(?:Code|Message)>([^<]*)<", text)
    text = ": ".join(told) if told else text.split("<", 1)[0]
    text = re.sub(r"\?\S*", "?...", " ".join(text.split()))
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
