"""Rotary position embeddings and their scalings. Factors are chosen once at start, never by a request's length, so that
a prompt's keys mean the same in every step and may be cached.

Sources: RoFormer (arXiv 2104.09864), YaRN (2309.00071), LongRoPE (2402.13753), NTK-aware and Llama 3.1 scaling as
published with those models. "Frequency" is radians per position throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tgi.errors import StartupError

if TYPE_CHECKING:
    from tgi.model_config import ModelConfig
    from tgi.server.layers.source import Source

DEFAULT_MAX_POSITIONS = 2048  # where a configuration does not say
GGUF_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Rotation:
    """The turns of one step's tokens, the same for all layers of one kind. [tokens, rotary_dim / 2] float32 each; what
    a head has beyond rotary_dim stays as it is."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False  # pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)


class Rotary:
    """Positions -> Rotation."""

    def __init__(
        self, frequencies: torch.Tensor, magnitude: float, device: torch.device, interleaved: bool = False
    ) -> None:
        """`magnitude` scales what is rotated (YaRN's and LongRoPE's attention factor)."""
        self.frequencies = frequencies.to(device=device, dtype=torch.float32)
        self.magnitude = magnitude
        self.interleaved = interleaved

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """positions [tokens] integers."""
        angles = torch.outer(positions.float(), self.frequencies)
        cos, sin = angles.cos(), angles.sin_()
        if self.magnitude != 1.0:
            cos.mul_(self.magnitude)
            sin.mul_(self.magnitude)
        return Rotation(cos, sin, self.interleaved)


@dataclass(frozen=True, slots=True)
class _Setup:
    dim: int
    theta: float
    max_positions: int  # of the configuration
    longest: int  # that will be served
    values: Mapping[str, Any]

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise StartupError(f"rope_scaling: {name} must be a positive number, not {value!r}")
        return float(value)

    def factors(self, name: str) -> torch.Tensor:
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != self.dim // 2:
            found = f"{len(value)} numbers" if isinstance(value, list) else repr(value)
            raise StartupError(f"rope_scaling: {name} must be a list of {self.dim // 2} numbers, not {found}")
        return torch.tensor(value, dtype=torch.float32)

    @property
    def original_positions(self) -> float:
        return self.number("original_max_position_embeddings", self.max_positions)

    @property
    def stretch(self) -> float:
        """The scaling's factor; the ratio of the two lengths where the configuration gives only those."""
        return self.number("factor", self.max_positions / self.original_positions)

    def plain(self, theta: float | None = None) -> torch.Tensor:
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        return 1.0 / ((theta or self.theta) ** exponents)


def make_rotary(
    *,
    dim: int,
    theta: float,
    max_positions: int,
    scaling: Mapping[str, Any] | None,
    device: torch.device,
    longest: int | None = None,
    divisors: torch.Tensor | None = None,
    interleaved: bool = False,
) -> Rotary:
    """`dim`: the rotated elements of a head. `scaling`: config.json's rope_scaling, its kind spelled `rope_type` or
    `type`. `longest`: tokens that a request may span here, `max_positions` if not given; kinds that depend on length
    use it. `divisors` [dim / 2]: factors that a GGUF file carries instead of a scaling.

    Raises StartupError for a kind that is not known or a value that makes no sense.
    """
    values = scaling or {}
    kind = str(values.get("rope_type") or values.get("type") or "default")
    if kind not in SCALINGS:
        raise StartupError(f"rope_scaling of type {kind!r} is not supported; {', '.join(SCALINGS)} are")
    frequencies, magnitude = SCALINGS[kind](_Setup(dim, theta, max_positions, longest or max_positions, values))
    if divisors is not None:
        frequencies = frequencies / divisors.to(device="cpu", dtype=torch.float32)
    return Rotary(frequencies, magnitude, device, interleaved)


def rotary_of(
    config: ModelConfig,
    source: Source,
    longest: int | None = None,
    *,
    kind: str | None = None,
    dim: int | None = None,
    theta: float | None = None,
    scaled: bool = True,
    interleaved: bool = False,
) -> Rotary:
    """What config.json says of rotation. `kind`: of the layers it is for, where each kind has settings of its own.
    `dim`: rotated elements of a head, if not the configuration's share of it. `theta` where the family keeps it
    elsewhere; `scaled=False` leaves the scaling out."""
    given = config.rope_scaling or {}
    own = given.get(kind) if kind else None
    values = own if isinstance(own, dict) else {} if _is_by_kind(given) else given
    theta = theta or float(values.get("rope_theta") or config.rope_theta)
    original = config.fields.optional_count("original_max_position_embeddings")
    if values and original and values.get("original_max_position_embeddings") is None:
        values = {**values, "original_max_position_embeddings": original}
    dim = dim or int(config.head_dim * (config.partial_rotary_factor or 1.0))
    return make_rotary(
        dim=dim,
        theta=theta,
        max_positions=config.max_position_embeddings or DEFAULT_MAX_POSITIONS,
        scaling=values if scaled else None,
        device=source.device,
        longest=longest,
        divisors=source.tensor(GGUF_DIVISORS, (dim // 2,)) if source.has(GGUF_DIVISORS) else None,
        interleaved=interleaved,
    )


def _is_by_kind(scaling: Mapping[str, Any]) -> bool:
    return bool(scaling) and all(isinstance(value, dict) for value in scaling.values())


def _default(setup: _Setup) -> tuple[torch.Tensor, float]:
    return setup.plain(), 1.0


def _linear(setup: _Setup) -> tuple[torch.Tensor, float]:
    """Positions divided by the factor."""
    return setup.plain() / setup.number("factor"), 1.0


def _dynamic(setup: _Setup) -> tuple[torch.Tensor, float]:
    """NTK-aware: a larger base, for as long as the longest request is beyond the trained length."""
    trained = setup.original_positions
    ratio = max(setup.longest, trained) / trained
    factor = setup.number("factor")
    base = setup.theta * (factor * ratio - (factor - 1)) ** (setup.dim / (setup.dim - 2))
    return setup.plain(base), 1.0


def _llama3(setup: _Setup) -> tuple[torch.Tensor, float]:
    """Long wavelengths are stretched, short ones kept, those between blended by how often they turn in the trained
    length."""
    low, high = setup.number("low_freq_factor"), setup.number("high_freq_factor")
    frequencies = setup.plain()
    turns = setup.original_positions * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / setup.number("factor")), 1.0


def _yarn(setup: _Setup) -> tuple[torch.Tensor, float]:
    """NTK by parts: dimensions that turn often in the trained length are kept, slow ones stretched, a linear ramp over
    the dimensions between."""
    if "long_factor" in setup.values:
        return _longrope(setup)  # another of its first names

    def dimension(turns: float) -> float:
        return setup.dim * math.log(setup.original_positions / (turns * 2 * math.pi)) / (2 * math.log(setup.theta))

    low, high = dimension(setup.number("beta_fast", 32)), dimension(setup.number("beta_slow", 1))
    if setup.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, setup.dim - 1)
    ramp = (torch.arange(setup.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    frequencies = setup.plain()
    return frequencies * (kept + (1 - kept) / setup.stretch), _yarn_magnitude(setup)


def _yarn_magnitude(setup: _Setup) -> float:
    if setup.values.get("attention_factor") is not None:
        return setup.number("attention_factor")

    def grown(by: float) -> float:
        return 0.1 * by * math.log(setup.stretch) + 1.0 if setup.stretch > 1 else 1.0

    if setup.values.get("mscale") and setup.values.get("mscale_all_dim"):
        return grown(setup.number("mscale")) / grown(setup.number("mscale_all_dim"))
    return grown(1.0)


def _longrope(setup: _Setup) -> tuple[torch.Tensor, float]:
    """A divisor per dimension, from one of two lists: for what fits the trained length, and for what does not."""
    trained = setup.original_positions
    length = "long" if setup.longest > trained else "short"
    divisors = setup.factors(f"{length}_factor")
    stretch = setup.stretch
    default = math.sqrt(1 + math.log(stretch) / math.log(trained)) if stretch > 1 else 1.0
    # Phi-MoE has a magnitude for each list.
    return setup.plain() / divisors, setup.number(f"{length}_mscale", setup.number("attention_factor", default))


SCALINGS: Mapping[str, Callable[[_Setup], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its first name
}
