import pytest

from distap.pages.charts import Chart, thinned
from distap.pages.page import TEMPLATES


def test_thinning_keeps_the_mean():
    points = [(float(n), float(n % 7)) for n in range(10_000)]
    small_set = thinned(points, 100)
    assert len(small_set) == 100
    assert sum(y for _, y in small_set) / 100 == pytest.approx(
        sum(y for _, y in points) / 10_000, rel=1e-3
    )


@pytest.mark.parametrize(
    "values, in_percent, texts",
    [
        ([0.0, 0.5], True, ["0%", "20%", "40%"]),
        ([0.9666, 0.9669], True, ["96.66%", "96.67%", "96.68%", "96.69%"]),
        ([2e4, 3e4], False, ["2e+04", "2.5e+04", "3e+04"]),
        ([3.00001, 3.00002], False, ["3.00001", "3.000015", "3.00002"]),
    ],
)
def test_marks_have_as_many_digits_as_tell_them_apart(values, in_percent, texts):
    assert [text for _, text in Chart(list(enumerate(values)), "a", in_percent).y_ticks()] == texts


def test_zeros_and_no_finite_points_are_told_without_an_axis():
    for values, message in (
        ([0.0, 0.0], "0 throughout"),
        ([None, float("nan")], "nothing to draw yet"),
    ):
        drawn = TEMPLATES.get_template("macros.html").module.chart(
            "title", Chart(list(enumerate(values)), "a")
        )
        assert message in drawn and "<svg" not in drawn
