"""A part of a data set's classes, as in photos[:0.75]."""

import pytest
from images import write_images
from raising import raises

from benchmarks.photos import pack
from distap.config.reading import load_recipe
from distap.data.loading.reader import open_images
from distap.data.shards.index import load_index
from distap.errors import DistapError
from distap.storage.locations import parse_source, part_of


@pytest.mark.parametrize("kind", ["imagefolder", "shards"])
def test_two_parts_hold_all_images_and_share_no_class(tmp_path, kind):
    photos = write_images(
        tmp_path / "photos", {f"{number}": 2 + number % 3 for number in range(10)}
    )
    place = f"imagefolder:{photos}" if kind == "imagefolder" else str(tmp_path / "shards")
    if kind == "shards":
        pack(photos, tmp_path / "shards")
    whole, first, second = (load_index(place + share) for share in ("", "[:0.7]", "[0.7:]"))
    assert (first.classes.count, second.classes.count) == (7, 3)
    assert {*first.class_name} | {*second.class_name} == {*whole.class_name}
    assert sorted([*first.names, *second.names]) == sorted(whole.names)
    assert len({whole.fingerprint, first.fingerprint, second.fingerprint}) == 3
    images = open_images(place)
    remaining = open_images(f"{place}[0.7:]")
    numbers = {key: number for number, key in enumerate(images.keys)}
    for sample, (key, name) in enumerate(zip(remaining.keys, remaining.classes, strict=True)):
        assert images.classes[numbers[key]] == name
        assert remaining.encoded(sample).size == (24, 24)
        assert remaining.where(sample) == images.where(numbers[key])
        assert remaining.encoded(sample).whole() == images.encoded(numbers[key]).whole()


def test_a_part_of_a_part():
    assert part_of("photos", 0, 0.75) == "photos[0:0.75]"
    assert part_of("photos[0.5:]", 0.5, 1) == "photos[0.75:1]"
    assert parse_source("train-[0-9].tar").part == (0, 1)  # a glob


def test_what_has_no_parts_is_refused(tmp_path):
    photos = write_images(tmp_path / "photos", {"cat": 2, "dog": 2})
    for text in ("photos[0.5:0.2]", "photos[:2]", "described:photos[:0.5]"):
        with pytest.raises(DistapError, match="shares of their classes"):
            parse_source(text)
    with raises("data.empty"):
        load_index(f"imagefolder:{photos}[0:0.1]")
    with raises("data.no_shards"):  # its images have no classes
        open_images(f"{photos}[:0.5]")
    with pytest.raises(DistapError, match="gives all classes"):
        load_recipe(
            {"run": "run", "steps": 1, "data": {"train": "shards[:0.5]", "reading": "streamed"}}
        )
