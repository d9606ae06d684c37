"""Extraction of the images that an earlier folder lacks, and what may search such a folder."""

import io
import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import distap
from extractions import (
    describe_files,
    describer,
    encoded,
    extract,
    write_photos,
)
from postprocessing_reference import write_descriptors
from raising import raises
from ranks import on_ranks
from small_trainings import train

from benchmarks.photos import pack, photo
from distap.data.loading.reader import open_images
from distap.data.shards.indexing import index_shards
from distap.data.sizing import Sizing
from distap.evaluation.extraction import extracting
from distap.evaluation.extraction.extracted_folder import (
    extract_to_folder,
)
from distap.evaluation.extraction.extracting import (
    Describing,
    Extraction,
)
from distap.evaluation.extraction.image_describer import (
    ImageDescriber,
    describer_like,
    maker_of,
)
from distap.evaluation.row_folder import open_descriptors, open_row_folder
from distap.evaluation.sets import open_set
from distap.retrieval.descriptor_files import (
    DescriptorSet,
    read_descriptors,
)
from distap.retrieval.indexing import (
    build_index,
)
from distap.retrieval.row_blocks import open_parts
from distap.retrieval.stored_index import read_index, write_index
from distap.retrieval.whitening import learned_whitening
from distap.training.build import trained_network
from distap.world import World

OLD = describer("crop 32", seed=1)
NEW = describer("crop 32", seed=2)


def extract_missing(source, earlier, output, world=None, maker=NEW):
    extraction = Extraction(
        Describing(maker, world or World(), 0),
        open_images(source),
    )
    return extract_to_folder(extraction, output, open_descriptors(earlier))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All 31 photos and one that is damaged, the first 20 of them, and both described in full."""
    folder = tmp_path_factory.mktemp("growing")
    (folder / "all").mkdir()
    write_photos(folder / "all")
    (folder / "some").mkdir()
    for path in sorted((folder / "all").rglob("*.*"))[::-1][:20]:
        target = folder / "some" / path.relative_to(folder / "all")
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
    (folder / "all" / "damaged.png").write_bytes(b"none")
    extract(folder / "some", folder / "old", maker=OLD)
    extract(folder / "all", folder / "old-all", maker=OLD)
    extract(folder / "all", folder / "new-all", maker=NEW)
    extract_missing(folder / "all", folder / "old", folder / "both")
    return folder


def rows_by_key(folder):
    stored = read_descriptors(folder)
    return dict(
        zip(
            stored.keys.tolist(),
            stored.descriptors,
            strict=True,
        )
    )


def test_old_rows_stay_and_the_others_are_those_of_a_whole_extraction(
    folder,
):
    both = read_descriptors(folder / "both")
    old = read_descriptors(folder / "old")
    assert both.keys[:20].tolist() == old.keys.tolist() and len(both) == 31
    np.testing.assert_array_equal(both.descriptors[:20], old.descriptors)
    of_new = rows_by_key(folder / "new-all")
    for key, row in zip(
        both.keys[20:].tolist(),
        both.descriptors[20:],
        strict=True,
    ):
        np.testing.assert_allclose(row, of_new[key], atol=1e-6)
    assert both.networks.of_row.tolist() == [0] * 20 + [1] * 11
    assert both.makers == (
        OLD.described_by,
        NEW.described_by,
    )
    assert both.described_by == NEW.described_by
    assert list(both.left_out) == ["damaged.png"]
    record = json.loads((folder / "both/about.json").read_text())
    assert record["version"] == 4 and "networks.npy" in record["files"]
    plain = json.loads((folder / "old/about.json").read_text())
    assert plain["version"] == 3 and not {
        "networks",
        "networks.npy",
    } & {*plain, *plain["files"]}


def test_the_same_network_goes_on_as_one(folder, tmp_path):
    grown = extract_missing(
        folder / "all",
        folder / "old",
        tmp_path / "grown",
        maker=OLD,
    )
    whole = rows_by_key(folder / "old-all")
    assert grown.networks is None and grown.makers == (OLD.described_by,)
    assert json.loads((tmp_path / "grown/about.json").read_text())["version"] == 3
    assert {*grown.keys.tolist()} == {*whole}
    for key, row in zip(grown.keys.tolist(), grown.descriptors, strict=True):
        np.testing.assert_allclose(row, whole[key], atol=1e-6)


def test_where_nothing_is_missing_the_folder_takes_queries_of_both(folder, tmp_path):
    taken = extract_missing(folder / "some", folder / "old", tmp_path / "taken")
    assert taken.makers == (
        OLD.described_by,
        NEW.described_by,
    )
    assert taken.networks.of_row.tolist() == [0] * 20
    np.testing.assert_array_equal(
        taken.descriptors,
        read_descriptors(folder / "old").descriptors,
    )


def test_a_third_network_comes_after_two(folder, tmp_path):
    shutil.copytree(folder / "all", tmp_path / "more")
    (tmp_path / "more/new.png").write_bytes(encoded(photo(40, 32, seed=77)))
    third = describer("crop 32", seed=3)
    stored = extract_missing(
        tmp_path / "more",
        folder / "both",
        tmp_path / "out",
        maker=third,
    )
    assert stored.networks.of_row.tolist() == [0] * 20 + [1] * 11 + [2]
    assert stored.makers == (
        OLD.described_by,
        NEW.described_by,
        third.described_by,
    )
    again = extract_missing(
        tmp_path / "more",
        folder / "both",
        tmp_path / "again",
        maker=OLD,
    )
    assert again.networks.of_row.tolist() == [0] * 20 + [1] * 11 + [0]
    assert again.makers == (
        OLD.described_by,
        NEW.described_by,
    )


def test_a_damaged_image_is_tried_again_and_is_then_no_longer_left_out(folder, tmp_path):
    shutil.copytree(folder / "all", tmp_path / "mended")
    (tmp_path / "mended/damaged.png").write_bytes(encoded(photo(40, 32, seed=78)))
    stored = extract_missing(
        tmp_path / "mended",
        folder / "both",
        tmp_path / "out",
    )
    assert stored.left_out == {} and stored.keys[-1] == "damaged.png"


def test_other_dimensions_and_other_sizings(folder, tmp_path, caplog):
    with raises(
        "descriptors.wrong_dimensions",
        folder / "old",
        16,
        7,
    ):
        extract_missing(
            folder / "all",
            folder / "old",
            tmp_path / "a",
            maker=describer(first=7),
        )
    assert not (tmp_path / "a").exists()
    extract_missing(
        folder / "all",
        folder / "old",
        tmp_path / "b",
        maker=describer("side 40"),
    )
    assert "`crop 32`" in caplog.text and "`side 40`" in caplog.text


def test_a_stopped_extraction_goes_on_with_the_same_earlier_folder_alone(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(extracting, "FEWEST", 4)
    join = "distap.evaluation.extraction.extracted_folder._join_parts"
    with monkeypatch.context() as patch:
        patch.setattr(join, lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            extract_missing(
                folder / "all",
                folder / "old",
                tmp_path / "out",
            )
    with raises(
        "descriptors.folder_in_use",
        tmp_path / "out",
        "earlier",
    ):
        shutil.copytree(folder / "old", tmp_path / "other")
        path = tmp_path / "other/about.json"
        path.write_text(path.read_text() + "\n")
        extract_missing(
            folder / "all",
            tmp_path / "other",
            tmp_path / "out",
        )
    monkeypatch.setattr(ImageDescriber, "__call__", None)  # all is described already
    stored = extract_missing(folder / "all", folder / "old", tmp_path / "out")
    both = read_descriptors(folder / "both")
    np.testing.assert_allclose(stored.descriptors, both.descriptors, atol=1e-6)


def missing_on_a_rank(world, folder, output):
    extracting.FEWEST = 4
    stored = extract_missing(folder / "all", folder / "old", output, world)
    return np.array(stored.descriptors), stored.networks.of_row


@pytest.mark.slow
def test_two_ranks_write_what_one_does(folder, tmp_path):
    both = read_descriptors(folder / "both")
    for descriptors, of_row in on_ranks(2, missing_on_a_rank, folder, tmp_path / "out"):
        np.testing.assert_allclose(descriptors, both.descriptors, atol=1e-6)
        assert of_row.tolist() == both.networks.of_row.tolist()


def test_a_network_of_the_folder_describes_queries_as_it_has_described_images(
    folder,
):
    makers = read_descriptors(folder / "both").makers
    for maker in (OLD, NEW):
        assert maker_of(makers, maker.retrieval_network) == maker.described_by
        again = describer_like(
            maker_of(makers, maker.retrieval_network),
            maker.retrieval_network,
        )
        assert again.described_by == maker.described_by
    other = describer("crop 32", seed=4)
    with raises(
        "descriptors.other_network",
        *(m.network[:12] for m in (*makers, other.described_by)),
    ):
        maker_of(makers, other.retrieval_network)


def test_what_takes_one_network_alone_refuses_the_folder(
    folder,
):
    with raises(
        "descriptors.several_networks",
        OLD.described_by.network[:12],
    ):
        learned_whitening(read_descriptors(folder / "both"))
    pack(folder / "all", folder / "shards")
    with raises(
        "descriptors.several_networks",
        NEW.described_by.network[:12],
    ):
        open_set(f"described:{folder / 'both'}")
    with raises(
        "descriptors.several_networks",
        NEW.described_by.network[:12],
    ):
        open_set(str(folder / "shards"), gallery_rows=[folder / "both"])


def test_distractors_may_be_of_any_network_of_the_folder(
    folder,
):
    for maker in (OLD, NEW):
        assert (
            len(
                open_parts(
                    [folder / "both"],
                    16,
                    described_by=maker.described_by,
                )
            )
            == 31
        )
    other = describer("crop 32", seed=4).described_by
    with raises("descriptors.other_network", folder / "both"):
        open_parts([folder / "both"], 16, described_by=other)


def test_a_damaged_file_of_networks_is_named(folder, tmp_path):
    shutil.copytree(folder / "both", tmp_path / "both")
    path = tmp_path / "both/networks.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with raises("descriptors.damaged", path):
        read_descriptors(tmp_path / "both")


@pytest.fixture(scope="module")
def searched(folder, tmp_path_factory, training_shards):
    """Two runs, shards of images described by the first and the second, and an index of them."""
    place = tmp_path_factory.mktemp("searched")
    for seed, name in enumerate(("old", "new", "other")):
        train(
            World(),
            place / name,
            training_shards,
            steps=1,
            seed=seed,
        )
    return place


def network_of_run(place, name):
    return ImageDescriber(
        trained_network(place / name, World())[1],
        Sizing("crop", 32),
    )


def test_the_commands_grow_a_folder_index_it_and_search_with_either_network(
    folder, searched, tmp_path, monkeypatch, capsys
):
    options = "evaluation.sizing=crop 32", "data.workers=0"
    extracted = tmp_path / "extracted"
    for arguments in (
        (
            folder / "some",
            tmp_path / "first",
            "--checkpoint",
            searched / "old",
        ),
        (
            folder / "all",
            extracted,
            "--checkpoint",
            searched / "new",
            "--only-missing",
            tmp_path / "first",
        ),
    ):
        assert distap(monkeypatch, "extract", *arguments, *options) == 0
    assert f"31 descriptors of 96 dimensions, 20 of them from {tmp_path / 'first'}" in (
        capsys.readouterr().out
    )
    assert (
        distap(
            monkeypatch,
            "index",
            extracted,
            tmp_path / "index",
        )
        == 0
    )
    capsys.readouterr()
    stored = read_descriptors(extracted)
    names = [maker.network[:12] for maker in stored.makers]
    image = folder / "all/turned.jpg"
    for name in ("old", "new"):
        command = (
            "search",
            tmp_path / "index",
            image,
            "--checkpoint",
            searched / name,
            "-k",
            31,
        )
        assert distap(monkeypatch, *command, "--json") == 0
        (result,) = json.loads(capsys.readouterr().out)
        query = describe_files(
            network_of_run(searched, name),
            [image.read_bytes()],
        ).numpy()[0]
        similarities = dict(
            zip(
                stored.keys.tolist(),
                stored.descriptors @ query,
                strict=True,
            )
        )
        assert len(result["hits"]) == 31
        for hit in result["hits"]:
            row = stored.keys.tolist().index(hit["key"])
            assert hit["similarity"] == pytest.approx(float(similarities[hit["key"]]), abs=1e-5)
            assert hit["network"] == names[int(row >= 20)]
        assert (
            distap(
                monkeypatch,
                *command,
                "--output",
                tmp_path / "page.html",
            )
            == 0
        )
        printed = capsys.readouterr().out
        assert "network" in printed and names[0] in printed and names[1] in printed
        assert names[1] in (tmp_path / "page.html").read_text()
    assert (
        distap(
            monkeypatch,
            *command[:3],
            "--checkpoint",
            searched / "other",
        )
        == 2
    )
    assert "descriptors.other_network" in capsys.readouterr().err


def test_an_index_of_one_network_names_none(folder, tmp_path):
    described = read_descriptors(folder / "old")
    write_index(
        tmp_path / "index",
        build_index(described, "flat"),
    )
    index = read_index(tmp_path / "index")
    assert index.networks is None
    assert {hit.network for hit in index.search(described.descriptors[:1], 5)[0]} == {""}


def write_shard(path, first):
    """A shard of another maker, whose names count from 0."""
    with tarfile.open(path, "w") as tar:
        for number in range(4):
            image = encoded(photo(40, 36, seed=first + number))
            for name, data in (("png", image), ("cls", str(number // 2).encode())):
                entry = tarfile.TarInfo(f"{number:04d}.{name}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


def test_shards_that_use_the_same_names_do_not_double_a_gallery(tmp_path):
    write_shard(tmp_path / "a.tar", 0)
    index_shards(tmp_path)
    extract(tmp_path, tmp_path / "old", maker=OLD)
    write_shard(tmp_path / "b.tar", 50)
    index_shards(tmp_path)
    with raises("descriptors.other_names", tmp_path / "old", "a.tar:0000"):
        extract_missing(str(tmp_path), tmp_path / "old", tmp_path / "out")
    extract(tmp_path, tmp_path / "grown", maker=OLD)
    rows = open_row_folder(tmp_path / "grown")
    with raises("descriptors.other_names", tmp_path / "grown", "0000"):
        rows.require(np.array(["0000"]), "a part of it")
    assert rows.require(rows.stored.keys, "all").tolist() == [*range(8)]
    with raises("descriptors.missing_rows", "c.tar:0000"):
        rows.require(np.array(["c.tar:0000"]), "another")


def test_images_that_have_rows_are_counted_and_compared_by_class(tmp_path, caplog):
    caplog.set_level("INFO", "distap")
    for name, labels in (("old", "ab"), ("grown", "abc"), ("other", "xb")):
        for label in labels:
            path = tmp_path / name / label / f"{ord(label) % 23}.png"
            path.parent.mkdir(parents=True)
            path.write_bytes(encoded(photo(40, 32, seed=1)))
        pack(tmp_path / name, tmp_path / f"{name}-shards")
    extract(tmp_path / "old-shards", tmp_path / "rows", maker=OLD)
    extract_missing(tmp_path / "grown-shards", tmp_path / "rows", tmp_path / "out")
    assert f"2 of 3 images of {tmp_path}/grown-shards have rows in {tmp_path}/rows" in caplog.text
    assert "1 are described" in caplog.text and not warnings_of(caplog)
    stored = read_descriptors(tmp_path / "rows")
    classes = np.array(["x", *stored.classes[1:]])
    write_descriptors(tmp_path / "other-rows", replace(stored, classes=classes))
    extract_missing(tmp_path / "old-shards", tmp_path / "other-rows", tmp_path / "none")
    nothing, other_class = warnings_of(caplog)
    assert "2 of 2" in nothing and "0 are described" in nothing
    assert f"such as {stored.keys[0]}: x there, and a here" in other_class


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def whitening_of(maker):
    values = describe_files(maker, [encoded(photo(40, 36, 100 + n)) for n in range(64)]).numpy()
    names = np.arange(64).astype(str)
    return learned_whitening(DescriptorSet(values, names, names, maker.described_by, "photos"))


def test_a_network_of_the_folder_has_to_describe_alike(folder, tmp_path, caplog):
    others = {"antialias": False, "whitening": whitening_of(OLD), "scales": (1.0, 0.5)}
    for name, value in others.items():
        other = describer("crop 32", seed=1, **{name: value})
        for earlier in ("old", "both"):
            with raises("descriptors.other_settings", folder / earlier, name):
                extract_missing(folder / "all", folder / earlier, tmp_path / "out", maker=other)
    assert not (tmp_path / "out").exists()
    extract_missing(
        folder / "all",
        folder / "both",
        tmp_path / "out",
        maker=describer("side 40", seed=2),
    )
    assert "`crop 32`" in caplog.text and "`side 40`" in caplog.text


def test_the_maker_is_chosen_by_its_whitening(folder):
    learned = whitening_of(OLD)
    whitened = describer("crop 32", seed=1, whitening=learned).described_by
    for makers in ((whitened, OLD.described_by), (OLD.described_by, whitened)):
        assert maker_of(makers, OLD.retrieval_network) == OLD.described_by
        assert maker_of(makers, OLD.retrieval_network, learned) == whitened


def test_a_finished_folder_is_not_that_of_an_extraction_without_earlier_rows(folder, tmp_path):
    """Even if no row was taken over, so that the same images were described."""
    shutil.copytree(folder / "all/0", tmp_path / "others/2")
    extract_missing(tmp_path / "others", folder / "old", tmp_path / "out")
    with raises("descriptors.folder_in_use", tmp_path / "out", "earlier"):
        extract(tmp_path / "others", tmp_path / "out", maker=NEW)


def test_a_url_of_rows_is_refused(folder, tmp_path):
    with raises("data.bad_source", "s3:/bucket/old"):
        extract_missing(folder / "all", Path("s3://bucket/old"), tmp_path / "out")
