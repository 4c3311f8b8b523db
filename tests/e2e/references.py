"""Recorded greedy answers of transformers (tests/data/record_greedy.py) and how a model is compared with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.e2e.workload import SMALL_MARGIN
from tests.fakes.paged_logits import paged_logits
from tgi.model_config import read_model_config
from tgi.server.attention.select import select_backend
from tgi.server.distributed.group import SingleRank
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint

DATA = Path(__file__).parents[1] / "data"
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Reference:
    kind: str  # raw, or chat: `prompt` is then the user's message and `text_in` what the template makes of it
    prompt: str
    text_in: str
    input_ids: tuple[int, ...]
    ids: tuple[int, ...]  # float32
    margins: tuple[float, ...]
    rounded_ids: tuple[int, ...]  # bfloat16

    def assert_same(self, found: Sequence[int], start: int = 0) -> None:
        """`found` are the reference's ids from `start` on, up to where two tokens were almost equally good."""
        ids, margins = self.ids[start:], self.margins[start:]
        certain = next((index for index, margin in enumerate(margins) if margin < SMALL_MARGIN), len(ids))
        assert tuple(found[:certain]) == ids[:certain], self.prompt
        assert len(found) == len(ids) or certain < len(ids), self.prompt


def read_references(name: str) -> list[Reference]:
    return [_reference(entry) for entry in json.loads((DATA / name).read_text())["prompts"]]


def bfloat16_agreement(path: Path, references: Sequence[Reference]) -> float:
    """How much of transformers' bfloat16 answers this model would choose too, in per cent of the tokens, each after the
    same tokens before it."""
    checkpoint = open_checkpoint(path)
    model = build_model(read_model_config(path), checkpoint, torch.bfloat16, CPU, SingleRank(), path=path)
    checkpoint.close()
    backend, shape = select_backend("cpu", "cpu"), model.cache_shape
    backend.warmup(shape.num_heads, shape.num_kv_heads, shape.head_dim, torch.bfloat16, CPU)
    equal = total = 0
    for reference in references:
        sequence = (*reference.input_ids, *reference.rounded_ids[:-1])
        (logits,) = paged_logits(model, backend, [sequence], torch.bfloat16)
        chosen = logits[len(reference.input_ids) - 1 :].argmax(-1)
        equal += int((chosen == torch.tensor(reference.rounded_ids)).sum())
        total += len(reference.rounded_ids)
    return 100 * equal / total


def _reference(entry: dict[str, Any]) -> Reference:
    return Reference(
        entry["kind"],
        entry["prompt"],
        entry["text_in"],
        tuple(entry["input_ids"]),
        tuple(entry["fp32"]["ids"]),
        tuple(entry["fp32"]["margin"]),
        tuple(entry["bf16"]["ids"]),
    )
