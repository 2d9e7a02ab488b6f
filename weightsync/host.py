"""The identity of a machine, by which an engine finds the source on its own host."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The kernel's name of this boot: equal in all containers of a machine, which have host names and machine ids of their own."""


def host_id(boot_id: Path = BOOT_ID) -> str:
    """Return a name that is equal for processes of one machine and differs from that of any other: 32 hexadecimal digits.

    Where the kernel gives no boot id (sandboxes, other systems), it is made of the host name instead.
    """
    try:
        seed = boot_id.read_text().strip()
    except OSError:
        seed = ""
    # A digest, because the boot id must not leave this machine.
    return hashlib.blake2b((seed or socket.gethostname()).encode(), digest_size=16, person=b"sluice-host").hexdigest()
