"""Grammars through the real engine and a tiny model on the CPU: what comes out matches, and nobody else notices."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes.masks import LateMasks
from tests.fakes.tiny_model import EOS_ID, IM_END_ID, write_tiny_llama
from tests.fakes.tiny_shard import Answer, TinyShard
from tgi.enums import EndReason
from tgi.server.grammar.vocabulary import read_vocabulary
from tgi.shard_client.messages import Grammar, RowError, Sampling
from tgi.text.tokenizer import Tokenizer, load_tokenizer

EOS_IDS = (EOS_ID, IM_END_ID)
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]( ([A-Z][a-z]{2,8}|[0-9]{1,4}))?"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
GRAMMARS = (Grammar("regex", DATE), Grammar("json_schema", json.dumps(SCHEMA)))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def shard(model_path: Path) -> TinyShard:
    return TinyShard(model_path, grammars=True, max_rows=32, num_blocks=600)


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return load_tokenizer(model_path)


def hot(seed: int) -> Sampling:
    return Sampling(do_sample=True, temperature=1.3, seed=seed)


def check(grammar: Grammar, answer: Answer, tokenizer: Tokenizer) -> None:
    assert answer.end is EndReason.EOS
    assert answer.ids[-1] in EOS_IDS
    text = tokenizer.decode(answer.ids[:-1], skip_special_tokens=False)
    if grammar.kind == "regex":
        assert re.fullmatch(grammar.source, text), text
        return
    value = json.loads(text)
    assert list(value) == list(SCHEMA["properties"])
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 150
    assert set(value["tags"]) <= {"red", "green", "blue"}


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_match_their_grammars_and_plain_rows_are_what_they_are_alone(
    shard: TinyShard, tokenizer: Tokenizer, depth: int
) -> None:
    shard.reset()
    shard.runner.depth = depth
    prompts = [[7, index, *range(3 * index)] for index in range(8)]
    alone = [shard.run([shard.admit(prompt, 30, sampling=hot(index))])[0] for index, prompt in enumerate(prompts)]
    shard.reset()
    admits = [
        admit
        for index, prompt in enumerate(prompts)
        for admit in (
            shard.admit(prompt, 200, sampling=hot(2 * index), eos_ids=EOS_IDS, grammar=GRAMMARS[0]),
            shard.admit(prompt, 30, sampling=hot(index)),
            shard.admit(prompt, 400, sampling=hot(2 * index + 1), eos_ids=EOS_IDS, grammar=GRAMMARS[1]),
        )
    ]
    answers = shard.run(admits, stagger=1)
    assert [answer.ids for answer in answers[1::3]] == [answer.ids for answer in alone]
    for index in range(8):
        check(GRAMMARS[0], answers[3 * index], tokenizer)
        check(GRAMMARS[1], answers[3 * index + 2], tokenizer)
    assert len({tuple(answer.ids) for answer in answers[2::3]}) > 1


def test_late_masks_and_resumes_change_nothing(model_path: Path, shard: TinyShard) -> None:
    shard.reset()
    shard.runner.depth = 1

    def requests(of: TinyShard, generated: Sequence[Sequence[int]] = ((), ())) -> list[Answer]:
        return of.run(
            [
                of.admit([5, 6, 7], 200, sampling=hot(i), eos_ids=EOS_IDS, grammar=grammar, generated=generated[i])
                for i, grammar in enumerate(GRAMMARS)
            ]
        )

    whole = [answer.ids for answer in requests(shard)]
    late = TinyShard(model_path, depth=2, masks=LateMasks(read_vocabulary(model_path, 512, (IM_END_ID,)), seed=4))
    assert [answer.ids for answer in requests(late)] == whole
    for cut in range(1, min(map(len, whole)), 3):
        shard.reset()
        rest = requests(shard, [ids[:cut] for ids in whole])
        assert [[*ids[:cut], *answer.ids] for ids, answer in zip(whole, rest, strict=True)] == whole
        assert all(answer.end is EndReason.EOS for answer in rest)


def test_a_broken_grammar_is_one_rows_error(shard: TinyShard, tokenizer: Tokenizer) -> None:
    shard.reset()
    grammars = [GRAMMARS[0], Grammar("regex", "a("), GRAMMARS[1], Grammar("lark", "start: <nobody>")]
    admits = [shard.admit([5, 6], 300, sampling=hot(i), eos_ids=EOS_IDS, grammar=g) for i, g in enumerate(grammars)]
    errors: dict[int, RowError] = {}
    answers = shard.run(admits, errors=errors)
    assert {handle: error.code for handle, error in errors.items()} == {2: "grammar", 4: "grammar"}
    check(grammars[0], answers[0], tokenizer)
    check(grammars[2], answers[2], tokenizer)
    assert answers[1].ids == answers[3].ids == []
    assert not shard.engine.has_rows


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_end_that_is_banned_or_ignored_is_still_the_end_of_a_finished_grammar(
    shard: TinyShard, tokenizer: Tokenizer, ignore_eos: bool
) -> None:
    shard.reset()
    held = {"min_new_tokens": 40, "ignore_eos": ignore_eos, "eos_ids": EOS_IDS}
    finite, endless = shard.run(
        [
            shard.admit([5], 60, sampling=hot(1), grammar=Grammar("regex", "[a-d]{5}"), **held),
            shard.admit([5], 60, sampling=hot(2), grammar=Grammar("regex", "[a-d]+"), **held),
        ]
    )
    assert finite.end is EndReason.EOS
    assert re.fullmatch("[a-d]{5}", tokenizer.decode(finite.ids))
    assert not set(EOS_IDS).intersection(endless.ids[:40])
    assert endless.end is EndReason.LENGTH or not ignore_eos


def test_penalties_count_only_what_was_chosen(model_path: Path) -> None:
    """A row that sat out must not be counted as if it had chosen."""
    vocabulary = read_vocabulary(model_path, 512, (IM_END_ID,))
    how = Sampling(do_sample=True, temperature=1.2, seed=3, frequency_penalty=1.5, repetition_penalty=1.3)
    answers: list[list[int]] = []
    for lateness in ((0,), (0, 2, 5)):
        shard = TinyShard(model_path, masks=LateMasks(vocabulary, lateness=lateness))
        grammar = Grammar("regex", "[a-z ]{60}")
        (answer,) = shard.run([shard.admit([5, 6], 80, sampling=how, eos_ids=EOS_IDS, grammar=grammar)])
        answers.append(answer.ids)
    assert answers[0] == answers[1]


def test_the_cut_by_length_is_within_the_grammar(shard: TinyShard, tokenizer: Tokenizer) -> None:
    shard.reset()
    (answer,) = shard.run(
        [shard.admit([5], 7, sampling=hot(9), eos_ids=EOS_IDS, grammar=Grammar("regex", "[xyz]{50}"))]
    )
    assert answer.end is EndReason.LENGTH
    assert re.fullmatch("[xyz]+", tokenizer.decode(answer.ids))
