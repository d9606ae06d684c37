"""What a server allows."""

from dataclasses import dataclass

from distap.retrieval.descriptor_files import DescribedBy

DECODED_PIXELS = 50_000_000  # of an upload that is scaled down before the network sees it: 150 MB
DESCRIBED_PIXELS = 4_000_000  # that a network sees: a ResNet takes some 150 bytes for each


@dataclass(frozen=True)
class ServeSettings:
    """Address and limits of a server; see the options of `distap serve`."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    max_upload_bytes: int = 20_000_000  # of a request's body
    max_pixels: int | None = None  # width times height of an upload; None for `pixels_of`
    max_k: int = 100
    threads: int = 2  # searches at a time
    queue: int = 64  # searches that may wait
    timeout_seconds: float = 30.0  # for an upload to arrive, and for its search
    drain_seconds: float = 0.0  # between SIGTERM and no new connections

    def pixels_of(self, maker: DescribedBy) -> int:
        """Most pixels of an upload, by how the gallery's images were described."""
        if self.max_pixels is not None:
            return self.max_pixels
        if maker.sizing == "original":
            return int(DESCRIBED_PIXELS / max(1.0, *maker.scales) ** 2)
        return DECODED_PIXELS

    @property
    def uploads(self) -> int:
        """Uploads that may arrive at a time: more of them than searches, since slow clients hold them up."""
        return 2 * (self.threads + self.queue)
