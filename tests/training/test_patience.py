"""evaluation.patience: a training ends when its best figure has stopped rising."""

import pytest
from raising import raises
from ranks import on_ranks
from small_trainings import recipe, train
from stores import found_checkpoint

from distap.errors import FINISHED
from distap.pages.report import report
from distap.telemetry.runlog import read_run_log
from distap.trainer import Trainer
from distap.training.prepared import prepare
from distap.world import World

# A rate of nearly nothing changes no ranking, so that no evaluation is better than the first.
SETTINGS = {
    "steps": 12,
    "optimizer": {"learning_rate": 1e-12},
    "evaluation": {"every": 1, "at_start": False, "patience": 2},
    "checkpoint": {"every": 100},
}
LAST = 3  # the first evaluation is the best, and two more are not


def settings(shards, **changes):
    return {**SETTINGS, "data__validation": str(shards[1]), **changes}


def trainer(run, shards, **changes):
    return Trainer(prepare(recipe(run, shards, **settings(shards, **changes)), World()), World())


def counts(run):
    return [entry["since_best"] for entry in read_run_log(run) if "since_best" in entry]


@pytest.fixture(scope="module")
def ended(tmp_path_factory, training_shards):
    run = tmp_path_factory.mktemp("patience") / "run"
    ending = trainer(run, training_shards)
    return run, ending.train(), ending


def test_a_training_without_progress_ends_with_status_0(ended):
    run, status, ending = ended
    assert (status, ending.done, counts(run)) == (FINISHED, LAST, [0, 1, 2])
    registry = ending.report.endpoint.registry
    assert registry.get_sample_value("distap_evaluations_since_best") == 2


def test_the_best_checkpoint_and_the_last_one_stay(ended):
    run, _, _ = ended
    assert found_checkpoint(run, best=True).manifest.step in (1, LAST)
    assert found_checkpoint(run).manifest.step == LAST


def test_a_training_that_ended_early_does_not_begin_again(ended, training_shards, caplog):
    run, _, _ = ended
    again = trainer(run, training_shards)
    assert (again.train(), again.done) == (FINISHED, LAST)
    assert "evaluation.patience" in caplog.text


def test_the_page_says_that_it_ended_early(ended, tmp_path):
    page, _ = report(ended[0], tmp_path)
    assert "evaluation.patience" in page.read_text().partition("<pre")[0]


def test_the_count_goes_on_when_a_run_does(tmp_path, training_shards):
    assert trainer(tmp_path, training_shards, steps=2).train() == FINISHED
    going_on = trainer(tmp_path, training_shards)
    assert (going_on.train(), going_on.done) == (FINISHED, LAST)
    assert counts(tmp_path) == [0, 1, 2]


def train_to_the_end(world, run, shards):
    train(world, run, shards, **settings(shards))
    return counts(run)


def test_ranks_end_together(tmp_path, training_shards):
    assert on_ranks(2, train_to_the_end, tmp_path, training_shards) == [[0, 1, 2]] * 2


def test_each_better_evaluation_begins_the_count_anew(tmp_path, training_shards):
    patient = {**SETTINGS["evaluation"], "patience": 6}
    changes = settings(training_shards, steps=6, evaluation=patient, optimizer={})
    train(World(), tmp_path, training_shards, **changes)
    scores = [
        score
        for entry in read_run_log(tmp_path)
        if "score" in entry
        for score in entry["score"].values()
    ]
    best = [max(range(n), key=lambda step: (scores[step], -step)) for n in range(1, 7)]
    assert counts(tmp_path) == [step - best_step for step, best_step in enumerate(best)]
    assert counts(tmp_path).count(0) > 1


def test_patience_without_evaluations_is_refused(tmp_path, training_shards):
    with raises("recipe.value", "evaluation.patience", "evaluation.every"):
        recipe(tmp_path, training_shards, **settings(training_shards, evaluation={"patience": 2}))
