"""`python -m benchmarks`: measure side by side on this machine, predict costs, run studies, draw
data sets.
"""

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import typer

from benchmarks.harness import work
from distap.cli.options import run

BENCHMARKS = {
    "ranking": "benchmarks.ranking:RankingBenchmark",
    "classes": "benchmarks.classes:ClassesBenchmark",
    "step": "benchmarks.step:StepBenchmark",
    "recipe": "benchmarks.recipe:RecipeBenchmark",
    "gain": "benchmarks.gain:GainBenchmark",
    "data": "benchmarks.data:DataBenchmark",
    "eval": "benchmarks.evaluation:EvaluationBenchmark",
    "approximations": "benchmarks.approximations:ApproximationsBenchmark",
    "memory": "benchmarks.memory:MemoryBenchmark",
    "network": "benchmarks.network:NetworkBenchmark",
    "scale": "benchmarks.scale:ScaleBenchmark",
    "towers": "benchmarks.towers.command:TowersBenchmark",
    "gpu": "benchmarks.gpu:GPUBenchmark",
    "smoke": "benchmarks.smoke:SmokeBenchmark",
    "serve": "benchmarks.serve:serve_command",
    "index": "benchmarks.index:index_command",
    "trace": "benchmarks.trace:TraceBenchmark",
    "plan": "benchmarks.plan.command:plan_command",
    "coverage": "benchmarks.coverage:coverage_command",
    "study": "benchmarks.study.command:study_command",
    "fetch": "benchmarks.fetch.command:fetch_command",
}


def load(name: str) -> Any:
    """Import the class of a benchmark, whose fields are its options, or the function of another
    command.
    """
    module, _, attribute = BENCHMARKS[name].partition(":")
    return getattr(import_module(module), attribute)


def command_line(names: Iterable[str]) -> typer.Typer:
    """Return the commands of these names. Only their modules are imported."""
    app = typer.Typer(
        help="Measure on this machine, predict costs, run studies, draw data sets.",
        no_args_is_help=True,
        result_callback=lambda benchmark, **_: benchmark and benchmark.run(),
    )
    for name in names:
        app.command(name)(load(name))

    @app.command(hidden=True)
    def worker(name: str, settings: str) -> None:
        """Measure as one rank; other benchmarks start this."""
        work(load(name).model_validate_json(settings))

    return app


def main() -> None:
    """Run what the command line names."""
    run(
        command_line([name for name in BENCHMARKS if name in sys.argv[1:2]] or BENCHMARKS),
        "benchmarks",
    )


if __name__ == "__main__":
    main()
