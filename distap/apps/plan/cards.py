"""GPUs by their data sheets, and the share of it that is assumed to be reached."""

from dataclasses import dataclass

from distap.apps.plan.inputs import FLOAT32, Line, Link, Machine, NetworkFacts, Pass, Workload
from distap.engine.precision import PrecisionName
from distap.errors import DistapError
from distap.ranking import suggestion

MATRIX_SHARE = 0.45  # of the rate of matrix products, reached by convolutions and matrix products
TRAFFIC_SHARE = 0.75  # of the memory's rate, reached by everything
LINK_SHARE = 0.8  # of a link's rate, reached by a collective
LAUNCH_SECONDS = 5e-6  # of an operation, however small
MESSAGE_SECONDS = {"inside": 10e-6, "between": 25e-6}
MEMORY_SHARE, CONTEXT_BYTES = 0.92, 1.5e9  # of the memory, after what CUDA itself takes; the rest is fragments
TRAFFIC_A_PAIR = 40  # bytes that ranking reads and writes for a pair, beside its matrix products
RANKING_LAUNCHES = 200  # operations of a small ranking


@dataclass(frozen=True)
class Card:
    """A GPU: rates of dense matrix products in FLOP/s, of memory and of links in bytes/s, memory in bytes.

    Args:
        link: to other GPUs of its host, in one direction.
        gpus: of a host.
    """

    bf16: float
    tf32: float
    float32: float
    traffic: float
    memory: float
    link: float
    gpus: int = 8


@dataclass(frozen=True)
class Roofline:
    """Seconds of a pass on a card: each operation takes as long as its arithmetic, its traffic or its launch."""

    operations: Pass
    card: Card
    precision: PrecisionName

    def at(self, count: float) -> float:
        """Seconds, for a micro-batch of so many images."""
        card, single = self.card, self.precision == "float32"
        products = MATRIX_SHARE * (card.float32 if single else card.bf16)
        # PyTorch lets convolutions, and them alone, take TF32 where float32 is asked for.
        convolutions = MATRIX_SHARE * (card.tf32 if single else card.bf16)
        return sum(
            max(
                operation.flops.at(count) / (convolutions if operation.is_convolution else products),
                operation.moved.at(count) / (TRAFFIC_SHARE * card.traffic),
                LAUNCH_SECONDS,
            )
            for operation in self.operations
        )


CARDS = {
    "b200": Card(2250e12, 1125e12, 75e12, 8.0e12, 180e9, 900e9),
    "h200": Card(989e12, 494e12, 67e12, 4.8e12, 141e9, 450e9),
    "h100": Card(989e12, 494e12, 67e12, 3.35e12, 80e9, 450e9),
    "a100": Card(312e12, 156e12, 19.5e12, 2.04e12, 80e9, 300e9),
    "a100-40gb": Card(312e12, 156e12, 19.5e12, 1.555e12, 40e9, 300e9),
    "l40s": Card(362e12, 183e12, 91.6e12, 864e9, 48e9, 32e9),
    "l4": Card(121e12, 60e12, 30.3e12, 300e9, 24e9, 32e9),
    "rtx4090": Card(165e12, 82.6e12, 82.6e12, 1008e9, 24e9, 32e9),
}


def card_of(name: str) -> Card:
    """A card by its name.

    Raises:
        DistapError: it is unknown.
    """
    if name.lower() not in CARDS:
        raise DistapError(f"--card {name}: {suggestion(name.lower(), CARDS)}; or measure this machine with --measure")
    return CARDS[name.lower()]


def machine_of(
    card: Card, facts: NetworkFacts, workload: Workload, precision: PrecisionName, network_bytes: float
) -> Machine:
    """What hosts of such cards should give, for this network.

    Args:
        card: the GPU.
        facts, workload: the network and its training.
        precision: what the network computes in.
        network_bytes: bytes a second of a host's network, in one direction.
    """
    traffic = card.traffic * TRAFFIC_SHARE
    products = 4 * facts.dimensions / (card.float32 * MATRIX_SHARE)
    by_bins = 0 if workload.bins is None else 4 * workload.bins / card.float32
    # Reads and writes a parameter, its gradient and its states; the norm reads the gradient once more.
    of_a_parameter = FLOAT32 * (5 + 2 * workload.optimizer_states)
    return Machine(
        forward=Roofline(facts.forward, card, precision),
        forward_with_graph=Roofline(facts.forward, card, precision),
        backward=Roofline(facts.backward, card, precision),
        rank=Line(RANKING_LAUNCHES * LAUNCH_SECONDS, products + by_bins + TRAFFIC_A_PAIR / traffic),
        parameter=of_a_parameter / traffic,
        memory=MEMORY_SHARE * (card.memory - CONTEXT_BYTES),
        inside=Link(card.link * LINK_SHARE, MESSAGE_SECONDS["inside"]),
        between=Link(network_bytes * LINK_SHARE, MESSAGE_SECONDS["between"]),
        gpus_a_host=card.gpus,
    )


def assumptions(name: str, card: Card) -> list[str]:
    """What the seconds rest on, in words."""
    return [
        f"{name} by its data sheet: {card.bf16 / 1e12:,.0f} TFLOP/s in bf16, {card.tf32 / 1e12:,.0f} in TF32 "
        f"(float32 convolutions), {card.float32 / 1e12:,.0f} in float32, memory {card.memory / 1e9:,.0f} GB at "
        f"{card.traffic / 1e12:.2f} TB/s, {card.link / 1e9:,.0f} GB/s to the {card.gpus - 1} others of its host; "
        "nothing of it was measured",
        f"reached of it: {MATRIX_SHARE:.0%} of the rate of matrix products, {TRAFFIC_SHARE:.0%} of the memory's, "
        f"{LINK_SHARE:.0%} of a link's; no operation takes less than {1e6 * LAUNCH_SECONDS:.0f} microseconds, and no "
        f"message less than {1e6 * MESSAGE_SECONDS['inside']:.0f} inside a host and "
        f"{1e6 * MESSAGE_SECONDS['between']:.0f} between hosts",
        f"{MEMORY_SHARE:.0%} of the memory can be used, after {CONTEXT_BYTES / 1e9:.1f} GB of CUDA's own",
    ]
