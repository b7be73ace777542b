"""The parts of ``mfopt account``: shared options, and its subcommands by kind of mechanism."""
