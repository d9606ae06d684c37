"""Address and limits of a server, as the options of `distap serve`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Option

from distap.errors import DistapError

if TYPE_CHECKING:
    from distap.retrieval.descriptor_files import DescribedBy

DECODED_PIXELS = 50_000_000  # of an upload that is scaled down before the network sees it: 150 MB
# of an upload that the network sees whole: a ResNet takes some 150 bytes per pixel
DESCRIBED_PIXELS = 4_000_000
PIXELS = "50 million; 4 million where the gallery was described in original size"
FIRST_SECONDS = 10.0  # of a body, in which it may stall
LEAST_SPEED = 1000  # bytes of a body per second after that
ALLOWED_HOST = (
    "Answer requests to this host name or address too, *.DOMAIN, or * (any). Repeat for several."
)


@dataclass(frozen=True)
class ServeSettings:
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for every network.")] = (
        "127.0.0.1"
    )
    allowed_host: Annotated[list[str] | None, Option(help=ALLOWED_HOST)] = None
    port: Annotated[
        int, Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)
    ] = 8000
    max_upload_bytes: Annotated[int, Option(help="Maximum size of a request, bytes.", min=1)] = (
        20_000_000
    )
    max_pixels: Annotated[
        int | None,
        Option(help="Maximum width times height of an upload, pixels.", min=1, show_default=PIXELS),
    ] = None
    decode_seconds: Annotated[
        float, Option(help="Time limit of decoding an upload, seconds.", min=0.1)
    ] = 10.0
    decode_bytes: Annotated[
        int, Option(help="Memory that each thread may use to decode an upload, bytes.", min=1)
    ] = 1_000_000_000
    max_k: Annotated[
        int, Option(help="Maximum number of images that a search may ask for.", min=1)
    ] = 100
    threads: Annotated[
        int, Option(help="Number of searches to run at once; they share the cores.", min=1)
    ] = 2
    queue: Annotated[
        int, Option(help="Number of searches that may wait; more get status 503.", min=0)
    ] = 64
    timeout_seconds: Annotated[
        float, Option(help="Seconds that an upload or a search may take.", min=0.1)
    ] = 30.0

    def __post_init__(self) -> None:
        for name in self.allowed_host or ():
            if "*" in name.removeprefix("*.") and name != "*":
                raise DistapError(
                    "serve.host", f"--allowed-host {name}: expected a name, *.DOMAIN, or * for any"
                )

    @property
    def host_in_url(self) -> str:
        """Return the host for a URL: an IPv6 address in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host

    def pixels_of(self, maker: "DescribedBy") -> int:
        """Return the maximum number of pixels of an upload, for a gallery described like this."""
        if self.max_pixels is not None:
            return self.max_pixels
        if maker.sizing == "original":
            return int(DESCRIBED_PIXELS / max(1.0, *maker.scales) ** 2)
        return DECODED_PIXELS


def seconds_to_arrive(received: int, longest: float) -> float:
    """Return the seconds, at most `longest`, that a body of which bytes are received may take."""
    return min(longest, FIRST_SECONDS + received / LEAST_SPEED)
