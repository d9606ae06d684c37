"""`python -m benchmarks`: measure things side by side on this machine."""

import importlib
import sys

import typer

from benchmarks.harness import Benchmark, work
from distap.cli.options import run

BENCHMARKS = {
    "ranking": "benchmarks.ranking:RankingBenchmark",
    "step": "benchmarks.step:StepBenchmark",
    "gain": "benchmarks.gain:GainBenchmark",
    "data": "benchmarks.data:DataBenchmark",
    "eval": "benchmarks.evaluation:EvaluationBenchmark",
    "approximations": "benchmarks.approximations:ApproximationsBenchmark",
    "memory": "benchmarks.memory:MemoryBenchmark",
    "network": "benchmarks.network:NetworkBenchmark",
    "scale": "benchmarks.scale:ScaleBenchmark",
    "gpu": "benchmarks.gpu:GPUBenchmark",
    "trace": "benchmarks.trace:TraceBenchmark",
}


def load(name: str) -> type[Benchmark]:
    """Import a benchmark's class."""
    module, _, attribute = BENCHMARKS[name].partition(":")
    found: type[Benchmark] = getattr(importlib.import_module(module), attribute)
    return found


def main() -> None:
    """Run the benchmark that the command line names; each field of its class is an option."""
    app = typer.Typer(
        help="Measure on this machine.",
        no_args_is_help=True,
        result_callback=lambda chosen, **_: chosen and chosen.run(),
    )
    for name in [name for name in BENCHMARKS if name in sys.argv[1:2]] or BENCHMARKS:
        app.command(name)(load(name))

    @app.command(hidden=True)
    def worker(name: str, settings: str) -> None:
        """Measure as one rank; other benchmarks start this."""
        work(load(name).model_validate_json(settings))

    run(app, "benchmarks")


if __name__ == "__main__":
    main()
