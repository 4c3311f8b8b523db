"""Record how the sentencepiece library tokenizes varied strings with the vocabulary of a GGUF file.

    pip install sentencepiece
    python -m tests.data.record_tokens MODEL.gguf tests/data/NAME_tokens.json

The strings are every tenth of smollm2_tokens.json: accents, CJK, emoji, code, blanks, digits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf

STRINGS = Path(__file__).with_name("smollm2_tokens.json")
EVERY = 10
BLANK = "\u2581"  # how SentencePiece spells a blank


@cache
def sentencepiece_of(model: Path) -> Any:
    """The library's tokenizer (BPE, unknown characters as bytes) with the pieces, scores and kinds of the file."""
    library = import_module("sentencepiece")  # no dependency of the tests
    proto = import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
    fields = gguf.GGUFReader(model).fields
    names = ("tokens", "scores", "token_type")
    for text, score, kind in zip(*(fields[f"tokenizer.ggml.{name}"].contents() for name in names)):
        # Both formats number the kinds alike. The converter gives pieces that the makers defined their plain blanks.
        piece = text.replace(" ", BLANK) if kind == gguf.TokenType.USER_DEFINED else text
        proto.pieces.add(piece=piece, score=score, type=kind)
    unknown = fields["tokenizer.ggml.unknown_token_id"].contents()
    proto.pieces[unknown].type = gguf.TokenType.UNKNOWN
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback = 2, True  # BPE
    trainer.vocab_size = len(proto.pieces)
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token_id = fields[f"tokenizer.ggml.{key}_token_id"].contents()
        setattr(trainer, f"{name}_id", token_id)
        setattr(trainer, f"{name}_piece", proto.pieces[token_id].piece)
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = fields["tokenizer.ggml.add_space_prefix"].contents()
    normalizer.remove_extra_whitespaces = False
    return library.SentencePieceProcessor(model_proto=proto.SerializeToString())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    strings = json.loads(STRINGS.read_text())["strings"][::EVERY]
    recorded = {
        "model": arguments.model.stem,
        "gguf_sha256": hashlib.sha256(arguments.model.read_bytes()).hexdigest(),
        "by": f"sentencepiece {import_module('sentencepiece').__version__}, no BOS",
        "strings": strings,
        "ids": [sentencepiece_of(arguments.model).encode(text) for text in strings],
    }
    arguments.file.write_text(json.dumps(recorded, ensure_ascii=False))


if __name__ == "__main__":
    main()
