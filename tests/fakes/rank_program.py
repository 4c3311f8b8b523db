"""One rank of a tiny shard over gloo: `python -m tests.fakes.rank_program MODEL RANK WORLD PORT REQUESTS`.

Rank 0 runs the requests (JSON: prompt, number of new tokens, regular expression or null) and prints the ids, and the
logprobs of the second prompt but for its first token; the others follow. Every rank but 0 rounds differently on
purpose: what it would have chosen by itself differs from what rank 0 chooses. Masks come late, so that rows sit out.
"""

from __future__ import annotations

import json
import sys
from array import array
from dataclasses import replace
from pathlib import Path

import torch

from tests.fakes.masks import LateMasks
from tgi.model_config import read_model_config
from tgi.server.attention.select import select_backend
from tgi.server.batch.table import RequestTable
from tgi.server.distributed.group import make_group
from tgi.server.engine.engine import Engine, Limits
from tgi.server.engine.leader import LeaderDevice, follow, gather_followers, join_leader
from tgi.server.engine.plan import PrefillBudget
from tgi.server.engine.runner import ModelRunner
from tgi.server.grammar.vocabulary import read_vocabulary
from tgi.server.models.registry import build_model
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.shard_client.messages import Admit, BlockMoves, Command, Grammar, Sampling, Stopping

NUM_BLOCKS = 60
NUM_HOST_BLOCKS = 3
MAX_ROWS = 4
SCORED = 2  # its prompt's logprobs are wanted: more collectives in the steps that read it
CPU = torch.device("cpu")


def admissions(requests: list[tuple[list[int], int, str | None]]) -> list[Admit]:
    admits: list[Admit] = []
    next_block = 1
    for handle, (prompt, count, expression) in enumerate(requests, 1):
        blocks = range(next_block, next_block + (len(prompt) + count) // 16 + 1)
        next_block = blocks.stop
        sampling = Sampling(do_sample=handle % 2 == 0, seed=handle)
        packed_ids, packed_blocks = array("I", prompt).tobytes(), array("I", blocks).tobytes()
        admits.append(
            Admit(
                handle,
                packed_ids,
                b"",
                0,
                packed_blocks,
                sampling,
                Stopping(count),
                prompt_logprobs=handle == SCORED,
                grammar=None if expression is None else Grammar("regex", expression),
            )
        )
    return admits


def moved(engine: Engine, admit: Admit) -> list[int]:
    """The answer to a request again, on blocks that went by way of the host into others: on every rank."""
    before, hosted = admit.blocks[: 4 * NUM_HOST_BLOCKS], array("I", range(NUM_HOST_BLOCKS)).tobytes()
    after = array("I", range(NUM_BLOCKS - 9, NUM_BLOCKS)).tobytes()
    moves = BlockMoves(bytes([1] * NUM_HOST_BLOCKS), before, hosted)
    moves += BlockMoves(bytes(NUM_HOST_BLOCKS), hosted, after[: 4 * NUM_HOST_BLOCKS])
    again = replace(admit, handle=99, blocks=after, cached_len=16 * NUM_HOST_BLOCKS, prompt_logprobs=False)
    engine.apply(Command(admit=[again], moves=moves))
    ids: list[int] = []
    while engine.has_rows:
        step = engine.step()
        assert step is not None
        ids += step.token_ids
    return ids


def main() -> None:
    path, rank, world, port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    group = make_group(rank, world, "localhost", port, CPU)
    checkpoint = open_checkpoint(path)
    model = build_model(read_model_config(path), checkpoint, torch.float32, CPU, group)
    backend = select_backend("torch", "cpu", 16)
    runner = ModelRunner(model, backend, CPU, torch.float32, group)
    if rank:
        true_logits = model.logits
        model.logits = lambda hidden: true_logits(hidden) * -1.0  # type: ignore[method-assign]
        follow(runner, join_leader(group, "localhost", CPU), free_bytes=1 << 30)
        group.close()
        return
    device = LeaderDevice(runner, gather_followers(group, "localhost", CPU))
    assert device.smallest(1 << 40) == (1 << 30 if world > 1 else 1 << 40)
    device.allocate(NUM_BLOCKS, MAX_ROWS, 512, NUM_HOST_BLOCKS)
    limits = Limits(1_000_000, PrefillBudget(24, 24, True), NUM_BLOCKS, 1, NUM_HOST_BLOCKS, world_size=world)
    masks = LateMasks(read_vocabulary(path, model.vocab_size))
    engine = Engine(device, RequestTable(MAX_ROWS, 16), limits, masks)
    engine.open()
    requests = json.loads(sys.argv[5])
    engine.apply(Command(admit=admissions(requests)))
    engine.step()
    engine.open()  # what was begun is dropped, on every rank; the same requests again
    scores: list[float] = []
    answers: dict[int, list[int]] = {handle: [] for handle in range(1, len(requests) + 1)}
    engine.apply(Command(admit=admissions(requests)))
    while engine.has_rows:
        step = engine.step()
        if step is None:
            continue
        for handle, token in zip(step.handles, step.token_ids, strict=True):
            answers[handle].append(token)
        for part in step.prompt_logprobs:
            scores += part.logprobs
    assert masks.num_late
    assert moved(engine, admissions(requests)[SCORED - 1]) == answers[SCORED], "blocks were lost on their way"
    device.stop()
    group.close()
    print(json.dumps([list(answers.values()), scores[1:]]))


if __name__ == "__main__":
    main()
