"""How often the interval of `distap compare` covers a known difference, and whether its p-value is
uniform where there is none.
"""

from collections.abc import Callable
from typing import Annotated

import numpy as np
from jaxtyping import Float64, Int64
from typer import Option

from distap.evaluation.comparing import Difference, differences
from distap.telemetry.terminal import print_text, track

DIFFERENCE = 0.01
TARGET = 0.95

Draw = Callable[[np.random.Generator, int], Float64[np.ndarray, " C"]]
# Effects of classes on the difference, of mean 0.
EFFECTS: dict[str, Draw] = {
    "normal": lambda rng, classes: rng.normal(0, 0.05, classes),
    "skewed": lambda rng, classes: rng.exponential(0.1, classes) - 0.1,
    "rare": lambda rng, classes: (rng.random(classes) < 0.15) * rng.normal(0, 0.2, classes),
}
SIZES: dict[str, Draw] = {
    "log-normal": lambda rng, classes: np.maximum(2, rng.lognormal(2, 1, classes).astype(int)),
    "Pareto": lambda rng, classes: np.minimum(2 + (rng.pareto(1.2, classes) * 3).astype(int), 200),
}


def simulated_pair(
    rng: np.random.Generator,
    classes: int,
    effects: Draw,
    sizes: Draw,
    difference: float,
    runs: int = 1,
) -> tuple[Float64[np.ndarray, "S Q 1"], Float64[np.ndarray, "S Q 1"], Int64[np.ndarray, " Q"]]:
    """Draw the AP of queries by two networks, of classes of unequal sizes, and their classes.

    With several runs, each has an error of its own, as trainings from other seeds have.
    """
    of_query = np.repeat(np.arange(classes), sizes(rng, classes).astype(int))
    shape = (runs, len(of_query), 1)
    baseline = np.broadcast_to(rng.beta(0.8, 0.6, len(of_query))[:, None], shape)
    effect = effects(rng, classes)[of_query] + rng.normal(0, 0.15, len(of_query)) + difference
    other = baseline + effect[:, None]
    if runs > 1:
        baseline = baseline + rng.normal(0, 0.02, (runs, 1, 1))
        other = other + rng.normal(0, 0.02, (runs, 1, 1))
    return baseline, other, of_query


def simulated(
    pairs: int, classes: int, effects: str, sizes: str, runs: int = 1, resamples: int = 2000
) -> tuple[list[Difference], list[Difference]]:
    """Compare pairs whose difference is DIFFERENCE, and pairs without one."""
    compared: tuple[list[Difference], list[Difference]] = ([], [])
    for number in range(pairs):
        for truth, results in zip((DIFFERENCE, 0.0), compared, strict=True):
            rng = np.random.default_rng((number, classes, truth > 0))
            pair = simulated_pair(rng, classes, EFFECTS[effects], SIZES[sizes], truth, runs)
            results += differences(["mAP"], *pair, resamples=resamples, seed=number)
    return compared


def covered(results: list[Difference], truth: float) -> float:
    """Return the share of intervals that hold the known difference."""
    return float(np.mean([result.low <= truth <= result.high for result in results]))


def distance_to_uniform(p_values: list[float]) -> float:
    """Return the largest distance of the p-values' distribution to the uniform one."""
    ascending = np.sort(p_values)
    steps = np.arange(1, len(ascending) + 1) / len(ascending)
    from_below = steps - 1 / len(ascending)
    return float(max(np.abs(steps - ascending).max(), np.abs(from_below - ascending).max()))


def coverage_command(
    pairs: Annotated[int, Option(help="Simulated pairs of networks.", min=10)] = 1000,
    classes: Annotated[list[int], Option(help="Numbers of classes.")] = [20, 60, 200],  # noqa: B006
    runs: Annotated[int, Option(help="Runs of each side, from other seeds.", min=1)] = 1,
) -> None:
    """Print how often the 95% interval of `distap compare` covers, in percent, and whether p-values
    are uniform.

    The last column is the largest distance of the distribution of p under no difference from the
    uniform one; of a uniform one, 95 in 100 stay below 1.36 over the root of the pairs.
    """
    cases = [(count, effects, sizes) for count in classes for effects in EFFECTS for sizes in SIZES]
    bound = 1.36 / pairs**0.5
    print_text(f"classes  effects  sizes       covers  p below 5%  distance (bound {bound:.3f})")
    for count, effects, sizes in track(cases, "simulating", len(cases)):
        different, alike = simulated(pairs, count, effects, sizes, runs)
        p_values = [result.p for result in alike]
        small = np.mean([p <= 1 - TARGET for p in p_values])
        print_text(
            f"{count:7d}  {effects:7s}  {sizes:10s}  {100 * covered(different, DIFFERENCE):5.1f}"
            f"  {100 * small:9.1f}  {distance_to_uniform(p_values):.3f}"
        )
