"""Ranks share an evaluation: the same bits on any number of them, and no folder that all of them see."""

from types import SimpleNamespace

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
from distap.retrieval import metrics, ranks
from distap.retrieval.descriptor_files import read_descriptors
from distap.retrieval.ground_truth_metrics import GradedQuery, LandmarkQuery, evaluate_graded, evaluate_landmarks
from distap.world import World

IMAGES, CLASSES, QUERIES = 600, 40, 5


def evaluations(world):
    """All protocols, on the same random descriptors."""
    metrics.MOST_QUERIES, ranks.CONVERTED_NUMBERS = 16, 64 * 32  # more blocks than ranks
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, CLASSES, (IMAGES,), generator=generator)
    centres, noise = (torch.randn(count, 64, generator=generator) for count in (CLASSES, IMAGES))
    gallery = normalize(centres[labels] + noise)
    queries, of_queries = gallery[:QUERIES], labels[:QUERIES].tolist()
    rows = [(labels == label).nonzero().flatten().tolist() for label in of_queries]
    graded = [GradedQuery(tuple(own[2:6]), tuple(own[6:9]), tuple(own[9:])) for own in rows]
    landmarks = [LandmarkQuery(tuple(own), "Public") for own in rows]
    head = torch.stack([torch.randperm(IMAGES, generator=generator)[:20] for _ in range(QUERIES)])
    results = [
        metrics.evaluate_labelled_set(gallery, labels, world=world),
        metrics.evaluate_queries(gallery[:200], gallery[200:], labels[:200], labels[200:], world=world),
        evaluate_graded(queries, gallery, graded, world=world),
        evaluate_graded(queries, gallery.numpy().astype(np.float16), graded, head=head, world=world),
        evaluate_landmarks(queries, gallery, landmarks, world=world),
        SimpleNamespace(
            gap=metrics.decomposability_gap(gallery, labels, 70, None, world),
            known=metrics.decomposability_gap(gallery, labels, 250, 0.5, world),
        ),
    ]
    return [vars(result) for result in results]


@pytest.mark.slow
def test_figures_are_the_same_bits_on_any_number_of_ranks(monkeypatch):
    monkeypatch.setattr(metrics, "MOST_QUERIES", metrics.MOST_QUERIES)
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
        assert found == pytest.approx(expected, abs=0, rel=0, nan_ok=True)


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
