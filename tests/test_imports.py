"""Who may import whom: the directions that keep the rooms of this project apart, read from the sources."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STDLIB = set(sys.stdlib_module_names)
ARRAYS = {"jax", "jaxtyping", "numpy"}

# Files by pattern, most particular first; what they may import besides the standard library, by prefix.
RULES = {
    "moe/config.py": {"moe.config", "numpy"},
    "moe/**/*.py": {*ARRAYS, "flax", "moe"},
    "dualpipe_jax/schedule/**/*.py": {"numpy", "dualpipe_jax.schedule"},
    "dualpipe_jax/config.py": {"moe.config"},
    "dualpipe_jax/emulate.py": set(),
    "dualpipe_jax/jaxprs.py": ARRAYS,
    "dualpipe_jax/residuals.py": {*ARRAYS, "scipy", "dualpipe_jax.jaxprs"},
    "dualpipe_jax/cut.py": {*ARRAYS, "dualpipe_jax.jaxprs", "dualpipe_jax.residuals"},
    "dualpipe_jax/split_loops.py": {*ARRAYS, "dualpipe_jax.cut", "dualpipe_jax.jaxprs", "dualpipe_jax.residuals"},
    "dualpipe_jax/split_vjp.py": {
        *ARRAYS, "dualpipe_jax.cut", "dualpipe_jax.jaxprs", "dualpipe_jax.residuals", "dualpipe_jax.split_loops",
    },
    "dualpipe_jax/hand_written.py": {"jax"},
    "dualpipe_jax/dropout.py": ARRAYS,
    "dualpipe_jax/non_finite.py": {*ARRAYS, "dualpipe_jax.executor", "dualpipe_jax.schedule"},
    "dualpipe_jax/executor/**/*.py": {
        *ARRAYS, "dualpipe_jax.executor", "dualpipe_jax.jaxprs", "dualpipe_jax.residuals", "dualpipe_jax.schedule",
        "dualpipe_jax.split_vjp",
    },
    "dualpipe_jax/model/count.py": {"dualpipe_jax.config", "moe.config"},
    # The model speaks the executor's public language (what a stage returns), as any user's model would.
    "dualpipe_jax/model/**/*.py": {
        *ARRAYS, "flax", "moe",
        "dualpipe_jax.config", "dualpipe_jax.executor", "dualpipe_jax.model", "dualpipe_jax.schedule",
    },
    # Files of another project's form, and a run folder: the one place that knows both.
    "dualpipe_jax/hf/run_folder.py": {
        *ARRAYS, "ml_dtypes", "orbax", "dualpipe_jax.checkpoint", "dualpipe_jax.config", "dualpipe_jax.data",
        "dualpipe_jax.hf", "dualpipe_jax.optimizer", "dualpipe_jax.train_step",
    },
    "dualpipe_jax/hf/**/*.py": {
        *ARRAYS, "ml_dtypes", "safetensors", "moe.config",
        "dualpipe_jax.config", "dualpipe_jax.hf", "dualpipe_jax.model",
    },
    "dualpipe_jax/plan/**/*.py": {"jax", "dualpipe_jax.plan"},
    "dualpipe_jax/gpu_options.py": set(),
    "dualpipe_jax/data/**/*.py": {*ARRAYS, "grain", "dualpipe_jax.data"},
    "configs/**/*.py": {"configs", "dualpipe_jax.config", "moe.config"},
}  # fmt: skip
# Drawing is for those who ask for it: allowed where it waits, so that importing the module does not need it.
LAZY = {"dualpipe_jax/schedule/render.py": {"matplotlib"}}
# May be imported before the emulated devices are set up.
WITHOUT_JAX = (
    "configs",
    "dualpipe_jax",
    "dualpipe_jax.bench.bubble",
    "dualpipe_jax.bench.step",
    "dualpipe_jax.cli",
    "dualpipe_jax.config",
    "dualpipe_jax.distributed",
    "dualpipe_jax.emulate",
    "dualpipe_jax.gpu_options",
    "dualpipe_jax.model.count",
    "dualpipe_jax.plan.overlap",
    "dualpipe_jax.plan.topology",
    "dualpipe_jax.schedule",
    "dualpipe_jax.validation",
    "moe.config",
)


def sources():
    return [p for folder in ("moe", "dualpipe_jax", "configs", "run") for p in sorted((ROOT / folder).rglob("*.py"))]


def imports(tree):
    """(name, does it wait) of all that a module imports; what is in a function, or for type checkers only, waits."""
    lazy_nodes = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) or is_type_checking(node))
    lazy = {child for node in lazy_nodes for child in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute, so that this test can read them"
            # `from dualpipe_jax import schedule` means dualpipe_jax.schedule
            yield from ((f"{node.module}.{alias.name}", node in lazy) for alias in node.names)


def is_type_checking(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def violations(path, source, allowed, lazy=frozenset()):
    found = []
    for name, waits in imports(ast.parse(source)):
        permitted = allowed | (lazy if waits else frozenset())
        known = name.split(".")[0] in STDLIB or any(name == p or name.startswith(f"{p}.") for p in permitted)
        if not known:
            found.append(f"{path} imports {name}")
    return found


def rule_of(path):
    return next((pattern for pattern in RULES if Path(path).match(pattern) or path in expand(pattern)), None)


def expand(pattern):
    return {p.relative_to(ROOT).as_posix() for p in ROOT.glob(pattern)}


def test_every_room_imports_only_what_it_may():
    found = []
    for source in sources():
        path = source.relative_to(ROOT).as_posix()
        rule = rule_of(path)
        if rule is not None:
            found += violations(path, source.read_text(), RULES[rule], LAZY.get(path, frozenset()))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("pattern", RULES)
def test_every_rule_has_files(pattern):
    assert expand(pattern), f"no file matches {pattern}: the rule guards nothing"


def test_nobody_imports_scripts_or_tests():
    outside = {path: source.read_text() for source in sources() if (path := source.relative_to(ROOT).as_posix())}
    found = [
        f"{path} imports {name}"
        for path, source in outside.items()
        for name, _ in imports(ast.parse(source))
        if name.split(".")[0] in ("run", "tests")
    ]
    assert not found, "\n".join(found)


def test_the_check_sees_violations():
    source = "import jax.numpy\nfrom dualpipe_jax import train\ndef f():\n    import matplotlib.pyplot\n"
    assert violations("x.py", source, {"numpy"}) == [
        "x.py imports jax.numpy",
        "x.py imports dualpipe_jax.train",
        "x.py imports matplotlib.pyplot",
    ]
    assert violations("x.py", source, {"jax", "dualpipe_jax.train"}, {"matplotlib"}) == []


def test_the_command_line_is_read_without_jax():
    program = (
        f"import sys, {', '.join(WITHOUT_JAX)}\nassert 'jax' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_public_name_is_the_function_whatever_was_imported_before():
    code = "import dualpipe_jax.split_vjp, dualpipe_jax.split_report\n"
    code += "from dualpipe_jax import split_vjp, split_report, hand_written\n"
    code += "assert callable(split_vjp) and callable(split_report) and callable(hand_written)\n"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
