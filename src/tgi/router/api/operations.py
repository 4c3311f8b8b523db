"""What the OpenAPI document says of each route, beside what its wire types say. Knows no handler."""

from __future__ import annotations

from tgi.router.api.openapi import TEXT, ErrorStyle, Operation
from tgi.router.schema.chat import ChatCompletion, ChatCompletionChunk, ChatRequest, ChatTokens
from tgi.router.schema.completions import Completion, CompletionRequest
from tgi.router.schema.generate import CompatRequest, GenerateRequest, GenerateResponse, StreamEvent, TokenSlice
from tgi.router.schema.info import FlushedCache, Info, Model, ModelList
from tgi.router.schema.kserve import (
    InferRequest,
    InferResponse,
    Live,
    ModelMetadata,
    ModelReady,
    Ready,
    ServerMetadata,
)
from tgi.router.schema.messages import (
    CountTokensRequest,
    MessageAnswer,
    MessageEvent,
    MessagesRequest,
    TokenCount,
)
from tgi.router.schema.responses import ResponseEvent, ResponseObject, ResponsesRequest
from tgi.router.schema.vertex import VertexRequest, VertexResponse

NATIVE, OPENAI, ANTHROPIC, CLOUDS, SERVER = "Text generation", "OpenAI", "Anthropic", "Clouds", "Server"

READING = (400, 413, 415, 422, 500)
"""Errors of a route that reads a body; on /v1, 400 stands for 422 too."""
RUNNING = (*READING, 424, 429, 503)
"""And of one that runs the model."""
READING_V1 = tuple(status for status in READING if status != 422)
RUNNING_V1 = tuple(status for status in RUNNING if status != 422)

RUNNING_MESSAGES = tuple(status for status in RUNNING_V1 if status != 424)
"""Anthropic's 500 stands for 424 too."""

ON_V1 = (ErrorStyle.OPENAI,)
ON_MESSAGES = (ErrorStyle.ANTHROPIC,)

_PROMPT = {"inputs": "What is deep learning?", "parameters": {"max_new_tokens": 20}}
_MESSAGES = [{"role": "user", "content": "What is deep learning?"}]
_CHAT = {"messages": _MESSAGES, "max_tokens": 20}


def health(operation_id: str, summary: str = "Is the model there and moving?", tag: str = SERVER) -> Operation:
    return Operation(operation_id, tag, summary, errors=(503,))


COMPAT_GENERATE = Operation(
    "compat_generate",
    NATIVE,
    "Generate tokens; a stream if `stream` is true",
    bodies=(CompatRequest,),
    example=_PROMPT | {"stream": False},
    answer=(list[GenerateResponse],),
    events=(StreamEvent,),
    errors=RUNNING,
)
GENERATE = Operation(
    "generate",
    NATIVE,
    "Generate tokens",
    bodies=(GenerateRequest,),
    example=_PROMPT,
    answer=(GenerateResponse,),
    errors=RUNNING,
)
GENERATE_STREAM = Operation(
    "generate_stream",
    NATIVE,
    "Generate tokens, sent as they come",
    bodies=(GenerateRequest,),
    example=_PROMPT,
    events=(StreamEvent,),
    errors=RUNNING,
)
TOKENIZE = Operation(
    "tokenize",
    NATIVE,
    "The tokens of a prompt",
    bodies=(GenerateRequest,),
    example={"inputs": _PROMPT["inputs"]},
    answer=(list[TokenSlice],),
    errors=READING,
)
CHAT_TOKENIZE = Operation(
    "get_chat_tokenize",
    NATIVE,
    "The prompt of a chat, and its tokens",
    bodies=(ChatRequest,),
    example={"messages": _MESSAGES},
    answer=(ChatTokens,),
    errors=READING,
)
CHAT_COMPLETIONS = Operation(
    "chat_completions",
    OPENAI,
    "Answer a chat; a stream if `stream` is true",
    bodies=(ChatRequest,),
    example=_CHAT,
    answer=(ChatCompletion,),
    events=(ChatCompletionChunk,),
    errors=RUNNING_V1,
    error_styles=ON_V1,
)
COMPLETIONS = Operation(
    "completions",
    OPENAI,
    "Complete one or more prompts; a stream if `stream` is true",
    bodies=(CompletionRequest,),
    example={"prompt": "Deep learning is", "max_tokens": 20},
    answer=(Completion,),
    events=(Completion,),
    errors=RUNNING_V1,
    error_styles=ON_V1,
)
RESPONSES = Operation(
    "responses",
    OPENAI,
    "Answer a conversation; a stream if `stream` is true. Nothing is stored",
    bodies=(ResponsesRequest,),
    example={"input": "What is deep learning?", "max_output_tokens": 20},
    answer=(ResponseObject,),
    events=(ResponseEvent,),
    errors=RUNNING_V1,
    error_styles=ON_V1,
)
MESSAGES = Operation(
    "messages",
    ANTHROPIC,
    "Answer a conversation; a stream if `stream` is true",
    bodies=(MessagesRequest,),
    example=_CHAT,
    answer=(MessageAnswer,),
    events=(MessageEvent,),
    errors=RUNNING_MESSAGES,
    error_styles=ON_MESSAGES,
)
COUNT_TOKENS = Operation(
    "count_tokens",
    ANTHROPIC,
    "The length of a conversation's prompt",
    bodies=(CountTokensRequest,),
    example={"messages": _MESSAGES},
    answer=(TokenCount,),
    errors=READING_V1,
    error_styles=ON_MESSAGES,
)
MODELS = Operation("openai_get_model_info", OPENAI, "The models: one", answer=(ModelList,))
MODEL = Operation("openai_get_model", OPENAI, "A model of the list", answer=(Model,), errors=(404,), error_styles=ON_V1)

INVOCATIONS = Operation(
    "sagemaker_compatibility",
    CLOUDS,
    "SageMaker: the body of `/`, of a chat or of a completion, and its answer",
    bodies=(CompatRequest, ChatRequest, CompletionRequest),
    example=_PROMPT,
    answer=(list[GenerateResponse], ChatCompletion, Completion),
    events=(StreamEvent, ChatCompletionChunk, Completion),
    errors=RUNNING,
    error_styles=(ErrorStyle.NATIVE, ErrorStyle.OPENAI),
)


def vertex(operation_id: str) -> Operation:
    return Operation(
        operation_id,
        CLOUDS,
        "Vertex AI: one text for each prompt or chat",
        bodies=(VertexRequest,),
        example={"instances": [_PROMPT, _CHAT]},
        answer=(VertexResponse,),
        errors=RUNNING,
    )


INFO = Operation("get_model_info", SERVER, "What is served, and within which limits", answer=(Info,))
FLUSH_CACHE = Operation("flush_cache", SERVER, "Forget cached prefixes that no request uses", answer=(FlushedCache,))
METRICS = Operation("metrics", SERVER, "Prometheus metrics", answer_media=TEXT)
OPENAPI = Operation("openapi", SERVER, "This document", answer=(dict,))

KSERVE_SERVER = Operation("kserve_server", CLOUDS, "KServe: the server", answer=(ServerMetadata,))
KSERVE_LIVE = Operation("kserve_live", CLOUDS, "KServe: does the server answer?", answer=(Live,))
KSERVE_READY = Operation("kserve_ready", CLOUDS, "KServe: is the model there?", answer=(Ready,), answers={503: Ready})


def kserve_model(operation_id: str) -> Operation:
    return Operation(operation_id, CLOUDS, "KServe: the model", answer=(ModelMetadata,), errors=(404,))


def kserve_model_ready(operation_id: str) -> Operation:
    return Operation(
        operation_id,
        CLOUDS,
        "KServe: is the model there?",
        answer=(ModelReady,),
        errors=(404,),
        answers={503: ModelReady},
    )


def kserve_infer(operation_id: str) -> Operation:
    return Operation(
        operation_id,
        CLOUDS,
        "KServe: one text for each prompt",
        bodies=(InferRequest,),
        example={
            "id": "1",
            "inputs": [{"name": "prompt", "shape": [1], "datatype": "BYTES", "data": [_PROMPT["inputs"]]}],
            "outputs": [{"name": "text"}],
        },
        answer=(InferResponse,),
        errors=(*RUNNING, 404),
    )
