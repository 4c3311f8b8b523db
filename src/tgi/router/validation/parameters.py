"""Ranges and defaults of what a request may ask for, in TGI's texts and TGI's order of checks. Knows no prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tgi.errors import InvalidRequest
from tgi.router.schema.generate import GenerateParameters
from tgi.router.validation.door import Door
from tgi.router.validation.request import ValidStopping
from tgi.shard_client.messages import NEUTRAL_TEMPERATURE, Sampling

MAX_STOP_TOKEN_IDS = 64
"""The shard compares every new token with them."""

MAX_LOGIT_BIAS = 1024
"""Entries; each is kept on the device while the request runs. OpenAI's clients send 300 at most."""

MAX_BAD_WORDS = 128
"""The shard compares the end of the answer with each, at every token."""

MAX_BAD_WORD = 256
"""Characters. A word of so few is tokenised on the spot."""

MAX_BAD_WORD_TOKENS = 32
"""The shard keeps as many of the last tokens, less one, of a row that has such words."""

MIN_TEMPERATURE = 1e-4
"""Below, logits divided by the temperature leave float32; the choice has long been the greedy one."""

MIN_REPETITION_PENALTY = 1e-18
"""Below, float32 has no room for the logits that it multiplies or divides."""

_MAX_F32 = 3.4028234e38


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server was started with. Tokens, except the counts."""

    max_input_tokens: int
    max_total_tokens: int
    vocab_size: int  # of the model: an id at or above it must never reach the device
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    prompt_logprobs: bool = False  # does the shard compute them


def check_streaming(parameters: GenerateParameters) -> None:
    """Raises InvalidRequest for what TGI does not stream."""
    if parameters.best_of is not None and parameters.best_of != 1:
        raise InvalidRequest("`best_of` != 1 is not supported when streaming tokens", "best_of")
    if parameters.decoder_input_details:
        raise InvalidRequest(
            "`decoder_input_details` == true is not supported when streaming tokens", "decoder_input_details"
        )


def check_parameters(parameters: GenerateParameters, door: Door, limits: Limits) -> None:
    """Raises InvalidRequest for the first value out of its range, then for the first that this server cannot do."""
    _check_best_of(parameters, limits)
    _check_warpers(parameters, door)
    if parameters.max_new_tokens == 0:
        raise InvalidRequest(f"`{door.max_new_tokens}` must be strictly positive", door.max_new_tokens)
    _check_stops(parameters, limits)
    _check_seed(parameters)
    _check_logit_bias(parameters.logit_bias, limits)
    _check_bad_words(parameters.bad_words or ())
    top_n = parameters.top_n_tokens or 0
    max_top_n = max(limits.max_top_n_tokens, door.granted_top_n)
    if top_n > max_top_n:
        raise InvalidRequest(
            f"`{door.top_n_tokens}` must be >= 0 and <= {max_top_n}. Given: {top_n}", door.top_n_tokens
        )
    _check_supported(parameters, door, limits)


def is_sampling(parameters: GenerateParameters, door: Door) -> bool:
    """Is the next token drawn? TGI: when asked to, or when any warper is not neutral."""
    if door.zero_temperature and parameters.temperature == 0:
        return False
    return bool(
        parameters.do_sample
        or _given(parameters.temperature, NEUTRAL_TEMPERATURE)
        or parameters.top_k
        or _given(parameters.top_p, 1.0)
        or _given(parameters.typical_p, 1.0)
        or parameters.min_p
    )


def sampling_of(
    parameters: GenerateParameters,
    door: Door,
    limits: Limits,
    draw_seed: Callable[[], int],
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Sampling:
    """Checked parameters, resolved. `draw_seed` gives a u64 for a request without one. `bad_words`: those of the
    request as token ids."""
    penalty = parameters.repetition_penalty
    # Those of a greedy request too: a penalty moves the best token.
    greedy = Sampling(
        repetition_penalty=1.0 if penalty is None else max(penalty, MIN_REPETITION_PENALTY),
        frequency_penalty=parameters.frequency_penalty or 0.0,
        presence_penalty=parameters.presence_penalty or 0.0,
        watermark=bool(parameters.watermark),
        logit_bias=_logit_bias(parameters.logit_bias),
        bad_words=bad_words,
        seed=draw_seed() if parameters.seed is None else parameters.seed,
        raw_logprobs=door.raw_logprobs,
    )
    if not is_sampling(parameters, door):
        return greedy
    temperature = NEUTRAL_TEMPERATURE if parameters.temperature is None else parameters.temperature
    top_k = parameters.top_k or 0
    return replace(
        greedy,
        do_sample=True,
        temperature=max(temperature, MIN_TEMPERATURE),
        top_k=top_k if top_k < limits.vocab_size else 0,
        top_p=1.0 if parameters.top_p is None else parameters.top_p,
        min_p=parameters.min_p or 0.0,
        typical_p=1.0 if parameters.typical_p is None else parameters.typical_p,
    )


def _logit_bias(bias: dict[str, float] | list[float] | None) -> tuple[tuple[int, float], ...]:
    """Checked entries, those that change nothing left out."""
    if not isinstance(bias, dict):
        return ()
    return tuple((int(key), value) for key, value in bias.items() if value)


def stopping_of(parameters: GenerateParameters, door: Door, max_new_tokens: int) -> ValidStopping:
    """Checked parameters, resolved, for an answer of at most `max_new_tokens`. Raises InvalidRequest."""
    min_new_tokens = parameters.min_tokens or 0
    if min_new_tokens > max_new_tokens:
        raise InvalidRequest(
            f"`min_tokens` must be <= `{door.max_new_tokens}`, here {max_new_tokens}. Given: {min_new_tokens}",
            "min_tokens",
        )
    include_stop = parameters.include_stop_str_in_output
    return ValidStopping(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        stop_ids=tuple(dict.fromkeys(parameters.stop_token_ids or ())),
        # An empty string would match everywhere; forms send it for "none".
        stop_strings=tuple(dict.fromkeys(stop for stop in parameters.stop or () if stop)),
        include_stop=door.include_stop if include_stop is None else include_stop,
        ignore_eos=bool(parameters.ignore_eos or parameters.ignore_eos_token),
    )


def _given(value: float | None, neutral: float) -> bool:
    return value is not None and value != neutral


def _check_best_of(parameters: GenerateParameters, limits: Limits) -> None:
    best_of = parameters.best_of or 1
    if best_of == 1:
        return
    if limits.max_best_of == 1:
        raise InvalidRequest("`best_of` != 1 is not allowed for this endpoint", "best_of")
    if best_of > limits.max_best_of:
        raise InvalidRequest(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}", "best_of")
    asked = (parameters.temperature, parameters.top_k, parameters.top_p, parameters.typical_p, parameters.min_p)
    if not parameters.do_sample and all(value is None for value in asked):
        raise InvalidRequest("you must use sampling when `best_of` is > 1", "best_of")


def _check_warpers(parameters: GenerateParameters, door: Door) -> None:
    for name in ("temperature", "repetition_penalty", "frequency_penalty", "presence_penalty"):
        value = getattr(parameters, name)
        if value is not None and abs(value) > _MAX_F32:
            raise InvalidRequest(f"`{name}` is too large for a 32-bit number", name)
    temperature = parameters.temperature
    if temperature is not None and not temperature > 0 and not (temperature == 0 and door.zero_temperature):
        raise InvalidRequest("`temperature` must be strictly positive", "temperature")
    if parameters.repetition_penalty is not None and not parameters.repetition_penalty > 0:
        raise InvalidRequest("`repetition_penalty` must be strictly positive", "repetition_penalty")
    for name in ("frequency_penalty", "presence_penalty"):
        value = getattr(parameters, name)
        if value is not None and not -2.0 <= value <= 2.0:
            raise InvalidRequest(f"`{name}` must be >= -2.0 and <= 2.0", name)
    # 1.0 is neutral and common, so it passes, though TGI and its text exclude it.
    for name in ("top_p", "typical_p"):
        value = getattr(parameters, name)
        if value is not None and not 0.0 < value <= 1.0:
            raise InvalidRequest(f"`{name}` must be > 0.0 and < 1.0", name)
    if parameters.top_k is not None and parameters.top_k < 0:
        raise InvalidRequest("`top_k` must be strictly positive", "top_k")
    if parameters.min_p is not None and not 0.0 <= parameters.min_p <= 1.0:
        raise InvalidRequest("`min_p` must be >= 0.0 and <= 1.0", "min_p")


def _check_stops(parameters: GenerateParameters, limits: Limits) -> None:
    stop = parameters.stop or ()
    if len(stop) > limits.max_stop_sequences:
        raise InvalidRequest(
            f"`stop` supports up to {limits.max_stop_sequences} stop sequences. Given: {len(stop)}", "stop"
        )
    stop_ids = parameters.stop_token_ids or ()
    if len(stop_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"`stop_token_ids` supports up to {MAX_STOP_TOKEN_IDS} ids. Given: {len(stop_ids)}", "stop_token_ids"
        )
    for token_id in stop_ids:
        if token_id >= limits.vocab_size:
            raise InvalidRequest(
                f"`stop_token_ids` must be below the size of the vocabulary, {limits.vocab_size}. Given: {token_id}",
                "stop_token_ids",
            )


def _check_seed(parameters: GenerateParameters) -> None:
    seed = parameters.seed
    if seed is None:
        return
    if not 0 <= seed < 2**64:
        raise InvalidRequest(f"`seed` must be >= 0 and < 2^64. Given: {seed}", "seed")
    if (parameters.best_of or 1) > 1:
        raise InvalidRequest("`seed` must not be set when `best_of` > 1", "seed")


def _check_logit_bias(bias: dict[str, float] | list[float] | None, limits: Limits) -> None:
    """TGI's own shape is a list, which it has never used: an empty one asks for nothing."""
    if not bias:
        return
    name = "logit_bias"
    if isinstance(bias, list):
        raise InvalidRequest("`logit_bias` must be an object that maps token ids to numbers, not a list", name)
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"`logit_bias` supports up to {MAX_LOGIT_BIAS} token ids. Given: {len(bias)}", name)
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < limits.vocab_size):
            raise InvalidRequest(
                f"`logit_bias` must name token ids >= 0 and < {limits.vocab_size}. Given: {key[:40]!r}", name
            )
        if not -100.0 <= value <= 100.0:
            raise InvalidRequest(f"`logit_bias` must have values >= -100 and <= 100. Given: {value} for {key}", name)


def _check_bad_words(words: Sequence[str]) -> None:
    name = "bad_words"
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"`bad_words` supports up to {MAX_BAD_WORDS} words. Given: {len(words)}", name)
    for word in words:
        if not word.strip(" "):
            raise InvalidRequest("`bad_words` must not hold an empty string, nor one of blanks alone", name)
        if len(word) > MAX_BAD_WORD:
            limit = f"`bad_words` supports words of up to {MAX_BAD_WORD} characters"
            raise InvalidRequest(f"{limit}. Given: {word[:40]!r} of {len(word)}", name)


def _check_supported(parameters: GenerateParameters, door: Door, limits: Limits) -> None:
    """Refuse by name what would change the answer and cannot be done; a value that changes nothing passes."""
    if parameters.decoder_input_details and not limits.prompt_logprobs:
        raise InvalidRequest(
            f"`{door.prompt_logprobs}` needs a server that was started with `--enable-prefill-logprobs`, and a "
            "model that is no encoder-decoder",
            door.prompt_logprobs,
        )
    if parameters.adapter_id:
        raise InvalidRequest(
            f"`adapter_id` names an adapter that is not loaded: {parameters.adapter_id!r}; leave it out to use the "
            "base model",
            "adapter_id",
        )
