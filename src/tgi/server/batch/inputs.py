"""A plan's rows -> the index columns of one forward: host arithmetic only, one packed array to copy. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tgi.server.batch.step import RowChanges, Scoring, StepPlan

_NONE = np.empty(0, np.int64)


@dataclass(slots=True)
class StepInputs:
    """Device columns of one step, all int64 views of one copied array. n rows, t tokens, d ids from the device, s
    choices, p scored prompt tokens."""

    rows: torch.Tensor  # [n]
    cu_seqlens_q: torch.Tensor  # [n + 1]
    context_lens: torch.Tensor  # [n]
    ids: torch.Tensor  # [t]
    positions: torch.Tensor  # [t]
    row_of_token: torch.Tensor  # [t], index into `rows`
    device_tokens: torch.Tensor  # [d], index into `ids`
    device_rows: torch.Tensor  # [d]
    sample_tokens: torch.Tensor  # [s], index into the tokens: each row's last
    sample_rows: torch.Tensor  # [s]
    sample_positions: torch.Tensor  # [s], where the chosen id will stand
    score_tokens: torch.Tensor  # [p], index into the tokens
    score_targets: torch.Tensor  # [p], the id that comes next


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy without waiting. The pinned block goes back to torch's host allocator, which reuses it only after the
    copy."""
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def build_inputs(plan: StepPlan, device: torch.device) -> StepInputs:
    lens = plan.query_lens
    num_rows, num_tokens = plan.num_rows, plan.num_tokens
    cu_seqlens = np.zeros(num_rows + 1, np.int64)
    np.cumsum(lens, out=cu_seqlens[1:])
    if num_tokens == num_rows:
        row_of_token = np.arange(num_rows)
        positions = plan.starts
    else:
        row_of_token = np.repeat(np.arange(num_rows), lens)
        positions = np.arange(num_tokens) - cu_seqlens[row_of_token] + plan.starts[row_of_token]
    contexts = plan.starts + lens
    last = cu_seqlens[1:] - 1
    columns = (
        plan.rows,
        cu_seqlens,
        contexts,
        plan.ids,
        positions,
        row_of_token,
        last[plan.from_device],
        plan.rows[plan.from_device],
        last[plan.samples],
        plan.rows[plan.samples],
        contexts[plan.samples],
        *_scored(plan.scoring, cu_seqlens),
    )
    packed = to_device(np.concatenate(columns), device)
    return StepInputs(*packed.split([len(column) for column in columns]))


def _scored(
    scoring: Scoring | None, cu_seqlens: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(index into the tokens, the id that comes next), [p] both."""
    if scoring is None:
        return _NONE, _NONE
    counts = scoring.counts
    before = np.cumsum(counts) - counts
    return np.repeat(cu_seqlens[:-1] - before, counts) + np.arange(len(scoring.targets)), scoring.targets


def block_writes(changes: RowChanges, max_blocks: int) -> npt.NDArray[np.int64]:
    """[2, writes]: flat index into the block tables, block number. Raises ValueError where a row would outgrow its
    table."""
    indices: list[npt.NDArray[np.int64]] = []
    values: list[npt.NDArray[np.int64]] = []
    for row, first, blocks in changes.blocks:
        if first + len(blocks) > max_blocks:
            raise ValueError(f"a row has {first + len(blocks)} blocks; its table holds {max_blocks}")
        indices.append(np.arange(first, first + len(blocks), dtype=np.int64) + row * max_blocks)
        values.append(blocks.astype(np.int64))
    if not indices:
        return np.empty((2, 0), np.int64)
    return np.stack([np.concatenate(indices), np.concatenate(values)])
