"""Waiting for whole answers."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from starlette.requests import Request

from tests.fakes.backend import ScriptedBackend
from tgi.observability.metrics import Metrics
from tgi.router.api.answer import collect
from tgi.router.api.errors import ClientGone
from tgi.router.infer import Infer
from tgi.router.validation.request import ValidRequest, ValidStopping
from tgi.shard_client.messages import Sampling

REQUEST = ValidRequest(prompt_ids=b"\x01\x00\x00\x00", sampling=Sampling(), stopping=ValidStopping(max_new_tokens=4))


def test_answers_that_nobody_waits_for_any_more_are_forgotten_without_a_complaint() -> None:
    complaints: list[dict[str, Any]] = []

    async def hang_up() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        backend = ScriptedBackend(None)
        infer = Infer(backend, None, Metrics(10, 10), 4)  # type: ignore[arg-type] - nothing is validated here
        with pytest.raises(ClientGone):
            await collect(Request({"type": "http"}, hang_up), infer.accept(2), [REQUEST, REQUEST])
        assert all(playing.cancelled.is_set() for playing in backend.playing)
        assert infer.free_permits == 4
        await asyncio.sleep(0)
        gc.collect()

    asyncio.run(main())
    gc.collect()
    assert complaints == []
