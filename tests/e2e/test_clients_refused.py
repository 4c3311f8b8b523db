"""A whole server with a key and room for one request, as clients see it that have no key, or come too late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import requests
import text_generation
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, OverloadedError
from openai import OpenAI
from text_generation import errors as old_errors

from tests.e2e.servers import Whole, launched

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real_model,
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),  # the old client's own
]

KEY = "sesame"
QUESTION: list[Any] = [{"role": "user", "content": "Name a colour."}]
ENDLESS = {"max_tokens": 4_000, "extra_body": {"ignore_eos": True}}
BRIEF: dict[str, Any] = {"model": "tgi", "messages": QUESTION, "max_tokens": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Whole]:
    with launched("--api-key", KEY, "--max-concurrent-requests", "1") as server:
        yield server


@pytest.mark.fault("TGI#2026")
@pytest.mark.row("B: API key", "F: openai client", "F: Hub client", "F: Old Python client")
def test_the_key(server: Whole) -> None:
    for key in ("wrong", KEY.upper()):
        with OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as stranger:
            for stream in (False, True):
                with pytest.raises(openai.AuthenticationError) as raised:
                    stranger.chat.completions.create(**BRIEF, stream=stream)
                assert raised.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                stranger.completions.create(model="tgi", prompt="x", max_tokens=1)
            assert list(stranger.models.list())  # what costs nothing is open
    for hub in (InferenceClient(server.url), InferenceClient(server.url, token="wrong")):
        with pytest.raises(HfHubHTTPError) as refused:
            hub.text_generation("x")
        assert refused.value.response.status_code == 401
        with pytest.raises(HfHubHTTPError) as refused:
            hub.chat_completion(QUESTION)
        assert refused.value.response.status_code == 401
    assert requests.get(f"{server.url}/health", timeout=60).status_code == 200
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as friend:
        assert friend.chat.completions.create(**BRIEF).choices
    friend = InferenceClient(server.url, token=KEY, provider="hf-inference")
    assert friend.text_generation("x", max_new_tokens=1)
    assert friend.get_endpoint_info()["max_concurrent_requests"] == 1
    old = text_generation.Client(server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    assert old.generate("x", max_new_tokens=1).details.generated_tokens == 1


@pytest.mark.row(
    "B: max_concurrent_requests", "G: 6 overload answers 429 and recovers", "F: openai client", "F: Hub client"
)
def test_overload_and_after(server: Whole) -> None:
    """Streams too are refused with the status. When the other has gone there is room again: a client that heeds
    `Retry-After` gets in without knowing more.
    """
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        hub = InferenceClient(server.url, token=KEY)
        old = text_generation.Client(server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
        with client.chat.completions.create(model="tgi", messages=QUESTION, stream=True, **ENDLESS) as running:
            assert next(iter(running)).choices
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError) as raised:
                    client.chat.completions.create(**BRIEF, stream=stream)
                assert raised.value.code == "overloaded"
                assert int(raised.value.response.headers["retry-after"]) > 0
                with pytest.raises(OverloadedError):
                    list(hub.text_generation("x", stream=stream))
                with pytest.raises(HfHubHTTPError) as refused:
                    list(hub.chat_completion(QUESTION, stream=stream))
                assert refused.value.response.status_code == 429
            with pytest.raises(old_errors.OverloadedError):
                old.generate("x")
            with pytest.raises(old_errors.OverloadedError):
                list(old.generate_stream("x"))
        assert client.with_options(max_retries=8).chat.completions.create(**BRIEF).choices
