"""The tokenizer inside a GGUF file -> TokenizerSource, with the `tokenizers` library alone.

`tokenizer.ggml.model` names the algorithm (gpt2: byte-level BPE; llama: SentencePiece BPE by scores), `.pre` how text
is cut before it. An unknown name is refused: a wrong cut gives other tokens without a sign.
Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tgi.errors import StartupError
from tgi.gguf_file import GgufFile
from tgi.text.source import TokenizerSource, set_begin_and_end, templates_of

log = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
BLANK = "\u2581"  # how SentencePiece spells a blank
LONGEST_PIECE = 1 << 10  # characters that merges may make; all splits of one are looked at

# Ends of a turn that files made before the key `eot_token_id` existed have only as a control token.
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endofturn|>", "<|eom_id|>", "<EOT>")
END_OF_TEXT = "<|end_of_text|>"  # Llama 3's, for which there is no key beside a turn's
NEVER_SWALLOW = ("<unk>", "<s>", "<|endoftext|>")
# gpt-oss ends what it does with these, and with <|end|> only a part of it.
HARMONY = ("<|return|>", "<|call|>")

# The patterns are the models' own, from their tokenizer.json.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = _MODERN.format(digits=r"\p{N}{1,3}")
QWEN2 = _MODERN.format(digits=r"\p{N}")
ONE_DIGIT = r"\p{N}"
# Words end where a capital begins; marks belong to their letters.
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{ending}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{ending}"
    r"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = _CASED.format(ending="", digits=r"\p{N}")
GPT4O = _CASED.format(ending=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", digits=r"\p{N}{1,3}")
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")
BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
SEED_CODER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Most letters that have capitals or are some; a model's own list, which is no property of Unicode.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class Cut:
    """How text is cut before BPE: each pattern splits the pieces that the one before left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token stays one
    add_bos: bool = False  # unless the file says otherwise
    compose: bool = False  # Unicode NFC first


_GPT2 = Cut((GPT2,))
_SINGLE_DIGITS = Cut((ONE_DIGIT, GPT2))
_LLAMA3 = Cut((LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2 = Cut((QWEN2,), compose=True)
_NEOX = Cut((GPT2,), compose=True)
_BLOOM = Cut((BLOOM,))
CUTS: Mapping[str, Cut] = {
    "default": Cut((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "granite-docling": _GPT2,
    "mellum": _GPT2,
    "trillion": _GPT2,
    "mpt": _NEOX,
    "olmo": _NEOX,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
    "command-r": Cut((ONE_DIGIT, GPT2), compose=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "tekken": Cut((TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": Cut((GPT4O,)),
    "smaug-bpe": Cut((LLAMA3,)),
    "dbrx": Cut((LLAMA3,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "deepseek-llm": Cut(DEEPSEEK_LLM),
    "deepseek-coder": Cut(DEEPSEEK_CODER),
    "deepseek-v3": Cut(DEEPSEEK_V3),
    "seed-coder": Cut((SEED_CODER,)),
    "falcon": Cut(FALCON),
    "bloom": _BLOOM,
    "gpt3-finnish": _BLOOM,
    "poro-chat": _BLOOM,
    "viking": Cut((BLOOM, ONE_DIGIT)),
}


def read_gguf(file: GgufFile) -> TokenizerSource:
    """Build the tokenizer of a GGUF file. Raises StartupError naming what is missing or unknown."""
    try:
        tokens: Sequence[str] = file["tokenizer.ggml.tokens"]
        types: Sequence[int] = file.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    except KeyError as missing:
        raise StartupError(f"{file.path} has no tokenizer ({missing.args[0]}). Choose a GGUF file with one") from None
    if len(types) != len(tokens):
        raise StartupError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types; fetch it again")
    algorithm = file.get("tokenizer.ggml.model")
    build = _ALGORITHMS.get(str(algorithm))
    if build is None:
        known = ", ".join(_ALGORITHMS)
        raise StartupError(f"{file.path}: tokenizer model {algorithm!r} is not supported ({known} are)")
    backend, add_bos = build(file, tokens, types)
    swallows = file.get("general.architecture") == "phi3" and algorithm == "llama"
    _add_tokens(backend, tokens, types, swallows)
    source = TokenizerSource(backend)
    for name, key in _TOKEN_KEYS.items():
        token_id = file.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            source.named_tokens[name] = tokens[token_id]
    source.eos_ids = _eos_ids(file, tokens, types)
    set_begin_and_end(
        source,
        add_bos=bool(file.get("tokenizer.ggml.add_bos_token", add_bos)),
        add_eos=bool(file.get("tokenizer.ggml.add_eos_token", False)),
    )
    source.chat_templates = _templates(file)
    return source


def _byte_level(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE. Returns the tokenizer and whether BOS is added when the file does not say."""
    name = str(file.get("tokenizer.ggml.pre", "default"))
    cut = CUTS.get(name)
    if cut is None:
        raise StartupError(
            f"{file.path}: pre-tokenizer {name!r} is not supported ({', '.join(CUTS)} are). "
            "Serve the model from a directory with tokenizer.json instead"
        )
    if "tokenizer.ggml.pre" not in file:
        log.warning(
            "%s does not name its pre-tokenizer, as files from before May 2024: text may be cut in another way than "
            "the model has learnt. Take a newer file of the model",
            file.path,
        )
    merges = [_pair(merge) for merge in file.get("tokenizer.ggml.merges") or ()]
    backend = _build(file, models.BPE, vocab=_vocabulary(tokens), merges=merges, ignore_merges=cut.ignore_merges)
    if cut.compose:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if cut.patterns in ((GPT2,), (ONE_DIGIT, GPT2)):
        # The same cut by the library's built-in pieces: three times as fast as by patterns.
        digits = [pre_tokenizers.Digits(individual_digits=True)] if ONE_DIGIT in cut.patterns else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(False, use_regex=True)])
    backend.decoder = decoders.ByteLevel()
    return backend, cut.add_bos


def _sentencepiece(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE: the pair whose joint piece has the best score is merged first; unknown characters as bytes."""
    scores: Sequence[float] | None = file.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise StartupError(f"{file.path}: tokenizer model 'llama' needs one score per token; fetch it again")
    vocab = _vocabulary(tokens)
    pieces = {
        token: scores[i]
        for i, token in enumerate(tokens)
        if types[i] in (NORMAL, USER_DEFINED, UNUSED) and len(token) <= LONGEST_PIECE
    }
    # Of equal scores (files made without SentencePiece's own have no others) the earlier piece is the better.
    best_first = sorted(pieces, key=lambda piece: (-pieces[piece], vocab[piece]))
    merges = [
        (piece[:at], piece[at:])
        for piece in best_first
        for at in sorted(range(1, len(piece)), key=lambda at: vocab.get(piece[:at], 0))
        if piece[:at] in pieces and piece[at:] in pieces
    ]
    unknown = next((token for token, kind in zip(tokens, types) if kind == UNKNOWN), None)
    backend = _build(
        file,
        models.BPE,
        vocab=vocab,
        merges=merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend(BLANK)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", BLANK)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True


_Builder = Callable[[GgufFile, Sequence[str], Sequence[int]], tuple[tokenizers.Tokenizer, bool]]
_ALGORITHMS: Mapping[str, _Builder] = {"gpt2": _byte_level, "llama": _sentencepiece}
_TOKEN_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _build(file: GgufFile, model: Callable[..., Any], **arguments: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(model(**arguments))
    except Exception as error:  # the library raises bare Exception
        raise StartupError(f"{file.path}: its vocabulary and merges do not fit: {error}; fetch it again") from error


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Text -> id. A text that occurs again keeps its first id; the later one gets a name that no text has."""
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if vocab.setdefault(token, token_id) != token_id:
            vocab[f"{token}\0{token_id}"] = token_id
    return vocab


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _add_tokens(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int], swallows: bool = False
) -> None:
    """`swallows`: blanks behind most added tokens are no part of the text (Phi-3), which the format has no key for."""

    def of(kind: int) -> list[AddedToken]:
        return [
            AddedToken(token, special=kind == CONTROL, normalized=False, rstrip=swallows and token not in NEVER_SWALLOW)
            for token, its in zip(tokens, types)
            if its == kind and token
        ]

    backend.add_special_tokens(of(CONTROL))
    backend.add_tokens(of(USER_DEFINED))


def _eos_ids(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> tuple[int, ...]:
    control = {token: i for i, token in enumerate(tokens) if types[i] == CONTROL}
    found = [file.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    texts = END_OF_TURN if found[1] is None else ()
    if all(token in control for token in HARMONY):
        found, texts = [found[0]], HARMONY
    found += [control[token] for token in (*texts, END_OF_TEXT) if token in control]
    return tuple(dict.fromkeys(i for i in found if isinstance(i, int) and 0 <= i < len(tokens)))


def _templates(file: GgufFile) -> dict[str, str]:
    """`tokenizer.chat_template`, and `tokenizer.chat_template.<name>` for further ones."""
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): file[key] for key in file if key.startswith(prefix)}
    return {name: text for name, text in named.items() if isinstance(text, str)} | templates_of(
        file.get("tokenizer.chat_template")
    )
