"""The schema of JSON output (docs/schema.json), and a check against it."""

import json
from pathlib import Path

import jsonschema

SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "schema.json").read_text())
jsonschema.Draft202012Validator.check_schema(SCHEMA)
_VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def validate(found):
    """Raise AssertionError with the first place where ``found`` breaks the schema."""
    problem = next(iter(_VALIDATOR.iter_errors(found)), None)
    assert problem is None, f"{found.get('command')}: {problem.message}"
