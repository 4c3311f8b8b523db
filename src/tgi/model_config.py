"""The handful of facts about a model that launcher, router and shard read: from config.json or a GGUF's metadata.

Knows no weights and no architecture: what only one architecture needs, it reads from `ModelConfig.raw` itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tgi.errors import StartupError
from tgi.gguf_file import BadGguf, GgufFile
from tgi.gguf_settings import architecture_of, longrope_of, settings_of

_TIED = {"tie_word_embeddings": True}
_FALCON = {"activation": "gelu", "multi_query": True, "max_position_embeddings": 2048, **_TIED}
_GEMMA2 = {"head_dim": 256, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh", **_TIED}
_MIXTRAL = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
# What files of these architectures may leave out, where it is not the usual default; in their own spelling.
LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "RefinedWeb": _FALCON,
    "RefinedWebModel": _FALCON,
    "bloom": {"hidden_act": "gelu_pytorch_tanh", **_TIED},
    "cohere": {"rope_theta": 500_000.0, **_TIED},
    "cohere2": {"sliding_window": 4096, **_TIED},
    "dbrx": {"max_seq_len": 2048},
    "deepseek_v3": {"first_k_dense_replace": 3, "n_group": 8, "routed_scaling_factor": 2.5, "topk_group": 4},
    "falcon": _FALCON,
    "falcon_mamba": _TIED,
    "gemma": {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 16, **_TIED},
    "gemma2": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        **_GEMMA2,
    },
    "gemma3_text": {
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "vocab_size": 262_208,
        **_GEMMA2,
    },
    "gpt2": {"activation_function": "gelu_new", "n_positions": 1024, **_TIED},
    "gpt_bigcode": {"activation_function": "gelu_pytorch_tanh", "multi_query": True, "n_positions": 1024, **_TIED},
    "gpt_neo": {"activation_function": "gelu_new", "max_position_embeddings": 2048, **_TIED},
    "gpt_neox": {"hidden_act": "gelu", "max_position_embeddings": 2048},
    "gpt_oss": {
        "attention_bias": True,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
    },
    "gptj": {"activation_function": "gelu_new", "n_positions": 2048},
    "granite": {"attention_multiplier": 1.0},
    "mamba": _TIED,
    "mistral": {"num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": _MIXTRAL,
    "mpt": {"max_seq_len": 2048, **_TIED},
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
    "opt": {"activation_function": "relu", "max_position_embeddings": 2048, **_TIED},
    "phi": {"hidden_act": "gelu_new", "max_position_embeddings": 2048},
    "phi-msft": {"activation_function": "gelu_new", "n_positions": 2048},
    "phimoe": _MIXTRAL,
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "qwen2": {"max_window_layers": 28},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3": {"head_dim": 128, "max_window_layers": 28},
    "qwen3_moe": {"num_key_value_heads": 4},
    "smollm3": {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, **_TIED},
    "starcoder2": {
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        **_TIED,
    },
}
# Here null says that there is none; elsewhere it is as if the file left the field out.
_MAY_BE_NONE = frozenset({"attn_logit_softcapping", "final_logit_softcapping", "num_key_value_heads", "sliding_window"})
# Models of text and images -> the decoder that their text part is, where it does not say. Without images they are it.
TEXT_PARTS: Mapping[str, str] = {"gemma3": "gemma3_text", "mistral3": "mistral"}
_ONE_KEY = ("multiquery", "multiquery_attention")  # words for a single key-value head
_OTHER_SENSES = frozenset({"audio_config", "thinker_config", "vision_config"})
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Parts of a configuration whose settings count as the model's own, where it does not say otherwise.
PARTS: Mapping[str, tuple[str, ...]] = {
    "dbrx": ("attn_config", "ffn_config"),
    "mamba": ("ssm_cfg",),
    "mpt": ("attn_config",),
}


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
    raw: Mapping[str, Any]  # the whole config.json; for GGUF only what its architecture has beyond the above

    @property
    def fields(self) -> Fields:
        """Typed look-ups of what only one architecture has. Files may leave out what is their architecture's
        default."""
        return Fields(_completed(self.text_type, self.raw), f"configuration of this {self.model_type} model")

    @property
    def text_type(self) -> str:
        """The model_type of the decoder: of a model of text and images that is read as one of text, its text part's."""
        return _text_type(self.model_type, self.raw)

    @property
    def partial_rotary_factor(self) -> float | None:
        """The share of a head that is rotated, where the model says."""
        return _partial_rotary_factor(self.fields)

    @property
    def layer_types(self) -> tuple[str, ...] | None:
        """ "full_attention" or "sliding_attention": one per layer, where the model says."""
        return _layer_types(self.fields, self.num_layers)


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
    config = _with_older_quantisation(config, path)
    return _from_json(config, _read_json(path / "generation_config.json") or {}, file)


def with_rope_scaling(config: ModelConfig, kind: str, factor: float) -> ModelConfig:
    """With a scaling of this `kind` in the place of the model's own; where each kind of layer has settings, in that of
    layers which see everything."""
    given = config.rope_scaling or {}
    own = given.get("full_attention")
    scaling = {"rope_type": kind, "factor": factor}
    if isinstance(own, dict):
        theta = {"rope_theta": own["rope_theta"]} if "rope_theta" in own else {}
        scaling = {**given, "full_attention": {**scaling, **theta}}
    return replace(config, rope_scaling=scaling)


class Fields:
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

    def optional_number(self, *names: str) -> float | None:
        """A positive number, or None where the file says null or nothing."""
        return None if self.get(*names) is None else self.number(*names, default=1.0)

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

    def only(self, name: str, *known: object) -> None:
        """Raises StartupError where the file says something else than what is known here; it may say nothing."""
        value = self.get(name)
        if value is not None and value not in known:
            are = " and ".join(json.dumps(one) for one in known)
            raise StartupError(f"{self.where}: {name} {json.dumps(value)} is not supported, only {are}")

    def ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
            raise StartupError(f"{self.where}: {name} must be a token id or a list of them, not {value!r}")
        return tuple(ids)


def _from_json(config: dict[str, Any], generation: dict[str, Any], file: Path) -> ModelConfig:
    whole = Fields(config, file)
    model_type = whole.text("model_type") or _first_files_type(config)
    if model_type is None:
        raise StartupError(f"{file} does not say model_type")
    fields = Fields(_completed(_text_type(model_type, config), config), file)
    architectures = whole.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise StartupError(f"{file}: architectures must be a list of class names, not {architectures!r}")
    hidden_size = _hidden_size(fields, model_type)
    num_heads = _num_heads(fields)
    theta, scaling = _rope(fields)
    generation_fields = Fields(generation, file.with_name("generation_config.json"))
    return ModelConfig(
        model_type=model_type,
        architectures=tuple(architectures),
        hidden_size=hidden_size,
        num_layers=fields.count(
            "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"
        ),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(fields, num_heads),
        head_dim=_head_dim(fields, hidden_size, num_heads),
        intermediate_size=_intermediate_size(fields, hidden_size),
        vocab_size=_vocab_size(fields),
        max_position_embeddings=fields.optional_count("max_position_embeddings", "max_seq_len", "n_positions"),
        tie_word_embeddings=whole.flag("tie_word_embeddings", default=fields.flag("tie_word_embeddings")),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=fields.number(
            "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon", default=1e-6
        ),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        hidden_act=fields.text("hidden_act", "hidden_activation", "activation_function", "activation") or "silu",
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
    named = architecture_of(file)
    architecture = file["general.architecture"]
    fields = Fields(file, path)

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    hidden_size = fields.count(key("embedding_length"))
    num_heads = fields.count(key("attention.head_count"))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise StartupError(f"{path} has no table token_embd.weight: the file is no whole model")
    num_kv_heads = fields.count(key("attention.head_count_kv"), default=num_heads)
    _check_groups(path, num_heads, num_kv_heads)
    ends = ("eos",) if architecture == "gpt-oss" else ("eos", "eot")  # its turns have parts, which end alike
    window = key("attention.sliding_window")  # 0 where a model has none that others of its architecture have
    return ModelConfig(
        model_type=named.model_type,
        architectures=(named.class_name,),
        hidden_size=hidden_size,
        num_layers=fields.count(key("block_count")),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.optional_count(key("attention.key_length")) or _divide(path, hidden_size, num_heads),
        intermediate_size=fields.count(key("feed_forward_length"), key("expert_feed_forward_length")),
        vocab_size=embedding.shape[0],  # the metadata's count may differ from the padded table's rows
        max_position_embeddings=fields.optional_count(key("context_length")),
        tie_word_embeddings="output.weight" not in file.tensors,
        rope_theta=fields.number(key("rope.freq_base"), default=10000.0),
        rope_scaling=_gguf_rope_scaling(file, fields, key("rope.scaling.")),
        rms_norm_eps=fields.number(key("attention.layer_norm_rms_epsilon"), default=1e-6),
        attention_bias="blk.0.attn_output.bias" in file.tensors,  # of the queries alone: an architecture's own way
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        hidden_act=named.hidden_act,
        eos_ids=_without_repeats(
            tuple(token for name in ends for token in fields.ids(f"tokenizer.ggml.{name}_token_id"))
        ),
        bos_id=next(iter(fields.ids("tokenizer.ggml.bos_token_id")), None),
        torch_dtype=None,
        quant_method=None,
        sliding_window=fields.optional_count(window) if file.get(window) else None,
        raw=settings_of(file),
    )


def _with_older_quantisation(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Older quantised checkpoints say so in a file of their own."""
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        found = _read_json(path / name)
        if found is not None and not any(key in config for key in ("quantization_config", "compression_config")):
            return {**config, "quantization_config": {"quant_method": found.get("quant_method") or method}}
    return config


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{file} does not hold a JSON object")
    return value


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A composite model's settings with those of its text part before them; any other's as they are."""
    text_config = config.get("text_config")
    return {**config, **text_config} if isinstance(text_config, dict) else config


def _text_type(model_type: str, config: Mapping[str, Any]) -> str:
    if model_type not in TEXT_PARTS:
        return model_type
    own = _text_part(config).get("model_type")
    return own if isinstance(own, str) and own != model_type else TEXT_PARTS[model_type]


def _completed(model_type: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part, with what its architecture's files leave out, or say in a part of their own."""
    text = _text_part(config)
    for part in PARTS.get(model_type, ()):
        inner = text.get(part)
        text = {**inner, **text} if isinstance(inner, dict) else text
    left_out = {
        name: value
        for name, value in LEFT_OUT.get(model_type, {}).items()
        if text.get(name) is None and not (name in text and name in _MAY_BE_NONE)
    }
    return {**text, **left_out} if left_out else text


def _first_files_type(config: Mapping[str, Any]) -> str | None:
    """Mamba's first files do not say what they are, but how their layers are."""
    return "mamba" if isinstance(config.get("ssm_cfg"), dict) else None


def _vocab_size(fields: Fields) -> int:
    """Rows of the embedding; Mamba's first files count those in use, of a table that is filled up."""
    in_use = fields.count("vocab_size")
    if fields.text("model_type") is not None:
        return in_use
    multiple = fields.count("pad_vocab_size_multiple", default=1)
    return -(-in_use // multiple) * multiple


def _hidden_size(fields: Fields, model_type: str) -> int:
    names = ("hidden_size", "n_embd", "n_embed", "d_model", "emb_dim")
    if fields.get(*names) is None and (parts := _OTHER_SENSES & set(fields.values)):
        raise StartupError(
            f"{fields.where}: {model_type!r} is a model of more than text ({min(parts)}) and does not say the sizes of "
            "its text part; it is not supported"
        )
    return fields.count(*names)


def _num_heads(fields: Fields) -> int:
    """Of an encoder-decoder the decoder's. A model that has states in the place of attention has no heads: 1."""
    decoders = ("decoder_attention_heads", "num_decoder_attention_heads")
    names = ("num_attention_heads", "n_head", "n_heads", "num_heads", *decoders, "attention_heads")
    return fields.count(
        *names, default=1 if fields.get("state_size", "ssm_cfg", "attention_hidden_size") is not None else None
    )


def _intermediate_size(fields: Fields, hidden_size: int) -> int:
    default = int(fields.number("expansion_ratio", default=4.0) * hidden_size)
    return fields.count("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=default)


def _kv_heads(fields: Fields, num_heads: int) -> int:
    """Falcon's files may count a key-value head for every head beside `multi_query`, which then means a single one; in
    its newer architecture groups of heads share one, and `multi_query` means nothing."""
    is_grouped = fields.flag("new_decoder_architecture", default=fields.get("n_head_kv") is not None)
    is_single = fields.flag("multi_query") or fields.get("attention_head_type", "attn_type") in _ONE_KEY
    if is_single and not is_grouped:
        return 1
    num_kv_heads = fields.count("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", default=num_heads)
    _check_groups(fields.where, num_heads, num_kv_heads)
    return num_kv_heads


def _check_groups(where: object, num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise StartupError(f"{where}: {num_heads} query heads cannot share {num_kv_heads} key-value heads evenly")


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    given = fields.optional_count("head_dim", "d_kv")
    return given if given is not None else _divide(fields.where, hidden_size, num_heads)


def _divide(where: object, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise StartupError(
            f"{where}: hidden size {hidden_size} is no multiple of {num_heads} heads, and no head size is given"
        )
    return hidden_size // num_heads


def _rope(fields: Fields) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling). Newer files put both into `rope_parameters`, older ones theta beside `rope_scaling`; the kind
    of scaling is spelled `type` or `rope_type`. A kind of "default" is no scaling."""
    given = fields.get("rope_scaling", "rope_parameters")
    if given is None:
        return fields.number("rope_theta", "rotary_emb_base", default=10000.0), None
    if not isinstance(given, dict):
        raise StartupError(f"{fields.where}: rope_scaling must be an object, not {given!r}")
    scaling = {name: value for name, value in given.items() if name not in ("type", "rope_type", "rope_theta")}
    inner = Fields(given, f"{fields.where}: rope_scaling")
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


_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}


def _gguf_rope_scaling(file: GgufFile, fields: Fields, prefix: str) -> dict[str, Any] | None:
    kind = fields.text(prefix + "type")
    longrope = longrope_of(file)
    scaling: dict[str, Any]
    if longrope:
        scaling = {"rope_type": "longrope", **longrope}
        if fields.get(prefix + "attn_factor") is not None:
            scaling["attention_factor"] = fields.number(prefix + "attn_factor", default=1.0)
    elif kind == "none":
        return None
    else:
        # The first files said nothing but the factor, under a name of its own.
        factor = fields.optional_number(prefix + "factor", prefix.replace(".scaling.", ".scale_linear"))
        if kind is None and factor is None:
            return None
        scaling = {"rope_type": kind or "linear", "factor": factor or 1.0}
    if kind == "yarn":
        scaling |= {
            name: fields.number(prefix + key, default=1.0) for name, key in _YARN.items() if prefix + key in file
        }
        if multiplier := fields.optional_number(prefix + "yarn_log_multiplier"):
            # DeepSeek's two measures, which are the same in all its models, times the 0.1 of the formula.
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), multiplier * 10)
        # Where the slow dimensions begin is a whole number, but for gpt-oss.
        scaling["truncate"] = file["general.architecture"] != "gpt-oss"
    original = fields.optional_count(prefix + "original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _partial_rotary_factor(fields: Fields) -> float | None:
    rope = fields.get("rope_parameters")
    inner = Fields(rope if isinstance(rope, dict) else {}, f"{fields.where}: rope_parameters")
    names = ("partial_rotary_factor", "rotary_pct", "rope_pct")
    factor = inner.optional_number(*names) or fields.optional_number(*names)
    if factor is not None and factor > 1.0:
        raise StartupError(f"{fields.where}: partial_rotary_factor must be at most 1, not {factor!r}")
    return factor


def _layer_types(fields: Fields, num_layers: int) -> tuple[str, ...] | None:
    types = fields.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise StartupError(f"{fields.where}: layer_types must be a list of words, not {types!r}")
    if len(types) != num_layers:
        raise StartupError(f"{fields.where}: layer_types lists {len(types)} layers of {num_layers}")
    if unknown := sorted(set(types) - LAYER_TYPES):
        raise StartupError(f"{fields.where}: layer_types has {unknown[0]!r}, which is not supported")
    return tuple(types)


def _dtype(fields: Fields) -> str | None:
    name = fields.text("dtype", "torch_dtype")
    return name.removeprefix("torch.") if name else None


def _quant_method(fields: Fields) -> str | None:
    given = fields.get("quantization_config", "compression_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise StartupError(f"{fields.where}: quantization_config must be an object, not {given!r}")
    return Fields(given, f"{fields.where}: quantization_config").text("quant_method") or "unknown"


def _sliding_window(fields: Fields) -> int | None:
    if fields.get("use_sliding_window") is False:
        return None
    return fields.optional_count("sliding_window")


def _without_repeats(ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))
