"""The schema of JSON output (docs/schema.json), and a check against it."""

import json

import jsonschema
from sources import ROOT

SCHEMA = json.loads((ROOT / "docs" / "schema.json").read_text())
jsonschema.Draft202012Validator.check_schema(SCHEMA)
_VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def validate(printed_object):
    """Raise AssertionError with the first place where ``found`` breaks the schema."""
    problem = next(iter(_VALIDATOR.iter_errors(printed_object)), None)
    assert problem is None, f"{printed_object.get('command')}: {problem.message}"
