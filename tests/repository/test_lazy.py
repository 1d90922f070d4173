"""What an import or a short command loads, counted in modules: clocks differ from machine to machine."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import hf_specheads
import hf_specheads.trainer
from hf_specheads.cli import COMMANDS
from hf_specheads.heads.auto import HEADS
from hf_specheads.registration import MODEL_TYPES

SHIPPED = Path(__file__).resolve().parents[2] / "model_cards" / "eagle3"
HEAVY = ("torch", "transformers", "peft", "datasets", "matplotlib", "accelerate", "huggingface_hub", "numpy")


def loaded_after(*steps: str) -> list[set[str]]:
    """Modules that are loaded after each of some steps in one fresh interpreter."""
    program = f"""
import json, sys
loaded = []
for step in {steps!r}:
    try:
        exec(step)
    except SystemExit:
        pass
    loaded.append(sorted(sys.modules))
print("\\n" + json.dumps(loaded))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    return [set(names) for names in json.loads(done.stdout.splitlines()[-1])]


def loaded_by(code: str) -> set[str]:
    return loaded_after(code)[0]


def heavy(modules: set[str]) -> set[str]:
    return modules.intersection(HEAVY)


def main(*words: str) -> str:
    return f"from hf_specheads.cli import main; main({list(words)!r})"


# ---------------------------------------------------------------------- what is loaded
# What waits for no library, in the order of one interpreter: help, versions, what heads are (by metadata,
# `config.json` and the first bytes of the weights), and that an option is wrong.
AT_ONCE = {
    "import hf_specheads": "import hf_specheads",
    **{f"{command} --help": main(*([command] if command else []), "--help") for command in (None, *COMMANDS)},
    "env": main("env"),
    "inspect": main("inspect", str(SHIPPED)),
    "a wrong option": main("eval", "--target", "x"),
}


def test_what_waits_for_no_library() -> None:
    loaded = dict(zip(AT_ONCE, loaded_after(*AT_ONCE.values()), strict=True))
    assert {name for name in loaded["import hf_specheads"] if name.startswith("hf_specheads")} == {
        "hf_specheads", "hf_specheads.registration", "hf_specheads.version",
    }  # fmt: skip
    assert {step: heavy(modules) for step, modules in loaded.items() if heavy(modules)} == {}
    assert {"hf_specheads.cli.inspect", "hf_specheads.cli.env"} <= loaded["inspect"], "the commands were not run"


AUTO, MODEL = "from transformers import AutoModelForCausalLM", "from transformers import PreTrainedModel"


HEADS_TOO = "from hf_specheads import load_heads, PossHead"


@pytest.mark.slow
def test_importing_it_costs_nothing_on_top_of_an_auto_class() -> None:
    assert len(loaded_by(f"import hf_specheads; {AUTO}")) <= len(loaded_by(AUTO)) + 5


def test_heads_load_what_any_model_of_transformers_does() -> None:
    """And not peft, its trainer, data sets or figures; of an auto class the package loads nothing on top."""
    auto, package, model, heads = loaded_after(AUTO, "import hf_specheads", MODEL, HEADS_TOO)
    assert len(package) <= len(auto) + 5
    for name in ("peft", "datasets", "matplotlib", "pandas", "transformers.trainer"):
        assert name not in heads, name
    added = heads - model
    assert "hf_specheads.heads.poss" in added
    assert len({name for name in added if not name.startswith("hf_specheads")}) < 150


# ---------------------------------------------------------------------- what is there all the same
def outside(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LATE = ("import transformers, hf_specheads", "from transformers import AutoConfig; import hf_specheads")


@pytest.mark.parametrize(
    "first", ["import hf_specheads", *(pytest.param(way, marks=pytest.mark.slow) for way in LATE)]
)
def test_auto_classes_know_heads_from_the_import_on(poss_heads, tmp_path: Path, first: str) -> None:
    poss_heads.save_pretrained(tmp_path / "heads")
    code = f"""
{first}
import sys
def waits():
    return "AfterAuto" in str([type(finder) for finder in sys.meta_path])
assert waits() is {"AutoConfig" not in first}  # for the auto classes, and no longer than that
from transformers import AutoConfig, AutoModel, GenerationMixin
assert not waits()
config = AutoConfig.from_pretrained({str(tmp_path / "heads")!r})
assert AutoConfig.for_model("specheads_eagle").method == "eagle"
heads = AutoModel.from_pretrained({str(tmp_path / "heads")!r})
assert hasattr(GenerationMixin._assisted_decoding, "_specheads_original")
print(type(config).__name__, type(heads).__name__)
"""
    assert outside(code) == "PossHeadConfig PossHead"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["from hf_specheads.heads.poss import PossHead", "from hf_specheads import PossHead"])
def test_whoever_has_heads_has_the_hook(way: str) -> None:
    code = f"{way}; from transformers import GenerationMixin as G"
    assert outside(f"{code}; print(G._assisted_decoding._specheads_original.__name__)") == "_assisted_decoding"


def test_the_stand_ins_are_of_all_families() -> None:
    assert sorted(MODEL_TYPES) == sorted(HEADS)


@pytest.mark.parametrize("package", [hf_specheads, hf_specheads.trainer], ids=lambda package: package.__name__)
def test_type_checkers_see_the_names_python_does(package) -> None:
    """The imports `if TYPE_CHECKING` are those of the table of modules, each under its own name."""
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.asname: (node.module, alias.name) for node in block.body for alias in node.names}
    assert seen == {name: (module, name) for name, module in package._MODULE_OF.items()}
    assert set(dir(package)) >= set(package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        package.nonsense  # noqa: B018
