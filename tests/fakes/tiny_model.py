"""A tiny random Llama on disk: weights, config, tokenizer and chat template, made in a tenth of a second.

Knows nothing of `tgi` and imports neither torch nor transformers, so that tests of the text rooms stay light. The
weights are scaled so that logits spread (a deviation of about 3) and greedy tokens vary.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Literal

import numpy as np

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(4)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Merges are spelled from these words, left to right; none covers a byte outside ASCII, so an emoji takes four tokens.
WORDS = (
    "the and that have for not with you this but his from they say her she will one all would there their what out "
    "about who get which when make can like time just him know take people into year your good some could them see "
    "other than then now look only come its over think also back after use two how our work first well way even new "
    "want because any these give day most us Paris France capital answer question hello world system user assistant "
    "please"
)
# Residual contributions of a layer, against the embedding's own size: large enough that a tied head does not simply
# repeat the token just read.
RESIDUAL_GAIN = 4.0
# Attention sharp enough to tell positions apart; uniform attention would let greedy decoding settle on one token.
QUERY_KEY_GAIN = 2.0
LOGIT_DEVIATION = 3.0

DtypeName = Literal["float32", "bfloat16", "float16"]


def write_tiny_llama(
    directory: Path,
    *,
    vocab_size: int = 512,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 128,
    max_position: int = 2048,
    seed: int = 0,
    dtype: DtypeName = "float32",
    tie: bool = False,
    bias: bool = False,
    rope_scaling: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Writes the model's files into `directory` (made if missing) and returns it.

    `bias` adds biases to the projections of attention and MLP. Further keywords go into config.json as they are
    (`model_type="mistral"`, `sliding_window=16`). The same arguments always give the same files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": tie,
        "rope_theta": 10000.0,
        "rope_scaling": rope_scaling,
        "rms_norm_eps": 1e-5,
        "attention_bias": bias,
        "mlp_bias": bias,
        "hidden_act": "silu",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": str(dtype),
    } | config
    _write_json(directory / "config.json", settings)
    _write_json(directory / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, IM_END_ID]})
    tensors = random_llama(
        vocab_size, hidden, layers, heads, kv_heads, head_dim, intermediate, seed=seed, tie=tie, bias=bias
    )
    write_safetensors(directory / "model.safetensors", tensors, dtype)
    write_tokenizer(directory, vocab_size)
    return directory


def random_llama(
    vocab_size: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    *,
    seed: int,
    tie: bool,
    bias: bool,
) -> dict[str, np.ndarray]:
    """Float32 weights under their checkpoint names."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, std: float) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    head_std = LOGIT_DEVIATION / hidden**0.5
    tensors = {"model.embed_tokens.weight": normal(vocab_size, hidden, std=head_std)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (heads * head_dim, hidden, QUERY_KEY_GAIN),
            "self_attn.k_proj": (kv_heads * head_dim, hidden, QUERY_KEY_GAIN),
            "self_attn.v_proj": (kv_heads * head_dim, hidden, 1.0),
            "self_attn.o_proj": (hidden, heads * head_dim, RESIDUAL_GAIN),
            "mlp.gate_proj": (intermediate, hidden, 1.0),
            "mlp.up_proj": (intermediate, hidden, 1.0),
            "mlp.down_proj": (hidden, intermediate, RESIDUAL_GAIN),
        }
        for name, (rows, columns, gain) in shapes.items():
            tensors[f"{prefix}{name}.weight"] = normal(rows, columns, std=gain / columns**0.5)
            if bias:
                tensors[f"{prefix}{name}.bias"] = normal(rows, std=0.2)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = 1 + normal(hidden, std=0.1)
    tensors["model.norm.weight"] = 1 + normal(hidden, std=0.1)
    if not tie:
        tensors["lm_head.weight"] = normal(vocab_size, hidden, std=head_std)
    return tensors


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: DtypeName = "float32") -> None:
    """Float32 arrays as one safetensors file, rounded to `dtype` (numpy itself knows no bfloat16)."""
    codes = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    offset = 0
    for name, array in tensors.items():
        raw = _encode(array, dtype)
        header[name] = {"dtype": codes[dtype], "shape": list(array.shape), "data_offsets": [offset, offset + len(raw)]}
        parts.append(raw)
        offset += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(b"".join((struct.pack("<Q", len(text)), text, *parts)))


def write_tokenizer(directory: Path, vocab_size: int = 512) -> None:
    """tokenizer.json (byte-level BPE: all 256 bytes, then merges as far as `vocab_size` has room) and its config."""
    room = vocab_size - len(SPECIAL) - 256
    if room < 0:
        raise ValueError(f"vocab_size must be at least {len(SPECIAL) + 256}: four special tokens and all bytes")
    pieces = [*SPECIAL, *_byte_alphabet()]
    merges: list[list[str]] = []
    known = set(pieces)
    for word in WORDS.split():
        letters = "Ġ" + word
        for end in range(2, len(letters) + 1):
            left, right = letters[: end - 1], letters[end - 1]
            if left + right not in known and len(merges) < room:
                known.add(left + right)
                pieces.append(left + right)
                merges.append([left, right])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": text, **flags} for index, text in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": merges,
        },
    }
    _write_json(directory / "tokenizer.json", tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS_ID],
        "eos_token": SPECIAL[EOS_ID],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", config)


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in the order of the bytes."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _encode(array: np.ndarray, dtype: DtypeName) -> bytes:
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()  # to nearest, ties to even
    return np.ascontiguousarray(array, dtype=np.float16 if dtype == "float16" else np.float32).tobytes()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
