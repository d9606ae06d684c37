import copy
import json

import pytest
from dataset_trees import TREES, dump

from distap.data.converters.converting import DATASETS, convert
from distap.data.shards.load_index import load_index
from distap.errors import DistapError

CONTENTS = {
    "imlist": ["a", "b"],
    "qimlist": ["q"],
    "gnd": [{"bbx": [0, 0, 4, 4], "easy": [0], "hard": [], "junk": [1]}],
}
LISTS = {"cids": ["00000a", "00000b"], "cluster": [1, 1], "qidxs": [0], "pidxs": [1]}


def converted(name, tmp_path, **options):
    TREES[name](tmp_path / "source")
    convert(DATASETS[name], tmp_path / "source", tmp_path / "out", **options)
    return tmp_path / "out"


@pytest.mark.parametrize("name", ["roxford5k", "rparis6k"])
def test_the_ground_truth_tells_easy_hard_and_junk_by_the_names_of_classes(name, tmp_path):
    output = converted(name, tmp_path)
    truth = json.loads((output / "ground_truth.json").read_text())
    assert truth == {
        "dataset": name,
        "query": "query",
        "gallery": ["gallery"],
        "queries": [
            {
                "name": "bodleian_000107",
                "box": [1.5, 2.0, 8.0, 7.5],
                "easy": ["all_souls_000000", "all_souls_000001"],
                "hard": ["all_souls_000002"],
                "junk": ["all_souls_000005"],
            },
            {
                "name": "keble_000214",
                "box": [0.0, 0.0, 9.0, 6.0],
                "easy": [],
                "hard": ["all_souls_000003", "all_souls_000004"],
                "junk": [],
            },
        ],
    }
    assert {query["name"] for query in truth["queries"]} == set(load_index(output / "query").class_name.tolist())
    gallery = set(load_index(output / "gallery").class_name.tolist())
    assert all(set(query[grade]) <= gallery for query in truth["queries"] for grade in ("easy", "hard", "junk"))


def test_google_landmarks_has_the_positives_of_each_query_that_counts(tmp_path):
    truth = json.loads((converted("gldv2", tmp_path) / "ground_truth.json").read_text())
    assert truth["gallery"] == ["index"]
    assert truth["queries"] == [
        {
            "name": "4444444444444444",
            "usage": "Public",
            "positives": ["1111111111111111", "3333333333333333"],
        },
        {"name": "6666666666666666", "usage": "Private", "positives": ["2222222222222222"]},
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("imlist"), "the file has no 'imlist'"),
        (lambda c: c.update(qimlist=["q", "r"]), "the file has 2 queries, but ground truth of 1"),
        (lambda c: c["gnd"][0].pop("hard"), r"gnd\[0\] has no 'hard'"),
        (lambda c: c["gnd"][0].update(easy=[2]), r"gnd\[0\]\['easy'\]\[0\] is 2, expected a whole number below 2"),
        (lambda c: c["gnd"][0].update(bbx=[1, 2, 3]), r"gnd\[0\]\['bbx'\] is \[1, 2, 3\], expected left, top"),
        (lambda c: c["gnd"][0].update(bbx=[4, 0, 4, 4]), r"gnd\[0\]\['bbx'\] is empty"),
        (lambda c: c.update(imlist=["a", "a"]), "imlist has the same name twice"),
    ],
)
def test_a_wrong_ground_truth_of_revisited_is_named(change, message, tmp_path):
    contents = copy.deepcopy(CONTENTS)
    change(contents)
    dump(tmp_path / "source" / "gnd_roxford5k.pkl", contents)
    with pytest.raises(DistapError, match=rf"gnd_roxford5k\.pkl: {message}"):
        convert(DATASETS["roxford5k"], tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("train"), "the file has no 'train'"),
        (
            lambda c: c["train"].update(cids=["00000a", "../../etc"]),
            r"train\['cids'\]\[1\] is '../../etc', expected six or",
        ),
        (lambda c: c["train"].update(cids=["a", "00000b"]), r"train\['cids'\]\[0\] is 'a', expected six or more"),
        (lambda c: c["train"].update(cluster=[1]), "train has 2 images, but clusters of 1"),
    ],
)
def test_a_wrong_list_of_sfm_is_named(change, message, tmp_path):
    contents = {"train": copy.deepcopy(LISTS), "val": copy.deepcopy(LISTS)}
    change(contents)
    dump(tmp_path / "source" / "retrieval-SfM-120k.pkl", contents)
    with pytest.raises(DistapError, match=rf"retrieval-SfM-120k\.pkl: {message}"):
        convert(DATASETS["sfm-120k"], tmp_path / "source", tmp_path / "out", only=["train"])
    assert not (tmp_path / "out").exists()
