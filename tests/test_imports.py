"""What each file may import: dependencies point one way, and importing the package costs nothing."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "harts_hf"

# Parts of the package from the bottom up: a part may import those of the lines above its own.
LAYERS = (
    ("tree", "kernels"),
    ("planning",),
    ("layouts", "boundary"),
    ("batch",),
    ("models",),
    ("forward",),
    ("window_batches",),
    ("execution",),
    ("distributed", "calibration"),
    ("trainers",),
    ("__init__", "cli"),
)
# Packages outside the standard library that a part may import. Transformers' internals are used in `models/` alone and
# TRL's in `trainers/` alone.
PACKAGES = {
    "__init__": set(),
    "tree": {"numpy"},
    "planning": {"numpy"},
    "kernels": {"torch", "triton", "fla", "flash_attn", "cutlass"},
    "layouts": {"numpy", "torch"},
    "boundary": {"torch"},
    "batch": {"numpy", "torch"},
    "models": {"numpy", "torch", "transformers", "packaging"},
    "forward": {"numpy", "torch"},
    "window_batches": {"numpy", "torch"},
    "execution": {"numpy", "torch"},
    "calibration": {"numpy", "torch", "transformers"},
    "distributed": {"numpy", "torch", "transformers", "accelerate"},
    "trainers": {"numpy", "torch", "transformers", "trl", "accelerate", "datasets", "peft", "pyarrow"},
    "cli": {"numpy", "torch", "transformers", "trl", "datasets", "matplotlib"},
}


def parts_below(part: str) -> set[str]:
    """Parts of the package that `part` may import, itself included."""
    layer = next(i for i, parts in enumerate(LAYERS) if part in parts)
    below = {name for parts in LAYERS[:layer] for name in parts}
    if part == "planning":  # plans are numpy alone
        below -= {"kernels"}
    return below | {part}


def part_of(file: Path) -> str:
    """The part of the package that a file belongs to: its folder below `harts_hf/`, or its own name."""
    relative = file.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_modules(source: str, module: str) -> list[str]:
    """Absolute names of all modules that `source`, the text of `module`, imports, inside functions too."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = module.split(".")[: -node.level]
                names.append(".".join([*base, *([node.module] if node.module else [])]))
            else:
                names.append(node.module)
            if names[-1] == "harts_hf":  # `from harts_hf import batch` imports the module behind the name
                names[-1:] = [f"harts_hf.{alias.name}" for alias in node.names]
    return names


def violations(file: Path, source: str) -> list[str]:
    """Imports of `source`, as the text of `file`, that its part of the package may not have."""
    part = part_of(file)
    if part not in PACKAGES:
        return [f"{part} is not in the table of parts"]
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    if file.name == "__init__.py":
        module = f"{module.removesuffix('.__init__')}.__init__"
    bad = []
    for name in imported_modules(source, module):
        top, *rest = name.split(".")
        if top == "harts_hf":
            if not rest or rest[0] not in parts_below(part):
                bad.append(name)
        elif top not in sys.stdlib_module_names and top not in PACKAGES[part]:
            bad.append(name)
    return bad


FILES = sorted(file for file in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_dependencies_point_one_way(file):
    assert violations(file, file.read_text()) == []


@pytest.mark.parametrize(
    "path, line",
    [
        ("tree.py", "import torch"),
        ("planning/rounds.py", "from harts_hf.batch import CompactBatch"),
        ("planning/rounds.py", "from ..batch import CompactBatch"),
        ("kernels/tree_conv.py", "import numpy"),
        ("kernels/tree_conv.py", "from harts_hf import tree"),
        ("batch.py", "from .models.enable import enable_tree_forward"),
        ("models/enable.py", "def f():\n    from harts_hf.forward import tree_logprobs"),
        ("execution.py", "import transformers.modeling_utils"),
        ("forward.py", "from trl import GRPOTrainer"),
        ("helpers.py", "import os"),
    ],
)
def test_an_upward_import_is_found(path, line):
    assert violations(PACKAGE / path, line)


def test_linked_folders_hold_no_init_file():
    """A folder without `__init__.py` never shadows an installed package of the same name."""
    for name in ("kernels", "models", "trainers"):
        assert not (PACKAGE / name / "__init__.py").exists()
        assert (ROOT / name).is_symlink() and (ROOT / name).resolve() == PACKAGE / name


def run_python(code: str, **environment: str) -> str:
    """Standard output of `code`, run by a fresh interpreter in the checkout's root."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


def test_installed_packages_win_over_the_links(tmp_path):
    """In the root, `import kernels` finds an installed package `kernels`, such as the one Transformers imports."""
    for name in ("kernels", "models", "trainers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("INSTALLED = True\n")
    code = "import sys; assert sys.path[0] == ''; import kernels, models, trainers\n"
    code += "print(kernels.INSTALLED, models.INSTALLED, trainers.INSTALLED)"
    assert run_python(code, PYTHONPATH=str(tmp_path)).split() == ["True"] * 3


def test_importing_the_package_imports_no_torch():
    code = "import sys, harts_hf\n"
    code += "print([m for m in ('numpy', 'torch', 'transformers', 'trl') if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_planning_works_without_torch():
    code = "import sys; sys.modules['torch'] = None\n"  # any import of torch raises
    code += "from harts_hf import PrefixTree, plan_rounds, plan_step\n"
    code += "tree = PrefixTree.from_sequences([[1, 2, 3], [1, 2, 4]])\n"
    code += "print(tree.num_rows, plan_rounds(tree).num_rounds, plan_step([[1, 2, 3], [1, 2, 4]]).compact_tokens)"
    assert run_python(code).split() == ["4", "1", "4"]


def test_public_names():
    import harts_hf

    assert set(harts_hf.__all__) <= set(dir(harts_hf))
    for name in harts_hf.__all__:
        assert getattr(harts_hf, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = harts_hf.nothing
