"""What a request costs before it is scheduled, in the router's process alone: reading its body, rendering its chat
template, validating it. The bundled model's tokenizer and template; no socket and no shard.

Validation with a prompt includes tokenising it in the pool, and the two hops there and back; validation of given ids
does not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median

import msgspec

from benchmarks.load import Load, prompt
from benchmarks.record import Figure, argument_parser, report
from tgi import hub
from tgi.router.chat.messages import template_messages
from tgi.router.chat.template import ChatTemplate
from tgi.router.schema.chat import ChatRequest
from tgi.router.schema.generate import GenerateParameters, GenerateRequest
from tgi.router.validation.door import CHAT, NATIVE
from tgi.router.validation.parameters import Limits
from tgi.router.validation.validator import Validator, Wish
from tgi.text.pool import EncodePool
from tgi.text.tokenizer import Tokenizer, load_tokenizer

MODEL = "SmolLM2-135M-Instruct"
BATCH = 50  # requests per measurement


def bodies(words: int) -> tuple[bytes, bytes]:
    """A chat and a native request with a prompt of about `words` tokens, as clients send them."""
    text = prompt(Load(clients=1, requests=1, prompt_words=words), 0)
    chat = {
        "model": "tgi",
        "messages": [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": text}],
        "max_tokens": 128,
        "temperature": 0.7,
        "top_p": 0.9,
        "stop": ["\n\n"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    native = {"inputs": text, "parameters": {"max_new_tokens": 128, "temperature": 0.7, "details": True, "stop": []}}
    return msgspec.json.encode(chat), msgspec.json.encode(native)


def timed(rounds: int, work: Callable[[], object]) -> float:
    """µs of one call, median over `rounds` batches."""
    return median(_batch(work) for _ in range(rounds))


def _batch(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(BATCH):
        work()
    return 1e6 * (time.perf_counter() - began) / BATCH


async def timed_async(rounds: int, work: Callable[[], Awaitable[object]]) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(BATCH):
            await work()
        times.append(1e6 * (time.perf_counter() - began) / BATCH)
    return median(times)


async def measure(tokenizer: Tokenizer, words: int, rounds: int) -> list[Figure]:
    chat_body, native_body = bodies(words)
    read_chat, read_native = msgspec.json.Decoder(ChatRequest), msgspec.json.Decoder(GenerateRequest)
    chat = read_chat.decode(chat_body)
    template = ChatTemplate(tokenizer.chat_templates, tokenizer.named_tokens)
    rendered = template.render(template_messages(chat.messages)).text
    parameters = GenerateParameters(max_new_tokens=128, temperature=0.7, top_p=0.9, stop=["\n\n"])
    pool = EncodePool(tokenizer, 1)
    validator = Validator(pool, Limits(4_000, 8_000, tokenizer.vocab_size), tokenizer.vocab_size)
    ids = (await pool.encode(rendered, False)).ids
    try:
        return [
            Figure("parse, chat", timed(rounds, lambda: read_chat.decode(chat_body)), "µs", "", f"{len(chat_body)} B"),
            Figure("parse, native", timed(rounds, lambda: read_native.decode(native_body)), "µs"),
            Figure("template", timed(rounds, lambda: template.render(template_messages(chat.messages))), "µs"),
            Figure(
                "validate, chat",
                await timed_async(rounds, lambda: validator.validate(Wish(rendered, parameters, CHAT, True))),
                "µs",
                "",
                f"{len(ids) // 4} tokens, tokenised in the pool",
            ),
            Figure(
                "validate, native",
                await timed_async(rounds, lambda: validator.validate(Wish(rendered, parameters, NATIVE, True))),
                "µs",
            ),
            Figure(
                "validate, given ids",
                await timed_async(rounds, lambda: validator.validate(Wish("", parameters, CHAT, True, prompt_ids=ids))),
                "µs",
            ),
        ]
    finally:
        pool.close()


def main() -> None:
    parser = argument_parser(__doc__, "request_path")
    parser.add_argument("--rounds", type=int, default=40, help="batches of 50 requests (default: 40)")
    parser.add_argument("--words", type=int, default=121, help="of the prompt (default: 121)")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(hub.locate(MODEL, None))
    figures = asyncio.run(measure(tokenizer, arguments.words, arguments.rounds))
    report(arguments, "request_path", "A request before it is scheduled, per request", figures)


if __name__ == "__main__":
    main()
