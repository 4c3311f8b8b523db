"""The token with which a chat template ends an answer. Knows a template and the texts of special tokens, no model."""

from __future__ import annotations

from collections.abc import Mapping

from tgi.errors import InvalidRequest, TemplateFailed
from tgi.router.chat.template import ChatTemplate

# Private-use characters that no template looks for.
_ANSWER = "\ue07a\ue0e7\ue07a"


def end_of_turn(template: ChatTemplate, special_tokens: Mapping[str, int]) -> int | None:
    """The id of the special token that stands right behind the last answer of a chat; None where there is none, or the
    template cannot be asked.

    Some models' files name only the end of a document as EOS, and the turns of their chats end with another token.
    """
    chat = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}]
    try:
        prompt = template.render(chat, add_generation_prompt=False).text
    except (InvalidRequest, TemplateFailed):
        return None
    _, answer, rest = prompt.rpartition(_ANSWER)
    rest = rest.lstrip()
    found = [text for text in special_tokens if text and rest.startswith(text)]
    return special_tokens[max(found, key=len)] if answer and found else None
