import json
import sys
from collections import Counter

import numpy as np
import pytest
from dataset_trees import PEOPLE, TREES, cars, dump, photo
from raising import raises

from distap.data.converters import DATASETS
from distap.data.converters.dataset import convert
from distap.data.converters.protocols import OF_AN_INDEX, OF_THEMSELVES
from distap.data.images.decoding import EncodedImage
from distap.data.loading.reader import ImageSet
from distap.data.shards.index import load_index
from distap.errors import DistapError

GALLERY = {f"all_souls_{place:06d}": 1 for place in range(6)}
ZIPPY = "zippy_999/pos/P999_00"


def people(train, query, gallery):
    """The images of each class of each split of re-identification, by the folders of its images."""
    people_of = {"query": query, "gallery": gallery}
    return {"train": {"0001": 2, "0003": 2}} | {
        split: {f"{folder}/{name}": 1 for name in PEOPLE[split]}
        for split, folder in people_of.items()
    }


QUERIES = {"bodleian_000107": 1, "keble_000214": 1}

OF_LEVEL = {
    f"{level}-{part}": {f"bmk_{level}/{label}": count for label, count in counted.items()}
    for level in ("fine", "middle", "coarse")
    for part, counted in (("query", {5: 1, 6: 1}), ("gallery", {5: 2, 6: 2, 7: 1}))
}
DYML = {"train": {"8": 2, "9": 2}} | OF_LEVEL, {"8": ["3", "0"], "9": ["4", "1"]}

# Images of each class of each split, and the super-category of each class.
EXPECTED = {
    "sop": (
        {"train": {"1": 2, "2": 2}, "test": {"3": 2, "4": 2}},
        {"1": "chair", "2": "mug", "3": "chair", "4": "mug"},
    ),
    "cub": (
        {
            "train": {"001.Black_footed_Albatross": 2, "100.Brown_Pelican": 2},
            "test": {"101.White_Pelican": 2, "200.Wren": 2},
        },
        {},
    ),
    "cars-196": ({"train": {"1": 2, "98": 2}, "test": {"99": 2, "196": 2}}, {}),
    "inaturalist": (
        {"train": {"5": 2, "2761": 2}, "test": {"11": 2, "7000": 2}},
        {"2761": "Aves", "5": "Fungi", "11": "Aves", "7000": "Plantae"},
    ),
    "vehicleid": (
        {
            "train": {"1": 2, "2": 2},
            "test_small": {"3": 2},
            "test_medium": {"3": 2, "4": 2},
            "test_large": {"3": 2, "4": 2, "5": 2},
        },
        {},
    ),
    "inshop": (
        {
            "train": {"id_00000002": 2, "id_00000080": 2},
            "query": {"id_00000090": 1, "id_00000091": 1},
            "gallery": {"id_00000090": 1, "id_00000091": 1},
        },
        {
            "id_00000002": "WOMEN/Dresses",
            "id_00000080": "MEN/Denim",
            "id_00000090": "MEN/Denim",
            "id_00000091": "WOMEN/Skirts",
        },
    ),
    "dyml-animal": DYML,
    "dyml-vehicle": DYML,
    "dyml-product": (
        {
            "train": {"8": 2, "9": 2},
            "test": {"mini-bmk_all_in_one/8": 2, "mini-bmk_all_in_one/9": 2},
        },
        {
            **DYML[1],
            **{f"mini-bmk_all_in_one/{label}": levels for label, levels in DYML[1].items()},
        },
    ),
    "landmarks-clean": ({"train": {"3": 2, "17": 2}, "validation": {"3": 2}}, {}),
    "sfm-120k": ({"train": {"7": 2, "9": 2}, "validation": {"1": 2, "4": 2}}, {}),
    "gldv2": (
        {
            "train": {"5": 2, "8": 2},
            "index": {"1111111111111111": 1, "2222222222222222": 1, "3333333333333333": 1},
            "query": {"4444444444444444": 1, "6666666666666666": 1},
        },
        {},
    ),
    "h-gldv2": ({"train": {"5": 2, "9": 2}}, {"5": "bridge", "9": "castle"}),
    "roxford5k": ({"query": QUERIES, "gallery": GALLERY}, {}),
    "rparis6k": ({"query": QUERIES, "gallery": GALLERY}, {}),
    "revisitop1m": ({"distractors": {"distractor": 3}}, {}),
    "ilias": (
        {
            "query": {"bold_bimp_000/query/Q000_00.jpg": 1, "zippy_999/query/Q999_00.jpg": 1},
            "gallery": {
                f"{name}.jpg": 1
                for name in (*(f"bold_bimp_000/pos/P000_0{n}" for n in (0, 1)), ZIPPY)
            },
        },
        {},
    ),
    "market-1501": (people("bounding_box_train", "query", "bounding_box_test"), {}),
    "veri-776": (people("image_train", "image_query", "image_test"), {}),
    "msmt17": (
        {
            "train": {"0": 2},
            "query": {
                "test/0001/0001_000_01_0303morning_0020.jpg": 1,
                "test/0002/0002_000_03_0303noon_0023.jpg": 1,
            },
            "gallery": {
                f"test/0001/0001_{name}.jpg": 1
                for name in ("001_07_0303noon_0021", "002_01_0303noon_0022")
            },
        },
        {},
    ),
    "places": (
        {
            "query": {"@500000.00@4400000.00@q.jpg": 1},
            "gallery": {"@500024.00@4400000.00@near.jpg": 1, "@500000.00@4400025.50@far.jpg": 1},
        },
        {},
    ),
    "uned": (
        {
            **{f"train-{domain}": {f"{domain}/0": 2, f"{domain}/1": 2} for domain in OF_THEMSELVES},
            **{f"train-{domain}": {f"{domain}/0": 2} for domain in OF_AN_INDEX},
            "test": {f"{domain}/{number}": 2 for domain in OF_THEMSELVES for number in (0, 1)},
            "query": {"inshop/7": 1, "met/7": 1, "gldv2/7|gldv2/8": 1},
            "index": {f"{domain}/{number}": 1 for domain in OF_AN_INDEX for number in (7, 8)},
        },
        {},
    ),
    "vggface2": ({"train": {"n000002": 2, "n000003": 2}, "test": {"n000001": 2, "n000009": 2}}, {}),
    "ijb-c": (
        {
            "test": {
                **{
                    f"{name}.jpg 1": 1
                    for name in ("img/1", "img/2", "img/3", "frames/1", "frames/2", "frames/3")
                },
                **{f"img/{number}.jpg 2": 1 for number in (3, 4, 5, 6, 7)},
            }
        },
        {},
    ),
}

CLEAN = "annotations_landmarks/annotation_clean_val.txt"
# A wrong line of each list: the file, what stands there, what is put instead, and what the error
# says of it.
WRONG_LINES = [
    (
        "sop",
        "Ebay_train.txt",
        "2 1 1 chair",
        "2 one 1 chair",
        r"line 3: class 'one' is no whole number",
    ),
    (
        "sop",
        "Ebay_train.txt",
        "2 1 1 chair",
        "2 1 chair",
        r"line 3: 3 columns, expected 4: image_id,class_id",
    ),
    (
        "sop",
        "Ebay_train.txt",
        "2 1 1 chair",
        "2 1 1 chair\x1b",
        r"line 3: path .* is no printable text",
    ),
    (
        "sop",
        "Ebay_test.txt",
        "image_id class_id",
        "id class",
        r"line 1: expected the heading 'image_id class_id",
    ),
    (
        "cub",
        "image_class_labels.txt",
        "3 100",
        "3 77",
        r"images\.txt: not as its authors .*: KeyError\(77\)",
    ),
    (
        "inaturalist",
        "Inat_dataset_splits/Inaturalist_test_set1.txt",
        "Aves/11/",
        "Aves/",
        r"line 1: .*expected train_val2018/SUPER-CATEGORY/NUMBER/IMAGE\.jpg",
    ),
    (
        "inshop",
        "Eval/list_eval_partition.txt",
        " query",
        " querry",
        r"line 7: .*one of train, query, gallery",
    ),
    (
        "dyml-animal",
        "train/label.csv",
        "0, 3, 8\n",
        "0, 8\n",
        r"line 1: 3 columns, expected 'fname,coarse_id",
    ),
    (
        "landmarks-clean",
        CLEAN,
        "http:",
        "file:",
        r"line 1: .* is no address of an image on the web",
    ),
    (
        "gldv2",
        "metadata/train_clean.csv",
        "a123456789",
        "../../x789",
        r"line 3: image .*expected 16 digits",
    ),
    (
        "gldv2",
        "ground_truth/retrieval_solution_v2.1.csv",
        "Private",
        "Hidden",
        r"line 4: usage 'Hidden', expected",
    ),
    (
        "vggface2",
        "bb_landmark/loose_bb_test.csv",
        ",2,1,4,6",
        ",2,1,-4,6",
        r"line 3: expected left, top, width and",
    ),
    (
        "sop",
        "Ebay_train.txt",
        "chair_final/1_1",
        "../1_1",
        r"line 3: path '.*' leaves .*; expected one inside",
    ),
    (
        "uned",
        "info_files/met/index.json",
        "met/index/0.jpg",
        "../met.jpg",
        "line 1: path '.*' leaves",
    ),
    ("landmarks-clean", CLEAN, "a.example/val", "a.example/%2e%2e", "line 1: path '.*' leaves"),
]


@pytest.fixture
def tree(tmp_path):
    """Lay out a tiny copy of a data set."""

    def lay_out(name):
        TREES[name](tmp_path / "source")
        return tmp_path / "source"

    return lay_out


def change(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def counts(folder):
    index = load_index(folder)
    return dict(Counter(index.class_name[index.label].tolist()))


def test_every_data_set_has_a_tree():
    assert set(TREES) == set(EXPECTED) == set(DATASETS)


@pytest.mark.parametrize("name", TREES)
def test_the_authors_files_become_a_data_set_a_split(name, tree, tmp_path):
    source = tree(name)
    output = tmp_path / "out"
    converted = convert(name, source, output)
    splits, groups = EXPECTED[name]
    assert {name: len(index) for name, (index, _) in converted.items()} == {
        split: sum(classes.values()) for split, classes in splits.items()
    }
    originals = {path.read_bytes() for path in source.rglob("*") if path.is_file()}
    for split, classes in splits.items():
        assert counts(output / split) == classes
        index = load_index(output / split)
        assert dict(zip(index.class_name.tolist(), index.class_levels.tolist(), strict=True)) == {
            label: [groups[label]]
            if isinstance(groups.get(label, []), str)
            else groups.get(label, [])
            for label in classes
        }
        reader = ImageSet(output / split, index)
        if name not in ("vggface2", "ijb-c"):  # whose faces are cut out
            assert {reader.data(sample) for sample in range(len(index))} <= originals
    assert not any(left_out for _, left_out in converted.values())


def test_a_face_is_cut_out_by_its_box_and_three_tenths_more(tree, tmp_path):
    source = tree("vggface2")
    ((index, _),) = convert("vggface2", source, tmp_path / "out", only=["train"]).values()
    # Photographs are 10 x 8: boxes of 4 x 4 at (2, 1) give 1.4 to 6.6 by 0.4 to 5.6, and others are
    # cut at the edge.
    assert [index.width.tolist(), index.height.tolist()] == [[6] * 4, [6, 8, 8, 8]]
    packed = ImageSet(tmp_path / "out/train", index).encoded(0).whole()
    whole = (
        EncodedImage((source / "train/n000002/0001_01.jpg").read_bytes()).whole().crop((1, 0, 7, 6))
    )
    assert np.abs(np.asarray(packed, int) - np.asarray(whole, int)).mean() < 4
    change(source / "bb_landmark/loose_bb_test.csv", ",2,1,4,4", ",20,1,4,4")
    ((_, left_out),) = convert("vggface2", source, tmp_path / "cut", only=["test"]).values()
    assert "lies outside of 10 x 8 pixels" in left_out[0].reason


def test_the_species_of_inaturalist_have_their_whole_tree_if_it_lies_there(tree, tmp_path):
    source = tree("inaturalist")
    genera = {2761: "Pieris", 5: "Amanita", 11: "Parus", 7000: "Pieris"}
    names = {
        number: ["Plantae" if number > 2761 else "Animalia", "P", "C", "O", "F", item]
        for number, item in genera.items()
    }
    ranks = ["kingdom", "phylum", "class", "order", "family", "genus"]
    listed = [
        {"id": number, **dict(zip(ranks, path, strict=True))} for number, path in names.items()
    ]
    (source / "categories.json").write_text(json.dumps(listed))
    convert("inaturalist", source, tmp_path / "out")
    index = load_index(tmp_path / "out" / "test")
    assert index.class_name.tolist() == ["11", "7000"]
    assert index.class_levels[:, 0].tolist() == ["Animalia/P/C/O/F/Parus", "Plantae/P/C/O/F/Pieris"]
    assert index.class_levels[:, 5].tolist() == ["Animalia", "Plantae"]
    for left, message in (
        (listed[:1], "not as its authors distribute it: KeyError"),
        ([{"id": 1}], "no list of objects with id"),
    ):
        (source / "categories.json").write_text(json.dumps(left))
        with pytest.raises(DistapError, match=message):
            convert("inaturalist", source, tmp_path / "other", only=["test"])


@pytest.mark.parametrize(("name", "file", "old", "new", "message"), WRONG_LINES)
def test_a_wrong_line_is_named_by_file_and_number(name, file, old, new, message, tree, tmp_path):
    source = tree(name)
    change(source / file, old, new)
    with pytest.raises(DistapError, match=message) as error:
        convert(name, source, tmp_path / "out")
    assert str(source) in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_split_that_is_named_is_converted_alone(tree, tmp_path):
    source = tree("gldv2")
    output = tmp_path / "out"
    convert("gldv2", source, output, only=["index"])
    assert not (output / "train").exists() and not (output / "ground_truth.json").exists()
    with raises("data.unknown_split", "tset"):
        convert("gldv2", source, output, only=["tset"])


def test_a_split_without_any_image_is_an_error(tree, tmp_path):
    source = tree("sop")
    for path in source.rglob("*.JPG"):
        path.unlink()
    with raises("data.unreadable", "4", "chair_final/1_0"):
        convert("sop", source, tmp_path / "out")
    (source / "Ebay_test.txt").write_text("image_id class_id super_class_id path\n")
    with raises("data.empty", "test"):
        convert("sop", source, tmp_path / "out", only=["test"])


def test_an_image_that_is_listed_twice_is_packed_once(tree, tmp_path):
    source = tree("revisitop1m")
    with (source / "revisitop1m.txt").open("a") as file:
        file.write("c/c5/c5f2.jpg\n")
    ((index, left_out),) = convert("revisitop1m", source, tmp_path / "out").values()
    assert len(index) == 3 and left_out == [("jpg/c/c5/c5f2.jpg", "images that are listed again")]


def test_landmarks_may_lie_where_the_list_says(tree, tmp_path):
    source = tree("landmarks-clean")
    (source / "annotations_landmarks" / "annotation_clean_val.txt").write_text(
        "val/a.jpg 8\nval/b.jpg 8\n"
    )
    photo(source / "val" / "a.jpg")
    photo(source / "val" / "b.jpg")
    convert("landmarks-clean", source, tmp_path / "out", only=["validation"])
    assert counts(tmp_path / "out" / "validation") == {"8": 2}


@pytest.mark.parametrize("key", ["imlist", "qimlist"])
def test_a_name_in_a_pickle_that_leaves_the_folder_is_refused(key, tmp_path):
    contents = {
        "imlist": ["a"],
        "qimlist": ["q"],
        "gnd": [{"bbx": [0, 0, 1, 1], "easy": [], "hard": [], "junk": []}],
    }
    contents[key] = ["../outside"]
    dump(tmp_path / "gnd_roxford5k.pkl", contents)
    photo(tmp_path / "jpg" / "a.jpg")
    photo(tmp_path / "jpg" / "q.jpg")
    with raises("data.wrong_line", "gnd_roxford5k.pkl", "../outside.jpg"):
        convert("roxford5k", tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("../1.jpg", 1), r"line 1: path '\.\./1\.jpg' leaves"),
        (("car_ims/1.jpg", 1.5), r"line 1: class '1\.5' is no whole number"),
        (("car_ims/1.jpg", 197), "line 1: class 197 is none of 1 to 196"),
    ],
)
def test_a_wrong_row_of_a_matlab_file_is_named_by_its_place(row, message, tmp_path):
    cars(tmp_path, [row, ("car_ims/000001.jpg", 1)])
    with pytest.raises(DistapError, match=rf"cars_annos\.mat, {message}"):
        convert("cars-196", tmp_path, tmp_path / "out")


@pytest.mark.parametrize("contents", [b"", b"no MATLAB file" * 99])
def test_a_damaged_matlab_file_is_named(contents, tree, tmp_path):
    source = tree("cars-196")
    (source / "cars_annos.mat").write_bytes(contents)
    with raises("data.wrong_list", "cars_annos.mat", "MATLAB"):
        convert("cars-196", source, tmp_path / "out")


def test_a_matlab_file_without_scipy_says_what_to_install(tree, tmp_path, monkeypatch):
    source = tree("cars-196")
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with raises("package.missing", "cars_annos.mat", "MATLAB"):
        convert("cars-196", source, tmp_path / "out")
