"""The clients that people have, against the whole server: huggingface_hub's, openai's, and TGI's old one."""

from __future__ import annotations

import openai
import pytest
import text_generation
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError
from openai import OpenAI
from text_generation.errors import ValidationError as OldValidationError

from benchmarks.server_process import Server

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

QUESTION = [{"role": "user", "content": "Explain why the sky is blue in two sentences."}]


@pytest.fixture
def hub(bundled_server: Server) -> InferenceClient:
    return InferenceClient(bundled_server.url)


@pytest.fixture
def chat(bundled_server: Server) -> OpenAI:
    return OpenAI(base_url=f"{bundled_server.url}/v1", api_key="-", max_retries=0)


@pytest.fixture
def old(bundled_server: Server) -> text_generation.Client:
    return text_generation.Client(bundled_server.url, timeout=60)


@pytest.mark.row("F: Hub client", "G: 1 hub client")
def test_hub_client_generates_plain_and_streamed(hub: InferenceClient) -> None:
    """Its answers are those of `POST /`, which holds the prompt too."""
    answer = hub.text_generation("The capital of France is", max_new_tokens=8, details=True)
    assert answer.details is not None
    assert answer.details.finish_reason == "length"
    assert len(answer.details.tokens) == 8
    stream = hub.text_generation("The capital of France is", max_new_tokens=8, details=True, stream=True)
    events = list(stream)
    assert "The capital of France is" + "".join(event.token.text for event in events) == answer.generated_text
    assert events[-1].generated_text == answer.generated_text
    assert [event.details is None for event in events] == [True] * 7 + [False]


@pytest.mark.row("G: 1 hub client")
def test_hub_client_chats(hub: InferenceClient) -> None:
    answer = hub.chat_completion(QUESTION, max_tokens=16, temperature=0)
    assert (answer.choices[0].message.content or "").startswith("The sky is blue")
    stream = hub.chat_completion(QUESTION, max_tokens=16, temperature=0, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == answer.choices[0].message.content


@pytest.mark.row("G: 1 hub client")
def test_hub_client_raises_the_right_errors(hub: InferenceClient) -> None:
    with pytest.raises(ValidationError, match=r"`top_p` must be > 0\.0 and < 1\.0"):
        hub.text_generation("x", top_p=2.0)
    with pytest.raises(HfHubHTTPError) as raised:
        hub.chat_completion(QUESTION, top_p=2.0)
    assert raised.value.response.status_code == 400


@pytest.mark.row("F: openai client")
def test_openai_client_streams_what_it_gets_at_once_and_counts_it(chat: OpenAI) -> None:
    answer = chat.chat.completions.create(model="tgi", messages=QUESTION, max_tokens=16, temperature=0)  # pyright: ignore
    assert answer.id
    assert answer.usage is not None
    assert answer.choices[0].finish_reason in ("stop", "length")
    stream = chat.chat.completions.create(
        model="tgi",
        messages=QUESTION,  # pyright: ignore
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + [answer.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens


@pytest.mark.row("F: openai client")
def test_openai_client_reads_errors_and_models(chat: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        chat.chat.completions.create(
            model="tgi",
            messages=QUESTION,  # pyright: ignore
            max_tokens=1_000_000,
        )
    assert raised.value.code == "context_length_exceeded"
    assert len(list(chat.models.list())) == 1


@pytest.mark.row("F: Old Python client")
@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")  # the client's own
def test_old_client_generates_streams_and_raises(old: text_generation.Client) -> None:
    """It declares an old huggingface_hub, and works with today's."""
    answer = old.generate("The capital of France is", max_new_tokens=8)
    assert answer.details is not None
    assert answer.details.generated_tokens == 8
    events = list(old.generate_stream("The capital of France is", max_new_tokens=8))
    assert "".join(event.token.text for event in events) == answer.generated_text
    assert events[-1].generated_text == answer.generated_text
    with pytest.raises(OldValidationError, match="`inputs` cannot be empty"):
        old.generate("", max_new_tokens=8)
