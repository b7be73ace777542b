"""Extension of Griffe: what docstrings hold that Markdown does not know."""

import re

import griffe

ROLE = re.compile(r":(?:py:)?[a-z]+:`~?\.*([^`]+)`")
DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.M)


class Roles(griffe.Extension):
    """Write reStructuredText roles as code, and doctests as fenced blocks."""

    def on_object(self, *, obj, **rest):
        """Rewrite one docstring."""
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", text)
