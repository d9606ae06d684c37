import numpy as np
from run_folders import retrieved

from distap.pages import report


def sheets_of(networks):
    return {sheet.title: sheet.examples for sheet in report.sheets_of(networks, lambda _: None)}


def common_queries(*networks):
    return sorted(set.intersection(*(set(np.flatnonzero(each.first_positive)) for each in networks)))


def test_the_hardest_queries_are_those_with_the_lowest_precision():
    last = retrieved(1)
    hardest = sheets_of({"before": retrieved(), "after": last})["Hardest queries"]
    queries = common_queries(retrieved(), last)
    lowest = sorted(queries, key=lambda row: (last.average_precision[row], row))[:8]
    assert [query.key for query, _ in hardest] == [f"key-{row}" for row in lowest]
    for (_, answers), row in zip(hardest, lowest, strict=True):
        hits = answers[1].hits
        assert [hit.key for hit in hits] == [f"key-{hit}" for hit in last.neighbours[row]]
        assert [hit.right for hit in hits] == [
            last.class_name[hit] == last.class_name[row] for hit in last.neighbours[row]
        ]
