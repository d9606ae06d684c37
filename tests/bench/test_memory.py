import io

import pytest
from rich.console import Console

from distap.bench.memory import measure


@pytest.mark.slow
def test_the_table_has_a_row_for_each_batch_with_what_it_holds():
    table = measure([16, 32], image_size=32, micro_batch=8, backbone="resnet10t")
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table)
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["B"] == ["16", "32"]
    assert all(float(peak) > 100 for peak in columns["peak MB"])
