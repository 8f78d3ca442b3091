"""The rooms hold: who may import whom, flat folders, short files, packages that match the links."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kernels", "solver", "lazytrain", "recipes")
MAX_LINES = {"kernels": 320, "solver": 320, "lazytrain": 320, "recipes": 320, "tests": 340}
ALLOWED = {
    "kernels": {"kernels"},
    "solver": {"solver"},
    "lazytrain": {"lazytrain", "kernels", "solver"},
    "recipes": {"recipes", "lazytrain"},
}
# What a recipe may use of the planner is plain data.
ALSO = {("recipes", "solver")}
THIRD_PARTY = {
    "kernels": {"torch", "triton", "numpy"},
    "solver": {"numpy", "scipy", "cvxpy", "pyscipopt"},
}


def source_files(room: str) -> list[Path]:
    return sorted((ROOT / room).glob("*.py"))


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the room"
            names.add(node.module or "")
    return names


def room_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "lazytrain":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "lazytrain"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_downwards(room: str) -> None:
    for path in source_files(room):
        for module in imported_modules(path):
            target = room_of(module)
            if target is not None and target not in ALLOWED[room] and (room, target) not in ALSO:
                pytest.fail(f"{path.relative_to(ROOT)} imports {module}")


@pytest.mark.parametrize("room", sorted(THIRD_PARTY))
def test_leaf_rooms_use_only_their_libraries(room: str) -> None:
    for path in source_files(room):
        for module in imported_modules(path):
            top = module.split(".")[0]
            if top not in sys.stdlib_module_names and top != "lazytrain":
                assert top in THIRD_PARTY[room], f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("room", [*ROOMS, "tests"])
def test_files_are_short(room: str) -> None:
    for path in source_files(room):
        assert len(path.read_text().splitlines()) <= MAX_LINES[room], f"{path.relative_to(ROOT)} has grown two jobs"


def test_rooms_are_flat_and_their_links_match_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]
    assert packages == ["lazytrain", *(f"lazytrain.{room}" for room in ROOMS if room != "lazytrain")]
    for room in ("kernels", "solver", "recipes"):
        link = ROOT / "lazytrain" / room
        assert link.is_symlink()
        assert link.resolve() == ROOT / room
        assert not (ROOT / room / "__init__.py").exists()
        folders = [p.name for p in (ROOT / room).iterdir() if p.is_dir() and p.name != "__pycache__"]
        assert folders == [], f"{room} must be flat"


def test_no_module_is_named_like_a_public_function_in_it() -> None:
    for room in ROOMS:
        for path in source_files(room):
            functions = {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}
            assert path.stem not in functions, path


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, lazytrain, lazytrain.solver.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_public_names_can_be_loaded() -> None:
    import lazytrain

    for name in lazytrain.__all__:
        assert getattr(lazytrain, name) is not None


def test_only_the_first_axis_of_a_grid_grows_with_the_data() -> None:
    """A GPU's other axes end at 65,535 programs; the first takes 2^31."""
    grids = [
        (path.name, node.func.slice)
        for path in sorted((ROOT / "kernels").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    grids = [(name, grid.elts) for name, grid in grids if isinstance(grid, ast.Tuple)]
    assert len(grids) >= 8
    for name, (_, *others) in grids:
        names = {node.id for axis in others for node in ast.walk(axis) if isinstance(node, ast.Name)}
        assert all(word.isupper() for word in names), f"{name}: {names} in a grid's second axis"
