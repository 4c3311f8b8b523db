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
from tgi.server.attention.kv_cache import KVCache
from tgi.server.batch.inputs import StepInputs, block_writes, build_inputs, to_device
from tgi.server.batch.step import RowChanges, StepPlan
from tgi.server.context import ForwardContext
from tgi.server.distributed.group import Group
from tgi.server.engine.device import Chosen
from tgi.server.models.model import CausalLM
from tgi.server.sampling.sampler import SampleOutput, sample
from tgi.server.sampling.state import SamplingState, refuse_unsupported
from tgi.shard_client.messages import Admit

NEGATIVE_INFINITY = float("-inf")


@dataclass(slots=True)
class Launched:
    """Results on their way to the host. On CUDA they are complete once `done` has passed."""

    num_samples: int
    ids: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    is_nan: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    begun: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None
    forward_ns: int = 0


@dataclass(frozen=True, slots=True)
class RowRules:
    """What the runner itself keeps of a row: ids that may not be chosen before `from_position`."""

    from_position: int
    end_ids: tuple[int, ...]


class ModelRunner:
    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        device: torch.device,
        dtype: torch.dtype,
        group: Group,
    ) -> None:
        self.model = model
        self.backend = backend
        self.device = device
        self.dtype = dtype
        self.group = group
        self.is_leader = group.rank == 0
        self.depth = 2 if device.type == "cuda" else 1
        self._cache: KVCache | None = None
        self._state: SamplingState | None = None
        self._rules: dict[int, RowRules] = {}
        self._top_n: dict[int, int] = {}

    def allocate(self, num_blocks: int, max_rows: int, max_row_tokens: int) -> None:
        """KV cache, block tables and row tensors; everything that was there is given up first."""
        self._cache = self._state = None
        shape = self.model.cache_shape
        self._cache = self.backend.make_cache(
            num_blocks, shape.num_layers, shape.num_kv_heads, shape.head_dim, self.dtype, self.device
        )
        self.max_blocks = -(-max_row_tokens // self.backend.block_size) + 1
        # Row 0 is scratch: padding reads and writes it. All its blocks are block 0.
        self._block_tables = torch.zeros(max_rows + 1, self.max_blocks, dtype=torch.int32, device=self.device)
        self._last_ids = torch.zeros(max_rows + 1, dtype=torch.int64, device=self.device)
        self._rules.clear()
        self._top_n.clear()
        if self.is_leader:
            self._state = SamplingState(max_rows + 1, self.model.vocab_size, self.device)

    # --- Device ------------------------------------------------------------

    def check(self, admit: Admit) -> str | None:
        if admit.grammar is not None:
            return "grammars are not supported by this model server"
        if admit.adapter_id:
            return "adapters are not supported by this model server"
        if admit.prompt_logprobs:
            return "prompt logprobs are not supported by this model server"
        for name, packed in (("prompt_ids", admit.prompt_ids), ("generated_ids", admit.generated_ids)):
            ids = np.frombuffer(packed, np.uint32)
            if len(ids) and int(ids.max()) >= self.model.vocab_size:
                return f"{name} holds a token id outside the vocabulary of {self.model.vocab_size}"
        if any(token >= self.model.vocab_size for token in admit.stopping.stop_ids):
            return f"a stop id is outside the vocabulary of {self.model.vocab_size}"
        try:
            refuse_unsupported(admit.sampling)
        except InvalidRequest as error:
            return str(error)
        return None

    def apply(self, changes: RowChanges) -> None:
        for row in changes.removed:
            self._forget(row)
        for row, admit in changes.added:
            self._forget(row)
            if self._state is not None:
                self._state.add(row, admit.sampling)
            if admit.top_n:
                self._top_n[row] = admit.top_n
            stopping = admit.stopping
            if stopping.min_new_tokens:
                # A model's own files may name an EOS that its head does not have: it is never chosen.
                ends = sorted(token for token in stopping.end_ids if token < self.model.vocab_size)
                first = len(admit.prompt_ids) // 4 + stopping.min_new_tokens
                self._rules[row] = RowRules(first, tuple(ends))
        if changes.blocks:
            writes = to_device(block_writes(changes, self.max_blocks), self.device)
            self._block_tables.view(-1).index_copy_(0, writes[0], writes[1].to(torch.int32))

    def _forget(self, row: int) -> None:
        if self._state is not None:
            self._state.remove(row)
        self._rules.pop(row, None)
        self._top_n.pop(row, None)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        started = time.perf_counter_ns()
        begun = self._event()
        inputs = build_inputs(plan, self.device)
        hidden = self._forward(plan, inputs)
        num_samples = int(np.count_nonzero(plan.samples))
        launched = Launched(num_samples, begun=begun)
        if num_samples:
            if num_samples != plan.num_tokens:
                hidden = hidden.index_select(0, inputs.sample_tokens)
            logits = self.model.logits(hidden)
            ids = self._choose(plan, inputs, logits, launched)
            if self.group.world_size > 1:
                self.group.broadcast_(ids)
            self._last_ids.index_copy_(0, inputs.sample_rows, ids)
        launched.done = self._event()
        launched.forward_ns = time.perf_counter_ns() - started
        return launched

    def collect(self, launched: object) -> Chosen:
        assert isinstance(launched, Launched)
        forward_ns = launched.forward_ns
        if launched.done is not None and launched.begun is not None:
            launched.done.synchronize()
            forward_ns = int(launched.begun.elapsed_time(launched.done) * 1e6)
        if launched.ids is None or launched.logprobs is None or launched.is_nan is None:
            empty = np.empty(0, np.int64)
            return Chosen(empty, np.empty(0, np.float32), np.empty(0, np.bool_), forward_ns=forward_ns)
        return Chosen(
            ids=launched.ids.numpy(),
            logprobs=launched.logprobs.numpy(),
            is_nan=launched.is_nan.numpy(),
            top_ids=None if launched.top_ids is None else launched.top_ids.numpy(),
            top_logprobs=None if launched.top_logprobs is None else launched.top_logprobs.numpy(),
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
        assert self._cache is not None
        step = self.backend.plan(
            AttentionInputs(
                query_lens=plan.query_lens.tolist(),
                context_lens=contexts.tolist(),
                cu_seqlens_q=inputs.cu_seqlens_q.to(torch.int32),
                context_lens_device=inputs.context_lens.to(torch.int32),
                block_tables=tables,
                slots=slots,
            ),
            self._cache,
            self.model.cache_shape.num_heads,
        )
        return self.model.forward(ids, inputs.positions, ForwardContext(step))

    def _choose(self, plan: StepPlan, inputs: StepInputs, logits: torch.Tensor, launched: Launched) -> torch.Tensor:
        """[s] ids. Rank 0 samples; the others hold a place for what it will send."""
        if self._state is None:
            return torch.empty(launched.num_samples, dtype=torch.int64, device=self.device)
        rows = plan.rows[plan.samples]
        self._ban_early_ends(rows, (plan.starts + plan.query_lens)[plan.samples], logits)
        top_n = max((self._top_n.get(row, 0) for row in rows.tolist()), default=0) if self._top_n else 0
        chosen = sample(
            logits,
            inputs.sample_rows,
            inputs.sample_positions,
            self._state,
            greedy_only=self._state.is_greedy(rows),
            top_n=top_n,
        )
        self._send_home(chosen, launched)
        return chosen.ids

    def _ban_early_ends(self, rows: np.ndarray, positions: np.ndarray, logits: torch.Tensor) -> None:
        if not self._rules:
            return
        pairs = [
            (index, token)
            for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist()))
            if (rules := self._rules.get(row)) is not None and position < rules.from_position
            for token in rules.end_ids
        ]
        if pairs:
            where = to_device(np.array(pairs, np.int64).T.copy(), self.device)
            logits.view(-1).index_fill_(0, where[0] * logits.shape[1] + where[1], NEGATIVE_INFINITY)

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
