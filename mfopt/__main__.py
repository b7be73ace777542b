"""``python -m mfopt``: the command line."""

import importlib

if __name__ == "__main__":
    importlib.import_module("mfopt_cli.main").main()
