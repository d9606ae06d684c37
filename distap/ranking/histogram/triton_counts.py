"""A Triton kernel for soft counts on GPUs. Triton's interpreter runs it on a CPU, for the tests."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 2, 128  # pairs that a program holds at a time


def soft_counts_by_hand(similarities: Tensor, high: float, width: float, bins: int) -> Tensor:
    """`passes.soft_counts` from one reading of the similarities, (r, c) float32, instead of one for each bin."""
    similarities = similarities.contiguous()
    rows, columns = similarities.shape
    counts = torch.empty(rows, bins - 1, dtype=torch.float32, device=similarities.device)
    padded = triton.next_power_of_2(bins - 1)
    grid = (triton.cdiv(rows, ROWS),)
    arguments = similarities, counts, rows, columns, high, 1 / width, bins - 1, padded, ROWS, COLUMNS
    with torch.cuda.device_of(similarities):
        _soft_counts[grid](*arguments)
    return counts


@triton.jit  # type: ignore[untyped-decorator]
def _soft_counts(  # type: ignore[no-untyped-def]
    similarities,
    counts,
    rows,
    columns,
    high,
    steepness,
    edges: tl.constexpr,
    padded: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    edge = tl.arange(0, padded)
    start_of_row = row.to(tl.int64)[:, None] * columns
    total = tl.zeros((ROWS, padded), tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        values = tl.load(similarities + start_of_row + column[None, :], mask=inside, other=float("-inf"))
        from_high = (values - high) * steepness
        soft = from_high[:, None, :] + (edge + 1).to(tl.float32)[None, :, None]
        total += tl.sum(tl.minimum(tl.maximum(soft, 0.0), 1.0), axis=2)
    wanted = (row[:, None] < rows) & (edge[None, :] < edges)
    tl.store(counts + row.to(tl.int64)[:, None] * edges + edge[None, :], total, mask=wanted)
