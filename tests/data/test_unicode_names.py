"""Names of classes and files that differ in their Unicode form alone: composed on Linux, decomposed
by macOS.
"""

import json
from dataclasses import replace
from unicodedata import normalize

import numpy as np
import pytest
from extractions import describer, extract
from images import write_images
from raising import raises
from torchvision.datasets import ImageFolder

import distap
from benchmarks.photos import pack
from distap.apps.search import queries_from
from distap.data.loading.reader import open_images
from distap.data.map_style import source_of
from distap.data.shards.image_files import list_images
from distap.data.shards.index import load_index
from distap.data.shards.indexing import index_shards
from distap.errors import DistapError
from distap.evaluation.extraction.extracting import Describing
from distap.evaluation.sets import open_set
from distap.retrieval.descriptor_files import read_descriptors
from distap.retrieval.indexing import search_index
from distap.world import World

NAMES = ("Café", "Müll", "Gâteau", "Øre")
COMPOSED = sorted(NAMES)


def of_form(form, names=NAMES):
    return [normalize(form, name) for name in names]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same four classes with composed names, with decomposed names, and half of the images with
    either.
    """
    root = tmp_path_factory.mktemp("forms")
    write_images(root / "composed", dict.fromkeys(of_form("NFC"), 3))
    write_images(root / "decomposed", dict.fromkeys(of_form("NFD"), 2), seed=1)
    for form in ("NFC", "NFD"):
        write_images(root / "both", dict.fromkeys(of_form(form), 2), seed=2)
    return root


def packed(folders, name, output):
    pack(folders / name, output / name)
    return output / name


def test_folders_of_one_class_in_two_forms_are_one_class_and_no_image_is_lost(folders, tmp_path):
    index = load_index(packed(folders, "both", tmp_path))
    assert index.class_name.tolist() == COMPOSED
    assert len(index) == len(set(index.path.tolist())) == 2 * 2 * 3 + 2  # Ø has one form alone
    assert load_index(f"imagefolder:{folders / 'both'}").class_name.tolist() == COMPOSED


def test_an_image_folder_in_python_has_the_same_classes(folders):
    data = ImageFolder(str(folders / "both"))
    assert len(data.classes) == 7
    assert load_index(source_of(data)).class_name.tolist() == COMPOSED


def test_a_set_of_hugging_face_has_the_same_classes(folders):
    datasets = pytest.importorskip("datasets")
    files = sorted((folders / "both").rglob("*.png"))
    rows = {"image": [str(file) for file in files], "label": [file.parent.name for file in files]}
    data = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    assert load_index(source_of(data)).class_name.tolist() == COMPOSED


def test_an_index_and_a_list_of_classes_written_before_are_read_alike(folders, tmp_path):
    shards = packed(folders, "composed", tmp_path)
    old = load_index(shards)
    twice = of_form("NFD", COMPOSED) + COMPOSED
    label = np.where(np.arange(len(old)) % 2, old.label, old.label + len(COMPOSED))
    # Ø has no other form, so its second name is another class's.
    twice[-1] = "other"
    replace(old, class_name=np.array(twice), class_levels=np.full((8, 0), ""), label=label).save(
        shards
    )
    index = load_index(shards)
    assert index.class_name.tolist() == [*COMPOSED, "other"]
    assert [index.class_name[number] for number in index.label[old.label < 3]] == [
        old.class_name[number] for number in old.label[old.label < 3]
    ]
    (shards / "classes.txt").write_text("".join(f"{name}\n" for name in of_form("NFD", COMPOSED)))
    assert index_shards(shards)[0].class_name.tolist() == COMPOSED
    (shards / "classes.txt").write_text(
        "\n".join([NAMES[0], *of_form("NFD", (NAMES[0],)), *NAMES[1:3]]) + "\n"
    )
    assert index_shards(shards)[0].class_name.tolist() == list(NAMES[:3])


def test_one_class_within_two_coarser_classes_is_refused_when_its_names_meet(folders, tmp_path):
    shards = packed(folders, "composed", tmp_path)
    old = load_index(shards)
    names = [*of_form("NFD", COMPOSED[:1]), *COMPOSED[:1], *COMPOSED[1:3]]
    replace(
        old, class_name=np.array(names), class_levels=np.array([["a"], ["b"], ["c"], ["d"]])
    ).save(shards)
    with raises("data.crossing_levels", "Café", "0", "b", "1", "a"):
        load_index(shards)


@pytest.mark.parametrize(("listed", "there"), [("NFC", "decomposed"), ("NFD", "composed")])
def test_a_list_finds_its_files_by_either_form_and_sees_a_file_that_is_listed_twice(
    folders, listed, there
):
    names = of_form(listed)
    file = folders / there / "list.csv"
    lines = [f"{name}/0.png,{name}" for name in names] + [
        f"{normalize('NFKC', names[0])}/0.png,{NAMES[0]}"
    ]
    file.write_text("path,label\n" + "\n".join(lines) + "\n")
    listing = list_images(file)
    assert all(image.path.is_file() for image in listing.images)
    assert [image.class_name for image in listing.images] == list(NAMES)
    assert [skipped.reason for skipped in listing.left_out] == ["lines that repeat another"]


def test_a_file_that_is_there_in_both_forms_is_found_by_its_own_bytes(tmp_path):
    first, second = of_form("NFC", ("é",)) + of_form("NFD", ("é",))
    write_images(tmp_path, {first: 1}, seed=1)
    write_images(tmp_path, {second: 1}, seed=2)
    (tmp_path / "list.csv").write_text(f"path,label\n{first}/0.png,a\n{second}/0.png,b\n")
    images = [image.path.read_bytes() for image in list_images(tmp_path / "list.csv").images]
    assert images == [(tmp_path / name / "0.png").read_bytes() for name in (first, second)]


def test_queries_find_the_images_of_their_class_in_a_gallery_of_the_other_form(folders, tmp_path):
    queries, gallery = (packed(folders, name, tmp_path) for name in ("decomposed", "composed"))
    opened = open_set(str(queries), gallery=str(gallery))
    evaluation = opened.describe(Describing(describer(), World(), workers=0)).evaluate()
    assert (evaluation.queries, evaluation.left_out) == (8, 0)
    extract(queries, tmp_path / "descriptors", maker=describer())
    assert set(read_descriptors(tmp_path / "descriptors").classes.tolist()) == set(NAMES)


@pytest.mark.parametrize(("written", "there"), [("NFC", "decomposed"), ("NFD", "composed")])
def test_a_truth_names_images_in_either_form(folders, tmp_path, written, there):
    names = open_images(folders / there).keys.tolist()
    first, second, third = (normalize(written, name) for name in names[:3])
    query = {"name": first, "positives": [second], "junk": [third]}
    truth = {
        "queries": [query],
        "instances": {"both": [normalize(written, name) for name in names[4:6]]},
    }
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    opened = open_set(str(folders / there), truth=tmp_path / "truth.json")
    assert opened.describe(Describing(describer(), World(), workers=0)).evaluate().queries == 1
    rows = np.eye(len(names))
    assert distap.evaluate(rows, truth=truth, names=names)["queries"] == 1


def test_names_that_differ_in_their_form_alone_stay_two_images_in_a_truth():
    names = of_form("NFC", ("é",)) + of_form("NFD", ("é",)) + ["a"]
    rows = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    actual = {
        name: distap.evaluate(
            rows, truth={"queries": [{"name": "a", "positives": [name]}]}, names=names
        )["mAP"]
        for name in names[:2]
    }
    assert list(actual.values()) == [1.0, 0.5]


def test_two_queries_of_one_image_are_refused():
    names = [*of_form("NFC", ("é",)), "a"]
    queries = [{"name": form, "positives": ["a"]} for form in (names[0], *of_form("NFD", ("é",)))]
    with pytest.raises(DistapError, match="query é stands 2 times"):
        distap.evaluate(np.eye(2), truth={"queries": queries}, names=names)


def test_labels_and_domains_in_two_forms_are_the_same():
    labels = [*of_form("NFC", NAMES[:2]), *of_form("NFD", NAMES[:2])]
    rows = np.eye(4)
    evaluation = distap.evaluate(
        rows, labels, domains=["é", "è", *of_form("NFD", ("é", "è"))], figures=["R@1"]
    )
    assert evaluation["queries"] == 4
    assert {name for name in evaluation if name.endswith("R@1")} == {
        "R@1",
        "é R@1",
        "è R@1",
        "mean R@1",
    }


def test_a_search_finds_a_key_by_either_form():
    names = [*of_form("NFD", NAMES[:2]), "a"]
    index = search_index(np.eye(3), names)
    assert [index.row_of(name) for name in (*NAMES[:2], *names)] == [0, 1, 0, 1, 2]
    assert queries_from([NAMES[0]], index)[0].key == NAMES[0]
    with pytest.raises(DistapError, match="no image with the key 'b'"):
        index.row_of("b")
