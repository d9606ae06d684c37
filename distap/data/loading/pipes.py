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
    """A command failed; starting again may help, as it may have read from a network."""

    status = FAILED


class Pipe:
    """The output of a command, whose bytes a meter counts."""

    def __init__(self, output: IO[bytes], meter: Meter) -> None:
        self.ended = False  # whether the command has closed its output
        self._output, self._meter = output, meter

    def read(self, size: int) -> bytes:
        """The next bytes; fewer only at the end."""
        data = self._output.read(size)
        self.ended |= len(data) < size
        self._meter.add(Traffic(read_bytes=len(data)))
        return data


@contextmanager
def piped(command: str, meter: Meter) -> Iterator[Pipe]:
    """The output of a shell command, which is killed if this context ends before it.

    The command is run as it stands, so it has to come from someone who may run commands here.

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
        try:
            yield pipe
        except DamagedShardError:
            if pipe.ended:  # a command that fails cuts its output short: tell the cause
                _require_success(command, process, said)
            raise
        if pipe.ended:
            _require_success(command, process, said)


def _require_success(command: str, process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    status = process.wait()
    if status == 0:
        return
    said.seek(0)
    text = " ".join(said.read().decode(errors="replace").split())
    printable = "".join(sign for sign in text[-MOST_SAID:] if sign.isprintable())
    raise FailedCommandError(
        f"pipe:{command}: the command failed with status {status}, and said: {printable or 'nothing'}"
    )
