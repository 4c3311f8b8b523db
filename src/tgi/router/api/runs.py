"""The parts of an answer in runs, for protocols that tell answers in items or blocks. Knows no protocol."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tgi.router.chat.parts import CallArguments, CallBegin, Content, Part, Reasoning


@dataclass(slots=True)
class Run:
    """Parts of an answer that belong together: a thought, a text between other parts, or a call."""

    kind: type[Reasoning] | type[Content] | type[CallBegin]
    call: CallBegin | None  # of a call
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of a call: its arguments."""
        return "".join(self.pieces)


class Runs:
    """The parts of one answer in runs, as they come."""

    __slots__ = ("all",)

    def __init__(self) -> None:
        self.all: list[Run] = []

    def add(self, part: Part) -> bool:
        """Does a new run begin with this part?"""
        match part:
            case CallBegin():
                self.all.append(Run(CallBegin, part))
                return True
            case CallArguments(_, text):
                self.all[-1].pieces.append(text)  # a call's arguments follow it
                return False
            case Reasoning(text) | Content(text):
                begins = not self.all or self.all[-1].kind is not part.__class__
                if begins:
                    self.all.append(Run(part.__class__, None))
                self.all[-1].pieces.append(text)
                return begins


def plain_text(parts: Sequence[Part]) -> str:
    """What nearly every token is: text alone. "" for all else."""
    return parts[0].text if len(parts) == 1 and isinstance(parts[0], Content) else ""


def shown(parts: Iterable[Part]) -> list[Part]:
    """Those that say something."""
    return [part for part in parts if isinstance(part, CallBegin) or part.text]
