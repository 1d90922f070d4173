"""The built package: a wheel and an editable install into empty environments, imported from outside the checkout."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "hf_specheads", "trainer", "model_cards")
DEMO_PAIR = ("target", "poss3-longer")  # of `model_cards/`, installed as `hf_specheads.demo_pair`
MOST_BYTES = 25_000_000  # of the wheel

REPORT = """
import json, sys
from importlib import metadata, resources
import hf_specheads, hf_specheads.trainer, hf_specheads.trainer.shipped_pair, hf_specheads.trainer.shipped_pair.corpus
from hf_specheads.publishing.card.facts import CardFacts
from hf_specheads.publishing.card.render import render_card
render_card(CardFacts("x", {"model_type": "specheads_eagle", "method": "eagle"}))
print(json.dumps({
    "package": hf_specheads.__file__,
    "trainer": hf_specheads.trainer.__file__,
    "version": [hf_specheads.__version__, metadata.version("hf-specheads")],
    "recipes": sorted(p.name for p in resources.files("hf_specheads.trainer").joinpath("recipes").iterdir()),
    "data": [resources.files("hf_specheads").joinpath(name).is_file()
             for name in ("py.typed", "publishing/card/template.md", "cli/demo_prompts.jsonl",
                          "generation/kernels/few_rows.c")],
    "plain_trainer": "trainer" in sys.modules,
}))
"""


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Output of a command; on failure the test fails with what it printed."""
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built, so that the build leaves nothing in the checkout and finds nothing stale there."""
    folder = tmp_path_factory.mktemp("sources")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel."""
    output = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir")
    run(*pip, output, sources, cwd=output)
    (found,) = output.glob("hf_specheads-*.whl")
    return found


def empty_environment(folder: Path) -> Path:
    """A new environment that sees the dependencies installed here, but no `.pth` files: not this package itself."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin" / "python"


def check_installed(python: Path, outside: Path) -> dict:
    """Imports package and trainer from a folder outside of the checkout; returns where they came from."""
    report = json.loads(run(python, "-c", REPORT, cwd=outside).splitlines()[-1])
    assert report["version"][0] == report["version"][1] and not report["plain_trainer"]
    assert all(report["data"])
    assert report["recipes"] == sorted(path.name for path in (ROOT / "trainer" / "recipes").iterdir())
    return report


def test_every_package_is_listed() -> None:
    """The mapping of `trainer/` rules out automatic discovery, so a new subpackage must be added by hand."""
    found = {
        ".".join(folder.parent.relative_to(ROOT).parts).replace("trainer", "hf_specheads.trainer", 1)
        if folder.relative_to(ROOT).parts[0] == "trainer"
        else ".".join(folder.parent.relative_to(ROOT).parts)
        for top in ("hf_specheads", "trainer")
        for folder in (ROOT / top).rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found | {"hf_specheads.demo_pair"}


def test_dependencies_are_floors() -> None:
    """None is capped because of what a later release might do."""
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {"train", "quant", "app", "zero3", "figures", "docs", "dev"}
    for requirement in [*PROJECT["project"]["dependencies"], *(r for extra in extras.values() for r in extra)]:
        assert ">=" in requirement and not set("<=~!").intersection(requirement.replace(">=", "")), requirement


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    """Distributions that an install with these extras asks for."""
    project = PROJECT["project"]
    requirements = [
        *project["dependencies"],
        *(r for extra in extras for r in project["optional-dependencies"][extra]),
    ]
    return {canonical(requirement.split(">=")[0]) for requirement in requirements}


def imported(top: str) -> Iterator[tuple[str, str, bool]]:
    """Files below a folder, packages they import from elsewhere, and whether importing the file needs them: not those
    imported inside of functions, or for annotations only."""
    for path in sorted((ROOT / top).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            for package in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"hf_specheads"}:
                yield str(path.relative_to(ROOT)), package, node in tree.body


COME_WITH_TORCH = {"triton"}  # where that is built for CUDA; nothing imports it elsewhere


def test_what_is_imported_is_declared() -> None:
    """A plain install imports the package; what training and figures need comes with the extra `train`, and nothing
    comes with it that they do not need."""
    distributions, used, missing = metadata.packages_distributions(), set(), []
    for top in ("hf_specheads", "trainer"):
        for file, package, at_once in imported(top):
            # What is not installed, as the page's library need not be, goes by its own name.
            names = {canonical(name) for name in distributions.get(package, [package])}
            used |= names
            extras = () if top == "hf_specheads" and at_once else ("train",)
            extras = ("app",) if file.startswith("hf_specheads/app/") else extras
            extras += ("zero3",) if file == "trainer/devices/sharding.py" else ()
            if not names & (declared(*extras) | COME_WITH_TORCH):
                missing.append(f"{file} imports {package} of {sorted(names)}")
    assert not missing, "add to pyproject.toml: " + "; ".join(missing)
    assert declared("train") - declared() <= used


def test_what_the_wheel_holds(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        str(path.relative_to(ROOT)).replace("trainer/", "hf_specheads/trainer/", 1)
        if path.relative_to(ROOT).parts[0] == "trainer"
        else str(path.relative_to(ROOT))
        for top in ("hf_specheads", "trainer")
        for path in (ROOT / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    expected |= {
        f"hf_specheads/demo_pair/{path.relative_to(ROOT / 'model_cards').as_posix()}"
        for name in DEMO_PAIR
        for path in (ROOT / "model_cards" / name).iterdir()
        if path.is_file()
    }
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == expected
    assert wheel.stat().st_size < MOST_BYTES
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "env")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=tmp_path)
    report = check_installed(python, tmp_path)
    inside = str(tmp_path / "env")
    assert report["package"].startswith(inside) and report["trainer"].startswith(inside)
    assert report["trainer"].endswith(os.path.join("hf_specheads", "trainer", "__init__.py"))
    assert run(tmp_path / "env" / "bin" / "specheads", "--version", cwd=tmp_path).startswith("hf-specheads ")
    demo = run(tmp_path / "env" / "bin" / "specheads", "demo", "--limit", "1", "--max-new-tokens", "8", cwd=tmp_path)
    assert "All 1 texts are identical to plain generate." in demo


@pytest.mark.slow
def test_editable_install_in_an_empty_environment(sources: Path, tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "env")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-build-isolation", "--no-deps")
    run(*pip, "--editable", sources, cwd=tmp_path)
    report = check_installed(python, tmp_path)
    assert Path(report["package"]) == sources / "hf_specheads" / "__init__.py"
    assert Path(report["trainer"]) == sources / "trainer" / "__init__.py"
    assert "recipe" in run(python, "-m", "hf_specheads.trainer", "--help", cwd=tmp_path)
