"""ScriptedShard: a generate.v4 server on a Unix socket without a model, for the router's tests and benchmarks.

Token i of an answer is a function of the prompt and i alone, so what a client must see is known beforehand, however
often the request is preempted and resumed. The shard keeps the seven rules of the stream and writes down, in
`violations`, where the router breaks them. ShardProcess is the same in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tgi.enums import EndReason, Phase
from tgi.proto.v4 import generate_pb2 as pb
from tgi.proto.v4 import generate_pb2_grpc as rpc
from tgi.server.rpc.codec import Codec
from tgi.shard_client.messages import (
    Admit,
    Command,
    Health,
    Opening,
    PromptLogprobs,
    RowError,
    ShardInfo,
    Step,
    Timings,
    TopTokens,
    WarmupResult,
)

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
SCRATCH_BLOCK = 0
LOGPROB = -0.25


def scripted_token(prompt_ids: bytes, index: int) -> int:
    """Token `index` of the answer to a prompt: a lower-case letter of the byte tokenizer."""
    return 97 + (zlib.crc32(prompt_ids) + 7 * index + index * index // 5) % 26


def scripted_tokens(prompt_ids: bytes, count: int) -> list[int]:
    return [scripted_token(prompt_ids, index) for index in range(count)]


def scripted_text(prompt_ids: bytes, count: int) -> str:
    return bytes(scripted_tokens(prompt_ids, count)).decode()


@dataclass(slots=True)
class Script:
    """What the shard has and does. Changed between requests it holds for those admitted from then on."""

    step_s: float = 0.0  # how long a step takes
    window: int = 4
    max_rows: int = 256
    num_blocks: int = 4096
    block_size: int = 16
    prefill_tokens: int = 4096  # that one step reads
    token: Callable[[bytes, int], int] = scripted_token
    eos_at: Callable[[bytes], int | None] = lambda prompt_ids: None  # index of the token that is EOS instead
    nan_at: Callable[[bytes], int | None] = lambda prompt_ids: None  # index at which the logits are not numbers
    error_at: Callable[[bytes], int | None] = lambda prompt_ids: None  # index at which the row fails instead
    vocab_size: int = 49152
    max_position: int = 2048
    supports_chunking: bool = True
    check_memory: bool = True  # follow what every slot of the cache holds; off for benchmarks


@dataclass(slots=True)
class Row:
    admit: Admit
    prompt_len: int
    ids: array[int]  # prompt and generated
    blocks: list[int]
    computed: int  # tokens whose KV is written
    hashes: list[int] = field(default_factory=list)  # of ids[: i + 1], as far as computed


class BrokenRule(AssertionError):
    """The router has broken a rule of the stream."""


class ScriptedModel:
    """The engine: rows, commands and steps, one per stream. No threads and no sockets: tests may drive it by hand."""

    def __init__(self, script: Script, kv_epoch: int, slots: dict[tuple[int, int], int]) -> None:
        self.script = script
        self.kv_epoch = kv_epoch
        self.number = 0
        self.seen = 0
        self.rows: dict[int, Row] = {}
        self.violations: list[str] = []
        self._slots = slots  # (block, offset) -> hash of the ids up to the one stored there
        self._last_handle = 0
        self._holders: Counter[int] = Counter()  # block -> live rows that hold it
        self._errors: list[RowError] = []
        self._stalled = False

    def opening(self) -> Step:
        script = self.script
        return Step(
            0,
            self.kv_epoch,
            free_rows=script.max_rows,
            opening=Opening(script.window, script.max_rows, script.num_blocks, script.block_size),
        )

    def apply(self, command: Command) -> None:
        if command:  # a mere "seen" changes nothing for rows that wait
            self._stalled = False
        if command.seen > self.number:
            self._note(f"seen {command.seen} though only {self.number} steps were sent")
        self.seen = max(self.seen, command.seen)
        for handle in command.cancel:
            self._remove(handle)
        for handle, packed in command.grow:
            row = self.rows.get(handle)
            if row is not None:
                self._hand(handle, row, packed)
        for admit in command.admit:
            self._admit(admit)

    @property
    def may_step(self) -> bool:
        return self.number < self.seen + self.script.window

    def step(self, handles: Sequence[int] | None = None, chunk_lens: Mapping[int, int] | None = None) -> Step | None:
        """The next step's results; None when nothing can run and that has been said.

        `handles` and `chunk_lens` (handle -> prompt tokens) are for stepping by hand: exactly these rows.
        """
        started = time.perf_counter_ns()
        if not self.rows and not self._errors:
            return None
        step = Step(self.number + 1, self.kv_epoch)
        step.errors, self._errors = self._errors, []
        ends = bytearray()
        budget = self.script.prefill_tokens
        ran = prefill = 0
        for handle, row in list(self.rows.items()):
            left = len(row.ids) - row.computed
            room = len(row.blocks) * self.script.block_size - row.computed
            if handles is not None:
                take = min(left, room, (chunk_lens or {}).get(handle, left)) if handle in handles else 0
            else:
                take = min(left, room, budget if left > 1 else left)
            if take <= 0:
                continue
            ran += 1
            if left > 1:
                budget -= take
                prefill += take
            self._compute(handle, row, take)
            if take < left:
                step.progress_handles.append(handle)
                step.computed_len.append(row.computed)
                continue
            self._choose(handle, row, step, ends)
        if not ran and not step.errors:
            if self._stalled or handles is not None:
                return None
            self._stalled = True
        self.number += 1
        if any(ends):
            step.ends = bytes(ends)
        step.rows_running = ran
        step.rows_waiting = len(self.rows) - sum(1 for row in self.rows.values() if self._has_room(row))
        step.free_rows = self.script.max_rows - len(self.rows)
        step.timings = Timings(
            forward_ns=time.perf_counter_ns() - started,
            steps=1,
            prefill_tokens=prefill,
            decode_tokens=len(step.handles),
        )
        return step

    def _admit(self, admit: Admit) -> None:
        script, handle = self.script, admit.handle
        given = admit.prompt_ids + admit.generated_ids
        num_given = len(given) // 4
        if handle <= self._last_handle:
            self._note(f"handle {handle} after {self._last_handle} does not count up (rule 4)")
        self._last_handle = max(handle, self._last_handle)
        if admit.cached_len % script.block_size or admit.cached_len >= num_given:
            self._note(f"cached_len {admit.cached_len} of {num_given} ids in blocks of {script.block_size} (rule 5)")
        if len(self.rows) >= script.max_rows:
            self._note(f"admitted beyond {script.max_rows} rows")
            self._errors.append(RowError(handle, "invalid", "no free row"))
            return
        if num_given - len(admit.prompt_ids) // 4 >= admit.stopping.max_new_tokens:
            self._note(f"handle {handle} has nothing left to generate")
        ids = array("I")
        ids.frombytes(given)
        row = Row(admit, len(admit.prompt_ids) // 4, ids, [], admit.cached_len)
        self._hand(handle, row, admit.blocks)
        if script.check_memory:
            self._read(handle, row, admit.cached_len)
        self.rows[handle] = row

    def _remove(self, handle: int) -> None:
        row = self.rows.pop(handle, None)
        if row is not None:
            self._holders.subtract(row.blocks)

    def _hand(self, handle: int, row: Row, packed: bytes) -> None:
        blocks = [block for (block,) in struct.iter_unpack("<I", packed)]
        if blocks == [SCRATCH_BLOCK] and row.admit.stopping.max_new_tokens == 1:
            row.blocks += blocks  # a liveness probe of generate.v3
            return
        for block in blocks:
            if not SCRATCH_BLOCK < block < self.script.num_blocks:
                self._note(f"handle {handle} was given block {block} of {self.script.num_blocks}")
            self._holders[block] += 1
        row.blocks += blocks

    def _has_room(self, row: Row) -> bool:
        return len(row.blocks) * self.script.block_size > row.computed

    def _compute(self, handle: int, row: Row, take: int) -> None:
        if not self.script.check_memory:
            row.computed += take
            return
        self._read(handle, row, row.computed)
        size = self.script.block_size
        for block in row.blocks[row.computed // size : (row.computed + take - 1) // size + 1]:
            if self._holders[block] > 1:
                self._note(f"handle {handle} writes to block {block}, which another row holds (rule 5)")
        for position in range(row.computed, row.computed + take):
            previous = row.hashes[-1] if row.hashes else 0
            row.hashes.append(hash((previous, row.ids[position])))
            self._slots[row.blocks[position // size], position % size] = row.hashes[-1]
        row.computed += take

    def _read(self, handle: int, row: Row, length: int) -> None:
        """Every slot that the row attends to must hold its own token behind its own prefix."""
        size = self.script.block_size
        for position in range(len(row.hashes), length):
            previous = row.hashes[-1] if row.hashes else 0
            row.hashes.append(hash((previous, row.ids[position])))
        for position in range(length):
            block = row.blocks[position // size] if position // size < len(row.blocks) else SCRATCH_BLOCK
            if self._slots.get((block, position % size)) != row.hashes[position]:
                self._note(f"handle {handle} reads a slot that is not its own: position {position}, block {block}")
                return

    def _choose(self, handle: int, row: Row, step: Step, ends: bytearray) -> None:
        script, admit, stopping = self.script, row.admit, row.admit.stopping
        index = len(row.ids) - row.prompt_len
        if script.error_at(admit.prompt_ids) == index:
            step.errors.append(RowError(handle, "generation", f"scripted error at token {index}"))
            self._remove(handle)
            return
        end = EndReason.RUNNING
        if script.eos_at(admit.prompt_ids) == index and stopping.eos_ids:
            token = stopping.eos_ids[0]
        else:
            token = script.token(admit.prompt_ids, index)
        if script.nan_at(admit.prompt_ids) == index:
            end = EndReason.NAN
        elif token in stopping.eos_ids and not stopping.ignore_eos:
            end = EndReason.EOS
        elif token in stopping.stop_ids:
            end = EndReason.STOP_ID
        elif index + 1 >= stopping.max_new_tokens:
            end = EndReason.LENGTH
        step.handles.append(handle)
        step.token_ids.append(token)
        step.logprobs.append(LOGPROB)
        ends.append(end)
        if admit.top_n:
            ids = array("I", [token, *(i for i in range(admit.top_n) if i != token)][: admit.top_n])
            step.top_tokens.append(TopTokens(handle, 0, ids, array("f", [LOGPROB - i for i in range(admit.top_n)])))
        if admit.prompt_logprobs and index == len(admit.generated_ids) // 4:
            values = [float("nan"), *([-0.5] * (row.prompt_len - 1))]
            step.prompt_logprobs.append(PromptLogprobs(handle, 0, array("f", values)))
        if end is EndReason.RUNNING:
            row.ids.append(token)
        else:
            self._remove(handle)

    def _note(self, violation: str) -> None:
        self.violations.append(violation)


class ScriptedShard:
    """The server. `with ScriptedShard(path) as shard:`, or start() and stop()/kill(); may be started again.

    A restart has another `kv_epoch` and an empty cache, as a new process would; a new stream on the same server keeps
    both. `hold()` stops it before the next step, `let(n)` lets n steps through, `let()` all.
    """

    def __init__(self, uds_path: Path | str, script: Script | None = None) -> None:
        self.uds_path = str(uds_path)
        self.script = script or Script()
        self.violations: list[str] = []  # of all streams so far
        self.commands: list[Command] = []  # as they came, while `keep_commands`
        self.keep_commands = False
        self.streams_opened = 0
        self._epochs = itertools.count(zlib.crc32(self.uds_path.encode()) + 1)
        self._server: grpc.Server | None = None
        self._stream: _Stream | None = None
        self._lock = threading.Lock()
        self._gate = threading.Condition()
        self._allowed: float = float("inf")
        self.health_answer: Health | None = None  # None: well

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> ScriptedShard:
        assert self._server is None
        Path(self.uds_path).unlink(missing_ok=True)
        self._epoch = next(self._epochs)
        self._slots: dict[tuple[int, int], int] = {}
        server = grpc.server(futures.ThreadPoolExecutor(8, thread_name_prefix="scripted-shard"), options=UNLIMITED)
        rpc.add_ShardServiceServicer_to_server(_Service(self), server)
        if not server.add_insecure_port(f"unix:{self.uds_path}"):
            raise RuntimeError(f"cannot bind {self.uds_path}")
        server.start()
        self._server = server
        return self

    def stop(self) -> None:
        """End the stream in an orderly way, then the server."""
        self._end("the shard stops")

    def kill(self) -> None:
        """As a crash: everything in flight is lost, the socket is gone."""
        self._end(None)
        Path(self.uds_path).unlink(missing_ok=True)

    def _end(self, reason: str | None) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        if reason is None:
            stopping = server.stop(grace=None)
            self._close_stream()
        else:
            self._close_stream()
            stopping = server.stop(grace=5)
        stopping.wait()

    def __enter__(self) -> ScriptedShard:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- pace ----------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        with self._gate:
            self._allowed = 0

    def let(self, steps: float = float("inf")) -> None:
        with self._gate:
            self._allowed = steps if steps == float("inf") else self._allowed + steps
            self._gate.notify_all()

    def assert_rules_kept(self) -> None:
        if self.violations:
            raise BrokenRule("; ".join(self.violations[:5]))

    # --- the stream ------------------------------------------------------------------------------------------------

    def _open_stream(self) -> _Stream:
        with self._lock:
            previous = self._stream
            model = ScriptedModel(self.script, self._epoch, self._slots)
            model.violations = self.violations
            self._stream = stream = _Stream(self, model)
            self.streams_opened += 1
        if previous is not None:
            previous.close()
        stream.thread.start()
        return stream

    def _close_stream(self) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _pass(self, closed: threading.Event) -> bool:
        """Wait at the gate; False when the stream has ended meanwhile."""
        with self._gate:
            while self._allowed <= 0 and not closed.is_set():
                self._gate.wait(0.05)
            self._allowed -= 1
        return not closed.is_set()


class _Stream:
    """One Generate call: a thread that steps the model, a queue of commands in and one of steps out."""

    def __init__(self, shard: ScriptedShard, model: ScriptedModel) -> None:
        self.shard = shard
        self.model = model
        self.inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="scripted-steps", daemon=True)

    def close(self) -> None:
        self.closed.set()
        self.inbox.put(None)
        self.outbox.put(None)
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join()

    def _run(self) -> None:
        model, script = self.model, self.model.script
        self.outbox.put(model.opening())
        idle = True
        while not self.closed.is_set():
            self._take(wait=idle)
            if not model.may_step:
                idle = True
                continue
            if not self.shard._pass(self.closed):
                return
            self._take(wait=False)
            step = model.step()
            idle = step is None
            if step is None:
                self.shard.let(1) if self.shard._allowed != float("inf") else None  # nothing ran: not counted
                continue
            if script.step_s:
                self.closed.wait(script.step_s)
            self.outbox.put(step)

    def _take(self, wait: bool) -> None:
        try:
            command = self.inbox.get(block=wait)
            while command is not None:
                if self.shard.keep_commands:
                    self.shard.commands.append(command)
                self.model.apply(command)
                command = self.inbox.get_nowait()
        except queue.Empty:
            pass


class _Service(rpc.ShardServiceServicer):
    def __init__(self, shard: ScriptedShard) -> None:
        self._shard = shard
        self._codec = Codec()

    def Info(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoResponse:
        script = self._shard.script
        return self._codec.info(
            ShardInfo(
                model_type="llama",
                dtype="float32",
                device_type="cpu",
                attention="flashdecoding-ipex",
                block_size=script.block_size,
                vocab_size=script.vocab_size,
                supports_chunking=script.supports_chunking,
                prefix_caching=True,
                speculate=0,
                world_size=1,
                max_position_embeddings=script.max_position,
                prompt_logprobs=True,
            )
        )

    def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:
        return self._codec.health(self._shard.health_answer or Health(Phase.IDLE, 0, 0.0, 30.0))

    def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: grpc.ServicerContext
    ) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=[f"unix://{self._shard.uds_path}"])

    def Warmup(self, request: pb.WarmupRequest, context: grpc.ServicerContext) -> pb.WarmupResponse:
        script = self._shard.script
        asked = self._codec.warmup_request(request)
        tokens = (script.num_blocks - 1) * script.block_size
        if asked.max_batch_total_tokens is not None and asked.max_batch_total_tokens > tokens:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"only {tokens} tokens fit; lower --max-batch-total-tokens"
            )
        total = asked.max_total_tokens or min(script.max_position, tokens)
        return self._codec.warmup_result(
            WarmupResult(
                max_input_tokens=asked.max_input_tokens or total - 1,
                max_total_tokens=total,
                max_batch_total_tokens=tokens,
                num_blocks=script.num_blocks,
                block_size=script.block_size,
                max_rows=min(asked.max_rows, script.max_rows),
            )
        )

    def ClearCache(self, request: pb.ClearCacheRequest, context: grpc.ServicerContext) -> pb.ClearCacheResponse:
        return pb.ClearCacheResponse()

    def Generate(self, request_iterator: Iterator[pb.Command], context: grpc.ServicerContext) -> Iterator[pb.Step]:
        stream = self._shard._open_stream()
        context.add_callback(stream.close)

        def read() -> None:
            try:
                for message in request_iterator:
                    stream.inbox.put(self._codec.command(message))
            except Exception:  # gRPC raises bare exceptions when the peer is gone
                pass
            stream.close()

        threading.Thread(target=read, name="scripted-commands", daemon=True).start()
        while (step := stream.outbox.get()) is not None:
            yield self._codec.step(step)


class ShardProcess:
    """ScriptedShard in its own process, for benchmarks and real crashes. `with ShardProcess(path, "--rows", "64"):`"""

    def __init__(self, uds_path: Path | str, *flags: str) -> None:
        self.uds_path = str(uds_path)
        self._flags = flags
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> ShardProcess:
        command = [sys.executable, "-m", "tests.fakes.shard", "--uds", self.uds_path, *self._flags]
        root = Path(__file__).parent.parent.parent
        self.process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "ready":
            self.stop()
            raise RuntimeError("the scripted shard did not start")
        return self

    def kill(self) -> None:
        """SIGKILL: the socket stays behind, as after a crash."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(how)
            process.communicate()

    def __enter__(self) -> ShardProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uds", required=True, help="path of the socket")
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=65_536)
    parser.add_argument("--check-memory", action="store_true")
    given = parser.parse_args(arguments)
    script = Script(
        step_s=given.step_ms / 1e3,
        window=given.window,
        max_rows=given.rows,
        num_blocks=given.blocks,
        check_memory=given.check_memory,
    )
    stopped = threading.Event()

    def on_signal(*_: Any) -> None:
        stopped.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    with ScriptedShard(given.uds, script):
        print("ready", flush=True)
        stopped.wait()


if __name__ == "__main__":
    main()
