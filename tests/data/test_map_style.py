"""Images in data sets of torch, torchvision and Hugging Face, in the place of shards."""

import numpy as np
import pytest
import torch
from images import write_images
from PIL import Image
from raising import raises
from torch.utils.data import IterableDataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder

from distap.data.images.damage import DamagedImageError
from distap.data.loading.checking import check
from distap.data.loading.reader import ImageSet, open_images
from distap.data.map_style import source_of
from distap.data.shards.index import load_index
from distap.errors import DistapError

hf = pytest.importorskip("datasets")
CLASSES = {"cup": 3, "pen": 4, "tin": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("map style") / "photos", CLASSES, 40)


class Items:
    """Items that are counted when they are read."""

    def __init__(self, items):
        self.items = items
        self.reads = 0

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        self.reads += 1
        item = self.items[number]
        return item() if callable(item) else item


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield images(1)[0], 0


def opened(data):
    source = source_of(data)
    index = load_index(source)
    return index, ImageSet(source, index)


def pixels_of(reader, sample):
    width, height = reader.encoded(sample).size
    return reader.encoded(sample).crop((0, 0, width, height), (height, width))


def images(count=6, side=8):
    return torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (count, 3, side, side), dtype=np.uint8)
    )


def test_a_folder_of_torchvision_gives_its_files_as_they_are(folder):
    data = ImageFolder(folder)
    index, reader = opened(data)
    expected = load_index(f"imagefolder:{folder}")
    for column in ("label", "key", "class_name"):
        assert getattr(index, column).tolist() == getattr(expected, column).tolist()
    assert (
        reader.data(4) == (folder / expected.key[4]).read_bytes()
        and reader.where(4) == "ImageFolder[4]"
    )
    picked, chosen = opened(Subset(Subset(data, range(2, 12)), [9, 0, 1]))
    assert picked.key.tolist() == expected.key[
        [11, 2, 3]
    ].tolist() and picked.class_name.tolist() == [
        "cup",
        "pen",
        "tin",
    ]
    assert chosen.data(0) == reader.data(11)


def test_a_transform_is_used_if_it_gives_pixels_and_refused_if_it_gives_floats(folder):
    def turned(image):
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 1, 0)

    index, reader = opened(ImageFolder(folder, transform=turned))
    assert index.key[3] == "3"
    assert torch.equal(pixels_of(reader, 3), turned(Image.open(folder / "pen" / "0.png")))
    with raises("image.wrong_pixels", "ImageFolder[0"):
        opened(ImageFolder(folder, transform=lambda image: turned(image) / 255))


@pytest.mark.parametrize("form", ["tensors", "dicts", "PIL images"])
def test_any_items_with_an_image_and_a_label_will_do(form):
    pixels = images()
    labels = [2, 0, 2, 10, 10, 0]
    if form == "tensors":
        data = TensorDataset(pixels, torch.tensor(labels))
    elif form == "dicts":
        data = [
            {"label": np.int64(label), "image": image.permute(1, 2, 0).numpy()}
            for image, label in zip(pixels, labels, strict=True)
        ]
    else:
        pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]
        data = list(zip(pictures, map(str, labels), strict=True))
    index, reader = opened(data)
    assert index.class_name.tolist() == ["0", "2", "10"] and index.label.tolist() == [
        1,
        0,
        1,
        2,
        2,
        0,
    ]
    assert all(torch.equal(pixels_of(reader, row), image) for row, image in enumerate(pixels))


def test_labels_are_read_once_and_not_at_all_where_an_attribute_agrees_with_the_items():
    items = [(image, row % 2) for row, image in enumerate(images(60))]
    data = Items(items)
    shown = []

    def track(rows, message, total):
        shown.append((message, total))
        return rows

    source = source_of(data, track)
    assert data.reads == 60 and shown == [
        ("reading the labels of Items, whose items agree with no attribute `targets`", 60)
    ]
    data.targets = torch.arange(60) % 2
    assert load_index(source_of(data)).label.tolist() == load_index(source).label.tolist()
    assert data.reads < 60 + 50
    data.targets = [3] * 60
    data.classes = ["even", "odd"]
    assert load_index(source_of(data)).class_name.tolist() == ["even", "odd"]


def test_an_image_that_cannot_be_read_is_damaged_and_the_others_are_not():
    items = [(image, 0) for image in images(20)]
    data = Items(items)
    data.targets = [0] * 20
    items[10] = lambda: 1 // 0
    _, reader = opened(data)
    with pytest.raises(DamagedImageError, match=r"Items\[10\]: ZeroDivisionError"):
        reader.encoded(10)
    assert reader.encoded(9).size == (8, 8)
    data.items = [lambda: 1 // 0] * 20
    with raises("data.unreadable", "8", "ZeroDivisionError"):
        load_index(source_of(data))
    del data.targets
    with raises("data.unreadable", "Items[0", "ZeroDivisionError"):
        source_of(data)


def test_images_without_a_class_are_left_out():
    labels = [0, None, "n/a", 1.0, float("nan"), -1, "1", True]
    source = source_of([(image, label) for image, label in zip(images(8), labels, strict=True)])
    index = load_index(source)
    assert index.class_name[index.label].tolist() == ["0", "1", "1", "True"]
    assert [skipped.name for skipped in index.left_out] == [
        "list[1]",
        "list[2]",
        "list[4]",
        "list[5]",
    ]


@pytest.mark.parametrize("dtype", ["uint8", "uint64", "large_string", "bool", "float32"])
def test_labels_of_hugging_face_may_have_any_type_of_a_column(dtype):
    features = hf.Features({"image": hf.Image(), "label": hf.Value(dtype)})
    labels = {"large_string": ["a", "b"], "bool": [True, False]}.get(dtype, [3, 4])
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images(2)]
    index = load_index(
        source_of(hf.Dataset.from_dict({"image": pictures, "label": labels}, features=features))
    )
    assert index.class_name[index.label].tolist() == [str(label) for label in labels]


@pytest.mark.parametrize(
    ("data", "code", "names"),
    [
        (Endless(), "data.unknown_type", []),
        ({}, "data.unknown_type", []),
        ([], "data.empty", ["list"]),
        ([images(1)[0]], "data.wrong_item", ["list[0"]),
        ([{"image": 1, "class": 2}], "data.wrong_item", ["list[0"]),
        ([(images(1)[0], -1)], "data.no_classes", ["list", "1"]),
        (
            [(images(1)[0], np.eye(4)[0])],
            "data.wrong_label",
            ["list[0"],
        ),
        ([(3, 0)], "image.unknown_type", ["list[0"]),
        ([(images(1)[0][:1], 0)], "image.wrong_pixels", ["list[0"]),
        (Subset([(image, 0) for image in images(3)], [1, 1]), "data.repeated_image", []),
        (Items([(images(1)[0], "a\tb")]), "data.wrong_class_name", []),
        (
            Items(8 * [lambda: (torch.randint(256, (3, 8, 8), dtype=torch.uint8), 0)]),
            "data.random_images",
            [],
        ),
    ],
)
def test_what_is_no_data_set_is_refused(data, code, names):
    with raises(code, *names):
        load_index(source_of(data))


def hugging_face(folder):
    paths = [str(path) for name in CLASSES for path in sorted((folder / name).iterdir())]
    labels = [number for number, name in enumerate(CLASSES) for _ in range(CLASSES[name])]
    kinds = {
        "image": hf.Image(),
        "label": hf.ClassLabel(names=list(CLASSES)),
        "number": hf.Value("int64"),
    }
    return hf.Dataset.from_dict(
        {"image": paths, "label": labels, "number": range(12)}, hf.Features(kinds)
    )


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    """A folder that save_to_disk wrote, and one with two splits."""
    place = tmp_path_factory.mktemp("hugging face")
    whole = hugging_face(folder)
    whole.save_to_disk(place / "whole")
    hf.DatasetDict({"train": whole, "test": whole.select(range(3, 12))}).save_to_disk(
        place / "splits"
    )
    return place


def test_a_data_set_of_hugging_face_is_read_as_it_is_stored(folder, saved):
    expected = load_index(f"imagefolder:{folder}")
    source = f"hf:{saved / 'whole'}"
    index = load_index(source)
    assert index.label.tolist() == expected.label.tolist() and index.class_name.tolist() == list(
        CLASSES
    )
    reader = ImageSet(source, index)
    assert reader.data(11) == (folder / expected.key[11]).read_bytes()
    assert reader.where(11) == f"{source}[11]"
    test = load_index(f"hf:{saved / 'splits'}#test")
    assert test.class_name.tolist() == ["pen", "tin"] and len(test) == 9
    assert opened(hugging_face(folder).select([11, 0]).with_format("torch"))[
        0
    ].class_name.tolist() == ["cup", "tin"]
    assert load_index(source).fingerprint == index.fingerprint != test.fingerprint
    assert len(open_images(source)) == 12


def test_columns_of_hugging_face_named_by_level_are_coarser_classes(folder, tmp_path):
    whole = hugging_face(folder)
    genera = hf.Features(
        {"level1": hf.ClassLabel(names=["vessel", "tool"]), "level2": hf.Value("int64")}
    )
    rows = {"level1": [int(number == 1) for number in whole["label"]], "level2": [7] * 12}
    coarser = hf.Dataset.from_dict(rows, features=genera)
    hf.concatenate_datasets([whole, coarser], axis=1).save_to_disk(tmp_path / "levels")
    index = load_index(f"hf:{tmp_path / 'levels'}")
    assert index.class_name.tolist() == ["cup", "pen", "tin"]
    assert index.class_levels.tolist() == [["vessel", "7"], ["tool", "7"], ["vessel", "7"]]
    assert index.classes.numbers.tolist() == [[0, 1, 0], [1, 0, 0], [2, 1, 0]]
    with raises("data.crossing_levels", "cup", "0", "b", "1", "a"):
        load_index(source_of(whole.add_column("level1", ["a", *["b"] * 11])))


def test_what_cannot_be_read_from_hugging_face_is_refused(folder, saved, tmp_path):
    with raises("data.unknown_split", "SPLIT"):
        load_index(f"hf:{saved / 'splits'}")
    with raises("data.unknown_split"):
        load_index(f"hf:{saved / 'whole'}#train")
    with raises("data.missing", "save_to_disk"):
        load_index(f"hf:{tmp_path / 'none'}")
    with pytest.raises(
        DistapError, match=r"columns a: Value.*int64.*, b: Value.*string.*; expected one Image"
    ):
        load_index(source_of(hf.Dataset.from_dict({"a": [1], "b": ["x"]})))
    with raises("data.random_images"):
        load_index(source_of(hugging_face(folder).with_transform(lambda rows: rows)))
    with raises("data.no_files"):
        check(f"hf:{saved / 'whole'}")
    with raises("data.object_missing"):
        load_index("given:a:B")
