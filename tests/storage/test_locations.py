import pytest
from raising import raises

from distap.data.shards.shard_names import shard_names
from distap.errors import DistapError
from distap.storage.files import Storage
from distap.storage.locations import parse_source


class NoFiles:
    def names(self, pattern):
        raise AssertionError("nothing is to be listed")


@pytest.mark.parametrize(
    ("text", "scheme", "base", "pattern"),
    [
        ("shards/train", "", "shards/train", None),
        ("shards/train-*.tar", "", "shards", "train-*.tar"),
        ("train-{000..009}.tar", "", ".", "train-{000..009}.tar"),
        ("/data/{a,b}/x?.tar", "", "/data", "{a,b}/x?.tar"),
        ("file:///data/my%20set/{0..3}.tar", "", "/data/my set", "{0..3}.tar"),
        ("file://localhost/data", "", "/data", None),
        ("http://host/train", "http", "http://host/train", None),
        ("HTTPS://host:8443/a/{000..009}.tar", "https", "https://host:8443/a", "{000..009}.tar"),
        ("https://host/a%20b/c%20{0..2}.tar", "https", "https://host/a%20b", "c {0..2}.tar"),
        ("s3://bucket", "s3", "s3://bucket", None),
        ("gs://bucket/{0..9}.tar", "gs", "gs://bucket", "{0..9}.tar"),
    ],
)
def test_a_source_is_taken_apart(text, scheme, base, pattern):
    source = parse_source(text)
    assert (source.scheme, source.base, source.pattern) == (scheme, base, pattern)
    assert str(source) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://host/a", "ftp:// is unknown; expected a folder, a glob"),
        ("", "expected a folder"),
        ("a\0b", "expected a folder"),
        ("file://shards/train", "three slashes"),
        ("http:///a", "a host has to stand after"),
        ("s3://{a,b}/x.tar", "a bucket has to stand after"),
        ("https://user:secret@host/a", r"https://\.\.\.@host: credentials in a URL"),
        ("https://host/*.tar", "a web server cannot list"),
        ("https://host/a.tar?token=1", "what a query says belongs into FSSPEC_HTTPS"),
    ],
)
def test_what_is_no_source_is_refused_with_what_is(text, message):
    with pytest.raises(DistapError, match=message) as error:
        parse_source(text)
    assert "secret" not in str(error.value)


def test_a_folder_may_have_the_signs_of_a_pattern_in_its_name(tmp_path):
    folder = tmp_path / "a[1]{b,c}"
    folder.mkdir()
    (folder / "0.tar").touch()
    for text in (folder, folder / "0.tar", folder / "*.tar", folder / "{0..0}.tar"):
        source = parse_source(text)
        assert source.base == str(folder)
        assert shard_names(source, Storage(source.base)) == ["0.tar"]


def test_patterns_of_one_folder_have_indexes_of_their_own():
    texts = ["s/train-*.tar", "s/train_*.tar", "s/{0..1}.tar", "s/{0..2}.tar", "s/0.tar"]
    names = [parse_source(text).index_name for text in texts]
    assert len(set(names)) == len(names)
    assert all("/" not in name and name.endswith(".index.npz") for name in names)


def test_braces_are_expanded_and_globs_are_listed(tmp_path):
    for name in ("a/2.tar", "a/1.tar", "b/1.tar", "b/1.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a" / "._1.tar").touch()
    for pattern in ("*.tar", "*"):
        source = parse_source(f"{tmp_path}/{{b,a}}/{pattern}")
        assert shard_names(source, Storage(source.base)) == ["b/1.tar", "a/1.tar", "a/2.tar"]
    assert shard_names(parse_source("https://h/{08..10}.tar"), NoFiles()) == [
        "08.tar",
        "09.tar",
        "10.tar",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s/{0..1}{.tar", "not a brace pattern: Unbalanced"),
        ("s/{0..2000}{0..2000}.tar", "more than 1,000,000 shards"),
        ("s/{0,1,0}.tar", "names the shard 0.tar twice"),
        ("s/{a,..}/x.tar", r"'\.\./x\.tar' is no name of a shard"),
        ("s/{a,}/x.tar", r"'/x\.tar' is no name of a shard"),
        ("s/../{0..1}/../x.tar", r"is no name of a shard"),
        ("s/" + "{" * 3000 + "a,b" + "}" * 3000 + ".tar", "not a brace pattern"),
        (
            "http://h/folder",
            "a web server cannot list its files; name the shards by a brace pattern",
        ),
    ],
)
def test_a_pattern_that_names_no_shards_is_told_why(text, message):
    with pytest.raises(DistapError, match=message):
        shard_names(parse_source(text), NoFiles())


def test_a_pattern_that_matches_nothing_is_an_empty_data_set(tmp_path):
    source = parse_source(f"{tmp_path}/*.tar")
    with raises("data.empty"):
        shard_names(source, Storage(source.base))
