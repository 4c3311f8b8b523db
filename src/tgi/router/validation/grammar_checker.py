"""A wish for a grammar -> the grammar that the shard compiles, or its refusal. Beside the event loop, in bounded time.

The one place of the router that knows llguidance. Its fuel bounds the time and the memory of any one check, which is
why threads are enough: it lets go of the interpreter while it works.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING

from tgi.errors import Overloaded
from tgi.router.validation.grammar import MAX_SOURCE, GrammarWish, not_valid, schema_source
from tgi.router.validation.schema_site import Refused
from tgi.shard_client.messages import Grammar
from tgi.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

logger = logging.getLogger(__name__)

MAX_SECONDS = 5.0
NUM_WORKERS = 2
MAX_WAITING = 64
"""Grammars being checked or waiting for it. A check takes a few milliseconds, a monstrous one less than a second."""

CACHE_SIZE = 4 * 1024 * 1024
"""Characters of sources and results, together."""

PROBE_TOKENS = 48
"""So far a grammar is tried out: what explodes, does so at its first tokens."""

MAX_RESULT = 1024 * 1024
"""Characters that go to the shard: choices that are multiplied out can be many times what was sent."""

MAX_EBNF_RULES = 500
"""Its translation to Lark takes the square of their number."""

INITIAL_FUEL = 200_000
"""llguidance's default, five times as much, lets `(a{1000}){1000}` take 170 MB and a second."""

MAX_GRAMMAR_SIZE = 250_000
MAX_LEXER_STATES = 50_000
"""As the shard has them: what passes here must compile there."""

MAX_ERROR = 300
"""Characters of what is wrong with a grammar."""

_ANY_OBJECT = '{"type": "object"}'
_ATTRIBUTED_START = re.compile(r"^\s*start\s*\[[^\]\n]*\]\s*:", re.MULTILINE)  # the library's own test does not know it
_DRAWING = re.compile(r"<state>|<non-verbose/>|\n +1 \|")
_REGEX_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$]")


class GrammarChecker:
    """Results are kept, refusals too; equal grammars are checked once even when they come at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._engine = Engine(tokenizer)
        self._pool = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="grammar")
        self._running: dict[_Key, tuple[Future[Grammar | str], asyncio.Future[Grammar | str]]] = {}
        self._known: OrderedDict[_Key, Grammar | str] = OrderedDict()
        self._known_size = 0

    async def check(self, wish: GrammarWish) -> Grammar:
        """Raises InvalidRequest in TGI's words, and Overloaded where too many others wait."""
        key = (wish.kind, _canonical(wish))
        result = self._known.get(key)
        if result is None:
            result = await self._checked(key, wish)
        else:
            self._known.move_to_end(key)
        if isinstance(result, str):
            raise not_valid(result, wish.param)
        return result

    def close(self) -> None:
        """Checks that wait are dropped; one that runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _checked(self, key: _Key, wish: GrammarWish) -> Grammar | str:
        running = self._running.get(key)
        if running is None:
            if len(self._running) >= MAX_WAITING:
                raise Overloaded("too many grammars are being checked")
            job = self._pool.submit(self._engine.check, *key)
            running = self._running[key] = (job, asyncio.wrap_future(job))
            running[1].add_done_callback(lambda done: self._settle(key, done))
        job, result = running
        # Who asks may go away; the check goes on, for the others and for the next.
        done, _ = await asyncio.wait((result,), timeout=MAX_SECONDS)
        if done:
            return _outcome(result)
        if not job.running():
            raise Overloaded("too many grammars are being checked")
        return f"its check takes longer than {MAX_SECONDS:g} s"

    def _settle(self, key: _Key, done: asyncio.Future[Grammar | str]) -> None:
        del self._running[key]
        if done.cancelled():
            return
        result = _outcome(done)
        self._known[key] = result
        self._known_size += _size(key, result)
        while self._known_size > CACHE_SIZE:
            self._known_size -= _size(*self._known.popitem(last=False))


def _outcome(done: asyncio.Future[Grammar | str]) -> Grammar | str:
    """A panic of the engine is no Exception: left alone it would end the server."""
    failure = done.exception()
    if failure is None:
        return done.result()
    logger.error("The grammar engine failed", exc_info=failure)
    return "the grammar engine failed"


class Engine:
    """llguidance, from a worker's thread. Imported at the first grammar: most servers never see one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def check(self, kind: str, source: str) -> Grammar | str:
        """The grammar as the shard is to compile it, or why it is refused."""
        try:
            grammar = _translated(kind, source)
            grammar.source.encode()
        except Refused as refused:
            return str(refused)
        except UnicodeEncodeError:
            return "it holds a lone surrogate, which is no valid Unicode"
        except RecursionError:
            return "it is nested too deeply"
        if grammar.kind == "lark" and (end := self._named_end(grammar.source)):
            return f"it names {end}, which ends an answer by itself: leave it out"
        if len(grammar.source) > MAX_RESULT:
            return f"it has {len(grammar.source)} characters once it is written out, at most {MAX_RESULT} are checked"
        return self._fault(grammar) or grammar

    def _named_end(self, source: str) -> str | None:
        """A further end token that a Lark grammar spells: the shard allows all of them where the text may end, and
        nowhere else."""
        ends = [self._tokenizer.token_text(token_id) for token_id in self._tokenizer.eos_ids[1:]]
        return next((end for end in ends if end.startswith("<") and end in source), None)

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Bytes(self._tokenizer)))

    @cached_property
    def _limits(self) -> llguidance.LLParserLimits:
        from llguidance import LLParserLimits

        return LLParserLimits(
            initial_lexer_fuel=INITIAL_FUEL,
            max_grammar_size=MAX_GRAMMAR_SIZE,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )

    def _fault(self, grammar: Grammar) -> str:
        """What is wrong with it; empty where nothing is: it compiles, and a text begins that it allows."""
        matcher = self._matcher(grammar)
        rng = Random(0)
        for _ in range(PROBE_TOKENS):
            if matcher.is_error() or matcher.is_stopped():
                break
            allowed = _one_of(matcher.compute_bitmask(), rng)
            if allowed is None:
                break
            matcher.consume_token(allowed)
        error = matcher.get_error() if matcher.is_error() else ""
        return "no text satisfies it" if error.startswith("NoExtension") else _in_short(error)

    def _matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        from llguidance import LLMatcher

        read = {
            "json_schema": LLMatcher.grammar_from_json_schema,
            "regex": LLMatcher.grammar_from_regex,
            "lark": LLMatcher.grammar_from_lark,
        }[grammar.kind]
        return LLMatcher(self._vocabulary, read(grammar.source), log_level=0, limits=self._limits)


class _Bytes:
    """What llguidance asks of a tokenizer: one token a byte, and the model's special tokens under their own ids.

    Whether a grammar can be satisfied does not hang on how its text is cut into tokens, and this is made in no time.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = {token_id: tokenizer.token_text(token_id).encode() for token_id in tokenizer.special_ids}
        plain = iter(range(256))
        self.tokens = [special[i] if i in special else _next_byte(plain) for i in range(tokenizer.vocab_size)]
        self.tokens += [bytes([byte]) for byte in plain]
        self.special_token_ids = sorted(special)
        self.eos_token_id = tokenizer.eos_ids[0] if tokenizer.eos_ids else len(self.tokens)
        if self.eos_token_id == len(self.tokens):
            self.tokens.append(b"<eos>")
            self.special_token_ids.append(self.eos_token_id)
        self.bos_token_id = None
        self._plain = {token[0]: i for i, token in enumerate(self.tokens) if len(token) == 1 and i not in special}

    def __call__(self, text: bytes) -> list[int]:
        return [self._plain[byte] for byte in text]


def _next_byte(plain: Iterator[int]) -> bytes:
    byte = next(plain, None)
    return b"" if byte is None else bytes([byte])


_Key = tuple[str, str]


def _canonical(wish: GrammarWish) -> str:
    """The text that tells two grammars of a kind apart. Raises InvalidRequest for one that is too long."""
    if isinstance(wish.value, str):
        return wish.value
    if wish.value is None:
        return ""
    try:
        source = json.dumps(wish.value, ensure_ascii=False)
    except RecursionError:
        raise not_valid("it is nested too deeply", wish.param) from None
    if len(source) > MAX_SOURCE:
        raise not_valid(f"it has {len(source)} characters, at most {MAX_SOURCE} are checked", wish.param)
    return source


def _size(key: _Key, result: Grammar | str) -> int:
    return len(key[1]) + len(result if isinstance(result, str) else result.source)


# Each kind in the words of the shard. Raises Refused.


def _translated(kind: str, source: str) -> Grammar:
    if kind == "json_schema":
        return Grammar("json_schema", schema_source(source))
    if kind == "json_object":
        return Grammar("json_schema", schema_source(_ANY_OBJECT))
    if kind == "regex":
        return Grammar("regex", _whole(source))
    if kind == "choice":
        return Grammar("regex", "|".join(_REGEX_SYNTAX.sub(r"\\\g<0>", text) for text in json.loads(source)))
    return Grammar("lark", _lark(source))


def _whole(expression: str) -> str:
    r"""A regex as TGI reads it: the whole text matches, with or without ^ and $ around it; \d, \w and \s are ASCII."""
    from llguidance import regex_to_lark

    inner = expression.removeprefix("^")
    if inner.endswith("$") and (len(inner) - len(inner[:-1].rstrip("\\"))) % 2:
        inner = inner[:-1]
    return regex_to_lark(inner, "dws")


def _lark(text: str) -> str:
    """Lark as it is; EBNF (`root ::= …`, as llama.cpp writes it) translated."""
    from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

    if is_lark_syntax(text) or _ATTRIBUTED_START.search(text):
        return text
    if text.count("::=") > MAX_EBNF_RULES:
        raise Refused(f"an EBNF grammar of more than {MAX_EBNF_RULES} rules; Lark has no such limit")
    try:
        return any_to_lark(text)
    except Exception as error:  # the translator raises whatever comes
        raise Refused(f"neither Lark (`start: …`) nor EBNF (`root ::= …`): {error}") from None


def _one_of(mask: bytes, rng: Random) -> int | None:
    """A bit that is set, at random; None where none is."""
    bits = int.from_bytes(mask, "little")
    if not bits:
        return None
    shift = rng.randrange(bits.bit_length())
    upper = bits >> shift
    return shift + (upper & -upper).bit_length() - 1


def _in_short(error: str) -> str:
    """What llguidance says, without the drawing of the place that follows it."""
    text = " ".join(_DRAWING.split(error)[0].split())
    return text if len(text) <= MAX_ERROR else text[:MAX_ERROR] + "…"
