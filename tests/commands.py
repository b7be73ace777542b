"""The command line as tests call it."""

import pytest
from mfopt_cli.main import main


def ended(*words):
    """The exit code of a command."""
    try:
        return main([*map(str, words)]) or 0
    except SystemExit as stop:
        return stop.code


def failure(capsys, *words, code=2):
    """What a command says on standard error as it ends with an exit code."""
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, words)])
    said = capsys.readouterr().err
    assert stopped.value.code == code and "Traceback" not in said
    return said
