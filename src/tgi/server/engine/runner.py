"""ModelRunner: the Device that is a model. Rows -> inputs -> logits -> next ids; never waits for the device on the
way in.

A step changes a row in one place, its last operation, which stores the chosen id (rule 3): before that it only writes
KV at positions that no one counts as computed yet.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from tgi.errors import InvalidRequest
from tgi.server.attention.backend import AttentionBackend, AttentionInputs
from tgi.server.attention.host_blocks import HostBlocks
from tgi.server.attention.kv_cache import KVCache
from tgi.server.batch.inputs import StepInputs, block_writes, build_inputs, to_device
from tgi.server.batch.step import RowChanges, StepPlan
from tgi.server.context import ForwardContext, StepRows
from tgi.server.distributed.group import Group
from tgi.server.engine.device import Chosen, Constraint
from tgi.server.engine.prompt_scores import ScoreTensors, score_prompts
from tgi.server.models.model import CausalLM, RowKeeper
from tgi.server.sampling.sampler import SampleOutput, sample
from tgi.server.sampling.state import WATERMARK_DELTA, WATERMARK_GAMMA, SamplingState, refuse_invalid
from tgi.shard_client.messages import Admit

NO_CHOICE = -1  # among the ids that rank 0 sends: this row sits the step out


@dataclass(slots=True)
class Launched:
    """A step on its way, and its results on theirs to the host. On CUDA they are complete once `done` has passed."""

    plan: StepPlan
    inputs: StepInputs
    logits: torch.Tensor | None = None  # [rows that choose, vocab], until they have chosen
    ids: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    is_nan: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    scores: ScoreTensors | None = None
    begun: torch.cuda.Event | None = None
    forwarded: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None
    forward_ns: int = 0


class ModelRunner:
    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        device: torch.device,
        dtype: torch.dtype,
        group: Group,
        watermark: tuple[float, float] = (WATERMARK_GAMMA, WATERMARK_DELTA),
    ) -> None:
        self.model = model
        self.backend = backend
        self.device = device
        self.dtype = dtype
        self.group = group
        self._watermark = watermark
        self.is_leader = group.rank == 0
        self.depth = 2 if device.type == "cuda" else 1
        self._cache: KVCache | None = None
        self._host_blocks: HostBlocks | None = None  # for what the cache gives up
        self._state: SamplingState | None = None
        self._top_n = np.zeros(0, np.int64)  # by row
        self._keeper = model if isinstance(model, RowKeeper) else None
        self._prompt_lens = np.zeros(0, np.int64)  # by row, for the keeper

    def allocate(self, num_blocks: int, max_rows: int, max_row_tokens: int, num_host_blocks: int = 0) -> None:
        """KV cache, block tables and row tensors; everything that was there is given up first."""
        self._cache = self._state = self._host_blocks = None
        shape = self.model.cache_shape
        if shape.num_layers:
            self._cache = self.backend.make_cache(
                num_blocks,
                shape.num_layers,
                shape.num_kv_heads,
                shape.head_dim,
                self.dtype,
                self.device,
                shape.value_dim,
            )
        if self._keeper is not None:
            self._keeper.allocate(max_rows + 1)
        if num_host_blocks:
            assert self._cache is not None, "a model without a KV cache has no blocks for the host"
            self._host_blocks = HostBlocks(self._cache, num_host_blocks)
        self.max_blocks = -(-max_row_tokens // self.backend.block_size) + 1
        # Row 0 is scratch: padding reads and writes it. All its blocks are block 0.
        self._block_tables = torch.zeros(max_rows + 1, self.max_blocks, dtype=torch.int32, device=self.device)
        self._last_ids = torch.zeros(max_rows + 1, dtype=torch.int64, device=self.device)
        self._top_n = np.zeros(max_rows + 1, np.int64)
        self._prompt_lens = np.zeros(max_rows + 1, np.int64)
        if self.is_leader:
            self._state = SamplingState(max_rows + 1, self.model.vocab_size, self.device, *self._watermark)

    # --- Device ------------------------------------------------------------

    def check(self, admit: Admit) -> str | None:
        if admit.adapter_id:
            return "adapters are not supported by this model server"
        if self._keeper is not None and admit.cached_len:
            return "this model shares no prefixes"
        for name, packed in (("prompt_ids", admit.prompt_ids), ("generated_ids", admit.generated_ids)):
            ids = np.frombuffer(packed, np.uint32)
            if len(ids) and int(ids.max()) >= self.model.vocab_size:
                return f"{name} holds a token id outside the vocabulary of {self.model.vocab_size}"
        if any(token >= self.model.vocab_size for token in admit.stopping.stop_ids):
            return f"a stop id is outside the vocabulary of {self.model.vocab_size}"
        try:
            refuse_invalid(admit.sampling, self.model.vocab_size)
        except InvalidRequest as error:
            return str(error)
        return None

    def apply(self, changes: RowChanges) -> None:
        if changes.moves:
            assert self._host_blocks is not None, "blocks are moved to a host that has none"
            self._host_blocks.copy(changes.moves)
        for row in changes.removed:
            self._forget(row)
        for row, admit in changes.added:
            self._forget(row)
            if self._state is not None:
                self._add_sampling(self._state, row, admit)
            self._top_n[row] = admit.top_n
            self._prompt_lens[row] = len(admit.prompt_ids) // 4
            if self._keeper is not None:
                self._keeper.begin(row, np.frombuffer(admit.prompt_ids + admit.generated_ids, np.uint32))
        if changes.blocks:
            writes = to_device(block_writes(changes, self.max_blocks), self.device)
            self._block_tables.view(-1).index_copy_(0, writes[0], writes[1].to(torch.int32))

    def _add_sampling(self, state: SamplingState, row: int, admit: Admit) -> None:
        prompt_ids = np.frombuffer(admit.prompt_ids, np.uint32)
        stopping = admit.stopping
        ends: list[int] = []
        if stopping.min_new_tokens:
            # A model's own files may name an EOS that its head does not have: it is never chosen.
            ends = sorted(token for token in stopping.end_ids if token < self.model.vocab_size)
        generated_ids = np.frombuffer(admit.generated_ids, np.uint32)
        state.add(row, admit.sampling, prompt_ids, generated_ids, len(prompt_ids) + stopping.min_new_tokens, ends)

    def _forget(self, row: int) -> None:
        if self._state is not None:
            self._state.remove(row)
        if self._keeper is not None:
            self._keeper.forget(row)
        self._top_n[row] = 0

    def launch(self, plan: StepPlan) -> Launched:
        launched = self.forward(plan)
        self.choose(launched)
        return launched

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Launched:
        started = time.perf_counter_ns()
        begun = self._event()
        inputs = build_inputs(plan, self.device)
        hidden = self._forward(plan, inputs)
        launched = Launched(plan, inputs, begun=begun)
        if plan.scoring is not None:
            self._score(launched, hidden, plan.scoring.top_n)
        if plan.samples.any():
            if len(inputs.sample_tokens) != plan.num_tokens:
                hidden = hidden.index_select(0, inputs.sample_tokens)
            launched.logits = self.model.logits(hidden)
        launched.forwarded = self._event()
        launched.forward_ns = time.perf_counter_ns() - started
        return launched

    def has_forwarded(self, launched: object) -> bool:
        assert isinstance(launched, Launched)
        return launched.forwarded is None or launched.forwarded.query()

    @torch.inference_mode()
    def choose(self, launched: object, constraint: Constraint | None = None) -> None:
        assert isinstance(launched, Launched)
        started = time.perf_counter_ns()
        if launched.logits is not None:
            if self._state is None:
                self._follow(launched)
            else:
                self._lead(self._state, launched, constraint)
            launched.logits = None
        launched.done = self._event()
        launched.forward_ns += time.perf_counter_ns() - started

    def collect(self, launched: object) -> Chosen:
        assert isinstance(launched, Launched)
        forward_ns = launched.forward_ns
        if launched.done is not None and launched.begun is not None:
            launched.done.synchronize()
            forward_ns = int(launched.begun.elapsed_time(launched.done) * 1e6)
        scores = None if launched.scores is None else launched.scores.read()
        if launched.ids is None or launched.logprobs is None or launched.is_nan is None:
            empty = np.empty(0, np.int64)
            return Chosen(
                empty,
                np.empty(0, np.float32),
                np.empty(0, np.bool_),
                prompt_scores=scores,
                forward_ns=forward_ns,
            )
        return Chosen(
            ids=launched.ids.numpy(),
            logprobs=launched.logprobs.numpy(),
            is_nan=launched.is_nan.numpy(),
            top_ids=None if launched.top_ids is None else launched.top_ids.numpy(),
            top_logprobs=None if launched.top_logprobs is None else launched.top_logprobs.numpy(),
            prompt_scores=scores,
            forward_ns=forward_ns,
        )

    def idle(self) -> None:
        if self.device.type == "cuda":
            torch.zeros(1, device=self.device).add_(1)
            event = self._event()
            assert event is not None
            event.synchronize()

    # --- the step ----------------------------------------------------------

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _forward(self, plan: StepPlan, inputs: StepInputs) -> torch.Tensor:
        block_size = self.backend.block_size
        contexts = plan.starts + plan.query_lens
        wide = -(-int(contexts.max()) // block_size)
        tables = self._block_tables.index_select(0, inputs.rows)[:, :wide]
        blocks = tables[inputs.row_of_token, inputs.positions // block_size]
        slots = blocks.to(torch.int64) * block_size + inputs.positions % block_size
        ids = inputs.ids
        if len(inputs.device_rows):
            ids = ids.index_copy(0, inputs.device_tokens, self._last_ids.index_select(0, inputs.device_rows))
        rows = None
        if self._keeper is not None:
            rows = StepRows(
                plan.rows.tolist(),
                plan.starts.tolist(),
                plan.query_lens.tolist(),
                self._prompt_lens[plan.rows].tolist(),
            )
        step = no_attention
        if self._cache is not None:
            attention_inputs = AttentionInputs(
                query_lens=plan.query_lens.tolist(),
                context_lens=contexts.tolist(),
                cu_seqlens_q=inputs.cu_seqlens_q.to(torch.int32),
                context_lens_device=inputs.context_lens.to(torch.int32),
                block_tables=tables,
                slots=slots,
            )
            step = self.backend.plan(attention_inputs, self._cache, self.model.cache_shape.num_heads)
        return self.model.forward(ids, inputs.positions, ForwardContext(step, rows))

    def _lead(self, state: SamplingState, launched: Launched, constraint: Constraint | None) -> None:
        """Rank 0 chooses, and tells the other ranks. Rows that sit out never reach the sampler."""
        plan, inputs, logits = launched.plan, launched.inputs, launched.logits
        assert logits is not None
        rows, positions = plan.rows[plan.samples], (plan.starts + plan.query_lens)[plan.samples]
        sample_rows, sample_positions = inputs.sample_rows, inputs.sample_positions
        taken = None
        if constraint is not None and not constraint.takes.all():
            rows, positions = rows[constraint.takes], positions[constraint.takes]
            taken = to_device(np.flatnonzero(constraint.takes), self.device)
            logits, sample_rows, sample_positions = (
                column.index_select(0, taken) for column in (logits, sample_rows, sample_positions)
            )
        flags, ids = 0, sample_rows.new_empty(0)
        if len(rows):
            flags = state.flags(rows, positions)
            top_n = int(self._top_n[rows].max())
            allowed = None if constraint is None else self._allowed(constraint, len(rows))
            chosen = sample(logits, sample_rows, sample_positions, state, flags=flags, top_n=top_n, allowed=allowed)
            self._send_home(chosen, launched)
            ids = chosen.ids
        if self.group.world_size > 1:
            everyones = ids
            if taken is not None:
                everyones = torch.full_like(inputs.sample_rows, NO_CHOICE).index_copy_(0, taken, ids)
            self.group.broadcast_(everyones)
        # The last id last: where memory runs out before, the step is run again from the one that stands there.
        state.commit(sample_rows, ids, flags)
        self._last_ids.index_copy_(0, sample_rows, ids)

    def _follow(self, launched: Launched) -> None:
        """What rank 0 has chosen for all rows of the plan, whoever of them sits out: every rank knows the shape."""
        rows = launched.inputs.sample_rows
        ids = self.group.broadcast_(torch.empty_like(rows))
        kept = self._last_ids.index_select(0, rows)
        self._last_ids.index_copy_(0, rows, torch.where(ids == NO_CHOICE, kept, ids))

    def _allowed(self, constraint: Constraint, num_choices: int) -> torch.Tensor | None:
        """[num_choices, ceil(vocab / 32)] int32. Only the masks of rows with a grammar are copied."""
        if not len(constraint.masked):
            return None
        masks = to_device(constraint.masks, self.device)
        if len(masks) == num_choices:
            return masks
        allowed = masks.new_full((num_choices, masks.shape[1]), -1)
        return allowed.index_copy_(0, to_device(constraint.masked, self.device), masks)

    def _score(self, launched: Launched, hidden: torch.Tensor, top_n: int) -> None:
        scores = score_prompts(self.model, hidden, launched.inputs, top_n, keep=self.is_leader)
        if scores is not None:
            launched.scores = ScoreTensors(*map(self._to_host, (scores.logprobs, scores.top_ids, scores.top_logprobs)))

    def _send_home(self, chosen: SampleOutput, launched: Launched) -> None:
        launched.ids = self._to_host(chosen.ids)
        launched.logprobs = self._to_host(chosen.logprobs)
        launched.is_nan = self._to_host(chosen.is_nan)
        if chosen.top_ids is not None and chosen.top_logprobs is not None:
            launched.top_ids = self._to_host(chosen.top_ids)
            launched.top_logprobs = self._to_host(chosen.top_logprobs)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type != "cuda":
            return tensor
        # Pinned memory from torch's caching host allocator: a ring that grows to what is in flight and is then reused.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


def no_attention(*_: object, **__: object) -> torch.Tensor:
    """The attention of a step without a KV cache."""
    raise RuntimeError("this model has no layers with attention")
