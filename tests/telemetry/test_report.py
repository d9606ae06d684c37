from html.parser import HTMLParser

import pytest

from distap.telemetry.charts import Series, line_chart, stacked_bars, thinned, ticks
from distap.telemetry.report import Example, Hit, write_report

FIGURES = {"mAP": 0.25, "mAP@R": 0.19, "R@1": 0.43, "R@5": 0.65, "R@10": 0.73}
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Checks that tags close in order, and gathers what is of interest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.classes, self.references = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.classes.append(attributes.get("class"))
        self.references += [attributes[name] for name in ("src", "href") if name in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.classes.append(dict(attrs).get("class"))


def step(number, **changes):
    seconds = {"data_wait": 0.1, "describe": 2.0, "gather": 0.1, "rank": 0.2, "replay": 6.0, "reduce": 0.1}
    return {
        "step": number,
        "loss": 1 / number,
        "batch_mAP": 1 - 1 / number,
        "learning_rate": 1e-4,
        "images_per_second": 120.0,
        "gradient_norm": 0.5,
        "replay_drift": 0.0,
        "seconds": {**seconds, "optimizer": 0.02, "other": 0.03, "step": 8.55, "network": 7.9},
        **changes,
    }


def page(tmp_path, **changes):
    settings = {
        "title": "run",
        "steps": [step(n) for n in range(1, 25)],
        "validations": [{"step": 0, "validation": FIGURES}, {"step": 24, "validation": {"mAP": 0.5}}],
        "before": FIGURES,
        "after": {name: value + 0.1 for name, value in FIGURES.items()},
        "examples": [],
        "facts": {"network": "resnet"},
    }
    write_report(tmp_path / "report.html", **{**settings, **changes})
    return (tmp_path / "report.html").read_text()


def test_the_page_is_whole_and_needs_no_network(tmp_path):
    hits = [Hit("a", b"jpeg", True), Hit("b", b"jpeg", False)]
    text = page(tmp_path, examples=[Example("q", "cat", b"jpeg", hits, hits[:1])])
    parsed = Page(text)
    assert parsed.references and all(reference.startswith("data:image/jpeg") for reference in parsed.references)
    assert "http" not in text.replace("http-equiv", "")
    assert "<script" not in text


def test_before_and_after_stand_side_by_side(tmp_path):
    text = page(tmp_path)
    assert '<td>mAP@R</td><td>19.0</td><td>29.0</td><td class="gain">+10.0</td>' in text
    assert "7.6% of a step is outside the network" in text


def test_right_hits_are_framed_and_marked_apart_from_wrong_ones(tmp_path):
    before = [Hit("a", b"1", False), Hit("b", b"2", False)]
    after = [Hit("a", b"1", True), Hit("b", b"2", False)]
    text = page(tmp_path, examples=[Example("q", "cat", b"0", before, after)])
    classes = Page(text).classes
    assert (classes.count("hit right"), classes.count("hit wrong")) == (1, 3)
    assert "before: 0 of 2 right" in text
    assert "after: 1 of 2 right" in text


def test_names_are_escaped(tmp_path):
    name = '<b>&"'
    example = Example(name, name, b"0", [Hit(name, b"1", True)], [Hit(name, b"1", True)])
    text = page(tmp_path, title=name, facts={name: name}, examples=[example])
    Page(text)
    assert name not in text
    assert "&lt;b&gt;&amp;" in text


def test_a_run_without_steps_says_so(tmp_path):
    text = page(tmp_path, steps=[], validations=[], before=None, after=None)
    Page(text)
    assert "No training step has been logged" in text


@pytest.mark.parametrize("lost", [None, float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_leaves_a_gap_and_no_broken_chart(tmp_path, lost):
    steps = [step(n, loss=lost if n == 5 else 0.5, gradient_norm=lost) for n in range(1, 10)]
    text = page(tmp_path, steps=steps)
    Page(text)
    assert "nan" not in text.lower().replace("nano", "")
    assert "inf," not in text


def test_a_hundred_thousand_steps_make_a_small_page(tmp_path):
    assert len(page(tmp_path, steps=[step(n) for n in range(1, 100_001)])) < 1_000_000


def test_thinning_keeps_the_mean():
    points = [(float(n), float(n % 7)) for n in range(10_000)]
    few = thinned(points, 100)
    assert len(few) == 100
    assert sum(y for _, y in few) / 100 == pytest.approx(sum(y for _, y in points) / 10_000, rel=1e-3)


def test_ticks_are_round_and_inside():
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(0.31, 0.69) == pytest.approx([0.4, 0.5, 0.6])
    assert ticks(0, 3e-4) == pytest.approx([0, 1e-4, 2e-4, 3e-4])


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [5.0, 5.0]])
def test_charts_of_equal_values_are_drawn(values):
    points = [(float(x), y) for x, y in enumerate(values)]
    assert "nan" not in line_chart([Series("a", points)], "a")
    assert "<rect" in stacked_bars([x for x, _ in points], {"a": values}, "seconds")


def test_a_loss_that_is_no_average_precision_draws_no_curve_of_it(tmp_path):
    page(tmp_path, steps=[step(n, batch_mAP=None) for n in range(1, 5)], validations=[])
    text = (tmp_path / "report.html").read_text()
    assert "Mean Average Precision" not in text
    assert "Loss of the global batch" in text
