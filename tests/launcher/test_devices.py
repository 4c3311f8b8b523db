"""What nvidia-smi and the environment say about this machine."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import pytest

from tgi.launcher.devices import Devices, count_visible, find_devices, run_command

TWO_H100 = "NVIDIA H100 80GB HBM3, 81559, 9.0\nNVIDIA H100 80GB HBM3, 81559, 9.0\n"


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.13.0")


def smi(output: str | None):  # -> Runner
    def run(command: Sequence[str]) -> str | None:
        assert command[0] == "nvidia-smi"
        return output

    return run


def test_two_gpus() -> None:
    found = find_devices({}, smi(TWO_H100))
    assert (found.kind, found.num_gpus, found.visible) == ("cuda", 2, None)
    assert found.card == "nvidia-h100-80gb-hbm3"
    assert found.memory == 81559 << 20
    assert found.compute_capability == (9, 0)


@pytest.mark.parametrize("output", [None, "", "\n"])
def test_no_gpu(output: str | None) -> None:
    found = find_devices({}, smi(output))
    expected = "rocm" if Path("/dev/kfd").exists() else "cpu"
    assert (found.kind, found.num_gpus, found.card, found.compute_capability) == (expected, 0, None, None)


@pytest.mark.parametrize("hidden", ["", "-1", " "])
def test_gpus_that_are_hidden_do_not_count(hidden: str) -> None:
    found = find_devices({"CUDA_VISIBLE_DEVICES": hidden}, smi(TWO_H100))
    assert found == Devices(visible=0, packages=found.packages)


def test_a_torch_without_cuda_serves_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.13.0+cpu")
    assert find_devices({}, smi(TWO_H100)).kind == "cpu"


def test_visible_devices_limit_the_gpus() -> None:
    found = find_devices({"CUDA_VISIBLE_DEVICES": "1"}, smi(TWO_H100))
    assert (found.num_gpus, found.visible) == (1, 1)


@pytest.mark.parametrize("output", ["NVIDIA X\n", "NVIDIA X, [N/A], [N/A]\n", "NVIDIA X, , \n"])
def test_odd_answers_of_nvidia_smi_leave_things_unknown(output: str) -> None:
    found = find_devices({}, smi(output))
    assert (found.kind, found.card, found.memory, found.compute_capability) == ("cuda", "nvidia-x", None, None)


@pytest.mark.parametrize(
    ("environment", "installed", "expected"),
    [
        ({}, 8, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1,5"}, 8, 3),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, None, 1),
        ({"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "all"}, 8, 1),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 8, 8),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, 2, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, None, None),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, 8, 0),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1"}, 8, 2),
        ({"ZE_AFFINITY_MASK": "0,1,2"}, None, 3),
        ({"NVIDIA_VISIBLE_DEVICES": "0", "ZE_AFFINITY_MASK": "0,1,2"}, None, 1),
    ],
)
def test_count_visible(environment: dict[str, str], installed: int | None, expected: int | None) -> None:
    assert count_visible(environment, installed) == expected


def test_commands_that_fail_answer_none() -> None:
    assert run_command(["no-such-program-here"]) is None
    assert run_command(["false"]) is None
    assert run_command(["echo", "hello"]) == "hello\n"
