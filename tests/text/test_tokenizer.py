"""The bundled model's tokenizer against recorded ids, and what every Tokenizer promises."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.tokenizer import BOS_ID, TURN_END_ID, byte_tokenizer, ids_of, unpacked
from tgi import hub
from tgi.errors import InvalidRequest, StartupError
from tgi.text.tokenizer import SHORT_TEXT, Tokenizer, check_fits, load_tokenizer

RECORDED = Path(__file__).parent.parent / "data" / "smollm2_tokens.json"


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(hub.locate(hub.BUNDLED_MODEL))


@pytest.mark.real_model
def test_all_recorded_strings_encode_to_the_recorded_ids(smollm2: Tokenizer) -> None:
    recorded = json.loads(RECORDED.read_text())
    assert len(recorded["strings"]) == len(recorded["ids"]) == 2010
    for text, ids in zip(recorded["strings"], recorded["ids"], strict=True):
        assert unpacked(smollm2.encode(text, add_special_tokens=False).ids) == ids, text
        assert smollm2.decode(ids, skip_special_tokens=False) == text


@pytest.mark.real_model
def test_the_traps_of_the_bundled_file(smollm2: Tokenizer) -> None:
    assert unpacked(smollm2.encode("\n\n1.").ids) == [1116, 33, 30]  # digits one by one; no BOS either
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_ids == (2,)
    assert smollm2.eos_token == "<|im_end|>"
    assert smollm2.bos_id == 1
    assert smollm2.special_ids == frozenset(range(17))
    assert unpacked(smollm2.encode("<|im_start|>user\n").ids)[0] == 1
    assert "You are a helpful AI assistant named SmolLM" in smollm2.chat_templates["default"]


@pytest.mark.real_model
def test_loading_the_bundled_file_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tgi import hub; from tgi.text.tokenizer import load_tokenizer;"
        "load_tokenizer(hub.locate(hub.BUNDLED_MODEL));"
        "print([name for name in ('torch', 'transformers', 'numpy', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    began = time.process_time()
    load_tokenizer(hub.locate(hub.BUNDLED_MODEL))
    assert time.process_time() - began < 5  # 0.2 where it was measured; through transformers it takes a hundred


@pytest.mark.real_model
def test_long_and_short_texts_encode_alike(smollm2: Tokenizer) -> None:
    text = "Ünïcode 123 你好 <|im_end|> 👍🏽\n" * 40
    assert len(text) > SHORT_TEXT
    whole = smollm2.encode(text)
    lines = b"".join(smollm2.encode(line).ids for line in text.splitlines(keepends=True))
    assert whole.ids == lines  # no merge crosses a newline here
    assert len(whole) == len(whole.ids) // 4


def test_offsets_are_characters_however_they_are_made() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("aé").offsets == [(0, 1), (1, 2), (1, 2)]
    text = "é" * (SHORT_TEXT + 1)
    lazy, eager = tokenizer.encode(text), tokenizer.encode(text, with_offsets=True)
    assert lazy.ids == eager.ids
    assert lazy.offsets == eager.offsets == [(i // 2, i // 2 + 1) for i in range(2 * len(text))]


@pytest.mark.fault("TGI#3203", "sglang#888")
@pytest.mark.parametrize("length", [1, SHORT_TEXT + 1])
def test_bos_is_not_added_to_a_text_that_begins_with_it(length: int) -> None:
    tokenizer, text = byte_tokenizer(adds_bos=True), "é" * length
    plain, begun = tokenizer.encode(text), tokenizer.encode("<s>" + text)
    assert begun.ids == plain.ids
    assert unpacked(begun.ids) == [BOS_ID, *ids_of(text)]
    assert plain.offsets[:3] == [(0, 0), (0, 1), (0, 1)]
    assert begun.offsets[:3] == [(0, 3), (3, 4), (3, 4)]
    assert len(begun.offsets) == len(begun)
    assert unpacked(tokenizer.encode("<s><s>", add_special_tokens=False).ids) == [BOS_ID, BOS_ID]
    assert unpacked(tokenizer.encode("a<s>").ids) == [BOS_ID, ord("a"), BOS_ID]
    assert unpacked(tokenizer.encode("").ids) == [BOS_ID]
    assert unpacked(byte_tokenizer().encode("<s><s>a").ids) == [BOS_ID, BOS_ID, ord("a")], "this one adds none"


@pytest.mark.parametrize("length", [1, SHORT_TEXT + 1])
def test_a_lone_surrogate_is_refused(length: int) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as raised:
        byte_tokenizer().encode("\ud800" * length)
    assert raised.value.param == "inputs"


def test_decoding_is_safe_for_any_id() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode([-1, *ids_of("hé"), 10**9, TURN_END_ID]) == "hé"
    assert tokenizer.decode([TURN_END_ID], skip_special_tokens=False) == "<|im_end|>"


def test_the_text_of_one_token() -> None:
    tokenizer = byte_tokenizer()
    texts = [tokenizer.token_text(token_id) for token_id in (*ids_of(" a"), 0xF0, BOS_ID, -1, 10**9)]
    assert texts == [" ", "a", "\ufffd", "<s>", "", ""]
    parts = [tokenizer.token_bytes(token_id) for token_id in (*ids_of(" a"), 0xF0, BOS_ID, -1, 10**9)]
    assert parts == [b" ", b"a", b"\xf0", b"<s>", b"", b""]
    assert tokenizer.special_tokens[tokenizer.token_text(BOS_ID)] == BOS_ID
    assert tokenizer.is_special(BOS_ID)
    assert not tokenizer.is_special(ids_of("a")[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), (b"nonsense", "not a GGUF file"), (b"GGUF\x03\x00\x00\x00\xff", "truncated or corrupt")],
)
def test_a_bad_gguf_file_is_one_clear_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartupError, match=message) as raised:
        load_tokenizer(path)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    tokenizer = byte_tokenizer()  # 256 plain tokens, then added ones
    check_fits(tokenizer, 256, "m")
    check_fits(tokenizer, 1024, "m")
    with pytest.raises(StartupError, match="tokenizer of m has 256 tokens, its model knows 255: they do not belong"):
        check_fits(tokenizer, 255, "m")
