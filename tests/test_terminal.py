"""What a person sees: tables that fit, one progress display, plain text elsewhere."""

import io
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from mfopt_cli import display, live

from mfopt import words
from mfopt.progress import Progress

CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
}


def on_a_terminal(program, *, width=80, **environment):
    """What ``program`` writes to a pseudo-terminal of ``width`` columns, both streams together."""
    import fcntl
    import pty
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**CLEAN, "TERM": "xterm-256color", **environment},
    )
    os.close(follower)
    recorded = b""
    overdue = threading.Timer(120, child.kill)
    overdue.start()
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        recorded += part
    overdue.cancel()
    os.close(leader)
    assert child.wait() == 0, recorded.decode()
    return recorded.decode()


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")


TABLES = """
from mfopt_cli import display
display.speak_plainly()
display.table("one [bold]title[/bold] σ", [("noise multiplier σ", "3.2 × " + "word " * 30),
                                           ("digest", "0123456789abcdef" * 4)])
display.columns(["ε", "method", "RMSE"], [["1", "a method of several words " * 2, "12.5"],
                                          ["10", "short", "3.25"]])
"""


@pytest.mark.parametrize("width", [40, 200])
def test_tables_fit_the_terminal_and_lose_nothing(width):
    shown = on_a_terminal(TABLES, width=width)
    lines = plain(shown).splitlines()
    assert max(map(len, lines)) <= width
    together = "".join("".join(lines).split())
    for part in ("one[bold]title[/bold]σ", "12.5", "3.25"):
        assert part in together
    assert together.count("word") == 32 and together.count("89abcdef") == 4
    assert "\x1b[1m" in shown  # the title is bold


def test_no_color_and_dumb_terminals_get_no_codes():
    assert "\x1b[" in on_a_terminal(TABLES)
    dumb = on_a_terminal(TABLES, TERM="dumb")
    assert "\x1b" not in dumb
    colourless = on_a_terminal(TABLES + PROGRESS, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", colourless)  # no foreground colour


def as_a_pipe(program, **environment):
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        env={**CLEAN, **environment},
        check=True,
    )
    return done.stdout, done.stderr


def test_a_pipe_gets_plain_text_one_line_a_row():
    output, err = as_a_pipe(TABLES, PYTHONIOENCODING="utf-8")
    lines = output.decode().splitlines()
    assert len(lines) == 6 and b"\x1b" not in output and err == b""
    assert lines[1].startswith("  noise multiplier σ  3.2 × word")
    assert lines[0] == "one [bold]title[/bold] σ"
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.release
@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
def test_an_encoding_without_greek_gets_words(encoding):
    output, _ = as_a_pipe(TABLES, PYTHONIOENCODING=encoding)
    text = output.decode(encoding)
    assert "noise multiplier sigma" in text and "epsilon" in text and "?" not in text
    lines = text.splitlines()
    assert lines[1].index("3.2") == lines[2].index("0123")  # columns are even in what is shown
    help_text, _ = as_a_pipe(
        "from mfopt_cli.main import main; main(['optimize', '--help'])", PYTHONIOENCODING=encoding
    )
    assert "epsilon, delta" in help_text.decode(encoding)


# --- progress ------------------------------------------------------------------------------------

PROGRESS = """
import time
from mfopt.progress import Progress
from mfopt_cli.live import Live
with Live(True) as live:
    for stage in ("first stage", "second stage"):
        for done in range(6):
            live(Progress(stage, done, 6, "steps", note="σ = 1.5", paced=True))
            time.sleep(0.06)
    live(Progress("second stage", note="something to keep", lasting=True))
print("the end")
"""


@pytest.mark.parametrize("paced", [True, False])
def test_the_time_left_is_told_where_it_follows_from_the_pace(paced, monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(live, "time", SimpleNamespace(perf_counter=lambda: clock[-1]))
    with live.Live(True) as shown:  # the first piece is compilation, and not timed
        for seconds, done in ((0.0, 0), (50.0, 1), (60.0, 3)):
            clock.append(seconds)
            shown(Progress("work", done, 8, "cells", paced=paced))
    lines = capsys.readouterr().err.splitlines()
    assert ("about 25 s left" in lines[-1]) is paced and "3 of" in lines[-1]
    assert not any("left" in line for line in lines[:-1])


@pytest.mark.parametrize("width", [30, 80])
def test_one_display_on_a_terminal_that_leaves_no_trace(width):
    shown = on_a_terminal(PROGRESS, width=width)
    assert "first stage" in shown and "second stage" in shown
    assert "\x1b[?25l" in shown and shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")  # cursor
    if width == 80:
        assert "of 6 steps" in shown
    assert "something to keep" in shown and plain(shown).splitlines()[-1].strip() == "the end"


def test_dumb_terminals_and_pipes_get_lines():
    dumb = on_a_terminal(PROGRESS, TERM="dumb")
    assert "\x1b" not in dumb and "first stage: 0 of 6 steps" in dumb
    output, err = as_a_pipe(PROGRESS)
    assert output == b"the end\n" and b"\x1b" not in err
    lines = err.decode().splitlines()
    # one line for each stage, and the note that stays: not one for each report
    assert [line.split("] ")[-1].split(":")[0] for line in lines] == [
        "first stage",
        "second stage",
        "something to keep",
    ]


# --- numbers -------------------------------------------------------------------------------------


def test_no_absurd_percentages():
    assert words.against(5.03765158381948611067904e23, 1.0) == "over a million times the error"
    assert words.against(4.34, 1.0) == "4.3 times the error"
    assert words.against(0.871, 1.0) == "12.9% less error"
    assert words.against(1.0, float("nan")) == "no comparison of the error"


def test_numbers_that_no_encoding_lacks():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    assert display.fitting("σ ≤ 2 × ε → C⁻¹", stream) == "sigma <= 2 × epsilon -> C^-¹"
