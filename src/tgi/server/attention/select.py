"""select_backend: the word in ATTENTION and the kind of device -> an attention backend. Knows no kernels."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass

from tgi.errors import StartupError
from tgi.server.attention.backend import AttentionBackend
from tgi.server.attention.torch_backend import TorchBackend
from tgi.server.context import AttentionOption

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Choice:
    device_types: tuple[str, ...]
    block_sizes: tuple[int, ...]  # accepted, the default first; empty: any
    packages: tuple[tuple[str, str], ...] = ()  # (module, what to install): one of them is needed


_CHOICES = {
    "flashinfer": _Choice(("cuda",), (16, 1), (("flashinfer", "flashinfer-python"),)),
    "flashdecoding": _Choice(("cuda",), (256,), (("flash_attn", "flash-attn"),)),
    "paged": _Choice(("cuda",), (16,)),
    "flashdecoding-ipex": _Choice(("cpu",), (64,)),
    "torch": _Choice(("cuda", "cpu"), ()),
}
_ALIASES = {"cpu": "flashdecoding-ipex"}
_AUTOMATIC = {"cuda": ("flashinfer", "flashdecoding", "paged"), "cpu": ("flashdecoding-ipex",)}
_DEFAULT_BLOCK_SIZE = 16
# Names whose own kernels are in this tree. The others compute by the torch reference, with their name and block size.
_WITH_KERNELS = frozenset({"flashdecoding-ipex", "torch"})


def select_backend(name: str | None, device_type: str, block_size: int | None = None) -> AttentionBackend:
    """The backend for `name`, or the best that this machine has for None, "" and "auto".

    A name that was asked for and cannot be had is refused (StartupError); an automatic choice falls to the next with a
    log line. `block_size` None takes the backend's own.
    """
    if name is None or name in ("", "auto"):
        chosen = _automatic(device_type)
    else:
        chosen = _ALIASES.get(name, name)
        _check_asked(name, chosen, device_type)
    _say_what_is_slow(chosen, device_type)
    return make_backend(chosen, _checked_block_size(chosen, block_size))


def _automatic(device_type: str) -> str:
    order = _AUTOMATIC.get(device_type)
    if order is None:
        raise StartupError(f"No attention backend for device type {device_type!r}; known: {', '.join(_AUTOMATIC)}.")
    for name in order[:-1]:
        if not _missing(name):
            return name
    if len(order) > 1:
        logger.info("Attention backend: %s (not installed: %s)", order[-1], ", ".join(map(_missing, order[:-1])))
    return order[-1]


def _check_asked(name: str, chosen: str, device_type: str) -> None:
    if chosen not in _CHOICES:
        known = ", ".join((*_CHOICES, *_ALIASES))
        raise StartupError(f"ATTENTION={name}: no such attention backend; choose one of {known}, or leave it unset.")
    if device_type not in _CHOICES[chosen].device_types:
        where = {"cuda": "a GPU", "cpu": "a CPU"}
        needed = " or ".join(where[kind] for kind in _CHOICES[chosen].device_types)
        instead = _AUTOMATIC.get(device_type, ("torch",))[-1]
        here = where.get(device_type, device_type)
        raise StartupError(f"ATTENTION={name} needs {needed}; on {here} use {instead}, or leave ATTENTION unset.")
    if missing := _missing(chosen):
        raise StartupError(
            f"ATTENTION={name} needs the package {missing}, which is not installed; install it or unset ATTENTION."
        )


def _missing(name: str) -> str:
    """What to install for `name`; empty where nothing is missing."""
    packages = _CHOICES[name].packages
    if not packages or any(importlib.util.find_spec(module) for module, _ in packages):
        return ""
    return " or ".join(package for _, package in packages)


def _checked_block_size(name: str, block_size: int | None) -> int:
    accepted = _CHOICES[name].block_sizes
    if block_size is None:
        return accepted[0] if accepted else _DEFAULT_BLOCK_SIZE
    if block_size < 1 or (accepted and block_size not in accepted):
        words = " or ".join(map(str, accepted)) or "at least 1"
        raise StartupError(f"Attention backend {name} takes a block size of {words}, not {block_size}.")
    return block_size


def make_backend(name: str, block_size: int, options: frozenset[AttentionOption] = frozenset()) -> AttentionBackend:
    """The backend of a name that `select_backend` has chosen. `options`: what the model's attention needs; where the
    backend's kernels lack one the torch reference computes under its name, which one log line says."""
    backend = _with_kernels(name, block_size)
    if lacking := backend.lacks(options):
        missing = " and ".join(sorted(lacking))
        logger.warning("Attention backend %s lacks %s, which this model needs: torch reference", name, missing)
        return TorchBackend(name, block_size)
    return backend


def _with_kernels(name: str, block_size: int) -> AttentionBackend:
    if name == "flashdecoding-ipex" and _has_numba():
        # Imported here: numba takes a second, which a GPU's start need not spend.
        from tgi.server.attention.cpu_backend import CpuBackend

        return CpuBackend(name, block_size)
    return TorchBackend(name, block_size)


def _say_what_is_slow(name: str, device_type: str) -> None:
    if name == "flashdecoding-ipex" and not _has_numba():
        logger.warning("Attention backend %s runs on the torch reference: numba is not installed", name)
    if name not in _WITH_KERNELS:
        logger.warning("Attention backend %s on %s runs on the torch reference: correct, not fast", name, device_type)


def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None
