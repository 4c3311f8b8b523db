"""Text <-> token ids of one model. No torch, no transformers; knows files only through its two readers."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from pathlib import Path

from tgi.errors import InvalidRequest, StartupError
from tgi.gguf_file import BadGguf, GgufFile
from tgi.text.detokenizer import Detokenizer, PieceDetokenizer, WindowDetokenizer, read_pieces
from tgi.text.directory import override_from, read_chat_template, read_directory
from tgi.text.gguf_vocabulary import read_gguf
from tgi.text.source import TokenizerSource

# `encode` holds the interpreter lock, `encode_batch_fast` does not but costs about 45 µs more.
SHORT_TEXT = 512  # characters


class Encoding:
    """Token ids of a text, packed u32 little-endian. `offsets` are made when first asked for, unless they came free."""

    __slots__ = ("_add_special_tokens", "_offsets", "_text", "_tokenizer", "ids")

    def __init__(
        self,
        ids: bytes,
        tokenizer: Tokenizer,
        text: str,
        add_special_tokens: bool,
        offsets: list[tuple[int, int]] | None = None,
    ) -> None:
        self.ids = ids
        self._tokenizer = tokenizer
        self._text = text
        self._add_special_tokens = add_special_tokens
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self.ids) // 4

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """(start, stop) of each token in characters of the text; (0, 0) for one that was added.

        Encodes again when the text is long: ask for `with_offsets` where that would hold up others.
        """
        if self._offsets is None:
            again = self._tokenizer.encode(self._text, self._add_special_tokens, with_offsets=True)
            self._offsets = again._offsets
        assert self._offsets is not None
        return self._offsets


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads."""

    def __init__(self, source: TokenizerSource) -> None:
        self._backend = source.backend
        added = source.backend.get_added_tokens_decoder()
        size = source.backend.get_vocab_size(with_added_tokens=False)
        self.vocab_size = max(size, max(added, default=-1) + 1)
        while size - 1 in added:
            size -= 1
        self.num_plain_tokens = size  # without those that were added at the end
        self.bos_token = source.named_tokens.get("bos_token")
        self.eos_token = source.named_tokens.get("eos_token")
        self.bos_id = source.token_id("bos_token")
        added_first = source.backend.encode("", add_special_tokens=True).ids[:1]
        self._added_bos = added_first if added_first == [self.bos_id] else None
        self.eos_ids = source.eos_ids
        self.named_tokens = source.named_tokens  # those that chat templates may use: "bos_token", "pad_token" …
        self.chat_templates = source.chat_templates
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        literals = {token_id: token.content for token_id, token in added.items()}
        self._literals = literals
        self._pieces = read_pieces(source.backend, literals, self.vocab_size)
        special = sorted({literals[token_id] for token_id in self.special_ids if literals[token_id]})
        self._special_text = re.compile("|".join(map(re.escape, special))) if special else None

    def encode(self, text: str, add_special_tokens: bool = True, with_offsets: bool = False) -> Encoding:
        """Ids of `text`, the texts of special tokens parsed as such; BOS is not added to a text that begins with it.

        Raises InvalidRequest on a lone surrogate.
        """
        try:
            if len(text) <= SHORT_TEXT:
                found = self._backend.encode(text, add_special_tokens=add_special_tokens)
                with_offsets = True
            elif with_offsets:
                found = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
            else:
                found = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequest("the text holds a lone surrogate, which is no valid Unicode", "inputs") from None
        ids, offsets = found.ids, found.offsets if with_offsets else None
        if add_special_tokens and self._added_bos is not None and ids[:2] == self._added_bos * 2:
            # A chat's prompt that is sent as a text brings its BOS along.
            ids, offsets = ids[1:], None if offsets is None else offsets[1:]
        return Encoding(array("I", ids).tobytes(), self, text, add_special_tokens, offsets)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence, as the model's own decoder gives it. Ids without a token give nothing."""
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id."""
        return {self.token_text(token_id): token_id for token_id in self.special_ids}

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def token_text(self, token_id: int) -> str:
        """The text of one token alone: leading blank kept, an incomplete character as U+FFFD, "" without a token."""
        literal = self._literals.get(token_id)
        if literal is not None and token_id in self.special_ids:
            return literal
        if self._pieces is None:
            return self.decode((token_id,), skip_special_tokens=False)
        piece = self._pieces[token_id]
        return piece if isinstance(piece, str) else piece.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """As `token_text`, in UTF-8, and exact where the token is a part of a character."""
        piece = None if self._pieces is None or token_id in self.special_ids else self._pieces[token_id]
        return piece if isinstance(piece, bytes) else self.token_text(token_id).encode()

    def detokenizer(self, prompt_ids: bytes = b"") -> Detokenizer:
        """For text that continues `prompt_ids` (u32)."""
        if self._pieces is None:
            return WindowDetokenizer(self._backend, self.vocab_size, prompt_ids)
        return PieceDetokenizer(self._pieces, prompt_ids)

    def holds_special(self, text: str) -> bool:
        """Does `text` hold the text of a special token?"""
        return self._special_text is not None and self._special_text.search(text) is not None


def load_tokenizer(
    path: Path, tokenizer_config_path: Path | None = None, chat_template: str | None = None
) -> Tokenizer:
    """Load from a model directory (tokenizer.json) or a .gguf file.

    `tokenizer_config_path` stands in for the directory's tokenizer_config.json, chat template included;
    `chat_template`, a file or a text, for all of the model's templates. Raises StartupError, one line, saying what to
    do.
    """
    source = read_tokenizer(path, tokenizer_config_path)
    if chat_template is not None:
        source.chat_templates = read_chat_template(chat_template)
    return Tokenizer(source)


def check_fits(tokenizer: Tokenizer, model_vocab_size: int, model_id: str) -> None:
    """Raises StartupError when the tokenizer is another model's: it has more plain tokens than the model has ids.

    Tokens that were added later may lie beyond (fine-tuned models have such); a request that holds one is refused.
    """
    if tokenizer.num_plain_tokens > model_vocab_size:
        raise StartupError(
            f"The tokenizer of {model_id} has {tokenizer.num_plain_tokens} tokens, its model knows {model_vocab_size}: "
            "they do not belong together. Fetch tokenizer.json of the same model"
        )


def read_tokenizer(path: Path, tokenizer_config_path: Path | None = None) -> TokenizerSource:
    """What the files say, without what a Tokenizer adds. As `load_tokenizer`."""
    if path.is_dir():
        return read_directory(path, tokenizer_config_path)
    try:
        source = read_gguf(GgufFile(path))
    except BadGguf as error:
        raise StartupError(str(error)) from error
    if tokenizer_config_path is not None:
        override_from(source, tokenizer_config_path)
    return source
