"""What the host decided about one step, as data: the same on all ranks. Knows no tensors and no policy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tgi.shard_client.messages import Admit, BlockMoves


@dataclass(slots=True)
class RowChanges:
    """What happened to rows since the last step, to be done on the device before it (rule 1): the moves first, then the
    rest in this order."""

    removed: list[int]
    added: list[tuple[int, Admit]]
    blocks: list[
        tuple[int, int, npt.NDArray[np.int32]]
    ]  # row, index of the first entry in its block table, block numbers
    moves: BlockMoves = field(default_factory=BlockMoves)

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.blocks or self.moves)


@dataclass(slots=True)
class Scoring:
    """Prompt logprobs: the logits of a token score the one after it. A prompt's last token scores none, and the last of
    a chunk the first of the next."""

    counts: npt.NDArray[np.int64]  # per row of the plan: so many of its tokens, from the first on, score the next
    targets: npt.NDArray[np.int64]  # [sum(counts)] ids that come next
    top_n: int  # best tokens at each: the most that any row wants

    def part(self, first: int, last: int) -> Scoring:
        """The same for the rows [first, last) alone."""
        begin, end = int(self.counts[:first].sum()), int(self.counts[:last].sum())
        return Scoring(self.counts[first:last], self.targets[begin:end], self.top_n)


@dataclass(slots=True)
class StepPlan:
    """Every decision of the host about one step: the same on all ranks. Its (handle, row) columns are the snapshot by
    which results are read (rule 2). Columns are per row; rows are unique."""

    number: int
    handles: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]  # first position that the step computes
    query_lens: npt.NDArray[np.int64]  # tokens that it computes
    samples: npt.NDArray[np.bool_]  # the step chooses the row's next id
    from_device: npt.NDArray[np.bool_]  # the one id is what an earlier step chose: only the device knows it
    ids: npt.NDArray[np.int64]  # [sum(query_lens)], 0 where the id comes from the device
    scoring: Scoring | None = None  # None: no row of the step wants prompt logprobs

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def part(self, first: int, last: int) -> StepPlan:
        """The same step for the rows [first, last) alone."""
        ends = np.cumsum(self.query_lens)
        begin = 0 if first == 0 else int(ends[first - 1])
        rows = slice(first, last)
        return StepPlan(
            number=self.number,
            handles=self.handles[rows],
            rows=self.rows[rows],
            starts=self.starts[rows],
            query_lens=self.query_lens[rows],
            samples=self.samples[rows],
            from_device=self.from_device[rows],
            ids=self.ids[begin : int(ends[last - 1])],
            scoring=None if self.scoring is None else self.scoring.part(first, last),
        )
