"""How a command ends: exit codes, one line for any error, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys
from dm05_schemas.cli import run
from dm05_schemas.errors import DataError, UsageError
def main():
    {body}
run(main, "prog")
"""


def finish(body: str, **options: object) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.format(body=body)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


FREE = "Free some space (df) or inodes (df -i) there, then run the same command again"


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("print('x')", 0, ""),
        ("return 1", 1, ""),
        ("raise DataError('is wrong', where='f:3', fix='Run x')", 1, "prog: error: f:3: is wrong. Run x\n"),
        ("raise DataError('two\\nlines')", 1, "prog: error: two lines\n"),
        ("raise UsageError('no such flag')", 2, "prog: error: no such flag\n"),
        ("open('/no/such/file')", 1, "prog: error: /no/such/file: No such file or directory\n"),
        ("open('/dev/full', 'w').write('x' * 9999)", 1, f"prog: error: No space left on device. {FREE}\n"),
        (
            "open('/dev/null/x')",
            1,
            "prog: error: /dev/null/x: Not a directory. "
            "A file stands where a folder must be: move it away, or choose another folder\n",
        ),
        ("raise KeyboardInterrupt", 130, "prog: interrupted\n"),
        ("from dm05_schemas.stops import Terminated; raise Terminated", 143, "prog: terminated\n"),
        ("sys.exit(2)", 2, ""),
        ("raise BrokenPipeError(32, 'Broken pipe')", 1, "prog: error: Broken pipe\n"),
    ],
)
def test_ends(body: str, code: int, line: str) -> None:
    done = finish(body)
    assert (done.returncode, done.stderr) == (code, line)


def test_an_unforeseen_error_is_one_line_too(tmp_path: Path) -> None:
    done = finish("{}['key']".replace("{}", "dict()"), env=os.environ | {"TMPDIR": str(tmp_path)})
    [kept] = tmp_path.iterdir()
    assert done.returncode == 1 and "KeyError" in kept.read_text()
    assert done.stderr == (
        "prog: error: KeyError at <string>:6: 'key'. This is a bug in the tool, please report it. "
        f"The traceback is in {kept}\n"
    )


def test_a_reader_that_leaves_is_no_error() -> None:
    code = SCRIPT.format(body="[print('line', n) for n in range(100000)]")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 141 and process.stderr.read() == b""


def test_ctrl_c() -> None:
    code = SCRIPT.format(body="import time; print('up', flush=True); time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130 and process.stderr.read() == b"prog: interrupted\n"


def test_names_that_a_terminal_cannot_show() -> None:
    done = finish("print('\\udcff 图')", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "\\udcff \\u56fe\n")
