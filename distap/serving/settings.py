"""What a server allows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServeSettings:
    """Address and limits of a server; see the options of `distap serve`."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    max_upload_bytes: int = 20_000_000  # of a request's body
    max_pixels: int = 50_000_000  # width times height of an upload
    max_k: int = 100
    threads: int = 2  # searches at a time
    queue: int = 64  # searches that may wait
    timeout_seconds: float = 30.0  # for an upload to arrive, and for its search
    drain_seconds: float = 0.0  # between SIGTERM and no new connections

    @property
    def uploads(self) -> int:
        """Uploads that may arrive at a time: more of them than searches, since slow clients hold them up."""
        return 2 * (self.threads + self.queue)
