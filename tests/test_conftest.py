"""The house rules of a test run: skips need leave, and the fakes are importable."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_pytest(directory: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs `source` as a test file under the project's own conftest and settings."""
    (directory / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (directory / "allowed_skips.txt").write_text((ROOT / "tests/allowed_skips.txt").read_text())
    (directory / "test_sample.py").write_text("import pytest\n" + source)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", *options, str(directory)], cwd=ROOT, capture_output=True, text=True
    )


def test_a_skip_without_leave_fails(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "def test_it() -> None:\n    pytest.skip('not today')\n")
    assert result.returncode == 1
    assert "skipped without leave: 'not today'" in result.stdout
    assert "1 failed" in result.stdout


def test_a_skipped_module_fails(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "pytest.skip('whole file', allow_module_level=True)\n")
    assert result.returncode != 0
    assert "skipped without leave: 'whole file'" in result.stdout


def test_an_allowed_skip_is_counted_by_reason(tmp_path: Path) -> None:
    source = "def test_a() -> None:\n    pytest.skip('needs a CUDA device')\ndef test_b() -> None:\n    pass\n"
    result = run_pytest(tmp_path, source)
    assert result.returncode == 0
    assert "    1  needs a CUDA device" in result.stdout
    assert result.stdout.strip().splitlines()[-1].startswith("=") and "1 passed, 1 skipped" in result.stdout


def test_an_expected_failure_is_no_skip_and_an_unexpected_pass_fails(tmp_path: Path) -> None:
    source = (
        "@pytest.mark.xfail(reason='known')\ndef test_a() -> None:\n    raise AssertionError\n"
        "@pytest.mark.xfail(reason='known')\ndef test_b() -> None:\n    pass\n"
    )
    result = run_pytest(tmp_path, source)
    assert result.returncode == 1
    assert "1 failed, 1 xfailed" in result.stdout


def test_a_warning_is_an_error(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "import warnings\ndef test_it() -> None:\n    warnings.warn('old')\n")
    assert result.returncode == 1
    assert "UserWarning: old" in result.stdout
