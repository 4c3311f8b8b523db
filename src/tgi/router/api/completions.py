"""POST /v1/completions, plain and streamed: one or several prompts, each with `n` choices."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from tgi.errors import InvalidRequest
from tgi.router.api.answer import collect, rendered
from tgi.router.api.body import BodyReader
from tgi.router.api.completion_frames import CompletionFrames, Echo, Look, completion
from tgi.router.api.errors import Refused, openai_response
from tgi.router.api.headers import answer_headers, client_of, priority_of, stream_headers, traceparent_of
from tgi.router.api.openai_answer import Tally, head_of, joined, stream_usage
from tgi.router.api.openai_answer import encode as _encode
from tgi.router.api.openai_request import grammar_aside, parameters_of
from tgi.router.api.services import Services, services_of
from tgi.router.api.sse import EventStream
from tgi.router.infer import Call, Collector
from tgi.router.schema.completions import CompletionRequest
from tgi.router.validation.door import COMPLETIONS
from tgi.router.validation.grammar import GrammarWish
from tgi.router.validation.request import ValidRequest, fork
from tgi.router.validation.validator import Wish

_body = BodyReader(CompletionRequest)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or the ids that a client sent instead (u32)."""

    text: str = ""
    ids: bytes | None = None


async def completions(request: Request) -> Response | EventStream:
    services = services_of(request)
    body = await _body.read(request, services.payload_limit)
    prompts = prompts_of(body)
    check(body, len(prompts), services)
    num_answers = body.best_of or body.n or 1  # to each prompt
    with services.infer.accept(len(prompts) * num_answers, "n" if num_answers > 1 else "prompt") as call:
        grammar = await grammar_aside(body)
        valids = [fork(await _validate(request, body, prompt, grammar, call), num_answers) for prompt in prompts]
        if body.stream:
            return _stream(services, body, call, prompts, valids)
        collectors = await collect(request, call, [valid for siblings in valids for valid in siblings])
    groups = [collectors[at : at + num_answers] for at in range(0, len(collectors), num_answers)]
    return await _answer(services, body, prompts, valids, groups)


def prompts_of(body: CompletionRequest) -> list[Prompt]:
    """Raises InvalidRequest for an empty list, and for one of several kinds."""
    if isinstance(body.prompt, str):
        return [Prompt(body.prompt)]
    given = cast("list[Any]", body.prompt)
    if not given:
        raise InvalidRequest("`prompt` must not be an empty list", "prompt")
    kinds = set(map(type, given))  # of hundreds of thousands, maybe
    if len(kinds) > 1:
        raise InvalidRequest("`prompt` must be a text, or a list of texts, of token ids or of such lists", "prompt")
    if kinds == {int}:
        return [Prompt(ids=_packed(given))]
    return [Prompt(text) for text in given] if kinds == {str} else [Prompt(ids=_packed(ids)) for ids in given]


def check(body: CompletionRequest, num_prompts: int, services: Services) -> None:
    """Raises InvalidRequest for what only this route knows; all else is the validator's."""
    if body.suffix:
        raise Refused(
            "Suffix is not supported and can be achieved by preprocessing the prompt.", "suffix not supported", "suffix"
        )
    limit = services.info.max_client_batch_size
    if num_prompts > limit:
        raise Refused(
            f"Number of prompts exceeds the maximum allowed batch size of {limit}", "batch size exceeded", "prompt"
        )
    n = 1 if body.n is None else body.n
    best_of = n if body.best_of is None else body.best_of
    if n < 1:
        raise InvalidRequest(f"`n` must be strictly positive. Given: {n}", "n")
    if best_of < n:
        raise InvalidRequest(f"`best_of` must be >= `n`, here {n}. Given: {best_of}", "best_of")
    if best_of > n:
        if body.stream:
            raise InvalidRequest(
                "`best_of` must be equal to `n` when streaming: the best is known at the end", "best_of"
            )
        if best_of > services.info.max_best_of:
            raise InvalidRequest(
                f"`best_of` must be > 0 and <= {services.info.max_best_of}. Given: {best_of}", "best_of"
            )


def is_scoring(body: CompletionRequest) -> bool:
    """Is only the prompt wanted back?"""
    return bool(body.echo) and body.max_tokens == 0


async def _validate(
    request: Request, body: CompletionRequest, prompt: Prompt, grammar: GrammarWish | None, call: Call
) -> ValidRequest:
    door = COMPLETIONS if body.add_special_tokens is not False else replace(COMPLETIONS, add_special_tokens=False)
    # Scoring alone makes a token too, which is not shown.
    max_tokens = 1 if is_scoring(body) else body.max_tokens
    scores_prompt = bool(body.echo) and body.logprobs is not None
    valid = await call.validate(
        Wish(
            prompt.text,
            parameters_of(body, priority_of(request, body.priority), max_tokens, body.logprobs, scores_prompt),
            door,
            received_at=call.received_at,
            traceparent=traceparent_of(request),
            prompt_ids=prompt.ids,
            grammar=grammar,
            client=client_of(request, body.user),
        )
    )
    return replace(valid, prompt_top_n=body.logprobs or 0) if valid.prompt_logprobs else valid


def _look(services: Services, body: CompletionRequest) -> Look:
    return Look(
        head=head_of(services, "cmpl", body.model),
        vocabulary=services.vocabulary,
        num_alternatives=body.logprobs,
        keep_special=body.skip_special_tokens is False,
        is_scoring=is_scoring(body),
    )


def _echo(services: Services, body: CompletionRequest, prompt: Prompt) -> Echo | None:
    if not body.echo:
        return None
    if prompt.ids is None:
        return Echo(prompt.text)
    ids = memoryview(prompt.ids).cast("I")
    return Echo(services.vocabulary.decode(ids, skip_special_tokens=False))


async def _answer(
    services: Services,
    body: CompletionRequest,
    prompts: Sequence[Prompt],
    valids: Sequence[Sequence[ValidRequest]],
    groups: Sequence[Sequence[Collector]],
) -> Response:
    look = _look(services, body)
    tally = Tally([siblings[0].num_prompt_tokens for siblings in valids], look.is_scoring)
    echoes = [_echo(services, body, prompt) for prompt in prompts]

    def make() -> bytes:
        return _encode(completion(look, tally, echoes, groups, body.n or 1))

    answer = await rendered(make, [collector for group in groups for collector in group])
    finishes = [joined([one.finish for one in group]) for group in groups]
    headers = answer_headers(services.compute_type, _num_characters(prompts), *finishes)
    return Response(answer, 200, headers, "application/json")


def _stream(
    services: Services,
    body: CompletionRequest,
    call: Call,
    prompts: Sequence[Prompt],
    valids: Sequence[Sequence[ValidRequest]],
) -> EventStream:
    look = _look(services, body)
    tally = Tally([siblings[0].num_prompt_tokens for siblings in valids], look.is_scoring)
    usage = stream_usage(body.stream_options)
    answers: list[tuple[ValidRequest, CompletionFrames]] = []
    for number, (prompt, siblings) in enumerate(zip(prompts, valids, strict=True)):
        echo = _echo(services, body, prompt)
        first = siblings[0]
        for valid in siblings:
            # No chunk can wait for the score of the prompt that another choice gets.
            valid = replace(valid, prompt_logprobs=first.prompt_logprobs, prompt_top_n=first.prompt_top_n)
            frames = CompletionFrames(look, tally, usage, first.num_prompt_tokens, number, len(answers), echo)
            answers.append((valid, frames))
    headers = stream_headers(services.compute_type, _num_characters(prompts))
    return EventStream(call, answers, services.pulse, headers, openai_response)


def _num_characters(prompts: Sequence[Prompt]) -> int:
    """As the client wrote them: ids are none."""
    return sum(len(prompt.text) for prompt in prompts)


def _packed(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()
