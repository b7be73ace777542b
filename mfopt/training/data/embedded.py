"""Names of the corpora that come with Python: known without what it takes to build them."""

# by name, and their public part
EMBEDDED = {"stdlib": "public", "stdlib-code": "prose"}
