"""An index as a script for PostgreSQL with pgvector, in its COPY format."""

from pathlib import Path

import numpy as np

from distap.apps.stores.copying import require_free_columns
from distap.retrieval.filters import Cell
from distap.retrieval.searching import SearchIndex
from distap.storage.atomic import replacing

SQL_TABLE = "distap_images"
SQL_TYPES = {"text": "text", "number": "double precision"}
# The kinds of pgvector for ours; a flat index needs none.
INDEXES = {"hnsw": "hnsw", "flat": ""}
_ESCAPED = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def write_pgvector(path: Path, index: SearchIndex) -> None:
    """Write a script for `psql -f` that makes a table hold this generation, or changes nothing."""
    require_free_columns(index)
    images = index.images
    types = {"key": "text PRIMARY KEY", "class": "text"}
    types |= {name: SQL_TYPES[kind] for name, kind in index.columns.types().items()}
    types["vector"] = f"vector({index.index.d})"
    fields = ", ".join(f"{_name(name)} {kind}" for name, kind in types.items())
    method = INDEXES.get(index.about["index"]["kind"], "ivfflat")
    with replacing(path) as file:

        def line(text: str) -> None:
            file.write(f"{text}\n".encode())

        # By default psql ends with status 0 after an error, and a scheduled job would never tell.
        line("\\set ON_ERROR_STOP on")
        # A server whose locale is another one would take the bytes of this file for its own.
        line("SET client_encoding = 'UTF8';")
        # One transaction: searches see the old rows until the new ones are complete.
        line("CREATE EXTENSION IF NOT EXISTS vector;\nBEGIN;")
        line(f"DROP TABLE IF EXISTS {SQL_TABLE};\nCREATE TABLE {SQL_TABLE} ({fields});")
        line(f"COPY {SQL_TABLE} FROM STDIN;")
        for row, key in enumerate(images.keys.tolist()):
            cells = index.columns.cells(row)
            vector = np.array(images.descriptors[row], np.float32).tolist()
            texts = [_cell(key), _cell(str(images.classes[row]))]
            texts += [_cell(cells.get(name)) for name in images.columns]
            line("\t".join([*texts, str(vector).replace(" ", "")]))
        line("\\.")
        if method:
            line(f"CREATE INDEX ON {SQL_TABLE} USING {method} (vector vector_ip_ops);")
        line(f"COMMENT ON TABLE {SQL_TABLE} IS 'distap generation {index.generation}';\nCOMMIT;")


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _cell(cell: Cell | None) -> str:
    """Return a cell in COPY's text format, in which \\N is NULL."""
    if cell is None:
        return "\\N"
    # A bare \\. would end the data, and a bare tab or line break the cell or the row.
    return str(cell).translate(_ESCAPED)
