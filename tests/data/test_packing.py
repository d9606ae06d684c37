import tarfile
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import webdataset
from commands import distap
from images import write_images
from PIL import Image
from raising import raises

from benchmarks.photos import pack
from distap.data.loading.checking import check
from distap.data.loading.reader import ImageSet
from distap.data.shards.image_files import ImageFile, list_images
from distap.data.shards.index import load_index
from distap.data.shards.indexing import index_shards
from distap.data.shards.tar import read_groups
from distap.errors import DistapError


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def keys_and_files(folder):
    """What plain tarfile finds in the shards: (key, class number, image bytes)."""
    results = []
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}
        for name, data in files.items():
            if not name.endswith(".cls"):
                key = name.partition(".")[0]
                results.append((key, int(files[f"{key}.cls"]), data))
    return results


def test_packing_keeps_every_image_and_its_class(shards, image_folder):
    index = load_index(shards)
    reader = ImageSet(shards, index)
    assert index.class_name.tolist() == ["apple", "bear", "car"]
    assert np.bincount(index.label).tolist() == [4, 3, 2]
    files = sorted(image_folder.rglob("*.png"))
    assert [reader.data(sample) for sample in range(len(index))] == [
        file.read_bytes() for file in files
    ]
    assert set(zip(index.width.tolist(), index.height.tolist(), strict=True)) == {(24, 24)}


# webdataset leaves the files that it reads to the garbage collector.
def test_our_shards_are_those_of_webdataset_byte_for_byte(tmp_path, shards):
    for path in sorted(shards.glob("*.tar")):
        with (
            path.open("rb") as ours,
            webdataset.TarWriter(str(tmp_path / "their.tar"), mtime=0, encoder=False) as theirs,
        ):
            for key, members in read_groups(ours, path.stat().st_size, path.name):
                theirs.write(
                    {"__key__": key, **{field: member.data for field, member in members.items()}}
                )
        assert (tmp_path / "their.tar").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("order", ["classes", "listed", "random"])
def test_the_number_of_workers_changes_no_byte(tmp_path, image_folder, order):
    (image_folder / "bear" / "1.png").write_bytes(b"no image")
    layout = {"images_per_shard": 2, "order": order}
    _, skipped = pack(image_folder, tmp_path / "one", **layout)
    for workers in (2, 3):
        output = tmp_path / f"{workers}"
        assert pack(image_folder, output, workers=workers, **layout)[1] == skipped
        assert contents(output) == contents(tmp_path / "one")


@pytest.fixture
def run(monkeypatch):
    """`distap data pack`: its exit status."""
    return lambda *arguments: distap(monkeypatch, "data", "pack", "--workers", 1, *arguments)


@pytest.fixture
def mixed_list(tmp_path):
    """A list of 40 images of seven classes, one of them of 13 images, none next to its like."""
    sizes = {"a": 13, "b": 4, "c": 5, "d": 1, "e": 6, "f": 3, "g": 8}
    folder = write_images(tmp_path / "images", sizes)
    paths = sorted(folder.rglob("*.png"), key=lambda path: (path.stem, path.parent.name))
    rows = [f"{path.relative_to(folder)},{path.parent.name}" for path in paths]
    (folder / "list.csv").write_text("\n".join([HEADING.strip(), *rows]))
    return folder / "list.csv"


def test_the_images_of_a_class_lie_together_in_listed_order(tmp_path, mixed_list, run):
    assert run(mixed_list, tmp_path / "out", "--images-per-shard", 8) == 0
    index = load_index(tmp_path / "out")
    names = index.class_name[index.label].tolist()
    runs = [name for name, _ in groupby(names)]
    assert sorted(runs) == ["a", "b", "c", "d", "e", "f", "g"]
    assert runs != sorted(runs)
    listed = [line.partition(",")[0] for line in mixed_list.read_text().splitlines()[1:]]
    for name in runs:
        of_class = [path for path in listed if path.startswith(f"{name}/")]
        assert [path for path in index.path.tolist() if path.startswith(f"{name}/")] == of_class


def test_a_class_that_fits_lies_in_one_shard_and_a_larger_class_in_shards_of_its_own(
    tmp_path, mixed_list, run
):
    assert run(mixed_list, tmp_path / "out", "--images-per-shard", 8) == 0
    index = load_index(tmp_path / "out")
    names = index.class_name[index.label]
    shards_of = {name: set(index.shard[names == name].tolist()) for name in set(names.tolist())}
    assert {
        name: len(shards) for name, shards in shards_of.items() if name != "a"
    } == dict.fromkeys("bcdefg", 1)
    assert len(shards_of["a"]) == 2
    assert not shards_of.pop("a") & set.union(*shards_of.values())
    sizes = np.bincount(index.shard)
    assert sizes.max() <= 8
    # No other shard ends before it must: the next class would not have fitted.
    firsts = np.searchsorted(index.shard, np.arange(1, len(sizes))).tolist()
    following = [int((names == names[first]).sum()) for first in firsts]
    ends_early = [
        size + more <= 8 and names[first - 1] != "a"
        for size, more, first in zip(sizes[:-1], following, firsts, strict=True)
    ]
    assert not any(ends_early)


def test_images_are_packed_as_listed_or_at_random_if_asked_for(tmp_path, mixed_list, run):
    listed = [line.partition(",")[0] for line in mixed_list.read_text().splitlines()[1:]]
    paths = {}
    for order in ("listed", "random"):
        output = tmp_path / order
        assert run(mixed_list, output, "--order", order, "--images-per-shard", 9) == 0
        index = load_index(output)
        paths[order] = index.path.tolist()
        assert np.bincount(index.shard).tolist() == [9, 9, 9, 9, 4]
    assert paths["listed"] == listed
    assert paths["random"] != listed and sorted(paths["random"]) == sorted(listed)


LEVELS = {"apple": ("fruit", "food"), "bear": ("", "animal")}


def test_levels_of_classes_are_kept(tmp_path, image_folder):
    images = [
        ImageFile(path, path.parent.name, LEVELS.get(path.parent.name, ()))
        for path in sorted(image_folder.rglob("*.png"))
    ]
    index, _ = pack(images, tmp_path / "out")
    assert (
        tmp_path / "out" / "classes.txt"
    ).read_text() == "apple\tfruit\tfood\nbear\t\tanimal\ncar\n"
    assert index.class_levels.tolist() == [["fruit", "food"], ["", "animal"], ["", ""]]
    again = load_index(tmp_path / "out")
    assert (
        again.class_levels.tolist() == index.class_levels.tolist()
        and again.fingerprint == index.fingerprint
    )
    # without a name, alone
    assert again.classes.numbers.tolist() == [[0, 2, 2], [1, 0, 1], [2, 1, 0]]


@pytest.mark.parametrize(
    ("other", "crossing", "before"),
    [
        (
            ("apple", ("tool", "food")),
            "class 'apple' of level 0 is in 'tool' of level 1, but",
            "0.png has it in 'fruit'",
        ),
        (
            ("pear", ("fruit", "tool")),
            "class 'fruit' of level 1 is in 'tool' of level 2, but",
            "0.png has it in 'food'",
        ),
        (
            ("pear", ("fruit",)),
            "class 'fruit' of level 1 is in '' of level 2, but",
            "0.png has it in 'food'",
        ),
    ],
)
def test_levels_that_cross_are_refused_by_name(tmp_path, image_folder, other, crossing, before):
    first, second = sorted((image_folder / "apple").iterdir())[:2]
    with raises("data.crossing_levels", crossing, "1.png", before):
        pack(
            [ImageFile(first, "apple", LEVELS["apple"]), ImageFile(second, *other)],
            tmp_path / "other",
        )
    pack(
        [ImageFile(first, "apple", LEVELS["apple"]), ImageFile(second, "pear", LEVELS["apple"])],
        tmp_path / "out",
    )
    (tmp_path / "out" / "classes.txt").write_text(
        "\n".join("\t".join(line) for line in (("apple", *LEVELS["apple"]), (other[0], *other[1])))
    )
    with pytest.raises(DistapError, match=r"classes\.txt, line 2: "):
        index_shards(tmp_path / "out")


@pytest.mark.parametrize("name", ["a\tb", "a\nb", "a\x85b", " a", "a\udcff", ""])
def test_a_name_that_is_no_line_of_text_is_refused(tmp_path, image_folder, name):
    with raises("data.wrong_class_name"):
        pack([ImageFile(image_folder / "apple" / "0.png", name)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("path,class\napple/0.png,an apple\ncar/0.png,1\n", [("an apple", ""), ("1", "")]),
        (
            '\ufeffpath, class, group\napple/0.png,"a, b",food\ncar/0.png,c,\n',
            [("a, b", "food"), ("c", "")],
        ),
        (
            "id;Class;group;filename\n1;a, b;food;apple/0.png\n2;c;;car/0.png\n",
            [("a, b", "food"), ("c", "")],
        ),
        (
            "label\tx_1\tpath\n07\t3\tapple/0.png\ncat 7\t4\tcar/0.png\n",
            [("07", ""), ("cat 7", "")],
        ),
        (
            "path,label,level2,level1\napple/0.png,pippin,food,apple\ncar/0.png,coupe,,car\n",
            [("pippin", "apple/food"), ("coupe", "car/")],
        ),
        ("Path,LABEL,sku\napple/0.png,1,x y\ncar/0.png,1,012\n", [("1", ""), ("1", "")]),
    ],
)
def test_a_csv_may_name_classes_and_groups(image_folder, text, expected):
    table = image_folder / "list.csv"
    table.write_text(text, encoding="utf-8")
    assert [
        (image.class_name, "/".join(image.levels)) for image in list_images(table).images
    ] == expected


HEADING = "path,label\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"{HEADING}apple/0.png,-2",
            r"line 2: label '-2' is no class; a class is a whole number of 0 or more, or a",
        ),
        (
            f"{HEADING}apple/0.png,N/A",
            r"left out: 1 images without a class: the label on line 2 is 'N/A' \(.*0\.png",
        ),
        (
            "path,label,split\napple/0.png,1,a\napple/1.png,1,",
            "1 images are of no split, such as 1.png; others are",
        ),
        (f"{HEADING}apple/0.png", r"line 2: 1 columns, expected 2: path,label"),
        (f"{HEADING}apple/0.png,1,food", r"line 2: 3 columns, expected 2: path,label"),
        (
            f"{HEADING}apple/99.png,1",
            r"none of the 1 images can be read; first: .*apple/99.png: listed.* not there;",
        ),
        (
            f"{HEADING}apple/0.png,1\napple/0.png,2",
            r"line 3: .*0\.png is on line 2 already, with other cells",
        ),
        (
            f"{HEADING}apple/0.png,N/A\napple/0.png,N/A",
            r"left out: .*1 lines that repeat another \(.*0\.png",
        ),
        (
            f"{HEADING}apple/\0.png,1",
            r"line 2: 'apple/\\x00.png' is no path, which is one line of text",
        ),
        (f'{HEADING}"apple/\nERROR forged",1', r"'apple/\\nERROR forged' is no path"),
        (f'{HEADING}"apple/0.png,1', r"line 2: not a table"),
        (f"{HEADING}apple/0.png,\udcff", r"line \d: not a table in UTF-8, as Excel"),
        (
            "image_id,class\n1,2\n",
            "no column path or filename; the columns found are image_id, class; expected path or",
        ),
        (
            "image,category\napple/0.png,1\n",
            "the columns found are image, category; expected path or filename",
        ),
        ("path,label,Label\napple/0.png,1,2\n", "2 columns are called label; expected one"),
        ("apple/0.png\n", "the columns found are apple/0.png; expected"),
        (
            "path,label,is_query\napple/0.png,1,1\n",
            "column is_query is not read: name the parts in the column split",
        ),
        ("path,label,split\napple/0.png,1,../x\n", r"line 2: split '../x' cannot name a folder"),
        (
            "path,label,split\napple/0.png,1,a\napple/1.png,1,b\n",
            r"several parts \(a, b\); pack each by itself",
        ),
    ],
)
def test_a_wrong_line_or_column_of_a_list_is_named(tmp_path, image_folder, text, message):
    table = image_folder / "list.csv"
    table.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(DistapError, match=message):
        pack(table, tmp_path / "out")


def test_an_option_that_is_for_another_source_is_refused(
    tmp_path, image_folder, monkeypatch, capfd
):
    (image_folder / "list.csv").write_text(f"{HEADING}apple/0.png,1\n")
    for arguments in (
        (image_folder, "--columns", "label=a"),
        (image_folder / "list.csv", "--nested", "top"),
    ):
        assert (
            distap(monkeypatch, "data", "pack", arguments[0], tmp_path / "out", *arguments[1:]) == 2
        )
        assert "--columns is for lists, --nested for folders" in capfd.readouterr().err


ROWS = [
    ("apple/0.png", "apple", "train"),
    ("apple/1.png", "apple", "train"),
    ("bear/0.png", "bear", "test-query"),
    ("bear/1.png", "bear", "test-gallery"),
    ("bear/2.png", "bear", "test-gallery"),
    ("car/9.png", "car", "test-gallery"),
]
NAMES = ["path", "label", "split"]


def test_a_list_is_packed_by_its_parts_and_missing_files_are_counted(
    tmp_path, image_folder, monkeypatch, capfd
):
    table = image_folder / "list.csv"
    table.write_text("\n".join(";".join(row) for row in (NAMES, *ROWS)) + "\n")
    assert distap(monkeypatch, "data", "pack", table, tmp_path / "out") == 0
    assert "1 listed images that are not there" in capfd.readouterr().err
    actual = {
        folder.name: load_index(folder).path.tolist()
        for folder in sorted((tmp_path / "out").iterdir())
    }
    assert actual == {
        "test-gallery": ["bear/1.png", "bear/2.png"],
        "test-query": ["bear/0.png"],
        "train": ["apple/0.png", "apple/1.png"],
    }
    assert distap(monkeypatch, "data", "pack", table, tmp_path / "other", "--split", 0.5) == 2
    assert "leave --split out" in capfd.readouterr().err


def test_a_list_s_own_names_of_columns_are_given(
    tmp_path, image_folder, monkeypatch, capfd, caplog
):
    table = image_folder / "shop.csv"
    table.write_text(
        "file,sku,path,part\napple/0.png,012,x,test-query\napple/1.png,12,y,test-gallery\n"
    )
    assert (
        distap(
            monkeypatch,
            "data",
            "pack",
            table,
            tmp_path / "out",
            "--columns",
            "path=file,label=sku,split=part",
        )
        == 0
    )
    assert (
        "labels that differ by zeros in front are different classes, such as 012 and 12"
        in caplog.text
    )
    assert load_index(tmp_path / "out" / "test-query").class_name.tolist() == ["012"]
    assert (
        distap(monkeypatch, "data", "pack", table, tmp_path / "other", "--columns", "label=brand")
        == 2
    )
    assert (
        "no column path or filename" not in (message := capfd.readouterr().err)
        and "no column brand" in message
    )
    assert (
        distap(monkeypatch, "data", "pack", table, tmp_path / "other", "--columns", "sku=label")
        == 2
    )
    assert "--columns sku: no such column; expected some of path, label" in capfd.readouterr().err


@pytest.mark.parametrize("word", ["nan", "-1", "-1.0", "None", "N/A", ""])
def test_images_without_a_class_are_left_out_and_a_number_is_one_class(image_folder, word):
    table = image_folder / "list.csv"
    paths = ["apple/0.png", "apple/1.png", "bear/0.png", "bear/1.png"]
    labels = ["1", "1.0", word, word]
    table.write_text("\n".join(["path,label", *map(",".join, zip(paths, labels, strict=True))]))
    listing = list_images(table)
    assert [image.class_name for image in listing.images] == ["1", "1"]
    assert [skipped.reason.partition(":")[0] for skipped in listing.left_out] == [
        "images without a class"
    ] * 2


def test_damaged_images_are_left_out_and_listed_with_the_reason(tmp_path, image_folder):
    (image_folder / "apple" / "0.png").write_bytes(b"no image")
    whole = (image_folder / "apple" / "1.png").read_bytes()
    (image_folder / "apple" / "1.png").write_bytes(whole[:-200])
    (image_folder / "apple" / "2.png").write_bytes(whole[:41] + b"\xff" * 20 + whole[61:])
    with Image.open(image_folder / "apple" / "3.png") as image:
        image.save(image_folder / "apple" / "3.jpg")
    photograph = (image_folder / "apple" / "3.jpg").read_bytes()
    # as with a film behind it
    (image_folder / "apple" / "4.jpg").write_bytes(photograph + bytes(1000))
    (image_folder / "apple" / "5.jpg").write_bytes(photograph[:-20])
    index, skipped = pack(image_folder, tmp_path / "headers")
    actual = [(s.name[-5:], s.reason.partition(":")[0]) for s in skipped]
    assert actual == [("0.png", "decode_error"), ("1.png", "truncated"), ("5.jpg", "truncated")]
    assert len(index) == 9
    assert [damage.name for damage in check(tmp_path / "headers")[1]] == ["000000.tar:apple/2.png"]


@pytest.mark.parametrize("workers", [1, 2])
def test_classes_and_shards_without_a_sound_image_leave_no_gap_in_the_index(
    tmp_path, image_folder, workers
):
    for path in ("aardvark/0.png", "apple/0.png", "apple/1.png"):
        (image_folder / path).parent.mkdir(exist_ok=True)
        (image_folder / path).write_bytes(b"no image")
    index, skipped = pack(image_folder, tmp_path / "out", images_per_shard=3, workers=workers)
    assert len(skipped) == 3
    assert index.class_name.tolist() == ["apple", "bear", "car"]
    assert index.label.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert load_index(tmp_path / "out").fingerprint == index.fingerprint
    assert (
        index_shards(f"{tmp_path}/out/{{000000..000003}}.tar")[0].label.tolist()
        == index.label.tolist()
    )
    assert [label for _, label, _ in keys_and_files(tmp_path / "out")] == [1, 1, 2, 2, 2, 3, 3]


def test_a_source_without_a_sound_image_is_an_error(tmp_path, image_folder):
    for path in image_folder.rglob("*.png"):
        path.write_bytes(b"no image")
    with raises("data.unreadable", "9", "apple/0.png", "decode_error"):
        pack(image_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_empty_source_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with raises("data.empty", "empty"):
        pack(tmp_path / "empty", tmp_path / "out")
    with raises("data.missing", "missing"):
        pack(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(DistapError, match="there are no images"):
        pack([], tmp_path / "out")


@pytest.mark.parametrize("output", [".", "..", "/"])
def test_a_folder_without_a_name_of_its_own_is_refused(image_folder, tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    with raises("storage.bad_folder"):
        pack(image_folder, Path(output))
    assert distap(monkeypatch, "data", "pack", image_folder, output, "--split", 0.5) == 2


def test_nothing_is_packed_over(image_folder, shards):
    before = contents(shards)
    with raises("storage.folder_taken"):
        pack(image_folder, shards)
    assert contents(shards) == before


def test_a_full_disk_is_named_and_nothing_is_left_there(tmp_path, small_disk):
    disk = small_disk("128k")
    images = write_images(tmp_path / "images", {"a": 6, "b": 6}, size=60)
    with raises("storage.cannot_write", "disk-0/out"):
        pack(images, disk / "out", images_per_shard=2, workers=2)
    assert list(disk.iterdir()) == []


def test_a_mount_point_is_refused_before_any_work(image_folder, small_disk):
    with raises("storage.bad_folder"):
        pack(image_folder, small_disk("128k"))
