"""What the library imports, and what its wheel holds."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import jaxcompact
import jaxcompact.kernels

ROOT = Path(__file__).resolve().parent.parent

# Imports point to lower layers only. A new module of jaxcompact needs a place here.
LAYERS = (
    {"kernels", "arrays"},
    {"codecs", "graph", "paths", "memory", "reals"},
    {"projection", "kinds"},
    {"sketched", "analysis"},
    {"linear", "limiter", "actions"},
    {"compress", "subspace"},
    {"policy"},
    {"policies", "transform"},
    {"checkpoint"},
    {"explain", "planner"},
    {"optimizers"},
    {"nnx", "linen"},
    {"cli"},
    {"__main__"},
)
INSIDE = {
    "analysis": (
        {"moving", "tensor"},
        {"differences", "layouts", "solving", "spans"},
        {
            "bounded",
            "correlations",
            "decisions",
            "depth",
            "distributions",
            "divisors",
            "exponents",
            "functions",
            "integers",
            "loops",
            "normal",
            "parts",
            "phases",
            "rows",
            "sums",
        },
        {"scores", "small", "spectra", "still", "surrogates", "tails", "targets"},
        {"candidates", "rules"},
        {"tensors"},
    ),
    "transform": (
        {"choices", "examples", "hoisting", "outputs", "schedule", "sources"},
        {"pullbacks"},
        {"program", "regions"},
        {"norms", "recording"},
        {"residuals", "forward", "backward"},
        {"replay"},
        {"stores"},
        {"traced"},
    ),
    "memory": (
        {"cache", "cards", "functions", "hlo", "quiet"},
        {"collectives", "compiler", "measure", "traffic"},
        {"buffers"},
        {"peak"},
        {"search"},
    ),
    "planner": (
        {"arguments", "integer", "plan", "probing", "roofline", "scan"},
        {"block"},
        {"effects", "layers", "measured", "stages"},
        {"items", "sensitivity"},
        {"problem"},
        {"alive", "lifetimes"},
        {"milp"},
        {"candidates", "front"},
        {"trials"},
        {"search"},
    ),
}
NEEDS = {"jax", "flax", "optax", "jaxcompact", "numpy", "scipy"}  # these with jax
EXTRAS = """orbax tokenizers safetensors zstandard pyarrow matplotlib tensorboardX
    tqdm pytest hypothesis chex""".split()


def sources(*folders: str) -> list[Path]:
    """The Python files of these folders, relative to the root; links not followed."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT) for path in found)


def installed_path(path: Path) -> Path:
    """Where a file of jaxcompact/ or kernels/ is when it is imported."""
    return "jaxcompact" / path if path.parts[0] == "kernels" else path


def module_name(path: Path) -> str:
    """Its name when it is imported: `jaxcompact.kernels.quantize`."""
    parts = installed_path(path).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """All dotted names that a file imports: `from a.b import c` gives `a.b.c`."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
            names |= {".".join([*base, alias.name]) for alias in node.names}
    return names


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def layer(name: str) -> int:
    """The layer of a dotted name, by the module below jaxcompact."""
    child = name.split(".")[1:2]
    return next((i for i, names in enumerate(LAYERS) if names & {*child}), len(LAYERS))


def run(*command: str, **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


LIBRARY = sources("jaxcompact", "kernels")


@pytest.mark.parametrize("path", LIBRARY, ids=str)
def test_imports_point_to_lower_layers(path: Path):
    name = module_name(path)
    if name == "jaxcompact":  # stands above all
        return
    package = ".".join(name.split(".")[:2])
    assert layer(name) < len(LAYERS), f"{package} needs a place in LAYERS"
    for other in imports(path):
        if other.startswith("jaxcompact") and not f"{other}.".startswith(f"{package}."):
            assert layer(other) < layer(name), f"{path} imports {other}"


@pytest.mark.parametrize("package", INSIDE)
def test_imports_inside_a_package_point_to_lower_layers(package: str):
    layers = INSIDE[package]
    layer_of = {name: i for i, names in enumerate(layers) for name in names}
    paths = sources(f"jaxcompact/{package}")
    assert layer_of.keys() == {path.stem for path in paths} - {"__init__"}
    for path in paths:
        for other in imports(path) if path.stem in layer_of else ():
            inside = other.split(".")[2:3] if f".{package}." in other else []
            for name in set(inside) & layer_of.keys():
                assert layer_of[name] < layer_of[path.stem], f"{path} imports {other}"


@pytest.mark.parametrize("path", LIBRARY, ids=str)
def test_library_imports_only_what_it_requires(path: Path):
    assert roots(path) <= NEEDS | sys.stdlib_module_names


@pytest.mark.parametrize("path", LIBRARY, ids=str)
def test_private_parts_of_jax_are_not_used(path: Path):
    tree = ast.parse((ROOT / path).read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not [name for name in imports(path) if "_src" in name.split(".")]
    assert "_src" not in used


def test_import_needs_jax_flax_and_optax_alone():
    """With the extras missing; and nothing is loaded that those three do not load."""
    code = f"""if True:
        import sys
        sys.modules.update(dict.fromkeys({EXTRAS}))
        import jax, flax.linen, flax.nnx, optax
        before = set(sys.modules)
        for name in {[module_name(path) for path in LIBRARY]}:
            __import__(name)
        after = {{name.split(".")[0] for name in set(sys.modules) - before}}
        print(*after - sys.stdlib_module_names)
    """
    loaded = run(sys.executable, "-c", code, env={**os.environ, "PYTHONPATH": ROOT})
    others = {name for name in loaded.split() if not name.startswith("jax")}
    assert others <= NEEDS  # jaxlib, and jax's plugins where there are some, are jax's


def test_kernels_have_one_name():
    """A top-level `kernels` is another project's, and would be a second copy."""
    assert not (ROOT / "kernels/__init__.py").exists()
    for path in [*LIBRARY, *sources("train", "benchmarks", "tests")]:
        assert "kernels" not in roots(path), path


def test_kernels_are_those_of_this_checkout():
    assert os.readlink(ROOT / "jaxcompact/kernels") == "../kernels"
    assert Path(jaxcompact.__file__).parent == ROOT / "jaxcompact"
    (folder,) = set(jaxcompact.kernels.__path__)
    assert Path(folder).resolve() == ROOT / "kernels"


@pytest.mark.slow
def test_wheel_holds_the_library_and_nothing_else(tmp_path: Path):
    tree, installed = tmp_path / "tree", tmp_path / "installed"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("jaxcompact", "kernels", "train", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    tuned = tree / "kernels/quantize/tuned/card.json"  # what a kernel will bring along
    tuned.parent.mkdir(parents=True, exist_ok=True)
    tuned.write_text("{}")

    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    run(sys.executable, "-c", build, cwd=tree)
    (wheel,) = tree.glob("dist/*.whl")
    zipfile.ZipFile(wheel).extractall(installed)

    files = (path for path in installed.rglob("*.*") if path.is_file())
    names = {path.relative_to(installed) for path in files}
    data = [
        path.relative_to(tree)
        for folder in ("kernels", "jaxcompact/memory")
        for path in (tree / folder).rglob("*.json")
    ]
    expected = {installed_path(path) for path in [*LIBRARY, *data]}
    assert {name for name in names if ".dist-info" not in name.parts[0]} == expected
    (top_level,) = installed.glob("*.dist-info/top_level.txt")
    assert top_level.read_text().split() == ["jaxcompact"]

    code = "import jaxcompact.nnx; print(jaxcompact.__file__)"
    env = {**os.environ, "PYTHONPATH": installed}
    imported = run(sys.executable, "-c", code, cwd=tmp_path, env=env)
    assert Path(imported.strip()).parent == installed / "jaxcompact"
