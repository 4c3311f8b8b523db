"""Two ranks of a tiny model, of which one runs out of memory, hangs, falls silent or dies: both start again, or end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import grpc
import pytest

from benchmarks.process import free_port
from tests.conftest import Measured
from tests.e2e.client import Client
from tests.e2e.failures import LIKELY_S, SHARD, Faults, Switch, Trap, Undisturbed, broken_midway, fragile
from tests.e2e.servers import START_S, Process, Whole, running, shard_command, until, wait_until
from tests.e2e.workload import Request
from tests.fakes.tiny_model import write_tiny_llama
from tgi.proto.v4 import generate_pb2 as pb
from tgi.proto.v4 import generate_pb2_grpc as rpc
from tgi.shard_client.codec import Codec
from tgi.shard_client.messages import Admit, Command, Sampling, Stopping
from tgi.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.failures, pytest.mark.row("C: Supervision, exit codes, signals")]

LENGTH = 200
EARLY = 20
STEP_MS = 15


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), seed=37)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


class TwoRankFaults(Faults):
    def __init__(self, directory: Path) -> None:
        self.slow = Switch(directory, "slow", ms=STEP_MS)
        self.leader_oom = Trap(directory, "oom", min_rows=4)
        (directory / "1").mkdir()
        self.follower_oom = Trap(directory / "1", "oom", min_rows=4, rank=1)
        self.follower_hang = Trap(directory / "1", "hang", min_rows=4, rank=1)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> TwoRankFaults:
    return TwoRankFaults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def server(model: Path, faults: TwoRankFaults) -> Iterator[Whole]:
    with fragile(model, faults.specs, "--num-shard", "2") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Whole, tokenizer: Tokenizer) -> Undisturbed:
    greedy = {"max_new_tokens": LENGTH, "ignore_eos": True, "top_n_tokens": 2}
    sampled = {**greedy, "top_n_tokens": 5, "do_sample": True, "temperature": 0.9, "top_k": 5, "seed": 3}
    requests = [Request("generate", f"hello {n}", True, sampled if n % 2 else greedy) for n in range(6)]

    async def run() -> Undisturbed:
        async with Client(server.url) as client:
            return await Undisturbed.measure(client, tokenizer, requests)

    return asyncio.run(run())


def ranks(server: Whole) -> dict[int, int]:
    """Process ids by rank."""
    found: dict[int, int] = {}
    for pid, command in server.launcher.family().items():
        with contextlib.suppress(OSError):
            if SHARD in command:
                words = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
                found |= {rank: pid for rank in (0, 1) if f"RANK={rank}".encode() in words}
    return found


def scale(server: Whole) -> float:
    """The --budget-scale of the shards that run."""
    words = server.launcher.family()[ranks(server)[0]].split()
    return float(words[words.index("--budget-scale") + 1]) if "--budget-scale" in words else 1.0


def disturbed(
    server: Whole, faults: TwoRankFaults, undisturbed: Undisturbed, what: str, disturb: Callable[[], Awaitable[None]]
) -> float:
    """Break a rank while the streams run. -> their longest pause, seconds."""
    before = ranks(server)
    gap_s = asyncio.run(broken_midway(server, faults, undisturbed, EARLY, what, disturb))
    after = ranks(server)
    assert len(after) == 2
    assert not set(after.values()) & set(before.values()), "all ranks are started again"
    assert gap_s < 5 * LIKELY_S
    return gap_s


def sprung(trap: Trap) -> Callable[[], Awaitable[None]]:
    async def spring() -> None:
        trap.spring()
        await until(lambda: trap.has_sprung, "the rank breaks")

    return spring


def signalled(server: Whole, rank: int, number: signal.Signals) -> Callable[[], Awaitable[None]]:
    async def send() -> None:
        os.kill(ranks(server)[rank], number)

    return send


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(
    server: Whole, faults: TwoRankFaults, undisturbed: Undisturbed, measured: Measured, rank: int
) -> None:
    gap_s = disturbed(server, faults, undisturbed, f"rank {rank} killed", signalled(server, rank, signal.SIGKILL))
    measured(f"rank {rank} of 2 killed: time until tokens flow again", gap_s, "s")


@pytest.mark.row("G: 7 One failing request")
@pytest.mark.parametrize(("name", "rank"), [("leader_oom", 0), ("follower_oom", 1)])
def test_a_rank_without_memory(
    server: Whole, faults: TwoRankFaults, undisturbed: Undisturbed, measured: Measured, name: str, rank: int
) -> None:
    """Its code says so, and the group comes back with smaller steps."""
    before = scale(server)
    gap_s = disturbed(server, faults, undisturbed, name, sprung(getattr(faults, name)))
    assert f"ShardFailed: rank {rank}: " in server.log
    assert scale(server) == pytest.approx(0.9 * before)
    measured(f"rank {rank} of 2 without memory: time until tokens flow again", gap_s, "s")


@pytest.mark.parametrize("how", ["hung", "stopped"])
def test_a_follower_that_stands_still(
    server: Whole, faults: TwoRankFaults, undisturbed: Undisturbed, measured: Measured, how: str
) -> None:
    """Rank 0 waits for it in the midst of a step, and is found hung, or it is found silent itself."""
    before = scale(server)
    stands_still = sprung(faults.follower_hang) if how == "hung" else signalled(server, 1, signal.SIGSTOP)
    gap_s = disturbed(server, faults, undisturbed, how, stands_still)
    assert scale(server) == before
    measured(f"rank 1 of 2 {how} (limit 2 s): time until tokens flow again", gap_s, "s")


@contextlib.contextmanager
def group(model: Path, directory: str, faults: str) -> Iterator[tuple[list[Process], str]]:
    """Two ranks without a launcher, warm, and the path of the first one's socket."""
    prefix, port = str(Path(directory, "s")), free_port()
    command = shard_command(model, "--dtype", "float32", "--sharded", "--uds-path", prefix)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TGI_FAULTS": faults}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(ending(command, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
            for rank in range(2)
        ]
        processes[0].wait_for("Server started at")
        processes[1].wait_for("follows at")
        yield processes, f"{prefix}-0"


@contextlib.contextmanager
def ending(command: list[str], environment: dict[str, str]) -> Iterator[Process]:
    process = Process(command, environment)
    try:
        yield process
    finally:
        process.kill()


@pytest.mark.parametrize("moment", ["idle", "in a collective"])
def test_a_follower_ends_by_itself_when_the_first_rank_is_killed(model: Path, moment: str) -> None:
    """Also in the midst of a collective: rank 0 has told it of a step, and hangs before its own part."""
    with tempfile.TemporaryDirectory(prefix="tgi-") as directory:
        hung, requests = Path(directory, "hung"), SimpleQueue[pb.Command | None]()
        with group(model, directory, f"hang:step=1,once={hung}") as ((leader, follower), path):
            with grpc.insecure_channel(f"unix:{path}") as channel:
                stub = rpc.ShardServiceStub(channel)
                stub.Warmup(pb.WarmupRequest(max_batch_prefill_tokens=64, max_rows=2, max_total_tokens=64))
                steps = stub.Generate(iter(requests.get, None))
                if moment == "in a collective":
                    requests.put(one_request())
                    wait_until(hung.exists, "the first rank hangs")
                leader.popen.kill()
                assert follower.wait() == 1, follower.log
                requests.put(None)
                assert steps.code() is grpc.StatusCode.UNAVAILABLE
            assert leader.wait() == -signal.SIGKILL


def one_request() -> pb.Command:
    admit = Admit(1, b"\5\0\0\0", b"", 0, b"\1\0\0\0", Sampling(), Stopping(4))
    return Codec().command(Command(admit=[admit]))


def test_an_unknown_fault_is_told_before_a_model_is_loaded(model: Path) -> None:
    with running(shard_command(model), {"TGI_FAULTS": "bang"}) as process:
        assert process.wait(START_S) == 1
    assert "TGI_FAULTS: 'bang' is not known" in process.lines[-1]
    assert "Loading" not in process.log
