"""A rank's part goes into its parameter, in pieces, and nothing else is read."""

from __future__ import annotations

import math

import pytest
import torch

from tgi.server.weights import loader
from tgi.server.weights.dummy_checkpoint import STD, DummyCheckpoint
from tgi.server.weights.loader import load_into
from tgi.server.weights.region import Region, bounds_of


class RecordingCheckpoint:
    """Serves one tensor and notes how much each read took."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.reads: list[int] = []

    def names(self) -> tuple[str, ...]:
        return ("t",)

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
