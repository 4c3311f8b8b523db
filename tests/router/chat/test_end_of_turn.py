from __future__ import annotations

from pathlib import Path

import pytest

from tgi.router.chat.end_of_turn import end_of_turn
from tgi.router.chat.template import ChatTemplate

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
SPECIAL = {"<s>": 1, "</s>": 2, "<|im_start|>": 3, "<|im_end|>": 4, "<|im_end|>>": 5}
TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + END }}{% endfor %}"


@pytest.mark.fault("vllm#4180")
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("'<|im_end|>\n'", 4),
        ("' </s>'", 2),  # Llama 2 writes a blank before it
        ("'<|im_end|>>'", 5),  # the longest
        ("eos_token", 2),
        ("''", None),
        ("'\n'", None),
        ("'<|other|>'", None),  # the tokenizer has no such token
        ("' and <|im_end|>'", None),  # text of the template stands before it
    ],
)
def test_what_stands_behind_the_last_answer(end: str, expected: int | None) -> None:
    template = ChatTemplate(TURNS.replace("END", end), {"eos_token": "</s>"})
    assert end_of_turn(template, SPECIAL) == expected


@pytest.mark.parametrize(
    "source",
    [
        None,
        "{{ raise_exception('no') }}",
        "{% if",
        "{{ messages[0].content }}<|im_end|>",  # leaves the answer out
        "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}</s>",
    ],
)
def test_a_template_that_cannot_be_asked_names_no_end(source: str | None) -> None:
    assert end_of_turn(ChatTemplate(source, {}), SPECIAL) is None


def test_only_the_end_of_a_last_answer_counts() -> None:
    """One that goes on behind another kind of end, as gpt-oss's thoughts do, must not end with that."""
    source = "{% for m in messages %}{{ m.content }}{{ '</s>' if loop.last else '<|im_end|>' }}{% endfor %}"
    assert end_of_turn(ChatTemplate(source, {}), SPECIAL) == 2


@pytest.mark.parametrize(
    ("family", "end"),
    [
        ("chatml", "<|im_end|>"),
        ("gemma", "<end_of_turn>"),
        ("harmony", "<|return|>"),
        ("llama2", "</s>"),
        ("llama3", "<|eot_id|>"),
        ("mistral", "</s>"),
        ("phi", "<|end|>"),
        ("qwen3", "<|im_end|>"),
        ("zephyr", "</s>"),
    ],
)
def test_families_end_their_turns_as_they_are_known_to(family: str, end: str) -> None:
    texts = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<end_of_turn>", "<|return|>", "<|end|>", "<|eot_id|>")
    template = ChatTemplate((TEMPLATES / f"{family}.jinja").read_text(), {"bos_token": "<s>", "eos_token": "</s>"})
    assert end_of_turn(template, {text: index for index, text in enumerate(texts)}) == texts.index(end)
