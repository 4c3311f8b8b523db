"""What is generated says what its source says: wire modules, pages, pins."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from packaging.requirements import Requirement
from packaging.version import Version

from benchmarks import page
from benchmarks.record import Figure, format_value, render_table
from docs import models, references

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("version", ["v3", "v4"])
def test_wire_modules_match_their_proto(version: str, tmp_path: Path) -> None:
    source, output = f"tgi/proto/{version}/generate.proto", tmp_path / "set.pb"
    mapping = f"tgi/proto/{version}={ROOT}/proto/generate/{version}"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", mapping, f"--descriptor_set_out={output}", source]
    subprocess.run(command, check=True, cwd=tmp_path)
    expected = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file[0]
    for descriptor in (*expected.message_type, *(n for m in expected.message_type for n in m.nested_type)):
        for field in descriptor.field:
            field.ClearField("json_name")  # the compiler adds it to a set, not to a module
    actual = descriptor_pb2.FileDescriptorProto()
    importlib.import_module(f"tgi.proto.{version}.generate_pb2").DESCRIPTOR.CopyToProto(actual)
    assert actual == expected, "run `make proto`"


def test_wire_modules_run_with_the_oldest_versions_we_allow() -> None:
    """Generated code refuses libraries older than its generator: pyproject must not allow them."""
    allowed = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}
    grpc_module = (ROOT / "src/tgi/proto/v4/generate_pb2_grpc.py").read_text()
    needed = grpc_module.split("GRPC_GENERATED_VERSION = '")[1].split("'")[0]
    assert lower_bound(allowed["grpcio"]) >= Version(needed)
    runtime = (ROOT / "src/tgi/proto/v4/generate_pb2.py").read_text().split("Domain.PUBLIC,")[1].split("''")[0]
    assert lower_bound(allowed["protobuf"]) >= Version(".".join(part.strip() for part in runtime.split(",")[:3]))


def test_the_lock_satisfies_every_range() -> None:
    lines = (ROOT / "requirements/lock-py311.txt").read_text().splitlines()
    pins = {line.split("==")[0].lower().replace("_", "-"): Version(line.split("==")[1]) for line in lines}
    assert not any(line.startswith("-") for line in lines), "a lock names versions, not places"
    assert pins["torch"] == Version("2.13.0"), "no local version: every build of torch satisfies the pin"
    extras = PROJECT["optional-dependencies"]
    for text in (*PROJECT["dependencies"], *extras["test"], *extras["dev"]):
        requirement = Requirement(text)
        pin = pins[requirement.name.lower().replace("_", "-")]
        assert pin in requirement.specifier, f"{text} and {pin}: run `make lock`"


def test_performance_page_says_what_the_results_say() -> None:
    assert page.PAGE.read_text() == page.render(), "run `make docs`"


def test_models_page_says_what_the_table_of_tests_says() -> None:
    assert models.PAGE.read_text() == models.render(), "run `make docs`"


@pytest.mark.fault("TGI#231")
@pytest.mark.parametrize("name", list(references.PAGES))
def test_reference_pages_say_what_the_programs_read(name: str) -> None:
    assert (references.REFERENCE / name).read_text() == references.PAGES[name](), "run `make docs`"


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567.8, "1,234,568"), (123.4, "123"), (12.345, "12.3"), (1.2345, "1.23"), (0.01234, "0.0123"), (8, "8")],
)
def test_values_are_printed_with_the_digits_that_matter(value: float, text: str) -> None:
    assert format_value(value) == text


def test_a_figure_knows_whether_it_met_its_target() -> None:
    assert Figure("a", 7.9, "us", "<= 8").verdict == "met"
    assert Figure("a", 8.1, "us", "<= 8").verdict == "missed"
    assert Figure("a", 99.0, "tokens/s", ">= 100").verdict == "missed"
    assert Figure("a", 1.0, "us").verdict == ""
    assert render_table([Figure("a", 7.9, "us", "<= 8")]).splitlines()[1].split() == ["a", "7.90", "us", "<=", "8"]


def lower_bound(requirement: Requirement) -> Version:
    return max(Version(s.version) for s in requirement.specifier if s.operator in (">=", "=="))
