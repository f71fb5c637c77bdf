"""torch's own database of operators, run with remat and without.

For an operator and each of its sample inputs the plain function runs first,
under one transform at a time. What plain torch passes, the wrapped function has
to pass with the same outputs, the same derivatives and the same state of the
random stream afterwards; what plain torch refuses, it has to refuse.

Samples wrap random operators in `wrapper_set_seed`, which hides every error of
the random stream; `load` takes that wrapper away and `run` sets the seed outside.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.func import jvp, vjp, vmap
from torch.utils import _pytree as pytree

from funcckpt.errors import MutationError

SEED = 1234
LARGE = 100_000  # elements; samples above this are run only where all are

# What remat does although plain torch refuses it, and why. Anything else has to be refused alike.
_NO_GRAPH = "recomputed without create_graph, where the derivative needs no .item()"
MORE_THAN_TORCH = {
    "index_reduce.prod": _NO_GRAPH,
    "scatter_reduce.prod": _NO_GRAPH,
}


@functools.cache
def load() -> list[Any]:
    """The operators that have a derivative in float64 on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as invocations
    # Importing torch's test helpers freezes torch.backends.*.flags for the whole process, and Opacus sets one.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    assert not torch.backends.flags_frozen()
    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return [
        op
        for op in invocations.op_db
        if op.supports_autograd and torch.float64 in op.supported_backward_dtypes("cpu")
    ]


def is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


@dataclasses.dataclass
class Case:
    """One sample input, flat, with the tensors to differentiate by set apart."""

    leaves: list[Any]
    tree: Any
    where: list[int]
    finish: Callable[[Any], Any]
    originals: list[Any] | None = None  # of an operator that changes its inputs

    @classmethod
    def of(cls, sample: Any) -> Case:
        leaves, tree = pytree.tree_flatten((sample.input, *sample.args, sample.kwargs))
        where = [i for i, leaf in enumerate(leaves) if is_differentiable(leaf) and leaf.requires_grad]
        leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return cls(leaves, tree, where, sample.output_process_fn_grad)

    @property
    def primals(self) -> list[torch.Tensor]:
        return [self.leaves[i] for i in self.where]

    def versions(self) -> list[int]:
        return [leaf._version for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def copies(self) -> list[Any]:
        return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]

    def restore(self) -> None:
        if self.originals is not None:
            self.leaves = self.originals
            self.originals = self.copies()

    def state(self) -> Any:
        """What an operator that changes its inputs made of them."""
        return None if self.originals is None else self.copies()

    def body(self, op: Callable[..., Any]) -> Callable[..., Any]:
        """What to wrap. Some samples name a part of the output that has a derivative at all (the
        product of eigenvectors with their adjoint, say). That part is then the function: with a
        boundary between the two, neither side alone would have a second derivative."""
        finish = self.finish
        if finish.__qualname__.startswith("SampleInput."):  # the default: its argument as it is
            return op
        return lambda *args, **kwargs: finish(op(*args, **kwargs))

    def everything(self, op: Callable[..., Any]) -> Callable[..., Any]:
        """The operator as a function of the primals, with its output untouched."""

        def function(*primals: torch.Tensor) -> Any:
            leaves = list(self.leaves)
            for i, primal in zip(self.where, primals, strict=True):
                leaves[i] = primal
            *args, kwargs = pytree.tree_unflatten(leaves, self.tree)
            return op(*args, **kwargs)

        return function

    def function(self, op: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The same, with the differentiable outputs alone."""
        whole = self.everything(op)

        def function(*primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
            leaves = pytree.tree_leaves(whole(*primals))
            return tuple(leaf for leaf in leaves if is_differentiable(leaf))

        return function


@dataclasses.dataclass
class Probes:
    """Directions for the derivatives: what comes in (tangents) and goes back (cotangents)."""

    tangents: list[torch.Tensor]
    cotangents: list[torch.Tensor]
    cotangent_tangents: list[torch.Tensor]

    @classmethod
    def like(cls, primals: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> Probes:
        draw = lambda ts: [torch.randn(t.shape, dtype=t.dtype) for t in ts]
        outputs = list(outputs)
        return cls(draw(primals), draw(outputs), draw(outputs))


# ---------------------------------------------------------------- the transforms


def gradients(outputs, inputs, directions, **options):
    """torch.autograd.grad over those outputs that have a gradient."""
    pairs = [(o, d) for o, d in zip(outputs, directions, strict=True) if o.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    outputs, directions = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, inputs, directions, allow_unused=True, **options)


def plain_backward(op, case, probes):
    leaves = [p.detach().requires_grad_() for p in case.primals]
    whole = case.everything(op)(*leaves)
    shown = pytree.tree_map_only(torch.Tensor, torch.detach, whole)
    outputs = [o for o in pytree.tree_leaves(whole) if is_differentiable(o)]
    grads = gradients(outputs, leaves, probes.cotangents)
    return shown, [o.requires_grad for o in outputs], grads


def plain_double_backward(op, case, probes):
    """A gradient that does not depend on an input may say so with None or with zeros."""
    leaves = [p.detach().requires_grad_() for p in case.primals]
    cotangents = [ct.detach().requires_grad_() for ct in probes.cotangents]
    zeros = lambda gs, ts: [torch.zeros_like(t) if g is None else g for g, t in zip(gs, ts)]
    grads = gradients(case.function(op)(*leaves), leaves, cotangents, create_graph=True)
    grads = zeros(grads, leaves)
    inputs = [*leaves, *cotangents]
    second = gradients(grads, inputs, probes.tangents)
    return [g.detach() for g in grads], zeros(second, inputs)


def pullback(function):
    """(primals, cotangents) -> gradients: the function that the second-order transforms take."""

    def apply(primals, cotangents):
        _, pull = vjp(function, *primals)
        return pull(tuple(cotangents))

    return apply


def vjp_of_vjp(op, case, probes):
    grads, pull = vjp(pullback(case.function(op)), case.primals, probes.cotangents)
    return grads, pull(tuple(probes.tangents))


def vmap_of_pullback(op, case, probes):
    """Only the cotangents are batched, as jacrev does it."""
    outputs, pull = vjp(case.function(op), *case.primals)
    batches = [torch.stack(pair) for pair in zip(probes.cotangents, probes.cotangent_tangents, strict=True)]
    return outputs, vmap(pull)(tuple(batches))


def vmap_of_vjp(op, case, probes):
    """Per-sample gradients: primals and cotangents are batched."""
    primals = [torch.stack([p, 0.75 * p]) for p in case.primals]
    batches = [torch.stack(pair) for pair in zip(probes.cotangents, probes.cotangent_tangents, strict=True)]
    return vmap(pullback(case.function(op)), randomness="different")(primals, batches)


def forward(op, case, probes):
    return jvp(case.function(op), tuple(case.primals), tuple(probes.tangents))


def jvp_of_vjp(op, case, probes):
    return jvp(
        pullback(case.function(op)),
        (case.primals, probes.cotangents),
        (probes.tangents, probes.cotangent_tangents),
    )


REVERSE = (plain_backward, plain_double_backward, vjp_of_vjp, vmap_of_pullback, vmap_of_vjp)
FORWARD = (forward, jvp_of_vjp)
TRANSFORMS = REVERSE + FORWARD


# ---------------------------------------------------------------- running and comparing


@dataclasses.dataclass
class Run:
    value: Any = None
    stream: torch.Tensor | None = None
    error: Exception | None = None


def run(transform, op, case, probes) -> Run:
    case.restore()
    random.seed(SEED)
    torch.manual_seed(SEED)
    try:
        value = transform(op, case, probes)
    except Exception as error:
        return Run(error=error)
    return Run((value, case.state()), torch.get_rng_state())


def evaluate(op, case, probes):
    return case.function(op)(*case.primals)


def may_refuse(tried: Run, case: Case) -> bool:
    """Whether remat may raise where plain torch does not: it may if f changes its inputs."""
    return case.originals is not None and isinstance(tried.error, MutationError)


def levels_left() -> int:
    """How many functorch levels an error left behind; there should be none."""
    top = torch._C._functorch.peek_interpreter_stack()
    if top is None:
        return 0
    torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(0)
    return top.level()


def identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The usual case, and ten times cheaper to ask than assert_close."""
    return (
        a.layout is b.layout is torch.strided
        and a.dtype is b.dtype is not torch.complex32
        and torch.equal(a, b)
    )


def difference(plain: Any, wrapped: Any) -> str | None:
    """What differs between two results, in a line; None if nothing does."""
    expected, tree = pytree.tree_flatten(plain)
    actual, other = pytree.tree_flatten(wrapped)
    if tree != other:
        return f"structure: {tree} without remat, {other} with it"
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(b, torch.Tensor) or not isinstance(a, torch.Tensor):
            if type(a) is not type(b) or a != b:
                return f"leaf {i}: {b!r:.60} without remat, {a!r:.60} with it"
        elif not identical(a, b):
            if b.dtype is torch.complex32:  # has no comparison of its own
                a, b = a.to(torch.complex64), b.to(torch.complex64)
            try:
                torch.testing.assert_close(a, b, equal_nan=True)
            except AssertionError as error:
                return f"leaf {i}: " + " ".join(str(error).split())
    return None


@dataclasses.dataclass
class Failure:
    op: str
    dtype: str
    sample: int
    transform: str
    message: str
    trace: str = ""

    def __str__(self) -> str:
        return f"{self.op}, {self.dtype} sample {self.sample}, {self.transform}, {self.message}"


@dataclasses.dataclass
class Report:
    failures: list[Failure] = dataclasses.field(default_factory=list)
    passed: int = 0
    refused: int = 0  # by plain torch, and by remat too
    allowed: int = 0  # see MORE_THAN_TORCH
    left_out: int = 0  # samples without a differentiable input or output

    def __iadd__(self, other: Report) -> Report:
        for field in dataclasses.fields(self):
            both = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, both)
        return self


def choose(count: int, limit: int | None) -> list[int]:
    """Which of `count` samples to take: the first ones, then evenly spread over the rest."""
    if limit is None or count <= limit:
        return list(range(count))
    head = (limit + 1) // 2
    tail = limit - head
    return [*range(head), *(count - 1 - (count - head) * i // tail for i in reversed(range(tail)))]


def size(sample: Any) -> int:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


def samples(op: Any, dtype: torch.dtype, limit: int | None) -> Iterator[tuple[int, Case]]:
    random.seed(SEED)
    torch.manual_seed(SEED)
    made = iter(op.sample_inputs("cpu", dtype, requires_grad=True))
    if limit == 1 and (first := next(made, None)) is not None and size(first) < LARGE:
        yield 0, Case.of(first)  # the others need not be made
        return
    random.seed(SEED)
    torch.manual_seed(SEED)
    every = list(enumerate(op.sample_inputs("cpu", dtype, requires_grad=True)))
    if limit is not None:
        every = [(i, sample) for i, sample in every if size(sample) < LARGE] or every
    for i in choose(len(every), limit):
        yield every[i][0], Case.of(every[i][1])


def check(
    op: Any,
    remat: Callable[[Callable[..., Any]], Callable[..., Any]],
    *,
    limit: int | None = None,
    dtype: torch.dtype = torch.float64,
    transforms: Sequence[Callable[..., Any]] = TRANSFORMS,
) -> Report:
    """Every transform on the chosen samples of one operator, without remat and with it."""
    report = Report()
    if dtype not in op.supported_backward_dtypes("cpu"):
        return report
    wrapped_op = remat(op.op)
    for index, case in samples(op, dtype, limit):
        originals, versions = case.copies(), case.versions()
        body = case.body(op.op)
        wrapped = wrapped_op if body is op.op else remat(body)
        primal = run(evaluate, body, case, None)
        if primal.error or not primal.value[0] or not case.where:
            report.left_out += 1
            continue
        # batch_norm writes running statistics without a trace in their version.
        if case.versions() != versions or difference(case.leaves, originals):
            case.originals = originals
        probes = Probes.like(case.primals, primal.value[0])
        for transform in transforms:
            plain = run(transform, body, case, probes)
            levels_left()
            tried = run(transform, wrapped, case, probes)
            trace = ""
            if left := levels_left():
                message = f"{left} levels of transforms left behind"
            elif plain.error is not None:
                if tried.error is not None:
                    report.refused += 1
                    continue
                if op.full_name in MORE_THAN_TORCH:
                    report.allowed += 1
                    continue
                message = f"plain torch raises, remat does not: {brief(plain.error)}"
            elif tried.error is not None and may_refuse(tried, case):
                report.refused += 1
                continue
            elif tried.error is not None:
                message = brief(tried.error)
                trace = "".join(traceback.format_exception(tried.error))
            elif different := difference(plain.value, tried.value):
                message = different
            elif not torch.equal(plain.stream, tried.stream):
                message = "the random stream ends in another state"
            else:
                report.passed += 1
                continue
            report.failures.append(
                Failure(
                    op.full_name,
                    str(dtype).removeprefix("torch."),
                    index,
                    transform.__name__,
                    message,
                    trace,
                )
            )
    return report


def brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
