"""The private names of torch that funcckpt stands on: a release that moves one fails here, loudly."""

import inspect
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils import checkpoint as module
from torch.utils.checkpoint import checkpoint, set_checkpoint_debug_enabled, set_checkpoint_early_stop

import funcckpt
from funcckpt._torch import autograd, dynamo, functorch, kernels, objects, wrappers

leaf = lambda: torch.ones(3, requires_grad=True)


def test_blocks_of_cached_parametrizations_are_left():
    parametrize = torch.nn.utils.parametrize
    assert autograd.parametrizations_anew() is None
    with parametrize.cached(), parametrize.cached():
        with autograd.parametrizations_anew():
            assert parametrize._cache_enabled == 0 and autograd.parametrizations_anew() is None
        assert parametrize._cache_enabled == 2
    assert parametrize._cache_enabled == 0


@pytest.mark.parametrize(
    ("of", "asked"),
    [("all", [1, 1, 0, 1]), ("leaf", [1, 0, 0, 0]), ("last", [0, 1, 0, 1]), ("result", [0, 1, 0, 0])],
)
def test_gradients_that_a_backward_uses_are_told(of, asked):
    """Of a leaf, a result, a constant and another leaf."""
    first, last = leaf(), leaf()
    result = last.exp()
    inputs = [first, result, torch.ones(3), last]

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            return sum(inputs)

        @staticmethod
        def backward(ctx, ct):
            seen.append([*map(int, autograd.used_gradients(ctx.next_functions, ctx.needs_input_grad))])
            return (ct,) * 4

    seen, y = [], Sum.apply(*inputs).sum()
    if of == "all":
        y.backward()
    else:
        torch.autograd.grad(y, {"leaf": first, "last": last, "result": result}[of])
    assert seen == [asked]


def test_layers_are_read_and_left_as_they_were():
    def f(x):
        before = functorch.current_level()
        seen.append([layer.kind for layer in functorch.active_layers()])
        assert functorch.current_level() == before
        return x.sin()

    seen = []
    torch.func.vmap(torch.func.grad(f))(torch.ones(2))
    assert seen == [["vmap", "grad"]]


class Look(torch.autograd.Function):
    """Asks in its backward, and notes what it is told."""

    forward = staticmethod(lambda x: x.clone())
    setup_context = staticmethod(lambda ctx, inputs, output: None)

    @staticmethod
    def backward(ctx, ct):
        Look.seen.append(Look.ask())
        return ct


@pytest.mark.parametrize("mode", [nullcontext, lambda: torch.device("cpu")], ids=["", "default_device"])
@pytest.mark.parametrize("where", ["here", "in_a_thread_of_the_engine"])
def test_final_backward_of_grad_is_recognised(where, mode):
    """Without it every cotangent of the last backward stays alive: right, but not lean."""

    # One frame stands between the question and the engine in the library, and none here.
    def ask():
        if where == "here":
            return (lambda: autograd.is_final_backward(1, threading.get_ident()))()
        # As on a device: a thread without callers asks, and the one that called the engine waits.
        caller, answers = threading.get_ident(), []
        thread = threading.Thread(target=lambda: answers.append(autograd.is_final_backward(1, caller)))
        thread.start()
        thread.join()
        return answers[0]

    def differentiated(x):
        return torch.autograd.grad(Look.apply(x) * x, x, create_graph=True)[0] * x

    Look.ask, Look.seen = ask, []
    with mode():
        x = torch.ones(())
        torch.func.grad(Look.apply)(x)
        torch.func.vjp(Look.apply, x)[1](x)
        torch.func.grad(differentiated)(x)
    assert Look.seen[:3] == [True, False, False]


def test_somebody_elses_mode_may_differentiate_what_it_is_handed():
    class Twice(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.autograd.grad and not seen:
                seen.append(None)
                seen[0] = torch.autograd.grad(out[0], args[1])[0]
            return out

    seen = []
    with Twice():
        torch.func.grad(funcckpt.remat(lambda x: x**3))(torch.tensor(2.0))
    assert seen[0].item() == 12


def test_once_differentiable_leaves_a_node_that_has_this_name():
    class Once(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(torch.autograd.function.once_differentiable(lambda ctx, ct: ct * 2))

    x = leaf()
    gradients = torch.autograd.grad(Once.apply(x * x).pow(2).sum(), x, create_graph=True)
    assert "torch::autograd::Error" in [node.name() for node in autograd.nodes_of(gradients)]


def test_hooks_are_seen_and_left_as_they_were():
    first, second = (lambda x: x), (lambda x: x)
    assert autograd.top_saved_tensors_hooks() is None and autograd.may_push_hooks()
    with saved_tensors_hooks(first, first):
        with saved_tensors_hooks(second, second):
            assert autograd.saved_tensors_hooks() == [(second, second), (first, first)]
            assert autograd.top_saved_tensors_hooks() == (second, second)
        assert autograd.top_saved_tensors_hooks() == (first, first)
    assert autograd.top_saved_tensors_hooks() is None
    with disable_saved_tensors_hooks("not now"):
        assert not autograd.may_push_hooks()
    with pytest.raises(RuntimeError, match=autograd.REFUSES_HOOKS), saved_tensors_hooks(first, first):
        torch.func.grad(torch.sin)(torch.ones(()))


def test_backwards_are_told_apart():
    keys = []
    y = leaf().sin()
    y.register_hook(lambda g: keys.append((autograd.backward_id(), autograd.graph_task())))
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    with module.GraphExecGroup() as group:
        y.sum().backward()
    assert keys[0] != keys[1] and all(key == task != -1 for key, task in keys[:2])
    assert keys[2][0] is group
    assert autograd.graph_task() == -1 and autograd.backward_id() != autograd.backward_id()


def test_an_alias_shares_the_version_and_no_graph():
    x = leaf() * 2
    y = autograd.alias(x)
    assert y.grad_fn is None and not y.requires_grad and y.data_ptr() == x.data_ptr()
    x.mul_(2)
    assert y._version == x._version == 1
    with autograd.version_kept(x), torch.no_grad():
        x.mul_(2)
    assert x._version == 1


def test_torchs_checkpoint_is_known_and_redirected(monkeypatch):
    found = []

    def look(x):
        found.append(autograd.is_torch_checkpoint(autograd.top_saved_tensors_hooks()))
        return x.sin()

    checkpoint(look, leaf(), use_reentrant=False).sum().backward()
    assert found == [True, True]
    assert autograd.checkpoint_settings() == (None, None)
    with set_checkpoint_early_stop(False), set_checkpoint_debug_enabled(True):
        assert autograd.checkpoint_settings() == (False, True)
    monkeypatch.setattr(autograd, "_checkpoint_before", autograd._checkpoint_before)
    monkeypatch.setattr(checkpoint.__wrapped__, "__dynamo_disable", autograd.original_checkpoint)
    autograd.redirect_checkpoint(lambda *args, **kwargs: "ours")
    assert checkpoint(torch.sin, torch.ones(3), use_reentrant=False) == "ours"


def test_torch_guards_a_mode_against_dynamo_but_for_ours():
    def run(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

    of_torch = type("Mode", (torch.utils._python_dispatch.TorchDispatchMode,), {"__torch_dispatch__": run})
    assert of_torch.__torch_dispatch__ is not run
    ours = type("Mode", (functorch.UnguardedMode,), {"__torch_dispatch__": run})
    assert ours.__torch_dispatch__ is run


def test_sequence_numbers_order_the_graph():
    x = torch.ones(2, requires_grad=True)
    before = x * 2
    number = functorch.next_sequence_number()
    after = x * 3
    assert before.grad_fn._sequence_nr() < number <= after.grad_fn._sequence_nr()


def test_a_tensor_is_saved_as_by_an_operator():
    x = torch.ones(3, requires_grad=True) * 2
    saved = autograd.save(x)
    assert saved.unpack().grad_fn is x.grad_fn
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.unpack()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        autograd.save(x)
    assert len(seen) == 1


def test_each_write_to_a_dict_gives_it_another_version():
    """Without versions, the content of all modules is compared: right, but slow."""
    if sys.version_info[:3] == (3, 13, 0):  # python/cpython#125608, mended in 3.13.1
        assert objects.dict_version is None
        return

    class Plain:
        pass

    def store(x, value):  # Python has bytecode of its own for a place that always stores in the same way
        x.a = value

    def set_item(x, value):
        x.__dict__["a"] = value

    seen = []
    for x in (Plain(), torch.nn.Module()):
        there = x.__dict__
        for write in (store, set_item):
            for i in range(100):
                seen.append(objects.dict_version(there))
                write(x, i)
                assert objects.dict_version(there) != seen[-1]
        for write in (
            lambda d: d.update(b=1),
            lambda d: d.setdefault("c", 2),
            lambda d: d.pop("b"),
            lambda d: d.__delitem__("c"),
            lambda d: d.__ior__({"b": 3}),
            lambda d: d.popitem(),
            lambda d: d.clear(),
        ):
            before = objects.dict_version(there)
            write(there)
            assert objects.dict_version(there) != before
        before = objects.dict_version(there)
        there.get("a"), [*there], there.copy(), there | {"a": 1}
        assert objects.dict_version(there) == before


def test_a_pullback_is_recognised():
    """Without it, the gradient of what f computes by a captured one is zero."""
    assert objects.is_pullback(torch.func.vjp(torch.sin, torch.ones(2))[1])
    assert objects.is_pullback(torch.func.vjp(lambda x: (x, x), torch.ones(2), has_aux=True)[1])


def test_an_operator_is_seen_without_a_mode():
    """Below autograd and transforms, and no other one is."""
    mm, seen = torch.ops.aten.mm.default, []

    class Watcher:
        def see(self, func, args, kwargs):
            if func is mm:  # other tests have made kernels, too
                seen.append([*map(wrappers.is_functorch_wrapped_tensor, args)])
            return func(*args, **kwargs)

    assert kernels.are_possible() and kernels.watch([mm])
    assert not kernels.watch([torch.ops.aten.linear.default])  # autograd takes it apart
    x = torch.ones(2, 2)
    f = lambda x: (x.sin() @ x).softmax(0).sum()
    watcher = Watcher()
    assert "Fake:" in torch._C._dispatch_dump_table("aten::mm")
    kernels.begin(watcher)
    try:
        torch.func.vmap(torch.func.grad(f))(x.expand(3, 2, 2))
        torch.func.jvp(f, (x,), (x,))
        f(x.clone().requires_grad_()).backward()
        assert len(seen) > 5 and not any(map(any, seen))
    finally:
        kernels.end(watcher)
    seen.clear()
    f(x)
    assert not seen and not torch._C._dispatch_tls_is_dispatch_key_included("Fake")


def test_every_private_name_is_still_there():
    """Importing `_torch` has proved most; these are attributes that it reads later."""
    assert isinstance(functorch.eager_transforms.JVP_NESTING, int)
    assert isinstance(wrappers.forward_ad._current_level, int)
    assert inspect.iscode(autograd._ENGINE) and inspect.iscode(autograd._GRAD_TRANSFORM)
    assert "level" in autograd._GRAD_TRANSFORM.co_varnames
    for name in ("_unwrap_all_tensors_from_functional", "_wrap_all_tensors_to_functional"):
        assert callable(getattr(functorch.eager_transforms, name))
    for name in ("_vmapmode_increment_nesting", "_vmapmode_decrement_nesting"):
        assert callable(getattr(torch._C, name))
    for name in ("_add_batch_dim", "_remove_batch_dim"):
        assert callable(getattr(torch, name))


MISSING = """
import warnings

import torch

del torch.nn.modules.module._has_any_global_hook
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import funcckpt

assert ["Until then only remat is there" in str(w.message) for w in said] == [True], said
assert funcckpt.__all__ == ["remat"]
scale, x = torch.tensor(2.0), torch.arange(3.0)
f = lambda x: (x * scale).sin()
got = torch.func.vmap(torch.func.grad(funcckpt.remat(f)))(x)
torch.testing.assert_close(got, scale * (x * scale).cos())
"""


def test_a_missing_name_leaves_the_plain_function():
    subprocess.run([sys.executable, "-c", MISSING], check=True)


@pytest.mark.parametrize("around", [torch.compile, torch.compiler.disable])
def test_what_is_around_a_compiled_function_is_known(around):
    f = lambda x: x.sin()
    g = around(f)
    assert objects.below_compiler(g) is f and objects.below_compiler(f) is f
    inside = [type(cell.cell_contents) for cell in g.__closure__]
    assert any(map(objects.is_of_dynamo, inside)) and not objects.is_of_dynamo(type(f))
    assert any(map(objects.is_compiler, inside)) == (around is torch.compile)


def test_dynamo_does_not_see_what_is_hidden():
    """Neither the function nor what it calls; but what is compiled inside of it stays compiled."""
    graphs = []

    def backend(graph, _):
        graphs.append(len(graph.graph.nodes))
        return graph

    compiled = torch.compile(lambda x: x.exp(), backend=backend)

    @dynamo.hidden
    def f(x):
        return compiled(x).sin()

    def around(x):
        torch._dynamo.graph_break()
        return f(x)

    x = torch.ones(2)
    torch.testing.assert_close(torch.compile(around, backend=backend)(x), x.exp().sin())
    assert len(graphs) == 1
