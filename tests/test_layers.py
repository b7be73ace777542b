"""Modules import in no ring, and nothing private of another package.

That each layer imports only downwards is import-linter's part (``lint-imports``).
"""

import ast
import graphlib

import pytest
from processes import python
from sources import FILES, ROOT, parsed


def statements(node, unseen=""):
    """All statements inside a node, at any depth, but those under ``if unseen:``."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, ()):
            if unseen and isinstance(child, ast.If) and ast.unparse(child.test) == unseen:
                continue
            yield child
            yield from statements(child, unseen)


def imports(path, modules):
    """Modules that a file imports, also inside functions, but what only a type checker sees."""
    for node in statements(parsed(path), "TYPE_CHECKING"):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inside = f"{node.module}.{name.name}"
                yield inside if inside in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def graph():
    """module -> what it imports. A package's face only passes names on: it is left out."""
    collected = {}
    for root in (ROOT, ROOT / "cli"):
        for path in sorted(root.glob("mfopt*/**/*.py")):
            if path.name != "__init__.py":
                collected[".".join(path.relative_to(root).with_suffix("").parts)] = path
    return {
        name: set(imports(path, collected)) & collected.keys() for name, path in collected.items()
    }


def test_no_module_imports_itself_through_others():
    modules = graph()
    assert len(modules) > 150 and "mfopt.factorization.proofs" in modules
    assert "mfopt.factorization.proofs" in modules["mfopt.factorization.factorization"]
    list(graphlib.TopologicalSorter(modules).static_order())  # CycleError names the ring
    back = modules | {"mfopt.errors": {"mfopt.factorization.factorization"}}
    with pytest.raises(graphlib.CycleError):  # control
        list(graphlib.TopologicalSorter(back).static_order())


def test_importing_mfopt_is_light_and_changes_no_global_flag_and_no_random_stream():
    program = (
        "import sys, mfopt; assert 'jax' not in sys.modules, 'jax imported'; "
        "import numpy; numpy.random.seed(3); first = numpy.random.rand(); numpy.random.seed(3); "
        "mfopt.strategies, mfopt.optimize, mfopt.factorize, mfopt.noise; "
        "assert numpy.random.rand() == first; "
        "import jax; assert not jax.config.jax_enable_x64; "
        "import jax.numpy as jnp; assert jnp.ones(1).dtype == 'float32'"
    )
    python("-c", program)


def borrowed(path, root=ROOT):
    """Private names of other packages that a file imports; what stands at the top is shared."""
    module = path.relative_to(root).with_suffix("").parts
    package = module[1:-1] if module[0] == "cli" else module[:-1]
    for node in statements(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mfopt"):
            for name in node.names:
                parts = (*node.module.split("."), name.name)
                private = [i for i, part in enumerate(parts) if part.startswith("_")]
                if private and private[0] > 1 and package[: private[0]] != parts[: private[0]]:
                    yield ".".join(parts)


def test_what_is_private_stays_in_its_package(tmp_path):
    actual = {str(path): names for path in FILES if (names := list(borrowed(path)))}
    assert len(FILES) > 150 and not actual
    outside = tmp_path / "mfopt" / "optimize" / "a.py"  # a control
    outside.parent.mkdir(parents=True)
    outside.write_text("from mfopt.noise._draws import KEY_WORDS\nfrom mfopt import _check\n")
    assert list(borrowed(outside, tmp_path)) == ["mfopt.noise._draws.KEY_WORDS"]
