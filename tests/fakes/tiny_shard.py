"""An engine over a real (tiny or bundled) model in this process: what a shard is, without its socket and its thread."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch

from tgi.enums import EndReason
from tgi.model_config import read_model_config
from tgi.server.attention.select import select_backend
from tgi.server.batch.table import RequestTable
from tgi.server.distributed.group import make_group
from tgi.server.engine.engine import Engine, Limits
from tgi.server.engine.plan import PrefillBudget
from tgi.server.engine.runner import ModelRunner
from tgi.server.grammar.compiler import Compiler
from tgi.server.grammar.mask import Masks
from tgi.server.grammar.vocabulary import read_beside
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.shard_client.messages import Admit, Command, Grammar, PromptLogprobs, RowError, Sampling, Stopping

GREEDY = Sampling()
# Prompts are read in chunks, beside decoding rows.
SMALL_STEPS = PrefillBudget(alone=64, beside_decode=32, chunked=True)


def pack(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    end: EndReason
    logprobs: list[float]
    prompt: list[PromptLogprobs] = field(default_factory=list)


class TinyShard:
    """`depth` above 1 launches ahead as on a GPU, which on a CPU changes the order of collecting alone."""

    def __init__(
        self,
        model_path: Path,
        *,
        attention: str = "torch",
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        num_blocks: int = 300,
        max_rows: int = 16,
        budget: PrefillBudget = SMALL_STEPS,
        depth: int | None = None,
        grammars: bool = False,
        masks: Masks | None = None,
        block_size: int | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        """`grammars`: with masks of its own; or those given, which never let anybody wait for long."""
        self.device = torch.device(device)
        group = make_group(0, 1, "localhost", 0, self.device)
        checkpoint = open_checkpoint(model_path)
        model_config = read_model_config(model_path)
        model = build_model(model_config, checkpoint, dtype, self.device, group, path=model_path)
        checkpoint.close()
        backend = select_backend(attention, self.device.type, block_size)
        shape = model.cache_shape
        backend.warmup(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype, self.device)
        self.block_size = backend.block_size
        self.runner = ModelRunner(model, backend, self.device, dtype, group)
        if depth is not None:
            self.runner.depth = depth
        self.runner.allocate(num_blocks, max_rows, 2048, num_host_blocks)
        table = RequestTable(max_rows, self.block_size)
        self.masks = masks
        self._woken = threading.Event()
        if grammars:
            vocabulary = read_beside(model_path, model_config.vocab_size, model_config.eos_ids)
            self.masks = Masks(Compiler(vocabulary), self._woken.set)
        limits = Limits(10_000_000, budget, num_blocks, kv_epoch=1, num_host_blocks=num_host_blocks)
        self.engine = Engine(self.runner, table, limits, self.masks)
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        self.engine.open()
        self._handles: Iterator[int] = count(1)
        self._blocks: Iterator[int] = iter(range(1, self.num_blocks))

    def admit(
        self,
        prompt: Sequence[int],
        max_new: int,
        *,
        sampling: Sampling = GREEDY,
        generated: Sequence[int] = (),
        prompt_logprobs: bool = False,
        prompt_top_n: int = 0,
        grammar: Grammar | None = None,
        **stopping: object,
    ) -> Admit:
        """Blocks for the whole answer, never given out twice until `reset`."""
        needed = (len(prompt) + max_new) // self.block_size + 1
        return Admit(
            handle=next(self._handles),
            prompt_ids=pack(prompt),
            generated_ids=pack(generated),
            cached_len=0,
            blocks=pack([next(self._blocks) for _ in range(needed)]),
            sampling=sampling,
            stopping=Stopping(max_new_tokens=max_new, **stopping),  # type: ignore[arg-type]
            prompt_logprobs=prompt_logprobs,
            prompt_top_n=prompt_top_n,
            grammar=grammar,
        )

    def run(
        self, admits: Sequence[Admit], *, stagger: int = 0, errors: dict[int, RowError] | None = None
    ) -> list[Answer]:
        """Run the requests together, or `stagger` steps apart; answers in their order. Without `errors`, by handle, to
        put them into, there may be none."""
        waiting = list(admits)
        answers = {admit.handle: Answer([], EndReason.RUNNING, []) for admit in admits}
        steps = 0
        engine = self.engine
        while True:
            while waiting and (not stagger or steps >= stagger * (len(admits) - len(waiting))):
                engine.apply(Command(admit=[waiting.pop(0)]))
            plan = engine.plan() if engine.num_in_flight < engine.depth else None
            if plan is not None:
                engine.launch(plan)
            steps += 1
            if engine.num_in_flight and (engine.num_in_flight >= engine.depth or plan is None):
                step = engine.collect()
                for part in step.prompt_logprobs:
                    answers[part.handle].prompt.append(part)
                self._note(step.errors, errors)
                for index, handle in enumerate(step.handles):
                    before = answers[handle]
                    answers[handle] = Answer(
                        [*before.ids, step.token_ids[index]],
                        step.end_of(index),
                        [*before.logprobs, step.logprobs[index]],
                        before.prompt,
                    )
            elif plan is None and engine.has_errors:
                step = engine.idle_step()
                assert step is not None
                self._note(step.errors, errors)
            elif plan is None and engine.num_held:
                self._woken.wait(0.01)
                self._woken.clear()
            elif plan is None and not waiting:
                return [answers[admit.handle] for admit in admits]

    @staticmethod
    def _note(found: Sequence[RowError], errors: dict[int, RowError] | None) -> None:
        if found and errors is None:
            raise AssertionError(found)
        if errors is not None:
            errors.update((error.handle, error) for error in found)
