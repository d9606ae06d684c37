"""The page of formats, and the numbers of the code."""

import re

from launching import ROOT

from distap.checkpoint.manifest import MANIFEST_FORMAT
from distap.data.loading.streamed import STREAMED_VERSION
from distap.data.plan import PLAN_VERSION
from distap.data.shards.index import INDEX_VERSION
from distap.evaluation.extraction.extracted_folder import EXTRACTION_VERSION
from distap.model.trained import SAVED_FORMAT
from distap.retrieval.descriptor_files import DESCRIPTORS_VERSION, NETWORKS_VERSION


def test_the_page_of_formats_has_the_numbers_of_the_code():
    _, _, table = (ROOT / "docs/reference/upgrade.md").read_text().partition("## Formats")
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|", table, re.MULTILINE)
    numbers = {
        kind: [int(number) for number in re.findall(r"\d+", text)] for kind, text in rows[1:]
    }
    assert EXTRACTION_VERSION == DESCRIPTORS_VERSION
    assert numbers == {
        "checkpoints": [MANIFEST_FORMAT],
        "order of the batches": [PLAN_VERSION, STREAMED_VERSION],
        "index of shards": [INDEX_VERSION],
        "descriptors": [DESCRIPTORS_VERSION, NETWORKS_VERSION],
        "search index": [DESCRIPTORS_VERSION, NETWORKS_VERSION],
        "saved networks and exports": [SAVED_FORMAT, 1],
    }
