"""Speed of GPUs by their data sheets, and the share of it that a training is assumed to reach."""

from typing import NamedTuple

from benchmarks.plan.network_cost import Line, NetworkCost
from benchmarks.plan.step_cost import Machine, NetworkLink, bins_of
from distap.config.recipe import Recipe
from distap.errors import DistapError, suggestion
from distap.training.engines import DeepSpeedSettings
from distap.training.rank_memory import FLOAT32

MATRIX_SHARE = 0.45  # of the rate of matrix products
TRAFFIC_SHARE = 0.75  # of the memory's rate
LINK_SHARE = 0.8  # of a link's rate
# usable share of the memory, after CUDA's own bytes
MEMORY_SHARE = 0.92
CONTEXT_BYTES = 1.5e9
LAUNCH_SECONDS = 5e-6  # shortest operation
# shortest message between GPUs, and between hosts
MESSAGE_SECONDS = 10e-6
HOST_MESSAGE_SECONDS = 25e-6
# bytes that ranking moves beside its products; its operations, at least
BYTES_A_PAIR = 40
RANKING_LAUNCHES = 200


class GpuCard(NamedTuple):
    """Rates of dense matrix products in FLOP/s, rates of memory and link in bytes/s, and bytes of
    memory.
    """

    bf16: float
    tf32: float
    float32: float
    traffic: float
    memory: float
    link: float  # to the other GPUs of its host, in each direction


CARDS = {
    "b200": GpuCard(2250e12, 1125e12, 75e12, 8.0e12, 180e9, 900e9),
    "h200": GpuCard(989e12, 494e12, 67e12, 4.8e12, 141e9, 450e9),
    "h100": GpuCard(989e12, 494e12, 67e12, 3.35e12, 80e9, 450e9),
    "a100": GpuCard(312e12, 156e12, 19.5e12, 2.04e12, 80e9, 300e9),
    "a100-40gb": GpuCard(312e12, 156e12, 19.5e12, 1.555e12, 40e9, 300e9),
    "l40s": GpuCard(362e12, 183e12, 91.6e12, 864e9, 48e9, 32e9),
    "l4": GpuCard(121e12, 60e12, 30.3e12, 300e9, 24e9, 32e9),
    "rtx4090": GpuCard(165e12, 82.6e12, 82.6e12, 1008e9, 24e9, 32e9),
}


def machine_of(
    name: str, network: NetworkCost, recipe: Recipe, link: float, gpus_a_host: int
) -> Machine:
    """Return the machine that hosts of a card's GPUs make.

    `link` is the bytes a second of a host's network.
    """
    card = CARDS.get(name.lower())
    if card is None:
        raise DistapError(
            "command.unknown_card",
            f"--card {name}: {suggestion(name.lower(), CARDS)}; or measure this machine with"
            " --measure",
        )
    traffic = card.traffic * TRAFFIC_SHARE
    single = recipe.precision == "float32"
    # PyTorch lets convolutions, and them alone, take TF32 where float32 is asked for.
    convolutions, products = (card.tf32, card.float32) if single else (card.bf16, card.bf16)

    def seconds(images: float, passes: int, moved: Line) -> float:
        flops = network.convolutions(images) / convolutions + network.products(images) / products
        busy = passes * flops / MATRIX_SHARE + moved(images) / traffic
        return max(busy, passes * network.operations(images) * LAUNCH_SECONDS)

    states = 3 if isinstance(recipe.engine, DeepSpeedSettings) else 2  # which keeps a copy
    binning = 4 * (bins_of(recipe.loss) or 0) / card.float32
    pair = 4 * network.dimensions / (card.float32 * MATRIX_SHARE) + BYTES_A_PAIR / traffic + binning
    return Machine(
        forward=lambda images: seconds(images, 1, network.forward_bytes),
        forward_with_graph=lambda images: seconds(images, 1, network.forward_bytes),
        backward=lambda images: seconds(images, 2, network.backward_bytes),
        rank=Line(RANKING_LAUNCHES * LAUNCH_SECONDS, pair),
        # An update reads and writes a parameter, its gradient and its states; the norm reads the
        # gradient once more.
        parameter=FLOAT32 * (5 + 2 * states) / traffic,
        memory=MEMORY_SHARE * (card.memory - CONTEXT_BYTES),
        inside=NetworkLink(card.link * LINK_SHARE, MESSAGE_SECONDS),
        between=NetworkLink(link * LINK_SHARE, HOST_MESSAGE_SECONDS),
        gpus_a_host=gpus_a_host,
    )
