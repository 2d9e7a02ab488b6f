"""Run the quickstart in a terminal, and draw what it leaves on the screen: `make picture`.

Writes `quickstart.svg` beside this file, and copies the plot of the reward. The arguments are those of `sluice quickstart`.
"""

import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 118, 50
PROMPT = "$ make quickstart"

_TOKENS = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|[^\x1b\r\n]+|[\r\n]")


def run_in_terminal(command: list[str]) -> str:
    """Run a command in a terminal of its own and return all that it wrote, escape sequences included."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)  # noqa: S603
    os.close(theirs)
    written = bytearray()
    try:
        while chunk := os.read(ours, 1 << 16):
            written += chunk
    except OSError:  # how Linux reports that the other side has closed
        pass
    if process.wait():
        raise SystemExit(written.decode(errors="replace"))
    return written.decode()


def screen(output: str) -> list[str]:
    """Return the lines that are left on the screen, as a terminal without wrapping would show them."""
    lines, row = [""], 0
    for token in _TOKENS.finditer(output):
        argument, action = token.group(1), token.group(2)
        if action == "A":  # cursor up
            row = max(0, row - int(argument or 1))
        elif action == "K":  # erase the line
            lines[row] = ""
        elif action == "m":  # a colour
            lines[row] += token.group()
        elif token.group() == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif action is None and token.group() != "\r":
            lines[row] += token.group()
    return lines


def main() -> None:
    """Run the quickstart, and write both pictures."""
    images = Path(__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        # The run is written where a user's own is not moved aside; the picture shows the default place.
        flags = ["--output-dir", directory, *sys.argv[1:]]
        output = run_in_terminal([sys.executable, "-m", "sluice.cli.main", "quickstart", *flags])
        shutil.copy(Path(directory) / "quickstart" / "reward.png", images / "reward.png")
        lines = [line.replace(directory, "outputs") for line in screen(output)]
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - no path of a project
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(PROMPT, highlight=False)
        console.print(Text.from_ansi("\n".join(lines).rstrip()))
        console.save_svg(str(images / "quickstart.svg"), title="make quickstart")


if __name__ == "__main__":
    main()
