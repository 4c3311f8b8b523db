"""Prompt logprobs: which tokens of a step score the prompt's next, what the model says of them, and the parts that the
router gets. By the model alone: no processor and no warper. Knows no sampling.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tgi.server.batch.inputs import StepInputs
from tgi.server.batch.step import Scoring, StepPlan
from tgi.server.batch.table import RequestTable
from tgi.server.engine.device import PromptScores
from tgi.server.models.model import CausalLM
from tgi.server.sampling.logprobs import log_normalizer, top_logprobs
from tgi.shard_client.messages import PromptLogprobs

LOGITS_AT_ONCE = 128  # rows of the vocabulary: a long prompt's together would not fit beside the KV cache
_NOTHING = PromptScores(np.empty(0, np.float32), np.empty((0, 0), np.int64), np.empty((0, 0), np.float32))


@dataclass(slots=True)
class ScoreTensors:
    """As PromptScores, on the device or on its way."""

    logprobs: torch.Tensor  # [p] f32
    top_ids: torch.Tensor  # [p, top_n] int64
    top_logprobs: torch.Tensor  # [p, top_n] f32

    def read(self) -> PromptScores:
        """On the host, once they have arrived."""
        return PromptScores(self.logprobs.numpy(), self.top_ids.numpy(), self.top_logprobs.numpy())


def plan_scoring(
    table: RequestTable, rows: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], lens: npt.NDArray[np.int64]
) -> Scoring | None:
    """For a step that computes `lens` tokens of each row from `starts` on; None where no row has a part to report."""
    if not table.num_scoring:
        return None
    scored = table.num_scored[rows]
    if not (scored > starts).any():  # their prompts are read
        return None
    counts = np.clip(scored - 1 - starts, 0, lens)
    if not _reports(counts, starts, scored).any():
        return None
    spans = zip(rows.tolist(), (starts + 1).tolist(), (starts + 1 + counts).tolist())
    targets = [table.given[row][first:end] for row, first, end in spans]
    return Scoring(counts, np.concatenate(targets).astype(np.int64), int(table.prompt_top_n[rows].max()))


def score_prompts(
    model: CausalLM, hidden: torch.Tensor, inputs: StepInputs, top_n: int, keep: bool
) -> ScoreTensors | None:
    """hidden [tokens, hidden_size]. Ranks that keep nothing compute the same logits, since a collective is inside."""
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    pieces = zip(inputs.score_tokens.split(LOGITS_AT_ONCE), inputs.score_targets.split(LOGITS_AT_ONCE))
    for tokens, targets in pieces:
        logits = model.logits(hidden.index_select(0, tokens))
        if keep:
            parts.append(_score(logits, targets, top_n))
    return ScoreTensors(*map(torch.cat, zip(*parts))) if parts else None


def _score(logits: torch.Tensor, targets: torch.Tensor, top_n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    normalizer = log_normalizer(logits)
    logprobs = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - normalizer
    if not top_n:
        nothing = logits.new_empty(len(targets), 0)
        return logprobs, nothing.long(), nothing
    ids, values = top_logprobs(logits, normalizer, top_n)
    return logprobs, ids[:, :top_n], values[:, :top_n]


def read_scores(
    plan: StepPlan, scoring: Scoring, scores: PromptScores | None, table: RequestTable
) -> Iterator[PromptLogprobs]:
    """Parts of the rows that are still there (rule 2). The part that begins the prompt says of its first token that
    nothing is known."""
    scores = scores or _NOTHING
    is_there = table.handle[plan.rows] == plan.handles
    wanted = np.flatnonzero(is_there & _reports(scoring.counts, plan.starts, table.num_scored[plan.rows]))
    ends = np.cumsum(scoring.counts)
    for handle, row, start, count, end in zip(
        plan.handles[wanted].tolist(),
        plan.rows[wanted].tolist(),
        plan.starts[wanted].tolist(),
        scoring.counts[wanted].tolist(),
        ends[wanted].tolist(),
    ):
        begin = end - count
        top_n = min(int(table.prompt_top_n[row]), scores.top_ids.shape[1])
        unknown = 0 if start else 1
        yield PromptLogprobs(
            handle,
            start + 1 - unknown,
            array("f", [math.nan] * unknown) + array("f", scores.logprobs[begin:end].tobytes()),
            array("I", [0] * unknown * top_n) + array("I", _packed(scores.top_ids[begin:end, :top_n], np.uint32)),
            array("f", [math.nan] * unknown * top_n)
            + array("f", _packed(scores.top_logprobs[begin:end, :top_n], np.float32)),
        )


def _reports(
    counts: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], scored: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Which rows, with so many scored tokens of a chunk, have a part to send."""
    return (counts > 0) | ((starts == 0) & (scored > 0))


def _packed(values: npt.NDArray[np.generic], dtype: type[np.generic]) -> bytes:
    return values.astype(dtype).tobytes()
