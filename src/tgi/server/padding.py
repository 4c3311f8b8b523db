"""Texts of several lengths in one rectangle, each padded to the longest. Pure: knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence

PADDED_BY = 2  # a rectangle has at most so many times the tokens of its texts
SMALL = 16  # tokens; shorter texts count as so many here: what a request has room for at least


def rectangles(sizes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of the texts that share a rectangle. A text has a size in tokens for each thing that is padded by itself
    (answer and prompt, where a decoder looks at its encoder)."""
    found: list[list[int]] = []
    widths: list[int] = []
    held = 0
    for index in sorted(range(len(sizes)), key=lambda index: -sum(sizes[index])):
        size = sizes[index]
        wider = [max(pair) for pair in zip(widths, size, strict=True)] if found else list(size)
        more = held + max(sum(size), SMALL)
        if found and (len(found[-1]) + 1) * sum(wider) <= PADDED_BY * more:
            found[-1].append(index)
            widths, held = wider, more
        else:
            found.append([index])
            widths, held = list(size), max(sum(size), SMALL)
    return found


def padded_tokens(lens: Sequence[int]) -> int:
    """What texts of these lengths take in the rectangles that they share."""
    return sum(len(group) * max(lens[index] for index in group) for group in rectangles([(each,) for each in lens]))
