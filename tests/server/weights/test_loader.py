"""A rank's part goes into its parameter, in pieces, and nothing else is read."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest
import torch

from tgi.errors import StartupError
from tgi.server.weights import loader
from tgi.server.weights.dummy_checkpoint import NUM_VALUES, STD, DummyCheckpoint
from tgi.server.weights.loader import load_into
from tgi.server.weights.region import Region, bounds_of
from tgi.server.weights.tracked_checkpoint import TrackedCheckpoint


class RecordingCheckpoint:
    """Serves one tensor and notes how much each read took."""

    def __init__(self, tensor: torch.Tensor, *others: str) -> None:
        self.tensor = tensor
        self.others = others
        self.reads: list[int] = []

    def names(self) -> tuple[str, ...]:
        return ("t", *self.others)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, name: str, shape: tuple[int, ...], region: Region = ()) -> torch.Tensor:
        assert shape == tuple(self.tensor.shape)
        part = self.tensor[region]
        self.reads.append(part.numel())
        return part

    def close(self) -> None:
        pass


@pytest.mark.parametrize("region", [(), (slice(3, 50),), (slice(0, 64), slice(8, 24)), (slice(10, 10),)])
def test_pieces_are_bounded_and_make_the_whole(monkeypatch: pytest.MonkeyPatch, region: Region) -> None:
    monkeypatch.setattr(loader, "CHUNK_ELEMENTS", 100)
    checkpoint = RecordingCheckpoint(torch.randn(64, 32))
    destination = torch.full(checkpoint.tensor[region].shape, math.nan, dtype=torch.bfloat16)
    load_into(destination, checkpoint, "t", (64, 32), region)
    assert torch.equal(destination, checkpoint.tensor[region].bfloat16())
    assert sum(checkpoint.reads) == destination.numel()
    assert max(checkpoint.reads, default=0) <= 100


def test_a_row_longer_than_a_piece_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CHUNK_ELEMENTS", 4)
    checkpoint = RecordingCheckpoint(torch.randn(3, 32))
    destination = torch.empty(3, 32)
    load_into(destination, checkpoint, "t", (3, 32))
    assert torch.equal(destination, checkpoint.tensor)
    assert checkpoint.reads == [32, 32, 32]


def test_bounds_of_a_region() -> None:
    assert bounds_of((4, 6, 2), (slice(1, 3), slice(None, 4))) == ((1, 3), (0, 4), (0, 2))


def test_random_weights_are_the_same_for_every_rank() -> None:
    checkpoint = DummyCheckpoint(torch.bfloat16, torch.device("cpu"))
    whole = checkpoint.read("model.layers.0.mlp.up_proj.weight", (512, 256))
    again = checkpoint.read("model.layers.0.mlp.up_proj.weight", (512, 256), (slice(128, 256), slice(0, 64)))
    assert torch.equal(whole[128:256, :64], again)
    assert not torch.equal(whole, checkpoint.read("model.layers.1.mlp.up_proj.weight", (512, 256)))
    assert whole.isfinite().all()
    assert whole.float().std().item() == pytest.approx(STD, rel=0.02)
    assert torch.equal(checkpoint.read("model.norm.weight", (16,)), torch.ones(16, dtype=torch.bfloat16))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(value: float) -> None:
    tensor = torch.randn(64, 32)
    tensor[40, 5] = value
    with pytest.raises(StartupError, match="The weights of t hold values that are no finite numbers"):
        load_into(torch.empty(64, 32), RecordingCheckpoint(tensor), "t", (64, 32))


def test_numbers_that_the_dtype_cannot_hold_are_refused() -> None:
    tensor = torch.full((4, 4), -1e5)
    with pytest.raises(StartupError, match="reach 100000, which float16 cannot hold; choose --dtype bfloat16"):
        load_into(torch.empty(4, 4, dtype=torch.float16), RecordingCheckpoint(tensor), "t", (4, 4))
    load_into(torch.empty(4, 4, dtype=torch.bfloat16), RecordingCheckpoint(tensor), "t", (4, 4))


def test_large_but_finite_numbers_pass() -> None:
    """Together they exceed what float16 holds, none of them does."""
    tensor = torch.full((64, 32), 6e4)
    destination = torch.empty(64, 32, dtype=torch.float16)
    load_into(destination, RecordingCheckpoint(tensor), "t", (64, 32))
    assert torch.equal(destination, tensor.half())


def test_reading_uses_one_thread_and_gives_the_others_back() -> None:
    class Counting(RecordingCheckpoint):
        def read(self, name: str, shape: tuple[int, ...], region: Region = ()) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return super().read(name, shape, region)

    seen: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        load_into(torch.empty(2, 2), Counting(torch.ones(2, 2)), "t", (2, 2))
        with pytest.raises(StartupError):
            load_into(torch.empty(2, 2), Counting(torch.full((2, 2), math.nan)), "t", (2, 2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.usefixtures("two_threads")
def test_pieces_are_read_by_several_threads_at_once(monkeypatch: pytest.MonkeyPatch, inference: bool) -> None:
    class Meeting(RecordingCheckpoint):
        def read(self, name: str, shape: tuple[int, ...], region: Region = ()) -> torch.Tensor:
            if self.reads:  # the first is read alone, before any other
                together.wait()
            seen.add((threading.get_ident(), torch.get_num_threads()))
            return super().read(name, shape, region)

    monkeypatch.setattr(loader, "CHUNK_ELEMENTS", 64)
    seen: set[tuple[int, int]] = set()
    together = threading.Barrier(2, timeout=30)
    checkpoint = Meeting(torch.randn(10, 32))
    with torch.inference_mode(inference):  # as the shard loads
        destination = torch.empty(10, 32)
        load_into(destination, checkpoint, "t", (10, 32))
    assert torch.equal(destination, checkpoint.tensor)
    assert len({thread for thread, _ in seen} - {threading.get_ident()}) == 2
    assert {threads for _, threads in seen} == {1}


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_any_thread_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CHUNK_ELEMENTS", 64)
    tensor = torch.randn(64, 32)
    tensor[50, 5] = math.nan
    with pytest.raises(StartupError, match="hold values that are no finite numbers"):
        load_into(torch.empty(64, 32), RecordingCheckpoint(tensor), "t", (64, 32))
    assert torch.get_num_threads() == 2


def test_a_piece_of_random_weights_costs_no_more_than_itself() -> None:
    checkpoint = DummyCheckpoint(torch.float32, torch.device("cpu"))
    assert checkpoint.read("t", (1 << 40, 3), (slice(1 << 39, (1 << 39) + 2), slice(1, 2))).shape == (2, 1)
    many = NUM_VALUES // 2
    whole = checkpoint.read("t", (5, many))
    parts = [checkpoint.read("t", (5, many), (slice(row, row + 1),)) for row in range(5)]
    assert torch.equal(whole, torch.cat(parts))
    assert all(not torch.equal(parts[0], part) for part in parts[1:])


def test_what_nobody_read_is_named() -> None:
    def tracked(*left: str) -> TrackedCheckpoint:
        checkpoint = TrackedCheckpoint(RecordingCheckpoint(torch.ones(2, 2), *left))
        checkpoint.read("t", (2, 2))
        return checkpoint

    tracked().check_all_read()
    for harmless in (
        *("model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight", "h.0.attn.bias", "h.0.attn.masked_bias"),
        *("model.visual.blocks.0.weight", "vision_tower.x.weight", "mtp.layers.0.weight", "score.weight"),
    ):
        tracked(harmless).check_all_read()
    for wrong in ("model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "extra.weight"):
        with pytest.raises(StartupError, match=f"holds {wrong}, for which the model's configuration has no place"):
            tracked(wrong).check_all_read()
    with pytest.raises(StartupError, match=r"holds a, b, c and 2 more, for which"):
        tracked(*"edcba").check_all_read()
    tracked("model.layers.2.mlp.up_proj.weight").check_all_read(draft_layers_from=2)
