from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.fakes.backend import EOS, HELLO, Playing, Said, Script, ScriptedBackend
from tests.fakes.tokenizer import byte_tokenizer
from tgi.enums import FinishReason
from tgi.errors import GenerationFailed, InvalidRequest, Overloaded, TemplateFailed, TgiError, Unavailable
from tgi.observability.metrics import Metrics
from tgi.router.backend import TokenEvent
from tgi.router.infer import Call, Collector, Infer
from tgi.router.schema.generate import GenerateParameters
from tgi.router.validation.door import NATIVE
from tgi.router.validation.parameters import Limits
from tgi.router.validation.request import fork
from tgi.router.validation.validator import Validator, Wish
from tgi.text.pool import EncodePool

PERMITS = 2


class Setup:
    def __init__(self, backend: ScriptedBackend) -> None:
        tokenizer = byte_tokenizer()
        self.metrics = Metrics(100, 200)
        limits = Limits(max_input_tokens=100, max_total_tokens=200, vocab_size=300)
        validator = Validator(EncodePool(tokenizer, 1), limits, tokenizer.vocab_size)
        self.infer = Infer(backend, validator, self.metrics, PERMITS)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    def failures(self) -> dict[str, float]:
        counts = {
            err: self.value("tgi_request_failure_total", err=err) or 0
            for err in ("overloaded", "validation", "template", "incomplete", "dropped", "generation")
        }
        return {err: count for err, count in counts.items() if count}


def run(scenario: Callable[[Setup], Awaitable[None]], script: Script | None = HELLO) -> Setup:
    setup = Setup(ScriptedBackend(script))

    async def main() -> None:
        await scenario(setup)

    asyncio.run(main())
    return setup


async def answer(setup: Setup, text: str = "Hi", **parameters: object) -> Collector:
    collector = Collector()
    with setup.infer.accept() as call:
        wish = Wish(text, GenerateParameters(**parameters), NATIVE, received_at=call.received_at)  # pyright: ignore
        call.schedule(await call.validate(wish), collector)
        await collector.done
    return collector


class BreaksAtTheEnd(Collector):
    def token(self, event: TokenEvent) -> None:
        if event.finish is not None:
            raise RuntimeError("cannot be rendered")
        super().token(event)


def test_an_end_that_cannot_be_handed_on_is_still_told(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(setup: Setup) -> None:
        collector = BreaksAtTheEnd()
        with setup.infer.accept() as call:
            wish = Wish("Hi", GenerateParameters(max_new_tokens=50), NATIVE, received_at=call.received_at)
            call.schedule(await call.validate(wish), collector)
            with pytest.raises(GenerationFailed, match="the answer broke at its end: cannot be rendered"):
                await collector.done
        assert setup.infer.free_permits == PERMITS

    run(scenario)
    assert "could not be handed on" in caplog.text


def test_a_request_is_counted_once_and_timed() -> None:
    async def scenario(setup: Setup) -> None:
        collector = await answer(setup, max_new_tokens=50)
        assert [event.text for event in collector.events] == ["Hello", " world", "</s>"]

    setup = run(scenario)
    assert setup.value("tgi_request_count_total") == 1
    assert setup.value("tgi_request_success_total") == 1
    assert setup.failures() == {}
    expected = {
        "tgi_request_duration": 11 / 64,
        "tgi_request_validation_duration": 1 / 64,
        "tgi_request_queue_duration": 2 / 64,
        "tgi_request_inference_duration": 8 / 64,
        "tgi_request_first_token_duration": 4 / 64,
        "tgi_request_mean_time_per_token_duration": 8 / 64 / 3,
        "tgi_request_input_length": 2,
        "tgi_request_max_new_tokens": 50,
        "tgi_request_generated_tokens": 3,
    }
    for name, value in expected.items():
        assert setup.value(f"{name}_count") == 1
        assert setup.value(f"{name}_sum") == pytest.approx(value)
    assert setup.infer.free_permits == PERMITS


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (GenerationFailed("x"), "generation"),
        (Unavailable("x"), "generation"),
        (InvalidRequest("x"), "validation"),
        (Overloaded(), "overloaded"),
        (TemplateFailed("x"), "template"),
        (TgiError("x"), "incomplete"),
    ],
)
@pytest.mark.parametrize("when", ["inside", "schedule", "event"])
def test_a_failure_is_counted_once_by_its_cause(error: TgiError, cause: str, when: str) -> None:
    async def scenario(setup: Setup) -> None:
        backend = setup.infer.backend
        assert isinstance(backend, ScriptedBackend)
        if when == "schedule":
            backend.refusal = error
        if when == "event":
            backend.script = Script((Said("a"), Said("b")), error=error)
        with pytest.raises(type(error)):
            await (answer(setup) if when != "inside" else fail_inside(setup))

    async def fail_inside(setup: Setup) -> None:
        with setup.infer.accept():
            raise error

    setup = run(scenario)
    assert setup.failures() == {cause: 1}
    assert setup.value("tgi_request_count_total") == 1
    assert setup.value("tgi_request_success_total") == 0
    assert setup.infer.free_permits == PERMITS


def test_without_a_permit_a_request_is_refused_before_anything_else() -> None:
    async def scenario(setup: Setup) -> None:
        held = [setup.infer.accept() for _ in range(PERMITS)]
        with pytest.raises(Overloaded, match=r"^Model is overloaded$"):
            await answer(setup, temperature=0.0)
        held[0].cancel()
        await answer(setup)

    setup = run(scenario)
    assert setup.failures() == {"overloaded": 1, "dropped": 1}
    assert setup.value("tgi_request_count_total") == PERMITS + 2


def test_cancel_may_come_at_any_time_and_again() -> None:
    async def scenario(setup: Setup) -> None:
        backend = setup.infer.backend
        assert isinstance(backend, ScriptedBackend)
        early = setup.infer.accept()
        early.cancel()
        early.cancel()
        running = await scheduled(setup)
        running.cancel()
        running.cancel()
        assert backend.playing[-1].cancelled.is_set()
        ended = await scheduled(setup)
        backend.playing[-1]._say([EOS], HELLO)
        ended.cancel()
        assert not backend.playing[-1].cancelled.is_set()
        collector = Collector()
        failed = await scheduled(setup, collector)
        backend.playing[-1]._fail(GenerationFailed("x"))
        failed.cancel()
        assert str(collector.done.exception()) == "x"

    setup = run(scenario, None)
    assert setup.failures() == {"dropped": 2, "generation": 1}
    assert setup.value("tgi_request_success_total") == 1
    assert setup.infer.free_permits == PERMITS


def test_a_handler_that_dies_takes_its_request_with_it() -> None:
    async def scenario(setup: Setup) -> None:
        backend = setup.infer.backend
        assert isinstance(backend, ScriptedBackend)
        waiting = asyncio.create_task(answer(setup))
        await asyncio.sleep(0)  # it runs until it waits for its answer
        assert backend.playing
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert backend.playing[0].cancelled.is_set()

    setup = run(scenario, None)
    assert setup.failures() == {"dropped": 1}
    assert setup.infer.free_permits == PERMITS


async def several(setup: Setup, num_answers: int) -> tuple[Call, list[Collector], list[Playing]]:
    """A request with several answers that wait for what the test makes the model say."""
    backend = setup.infer.backend
    assert isinstance(backend, ScriptedBackend)
    call = setup.infer.accept(num_answers)
    valid = await call.validate(Wish("Hi", GenerateParameters(), NATIVE, received_at=call.received_at))
    collectors = [Collector() for _ in range(num_answers)]
    for request, collector in zip(fork(valid, num_answers), collectors):
        call.schedule(request, collector)
    return call, collectors, backend.playing[-num_answers:]


def test_several_answers_are_one_request() -> None:
    async def scenario(setup: Setup) -> None:
        _, collectors, playing = await several(setup, 2)
        assert setup.infer.free_permits == 0
        playing[1]._say([EOS], HELLO)
        assert setup.infer.free_permits == 1, "each answer gives its permit back at its own end"
        assert setup.value("tgi_request_success_total") == 0
        playing[0]._say([Said("a"), EOS], replace(HELLO, total_s=1.0))
        assert all(collector.finish for collector in collectors)

    setup = run(scenario, None)
    assert setup.value("tgi_request_count_total") == setup.value("tgi_request_success_total") == 1
    assert setup.value("tgi_request_input_length_count") == 1
    assert setup.failures() == {}
    for name in ("duration", "validation_duration", "queue_duration", "inference_duration", "first_token_duration"):
        assert setup.value(f"tgi_request_{name}_count") == 1, name
    for name in ("mean_time_per_token_duration", "generated_tokens"):
        assert setup.value(f"tgi_request_{name}_count") == 2, name
    assert setup.value("tgi_request_generated_tokens_sum") == 3
    assert setup.value("tgi_request_duration_sum") == pytest.approx(1.0), "up to the end of the last"
    assert setup.value("tgi_request_first_token_duration_sum") == pytest.approx(4 / 64), "of the first"
    assert setup.infer.free_permits == PERMITS


@pytest.mark.fault("vllm#14326")
@pytest.mark.parametrize("how", ["fails", "cancelled"])
def test_several_answers_end_together(how: str) -> None:
    async def scenario(setup: Setup) -> None:
        call, collectors, playing = await several(setup, 2)
        playing[0]._say([Said("a")], None)
        assert setup.value("tgi_request_generated_tokens_count") == 0
        if how == "fails":
            playing[0]._fail(GenerationFailed("x"))
            assert str(collectors[0].done.exception()) == "x"
        else:
            call.cancel()
        assert playing[1].cancelled.is_set()
        assert not collectors[1].done.done()
        assert setup.infer.free_permits == PERMITS

    assert run(scenario, None).failures() == {"generation" if how == "fails" else "dropped": 1}


def test_an_answer_that_cannot_be_scheduled_ends_those_before_it() -> None:
    async def scenario(setup: Setup) -> None:
        backend = setup.infer.backend
        assert isinstance(backend, ScriptedBackend)
        call = setup.infer.accept(2)
        valid = await call.validate(Wish("Hi", GenerateParameters(), NATIVE, received_at=call.received_at))
        call.schedule(valid, Collector())
        backend.refusal = Unavailable("gone")
        with pytest.raises(Unavailable):
            call.schedule(valid, Collector())
        assert backend.playing[0].cancelled.is_set()
        assert setup.infer.free_permits == PERMITS

    assert run(scenario, None).failures() == {"generation": 1}


def test_more_answers_than_permits_wait_or_are_wrong() -> None:
    async def scenario(setup: Setup) -> None:
        with setup.infer.accept() as call:
            with pytest.raises(Overloaded):
                setup.infer.accept(PERMITS)
            with pytest.raises(InvalidRequest, match="at most 2 answers"):
                setup.infer.accept(PERMITS + 1)
            assert setup.infer.free_permits == PERMITS - 1
            call.cancel()

    assert run(scenario).failures() == {"overloaded": 1, "validation": 1, "dropped": 1}


def test_success_is_logged_with_its_times(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(setup: Setup) -> None:
        await answer(setup, do_sample=True, seed=3)

    with caplog.at_level(logging.INFO, "tgi.router"):
        run(scenario, Script((Said("a"), Said("b")), FinishReason.LENGTH))
    (record,) = caplog.records
    assert record.getMessage() == "Success"
    assert record.__dict__["fields"] == {
        "total_time": "171.875ms",
        "validation_time": "15.625ms",
        "queue_time": "31.250ms",
        "inference_time": "125.000ms",
        "time_per_token": "62.500ms",
        "seed": 3,
    }


async def scheduled(setup: Setup, collector: Collector | None = None) -> Call:
    call = setup.infer.accept()
    wish = Wish("Hi", GenerateParameters(), NATIVE, received_at=call.received_at)
    call.schedule(await call.validate(wish), collector or Collector())
    return call
