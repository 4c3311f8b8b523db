"""The handful of facts about a model that launcher, router and shard read: from config.json or a GGUF's metadata.

Knows no weights and no architecture: what only one architecture needs, it reads from `ModelConfig.raw` itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi.errors import StartupError
from tgi.gguf_file import BadGguf, GgufFile

# GGUF architecture -> (model_type, class name of the same architecture in config.json).
GGUF_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}
GGUF_ACTIVATIONS = {"gemma": "gelu_pytorch_tanh", "gemma2": "gelu_pytorch_tanh"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes are counts of elements, lengths are tokens. Fields that a model does not say are None where None is
    allowed, else the usual default of the field. For a composite model (vision and text) these are its text part's."""

    model_type: str
    architectures: tuple[str, ...]
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int | None
    tie_word_embeddings: bool
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # holds "rope_type", whichever spelling the file used
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str
    eos_ids: tuple[int, ...]  # of config.json and generation_config.json, without repeats
    bos_id: int | None
    torch_dtype: str | None  # "bfloat16"
    quant_method: str | None
    sliding_window: int | None
    raw: Mapping[str, Any]  # the whole config.json; empty for GGUF


def read_model_config(path: Path) -> ModelConfig:
    """Facts of the model at `path`, a directory with config.json or a .gguf file.

    Raises StartupError, one line naming file and field, when something is missing or makes no sense.
    """
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return _from_gguf(path)
    file = path / "config.json"
    config = _read_json(file)
    if config is None:
        raise StartupError(f"{path} has no config.json: it is not a model directory")
    return _from_json(config, _read_json(path / "generation_config.json") or {}, file)


class _Fields:
    """Typed look-ups in one JSON object, with errors that name the file and the field."""

    def __init__(self, values: Mapping[str, Any], where: object) -> None:
        self.values = values
        self.where = where

    def get(self, *names: str) -> Any:
        """The first of `names` (spellings of one field) that is there and not null."""
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        return None

    def count(self, *names: str, default: int | None = None) -> int:
        value = self.optional_count(*names)
        if value is not None:
            return value
        if default is not None:
            return default
        raise StartupError(f"{self.where} does not say {names[0]}")

    def optional_count(self, *names: str) -> int | None:
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise StartupError(f"{self.where}: {names[0]} must be a positive whole number, not {value!r}")
        return value

    def number(self, *names: str, default: float) -> float:
        value = self.get(*names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise StartupError(f"{self.where}: {names[0]} must be a positive number, not {value!r}")
        return float(value)

    def text(self, *names: str) -> str | None:
        value = self.get(*names)
        if value is not None and not isinstance(value, str):
            raise StartupError(f"{self.where}: {names[0]} must be a text, not {value!r}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise StartupError(f"{self.where}: {name} must be true or false, not {value!r}")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
            raise StartupError(f"{self.where}: {name} must be a token id or a list of them, not {value!r}")
        return tuple(ids)


def _from_json(config: dict[str, Any], generation: dict[str, Any], file: Path) -> ModelConfig:
    text_config = config.get("text_config")
    fields = _Fields({**config, **text_config} if isinstance(text_config, dict) else config, file)
    whole = _Fields(config, file)
    model_type = whole.text("model_type")
    if model_type is None:
        raise StartupError(f"{file} does not say model_type")
    architectures = whole.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise StartupError(f"{file}: architectures must be a list of class names, not {architectures!r}")
    hidden_size = fields.count("hidden_size", "n_embd", "d_model")
    num_heads = fields.count("num_attention_heads", "n_head", "num_heads")
    theta, scaling = _rope(fields)
    generation_fields = _Fields(generation, file.with_name("generation_config.json"))
    return ModelConfig(
        model_type=model_type,
        architectures=tuple(architectures),
        hidden_size=hidden_size,
        num_layers=fields.count("num_hidden_layers", "n_layer", "num_layers"),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(fields, num_heads),
        head_dim=_head_dim(fields, hidden_size, num_heads),
        intermediate_size=fields.count("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden_size),
        vocab_size=fields.count("vocab_size"),
        max_position_embeddings=fields.optional_count("max_position_embeddings", "max_seq_len", "n_positions"),
        tie_word_embeddings=whole.flag("tie_word_embeddings", default=fields.flag("tie_word_embeddings")),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=fields.number("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", default=1e-6),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        hidden_act=fields.text("hidden_act", "hidden_activation", "activation_function") or "silu",
        eos_ids=_without_repeats(fields.ids("eos_token_id") + generation_fields.ids("eos_token_id")),
        bos_id=next(iter(fields.ids("bos_token_id")), None),
        torch_dtype=_dtype(fields),
        quant_method=_quant_method(whole),
        sliding_window=_sliding_window(fields),
        raw=config,
    )


def _from_gguf(path: Path) -> ModelConfig:
    try:
        file = GgufFile(path)
    except BadGguf as error:
        raise StartupError(f"{str(error)[:1].upper()}{str(error)[1:]}") from error
    architecture = file.get("general.architecture")
    if not isinstance(architecture, str):
        raise StartupError(f"{path} does not say general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        known = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise StartupError(f"{path}: GGUF files of architecture {architecture!r} are not supported ({known} are)")
    model_type, class_name = GGUF_ARCHITECTURES[architecture]
    fields = _Fields(file, path)

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    hidden_size = fields.count(key("embedding_length"))
    num_heads = fields.count(key("attention.head_count"))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise StartupError(f"{path} has no table token_embd.weight: the file is no whole model")
    num_kv_heads = fields.count(key("attention.head_count_kv"), default=num_heads)
    _check_groups(path, num_heads, num_kv_heads)
    return ModelConfig(
        model_type=model_type,
        architectures=(class_name,),
        hidden_size=hidden_size,
        num_layers=fields.count(key("block_count")),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.count(key("attention.key_length"), default=_divide(path, hidden_size, num_heads)),
        intermediate_size=fields.count(key("feed_forward_length")),
        vocab_size=embedding.shape[0],  # the metadata's count may differ from the padded table's rows
        max_position_embeddings=fields.optional_count(key("context_length")),
        tie_word_embeddings="output.weight" not in file.tensors,
        rope_theta=fields.number(key("rope.freq_base"), default=10000.0),
        rope_scaling=_gguf_rope_scaling(fields, key("rope.scaling.")),
        rms_norm_eps=fields.number(key("attention.layer_norm_rms_epsilon"), default=1e-6),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        hidden_act=GGUF_ACTIVATIONS.get(architecture, "silu"),
        eos_ids=_without_repeats(fields.ids("tokenizer.ggml.eos_token_id") + fields.ids("tokenizer.ggml.eot_token_id")),
        bos_id=next(iter(fields.ids("tokenizer.ggml.bos_token_id")), None),
        torch_dtype=None,
        quant_method=None,
        sliding_window=fields.optional_count(key("attention.sliding_window")),
        raw={},
    )


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StartupError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{file} does not hold a JSON object")
    return value


def _kv_heads(fields: _Fields, num_heads: int) -> int:
    default = 1 if fields.get("multi_query") is True else num_heads
    num_kv_heads = fields.count("num_key_value_heads", "num_kv_heads", default=default)
    _check_groups(fields.where, num_heads, num_kv_heads)
    return num_kv_heads


def _check_groups(where: object, num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise StartupError(f"{where}: {num_heads} query heads cannot share {num_kv_heads} key-value heads evenly")


def _head_dim(fields: _Fields, hidden_size: int, num_heads: int) -> int:
    given = fields.optional_count("head_dim")
    return given if given is not None else _divide(fields.where, hidden_size, num_heads)


def _divide(where: object, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise StartupError(
            f"{where}: hidden size {hidden_size} is no multiple of {num_heads} heads, and no head size is given"
        )
    return hidden_size // num_heads


def _rope(fields: _Fields) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling). Newer files put both into `rope_parameters`, older ones theta beside `rope_scaling`; the kind
    of scaling is spelled `type` or `rope_type`. A kind of "default" is no scaling."""
    given = fields.get("rope_scaling", "rope_parameters")
    if given is None:
        return fields.number("rope_theta", "rotary_emb_base", default=10000.0), None
    if not isinstance(given, dict):
        raise StartupError(f"{fields.where}: rope_scaling must be an object, not {given!r}")
    scaling = {name: value for name, value in given.items() if name not in ("type", "rope_type", "rope_theta")}
    inner = _Fields(given, f"{fields.where}: rope_scaling")
    theta = inner.number("rope_theta", default=fields.number("rope_theta", "rotary_emb_base", default=10000.0))
    kind = inner.text("rope_type", "type")
    if kind is None and not scaling:
        return theta, None
    if kind is None and not all(isinstance(value, dict) for value in scaling.values()):
        raise StartupError(f"{fields.where}: rope_scaling does not say its rope_type")
    if kind == "default":
        # Sections of multi-dimensional positions travel with this kind; without any there is nothing to scale.
        return theta, {"rope_type": kind, **scaling} if scaling else None
    return theta, {**({"rope_type": kind} if kind else {}), **scaling}


def _gguf_rope_scaling(fields: _Fields, prefix: str) -> dict[str, Any] | None:
    kind = fields.text(prefix + "type")
    if kind in (None, "none"):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number(prefix + "factor", default=1.0)}
    original = fields.optional_count(prefix + "original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _dtype(fields: _Fields) -> str | None:
    name = fields.text("dtype", "torch_dtype")
    return name.removeprefix("torch.") if name else None


def _quant_method(fields: _Fields) -> str | None:
    given = fields.get("quantization_config", "compression_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise StartupError(f"{fields.where}: quantization_config must be an object, not {given!r}")
    return _Fields(given, f"{fields.where}: quantization_config").text("quant_method") or "unknown"


def _sliding_window(fields: _Fields) -> int | None:
    if fields.get("use_sliding_window") is False:
        return None
    return fields.optional_count("sliding_window")


def _without_repeats(ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))
