from collections import Counter

import numpy as np
import pytest
from run_folders import retrieved

from distap.pages.contact_sheets import ContactSheets


def sheets_of(networks):
    return {sheet.title: sheet.examples for sheet in ContactSheets(networks, lambda _: None).sheets()}


def common_queries(*networks):
    return sorted(set.intersection(*(set(np.flatnonzero(each.first_positive)) for each in networks)))


def test_the_hardest_queries_are_those_with_the_lowest_precision():
    last = retrieved(1)
    hardest = sheets_of({"before": retrieved(), "after": last})["Hardest queries"]
    queries = common_queries(retrieved(), last)
    lowest = sorted(queries, key=lambda row: (last.average_precision[row], row))[:8]
    assert [example.query.key for example in hardest] == [f"key-{row}" for row in lowest]
    for example, row in zip(hardest, lowest, strict=True):
        hits = example.answers[1].hits
        assert [hit.key for hit in hits] == [f"key-{hit}" for hit in last.neighbours[row]]
        assert [hit.right for hit in hits] == [last.label[hit] == last.label[row] for hit in last.neighbours[row]]


def test_gains_and_losses_are_the_greatest_of_all_queries():
    first, last = retrieved(), retrieved(1)
    sheets = sheets_of({"a": first, "b": last})
    gains = last.average_precision - first.average_precision
    ordered = sorted((gains[row] for row in common_queries(first, last)), reverse=True)
    for title, expected in (("gains", ordered[:4]), ("losses", ordered[::-1][:4])):
        answers = [example.answers for example in sheets[f"Greatest {title} from a to b"]]
        assert [b.average_precision - a.average_precision for a, b in answers] == pytest.approx(expected)


def test_confused_classes_are_counted_by_query_and_nearest_image():
    both = {"before": retrieved(), "after": retrieved(1)}
    counts = {name: Counter() for name in both}
    for name, each in both.items():
        for row in range(40):
            pair = each.label[row], each.label[each.neighbours[row, 0]]
            if each.first_positive[row] and pair[0] != pair[1]:
                counts[name][f"class-{pair[0]}", f"class-{pair[1]}"] += 1
    pairs = ContactSheets(both, lambda _: None).confusions()
    assert [pair.counts["after"] for pair in pairs] == [count for _, count in counts["after"].most_common(12)]
    for pair in pairs:
        names = pair.query.label, pair.found.label
        assert pair.counts == {name: counts[name][names] for name in both}
        of_class = both["after"].label == int(names[0].removeprefix("class-"))
        assert pair.queries == sum(of_class & (both["after"].first_positive > 0))
    assert len({(pair.query.label, pair.found.label) for pair in pairs}) == len(pairs)
