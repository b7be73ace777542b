"""The command line as tests call it."""

import json

import pytest
from click.testing import CliRunner
from mfopt_cli.main import cli, main


def invoked(*words):
    """How a command ended, with what it printed."""
    arguments = [*map(str, words)]
    return CliRunner().invoke(cli, arguments, prog_name="mfopt", catch_exceptions=False)


def printed(*words):
    """The JSON of a command that ends well."""
    done = invoked(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


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
