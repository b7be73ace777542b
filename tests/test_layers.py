"""The import contract of pyproject.toml: each layer imports only downwards."""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_layers_import_only_downwards():
    words = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_mfopt_is_light_and_changes_no_global_flag():
    program = (
        "import sys, mfopt; assert 'jax' not in sys.modules, 'jax imported'; "
        "import jax; mfopt.strategies, mfopt.optimize; "
        "assert not jax.config.jax_enable_x64; "
        "import jax.numpy as jnp; assert jnp.ones(1).dtype == 'float32'"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_two_public_classes_have_one_name():
    places = defaultdict(list)
    for top in ("mfopt", "cli"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert len(places) > 100 and not twice
