"""Which backend a machine gets, and in what words it is refused one."""

from __future__ import annotations

import importlib.util
import logging

import pytest

from tgi.errors import StartupError
from tgi.server.attention import select
from tgi.server.attention.cpu_backend import CpuBackend
from tgi.server.attention.select import select_backend
from tgi.server.attention.torch_backend import TorchBackend
from tgi.server.context import AttentionOption


@pytest.fixture
def installed(monkeypatch):
    """Pretend that exactly these optional modules are installed."""
    names: set[str] = {"numba"}
    real = importlib.util.find_spec
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda name: real("json") if name in names else None)
    return names


@pytest.mark.row("C: Attention and prefix-caching resolution")
@pytest.mark.parametrize("name", [None, "", "auto", "cpu", "flashdecoding-ipex"])
def test_a_cpu_gets_its_kernels_under_tgis_name(name):
    backend = select_backend(name, "cpu")
    assert isinstance(backend, CpuBackend)
    assert (backend.name, backend.block_size) == ("flashdecoding-ipex", 64)


def test_a_cpu_without_numba_computes_by_the_reference(installed, caplog):
    installed.clear()
    with caplog.at_level(logging.WARNING):
        backend = select_backend("cpu", "cpu")
    assert isinstance(backend, TorchBackend)
    assert (backend.name, backend.block_size) == ("flashdecoding-ipex", 64)
    assert [record.getMessage() for record in caplog.records] == [
        "Attention backend flashdecoding-ipex runs on the torch reference: numba is not installed"
    ]


@pytest.mark.parametrize("name", ["paged", "flashinfer", "flashdecoding"])
def test_a_gpus_backend_is_refused_on_a_cpu(name):
    with pytest.raises(StartupError) as caught:
        select_backend(name, "cpu")
    assert str(caught.value) == (
        f"ATTENTION={name} needs a GPU; on a CPU use flashdecoding-ipex, or leave ATTENTION unset."
    )


def test_the_cpus_backend_is_refused_on_a_gpu():
    with pytest.raises(
        StartupError, match=r"ATTENTION=cpu needs a CPU; on a GPU use paged, or leave ATTENTION unset\."
    ):
        select_backend("cpu", "cuda")


@pytest.mark.parametrize(("name", "package"), [("flashinfer", "flashinfer-python"), ("flashdecoding", "flash-attn")])
def test_asked_for_and_not_installed_names_the_package(installed, name, package):
    with pytest.raises(StartupError, match=f"ATTENTION={name} needs the package {package}, which is not installed"):
        select_backend(name, "cuda")
    installed |= {"flashinfer", "flash_attn"}
    assert select_backend(name, "cuda").name == name


@pytest.mark.parametrize(
    ("modules", "name", "block_size"),
    [
        ({"flashinfer", "flash_attn"}, "flashinfer", 16),
        ({"flash_attn"}, "flashdecoding", 256),
        (set(), "paged", 16),
    ],
)
def test_a_gpus_automatic_choice_falls_to_what_is_there(installed, caplog, modules, name, block_size):
    installed |= modules
    with caplog.at_level(logging.INFO):
        backend = select_backend(None, "cuda")
    assert (backend.name, backend.block_size) == (name, block_size)
    lines = [record.getMessage() for record in caplog.records]
    fallen = ["Attention backend: paged (not installed: flashinfer-python, flash-attn)"] if name == "paged" else []
    assert lines == [*fallen, f"Attention backend {name} on cuda runs on the torch reference: correct, not fast"]


class WithoutSoftcap(TorchBackend):
    def lacks(self, options):
        return options & {"softcap", "sinks"}


def test_what_a_backend_lacks_is_said_and_computed_by_the_reference(monkeypatch, caplog):
    monkeypatch.setattr(select, "_with_kernels", WithoutSoftcap)
    with caplog.at_level(logging.WARNING):
        fallen = select.make_backend("paged", 16, frozenset({"window", "softcap"}))
        kept = select.make_backend("paged", 16, frozenset({"window"}))
    assert [record.getMessage() for record in caplog.records] == [
        "Attention backend paged lacks softcap, which this model needs: torch reference"
    ]
    assert type(fallen) is TorchBackend
    assert (fallen.name, fallen.block_size) == ("paged", 16)
    assert type(kept) is WithoutSoftcap


def test_this_machines_backends_have_every_option():
    options = frozenset[AttentionOption]({"window", "softcap", "sinks", "alibi", "value_dim"})
    assert not CpuBackend().lacks(options)
    assert not TorchBackend().lacks(options)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(StartupError, match="ATTENTION=flash3: no such attention backend; choose one of flashinfer, "):
        select_backend("flash3", "cuda")


def test_unknown_devices_are_refused():
    with pytest.raises(StartupError, match="No attention backend for device type 'tpu'"):
        select_backend(None, "tpu")


def test_block_sizes(installed):
    installed.add("flashinfer")
    assert select_backend("flashinfer", "cuda", 1).block_size == 1
    assert select_backend("torch", "cpu", 7).block_size == 7
    assert select_backend("torch", "cpu").block_size == 16
    with pytest.raises(StartupError, match="flashdecoding-ipex takes a block size of 64, not 16"):
        select_backend("cpu", "cpu", 16)
    with pytest.raises(StartupError, match="torch takes a block size of at least 1, not 0"):
        select_backend("torch", "cpu", 0)
