"""What generate.v4 costs per step at batch 256: codec, protobuf and gRPC, on the router's and on the shard's side.

A scripted shard in a process of its own makes a step every few milliseconds; this process reads it as the router does,
and answers as the router does: every half window a Command with what it has seen and further blocks for some rows.
"""

from __future__ import annotations

import sys
import tempfile
import time
from array import array
from pathlib import Path

import uvloop

from benchmarks.process import Child, running
from benchmarks.record import Figure, argument_parser, report
from benchmarks.scripted_shard import ScriptedShard
from tgi.server.engine.outbox import Outbox
from tgi.shard_client.client import ShardClient
from tgi.shard_client.messages import Admit, Command, Sampling, Step, Stopping

ROWS = 256
WARM_UP = 200  # steps
PORTION = 16  # tokens that one further block holds


async def measure(socket: str, shard: Child, steps: int) -> tuple[float, float, int]:
    """CPU microseconds per step of router and shard, and how many messages the steps came in."""
    client = ShardClient.connect(socket)
    stream = client.stream()
    opening = (await anext(stream)).opening
    assert opening is not None
    stream.send(Command(admit=[admit(handle, WARM_UP + steps) for handle in range(1, ROWS + 1)]))
    router_began = shard_began = 0.0
    messages = tokens = 0
    async for step in stream:
        assert not step.errors
        if step.number <= WARM_UP:
            router_began, shard_began = time.process_time(), shard.cpu_s()
        else:
            messages += 1
            tokens += len(step.token_ids)
        if step.number % (opening.window // 2) == 0:
            stream.send(answer_to(step, opening.window // 2))
        if step.number >= WARM_UP + steps:
            break
    assert tokens >= (steps - opening.window) * ROWS
    router_us = 1e6 * (time.process_time() - router_began) / steps
    shard_us = 1e6 * (shard.cpu_s() - shard_began) / steps
    await stream.close()
    await client.close()
    return router_us, shard_us, messages


def admit(handle: int, max_new_tokens: int) -> Admit:
    ids = array("I", range(128)).tobytes()
    blocks = array("I", range(1, 10)).tobytes()
    return Admit(handle, ids, b"", 0, blocks, Sampling(), Stopping(max_new_tokens))


def answer_to(step: Step, steps: int) -> Command:
    """Each row gets a block per PORTION tokens: so some of them do in every Command."""
    count = ROWS * steps // PORTION
    begin = step.number // steps * count
    rows = (step.handles[(begin + index) % len(step.handles)] for index in range(count)) if step.handles else ()
    return Command(seen=step.number, grow=[(handle, b"\1\0\0\0") for handle in rows])


def script_us() -> float:
    """What the scripted shard spends on making a step: part of the shard's figure, though not of the wire."""
    shard = ScriptedShard(list(range(100)), 100, ROWS, window=1, step_s=0.0)
    shard.open_stream(outbox := Outbox())
    shard.post(outbox, Command(admit=[admit(handle, 1 << 30) for handle in range(ROWS)]))
    began = time.process_time()
    for _ in range(1_000):
        shard.make_step()
    return 1e3 * (time.process_time() - began)


def main() -> None:
    parser = argument_parser(__doc__, "wire")
    parser.add_argument("--steps", type=int, default=2_000, help="steps that are measured (default: 2,000)")
    parser.add_argument("--step-ms", type=float, default=4.0, help="time between two steps (default: 4)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        socket = str(Path(directory) / "shard-0")
        command = [sys.executable, "-m", "benchmarks.scripted_process", "--socket", socket, "--vocab-size", "32000"]
        command += ["--token-ids", *map(str, range(1_000, 2_000)), "--step-ms", str(arguments.step_ms)]
        with running(command, "listening") as shard:
            router_us, shard_us, messages = uvloop.run(measure(socket, shard, arguments.steps))
    script = script_us()
    note = f"{arguments.steps} steps in {messages} messages"
    figures = [
        Figure("router's side", router_us / 1e3, "ms CPU per step", note=note),
        Figure("shard's side", shard_us / 1e3, "ms CPU per step", note="the script that makes the step included"),
        Figure("the script alone", script / 1e3, "ms CPU per step"),
        Figure("wire, both sides", (router_us + shard_us - script) / 1e3, "ms CPU per step", "<= 0.35"),
    ]
    report(arguments, "wire", f"Wire: generate.v4 at batch {ROWS}", figures)


if __name__ == "__main__":
    main()
