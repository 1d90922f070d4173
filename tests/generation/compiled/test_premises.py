"""The premises of compiled code cover everything it may depend on: no change goes unnoticed."""

from __future__ import annotations

import pickle
import types

import pytest
import torch
from torch import nn
from transformers.utils.import_utils import is_torch_greater_or_equal

from hf_specheads.generation.compiled import kept, premises
from hf_specheads.generation.compiled.premises import NotPortable, premises_of

pytestmark = pytest.mark.skipif(not is_torch_greater_or_equal(kept.SINCE), reason="older torch has other guards")
SCALE = 2.0


def twice(numbers):
    return numbers * 2


def thrice(numbers):
    return numbers * 3


FUNCTION = twice


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.act, self.scale, self.words = nn.Linear(4, 4), nn.SiLU(), 2, {"bias": 1.0}

    def forward(self, numbers):
        return self.act(self.linear(numbers)) * self.scale + self.words["bias"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.kind, self.sizes = "plain", (1, 2)

    def forward(self, numbers):
        for block in self.blocks:
            numbers = block(numbers)
        return numbers if self.kind == "plain" else numbers * self.sizes[0]


def step(model, holder, numbers):
    outputs = FUNCTION(model(numbers)) * SCALE
    if hasattr(holder, "extra"):
        outputs = outputs + 1
    return outputs + holder.offsets[0]


@pytest.fixture
def arguments():
    torch.manual_seed(0)
    holder = types.SimpleNamespace(offsets=[torch.ones(4)])
    return {"model": Model(), "holder": holder, "numbers": torch.ones(2, 4)}


def names():
    return globals()


def compiled_premises(arguments, step=step, dynamic=()):
    """Returns the premises of the step as another process gets them."""
    guards = []

    def note(all_of_them):
        guards[:] = all_of_them
        return [False] * len(guards)

    torch._dynamo.reset()
    for name, dim in dynamic:
        torch._dynamo.mark_dynamic(arguments[name], dim)
    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=False, options={"guard_filter_fn": note})
    with torch.no_grad(), torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        compiled(*arguments.values())
        return pickle.loads(pickle.dumps(premises_of(guards, arguments, step.__globals__)))


def hold(made, arguments):
    with torch.no_grad():
        return made.hold(arguments, names())


def nothing(arguments, patch):
    pass


def other_weights(arguments, patch):
    with torch.no_grad():
        arguments["model"].blocks[0].linear.weight.mul_(2)


def other_module_alike(arguments, patch):
    arguments["model"].blocks[0].linear = nn.Linear(4, 4)


def other_numbers(arguments, patch):
    arguments["numbers"] = torch.zeros(2, 4)


@pytest.mark.parametrize("change", [nothing, other_weights, other_module_alike, other_numbers])
def test_what_compiled_code_takes_as_it_comes_changes_nothing(arguments, change, monkeypatch):
    made = compiled_premises(arguments)
    assert hold(made, arguments)
    change(arguments, monkeypatch)
    assert hold(made, arguments)
    pickle.dumps(made)


def activation(arguments, patch):
    arguments["model"].blocks[1].act = nn.Tanh()


def setting(arguments, patch):
    arguments["model"].blocks[1].scale = 3


def setting_of_another_type(arguments, patch):
    arguments["model"].blocks[1].scale = 2.0


def word(arguments, patch):
    arguments["model"].kind = "other"


def number_of_blocks(arguments, patch):
    arguments["model"].blocks.append(Block())


def key_gone(arguments, patch):
    arguments["model"].blocks[0].words = {}


def attribute(arguments, patch):
    arguments["holder"].extra = True


def list_grown(arguments, patch):
    arguments["holder"].offsets.append(torch.ones(4))


def other_shape(arguments, patch):
    arguments["numbers"] = torch.ones(3, 4)


def other_strides(arguments, patch):
    arguments["numbers"] = torch.ones(4, 2).t()


def other_dtype(arguments, patch):
    arguments["numbers"] = torch.ones(2, 4, dtype=torch.float64)


def other_dtype_of_weights(arguments, patch):
    arguments["model"].bfloat16()


def gradients(arguments, patch):
    arguments["numbers"].requires_grad_()


def conjugate(arguments, patch):
    arguments["numbers"] = torch._neg_view(torch.ones(2, 4))


def hook(arguments, patch):
    arguments["model"].blocks[0].linear.register_forward_hook(lambda module, args, output: output + 1)


def hook_of_all_modules(arguments, patch):
    patch.setattr(nn.modules.module, "_global_forward_hooks", {0: lambda module, args, output: None})


def forward_of_its_own(arguments, patch):
    arguments["model"].blocks[0].forward = lambda numbers: numbers


def forward_of_the_class(arguments, patch):
    patch.setattr(Block, "forward", lambda self, numbers: numbers)


def class_of_another_name(arguments, patch):
    arguments["model"].blocks[0].__class__ = type("Other", (Block,), {})


def constant_of_the_module(arguments, patch):
    patch.setitem(names(), "SCALE", 4.0)


def function_of_the_module(arguments, patch):
    patch.setitem(names(), "FUNCTION", thrice)


def function_of_the_same_name(arguments, patch):
    other = types.FunctionType(thrice.__code__, names(), "twice")
    other.__qualname__ = "twice"
    patch.setitem(names(), "FUNCTION", other)


def argument_gone(arguments, patch):
    del arguments["holder"].offsets


CHANGES = [
    activation, setting, setting_of_another_type, word, number_of_blocks, key_gone, attribute, list_grown, other_shape,
    other_strides, other_dtype, other_dtype_of_weights, gradients, conjugate, hook, hook_of_all_modules,
    forward_of_its_own, forward_of_the_class, class_of_another_name, constant_of_the_module, function_of_the_module,
    function_of_the_same_name, argument_gone,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("held_before", [False, True])
def test_no_change_goes_unseen(arguments, change, held_before, monkeypatch):
    """A change is noticed in the first check, and also in checks that compare with an earlier one."""
    made = compiled_premises(arguments)
    if held_before:
        assert hold(made, arguments)
    change(arguments, monkeypatch)
    assert not hold(made, arguments)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: torch.enable_grad(),
        lambda: torch.inference_mode(),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: torch.autograd.graph.save_on_cpu(),
        lambda: torch.utils.flop_counter.FlopCounterMode(display=False),
    ],
)
def test_settings_of_the_process_count(arguments, setting):
    made = compiled_premises(arguments)
    with torch.no_grad():
        with setting():
            state = premises.process_state()
            changed = not made.hold(arguments, names())
        assert changed == (state != premises.process_state())
        assert made.hold(arguments, names())


def test_default_dtype_and_threads_are_settings(arguments, monkeypatch):
    made = compiled_premises(arguments)
    for name, value in (("get_default_dtype", torch.float64), ("get_num_threads", 64)):
        with monkeypatch.context() as patch:
            patch.setattr(torch, name, lambda value=value: value)
            assert not hold(made, arguments)
    assert hold(made, arguments)


def rows_step(numbers, others):
    return numbers.sum() + others.sum() if numbers.shape[0] <= 9 else numbers.sum() - others.sum()


def test_sizes_that_may_be_any_within_what_the_code_is_for():
    arguments = {"numbers": torch.ones(3, 2), "others": torch.ones(4)}
    made = compiled_premises(arguments, rows_step, dynamic=[("numbers", 0)])
    for rows, fits in ((2, True), (9, True), (10, False), (1, False)):
        assert hold(made, arguments | {"numbers": torch.ones(rows, 2)}) == fits, rows
    assert not hold(made, arguments | {"numbers": torch.ones(3, 3)})
    assert not hold(made, arguments | {"others": torch.ones(5)})


def pair_step(one, other):
    return one + other.mul_(2)


def test_what_was_one_object_must_be():
    both = torch.ones(3)
    made = compiled_premises({"one": both, "other": both}, pair_step)
    assert hold(made, {"one": both, "other": both})
    assert not hold(made, {"one": torch.ones(3), "other": both})


def made_anew(arguments):
    """Makes functions that are created in every call, like the bindings of heads to targets."""
    numbers = arguments["numbers"]
    return arguments | {"holder": types.SimpleNamespace(offsets=[numbers], add=lambda one: one + 1)}


def function_step(model, holder, numbers):
    return holder.add(model(numbers)) + holder.offsets[0]


def test_functions_that_are_made_in_every_call(arguments):
    arguments["numbers"] = torch.ones(1, 4)
    made = compiled_premises(made_anew(arguments), function_step)
    for _ in range(2):
        assert hold(made, made_anew(arguments))
    other = made_anew(arguments)
    other["holder"].add = lambda one: one + 2
    assert not hold(made, other)


def test_what_has_no_words_is_refused(arguments):
    guard = types.SimpleNamespace(
        guard_type="WEAKREF_ALIVE", orig_guard=types.SimpleNamespace(name="L['numbers']", create_fn=None)
    )
    with pytest.raises(NotPortable, match="WEAKREF_ALIVE"):
        premises_of([guard], arguments, names())
    guard.guard_type = "CONSTANT_MATCH"
    with pytest.raises(NotPortable, match="Tensor"):
        premises_of([guard], arguments, names())
    guard.orig_guard.name = "L['nobody']"
    with pytest.raises(NotPortable, match="nobody"):
        premises_of([guard], arguments, names())


def test_code_is_what_it_does_and_not_where_it_stands():
    one, other = (compile(f"{lines}def f(x):\n    return x + 1\n", "f", "exec").co_consts[0] for lines in ("", "\n\n"))
    assert one.co_firstlineno != other.co_firstlineno and premises.code_hash(one) == premises.code_hash(other)
    assert premises.code_hash(twice.__code__) != premises.code_hash(thrice.__code__)
