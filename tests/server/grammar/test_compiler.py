from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.fakes.masks import known
from tests.fakes.tiny_model import write_tiny_llama
from tgi.server.grammar.compiler import Compiler, GrammarError
from tgi.server.grammar.vocabulary import Vocabulary, read_beside, read_vocabulary
from tgi.shard_client.messages import Grammar


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return read_vocabulary(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"), 512)


@pytest.fixture
def compiler(vocabulary: Vocabulary) -> Compiler:
    return Compiler(known(vocabulary), cache_grammars=4, cache_bytes=1_000)


class Counting(Compiler):
    compiled = 0

    def _compile(self, grammar: Grammar) -> LLMatcher:
        self.compiled += 1
        return super()._compile(grammar)


def takes(vocabulary: Vocabulary, matcher: LLMatcher, text: str) -> bool:
    ids = vocabulary.tokens.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("regex", "[a-c]+x?", "abcx", "abd"),
        ("regex", "^ab$", "ab", "^ab$"),
        ("json_schema", json.dumps(SCHEMA), '{"a": 1,"b":2}', '{"a": 1}'),
        ("json_schema", json.dumps(SCHEMA), '{ "a" : 1 , "b" : 2 }', '{"a":  1,"b":2}'),
        (
            "json_schema",
            json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}}),
            '{"a":1,"b":2}',
            '{"a": 1}',
        ),
        ("lark", 'start: "f(" num ")"\nnum: /[0-9]+/', "f(12)", "f()"),
        ("lark", 'start: "see " obj\nobj: %json ' + json.dumps(SCHEMA), 'see {"a":1,"b":2}', "see 1"),
    ],
)
def test_every_kind_means_what_it_says(
    compiler: Compiler, vocabulary: Vocabulary, kind: str, source: str, good: str, bad: str
) -> None:
    grammar = Grammar(kind, source)
    assert takes(vocabulary, compiler.matcher(grammar), good)
    assert not takes(vocabulary, compiler.matcher(grammar), bad)


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("regex", "(?=a)b", "look-around"),
        ("regex", "a(", "regex"),
        ("json_schema", "{", "grammar is not valid"),
        ("json_schema", '{"type": "octopus"}', "octopus"),
        ("lark", "start: nowhere", "nowhere"),
        ("xml", "<a/>", "'xml' are not known"),
        ("regex", "(" * 5_000 + ")" * 5_000, "grammar is not valid"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(
    compiler: Compiler, kind: str, source: str, reason: str
) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        compiler.matcher(Grammar(kind, source))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert compiler.cached == (0, 0), "a failure is not kept"


def test_the_same_grammar_is_compiled_once_also_for_those_who_ask_meanwhile(vocabulary: Vocabulary) -> None:
    compiler = Counting(known(vocabulary))
    together = threading.Barrier(8)
    matchers: list[LLMatcher] = []

    def ask() -> None:
        together.wait(20)
        matchers.append(compiler.matcher(Grammar("regex", "[a-c]{2}")))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert compiler.compiled == 1
    assert all(takes(vocabulary, matcher, "ab") for matcher in matchers), "each has a matcher of its own"
    compiler.matcher(Grammar("regex", "[a-c]{2}", begins_at=7))
    assert compiler.compiled == 1, "where it begins does not matter"


def test_a_failed_grammar_is_tried_again(vocabulary: Vocabulary) -> None:
    compiler = Counting(known(vocabulary))
    for _ in range(2):
        with pytest.raises(GrammarError):
            compiler.matcher(Grammar("regex", "a("))
    assert compiler.compiled == 2


def test_the_cache_is_bounded_by_count_and_by_bytes(vocabulary: Vocabulary) -> None:
    compiler = Counting(known(vocabulary), cache_grammars=4, cache_bytes=1_000)
    for index in range(10):
        compiler.matcher(Grammar("regex", f"a{{{index + 1}}}"))
        assert compiler.cached[0] <= 4
    compiler.matcher(Grammar("regex", "a{10}"))
    assert compiler.compiled == 10, "the newest are kept"
    compiler.matcher(Grammar("regex", "a{1}"))
    assert compiler.compiled == 11, "the oldest are not"
    compiler.matcher(Grammar("regex", "|".join(["abc"] * 240)))
    assert compiler.cached[1] <= 1_000
    assert takes(vocabulary, compiler.matcher(Grammar("regex", "|".join(["abc"] * 500))), "abc")
    assert compiler.cached == (0, 0), "one that is larger than the cache is not kept, and leaves nothing behind"


def test_a_model_without_a_tokenizer_refuses_every_grammar_and_says_why(tmp_path: Path) -> None:
    compiler = Compiler(read_beside(tmp_path, 512))
    with pytest.raises(GrammarError, match=r"takes no grammars: .* has no tokenizer\.json"):
        compiler.matcher(Grammar("regex", "a"))
