"""Presets against the numbers that published code gives."""

import pytest
import torch
from problems import rank_raw


def batch():
    """24 rows of 6 values in four classes, by a formula, so that any code can be given the same."""
    image = torch.arange(24, dtype=torch.float64)[:, None]
    column = torch.arange(6, dtype=torch.float64)
    labels = torch.arange(24) % 4
    column_values = torch.sin(0.9 * image * (column + 1) + 0.3 * column)
    return column_values + 0.6 * torch.cos(
        1.7 * (labels[:, None].double() + 1) * (column + 1)
    ), labels


# Loss, norm of the gradient through the normalisation, and one of its entries, in float64, as
# computed with: APLoss and TAPLoss of naver/deep-image-retrieval; SoftBinAP, SmoothAP and SupAP of
# elias-ramzi/ROADMAP, and its CalibrationLoss, which is ContrastiveLoss of pytorch-metric-learning
# 2.9; FastAPLoss of the same package; BlackBoxAP of elias-ramzi/ROADMAP with a margin of 0, its
# query left out. SupAP is that of an early version (5010e15) and, by a plain loop that gives the
# same numbers for that one, that of the code since November 2022.
FIRST = {"offset": 1.44, "delta": 0.05}
INATURALIST = {"offset": -4.0, "delta": 0.05, "start": 0.0}
PUBLISHED = [
    ("ap_q", {"preset": "dirtorch"}, 0.488326333978107, 0.110745418845569, 0.001329277990720266),
    ("softbin", {}, 0.4718734517883284, 0.06545364685990444, -0.005001689234061291),
    ("ap_t", {"preset": "dirtorch"}, 0.52384860341495, 0.102499891881611, -0.002274777232745558),
    ("ap_t", {"bins": 20}, 0.465338481205455, 0.0475957036675549, -0.0037474466775041),
    ("fast_ap", {}, 0.638545336558457, 0.0761661936216514, -0.0026961524898038167),
    ("smooth_ap", {}, 0.46254378698813, 0.0548655387789542, -0.008575374084138165),
    ("sup_ap", FIRST, 0.814655481209846, 0.0088315582668894, -0.00025517891408476106),
    (
        "sup_ap",
        {"preset": "released"},
        0.8122175418110643,
        0.011500508039811053,
        -0.00032386124882325334,
    ),
    ("sup_ap", INATURALIST, 0.8119429288024629, 0.011820696277970515, -0.0003308863837862846),
    (
        "calibration",
        {"preset": "released"},
        0.912051021783413,
        0.228924735957698,
        -0.004053202905437104,
    ),
    (
        "roadmap",
        {"preset": "released"} | FIRST,
        1.726706502993258,
        0.236720359413504,
        -0.0043083818195218654,
    ),
    (
        "roadmap",
        {"preset": "released"},
        1.7242685635944772,
        0.2389958015253624,
        -0.004377064154260357,
    ),
]


@pytest.mark.parametrize(("name", "options", "loss", "norm", "entry"), PUBLISHED)
def test_a_preset_gives_the_numbers_of_the_published_code(name, options, loss, norm, entry):
    ranking, gradient = rank_raw(*batch(), name, **options)
    assert ranking.loss.item() == pytest.approx(loss, rel=1e-13)
    assert gradient.norm().item() == pytest.approx(norm, rel=1e-13)
    assert gradient[3, 2].item() == pytest.approx(entry, rel=1e-12)


def test_blackbox_ap_gives_those_of_the_published_code_but_for_its_epsilon():
    # The code adds 1e-5 to the number of positives before it divides.
    ranking, gradient = rank_raw(*batch(), "blackbox_ap", margin=0.0)
    assert 1 - ranking.loss.item() == pytest.approx(
        (1 - 0.633220205443964) * (5 + 1e-5) / 5, rel=1e-12
    )
    assert gradient.norm().item() == pytest.approx(0.0664336148444143, rel=1e-7)
