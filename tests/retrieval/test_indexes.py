from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import faiss
import numpy as np
import pytest
from postprocessing_reference import clustered, described, write_descriptors
from typer.testing import CliRunner

from distap.cli import app
from distap.errors import DistapError
from distap.retrieval.indexing import KINDS, build_index, measure_recall
from distap.retrieval.row_blocks import nearest
from distap.retrieval.searching import FlatRows
from distap.retrieval.stored_index import read_index, write_index
from distap.retrieval.whitening import learned_whitening, load_whitening

# Named kinds and factory strings with search parameters; `quick` keeps packed codes, which cannot
# be reconstructed.
SMALL = {
    "flat": ("flat", ""),
    "hnsw": ("hnsw", ""),
    "codes": ("IVF8,PQ8x4np", "nprobe=8"),
    "refined": ("IVF8,PQ8x4np,Refine(SQfp16)", "nprobe=8,k_factor_rf=8"),
    "turned": ("OPQ8,IVF8,PQ8x4np", "nprobe=8"),
    "quick": ("IVF8,PQ8x4fs", "nprobe=8"),
}


@pytest.fixture(scope="module")
def gallery():
    return clustered(700, 16, 40)


@pytest.fixture(scope="module")
def built(gallery):
    return {name: build_index(gallery, *kind) for name, kind in SMALL.items()}


@pytest.fixture
def written(tmp_path, gallery, built):
    write_index(tmp_path / "index", built["flat"])
    return tmp_path / "index"


@pytest.mark.parametrize("name", SMALL)
def test_an_index_is_the_same_after_it_was_written(tmp_path, gallery, built, name):
    write_index(tmp_path, built[name])
    index = read_index(tmp_path)
    similarities, rows = built[name].index.search(gallery.descriptors[:20], 5)
    neighbours = index.search(gallery.descriptors[:20], 5)
    assert [[hit.row for hit in hits] for hits in neighbours] == rows.tolist()
    assert [[hit.similarity for hit in hits] for hits in neighbours] == similarities.tolist()
    for key, class_name, _, row, network, _ in neighbours[3]:
        assert (key, class_name, network) == (gallery.keys[row], gallery.classes[row], "")
    assert (index.described_by, index.data, len(index)) == (gallery.described_by, gallery.data, 700)
    kind, search = SMALL[name]
    assert index.about["index"]["kind"] == kind
    assert kind in KINDS or (index.about["index"]["factory"], index.about["index"]["search"]) == (
        kind,
        search,
    )
    np.testing.assert_array_equal(index.descriptor_of("image-17"), gallery.descriptors[17])
    with pytest.raises(DistapError, match="no image with the key 'image-700'"):
        index.row_of("image-700")


def test_a_flat_index_is_exact_also_for_a_map_in_half_precision_in_blocks(
    tmp_path, monkeypatch, gallery
):
    monkeypatch.setattr("distap.retrieval.indexing.ADDED_NUMBERS", 16 * 90)
    np.save(tmp_path / "half.npy", gallery.descriptors.astype(np.float16))
    mapped = np.load(tmp_path / "half.npy", mmap_mode="r")
    shown = []

    def track(blocks, description, total):
        shown.append((description, total, 0))
        for number, block in enumerate(blocks):
            shown[-1] = (description, total, number + 1)
            yield block

    index = build_index(described(mapped), "flat", track=track).index
    assert shown == [("indexing (flat)", 8, 8)]
    np.testing.assert_array_equal(
        index.search(gallery.descriptors[:9], 7)[1], nearest(gallery.descriptors[:9], mapped, 7)[1]
    )


def test_recall_is_the_share_of_the_exact_neighbours(gallery, built):
    values = gallery.descriptors
    exact = nearest(values, values, 10, exclude_self=True)[1]
    recalls = {}
    for name, index in built.items():
        _, rows = index.index.search(values, 11)
        approximate = [
            [row for row in near if row != query][:10] for query, near in enumerate(rows.tolist())
        ]
        shares = [
            len({*near} & {*right}) / 10
            for near, right in zip(approximate, exact.tolist(), strict=True)
        ]
        figures = measure_recall(index.index, values)
        assert figures["recall"] == pytest.approx(np.mean(shares), abs=1e-3), name
        assert (figures["at"], figures["queries"]) == (10, 700)
        recalls[name] = figures["recall"]
    assert recalls["flat"] == 1
    assert recalls["hnsw"] > 0.98
    assert recalls["refined"] > recalls["codes"] + 0.1


def test_any_of_exact_duplicates_is_found(gallery):
    values = np.repeat(gallery.descriptors[:20], 30, axis=0)
    assert measure_recall(build_index(described(values), "flat").index, values)["recall"] == 1


def test_search_parameters_override_those_of_a_kind(gallery):
    built = build_index(gallery, "hnsw", "efSearch=17")
    assert (built.index.hnsw.efSearch, built.index.hnsw.efConstruction) == (17, 100)


@pytest.mark.parametrize(
    ("factory", "search", "message"),
    [
        (
            "IVF8,PX8",
            "",
            (
                "cannot build an index 'IVF8,PX8' over 700 descriptors of 16 dimensions: could not"
                " parse"
            ),
        ),
        (
            "IVF701,Flat",
            "",
            r"training points \(700\) should be at least as large as number of clusters \(701\)",
        ),
        ("HNSW32,PQ8x4", "", "'HNSW32,PQ8x4' cannot search by inner product"),
        ("IVF8,Flat", "nprobe=0", "search parameters 'nprobe=0' .*nprobe > 0"),
    ],
)
def test_an_index_that_faiss_cannot_build_says_why(gallery, factory, search, message):
    with pytest.raises(DistapError, match=message) as refusal:
        build_index(gallery, factory, search)
    assert ".cpp" not in str(refusal.value)


def test_nothing_and_what_is_not_finite_are_not_indexed(gallery):
    with pytest.raises(DistapError, match="nothing to index"):
        build_index(described(gallery.descriptors[:0]), "flat")
    broken = gallery.descriptors.copy()
    broken[3, 4] = np.inf
    with pytest.raises(DistapError, match="descriptor 3 is not finite"):
        build_index(described(broken), "flat")


@pytest.mark.parametrize("name", ["index.faiss", "keys.npy", "classes.npy"])
def test_a_file_that_is_cut_or_damaged_is_refused_before_faiss_sees_it(
    monkeypatch, tmp_path, built, name
):
    written = tmp_path / "index"
    write_index(written, built["hnsw"])
    monkeypatch.setattr(
        faiss, "read_index", lambda *_: pytest.fail("Faiss was given a damaged file")
    )
    path = written / "generations" / "000001" / name
    whole = path.read_bytes()
    places = (len(whole) // 2, len(whole) - 1)
    message = f"bytes, not the {len(whole)} in about.json"
    wrong = {whole[:n]: f".*: {n} {message}" for n in (0, 1, *places)}
    wrong |= {
        whole[:n] + bytes([whole[n] ^ 4]) + whole[n + 1 :]: "damaged or another file"
        for n in (0, 9, *places)
    }
    for content, problem in wrong.items():
        path.write_bytes(content)
        with pytest.raises(DistapError, match=f"{name}: {problem}"):
            read_index(written)
    path.unlink()
    with pytest.raises(DistapError, match=f"{name}: No such file"):
        read_index(written)


def test_an_index_made_by_strangers_is_refused_where_its_answers_would_be_wrong(
    tmp_path, gallery, built
):
    by_distance = faiss.IndexFlatL2(16)
    numbered = faiss.IndexIDMap(faiss.IndexFlatIP(16))
    by_distance.add(gallery.descriptors)
    numbered.add_with_ids(gallery.descriptors, np.arange(700) * 10)
    odd = replace(gallery, keys=np.char.add("\ud800", gallery.keys))
    for index, images, message in (
        (by_distance, gallery, "ranks by distances"),
        (numbered, gallery, "names an image .* of 700; index it again"),
        (built["flat"].index, odd, "surrogates not allowed"),
    ):
        with pytest.raises(DistapError, match=message):
            write_index(
                tmp_path / message[:5], replace(built["flat"], index=index, images=images)
            ).search(gallery.descriptors[690:], 5)


def test_queries_of_other_dimensions_are_refused_and_more_results_than_images_are_all_of_them(
    gallery, written
):
    index = read_index(written)
    with pytest.raises(DistapError, match="of 16 dimensions, the query of 9"):
        index.search(np.eye(9, dtype=np.float32)[:2], 3)
    with pytest.raises(DistapError, match="query 1 is not finite"):
        index.search(np.array([[0.25] * 16, [np.nan] * 16], np.float32), 3)
    assert [len(hits) for hits in index.search(gallery.descriptors[:2], 10_000)] == [700, 700]
    assert index.search(gallery.descriptors[:2], 0) == [[], []]
    assert index.search(gallery.descriptors[:0], 3) == []


def test_lists_that_a_search_does_not_read_shorten_its_result(tmp_path, gallery):
    built = build_index(gallery, "IVF64,PQ8x4np", "nprobe=1")
    write_index(tmp_path, built)
    hits = read_index(tmp_path).search(gallery.descriptors[:1], 700)[0]
    assert 0 < len(hits) < 700 and min(hit.row for hit in hits) >= 0


def test_threads_that_search_at_once_find_what_one_finds(gallery, written):
    index = read_index(written)
    queries = gallery.descriptors[:200]
    with ThreadPoolExecutor(16) as pool:
        neighbours = list(
            pool.map(lambda row: index.search(queries[row : row + 1], 5)[0], range(200))
        )
    rows = [[hit.row for hit in hits] for hits in neighbours]
    assert rows == [[hit.row for hit in hits] for hits in index.search(queries, 5)]


def test_an_index_does_not_take_the_folder_of_anything_else(tmp_path, gallery, built):
    write_descriptors(tmp_path / "descriptors", gallery)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    write_index(tmp_path / "index", built["flat"])
    for name, lost in (
        ("descriptors", "descriptors.npy"),
        ("mine", "notes.txt"),
        ("index", "current, generations, lock"),
    ):
        before = sorted((tmp_path / name).iterdir())
        with pytest.raises(DistapError, match=f"{lost} would be lost"):
            write_index(tmp_path / name, built["flat"])
        assert sorted((tmp_path / name).iterdir()) == before


def test_an_index_that_could_not_be_written_is_none(small_disk, gallery, built):
    disk = small_disk("32k")
    with pytest.raises(DistapError, match="cannot be written"):
        write_index(disk / "index", built["flat"])
    with pytest.raises(DistapError, match="no such file"):
        read_index(disk / "index")
    assert not list((disk / "index" / "generations").iterdir())


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=True)


def test_the_commands_build_indexes_and_learn_whitenings(tmp_path, gallery):
    write_descriptors(tmp_path / "d", gallery)
    result = run("index", tmp_path / "d", tmp_path / "i", "--kind", "hnsw")
    assert result.exit_code == 0, result.exception
    for text in ("recall@10 ", "700 images of 16 dimensions, hnsw: HNSW32 efC"):
        assert text in result.output
    index = read_index(tmp_path / "i")
    assert index.about["index"] == {
        "kind": "hnsw",
        "factory": "HNSW32",
        "search": "efConstruction=100,efSearch=64",
    }
    assert index.about["measured"]["recall"] > 0.98
    result = run(
        "index", tmp_path / "d", tmp_path / "f", "--kind", "IVF16,PQ8x4np", "--search", "nprobe=4"
    )
    assert result.exit_code == 0, result.exception
    assert read_index(tmp_path / "f").about["index"]["factory"] == "IVF16,PQ8x4np"
    assert run("whiten", tmp_path / "d").exit_code == 0
    whitening = load_whitening(tmp_path / "d" / "whitening.safetensors")
    assert whitening.fingerprint == learned_whitening(gallery).fingerprint
    assert run("whiten", tmp_path / "d", "--kind", "lw").exit_code == 0
    whitening = load_whitening(tmp_path / "d" / "whitening.safetensors")
    assert whitening.fingerprint == learned_whitening(gallery, "lw").fingerprint


def test_mapped_rows_are_searched_after_another_package_has_changed_faiss(tmp_path, monkeypatch):
    """faiss.contrib.torch_utils, which others import, takes plain arrays and tensors alone."""
    rows = np.eye(4, dtype=np.float32)
    np.save(tmp_path / "rows.npy", rows)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    knn = faiss.knn

    def strict(queries, values, *arguments):
        assert type(queries) is type(values) is np.ndarray
        return knn(queries, values, *arguments)

    monkeypatch.setattr(faiss, "knn", strict)
    assert FlatRows(mapped).search(rows[:1], 1)[1].tolist() == [[0]]
