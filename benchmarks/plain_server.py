"""A plain search server, as one writes it in an afternoon: what `distap serve` is measured beside.

    DESCRIPTORS=found RUN=runs/mine uvicorn benchmarks.plain_server:app --port 8001

It answers the same searches in the same JSON, and bounds nothing: no uploads, no searches that
wait, no clients.
"""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, File, HTTPException, UploadFile
from numpy.typing import NDArray
from PIL import Image

import distap

FOLDER = Path(os.environ["DESCRIPTORS"])
descriptors = np.load(FOLDER / "descriptors.npy")
keys = np.load(FOLDER / "keys.npy").astype(str).tolist()
rows = {key: row for row, key in enumerate(keys)}
network = distap.load(os.environ["RUN"])
app = FastAPI(title="plain search")


def hits(query: NDArray[np.float32], k: int, left_out: int = -1) -> dict[str, Any]:
    similarities = descriptors @ query
    ranked = np.argsort(-similarities)[: k + 1]
    best = [row for row in ranked.tolist() if row != left_out][:k]
    return {
        "hits": [
            {
                "rank": rank,
                "key": keys[row],
                "class": "",
                "similarity": float(similarities[row]),
                "picture": f"/images/{row}",
            }
            for rank, row in enumerate(best, 1)
        ]
    }


@app.get("/api/search")
def search_by_key(key: str, k: int = 10) -> dict[str, Any]:
    if key not in rows:
        raise HTTPException(404, f"no image has the key {key!r}")
    return hits(descriptors[rows[key]], k, left_out=rows[key])


@app.post("/api/search")
def search_by_image(image: UploadFile = File(), k: int = 10) -> dict[str, Any]:  # noqa: B008 - as FastAPI wants it
    picture = Image.open(io.BytesIO(image.file.read())).convert("RGB")
    return hits(network.describe([picture])[0].numpy(), k)
