"""Figures of sets whose ground truth is listed: Revisited Oxford and Paris, Google Landmarks v2."""

import json
import math

import numpy as np
import pytest
import torch
from raising import raises
from torch.nn.functional import normalize

import distap
from distap.data.converters.landmarks import OF_LANDMARKS
from distap.data.converters.revisited import DIFFICULTIES, OF_REVISITED
from distap.errors import DistapError
from distap.evaluation.ground_truth import parsed_truth
from distap.evaluation.positions import EARTH_METRES
from distap.retrieval.evaluate import evaluate_descriptors
from distap.retrieval.truth import Truth

CPU = torch.device("cpu")


def graded(gallery, *queries):
    """The truth of queries that are given as their easy, hard and junk rows."""
    grades = [[1] * len(easy) + [2] * len(hard) for easy, hard, _ in queries]
    positives, junk = [[*easy, *hard] for easy, hard, _ in queries], [junk for *_, junk in queries]
    return Truth(gallery, positives, junk, grades, DIFFICULTIES)


def test_one_perfect_query_and_one_known_by_hand():
    gallery = normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [1.0, 0.3], [1.0, 0.4]]))
    # The ranking is 0 1 2 3 4; without the junk 1 the hard image 2 comes second and the easy one 4
    # comes fourth.
    truth = graded(5, ([4], [2], [1]), ([0], [], []))
    result = evaluate_descriptors(gallery[:1].repeat(2, 1), gallery, truth, OF_REVISITED)
    assert result.values["Easy mAP/trapezoids"].tolist() == pytest.approx([(0 / 2 + 1 / 3) / 2, 1])
    assert result.values["Medium mAP/trapezoids"].tolist() == pytest.approx(
        [((0 + 1 / 2) / 2 + (1 / 3 + 2 / 4) / 2) / 2, 1]
    )
    assert result.values["Hard mAP/trapezoids"].tolist() == pytest.approx(
        [(0 + 1 / 2) / 2, float("nan")], nan_ok=True
    )
    assert result.left_out == 1
    assert result.summary()["Hard mAP/trapezoids"] == pytest.approx(1 / 4)


@pytest.mark.parametrize("resident", [2**30, 0])
def test_a_gallery_of_another_network_or_with_a_hole_is_an_error(monkeypatch, resident):
    monkeypatch.setattr("distap.retrieval.evaluate.RESIDENT_BYTES", resident)
    truth = Truth(4, [[0]])
    with pytest.raises(DistapError, match="5 dimensions and the gallery 4"):
        evaluate_descriptors(torch.eye(5)[:1], torch.eye(4), truth, OF_LANDMARKS)
    gallery = np.eye(4, dtype=np.float16)
    gallery[2, 1] = np.inf
    for values in (gallery, torch.from_numpy(gallery)):
        with pytest.raises(DistapError, match="gallery descriptor 2 is not finite"):
            evaluate_descriptors(torch.eye(4)[:1], values, truth, OF_LANDMARKS)


def test_a_truth_names_gallery_rows():
    query = {
        "name": "q",
        "positives": ["b", "d", "a", "d"],
        "grades": [1, 2, 2, 2],
        "junk": ["c"],
        "part": "cars",
    }
    truth = parsed_truth({"queries": [query]}, "truth")
    # of two, the first is meant
    listed = truth.of_gallery(truth.queries, ["a", "b", "c", "d", "a"], CPU)
    assert (listed.positives, listed.grades, listed.junk, listed.parts) == (
        [[1, 3, 0]],
        [[1, 2, 2]],
        [[2]],
        ["cars"],
    )
    with pytest.raises(
        DistapError,
        match="query q: the gallery lacks 2 of the 4 images that are its positives, first d",
    ):
        truth.of_gallery(truth.queries, ["a", "b", "c"], CPU)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ({}, "mine: queries: expected at least one"),
        (
            {"queries": [{"name": "a", "positive": ["b"]}]},
            "mine: queries.0.positive: Extra inputs are not permitted",
        ),
        ({"queries": [{"name": "a"}], "figures": ["mAP@"]}, "no figure 'mAP@'"),
        (
            {"queries": [{"name": "a"}], "figures": []},
            "mine: figures: Tuple should have at least 1 item",
        ),
        ({"queries": [{"name": "a"}, {"name": "a"}]}, "mine: query a stands 2 times"),
        (
            {"queries": [{"name": "a", "positives": ["b"], "grades": [65]}]},
            "mine: queries.0.grades.0: Input should be",
        ),
        (
            {"queries": [{"name": "a", "box": [0, 0, float("nan"), 1]}]},
            "mine: queries.0.box.2: Input should be a finite",
        ),
        (
            {"queries": [{"name": "a"}], "unit": "degrees", "positions": {"a": [170, 4]}},
            "latitude, from -90 to 90",
        ),
        ({"queries": [{"name": "a"}], "query": ["query"]}, "give both or neither"),
        (
            {"queries": [{"name": "a", "positives": ["b"], "grades": [1, 2]}]},
            "query a: 2 grades for 1 positives",
        ),
        (
            {"queries": [{"name": "a"}], "positions": {"b": [0, 0]}},
            "query a and 0 more have no position",
        ),
    ],
)
def test_a_wrong_truth_is_told_by_its_key(truth, message):
    with pytest.raises(DistapError, match=message):
        parsed = parsed_truth(truth, "mine")
        parsed.of_gallery(parsed.queries, ["a", "b"], CPU)


@pytest.mark.parametrize("unit", ["metres", "degrees"])
def test_a_place_is_right_within_the_radius(unit):
    # Along a meridian a degree is 111,195 m on a globe of the mean radius.
    metre = {"metres": 1.0, "degrees": 180 / (math.pi * EARTH_METRES)}[unit]
    places = {"q": 0.0, "a": 24.9, "b": 25.1, "c": -24.9, "d": 4000.0}
    positions = {name: [north * metre, 7.0] for name, north in places.items()}
    truth = parsed_truth(
        {"queries": [{"name": "q"}], "positions": positions, "unit": unit}, "truth"
    )
    assert truth.of_gallery(truth.queries, ["d", "c", "b", "a"], CPU).positives == [[1, 3]]
    assert truth.of_gallery(truth.queries, ["a", "q"], CPU, is_of_itself=True).positives == [[0]]


@pytest.mark.parametrize("metres", [1e-3, 1.0, 25.0, 750e3, 2500e3, 15e6])
@pytest.mark.parametrize("bearing", [0.0, 40.0, 90.0, 200.0])
@pytest.mark.parametrize(
    "start", [(0.0, 0.0), (48.2, 16.4), (-33.9, 179.999), (89.9999, 30.0), (-90.0, 0.0)]
)
def test_positions_in_degrees_are_compared_by_the_way_along_the_ground(start, bearing, metres):
    def away(along):
        """The place so many metres of great circle away, by the direct formula of spherical
        trigonometry.
        """
        (latitude, longitude) = map(math.radians, start)
        turn = math.radians(bearing)
        arc = along / EARTH_METRES
        north = math.sin(latitude) * math.cos(arc) + math.cos(latitude) * math.sin(arc) * math.cos(
            turn
        )
        east = math.sin(turn) * math.sin(arc) * math.cos(latitude)
        further = longitude + math.atan2(east, math.cos(arc) - math.sin(latitude) * north)
        return [math.degrees(math.asin(max(-1, min(1, north)))), math.degrees(further)]

    slack = max(1e-4 * metres, 1.0 if abs(start[0]) > 89 else 1e-5)  # asin is coarse near the poles
    positions = {"q": [*start], "in": away(metres), "out": away(metres + 2 * slack)}
    inputs = {
        "queries": [{"name": "q"}],
        "positions": positions,
        "unit": "degrees",
        "radius": metres + slack,
    }
    truth = parsed_truth(inputs, "truth")
    assert truth.of_gallery(truth.queries, ["in", "out"], CPU).positives == [[0]]


def test_evaluate_takes_a_truth_by_rows_or_names(tmp_path):
    # Of the first image, the two others at 0.8 and 0.6: the negative before the positive.
    rows = torch.tensor([[1.0, 0, 0], [0.8, 0.6, 0], [0.6, 0, 0.8], [0, 0, 1.0]])
    by_row = {"queries": [{"name": 0, "positives": [2], "junk": [3]}], "figures": ["mAP", "R@1"]}
    assert distap.evaluate(rows, truth=by_row) == {
        "mAP": 0.5,
        "R@1": 0.0,
        "queries": 1,
        "left_out": 0,
    }
    path = tmp_path / "truth.json"
    path.write_text(json.dumps({"queries": [{"name": "a", "positives": ["c"], "junk": ["b"]}]}))
    assert distap.evaluate(rows, truth=path, names=list("abcd"), figures=["mAP"])["mAP"] == 1
    with pytest.raises(DistapError, match="query 'e' and 0 more are none of texts of `names`"):
        distap.evaluate(rows, truth={"queries": [{"name": "e"}]}, names=list("abcd"))


def test_a_query_of_no_part_counts_among_all_and_graded_figures_change_no_other():
    # Ranks of the positives 1, 2 and 3, of which the first and the last have no part.
    rows = torch.eye(5)[[0, 1, 2, 3, 4]]
    gallery = normalize(
        torch.tensor([[5.0, 1, 1, 0, 0], [4, 6, 2, 0, 0], [3, 5, 3, 0, 0], [1, 0.1, 4, 0, 0]])
    )
    described = torch.cat([rows[:3], gallery])
    places = (described[:3] @ gallery.t()).argsort(dim=1, descending=True)
    queries = [
        {
            "name": number,
            "positives": [3 + int(places[number, number])],
            "part": "b" * (number == 1),
        }
        for number in range(3)
    ]
    asks = np.arange(7) < 3
    evaluation = distap.evaluate(
        described, truth={"queries": queries}, queries=asks, figures=["mAP"]
    )
    assert evaluation == pytest.approx(
        {
            "mAP": (1 + 1 / 2 + 1 / 3) / 3,
            "b mAP": 1 / 2,
            "mean mAP": 1 / 2,
            "queries": 3,
            "left_out": 0,
        }
    )
    graded = {
        "queries": [{"name": 0, "positives": [3, 4], "grades": [2, 1]}],
        "groups": {"easy": [1], "hard": [2]},
    }
    alone = distap.evaluate(described, truth=graded, queries=asks, figures=["mAP"])
    both = distap.evaluate(described, truth=graded, queries=asks, figures=["mAP", "NDCG"])
    # the hard one before it is junk to the easy ones
    assert alone["easy mAP"] == both["easy mAP"] == 1
    with pytest.raises(DistapError, match="1 of 7 are repeated"):
        distap.evaluate(described, truth=graded, names=["a", "a", "b", "c", "d", "e", "f"])


def test_a_label_of_two_genera_an_unknown_camera_and_an_unknown_domain():
    rows = normalize(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    with raises("data.crossing_levels", "0", "1"):
        distap.evaluate(rows, [["x", "p"], ["x", "q"], ["y", "p"], ["y", "p"]])
    reference = distap.evaluate(rows, [0, 0, 1, 1])
    assert distap.evaluate(rows, [0, 0, 1, 1], cameras=[-1, -1, None, None]) == reference
    evaluation = distap.evaluate(rows, [0, 0, 1, 1], domains=["a", "a", None, None])
    assert (evaluation["queries"], evaluation["left_out"], evaluation["a mAP"]) == (
        2,
        2,
        evaluation["mAP"],
    )


def test_an_instance_of_several_images_has_the_mean_of_their_descriptors():
    """On a circle, in degrees: instance p is at 10 (of 0 and 20), q at 40 (of 30 and 50); an image
    at 28 is alone.
    """
    angles = torch.tensor([0.0, 20, 30, 50, 28, 90]).deg2rad()
    rows = torch.stack([angles.cos(), angles.sin()], dim=1)
    truth = {
        # r is at 45, and shares an image
        "instances": {"p": ["0", "20"], "q": ["30", "50"], "r": ["90", "0"]},
        "queries": [{"name": "p", "positives": ["q"]}, {"name": "28", "positives": ["r", "q"]}],
        "figures": ["mAP", "R@1"],
    }
    names = ["0", "20", "30", "50", "28", "90"]
    # From p: 28, q (40), r (45): AP 1/2. From 28: q, r, p: AP 1.
    expected = {"mAP": 3 / 4, "R@1": 1 / 2, "queries": 2, "left_out": 0}
    for described in (rows, rows.double().numpy()):
        assert distap.evaluate(described, truth=truth, names=names) == expected
    instances, means = parsed_truth(truth, "truth").grouped(names, rows)
    assert instances == ["p", "q", "r", "28"]
    assert means.norm(dim=1).tolist() == pytest.approx([1] * 4) and means[
        0
    ].tolist() == pytest.approx([math.cos(math.radians(10)), math.sin(math.radians(10))])
    wrong = {**truth, "instances": {"p": ["0", "21"]}}
    with pytest.raises(DistapError, match="instances: their image '21' and 0 more are not there"):
        distap.evaluate(rows, truth=wrong, names=names)
    with pytest.raises(DistapError, match="'28' is an instance, and an image that is in none"):
        distap.evaluate(
            rows, truth={**truth, "instances": truth["instances"] | {"28": ["0"]}}, names=names
        )
    with pytest.raises(
        DistapError, match="query '28' is an image of an instance; ask for the instance"
    ):
        distap.evaluate(
            rows, truth={**truth, "instances": truth["instances"] | {"s": ["28"]}}, names=names
        )
