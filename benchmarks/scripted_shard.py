"""A shard without a model: every row gets one token per step, as fast as window and pace allow. Knows no wire."""

from __future__ import annotations

import itertools
import threading
import time
from array import array

from tgi.enums import EndReason, Phase
from tgi.server.engine.outbox import Outbox
from tgi.shard_client.messages import (
    Command,
    Health,
    Opening,
    ShardInfo,
    Step,
    WarmupRequest,
    WarmupResult,
)

BLOCK_SIZE = 16
NUM_BLOCKS = 1 << 17
EPOCH = 1


class ScriptedShard:
    """What V4Service asks of a shard. One thread makes the steps; a lock guards rows and the acknowledged step."""

    tamper = None  # what it sends is never broken on purpose

    def __init__(self, token_ids: list[int], vocab_size: int, max_rows: int, window: int, step_s: float) -> None:
        self._ids = itertools.cycle(token_ids)
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._window = window
        self._step_s = step_s
        self._changed = threading.Condition()
        self._rows: dict[int, int] = {}  # handle -> tokens left
        self._seen = 0
        self._number = 0
        self._outbox: Outbox | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="steps", daemon=True).start()

    def info(self) -> ShardInfo:
        return ShardInfo(
            model_type="scripted",
            dtype="float32",
            device_type="cpu",
            attention="paged",
            block_size=BLOCK_SIZE,
            vocab_size=self._vocab_size,
            supports_chunking=True,
            prefix_caching=True,
            speculate=0,
            world_size=1,
            max_position_embeddings=1 << 16,
            prompt_logprobs=False,
        )

    def health(self) -> Health:
        return Health(phase=Phase.IDLE, step=self._number, since_s=0.0, hung_after_s=60.0)

    def warmup(self, request: WarmupRequest) -> WarmupResult:
        total = request.max_total_tokens or 1 << 16
        capacity = NUM_BLOCKS * BLOCK_SIZE
        return WarmupResult(
            request.max_input_tokens or total - 1, total, capacity, NUM_BLOCKS, BLOCK_SIZE, self._max_rows
        )

    def clear(self) -> None:
        pass

    def open_stream(self, outbox: Outbox, owner: str = "") -> None:
        opening = Opening(self._window, self._max_rows, NUM_BLOCKS, BLOCK_SIZE)
        with self._changed:
            self._rows, self._seen, self._number, self._outbox = {}, 0, 0, outbox
            outbox.put(Step(0, EPOCH, opening=opening, free_rows=self._max_rows))

    def close_stream(self, outbox: Outbox) -> None:
        with self._changed:
            if outbox is self._outbox:
                self._outbox, self._rows = None, {}

    def post(self, outbox: Outbox, command: Command) -> None:
        with self._changed:
            if outbox is not self._outbox:
                return
            self._seen = command.seen
            for handle in command.cancel:
                self._rows.pop(handle, None)
            for admit in command.admit:
                self._rows[admit.handle] = admit.stopping.max_new_tokens - len(admit.generated_ids) // 4
            self._changed.notify()

    def _run(self) -> None:
        due = time.perf_counter()
        while True:
            with self._changed:
                while not self._rows or self._number - self._seen >= self._window:
                    self._changed.wait()
                step, outbox = self.make_step(), self._outbox
            if outbox is not None:
                outbox.put(step)
            now = time.perf_counter()
            due = max(due + self._step_s, now)
            if due > now:
                time.sleep(due - now)

    def make_step(self) -> Step:
        """The next step of the rows as they are."""
        self._number += 1
        count = len(self._rows)
        step = Step(
            self._number,
            EPOCH,
            handles=array("Q", self._rows),
            token_ids=array("I", itertools.islice(self._ids, count)),
            logprobs=array("f", bytes(4 * count)),
            rows_running=count,
            free_rows=self._max_rows - count,
        )
        ended = [handle for handle, left in self._rows.items() if left == 1]
        if ended:
            ends = [EndReason.LENGTH if left == 1 else EndReason.RUNNING for left in self._rows.values()]
            step.ends = bytes(ends)
            for handle in ended:
                del self._rows[handle]
        for handle in self._rows:
            self._rows[handle] -= 1
        return step
