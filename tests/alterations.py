"""JSON with one leaf altered: every place in it, and what may stand there instead."""

import json

GONE = object()  # in place of a value: the field is left out


def places(value, path=()):
    """Path and value of every leaf of JSON; an empty table or list is one."""
    if not isinstance(value, dict | list) or not value:
        yield path, value
        return
    for name in value if isinstance(value, dict) else range(len(value)):
        yield from places(value[name], (*path, name))


def alterations(leaf):
    """Other values of the same type, and of other types."""
    if isinstance(leaf, bool):
        return [not leaf, int(leaf), None, GONE]
    if isinstance(leaf, int):
        return [leaf + 1, float(leaf), True, None, GONE]
    if isinstance(leaf, float):
        return [1.01 * leaf or 0.01, 0.99 * leaf or -0.01, None, 1, GONE]
    return ["x", None, 1, GONE] if isinstance(leaf, str) else ["x", 1, GONE]


def with_leaf(facts, path, value):
    changed = json.loads(json.dumps(facts))
    index = changed
    for name in path[:-1]:
        index = index[name]
    if value is GONE:
        del index[path[-1]]
    else:
        index[path[-1]] = value
    return changed
