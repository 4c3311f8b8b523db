"""Rank 0 tells the other ranks what to run. Plans hold every decision of the host, so all ranks launch the same work
in the same order; only rank 0 samples, and its ids come back by a broadcast on the device. Who sits a step out is known
to rank 0 alone, and late: the broadcast always has an id for every row that the plan lets choose, and one that is no
token leaves its row as it was.

Plans travel over one TCP connection per follower, on the loopback interface inside a host: one mechanism for one host
and for many, and never through the collective library, whose queue belongs to the forward. A plan is sent before rank 0
launches, so its way is hidden behind the launch.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct

import msgspec
import numpy as np
import torch

from tgi.enums import Phase
from tgi.errors import StartupError, TgiError
from tgi.server.batch.step import RowChanges, Scoring, StepPlan
from tgi.server.distributed.group import Group
from tgi.server.engine.device import Chosen, Constraint, Device
from tgi.server.engine.liveness import Liveness
from tgi.server.engine.runner import ModelRunner
from tgi.shard_client.messages import Admit, BlockMoves

log = logging.getLogger(__name__)

LENGTH = struct.Struct("<I")
TOKEN_BYTES = 16
CONNECT_TIMEOUT_S = 60.0
GREETING_TIMEOUT_S = 5.0  # the greeting is sent with the connection


class GroupBroken(TgiError):
    """A rank is gone. Ranks live and die together."""


class _Blocks(msgspec.Struct, frozen=True, array_like=True):
    row: int
    first: int
    numbers: bytes  # int32


class _Changes(msgspec.Struct, frozen=True, array_like=True, tag="changes"):
    blocks: list[_Blocks]
    moves: BlockMoves


class _Scoring(msgspec.Struct, frozen=True, array_like=True):
    counts: bytes
    targets: bytes
    top_n: int


class _Launch(msgspec.Struct, frozen=True, array_like=True, tag="launch"):
    number: int
    handles: bytes
    rows: bytes
    starts: bytes
    query_lens: bytes
    samples: bytes
    from_device: bytes
    ids: bytes
    scoring: _Scoring | None


class _Allocate(msgspec.Struct, frozen=True, array_like=True, tag="allocate"):
    num_blocks: int
    max_rows: int
    max_row_tokens: int
    num_host_blocks: int


class _FreeMemory(msgspec.Struct, frozen=True, array_like=True, tag="free_memory"):
    """Take part in the collective that finds the smallest free memory."""


class _Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """The end: the follower leaves its loop."""


_Message = _Changes | _Launch | _Allocate | _FreeMemory | _Stop


class Wire:
    """Length-prefixed messages over one socket."""

    def __init__(self, connection: socket.socket) -> None:
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._decoder = msgspec.msgpack.Decoder(_Message)

    def send(self, payload: bytes) -> None:
        try:
            self._socket.sendall(LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise GroupBroken(f"a rank of this group has gone away: {error}") from error

    def receive(self) -> _Message:
        (length,) = LENGTH.unpack(self.read(LENGTH.size))
        return self._decoder.decode(self.read(length))

    def read(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            try:
                piece = self._socket.recv(length - len(received))
            except OSError as error:
                raise GroupBroken(f"rank 0 of this group has gone away: {error}") from error
            if not piece:
                raise GroupBroken("rank 0 of this group has gone away")
            received += piece
        return bytes(received)

    def close(self) -> None:
        self._socket.close()


def _encode_plan(plan: StepPlan) -> _Launch:
    scoring = plan.scoring
    return _Launch(
        plan.number,
        plan.handles.tobytes(),
        plan.rows.tobytes(),
        plan.starts.tobytes(),
        plan.query_lens.tobytes(),
        plan.samples.tobytes(),
        plan.from_device.tobytes(),
        plan.ids.tobytes(),
        None if scoring is None else _Scoring(scoring.counts.tobytes(), scoring.targets.tobytes(), scoring.top_n),
    )


def _decode_plan(message: _Launch) -> StepPlan:
    sent = message.scoring
    scoring = None
    if sent is not None:
        scoring = Scoring(np.frombuffer(sent.counts, np.int64), np.frombuffer(sent.targets, np.int64), sent.top_n)
    return StepPlan(
        number=message.number,
        handles=np.frombuffer(message.handles, np.uint64),
        rows=np.frombuffer(message.rows, np.int64),
        starts=np.frombuffer(message.starts, np.int64),
        query_lens=np.frombuffer(message.query_lens, np.int64),
        samples=np.frombuffer(message.samples, np.bool_),
        from_device=np.frombuffer(message.from_device, np.bool_),
        ids=np.frombuffer(message.ids, np.int64),
        scoring=scoring,
    )


class LeaderDevice:
    """The Device of rank 0: tells the followers, then does the same itself. A world of one has no followers."""

    def __init__(self, runner: ModelRunner, followers: list[Wire], launched_by: Device | None = None) -> None:
        """`launched_by`: what computes the steps instead of `runner`, in tests."""
        self._runner = runner
        self._device: Device = runner if launched_by is None else launched_by
        self.followers = followers
        self._encoder = msgspec.msgpack.Encoder()
        self.depth = runner.depth

    def _tell(self, message: _Message) -> None:
        if self.followers:
            payload = self._encoder.encode(message)
            for follower in self.followers:
                follower.send(payload)

    def check(self, admit: Admit) -> str | None:
        return self._device.check(admit)

    def apply(self, changes: RowChanges) -> None:
        # Followers keep no sampling state: of new and removed rows they need the blocks alone.
        if changes.blocks or changes.moves:
            blocks = [_Blocks(row, first, numbers.tobytes()) for row, first, numbers in changes.blocks]
            self._tell(_Changes(blocks, changes.moves))
        self._device.apply(changes)

    def launch(self, plan: StepPlan) -> object:
        self._tell(_encode_plan(plan))
        return self._device.launch(plan)

    def forward(self, plan: StepPlan) -> object:
        # Followers are told nothing of choices: where theirs are due they wait on the device for what rank 0 sends.
        self._tell(_encode_plan(plan))
        return self._device.forward(plan)

    def has_forwarded(self, launched: object) -> bool:
        return self._device.has_forwarded(launched)

    def choose(self, launched: object, constraint: Constraint | None = None) -> None:
        self._device.choose(launched, constraint)

    def collect(self, launched: object) -> Chosen:
        return self._device.collect(launched)

    def idle(self) -> None:
        self._device.idle()

    # --- warm-up -----------------------------------------------------------

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    @property
    def max_blocks(self) -> int:
        return self._runner.max_blocks

    def allocate(self, num_blocks: int, max_rows: int, max_row_tokens: int, num_host_blocks: int = 0) -> None:
        self._tell(_Allocate(num_blocks, max_rows, max_row_tokens, num_host_blocks))
        self._runner.allocate(num_blocks, max_rows, max_row_tokens, num_host_blocks)

    def smallest(self, free_bytes: int) -> int:
        """The minimum of a number over the ranks; followers answer with their own free memory."""
        self._tell(_FreeMemory())
        return _smallest(self._runner, free_bytes)

    def stop(self) -> None:
        try:
            self._tell(_Stop())
        except GroupBroken:
            log.warning("a follower had gone before the stop")
        for follower in self.followers:
            follower.close()


def _smallest(runner: ModelRunner, free_bytes: int) -> int:
    if runner.group.world_size == 1:
        return free_bytes
    gathered = runner.group.all_gather(torch.tensor([free_bytes], dtype=torch.int64, device=runner.device), dim=0)
    return int(gathered.min())


def gather_followers(group: Group, master_addr: str, device: torch.device) -> list[Wire]:
    """Rank 0: listen on a free port, tell it and a secret to the group, wait for every other rank."""
    if group.world_size == 1:
        return []
    try:
        server = socket.create_server((master_addr, 0))
    except OSError as error:
        raise StartupError(f"rank 0 cannot listen at {master_addr}: {error}; check MASTER_ADDR") from error
    with server:
        server.settimeout(CONNECT_TIMEOUT_S)
        secret = secrets.token_bytes(TOKEN_BYTES)
        port = int(server.getsockname()[1])
        greeting = torch.tensor([port, *secret], dtype=torch.int64, device=device)
        group.broadcast_(greeting)
        wires: list[Wire] = []
        while len(wires) < group.world_size - 1:
            try:
                connection, _ = server.accept()
            except TimeoutError as error:
                raise StartupError(
                    f"only {len(wires)} of {group.world_size - 1} other ranks connected to rank 0 "
                    f"in {CONNECT_TIMEOUT_S:.0f} s"
                ) from error
            wire = Wire(connection)
            if _knows(connection, wire, secret):
                wires.append(wire)
            else:
                wire.close()
    return wires


def _knows(connection: socket.socket, wire: Wire, secret: bytes) -> bool:
    """A port is open to every process of the host: only those that the group has told may join. A stranger may say
    nothing, or leave."""
    connection.settimeout(GREETING_TIMEOUT_S)
    try:
        return hmac.compare_digest(wire.read(TOKEN_BYTES), secret)
    except GroupBroken:
        return False
    finally:
        connection.settimeout(None)


def join_leader(group: Group, master_addr: str, device: torch.device) -> Wire:
    greeting = torch.zeros(1 + TOKEN_BYTES, dtype=torch.int64, device=device)
    group.broadcast_(greeting)
    port, *secret = greeting.tolist()
    try:
        connection = socket.create_connection((master_addr, port), CONNECT_TIMEOUT_S)
        connection.sendall(bytes(secret))
    except OSError as error:
        raise StartupError(f"rank 0 at {master_addr}:{port} cannot be reached: {error}") from error
    connection.settimeout(None)
    return Wire(connection)


def follow(
    runner: ModelRunner,
    wire: Wire,
    free_bytes: int,
    liveness: Liveness | None = None,
    launched_by: Device | None = None,
) -> None:
    """What every rank but 0 does until the leader says stop. Raises GroupBroken when the leader is gone.

    `launched_by`: what launches the steps instead of `runner`, in tests.
    """
    liveness = liveness or Liveness()
    try:
        liveness.follow(Phase.IDLE)
        while not isinstance(message := wire.receive(), _Stop):
            liveness.follow(Phase.RUNNING, message.number if isinstance(message, _Launch) else None)
            if isinstance(message, _Launch):
                (launched_by or runner).launch(_decode_plan(message))
            else:
                _obey(runner, message, free_bytes)
            liveness.follow(Phase.IDLE)
    finally:
        wire.close()


def _obey(runner: ModelRunner, message: _Changes | _Allocate | _FreeMemory, free_bytes: int) -> None:
    match message:
        case _Changes():
            blocks = [(entry.row, entry.first, np.frombuffer(entry.numbers, np.int32)) for entry in message.blocks]
            runner.apply(RowChanges([], [], blocks, message.moves))
        case _Allocate():
            runner.allocate(message.num_blocks, message.max_rows, message.max_row_tokens, message.num_host_blocks)
        case _FreeMemory():
            _smallest(runner, free_bytes)
