"""The tokenizer inside a GGUF file -> TokenizerSource, with the `tokenizers` library alone.

`tokenizer.ggml.model` names the algorithm (gpt2: byte-level BPE; llama: SentencePiece BPE by scores), `.pre` how text
is cut before it. An unknown name is refused: a wrong cut gives other tokens without a sign.
Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tgi.errors import StartupError
from tgi.gguf_file import GgufFile
from tgi.text.source import TokenizerSource, set_begin_and_end, templates_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
BLANK = "\u2581"  # how SentencePiece spells a blank

# Ends of a turn that files made before the key `eot_token_id` existed have only as a control token.
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endofturn|>", "<|eom_id|>", "<EOT>")

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
CUTS: Mapping[str, Cut] = {
    "default": Cut((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "tekken": Cut((TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": Cut((GPT4O,)),
    "smaug-bpe": Cut((LLAMA3,)),
    "dbrx": Cut((LLAMA3,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
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
    _add_tokens(backend, tokens, types)
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
    merges = [_pair(merge) for merge in file.get("tokenizer.ggml.merges") or ()]
    backend = _build(file, models.BPE, vocab=_vocabulary(tokens), merges=merges, ignore_merges=cut.ignore_merges)
    if cut.compose:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if cut is _SINGLE_DIGITS or cut is _GPT2:
        # The same cut by the library's built-in pieces: three times as fast as by patterns.
        digits = [pre_tokenizers.Digits(individual_digits=True)] if cut is _SINGLE_DIGITS else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(False, use_regex=True)])
    backend.decoder = decoders.ByteLevel()
    return backend, cut.add_bos


def _sentencepiece(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE: the pair whose joint piece has the best score is merged first; unknown characters as bytes."""
    scores: Sequence[float] | None = file.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise StartupError(f"{file.path}: tokenizer model 'llama' needs one score per token; fetch it again")
    vocab = _vocabulary(tokens)
    pieces = {token: scores[i] for i, token in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED, UNUSED)}
    ranked = [
        (score, piece[:at], piece[at:])
        for piece, score in pieces.items()
        for at in range(1, len(piece))
        if piece[:at] in pieces and piece[at:] in pieces
    ]
    ranked.sort(key=lambda merge: (-merge[0], vocab[merge[1]], vocab[merge[2]]))
    unknown = next((token for token, kind in zip(tokens, types) if kind == UNKNOWN), None)
    backend = _build(
        file,
        models.BPE,
        vocab=vocab,
        merges=[(left, right) for _, left, right in ranked],
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


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    def of(kind: int) -> list[AddedToken]:
        return [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, its in zip(tokens, types)
            if its == kind and token
        ]

    backend.add_special_tokens(of(CONTROL))
    backend.add_tokens(of(USER_DEFINED))


def _eos_ids(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> tuple[int, ...]:
    found = [file.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    if found[1] is None:
        found += [i for i, token in enumerate(tokens) if types[i] == CONTROL and token in END_OF_TURN]
    return tuple(dict.fromkeys(i for i in found if isinstance(i, int) and 0 <= i < len(tokens)))


def _templates(file: GgufFile) -> dict[str, str]:
    """`tokenizer.chat_template`, and `tokenizer.chat_template.<name>` for further ones."""
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): file[key] for key in file if key.startswith(prefix)}
    return {name: text for name, text in named.items() if isinstance(text, str)} | templates_of(
        file.get("tokenizer.chat_template")
    )
