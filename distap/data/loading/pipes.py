"""Read the output of a shell command as a file, and end the command with its reader, whatever happens to that."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from distap.data.shards.tar import DamagedShardError
from distap.errors import FAILED, DistapError
from distap.storage.traffic import Meter, Traffic

# The command runs in a process group of its own, beside a watcher. Its input is a pipe that only the reader holds
# open: when that closes, even because the reader was killed, the watcher kills the group with all that the command
# has started.
GUARDED = """
exec 3<&0 </dev/null
{ read -r _ <&3; kill -KILL 0; } >/dev/null 2>&1 &
exec 3<&-
(eval "$1")
status=$?
{ kill -KILL $! && wait $!; } 2>/dev/null
exit $status
"""
MOST_SAID = 2000  # characters of a command's messages that are shown


class FailedCommandError(DistapError):
    """A command failed, but may succeed when started again, as it may have read from a network."""

    status = FAILED


class Pipe:
    """The output of a command, whose bytes a meter counts."""

    def __init__(self, output: IO[bytes], meter: Meter) -> None:
        self.ended = False  # whether the command has closed its output
        self._output, self._meter = output, meter

    def read(self, size: int) -> bytes:
        data = self._output.read(size)
        self.ended |= len(data) < size
        self._meter.add(Traffic(read_bytes=len(data)))
        return data


@contextmanager
def piped(command: str, meter: Meter) -> Iterator[Pipe]:
    """The output of a shell command, which is run as it stands, and killed if this context ends before it.

    Raises:
        FailedCommandError: the command has ended with a status other than 0; the message quotes what it wrote.
    """
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            ["/bin/sh", "-c", GUARDED, "sh", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,  # and with it a process group
        ) as process,
    ):
        assert process.stdout is not None
        pipe = Pipe(process.stdout, meter)
        damage = None
        try:
            yield pipe
        except DamagedShardError as error:  # a command that fails cuts its output short: tell the cause
            damage = error
        if pipe.ended and (status := process.wait()):
            said.seek(0)
            text = " ".join(said.read().decode(errors="replace").split())
            printable = "".join(sign for sign in text[-MOST_SAID:] if sign.isprintable()) or "nothing"
            raise FailedCommandError(f"pipe:{command}: failed with status {status}, and said: {printable}")
        if damage:
            raise damage
