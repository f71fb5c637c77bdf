"""What a recomputation does not run, and that nobody can tell."""

import ctypes
import warnings
from contextlib import contextmanager

import numpy
import pytest
import torch
import torch.nn.functional as F
from oracles import REVERSE, tensor, total
from support import assert_same, no_remat
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence
from torch.testing import assert_close

from funcckpt import checkpoint, inner_grad, meter, policies, remat
from funcckpt.tape import recompute
from funcckpt.tape.operators import flops_of

L, N, D, H = 4, 8, 4, 16
MATMUL = 2 * N * D * H
draw = lambda *shape: torch.randn(*shape, dtype=torch.float64) / 2


@pytest.fixture(autouse=True)
def nothing_known(small_sizes_matter):
    recompute._plans.clear()
    recompute._counts.clear()


block = lambda x, w1, w2: x + F.layer_norm(F.gelu(x @ w1), (H,)) @ w2


def net(wrap, ws, x):
    for w1, w2 in zip(ws[::2], ws[1::2], strict=True):
        x = wrap(block)(x, w1, w2)
    return x


weights = lambda: [tensor(*shape, seed=i) / 2 for i, shape in enumerate([(D, H), (H, D)] * L)]
points = lambda *batch: tensor(*batch, N, D, seed=99)


def backward(wrap):
    ws = [w.requires_grad_() for w in weights()]
    net(wrap, ws, points()).square().sum().backward()
    return [w.grad for w in ws]


squares = lambda wrap: lambda ws, x: net(wrap, ws, x).square().sum()
under_grad = lambda wrap: grad(squares(wrap))(weights(), points())
per_sample = lambda wrap: vmap(grad(squares(wrap)), (None, 0))(weights(), points(3))
jacobian = lambda wrap: jacrev(lambda ws: net(wrap, ws, points()).sum(0))(weights())
second_derivatives = lambda wrap: hessian(squares(wrap), 1)(weights(), points()[:2])


def measure(run, *args):
    """Of a call after the first one, in which each recomputation has learned what nobody reads."""
    meter.measure(run, *args)
    return meter.measure(run, *args)


@contextmanager
def products_counted():
    """The FLOPs of the products that really run: no mode, which would make a recomputation show each."""
    found = []

    def product(a, b):
        found.append(2 * a.numel() * b.shape[-1])
        return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)

    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there was a kernel before
            for name in ("mm", "bmm"):
                library.impl(name, product, "CPU")
        yield found
    finally:
        library._destroy()


RUNS = [backward, under_grad, per_sample, jacobian, second_derivatives]


@pytest.mark.parametrize("run", RUNS, ids=["backward", "grad", "per_sample", "jacobian", "hessian"])
def test_the_last_product_of_a_block_is_not_computed_again(run):
    """From the second time on: the backward needs neither it nor the sum that it goes into."""
    without = measure(run, lambda f: f)
    for _ in range(3):
        measured = measure(run, remat)
        assert_close(measured.result, without.result)
        again = {
            backward: L * MATMUL,
            under_grad: L * MATMUL,
            per_sample: 3 * L * MATMUL,
            jacobian: L * MATMUL,
            # Of the first product: the value; its tangent by the zero tangent of the weight, and that by
            # 2 x D tangents of x.
            second_derivatives: L * (2 + 2 * D) * 2 * 2 * D * H,
        }
        assert measured.flops - without.flops == again[run]
    with products_counted() as seen:
        result = run(remat)
    assert_close(result, without.result)
    assert sum(seen) - without.flops == again[run]


@pytest.mark.parametrize("create_graph", [False, True])
def test_only_gradients_that_the_backward_uses_are_computed(create_graph):
    """As for the input of a model whose parameters require grad."""

    def run(wrap):
        ws, x = [w.requires_grad_() for w in weights()], points().requires_grad_()
        loss = net(wrap, ws, x).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=create_graph)
        if create_graph:
            return gradient, torch.autograd.grad(gradient.square().sum(), [x, *ws])
        return gradient

    without, measured = measure(run, lambda f: f), measure(run, remat)
    assert_close(measured.result, without.result)
    if not create_graph:
        assert measured.flops - without.flops == L * MATMUL


@pytest.mark.parametrize("transform", ["backward", "grad", "vmap_grad", "grad_grad"])
@pytest.mark.parametrize("policy", [None, policies.everything_saveable, policies.dots_saveable])
def test_printing_is_no_read(policy, transform, capsys):
    """No mode sees it, and an error in torch's printing leaves some keys of functorch excluded."""
    w, prints = tensor(3, 3, seed=1), [True]

    def f(x):
        try:
            h = (x @ w).tanh()
            y = h @ w
            if prints:
                print(f"{y} {y!r}", y)
            return y + h.sin()
        except Exception as error:
            raise RuntimeError("the block failed") from error

    run = lambda wrap: REVERSE[transform](lambda x: total(wrap(f)(x)), tensor(3))
    checkpointed = lambda f: remat(f, policy=policy)
    for _ in range(3):
        assert_same(run(checkpointed), run(no_remat))
    flops = measure(run, checkpointed).flops
    assert "not computed again, float64[" in capsys.readouterr().out
    prints.clear()
    assert measure(run, checkpointed).flops == flops


@pytest.mark.parametrize("transform", ["backward", "grad", "vmap_grad"])
def test_f_may_catch_the_error_of_a_value_that_is_skipped(transform):
    """What it does then says nothing about which gradients there are."""
    w, checks = tensor(3, 3, seed=1), []

    def f(x):
        h = (x @ w).tanh()
        y = h @ w
        if checks:
            try:
                y.abs().amax()
            except Exception:
                return h.detach()
        return y + h

    run = lambda wrap: REVERSE[transform](lambda x: total(wrap(f)(x)), tensor(3))
    for checks[:] in ([], [], [True], []):
        assert_same(run(remat), run(no_remat))


def test_checks_do_not_change_what_other_calls_skip():
    run = lambda check: grad(lambda x: (remat(lambda x: x.sin() @ x.mT, determinism_check=check)(x)).sum())(
        points()
    )
    of = lambda *checks: [meter.measure(run, check).flops for check in checks]
    expected = of("default", "default", "default")[1:]
    recompute._plans.clear()
    assert of("values", "values", "default", "default", "default")[3:] == expected


def test_shapes_that_change_with_each_call_are_not_learned():
    """Sequences of any length: to learn what to skip takes longer than the recomputation."""
    w, f = tensor(D, D), remat(lambda x, w: (x @ w).sin() @ w)
    run = lambda n: grad(lambda x: f(x, w).sum())(draw(n, D))
    for n in range(3, 40):
        run(n)
    assert len(recompute._plans) == recompute.LEARNED_AT_LEAST
    for _ in range(recompute.USED_FOR_EACH * recompute.LEARNED_AT_LEAST):
        run(3)
    run(50)
    assert len(recompute._plans) == recompute.LEARNED_AT_LEAST + 1


derivative = lambda f: grad(lambda x: f(x).square().sum())
BELOW = {
    "jvp_grad": lambda f, x: jvp(derivative(f), (x,), (x,)),
    "vmap_jvp_grad": lambda f, x: vmap(lambda x: jvp(derivative(f), (x,), (x,)))(x),
    "grad_grad": lambda f, x: grad(lambda x: derivative(f)(x).sin().sum())(x),
    "vmap_jacrev": lambda f, x: vmap(jacrev(lambda x: f(x)[:3]))(x),
    "hessian": lambda f, x: hessian(lambda x: f(x).square().sum())(x[0]),
    "jvp_of_no_grad": lambda f, x: jvp(torch.no_grad()(lambda x: vjp(f, x)[1](x)[0]), (x,), (x,)),
}


@pytest.mark.parametrize("transform", BELOW)
def test_plain_autograd_records_no_recomputation(transform):
    """Not below a transform either: parameters that require grad take no memory under no_grad, and little else."""
    x, ws = tensor(N, D), [tensor(D, D, seed=i) for i in range(8)]

    def f(x):
        for w in ws:
            x = (x @ w).tanh()
        return x

    def run(wrap, requires_grad, mode):
        for w in ws:
            w.requires_grad_(requires_grad)
        with torch.set_grad_enabled(mode):
            return BELOW[transform](wrap(f), x)

    frozen, found = measure(run, remat, False, False), measure(run, remat, True, False)
    assert not total(found.result).requires_grad
    assert (found.flops, found.peak_bytes) == (frozen.flops, frozen.peak_bytes)
    expected, found = measure(run, no_remat, True, True), measure(run, remat, True, True)
    assert total(found.result).requires_grad == total(expected.result).requires_grad
    if transform == "jvp_of_no_grad":
        return
    assert found.peak_bytes < 0.75 * expected.peak_bytes
    assert_same(*[torch.autograd.grad(total(measured.result), ws) for measured in (found, expected)])


def test_a_run_that_takes_another_way():
    """What an earlier one has skipped may be read in this one."""
    x, w = points(), weights()[0][:, :D].clone()

    def f(x, w, n):
        for _ in range(n):
            x = x @ w
        y = x.sin()
        return y + (y.exp() @ w if n < 3 else (y @ w).exp())

    for n in (1, 1, 2, 3, 1, 3, 2, 2):
        loss = lambda wrap, n=n: lambda w: wrap(f)(x, w, n).sum()
        assert_close(grad(loss(remat))(w), grad(loss(lambda f: f))(w))


@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f), (None, 0))], ids=["grad", "vmap(grad)"])
def test_blocks_of_a_real_size(monkeypatch, transform):
    """24 blocks of width 256 and 1024 inside, 64 x 128 tokens: with the thresholds that users have."""
    monkeypatch.undo()
    monkeypatch.setattr(recompute.functorch, "has_compiled", lambda: False)  # by other tests
    ws = [torch.empty(shape, device="meta") for shape in [(256, 1024), (1024, 256)] * 24]
    x = torch.empty(64, 128, 256, device="meta")

    large = lambda x, w1, w2: x + F.layer_norm(F.gelu(x @ w1), (1024,)) @ w2

    def flops(wrap):
        def loss(ws, x):
            for w1, w2 in zip(ws[::2], ws[1::2], strict=True):
                x = wrap(large)(x, w1, w2)
            return x.square().mean()

        return measure(transform(loss), ws, x).flops

    product = 2 * 64 * 128 * 256 * 1024
    assert flops(lambda f: f) == (24 * 6 - 1) * product  # nobody asks for the gradient of x
    assert flops(remat) == (24 * 7 - 1) * product == 717_259_538_432


v = torch.linspace(-1, 1, D * D, dtype=torch.float64).view(D, D)


def reads_before_it_is_written(x, w):
    a = (x @ w).clone()
    b = a @ v
    a.zero_()
    return (b.sin() + a).sum()


def several_outputs(x, w):
    values, _ = torch.topk(x @ w, 2)
    q, _ = torch.linalg.qr(x.mT @ x + torch.eye(D, dtype=x.dtype))
    return values.sin().sum() + (q @ v).sum()


def pieces(x, w):
    return sum(i * p.sin().sum() for i, p in enumerate((x @ w).chunk(2, 1)))


def attention(x, w):
    q = (x @ w)[None, None]
    return (F.scaled_dot_product_attention(q, q * 2, x[None, None]) @ v).sin().sum()


def differentiated_checkpoint(x, w):
    """Its recomputation skips other products the second time, all of the same shapes."""
    g = grad(lambda a: (remat(lambda a: (a @ w).sin() @ v @ w)(a) @ v).sum())((x @ w).cos())
    return ((g @ v).sin() @ w).sum()


def statistics(x, w):
    """batch_norm writes to them, and says so neither in its schema nor in their version."""
    mean, var = torch.zeros(D, dtype=x.dtype), torch.ones(D, dtype=x.dtype)
    before = v @ mean + (v @ v)[0]
    y = F.batch_norm(x @ w, mean, var, training=True)
    return (x @ v * before).sin().sum() + (y * (v @ mean)).cos().sum()


ANYWHERE = [statistics, reads_before_it_is_written, several_outputs, pieces, attention]
ANYWHERE.append(differentiated_checkpoint)


by_item = lambda x, w: ((x @ w).sin() * (x.detach() @ v).sum().item()).sum()
by_branch = lambda x, w: ((x @ w).sin() if (x.detach() @ v).sum() > 0 else (x @ w).cos()).sum()
by_numpy = lambda x, w: ((x @ w).sin() * torch.from_numpy(numpy.sin((x.detach() @ v).numpy()))).sum()


def by_list(x, w):
    """What f lets others look into is there."""
    SEEN.append(x.detach() @ v)
    return (x @ w).sin().sum()


def by_a_kernel_that_nobody_sees(x, w):
    """One that writes by address, as those of Triton and numba do."""
    y = x.detach() @ v
    numpy.frombuffer((ctypes.c_double * y.numel()).from_address(y.data_ptr()))[:] *= 2
    return ((x @ w).sin() * y).sum()


SEEN = []
CASES = [(f, t) for f in ANYWHERE for t in ("plain", "grad")] + [
    (f, "plain") for f in (by_item, by_branch, by_numpy)
]
CASES = [
    (*case, policy)
    for policy in (None, policies.everything_saveable, policies.dots_saveable)
    for case in CASES
]
CASES += [(f, "plain", None) for f in (by_list, by_a_kernel_that_nobody_sees)]


def gradients(f, transform):
    x, w = points(), weights()[0][:, :D].clone()
    torch.manual_seed(0)
    if transform == "plain":
        x.requires_grad_(), w.requires_grad_()
        f(x, w).backward()
        found = x.grad, w.grad
    else:
        found = grad(f, (0, 1))(x, w)
    return (*found, torch.rand(2))  # the stream is where it would be


@pytest.mark.parametrize(("f", "transform", "policy"), CASES)
def test_nobody_can_tell(f, transform, policy):
    for _ in range(3):
        assert_close(gradients(remat(f, policy=policy), transform), gradients(f, transform))
    assert all(type(y) is torch.Tensor and y.numpy().shape == (N, D) for y in SEEN)


@pytest.mark.parametrize("catches", [False, True])
def test_a_pullback_that_reads_what_it_did_not_read_the_last_time(catches):
    """The recomputation has stopped to watch by then, and runs again."""
    w, reads = weights()[0], False

    class ReadsLate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, product):
            ctx.save_for_backward(product)
            return x * 1

        @staticmethod
        def backward(ctx, ct):
            try:
                return ct * ctx.saved_tensors[0].sum() if reads else ct, None
            except Exception:
                if catches:
                    return ct * 0, None
                raise

    def run(wrap):
        x = points().requires_grad_()
        return torch.autograd.grad(wrap(lambda x: ReadsLate.apply(x.sin(), x @ w).sum())(x), x)

    for reads in (False, False, True, True, False, True):  # noqa: B007
        assert_close(run(remat), run(lambda f: f))


@pytest.mark.parametrize("policy", [None, policies.dots_saveable, policies.everything_saveable])
@pytest.mark.parametrize(
    "solve", [lambda a, b: torch.linalg.lstsq(a, b).solution, lambda a, b: torch.linalg.pinv(a) @ b]
)
def test_complex_least_squares(solve, policy):
    """Below a dispatch mode that does nothing torch itself computes and differentiates them wrongly."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = [torch.randn(3, 4, 4, dtype=torch.float64, generator=generator) for _ in "abc"]

    def values(f):
        xs = [x.clone().requires_grad_() for x in (a, b, c)]
        y = f(*xs)
        return y, *torch.autograd.grad(y, xs)

    f = lambda a, b, c: solve(torch.complex(a, b), torch.complex(c, a)).abs().sum()
    for _ in range(3):
        assert_same(values(remat(f, policy=policy)), values(f))


@pytest.mark.parametrize("policy", [None, policies.dots_saveable, policies.everything_saveable])
def test_gradients_of_another_formula(policy):
    """Under a dispatch mode torch gives other gradients None: `prod` over a dimension of one."""
    x, t = draw(1, 3), draw(1, 3)
    for f in (lambda x: (x @ v[:3, :3]).prod(0), lambda x: x.prod(0)):
        for _ in range(3):
            wrapped = remat(f, policy=policy)
            found, expected = [
                torch.autograd.functional.hvp(lambda x, g=g: g(x).sin().sum(), x, t) for g in (wrapped, f)
            ]
            assert_same(found, expected)


@pytest.mark.parametrize("policy", [None, policies.dots_saveable, policies.everything_saveable])
def test_a_graph_that_f_traces(policy):
    """What is kept is no constant of it."""

    def f(x):
        change = lambda y: (y @ y).clone().index_put_((torch.tensor([0]),), y[-1:] * 2)
        return make_fx(change)(x)(x).sin().sum()

    x = draw(3, 3).requires_grad_()
    for _ in range(3):
        assert_same(torch.autograd.grad(remat(f, policy=policy)(x), x), torch.autograd.grad(f(x), x))


WRAPS = {"remat": remat, "checkpoint": lambda f: lambda *args: checkpoint(f, *args)}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_nothing_is_recomputed_in_plain_forward_mode(wrap):
    def gradient(wrap, of=None):
        ws, x = [w.requires_grad_() for w in weights()], points()
        with forward_ad.dual_level():
            x = forward_ad.make_dual(x, x.cos())
            gs = of(ws, x) if of else torch.autograd.grad(squares(wrap)(ws, x), ws)
            return [t.detach() for g in gs for t in forward_ad.unpack_dual(g)]

    expected, measured = meter.measure(gradient, no_remat), meter.measure(gradient, wrap)
    assert_same(measured.result, expected.result)
    assert (measured.flops, measured.peak_bytes) == (expected.flops, expected.peak_bytes)
    assert_same(gradient(wrap, inner_grad(squares(wrap))), expected.result)


@pytest.mark.parametrize("create_graph", [False, True])
def test_hooks_do_not_see_a_backward_that_is_looked_into(create_graph):
    """They would refuse the transform inside."""
    x, packed = tensor(2, 3, requires_grad=True), []
    y = remat(lambda x: vmap(grad(lambda x: x.exp().sin().sum()))(x))(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        for is_batched in (False, True):
            cts = torch.eye(6, dtype=y.dtype).view(6, 2, 3) if is_batched else y.detach()
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(cts, cts.cos())
                torch.autograd.grad(y, x, dual, True, create_graph, is_grads_batched=is_batched)
            torch.autograd.grad(y, x, cts, True, is_grads_batched=is_batched)
    assert not packed


def channels_last(f):
    return lambda x, w: f(x.movedim(-1, -3)).movedim(-3, -1) * w


@pytest.mark.parametrize(
    "f",
    [
        channels_last(lambda x: F.group_norm(x, 2)),
        channels_last(lambda x: F.max_pool2d(x, 2).square()),
        channels_last(lambda x: F.adaptive_max_pool2d(x, 2).square()),
    ],
)
def test_channels_last_under_vmap(f):
    """Formulas that only plain autograd takes ask for a memory format, which vmap does not know."""
    x, w = tensor(3, 2, 4, 4, 4), tensor(4)
    twice = lambda f: lambda x, w: grad(lambda x: f(x, w).sum())(x).square().sum() + f(x, w).sum()
    for loss in (lambda f: lambda x, w: f(x, w).square().sum(), twice):
        run = lambda wrap, loss=loss: vmap(grad(loss(wrap(f)), (0, 1)), (0, None))(x, w)
        assert_same(run(remat), run(lambda f: f))
        # From the second time on it is known.
        counts = [meter.measure(run, remat).ops.total() for _ in range(2)]
        assert counts[0] == counts[1]


def test_one_vmap_takes_the_kernels_of_plain_autograd():
    """They take less memory than the formulas of torch.func, which can be differentiated again."""
    x, w = tensor(3, 4), tensor(4, 4)
    loss = lambda x, w: remat(lambda x: F.silu(x @ w) @ w)(x).sum()
    ops = meter.measure(vmap(grad(loss, 1), (0, None)), x, w).ops
    assert ops["aten.silu_backward.default"] == 1 and "aten.sigmoid.default" not in ops


@pytest.mark.parametrize("f", [F.silu, F.mish, lambda x: torch.logit(x.sigmoid())])
def test_third_derivatives_with_captured_parameters(f):
    """Two levels of forward mode over reverse mode: some formulas have a tangent only with grad mode on."""
    w, x, e = tensor(3, 3).requires_grad_(), tensor(4, 3), tensor(3)

    def run(wrap):
        u = wrap(lambda x: f(x @ w).sum())
        once = lambda x: grad(u)(x) @ e
        twice = lambda x: jvp(once, (x,), (e,))[1]
        value = vmap(lambda x: jvp(twice, (x,), (e,))[1])(x)
        return value, torch.autograd.grad(value.square().sum(), w)[0]

    expected = run(lambda f: f)
    for wrap in (remat, lambda f: lambda x: checkpoint(f, x)):
        assert_same(run(wrap), expected)


@pytest.mark.parametrize("wrap", [remat, lambda f: lambda *args: checkpoint(f, *args)])
def test_kernels_that_do_not_cast_in_a_mode(wrap, small_sizes_matter, monkeypatch):
    """Their recomputation must not run in the mode that learns what to skip."""
    monkeypatch.setattr(recompute, "_blame", lambda error: None)
    c = torch.randn(30, 30)
    f = lambda x: torch.cdist(x, c).float().square().sum()
    g = lambda x: wrap(lambda x: torch.cdist(x, c))(x).float().square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert torch.equal(grad(g)(c + 1), grad(f)(c + 1))


@pytest.mark.parametrize("kernel", [torch.mv, torch.dot, torch.vdot])
def test_options_for_which_no_formula_counts_flops(kernel, small_sizes_matter):
    """An estimate is no reason to fail."""
    x = tensor(3)

    def f(x):
        out = torch.empty((3,) if kernel is torch.mv else (), dtype=x.dtype)
        given = torch.outer(x, x) if kernel is torch.mv else x
        kernel(given.detach(), x.detach(), out=out)
        return (x.sin() * out).cos().sum()

    for policy in (None, policies.dots_saveable, policies.everything_saveable):
        for _ in range(3):
            assert_close(grad(remat(f, policy=policy))(x), grad(f)(x))


def test_operators_whose_flops_torch_cannot_count():
    x = torch.empty(4, 4, 4, device="meta", dtype=torch.bfloat16)
    for func in (torch.ops.aten.bmm.dtype, torch.ops.aten.mm.dtype):
        given = (x, x) if func is torch.ops.aten.bmm.dtype else (x[0], x[0])
        assert flops_of(func, (*given, torch.float32), {}, func(*given, torch.float32)) >= 0


def test_a_result_whose_size_depends_on_values_is_not_skipped():
    """Torch has a tag for such operators, and not for all of them."""
    w, x = tensor(4, 4, requires_grad=True), tensor(3, 5, 4)

    def f(x, lengths):
        h = (x @ w).sin() @ w
        packed = pack_padded_sequence(x[..., :1], lengths, batch_first=True, enforce_sorted=False)
        return (h * x).sum() / packed.data.shape[0]

    for lengths in ([5, 2, 1], [1, 1, 1], [4, 5, 5]):
        lengths = torch.tensor(lengths)
        (got,) = torch.autograd.grad(remat(f)(x, lengths), w)
        assert_close(got, torch.autograd.grad(f(x, lengths), w)[0])
