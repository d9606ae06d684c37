import copy
import json

import numpy as np
import pytest
import torch
from dataset_trees import TREES, dump
from raising import raises

from distap.data.converters.dataset import convert
from distap.data.shards.index import load_index
from distap.errors import DistapError
from distap.evaluation.ground_truth import read_truth

CONTENTS = {
    "imlist": ["a", "b"],
    "qimlist": ["q"],
    "gnd": [{"bbx": [0, 0, 4, 4], "easy": [0], "hard": [], "junk": [1]}],
}
LISTS = {"cids": ["00000a", "00000b"], "cluster": [1, 1], "qidxs": [0], "pidxs": [1]}


def converted(name, tmp_path, **options):
    TREES[name](tmp_path / "source")
    convert(name, tmp_path / "source", tmp_path / "out", **options)
    return tmp_path / "out"


@pytest.mark.parametrize("name", ["roxford5k", "rparis6k"])
def test_the_ground_truth_tells_easy_hard_and_junk_by_the_names_of_classes(name, tmp_path):
    output = converted(name, tmp_path)
    truth = json.loads((output / "ground_truth.json").read_text())
    assert truth == {
        "dataset": name,
        "figures": ["mAP/trapezoids", "mP@1/last", "mP@5/last", "mP@10/last"],
        "groups": {"Easy": [1], "Medium": [1, 2], "Hard": [2]},
        "query": ["query"],
        "gallery": ["gallery"],
        "queries": [
            {
                "name": "bodleian_000107",
                "box": [1.5, 2.0, 8.0, 7.5],
                "positives": ["all_souls_000000", "all_souls_000001", "all_souls_000002"],
                "grades": [1, 1, 2],
                "junk": ["all_souls_000005"],
            },
            {
                "name": "keble_000214",
                "box": [0.0, 0.0, 9.0, 6.0],
                "positives": ["all_souls_000003", "all_souls_000004"],
                "grades": [2, 2],
                "junk": [],
            },
        ],
    }
    assert {query["name"] for query in truth["queries"]} == set(
        load_index(output / "query").class_name.tolist()
    )
    gallery = set(load_index(output / "gallery").class_name.tolist())
    assert all({*query["positives"], *query["junk"]} <= gallery for query in truth["queries"])


def test_google_landmarks_has_the_positives_of_each_query_that_counts(tmp_path):
    truth = json.loads((converted("gldv2", tmp_path) / "ground_truth.json").read_text())
    assert truth["gallery"] == ["index"]
    assert truth["queries"] == [
        {
            "name": "4444444444444444",
            "part": "Public",
            "positives": ["1111111111111111", "3333333333333333"],
        },
        {"name": "6666666666666666", "part": "Private", "positives": ["2222222222222222"]},
    ]


def test_ilias_groups_positives_by_scale_and_clutter(tmp_path):
    truth = json.loads((converted("ilias", tmp_path) / "ground_truth.json").read_text())
    first, second = truth["queries"]
    assert first["positives"] == ["bold_bimp_000/pos/P000_00.jpg", "bold_bimp_000/pos/P000_01.jpg"]
    groups = {
        name: [grade in grades for grade in first["grades"]]
        for name, grades in truth["groups"].items()
        if name
    }
    assert [name for name, grades in groups.items() if grades[0]] == ["scale 1", "clutter 1"]
    assert [name for name, grades in groups.items() if grades[1]] == ["scale 4", "clutter 3"]
    assert [name for name, grades in truth["groups"].items() if second["grades"][0] in grades] == [
        "",
        "scale 3",
        "clutter 2",
    ]


@pytest.mark.parametrize("name", ["market-1501", "veri-776", "msmt17"])
def test_an_identity_is_right_by_another_camera_and_junk_by_the_same(name, tmp_path):
    truth = json.loads((converted(name, tmp_path) / "ground_truth.json").read_text())
    query, _ = truth["queries"]
    assert [len(query["positives"]), len(query["junk"])] == [1, 1]
    assert ("_c2" in query["positives"][0]) or ("_07_" in query["positives"][0])


def test_a_place_is_right_within_25_metres(tmp_path):
    truth = read_truth(converted("places", tmp_path) / "ground_truth.json")
    names = list(load_index(tmp_path / "out/gallery").class_name)
    (actual,) = truth.of_gallery(truth.queries, names, torch.device("cpu")).positives
    assert [names[row] for row in actual] == ["@500024.00@4400000.00@near.jpg"]


def test_an_instance_of_ijb_c_is_an_image_or_a_video_of_a_subject_with_five(tmp_path):
    truth = read_truth(converted("ijb-c", tmp_path) / "ground_truth.json")
    assert truth.instances == {
        "1/91": ("frames/1.jpg 1", "frames/3.jpg 1"),
        "1/90": ("frames/2.jpg 1",),
    }
    asked = {query.name: {query.name, *query.positives} for query in truth.queries}
    assert len(asked) == 10
    assert asked["1/90"] == {"img/1.jpg 1", "img/2.jpg 1", "img/3.jpg 1", "1/91", "1/90"}
    assert asked["img/3.jpg 2"] == {f"img/{number}.jpg 2" for number in (3, 4, 5, 6, 7)}


def test_uned_is_right_by_class_and_domain_in_one_index(tmp_path):
    truth = read_truth(converted("uned", tmp_path) / "ground_truth.json")
    assert (truth.query, truth.gallery, truth.queries) == (("test", "query"), ("test", "index"), ())
    classes = np.array(
        ["cars/0", "cars/0", "sop/0", "gldv2/7|gldv2/8", "gldv2/7", "gldv2/8", "cars/7"]
    )
    actual = truth.of_classes(
        classes, np.arange(4), np.array([0, 1, 2, 4, 5, 6]), torch.device("cpu")
    )
    assert [sorted(element.tolist()) for element in actual.positives] == [
        [0, 1],
        [0, 1],
        [2],
        [3, 4],
    ]
    assert actual.counts.tolist() == [1, 1, 0, 2]  # without the query itself
    assert actual.parts == ["cars", "cars", "sop", "gldv2"] and actual.own.tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(qimlist=["q", "r"]), "ValueError.*shorter"),
        (lambda c: c.pop("gnd"), "KeyError.*gnd"),
    ],
)
def test_a_wrong_ground_truth_of_revisited_is_refused(change, message, tmp_path):
    contents = copy.deepcopy(CONTENTS)
    change(contents)
    dump(tmp_path / "source" / "gnd_roxford5k.pkl", contents)
    with pytest.raises(
        DistapError, match=rf"gnd_roxford5k\.pkl: not as its authors distribute it: {message}"
    ):
        convert("roxford5k", tmp_path / "source", tmp_path / "out")


def test_a_name_of_sfm_leads_to_no_other_folder(tmp_path):
    lists = {**LISTS, "cids": ["00000a", "../../etc"]}
    dump(tmp_path / "source" / "retrieval-SfM-120k.pkl", {"train": lists, "val": LISTS})
    with raises("data.wrong_line", "retrieval-SfM-120k.pkl", "2"):
        convert("sfm-120k", tmp_path / "source", tmp_path / "out", only=["train"])
