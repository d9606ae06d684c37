"""What a shell command writes, read as a file; the command ends with its reader, whatever becomes of that."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from distap.data.shards.tar import DamagedShardError
from distap.errors import FAILED, DistapError
from distap.storage.traffic import Meter, Traffic

# Its input stays open as long as the reader lives. When it closes, be it that the reader was killed, the second
# process of this script kills the group, and so whatever the command has started.
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
    """A command did not end well; as it may have read from a network, starting again may help."""

    status = FAILED


class Pipe:
    """The output of a command, to read from.

    Args:
        output: of the command.
        meter: counts what is read.
    """

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
    """The output of a shell command; when this is left before its end, the command is killed.

    Commands are run as they stand: they have to come from who may run commands here.

    Raises:
        FailedCommandError: the command has ended with a status other than 0; its messages are in the text.
    """
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            ["/bin/sh", "-c", GUARDED, "sh", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,  # and a process group with it
        )
        assert process.stdin is not None and process.stdout is not None
        pipe = Pipe(process.stdout, meter)
        try:
            try:
                yield pipe
            except DamagedShardError:
                if pipe.ended:  # cut short: by the command's failure, if it failed
                    _require_success(command, process, said)
                raise
            if pipe.ended:
                _require_success(command, process, said)
        finally:
            process.stdin.close()
            process.stdout.close()
            process.wait()


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
