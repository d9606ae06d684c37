import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from distap.pages.charts import Series, line_chart, stacked_bars, stacked_rows, thinned, ticks
from distap.pages.contact_sheets import Answer, Confusion, Example, Hit, Picture, Sheet
from distap.pages.report import Report, write_report
from distap.pages.run_curves import RunLines
from distap.pages.scores import Scores, precision_over_recall

FIGURES = {"mAP": 0.25, "mAP@R": 0.19, "R@1": 0.43, "R@5": 0.65, "R@10": 0.73}
VOID = {"meta", "img", "wbr"}


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


def lines(name="run", steps=24, **changes):
    validations = [{"step": 0, "validation": FIGURES}, {"step": steps, "validation": {"mAP": 0.5}}]
    return RunLines(name, [step(n, **changes) for n in range(1, steps + 1)], validations)


def scores(name, gain=0.0):
    figures = {figure: value + gain for figure, value in FIGURES.items()}
    classes = {c: {"queries": 4, "mAP": n / 20 + gain} for n, c in enumerate("abcdefghijklmn")}
    return Scores(name, figures, [1 - r / 101 + gain for r in range(101)], [0.1, 0.5 + gain, 1.0], classes)


def picture(key="k", label="cat", jpeg=b"jpeg"):
    return Picture(key, label, jpeg)


def answer(name, *right):
    return Answer(name, 0.5, 1, [Hit(picture(), each) for each in right])


def page(tmp_path, **changes):
    settings = {
        "title": "run",
        "runs": [lines()],
        "facts": {"network": ["resnet"]},
        "scores": [scores("before"), scores("after", 0.1)],
    }
    write_report(tmp_path / "report.html", Report(**{**settings, **changes}))
    return (tmp_path / "report.html").read_text()


def sheets(*answers):
    return [Sheet("Some", "Drawn at random.", [Example(picture("q"), list(answers))])]


def test_the_page_is_whole_and_needs_no_network(tmp_path):
    text = page(tmp_path, sheets=sheets(answer("before", True, False), answer("after", True)))
    parsed = Page(text)
    assert parsed.references and all(reference.startswith("data:image/jpeg") for reference in parsed.references)
    assert "http" not in text.replace("http-equiv", "")
    assert "<script" not in text


def test_before_and_after_stand_side_by_side(tmp_path):
    text = page(tmp_path)
    assert '<th scope="row">mAP@R</th><td>19.0</td><td>29.0</td><td><span class="gain">+10.0</span></td>' in text
    assert "7.6% of a step is outside the network" in text


def test_right_hits_are_framed_and_marked_apart_from_wrong_ones(tmp_path):
    text = page(tmp_path, sheets=sheets(answer("before", False, False), answer("after", True, False)))
    classes = Page(text).classes
    assert (classes.count("hit right"), classes.count("hit wrong")) == (1, 3)
    assert (text.count(">✓<"), text.count(">✗<")) == (1, 3)
    assert "<b>before</b>: 0 of 2 right" in text
    assert "<b>after</b>: 1 of 2 right" in text


def test_an_image_that_cannot_be_read_leaves_its_place(tmp_path):
    text = page(tmp_path, sheets=[Sheet("", "", [Example(picture("q", jpeg=None), [answer("after", True)])])])
    Page(text)
    assert 'aria-label="query: cat, q, not readable"' in text


def test_names_are_escaped(tmp_path):
    name = '<b>&"'
    shown = picture(name, name)
    text = page(
        tmp_path,
        title=name,
        runs=[lines(name), lines("b")],
        facts={name: [name, name]},
        settings={name: [name, name]},
        scores=[Scores(name, {name: 0.5}, [0.5] * 101, [0.5], {name: {"queries": 3, "mAP": 0.5}})],
        sheets=[Sheet(name, name, [Example(shown, [Answer(name, 0.5, 1, [Hit(shown, False)])])])],
        confused=[Confusion(shown, shown, {name: 1}, 2)],
        notes=[name],
    )
    Page(text)
    assert name not in text
    assert "&lt;b&gt;&amp;" in text


def test_a_run_without_steps_says_so(tmp_path):
    text = page(tmp_path, runs=[RunLines("run", [], [])], scores=[])
    Page(text)
    assert "no training step has been logged" in text


@pytest.mark.parametrize("lost", [None, float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_leaves_a_gap_and_no_broken_chart(tmp_path, lost):
    steps = [step(n, loss=lost if n == 5 else 0.5, gradient_norm=lost) for n in range(1, 10)]
    text = page(tmp_path, runs=[RunLines("run", steps, [])])
    Page(text)
    assert "nan" not in text.lower().replace("nano", "")
    assert "inf," not in text


def test_a_hundred_thousand_steps_make_a_small_page(tmp_path):
    assert len(page(tmp_path, runs=[lines(steps=100_000)])) < 1_000_000


def test_lines_of_several_runs_differ_in_more_than_their_colour(tmp_path):
    text = page(tmp_path, runs=[lines("one"), lines("other")], facts={"network": ["a", "b"]})
    loss = text[text.index("Loss of the global batch") :].split("</figure>")[0]
    # In the chart and in its legend.
    assert re.findall(r'class="(line .*?)"', loss) == ["line s0 d0", "line s1 d1"] * 2
    assert "stroke-dasharray" in text


def test_a_run_looks_the_same_in_every_chart_though_another_was_not_evaluated(tmp_path):
    runs = [RunLines("one", lines().steps, []), lines("other"), RunLines("third", [], [])]
    text = page(tmp_path, runs=runs, facts={"network": ["a", "b", "c"]})
    for title, drawn in (("mAP of the validation set", {"1"}), ("Loss of the global batch", {"0", "1"})):
        chart = text[text.index(f"<h3>{title}") :].split("</figure>")[0]
        assert set(re.findall(r'<polyline class="line s(\d) d\d" points="\d', chart)) == drawn
        assert re.findall(r"</svg>(\w+)</span>", chart) == ["one", "other", "third"]


def test_stages_of_several_runs_stand_side_by_side(tmp_path):
    text = page(tmp_path, runs=[lines("one"), lines("other", steps=3)], facts={"network": ["a", "b"]})
    assert '<th scope="row">replay</th><td>6.000 (70.2%)</td><td>6.000 (70.2%)</td>' in text
    assert "one: 7.6% of a step is outside the network" in text


def test_recipes_that_are_the_same_are_said_to_be(tmp_path):
    both = {"runs": [lines("one"), lines("other")], "facts": {"network": ["a", "a"]}}
    assert "The recipes are the same" in page(tmp_path, **both)
    text = page(tmp_path, **both, settings={"loss.bins": ["10", "20"]})
    assert '<th scope="row">loss.<wbr>bins</th><td>10</td><td>20</td>' in text


def test_the_classes_with_the_lowest_map_come_in_order(tmp_path):
    text = page(tmp_path)
    section = text[text.index("Classes with the lowest mAP") :]
    assert re.findall(r'<th scope="row">(\w)</th>', section) == list("abcdefghijkl")


def test_the_curve_of_queries_falls_from_all_to_those_that_are_perfect(tmp_path):
    chart = precision_over_recall([scores("after")])
    assert re.findall(r"<h3>(.*?)</h3>", chart) == ["Precision over recall", "Queries that reach an AP"]
    heights = [float(point.split(",")[1]) for point in re.findall(r'points="(.*?)"', chart)[1].split()]
    assert len(heights) == 101
    assert heights == sorted(heights)
    assert len(set(heights)) == 3


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
    assert "nan" not in stacked_rows({"run": {"a": values[0]}}, "seconds")


def test_a_loss_that_is_no_average_precision_draws_no_curve_of_it(tmp_path):
    text = page(tmp_path, runs=[RunLines("run", [step(n, batch_mAP=None) for n in range(1, 5)], [])])
    assert "Mean Average Precision" not in text
    assert "Loss of the global batch" in text


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_the_contrast_that_wcag_asks_for(dark):
    styles = files("distap.telemetry").joinpath("report.css").read_text()
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", styles.split("@media")[int(dark)]))
    for background in ("paper", "card"):
        for text in ("ink", "soft"):
            assert contrast(colours[text], colours[background]) >= 4.5
        for line in ("right", "wrong", *(f"c{number}" for number in range(9))):
            assert contrast(colours[line], colours[background]) >= 3


def contrast(one, other):
    """Ratio of two colours' luminances (WCAG 2.2)."""
    light = []
    for colour in (one, other):
        shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(light) + 0.05) / (min(light) + 0.05)
