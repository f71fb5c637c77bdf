"""What people compute from per-sample gradients, without holding them all.

`vmap(grad(loss), (None, 0, 0))` returns batch times the size of the parameters, also with `chunk_size=`. Here
each chunk is reduced before the next one is computed. All functions have these parameters:

* `loss` : ``loss(parameters, *sample)`` is the loss of one sample, a scalar.
* `parameters` : any pytree of tensors, with respect to which the loss is differentiated. Frozen parameters
  belong into the closure of `loss`.
* `batch` : pytrees of tensors of shape ``[batch, ...]``, all of one length. It may be empty, but
  `noise_scale` needs two samples, and `influence` one in `train`.
* `chunk_size` : how many gradients are alive at a time; None for all.
* `bytes` : instead of `chunk_size`, how many bytes the chunks and the result may take, beside the parameters
  and the batch. The first chunk is one sample, and is measured. Each chunk sets the size of the next.
* `randomness` : that of `torch.func.vmap`.

In plain autograd the results are constants. For a penalty on gradients, use ``vmap(grad(loss))``.

An invalid option, or too few `bytes` for one sample, is an OptionError; parameters that are no tensors, or a
batch with anything but tensors of a common first dimension, an InputError.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from . import world
from ._torch import autograd, functorch, wrappers
from .closures import Found
from .core.program import is_differentiable
from .core.tensors import drop_stale
from .errors import FuncckptError, InputError, OptionError, TransformError, check_positive, describe
from .meter import Meter
from .tape.operators import tensors_in

__all__ = ["Clipped", "NoiseScale", "clipped_sum", "gradient_norms", "influence", "noise_scale"]

Loss = Callable[..., Tensor]


class Clipped(NamedTuple):
    """The result of :func:`clipped_sum`."""

    sum: Any  #: of the clipped gradients, a pytree like the parameters
    norms: Tensor  #: of the gradients before clipping, of shape [batch]


class NoiseScale(NamedTuple):
    """The result of :func:`noise_scale`: unbiased, scalars. In a small batch `signal` may be negative."""

    noise: Tensor  #: trace of the covariance of the per-sample gradients
    signal: Tensor  #: squared norm of the expected gradient

    @property
    def scale(self) -> Tensor:
        """noise / signal: the batch size beyond which a larger batch helps little."""
        return self.noise / self.signal


def gradient_norms(
    loss: Loss,
    parameters: Any,
    *batch: Any,
    chunk_size: int | None = None,
    bytes: int | None = None,
    randomness: str = "error",
) -> Tensor:
    """Norm of the gradient of each sample, over all parameters together: a tensor of shape ``[batch]``.

    :mod:`funcckpt.per_sample` describes `loss`, `parameters`, `batch`, `chunk_size`, `bytes`, `randomness`.

    Examples
    --------
    >>> import torch
    >>> from funcckpt.per_sample import gradient_norms
    >>> def loss(w, x):
    ...     return (w * x).sum()
    >>> gradient_norms(loss, torch.zeros(2), torch.tensor([[3.0, 4.0], [6.0, 8.0]]), chunk_size=1)
    tensor([ 5., 10.])
    """
    return _reduced(_Chunks("gradient_norms", chunk_size, bytes), _norms, loss, parameters, batch, randomness)


def clipped_sum(
    loss: Loss,
    parameters: Any,
    *batch: Any,
    max_norm: float,
    eps: float = 1e-6,
    chunk_size: int | None = None,
    bytes: int | None = None,
    randomness: str = "error",
) -> Clipped:
    """Sum of per-sample gradients, each scaled down to a norm of `max_norm` at most.

    This is the sum of DP-SGD (Abadi et al., "Deep Learning with Differential Privacy", arXiv 1607.00133),
    before noise is added. It equals that of Opacus with flat clipping: the factor of each sample is
    ``min(1, max_norm / (norm + eps))``, with the norm over all parameters together. If samples are spread
    over ranks, all-reduce the sums, and then add the noise once. Returns a :class:`Clipped`.
    :mod:`funcckpt.per_sample` describes `loss`, `parameters`, `batch`, `chunk_size`, `bytes`, `randomness`.

    Examples
    --------
    >>> import torch
    >>> from funcckpt.per_sample import clipped_sum
    >>> def loss(w, x):
    ...     return (w * x).sum()
    >>> x = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> clipped_sum(loss, torch.zeros(2), x, max_norm=1.0, eps=0.0).sum
    tensor([0.9000, 1.2000])
    """
    check_positive("clipped_sum", Real, max_norm=_number(max_norm))
    check_positive("clipped_sum", Real, or_zero=True, eps=_number(eps))
    total: list[Tensor] = []

    def reduce(gradients: list[Tensor]) -> Tensor:
        norms = _norms(gradients)
        factors = (max_norm / (norms + eps)).clamp(max=1.0)
        with autograd.without_autocast():
            _add(
                total, [torch.tensordot(factors.to(_single(g)), g.to(_single(g)), dims=1) for g in gradients]
            )
        return norms

    norms = _reduced(_Chunks("clipped_sum", chunk_size, bytes), reduce, loss, parameters, batch, randomness)
    sums = iter(total)
    return Clipped(pytree.tree_map(lambda p: next(sums).to(p.dtype), parameters), norms)


def noise_scale(
    loss: Loss,
    parameters: Any,
    *batch: Any,
    chunk_size: int | None = None,
    bytes: int | None = None,
    randomness: str = "error",
) -> NoiseScale:
    """The "simple" gradient noise scale of one batch.

    It is defined by McCandlish et al., "An Empirical Model of Large-Batch Training" (arXiv 1812.06162), and
    estimated from the norms of the per-sample gradients and of their mean. Returns a :class:`NoiseScale`. For
    several batches, divide the mean of ``noise`` by the mean of ``signal``.
    :mod:`funcckpt.per_sample` describes `loss`, `parameters`, `batch`, `chunk_size`, `bytes`, `randomness`.

    Examples
    --------
    >>> import torch
    >>> from funcckpt.per_sample import noise_scale
    >>> def loss(w, x):
    ...     return w * x
    >>> noise_scale(loss, torch.tensor(0.0), torch.tensor([1.0, 3.0])).scale
    tensor(0.6667)
    """
    total: list[Tensor] = []

    def reduce(gradients: list[Tensor]) -> Tensor:
        _add(total, [g.sum(0, dtype=_single(g)) for g in gradients])
        return _norms(gradients)

    of_each = _reduced(_Chunks("noise_scale", chunk_size, bytes), reduce, loss, parameters, batch, randomness)
    n = len(of_each)
    if n < 2:
        raise InputError("noise_scale: noise cannot be estimated from so few samples. Pass at least two.")
    of_mean = _dot(total, total) / n**2
    noise = (of_each.square().mean() - of_mean) * n / (n - 1)
    return NoiseScale(noise, of_mean - noise / n)


def influence(
    loss: Loss,
    parameters: Any,
    train: tuple[Any, ...],
    test: tuple[Any, ...],
    *,
    damping: float = 0.0,
    chunk_size: int | None = None,
    bytes: int | None = None,
    max_iterations: int = 100,
    tolerance: float = 1e-5,
) -> Tensor:
    """How the loss of each test sample would change if a training sample had more weight.

    Entry (i, j) is the derivative of the loss of test sample i, at the parameters that minimize the
    mean loss of the training samples, with respect to a weight that is added to training sample j
    (Koh and Liang, "Understanding Black-box Predictions via Influence Functions", arXiv 1703.04730):
    ``-g_i · (H + damping)^-1 · g_j``. Where it is negative, sample j helps. Without sample j the loss changes
    by about minus the entry, divided by the number of training samples. Conjugate gradients solve the system
    without storing the Hessian H of the mean training loss, or a gradient of a training sample.

    `train` and `test` are batches; the result has shape ``[test, train]``. `parameters` are at a minimum, and
    `loss` must not draw random numbers. `damping` is added to the diagonal of H; the sum must be positive
    definite. Conjugate gradients stop when the residual is below `tolerance` times the gradient, and fail
    after `max_iterations`. `chunk_size` and `bytes` are described in :mod:`funcckpt.per_sample`.

    Examples
    --------
    >>> import torch
    >>> from funcckpt.per_sample import influence
    >>> def loss(mean, x):
    ...     return (mean - x).square()
    >>> x = torch.tensor([1.0, 2.0, 6.0])
    >>> influence(loss, x.mean(), (x,), (torch.tensor([0.0]),))
    tensor([[-12.,  -6.,  18.]])
    """
    leaves, structure = pytree.tree_flatten(parameters)

    def of_sample(leaves: list[Tensor], *sample: Any) -> Tensor:
        return loss(pytree.tree_unflatten(leaves, structure), *sample)

    count = _count("influence", train)
    if count == 0:
        raise InputError("influence: there is no training sample. Pass at least one in train.")
    chunks = _Chunks("influence", chunk_size, bytes)
    check_positive("influence", Real, or_zero=True, tolerance=_number(tolerance))
    _check("influence", loss, parameters, (train, test))
    if any([wrappers.physical(x)[1] for x in tensors_in((parameters, train, test))]):
        raise TransformError("influence: vmap's samples would take different numbers of iterations. Loop.")

    def hessian_times(v: list[Tensor]) -> list[Tensor]:
        product = [damping * x for x in v]
        for part in chunks.split(train):

            def of_part(leaves: list[Tensor], part: tuple[Any, ...] = part) -> Tensor:
                return vmap(of_sample, (None, *[0] * len(part)))(leaves, *part).sum() / count

            _add(product, jvp(grad(of_part), (leaves,), (v,))[1])
        return product

    def along(v: list[Tensor], *sample: Any) -> Any:
        return jvp(lambda leaves: of_sample(leaves, *sample), (leaves,), (v,))[1]

    rows = []
    # Fused attention has no forward mode.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), chunks.meter or nullcontext():
        for sample in _Chunks("influence", 1).split(test):
            g = grad(of_sample)(leaves, *pytree.tree_map_only(Tensor, lambda x: x[0], sample))
            v = _solve(hessian_times, g, max_iterations, tolerance)
            parts = _Chunks("influence", chunks.size).split(train)
            rows.append(-torch.cat([vmap(along, (None, *[0] * len(part)))(v, *part) for part in parts]))
    return torch.stack(rows) if rows else leaves[0].new_zeros(0, count)


def _solve(
    times: Callable[[list[Tensor]], list[Tensor]], b: list[Tensor], max_iterations: int, tolerance: float
) -> list[Tensor]:
    """Conjugate gradients (Hestenes and Stiefel, 1952)."""
    x = [torch.zeros_like(t) for t in b]
    residual, direction = [t.clone() for t in b], [t.clone() for t in b]
    square = start = _dot(residual, residual)
    for _ in range(max_iterations):
        if square <= tolerance**2 * start:
            break
        image = times(direction)
        curvature = _dot(direction, image)
        if not curvature > 0:
            raise FuncckptError(
                "influence: the damped Hessian of the training loss is not positive definite. Pass a "
                "larger damping, or train to a minimum."
            )
        step = square / curvature
        _add(x, [step * t for t in direction])
        _add(residual, [-step * t for t in image])
        before, square = square, _dot(residual, residual)
        direction = [r + square / before * t for r, t in zip(residual, direction, strict=True)]
    if square > tolerance**2 * start:
        raise FuncckptError(
            f"influence: conjugate gradients do not converge in {max_iterations} iterations. Pass a larger "
            "damping, max_iterations or tolerance."
        )
    return x


def _reduced(
    chunks: _Chunks, reduce: Callable[..., Tensor], loss: Loss, parameters: Any, batch: Any, randomness: str
) -> Tensor:
    """The results of `reduce`, called with the gradients of each chunk (shapes ``[chunk, ...]``), as one."""
    _check(chunks.name, loss, parameters, batch)
    per_sample = vmap(grad(loss), (None, *[0] * len(batch)), randomness=randomness)
    states = world.states(world.random_streams(())) if randomness == "same" else []
    results = []
    # Parameters of a module require grad, so plain autograd would record everything.
    with torch.no_grad(), chunks.meter or nullcontext():
        for part in chunks.split(batch):
            world.set_streams(states)
            results.append(reduce(pytree.tree_leaves(per_sample(parameters, *part))))
        if not results:
            results.append(reduce([p.new_zeros(0, *p.shape) for p in pytree.tree_leaves(parameters)]))
    return torch.cat(results)


class _Chunks:
    """Splits a batch into chunks of a given size, or of as many samples as fit into bytes."""

    def __init__(self, name: str, chunk_size: int | None, bytes: int | None = None) -> None:
        if chunk_size is not None and bytes is not None:
            raise OptionError(f"{name} takes chunk_size= or bytes=, not both.")
        check_positive(name, or_none=True, chunk_size=chunk_size)
        check_positive(name, Real, or_none=True, bytes=bytes)
        self.name, self.size, self.bytes = name, chunk_size, int(min(bytes or 0, sys.maxsize))
        self.meter = None if bytes is None else Meter()  # runs during all work on the chunks
        # The size of the largest chunk so far, and the bytes that it took for each sample.
        self._measured, self._of_one = 0, 0.0

    def split(self, batch: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        count, start, before, meter = _count(self.name, batch), 0, 0, self.meter
        while start < count:
            if meter is not None:
                before = meter.peak_bytes = meter.live_bytes
                self.size = max(1, int((self.bytes - before) / self._of_one)) if self._measured else 1
            samples = slice(start, start + (self.size or count))
            with world.own_autocast_cache():  # the cache would keep the casts of each chunk
                yield pytree.tree_map_only(Tensor, operator.itemgetter(samples), batch)
            size, start = min(samples.stop, count) - start, samples.stop
            if meter is not None and size >= self._measured:
                # A chunk takes some bytes whatever its size, and some for each sample. So a larger one takes
                # no more bytes for each sample.
                taken = meter.peak_bytes - before
                self._measured, self._of_one = size, taken / size
                least = taken + (meter.live_bytes if start < count else before)
                if size == 1 and least > self.bytes:
                    # Each one leaves something behind. (The first leaves what the others are added to.)
                    left = meter.live_bytes - before if start > 1 else 0
                    least += left * max(0, count - start - 1)
                    raise OptionError(
                        f"{self.name}: bytes={self.bytes} is too few for one sample at a time, which has "
                        f"taken {least} so far. Pass more."
                    )


def _number(x: Any) -> Any:
    """An option that may be a tensor, as a number to be checked. Under vmap torch does not tell its value."""
    if isinstance(x, Tensor):
        return 1 if wrappers.physical(x)[1] else x.item()
    return x


def _check(name: str, loss: Any, parameters: Any, batch: Any) -> None:
    if not callable(loss):
        raise InputError(f"{name}: loss is a function of parameters and a sample, not {type(loss).__name__}.")
    if not (leaves := pytree.tree_leaves(parameters)):
        raise InputError(f"{name}: there are no parameters. Is each of them frozen?")
    for x in leaves:
        if not (isinstance(x, Tensor) and is_differentiable(x)):
            what = describe(x) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(
                f"{name}: parameters is a pytree of floating-point tensors, and has {what} in it. Of a "
                "module, pass dict(module.named_parameters()), and let the loss use functional_call."
            )
    if torch.is_grad_enabled() and (layers := functorch.active_layers()):
        captured = Found(loss).tensors
        drop_stale(captured, layers)
        for x in [*tensors_in((parameters, batch)), *captured.values()]:
            if any([at_level.requires_grad for at_level in wrappers.layers_of(wrappers.alive(x))[:-1]]):
                raise TransformError(
                    f"{name}: the results have no derivative in reverse mode. Use vmap(grad(loss)) or "
                    "forward mode (jvp, jacfwd), or detach what it is given if only the values count."
                )


def _count(name: str, batch: tuple[Any, ...]) -> int:
    if isinstance(batch, Tensor):
        raise InputError(f"{name}: train and test are tuples of what the loss takes: write (x,), not x.")
    leaves = pytree.tree_leaves(batch)
    lengths = {x.shape[0] if isinstance(x, Tensor) and x.dim() else -1 for x in leaves}
    if len(lengths) != 1 or -1 in lengths:
        given = [describe(x) if isinstance(x, Tensor) else type(x).__name__ for x in leaves]
        raise InputError(
            f"{name}: a batch has only tensors, whose first dimension is that of the samples. Given: "
            f"{', '.join(given) or 'no tensor at all'}. Put what all samples share into the closure of "
            "the loss."
        )
    return lengths.pop()


def _norms(gradients: list[Tensor]) -> Tensor:
    rows = [g.reshape(len(g), math.prod(g.shape[1:])) for g in gradients]
    norms = [torch.linalg.vector_norm(row, dim=1, dtype=_single(row)) for row in rows]
    return torch.stack(norms).norm(dim=0)


def _single(x: Tensor) -> torch.dtype:
    """The dtype of x, or single precision if that is more."""
    return torch.promote_types(x.dtype, torch.float32)


def _dot(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return torch.stack([(x.conj() * y).real.sum() for x, y in zip(a, b, strict=True)]).sum()


def _add(total: list[Tensor], terms: list[Tensor]) -> None:
    """total += terms, where an empty total is zero, of single precision at least."""
    if not total:
        total += [term.to(_single(term)) for term in terms]
    else:
        total[:] = [x.add_(term) for x, term in zip(total, terms, strict=True)]
