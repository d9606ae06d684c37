import numpy as np
import pytest
import torch
from extractions import describe_files, describer, network
from postprocessing_reference import whitened_reference
from torch.nn.functional import normalize

from distap.data.sizing import Sizing
from distap.errors import DistapError
from distap.evaluation.extraction.image_describer import ImageDescriber, describer_like
from distap.retrieval.descriptor_files import DescriptorSet
from distap.retrieval.whitening import learned_whitening


def test_another_network_or_whitening_is_refused(photos):
    maker = describer("crop 32")
    generator = np.random.default_rng(0)
    values = normalize(torch.from_numpy(generator.normal(size=(40, 16)))).numpy()
    texts = np.array([str(row) for row in range(40)])
    whitening = learned_whitening(
        DescriptorSet(values, texts, texts, maker.described_by, "here"), dimensions=8
    )
    with pytest.raises(DistapError, match="name the checkpoint and the whitening"):
        describer_like(maker.described_by, network(seed=1))
    with pytest.raises(DistapError, match="learn it anew"):
        ImageDescriber(network(seed=1), maker.sizing, whitening=whitening)
    whitened = ImageDescriber(network(), maker.sizing, whitening=whitening)
    assert whitened.dimensions == 8
    image = [(photos / "0" / "00.png").read_bytes()]
    expected = whitened_reference(whitening, describe_files(maker, image).numpy())
    np.testing.assert_allclose(describe_files(whitened, image), expected, atol=1e-6, rtol=0)
    assert (
        describer_like(whitened.described_by, network(), whitening).described_by
        == whitened.described_by
    )
    with pytest.raises(DistapError, match=r"with the whitening .*, but this one is none"):
        describer_like(whitened.described_by, network())


def test_a_network_in_training_is_described_as_in_evaluation_and_goes_on_training(photos):
    inner = network().train()
    inner.backbone.bn1.train()
    image = [(photos / "0" / "00.png").read_bytes()]
    descriptors = describe_files(ImageDescriber(inner, Sizing("crop", 32)), image)
    assert inner.training and inner.backbone.training
    assert torch.equal(descriptors, describe_files(describer("crop 32"), image))


def test_a_backbone_of_one_size_takes_crops_of_it_alone():
    inner = network(backbone="swin_tiny_patch4_window7_224")
    for sizing, scales in [
        ("original", (1.0,)),
        ("side 224", (1.0,)),
        ("crop 224", (1.0, 0.5)),
        ("crop 96", (1.0,)),
    ]:
        with pytest.raises(DistapError, match=r"224 x 224 pixels only.*use `crop 224`"):
            ImageDescriber(inner, Sizing.parse(sizing), scales)
    assert ImageDescriber(inner, Sizing("crop", 224)).dimensions == 16
