"""Every known fault and every feature of the checklist is pinned by a marked test, or its page says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import pages


@pytest.fixture(scope="module")
def marks() -> list[pages.Mark]:
    return pages.find_marks()


def test_every_fault_and_row_has_a_test_or_a_reason(marks: list[pages.Mark]) -> None:
    assert pages.problems(marks) == []


def test_the_pages_say_what_the_marks_say(marks: list[pages.Mark]) -> None:
    assert pages.KNOWN_FAULTS.read_text() == pages.render_known_faults(marks), "run `make docs`"
    assert pages.COMPATIBILITY.read_text() == pages.render_compatibility(marks), "run `make docs`"


def test_marks_are_found_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "test_sample.py").write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.row('A: file')\n"
        "@pytest.mark.fault('X#1', 'X#2')\ndef test_a(): ...\n"
        "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.fault('X#3'))])\nasync def test_b(x): ...\n"
        "@pytest.mark.row('A: class')\nclass TestC:\n    @pytest.mark.fault('X#4')\n    def test_d(self): ...\n"
    )
    found = {(mark.kind, mark.text, mark.test) for mark in pages.find_marks(tmp_path, tmp_path)}
    file = "room/test_sample.py"
    assert found == {
        ("row", "A: file", file),
        ("fault", "X#1", f"{file}::test_a"),
        ("fault", "X#2", f"{file}::test_a"),
        ("fault", "X#3", f"{file}::test_b"),
        ("row", "A: class", f"{file}::TestC"),
        ("fault", "X#4", f"{file}::TestC::test_d"),
    }


def test_an_unknown_mark_a_missing_and_a_stale_reason_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {"Section": [{"id": "X#1", "reason": "not yet: later"}, {"id": "X#2"}, {"id": "X#3", "reason": "hm"}]}
    rows = {
        "A": {"title": "Title", "rows": [{"row": "POST /generate"}, {"row": "POST /generate_stream", "also": ["x"]}]}
    }
    monkeypatch.setattr(pages, "_load", {"known_faults": faults, "compatibility": rows}.__getitem__)
    marks = [
        pages.Mark("fault", "X#1", "tests/test_a.py::test_a"),
        pages.Mark("fault", "X#9", "tests/test_a.py::test_b"),
        pages.Mark("row", "A: POST /generate", "tests/test_a.py::test_c"),
        pages.Mark("row", "A: post /generate_s", "tests/test_a.py::test_d"),
        pages.Mark("row", "A: x", "tests/test_a.py::test_e"),
    ]
    found = pages.problems(marks)
    assert len(found) == 4
    assert "no fault is called 'X#9'" in found[0]
    assert "'X#1' has a test" in found[1]
    assert "'X#2' has no test" in found[2]
    assert "'X#3' has no test" in found[3]
    page = pages.render_compatibility(marks)
    assert "| POST /generate | `test_a.py::test_c` |" in page
    assert "| POST /generate_stream | `test_a.py::test_d`<br>`test_a.py::test_e` |" in page


def test_a_test_may_pin_a_part_when_the_entry_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {"Section": [{"id": "X#1", "title": "t", "right": "r", "reason": "in part: the rest is missing"}]}
    monkeypatch.setattr(pages, "_load", {"known_faults": faults, "compatibility": {}}.__getitem__)
    mark = pages.Mark("fault", "X#1", "tests/test_a.py::test_a")
    assert pages.problems([mark]) == []
    assert "`test_a.py::test_a`<br>in part: the rest is missing" in pages.render_known_faults([mark])
    assert len(pages.problems([])) == 1, "in part needs a test"
