"""Machines of a test: network namespaces on one bridge, each with an address of its own. They need root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType
from typing import Self

import pytest

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("nsenter") is None,
    reason="network namespaces need root, iproute2 and nsenter",
)


class Machines:
    """Namespaces `0`, `1`, ... with the addresses 10.77.0.1, 10.77.0.2, ...; the bridge has a namespace of its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._name = f"sluice-{os.getpid()}"

    def __enter__(self) -> Self:
        try:
            self._ip("netns", "add", self._hub)
            self._ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
            self._ip("-n", self._hub, "link", "set", "bridge", "up")
            for number in range(self.count):
                self._add(number)
        except subprocess.CalledProcessError as error:
            self._delete()
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._delete()

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def enter(self, number: int) -> tuple[str, ...]:
        """The words before a command that run it on a machine."""
        return ("nsenter", f"--net=/run/netns/{self._machine(number)}")

    def cut(self, number: int) -> None:
        """Take a machine off the network, without any notice to the others."""
        self._ip("-n", self._hub, "link", "set", f"v{number}", "down")

    def _add(self, number: int) -> None:
        name, end = self._machine(number), f"v{number}"
        self._ip("netns", "add", name)
        self._ip("-n", self._hub, "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._ip("-n", self._hub, "link", "set", end, "master", "bridge", "up")
        self._ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
        self._ip("-n", name, "link", "set", "eth0", "up")
        self._ip("-n", name, "link", "set", "lo", "up")

    def _delete(self) -> None:
        for name in (*(self._machine(number) for number in range(self.count)), self._hub):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=30)

    @property
    def _hub(self) -> str:
        return f"{self._name}-hub"

    def _machine(self, number: int) -> str:
        return f"{self._name}-{number}"

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)
