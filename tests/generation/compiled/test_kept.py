"""Compiled code that another process finds on disk is used if nothing has changed, and only then."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.batches import alone_texts, assert_rows, batch_of, greedy
from support.heads import scrambled_heads
from support.targets import own_target, plain, prompt
from transformers import CompileConfig
from transformers.utils.import_utils import is_torch_greater_or_equal

from hf_specheads.generation.compiled import kept, steps
from hf_specheads.generation.compiled.kept import Code, KeptSteps, keeps
from hf_specheads.generation.compiled.premises import NotPortable
from hf_specheads.tree.config import DraftTreeConfig

NEW = 16
CHAIN = DraftTreeConfig(kind="chain", depth=3)
SLOW = pytest.mark.slow
pytestmark = pytest.mark.skipif(not is_torch_greater_or_equal(kept.SINCE), reason="older torch writes no code down")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder for compiled code."""
    monkeypatch.setattr(kept, "FOLDER", str(tmp_path))
    return tmp_path


@pytest.fixture
def compiled(monkeypatch):
    """Records the steps that were compiled rather than found."""
    names, real = [], kept._compiled
    monkeypatch.setattr(kept, "_compiled", lambda step, *rest: names.append(step.__name__) or real(step, *rest))
    monkeypatch.setattr(steps.CompiledSteps, "_guarded", lambda *_: pytest.fail("torch's compiler keeps a step"))
    return names


def pair(method="eagle", **options):
    """Makes target and heads as in a new process."""
    target = own_target("llama", num_hidden_layers=2)
    heads = scrambled_heads(target, method, **options)
    heads.tree_config, heads.adaptive, heads.compiled = CHAIN, False, True
    return target, heads


def files(folder):
    return sorted(file for file in folder.rglob("*") if file.is_file())


def texts(target, heads):
    """Checks the texts of two calls against plain generation. The first call does not compile the first link."""
    ids = prompt()
    expected = plain(target, ids, NEW)
    for _ in range(2):
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), expected)


def test_what_one_process_has_compiled_others_find(folder, compiled):
    texts(*pair())
    assert sorted(compiled) == ["_link", "_start", "verify_tree"] and len(files(folder)) == 3
    target, heads = pair()
    texts(target, heads)
    assert len(compiled) == 3
    greedy(target, batch_of((9, 4))[0], max_new_tokens=4, assistant_model=heads)
    assert len(compiled) > 3, "batches are other shapes"


@SLOW
def test_batches(compiled):
    inputs, alone = batch_of((9, 4))
    for _ in range(2):
        target, heads = pair("poss", num_specialists=2, positions_per_specialist=2)
        for _ in range(2):
            rows = greedy(target, inputs, max_new_tokens=NEW, assistant_model=heads)
            assert_rows(rows, 9, alone_texts(target, alone, max_new_tokens=NEW))
        found, compiled[:] = list(compiled), []
    assert not found


def activation(target):
    for layer in target.model.layers:
        layer.mlp.act_fn = torch.nn.Tanh()


def activation_of_one_layer(target):
    target.model.layers[1].mlp.act_fn = torch.nn.Tanh()


def setting(target):
    for layer in target.model.layers:
        layer.input_layernorm.variance_epsilon = 100.0


def hook(target):
    target.model.norm.register_forward_hook(lambda module, args, output: output.flip(-1))


def forward(target):
    norm = target.model.norm
    norm.forward = lambda states: type(norm).forward(norm, states).flip(-1)


CHANGES = [activation, activation_of_one_layer, setting, hook, forward]


@pytest.mark.parametrize("change", [hook, *(pytest.param(one, marks=SLOW) for one in CHANGES if one is not hook)])
@pytest.mark.parametrize("where", ["in another process", "between calls"])
def test_a_target_that_is_another_is_compiled_anew(change, where, compiled):
    target, heads = pair()
    texts(target, heads)
    before = plain(target, prompt(), NEW)
    if where == "in another process":
        target, heads = pair()
    known = len(compiled)
    change(target)
    assert not torch.equal(plain(target, prompt(), NEW), before), "the change is one"
    texts(target, heads)
    assert "verify_tree" in compiled[known:]


def test_other_weights_are_no_change(compiled):
    texts(*pair())
    target, heads = pair()
    with torch.no_grad():
        target.lm_head.weight.copy_(target.lm_head.weight.flip(0))
    texts(target, heads)
    assert len(compiled) == 3


@SLOW
def test_planted_bug_premises_always_hold(monkeypatch):
    target, heads = pair()
    texts(target, heads)
    monkeypatch.setattr(kept.Premises, "hold", lambda *_: True)
    hook(target)
    with pytest.raises(AssertionError):
        texts(target, heads)


# ---------------------------------------------------------------------- one small step
SCALE = torch.nn.Linear(2, 2, bias=False)


def step(module, numbers):
    return module(numbers).sin() * 2


def process(options=kept.DEFAULTS):
    return KeptSteps(options)


@torch.no_grad()
def run(steps_of, shape=(), module=SCALE, numbers=None, function=step):
    numbers = torch.ones(1, 2) if numbers is None else numbers
    code = steps_of.get(function, shape, (module, numbers))
    if code is not None:
        torch.testing.assert_close(code(module, numbers), function(module, numbers))
    return code


def test_one_process_and_another(folder, compiled):
    first = process()
    assert run(first) is run(first) and run(first, shape=("other",)) is not run(first)
    assert len(compiled) == 2 == len(files(folder))
    run(process())
    run(process(), shape=("other",))
    assert len(compiled) == 2


def test_variants_live_side_by_side(compiled):
    for _ in range(2):
        one = process()
        for rows in (1, 2, 1, 3, 2):
            run(one, numbers=torch.ones(rows, 2))
    assert len(compiled) == 3


def test_too_many_variants(folder, monkeypatch):
    monkeypatch.setattr(kept, "MOST_OF_ONE", 2)
    one = process()
    run(one, numbers=torch.ones(1, 2))
    run(one, numbers=torch.ones(2, 2))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        run(one, numbers=torch.ones(3, 2))
    run(one, numbers=torch.ones(2, 2))
    run(process(), numbers=torch.ones(3, 2))
    assert len(files(folder)) == 2, "the oldest has gone"


def test_variants_that_cannot_be_deleted_stay(folder, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("another user's")

    monkeypatch.setattr(kept, "MOST_OF_ONE", 1)
    monkeypatch.setattr(Path, "unlink", refuse)
    run(process(), numbers=torch.ones(1, 2))
    run(process(), numbers=torch.ones(2, 2))
    assert len(files(folder)) == 2


def test_code_that_calls_what_is_gone_is_compiled_anew(folder, compiled):
    run(process())
    (file,) = files(folder)
    code = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(dataclasses.replace(code, modules={**code.modules, "torch": "hf_specheads.gone"})))
    run(process())
    assert len(compiled) == 2


@pytest.mark.parametrize("content", [b"", b"nothing of ours", pickle.dumps({"another": "thing"})])
def test_files_of_no_use_are_written_anew(folder, compiled, content):
    run(process())
    (file,) = files(folder)
    file.write_bytes(content)
    run(process())
    run(process())
    assert len(compiled) == 2


def test_code_that_torch_cannot_read_is_compiled_anew(folder, compiled):
    run(process())
    (file,) = files(folder)
    code = pickle.loads(file.read_bytes())
    assert isinstance(code, Code) and code.function is None and code.written
    code.written = b"of another torch"
    file.write_bytes(pickle.dumps(code))
    run(process())
    assert len(compiled) == 2


def test_files_that_have_changed_are_read_anew(folder, compiled, monkeypatch):
    run(process())
    (file,) = files(folder)
    assert __name__ in pickle.loads(file.read_bytes()).stamps
    stamp = kept._stamp
    monkeypatch.setattr(kept, "_stamp", lambda module: (1, 2) if module == __name__ else stamp(module))
    run(process())
    assert len(compiled) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(torch, "__version__", "9.9"),
        lambda patch: patch.setattr(kept.transformers, "__version__", "9.9"),
        lambda patch: patch.setattr(sys, "version", "9.9"),
        lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX9"),
        lambda patch: patch.setattr(torch, "get_num_threads", lambda: 99),
        lambda patch: patch.setattr(torch._inductor.config, "epilogue_fusion", False),
        lambda patch: patch.setattr(kept, "_engine", lambda: ["another"]),
    ],
)
def test_code_of_other_versions_machines_and_settings_is_not_used(compiled, change, monkeypatch):
    run(process())
    with monkeypatch.context() as patch:
        change(patch)
        run(process())
        assert len(compiled) == 2
    run(process())
    assert len(compiled) == 2


def test_a_place_where_nothing_can_be_written(folder, compiled, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setattr(kept, "FOLDER", str(folder / "file"))
    one = process()
    assert run(one) is run(one) and len(compiled) == 1


def test_what_cannot_be_kept_is_torchs_to_keep(folder, monkeypatch):
    def refuse(*args):
        raise NotPortable("a secret")

    monkeypatch.setattr(kept, "premises_of", refuse)
    one = process()
    assert run(one) is None
    monkeypatch.setattr(kept, "_compiled", lambda *_: pytest.fail("asked again"))
    assert run(one) is None
    assert run(process()) is None, "which other processes know at once"
    (file,) = files(folder)
    assert file.read_text() == "a secret"


def test_places_inside_torch_may_move(folder, monkeypatch):
    monkeypatch.setattr("torch._dynamo.aot_compile.aot_compile_fullgraph", lambda *args, **kwargs: None)
    assert run(process()) is None and [file.suffix for file in files(folder)] == [".refused"]


def test_an_address_is_no_description():
    class Strange:
        pass

    with pytest.raises(NotPortable, match="Strange"):
        kept._folder(step, (Strange(),), ())


def test_what_is_kept_at_all(monkeypatch):
    cpu = torch.device("cpu")
    assert keeps(kept.DEFAULTS, cpu)
    assert not keeps(kept.DEFAULTS, torch.device("cuda"))
    assert not keeps(kept.DEFAULTS | {"mode": "max-autotune"}, cpu)
    assert not keeps(kept.DEFAULTS | {"backend": "eager"}, cpu)
    for setting, value in (("fx_graph_cache", False), ("force_disable_caches", True)):
        with torch._inductor.config.patch({setting: value}):
            assert not keeps(kept.DEFAULTS, cpu)
    monkeypatch.setattr(kept, "SINCE", "9.9")
    assert not keeps(kept.DEFAULTS, cpu)


def test_own_options_are_torchs_to_keep(folder):
    target, heads = pair()
    target.generation_config.compile_config = CompileConfig(backend="eager", mode=None)
    texts(target, heads)
    assert not files(folder)


PROCESS = """
import sys, torch
sys.path.insert(0, "generation")
from hf_specheads.generation import kept
import test_kept
kept.FOLDER = sys.argv[1]
real, compiled = kept._compiled, []
kept._compiled = lambda *args: compiled.append(args) or real(*args)
test_kept.texts(*test_kept.pair("poss", num_specialists=2, positions_per_specialist=2))
print("compiled", len(compiled))
"""


@SLOW
def test_real_processes(folder):
    for expected in ("compiled 4", "compiled 0", "compiled 0"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROCESS, str(folder)], cwd=Path(__file__).parents[2],
            capture_output=True, text=True, env=os.environ | {"PYTHONHASHSEED": "random"},
        )  # fmt: skip
        assert done.stdout.strip() == expected, done.stderr[-2000:]
