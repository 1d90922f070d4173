"""Targets that are sharded over processes, spread over devices, or loaded in another way."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hf_specheads import AutoDraftHead
from hf_specheads.trainer import building
from hf_specheads.trainer.__main__ import main
from hf_specheads.trainer.devices import sharding


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


TRAINING_BY_DEEPSPEED = """
    import sys
    import deepspeed
    from hf_specheads.trainer.__main__ import main

    # Shared memory in place of gloo, on processors only: made by a compiler when DeepSpeed starts, which takes minutes
    # and waits for ever if an interrupted one has left its lock.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp2", "zero3"])
def test_a_sharded_target_trains_the_same_heads(workspace, tmp_path: Path, sharding: str) -> None:
    """FSDP2 or ZeRO-3 over two processes of gloo, against one process with the whole target and the same batch."""
    common = [*workspace.options, "max_grad_norm=0.0", "eval_examples=5", "max_steps=2", "eval_acceptance_prompts=3",
              "per_device_eval_batch_size=2"]  # fmt: skip
    program = ["-m", "hf_specheads.trainer"]
    if sharding == "zero3":
        pytest.importorskip("deepspeed")
        (tmp_path / "training.py").write_text(textwrap.dedent(TRAINING_BY_DEEPSPEED))
        program = [str(tmp_path / "training.py")]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
              "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
              "--main_process_port", str(free_port()), *program]  # fmt: skip
    two = [*common, "per_device_train_batch_size=2", "ddp_backend=gloo", "shard_target=true",
           f"target_sharding={sharding}"]  # fmt: skip
    result = subprocess.run(
        [*launch, *two, f"output_dir={tmp_path / 'two'}"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    assert "50 % of the layers' weights on each process" in result.stdout
    workspace.run(*common, "per_device_train_batch_size=4", f"output_dir={tmp_path / 'one'}")
    ours, theirs = (AutoDraftHead.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two"))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6, msg=name)
    facts = [json.loads((tmp_path / name / "training_facts.json").read_text()) for name in ("one", "two")]
    assert [f["hardware"]["processes"] for f in facts] == [1, 2]
    clocks = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    measured = [{name: value for name, value in f["metrics"].items() if name not in clocks} for f in facts]
    assert measured[0]["eval_acceptance_length"] >= 1 and measured[0] == pytest.approx(measured[1], rel=1e-4)


LOADING = """
    import sys
    from hf_specheads.trainer import building, sharding
    from hf_specheads.trainer.__main__ import main

    loaded, kept = [], building.load_target
    building.load_target = lambda *asked: [loaded.append(1), kept(*asked)][1]
    code = main(sys.argv[1:])
    rank = sharding.dist.get_rank()
    print(f"process {rank} has read the weights {len(loaded)} times", flush=True)
    sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_one_process_reads_the_weights_and_all_are_told_of_a_failure(workspace, tmp_path: Path, fails: bool) -> None:
    (tmp_path / "loading.py").write_text(textwrap.dedent(LOADING))
    if fails:
        weights = tmp_path / "target" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()),
         str(tmp_path / "loading.py"), *workspace.options, "ddp_backend=gloo", "shard_target=true", "max_steps=1",
         "eval_examples=0", f"output_dir={tmp_path / 'run'}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "process 0 has read the weights 1 times" in result.stdout
    assert "process 1 has read the weights 0 times" in result.stdout
    assert (result.returncode == 0) == (not fails), result.stderr[-4000:]
    assert result.stderr.count("the target cannot be loaded in shares") == 2 * fails


def test_tied_and_kept_tensors_are_handed_out_as_they_are(monkeypatch) -> None:
    """By one process to another, both played in turn: names, types and ties of the first."""
    from support.targets import own_target

    first = own_target("llama", tie_word_embeddings=True).to(torch.bfloat16)
    with torch.device("meta"):
        second = type(first)(first.config)
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(sharding.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(sharding.dist, "broadcast", lambda tensor, source: sent.append(tensor.clone()))
    plan = sharding._plan_of(first)
    sharding._receive(first, plan, torch.device("cpu"))
    monkeypatch.setattr(sharding.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(sharding.dist, "broadcast", lambda tensor, source: tensor.copy_(sent.pop(0)))
    sharding._receive(second, plan, torch.device("cpu"))
    assert not sent and second.lm_head.weight is second.get_input_embeddings().weight
    assert {parameter.dtype for parameter in second.parameters()} == {torch.bfloat16}
    ids = torch.arange(3, 9)[None]
    assert torch.equal(first(ids).logits, second.eval()(ids).logits)


def test_tensors_beside_buffers_are_refused() -> None:
    module = torch.nn.Linear(2, 2)
    module.hidden = torch.empty(2, device="meta")
    with pytest.raises(
        ValueError, match=r"Linear \(\) keeps the tensors \['hidden'\] outside of its parameters and buffers"
    ):
        sharding._refuse_hidden_tensors(module)


def test_what_cannot_be_sharded_is_refused(workspace, tmp_path: Path, capsys) -> None:
    assert main([*workspace.options, "shard_target=true", f"output_dir={tmp_path / 'run'}"]) == 2
    assert "needs several processes" in capsys.readouterr().err


def two_processes(**arguments) -> SimpleNamespace:
    return SimpleNamespace(**{"world_size": 2, "target_sharding": "zero3", **arguments})


def test_deepspeed_gets_the_layers_one_by_one(monkeypatch, target) -> None:
    """As it is called; what it does is tested above, where it is installed."""
    given = []
    module = ModuleType("deepspeed")
    module.initialize = lambda **options: given.append(options)
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    monkeypatch.setattr(sharding.importlib.util, "find_spec", lambda name: module)
    layers = list(target.to(torch.bfloat16).model.layers)
    assert sharding.shard_target(target, two_processes()) == len(layers) == len(given)
    for layer, options in zip(layers, given, strict=True):
        assert options["model"] is layer and not layer.training
        assert options["config"]["zero_optimization"]["stage"] == 3
        assert options["config"]["bf16"]["enabled"] and not options["config"]["fp16"]["enabled"]
    for place, parameter in enumerate(target.model.layers.parameters()):  # as DeepSpeed leaves them
        parameter.ds_tensor, parameter.ds_numel = torch.zeros(1 if place % 2 else 3), 4
    pairs, odd = divmod(sum(1 for _ in target.model.layers.parameters()), 2)
    assert sharding.share_here(target) == (4 * pairs + 3 * odd) / (4 * (2 * pairs + odd))
    sharding.shard_target(target, two_processes())
    assert len(given) == len(layers), "what is sharded stays as it is"


def test_deepspeed_that_is_not_installed_is_named(monkeypatch, target) -> None:
    monkeypatch.setattr(sharding.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs DeepSpeed; run `pip install deepspeed`, or leave it out"):
        sharding.shard_target(target, two_processes())
    assert sharding.sharding_problem(two_processes(target_sharding="fsdp2"), joint=False) is None


def test_options_reach_the_target(workspace, tmp_path: Path, monkeypatch) -> None:
    made, kept = [], building.load_target

    def load(recipe, images=False):
        made.append(kept(recipe, images))
        return made[0]

    monkeypatch.setattr(building, "load_target", load)
    options = ["target_options.attn_implementation=eager", "target_options.device_map=cpu", "eval_examples=0"]
    workspace.run(*workspace.options, *options, "max_steps=1", f"output_dir={tmp_path / 'run'}")
    assert made[0].config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("target_options.nonsense=1", "`target_options` ['nonsense'] cannot be used with this target"),
        ("target_options.quantization_config={quant_method: nothing}", "quantization_config` is not valid"),
        ("target_options=3", "`target_options` must be a mapping"),
    ],
)
def test_options_that_are_none_are_named(workspace, tmp_path: Path, capsys, change: str, words: str) -> None:
    assert main([*workspace.options, change, f"output_dir={tmp_path / 'run'}"]) == 2
    assert words in capsys.readouterr().err
