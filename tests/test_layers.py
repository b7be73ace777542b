"""The import contract of pyproject.toml: each layer imports only downwards."""

import subprocess
import sys


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
