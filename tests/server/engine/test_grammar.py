"""Rows under a grammar beside rows without, over a device that checks every read, with masks that come late."""

from __future__ import annotations

import math
import re
import threading
from array import array
from collections.abc import Iterator, Sequence
from itertools import count

import pytest

from tests.fakes.device import FakeDevice, expected_ids
from tests.fakes.masks import HANG_S, GatedCompiler, LateMasks, expected_under_grammar
from tests.fakes.tiny_model import EOS_ID, IM_END_ID, write_tiny_llama
from tgi.enums import EndReason
from tgi.server.batch.table import RequestTable
from tgi.server.engine.engine import Engine, Limits
from tgi.server.engine.liveness import Liveness
from tgi.server.engine.loop import Loop
from tgi.server.engine.outbox import Outbox
from tgi.server.engine.plan import PrefillBudget
from tgi.server.grammar import mask as room
from tgi.server.grammar.mask import Masks
from tgi.server.grammar.vocabulary import Vocabulary, read_vocabulary
from tgi.shard_client.messages import Admit, Command, Grammar, RowError, Sampling, Step, Stopping

BLOCK = 4
VOCAB_SIZE = 512
WORD = "[a-f]{3,12}(,[a-f]{2,6}){1,3}"
LAUNCHING = pytest.mark.parametrize(("lag", "depth"), [(0, 1), (0, 2), (1, 2), (2, 2)])


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", vocab_size=VOCAB_SIZE)
    return read_vocabulary(path, VOCAB_SIZE, (IM_END_ID,))


def make_engine(masks: Masks, lag: int = 0, depth: int = 1, max_rows: int = 8) -> tuple[Engine, FakeDevice]:
    device = FakeDevice(BLOCK, lag=lag, depth=depth, vocab_size=VOCAB_SIZE)
    limits = Limits(1_000, PrefillBudget(64, 16, True), num_blocks=4_000, kv_epoch=1)
    engine = Engine(device, RequestTable(max_rows, BLOCK), limits, masks)
    engine.open()
    return engine, device


class Requests:
    """Admits with blocks of their own."""

    def __init__(self) -> None:
        self._blocks: Iterator[int] = count(1)

    def admit(
        self,
        handle: int,
        prompt: Sequence[int],
        max_new: int,
        source: str | None = None,
        *,
        generated: Sequence[int] = (),
        kind: str = "regex",
        begins_at: int = 0,
        **stopping: object,
    ) -> Admit:
        blocks = [next(self._blocks) for _ in range((len(prompt) + max_new) // BLOCK + 1)]
        ends: dict[str, object] = {"eos_ids": (EOS_ID,)} if source is not None else {}
        return Admit(
            handle=handle,
            prompt_ids=array("I", prompt).tobytes(),
            generated_ids=array("I", generated).tobytes(),
            cached_len=0,
            blocks=array("I", blocks).tobytes(),
            sampling=Sampling(seed=handle),
            stopping=Stopping(max_new, **(ends | stopping)),  # type: ignore[arg-type]
            grammar=None if source is None else Grammar(kind, source, begins_at),
        )


class Run:
    """Steps until nothing runs; what came, by handle."""

    def __init__(self, engine: Engine, masks: Masks | None = None, limit: int = 2_000) -> None:
        """`masks`: those of the engine, where they take time and not turns."""
        self.ids: dict[int, list[int]] = {}
        self.ends: dict[int, EndReason] = {}
        self.errors: dict[int, RowError] = {}
        self.steps: list[Step] = []
        for _ in range(limit):
            while engine.num_in_flight < engine.depth and (plan := engine.plan()) is not None:
                engine.launch(plan)
            if engine.num_in_flight:
                self._take(engine.collect())
            elif engine.has_errors:
                step = engine.idle_step()
                assert step is not None
                self._take(step)
            elif not engine.num_held:
                return
            elif masks is not None:
                assert masks.wait(engine.rows_under_grammar(engine.table.handles()), HANG_S)
        raise AssertionError("the engine does not come to an end")

    def _take(self, step: Step) -> None:
        self.steps.append(step)
        self.errors |= {error.handle: error for error in step.errors}
        for index, (handle, token) in enumerate(zip(step.handles, step.token_ids, strict=True)):
            self.ids.setdefault(handle, []).append(token)
            if step.end_of(index) is not EndReason.RUNNING:
                self.ends[handle] = step.end_of(index)


@LAUNCHING
@pytest.mark.parametrize("seed", range(4))
def test_late_masks_change_no_token_and_delay_nobody_else(
    vocabulary: Vocabulary, lag: int, depth: int, seed: int
) -> None:
    masks = LateMasks(vocabulary, seed)
    engine, _ = make_engine(masks, lag, depth)
    requests = Requests()
    prompts = {handle: [handle, 7, *range(9 * handle)] for handle in range(1, 9)}
    under = (1, 4, 5, 8)
    admits = [
        requests.admit(handle, prompt, 40, WORD if handle in under else None) for handle, prompt in prompts.items()
    ]
    engine.apply(Command(admit=admits))
    run = Run(engine)
    assert masks.num_late > 10
    assert not run.errors
    for handle, prompt in prompts.items():
        if handle in under:
            expected = expected_under_grammar(vocabulary, WORD, prompt, 40, handle)
            assert run.ends[handle] is (EndReason.EOS if expected[-1] in vocabulary.eos_ids else EndReason.LENGTH)
        else:
            expected = expected_ids(prompt, 40, handle, VOCAB_SIZE)
            steps = [index for index, step in enumerate(run.steps) if handle in step.handles]
            assert steps == list(range(steps[0], steps[0] + 40)), "a row without a grammar never pauses"
        assert run.ids[handle] == expected
    assert engine.table.num_free == 8


@LAUNCHING
def test_a_row_that_sits_out_reads_no_prompt_again(vocabulary: Vocabulary, lag: int, depth: int) -> None:
    engine, device = make_engine(LateMasks(vocabulary, lateness=(5,)), lag, depth)
    engine.apply(Command(admit=[Requests().admit(1, list(range(50)), 3, "[a-f]{9}")]))
    run = Run(engine)
    assert len(run.ids[1]) == 3
    # The prompt, its last token again, and each generated one twice.
    assert device.tokens_computed <= 50 + 1 + 2 * 2


@LAUNCHING
def test_a_row_resumed_within_its_grammar_goes_on_as_if_undisturbed(
    vocabulary: Vocabulary, lag: int, depth: int
) -> None:
    prompt = [3, 1, 4]
    whole = expected_under_grammar(vocabulary, WORD, prompt, 40, 5)
    assert len(whole) > 5
    requests = Requests()
    engine, _ = make_engine(LateMasks(vocabulary), lag, depth)
    for cut in range(len(whole)):
        admit = requests.admit(5, prompt, 40, WORD, generated=whole[:cut])
        engine.apply(Command(admit=[admit]))
        run = Run(engine)
        assert run.ids[5] == whole[cut:]
        assert run.ends[5] is EndReason.EOS
        engine.open()


def test_a_row_preempted_between_two_steps_comes_back_the_same(vocabulary: Vocabulary) -> None:
    prompt = [3, 1, 4]
    whole = expected_under_grammar(vocabulary, WORD, prompt, 40, 5)
    engine, _ = make_engine(LateMasks(vocabulary, seed=3), lag=1, depth=2)
    requests = Requests()
    got: list[int] = []
    ends: list[EndReason] = []
    for _ in range(2_000):
        if ends:
            break
        engine.open()  # every few tokens the stream breaks
        engine.apply(Command(admit=[requests.admit(5, prompt, 40, WORD, generated=got)]))
        before = len(got)
        while len(got) < before + 2 and not ends:
            while engine.num_in_flight < engine.depth and (plan := engine.plan()) is not None:
                engine.launch(plan)
            if engine.num_in_flight:
                step = engine.collect()
                got += step.token_ids
                ends += [step.end_of(index) for index in range(len(step.handles)) if step.end_of(index)]
    assert got == whole


@LAUNCHING
def test_a_broken_grammar_is_one_requests_error(vocabulary: Vocabulary, lag: int, depth: int) -> None:
    engine, _ = make_engine(LateMasks(vocabulary), lag, depth)
    requests = Requests()
    bad = [
        requests.admit(1, [1], 9, "(?=a)b"),
        requests.admit(2, [2], 9, "{not json", kind="json_schema"),
        requests.admit(3, [3], 9, "start: nothing", kind="lark"),
        requests.admit(4, [4], 9, "a", kind="xml"),
        requests.admit(5, [5], 9, "[a-c]+", generated=[EOS_ID]),
    ]
    engine.apply(Command(admit=[*bad, requests.admit(6, [6], 9), requests.admit(7, [7], 9, WORD)]))
    run = Run(engine)
    assert {handle: error.code for handle, error in run.errors.items()} == dict.fromkeys(range(1, 6), "grammar")
    assert all("\n" not in error.message and len(error.message) < 400 for error in run.errors.values())
    assert run.ids[6] == expected_ids([6], 9, 6, VOCAB_SIZE)
    assert run.ids[7] == expected_under_grammar(vocabulary, WORD, [7], 9, 7)
    assert set(run.ids) == {6, 7}
    assert engine.table.num_free == 8


def test_a_grammar_that_takes_too_long_is_its_requests_error(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 0.0)
    compiler = GatedCompiler(vocabulary)
    masks = Masks(compiler, lambda: None)
    engine, _ = make_engine(masks)
    requests = Requests()
    engine.apply(Command(admit=[requests.admit(1, [1, 2], 9, WORD), requests.admit(2, [2], 9)]))
    run = Run(engine, masks)
    compiler.gate.set()
    assert run.errors[1].code == "grammar"
    assert "regex [a-f]{3,12}" in run.errors[1].message
    assert "took longer" in run.errors[1].message
    assert run.ids == {2: expected_ids([2], 9, 2, VOCAB_SIZE)}


def test_a_prompt_is_read_while_its_grammar_is_compiled(vocabulary: Vocabulary) -> None:
    compiler = GatedCompiler(vocabulary)
    masks = Masks(compiler, lambda: None)
    engine, device = make_engine(masks)
    prompt = list(range(60))
    engine.apply(Command(admit=[Requests().admit(1, prompt, 5, WORD)]))
    progress: list[int] = []
    while (plan := engine.plan()) is not None:
        engine.launch(plan)
        step = engine.collect()
        assert not step.handles
        progress += step.computed_len
    assert device.tokens_computed == 60
    assert progress[-1] == 59, "who waits for this prefix need not wait for the grammar"
    assert len(set(progress)) == len(progress)
    assert engine.num_held == 1
    assert 0 < engine.patience_s <= room.PATIENCE_S
    compiler.gate.set()
    run = Run(engine, masks)
    assert run.ids[1] == expected_under_grammar(vocabulary, WORD, prompt, 5, 1)
    assert engine.patience_s == math.inf


@LAUNCHING
def test_rows_that_go_while_their_grammars_are_worked_on_leave_nothing(
    vocabulary: Vocabulary, lag: int, depth: int
) -> None:
    masks = LateMasks(vocabulary, lateness=(2,))
    engine, _ = make_engine(masks, lag, depth, max_rows=2)
    requests = Requests()
    for handle in range(1, 60):
        # Rows and their numbers are given away again and again, in the middle of everything.
        gone = [handle - 2] if handle > 2 else []
        grammar = WORD if handle % 3 else None
        engine.apply(Command(cancel=gone, admit=[requests.admit(handle, [handle], 30, grammar)]))
        for _ in range(handle % 5):
            if engine.num_in_flight < engine.depth and (plan := engine.plan()) is not None:
                engine.launch(plan)
            if engine.num_in_flight >= engine.depth:
                engine.collect()
    run = Run(engine)
    assert run.ids[59][-3:] == expected_under_grammar(vocabulary, WORD, [59], 30, 59)[-3:]
    assert engine.table.num_free == 2
    assert engine.num_held == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_choice_that_fails_is_one_requests_error(vocabulary: Vocabulary, depth: int) -> None:
    engine, device = make_engine(LateMasks(vocabulary), depth=depth)
    device.breaks_choice = lambda admit: admit.handle == 3
    requests = Requests()
    engine.apply(Command(admit=[requests.admit(h, [h, h], 8, WORD) for h in range(1, 6)]))
    run = Run(engine)
    assert {handle: error.code for handle, error in run.errors.items()} == {3: "generation"}
    for handle in (1, 2, 4, 5):
        assert run.ids[handle] == expected_under_grammar(vocabulary, WORD, [handle] * 2, 8, handle)


def test_a_grammar_begins_where_it_is_told_to(vocabulary: Vocabulary) -> None:
    engine, _ = make_engine(LateMasks(vocabulary))
    requests = Requests()
    expected = expected_under_grammar(vocabulary, "[x-z]{4}", [9], 20, 1, begins_at=5)
    engine.apply(Command(admit=[requests.admit(1, [9], 20, "[x-z]{4}", begins_at=5)]))
    assert Run(engine).ids[1] == expected
    engine.open()
    engine.apply(Command(admit=[requests.admit(1, [9], 20, "[x-z]{4}", generated=expected[:6], begins_at=5)]))
    assert Run(engine).ids[1] == expected[6:]


def test_a_finished_grammar_ends_the_row_though_eos_is_ignored(vocabulary: Vocabulary) -> None:
    engine, _ = make_engine(LateMasks(vocabulary))
    requests = Requests()
    admits = [
        requests.admit(1, [1], 30, "[a-c]{4}", ignore_eos=True),
        requests.admit(2, [2], 30, "[a-c]+", ignore_eos=True),
        requests.admit(3, [3], 30, "[a-c]{4}", eos_ids=(9,)),  # an EOS that the tokenizer does not know
    ]
    engine.apply(Command(admit=admits))
    run = Run(engine)
    assert run.ends == {1: EndReason.EOS, 2: EndReason.LENGTH, 3: EndReason.EOS}
    assert not vocabulary.eos_ids.intersection(run.ids[2]), "the end is never chosen while there is anything else"


def test_an_engine_without_masks_refuses_grammars_by_name() -> None:
    limits = Limits(10, PrefillBudget(64, 64, True), num_blocks=50, kv_epoch=1)
    engine = Engine(FakeDevice(BLOCK), RequestTable(2, BLOCK), limits)
    engine.open()
    engine.apply(Command(admit=[Requests().admit(1, [1], 4, "a")]))
    run = Run(engine)
    assert "grammars are not supported" in run.errors[1].message


# --- the loop ----------------------------------------------------------------


class Running:
    """The engine on a thread of its own, with one stream."""

    def __init__(self, compiler: GatedCompiler, depth: int) -> None:
        self.loop = Loop(Liveness())
        engine, _ = make_engine(Masks(compiler, self.loop.wake), lag=depth - 1, depth=depth)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()
        self.outbox = Outbox()
        self.loop.call(lambda: self.loop.install(engine))
        self.loop.call(lambda: self.loop.open_stream(self.outbox))
        self.take()

    def take(self) -> Step:
        step = self.outbox.take()
        assert step is not None
        self.loop.post(self.outbox, Command(seen=step.number))
        return step

    def stop(self) -> None:
        self.loop.stop()
        self.thread.join(HANG_S)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_resting_loop_wakes_when_a_grammar_is_ready(vocabulary: Vocabulary, depth: int) -> None:
    compiler = GatedCompiler(vocabulary)
    running = Running(compiler, depth)
    try:
        running.loop.post(running.outbox, Command(admit=[Requests().admit(1, [1, 2], 9, WORD)]))
        assert compiler.entered.wait(HANG_S)
        held = lambda: running.loop.engine is not None and running.loop.engine.num_held  # noqa: E731
        while not running.loop.call(held):
            pass
        compiler.gate.set()
        got: list[int] = []
        while len(got) < 9:
            got += running.take().token_ids
        assert got == expected_under_grammar(vocabulary, WORD, [1, 2], 9, 1)
    finally:
        running.stop()


def test_a_resting_loop_gives_up_on_a_grammar_by_itself(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 0.2)
    compiler = GatedCompiler(vocabulary)
    running = Running(compiler, depth=1)
    try:
        running.loop.post(running.outbox, Command(admit=[Requests().admit(1, [1, 2], 9, WORD)]))
        errors: list[RowError] = []
        while not errors:
            errors = running.take().errors
        assert [(error.handle, error.code) for error in errors] == [(1, "grammar")]
    finally:
        compiler.gate.set()
        running.stop()


def test_the_pattern_of_these_tests_is_one_that_python_knows(vocabulary: Vocabulary) -> None:
    """What is expected is itself held against another reading of the expression."""
    ids = expected_under_grammar(vocabulary, WORD, [1], 60, 1)
    assert re.fullmatch(WORD, vocabulary.tokens.decode_str(ids[:-1]))
