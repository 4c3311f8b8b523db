"""KServe's inference protocol, version 2, behind --kserve. One model is served, under whatever name it is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tgi.router.api import generate
from tgi.router.api.body import BodyReader, wrong_shape
from tgi.router.api.inner import Part, answers, check_count
from tgi.router.api.services import services_of
from tgi.router.schema.generate import GenerateRequest, GenerateResponse
from tgi.router.schema.info import NativeError
from tgi.router.schema.kserve import (
    InferRequest,
    InferResponse,
    InputTensor,
    Live,
    ModelMetadata,
    ModelReady,
    OutputTensor,
    Ready,
    ServerMetadata,
    TensorMetadata,
)
from tgi.router.validation.door import NATIVE

SERVER = "text-generation-inference"

_body = BodyReader(InferRequest)
_generated = msgspec.json.Decoder(GenerateResponse)
_encode = msgspec.json.Encoder().encode


async def server_metadata(request: Request) -> Response:
    return _json(ServerMetadata(SERVER, services_of(request).info.version, []))


async def live(request: Request) -> Response:
    """This process answers: whoever restarts it for a slow shard would make it slower."""
    return _json(Live(True))


async def ready(request: Request) -> Response:
    is_ready = await services_of(request).infer.backend.is_healthy()
    return _json(Ready(is_ready, is_ready), 200 if is_ready else 503)


async def model_ready(request: Request) -> Response:
    is_ready = await services_of(request).infer.backend.is_healthy()
    return _json(ModelReady(request.path_params["name"], is_ready, is_ready), 200 if is_ready else 503)


async def model_metadata(request: Request) -> Response:
    name, version = request.path_params["name"], request.path_params.get("version")
    text = [TensorMetadata("text", "BYTES", [-1])]
    return _json(ModelMetadata(name, [] if version is None else [version], SERVER, text, text))


async def infer(request: Request) -> Response:
    """Every text is a prompt of its own; they run at once. An output has the form of its input."""
    body = await _body.read(request, services_of(request).payload_limit)
    outputs = [tensor.name for tensor in (body.inputs if body.outputs is None else body.outputs)]
    if len(outputs) != len(body.inputs):
        return _json(NativeError("Inputs and outputs length mismatch", "length mismatch"), 422)
    try:
        prompts = [_texts(tensor, f"inputs[{index}]") for index, tensor in enumerate(body.inputs)]
    except UnicodeDecodeError as error:
        return _json(NativeError(str(error), "utf8"), 422)
    check_count(request, sum(map(len, prompts)))
    if body.parameters is not None and not any(prompts):  # nobody else looks at them
        services_of(request).infer.validator.check(body.parameters, NATIVE)
    parts = [
        Part(
            f"inputs[{index}]",
            "/generate",
            generate.generate,
            _encode(GenerateRequest(inputs=text, parameters=body.parameters)),
        )
        for index, texts in enumerate(prompts)
        for text in texts
    ]
    generated = iter([_generated.decode(answer).generated_text for answer in await answers(request, parts)])
    answer = InferResponse(
        id=UNSET if body.id is None else body.id,
        model_name=request.path_params["name"],
        model_version=request.path_params.get("version", UNSET),
        outputs=[
            _output(name, tensor, [next(generated) for _ in texts])
            for name, tensor, texts in zip(outputs, body.inputs, prompts, strict=True)
        ],
    )
    return _json(answer)


def _texts(tensor: InputTensor, place: str) -> Sequence[str]:
    """Raises UnicodeDecodeError, BodyRefused."""
    if _is_strings(tensor):
        texts = [item for item in tensor.data if isinstance(item, str)]
        if len(texts) != len(tensor.data):
            raise wrong_shape("expected either bytes or strings", f"{place}.data")
        return texts
    try:
        return [bytes(tensor.data).decode()]  # pyright: ignore[reportArgumentType] - integers, as just seen
    except TypeError:
        raise wrong_shape("expected either bytes or strings", f"{place}.data") from None


def _output(name: str, tensor: InputTensor, texts: Sequence[str]) -> OutputTensor:
    if _is_strings(tensor):
        return OutputTensor(name=name, shape=[len(texts)], datatype="BYTES", data=texts)
    data = texts[0].encode()
    return OutputTensor(name=name, shape=[1, len(data)], datatype="BYTES", data=list(data))


def _is_strings(tensor: InputTensor) -> bool:
    return bool(tensor.data) and isinstance(tensor.data[0], str)


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(_encode(value), status, media_type="application/json")
