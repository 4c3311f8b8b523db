"""Files appear all at once or not at all, and nothing is left of a process that was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tgi.errors import StartupError
from tgi.server.prepare.staging import staged

PROGRAM = """
import sys
from pathlib import Path
from tgi.server.prepare.staging import staged
with staged(Path(sys.argv[1])) as work:
    (work / "half.safetensors").write_text("half")
    print("there", flush=True)
    sys.stdin.read()
"""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_was_written_is_there_in_the_end(tmp_path: Path) -> None:
    with staged(tmp_path) as work:
        (work / "a").write_text("a")
        assert names(tmp_path) == {work.name}
    assert names(tmp_path) == {"a"}
    with pytest.raises(StartupError, match="make room and run it again"), staged(tmp_path) as work:
        (work / "b").write_text((work / "nowhere").read_text())
    assert names(tmp_path) == {"a"}


@pytest.mark.timeout(60)
def test_the_next_process_takes_away_what_a_killed_one_left_and_no_other(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as killed, subprocess.Popen(command, **pipes) as working:
        for process in (killed, working):
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
        killed.kill()
        killed.wait()
        assert len(names(tmp_path)) == 2
        with staged(tmp_path) as work:
            (work / "c").write_text("c")
            assert len(names(tmp_path)) == 2  # ours and that of the one at work
        working.communicate("")
    assert names(tmp_path) == {"c", "half.safetensors"}
