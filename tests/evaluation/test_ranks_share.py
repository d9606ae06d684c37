"""Ranks share an evaluation: the same bits on any number of them, and no folder that all of them see."""

import numpy as np
import pytest
import torch
from extractions import describer, write_photos
from ranks import on_ranks
from torch import Tensor
from torch.nn.functional import normalize

from distap.data.images.image_sets import open_images
from distap.evaluation.describing import Describing
from distap.evaluation.extraction.parts import Extraction
from distap.evaluation.extraction.to_folder import extract_to_folder
from distap.retrieval import evaluate, ranks
from distap.retrieval.descriptor_files import read_descriptors
from distap.retrieval.figures import LANDMARKS, REVISITED, labelled_figures
from distap.retrieval.truth import ClassTruth, ListedTruth
from distap.world import World

IMAGES, CLASSES, QUERIES = 600, 40, 5


def evaluations(world):
    """All protocols, on the same random descriptors."""
    evaluate.MOST_QUERIES, ranks.CONVERTED_NUMBERS = 16, 64 * 32  # more blocks than ranks
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, CLASSES, (IMAGES,), generator=generator)
    centres, noise = (torch.randn(count, 64, generator=generator) for count in (CLASSES, IMAGES))
    gallery = normalize(centres[labels] + noise)
    queries, of_queries = gallery[:QUERIES], labels[:QUERIES].tolist()  # a single block, whose gallery ranks share
    rows = [(labels == label).nonzero().flatten().tolist() for label in of_queries]
    graded = ListedTruth(IMAGES, [own[2:9] for own in rows], [own[9:] for own in rows], [[0] * 4 + [1] * 3] * QUERIES)
    landmarks = ListedTruth(IMAGES, rows, parts=["Public"] * QUERIES)
    head = torch.stack([torch.randperm(IMAGES, generator=generator)[:20] for _ in range(QUERIES)])
    protocol, half = labelled_figures(), gallery.numpy().astype(np.float16)
    results = [
        evaluate.evaluate_descriptors(*arguments, world=world, head=first)
        for first, *arguments in (
            (None, gallery, gallery, ClassTruth(labels), protocol, 10),
            (None, gallery[:200], gallery[200:], ClassTruth(labels[:200], labels[200:]), protocol, 10),
            (None, gallery[:20], gallery, ClassTruth(labels[:20], labels), protocol),
            (None, queries, gallery, graded, REVISITED),
            (head, queries, half, graded, REVISITED),
            (None, queries, gallery, landmarks, LANDMARKS),
        )
    ]
    gap = evaluate.decomposability_gap(gallery, labels, 70, None, world)
    known = evaluate.decomposability_gap(gallery, labels, 250, 0.5, world)
    return [*map(vars, results), {"gap": gap, "known": known}]


@pytest.mark.slow
def test_figures_are_the_same_bits_on_any_number_of_ranks(monkeypatch):
    monkeypatch.setattr(evaluate, "MOST_QUERIES", evaluate.MOST_QUERIES)
    monkeypatch.setattr(ranks, "CONVERTED_NUMBERS", ranks.CONVERTED_NUMBERS)
    alone = evaluations(World())
    for size in (2, 3):
        for of_rank in on_ranks(size, evaluations):
            for own, expected in zip(of_rank, alone, strict=True):
                assert_same(own, expected)


def assert_same(found, expected):
    if isinstance(expected, Tensor):
        assert torch.equal(found.nan_to_num(-1), expected.nan_to_num(-1))
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    else:
        assert found == expected


def extract_without_a_shared_folder(world, photos, folder):
    """Each rank's folder is its own, as on hosts that share no file system; another run left a file on rank 1's."""
    own = folder / str(world.rank)
    images, entered, collective = open_images(photos), [], World.collective

    def counted(world, name, *more):
        entered.append(name)
        return collective(world, name, *more)

    World.collective = counted
    extract_to_folder(Extraction(describer(), images, world, workers=0), own / "extracted", part_images=4)
    describing = Describing(describer(), world, workers=0, kept_in=own / "kept")
    stale = own / "kept" / "photos" / "descriptors.npy"
    if world.rank == 1:
        stale.parent.mkdir(parents=True)
        np.save(stale, np.zeros((31, 8), np.float32))
    described = describing.descriptors(images, "photos")
    World.collective = collective
    return *described, entered


@pytest.mark.slow
def test_only_rank_0_needs_the_folder_of_descriptors(tmp_path):
    (tmp_path / "photos").mkdir()
    photos = write_photos(tmp_path / "photos")
    samples, expected, _ = extract_without_a_shared_folder(World(), photos, tmp_path / "alone")
    found = on_ranks(3, extract_without_a_shared_folder, photos, tmp_path / "several")
    for own, descriptors, entered in found:
        assert np.array_equal(own, samples)
        assert np.array_equal(descriptors, expected)
        assert entered == found[0][2] and "handing over of parts" in entered  # the watchdog compares their numbers
    found = read_descriptors(tmp_path / "several" / "0" / "extracted")
    assert np.array_equal(found.descriptors, read_descriptors(tmp_path / "alone" / "0" / "extracted").descriptors)
    assert not (tmp_path / "several" / "2").exists()
