"""What people compute from per-sample gradients, without holding them all.

`vmap(grad(loss), (None, 0, 0))` is batch times as large as the parameters, also with `chunk_size=`. Here each
chunk is reduced before the next one is computed. All functions have these parameters:

* `loss` : ``loss(parameters, *sample)`` is the loss of one sample, a scalar.
* `parameters` : any pytree of tensors; what is differentiated. Leave frozen ones to the closure of `loss`.
* `batch` : pytrees of tensors of shapes ``[batch, ...]``, all of one length.
* `chunk_size` : at most so many gradients are alive at a time; None for all.
* `randomness` : that of `torch.func.vmap`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils import _pytree as pytree

from . import world
from .errors import FuncckptError, InputError, OptionError, describe
from .tape.operators import tensors_in

Loss = Callable[..., Tensor]


class Clipped(NamedTuple):
    """The result of :func:`clipped_sum`."""

    sum: Any  # of the clipped gradients, like the parameters
    norms: Tensor  # before clipping, of shape [batch]


class NoiseScale(NamedTuple):
    """The result of :func:`noise_scale`: scalars, unbiased. In small batches `signal` may be below zero."""

    noise: Tensor  # trace of the covariance of the per-sample gradients
    signal: Tensor  # squared norm of the expected gradient

    @property
    def scale(self) -> Tensor:
        """noise / signal: the batch size beyond which larger ones bring little."""
        return self.noise / self.signal


def gradient_norms(
    loss: Loss, parameters: Any, *batch: Any, chunk_size: int | None = None, randomness: str = "error"
) -> Tensor:
    """Norm of the gradient of each sample, over all parameters together: a tensor of shape ``[batch]``.

    `loss`, `parameters`, `batch`, `chunk_size` and `randomness` are those of all functions in this module.

    Examples
    --------
    >>> import torch
    >>> from funcckpt.per_sample import gradient_norms
    >>> def loss(w, x):
    ...     return (w * x).sum()
    >>> gradient_norms(loss, torch.zeros(2), torch.tensor([[3.0, 4.0], [6.0, 8.0]]), chunk_size=1)
    tensor([ 5., 10.])
    """
    chunks = _chunks("gradient_norms", loss, parameters, batch, chunk_size, randomness)
    return torch.cat([_norms(gradients) for gradients in chunks])


def clipped_sum(
    loss: Loss,
    parameters: Any,
    *batch: Any,
    max_norm: float,
    eps: float = 1e-6,
    chunk_size: int | None = None,
    randomness: str = "error",
) -> Clipped:
    """Sum of per-sample gradients, each scaled down to a norm of `max_norm` at most.

    This is the sum of DP-SGD (Abadi et al., "Deep Learning with Differential Privacy", arXiv 1607.00133),
    before noise is added to it. It equals that of Opacus with flat clipping: the factor is
    ``min(1, max_norm / (norm + eps))``, with the norm over all parameters together. Where samples are spread
    over ranks, all-reduce the sums, and then add the noise once. `loss`, `parameters`, `batch`, `chunk_size`
    and `randomness`: see the module.

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
    if not max_norm > 0:
        raise OptionError(f"clipped_sum: max_norm={max_norm} is no positive number.")
    total: list[Tensor] = []
    norms = []
    for gradients in _chunks("clipped_sum", loss, parameters, batch, chunk_size, randomness):
        norms.append(_norms(gradients))
        factors = (max_norm / (norms[-1] + eps)).clamp(max=1.0)
        _add(total, [torch.tensordot(factors.to(g.dtype), g, dims=1) for g in gradients])
    return Clipped(pytree.tree_unflatten(total, pytree.tree_structure(parameters)), torch.cat(norms))


def noise_scale(
    loss: Loss, parameters: Any, *batch: Any, chunk_size: int | None = None, randomness: str = "error"
) -> NoiseScale:
    """The "simple" gradient noise scale of one batch.

    That of McCandlish et al., "An Empirical Model of Large-Batch Training" (arXiv 1812.06162), by unbiased
    estimates from the per-sample norms and the norm of their mean. To combine batches, divide the means of
    ``noise`` and ``signal``. `loss`, `parameters`, `batch`, `chunk_size` and `randomness`: see the module.

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
    norms = []
    for gradients in _chunks("noise_scale", loss, parameters, batch, chunk_size, randomness):
        norms.append(_norms(gradients))
        _add(total, [g.sum(0) for g in gradients])
    of_each = torch.cat(norms)
    n = len(of_each)
    if n < 2:
        raise InputError("noise_scale: one sample tells nothing about noise. Pass two at least.")
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
    max_iterations: int = 100,
    tolerance: float = 1e-5,
) -> Tensor:
    """How the loss of each test sample would change if a training sample had more weight.

    Entry (i, j) is the derivative of the loss of test sample i, at the parameters that minimize the
    mean loss of the training samples, with respect to a weight that is added to training sample j
    (Koh and Liang, "Understanding Black-box Predictions via Influence Functions", arXiv 1703.04730):
    ``-g_i · (H + damping)^-1 · g_j``. Below zero, sample j helps; leaving it out changes the loss by
    about minus entry / number of training samples. Neither the Hessian H of the mean training loss nor a
    gradient of a training sample is ever held: the system is solved by conjugate gradients.

    `loss`, `parameters` (a minimum) and `chunk_size` are those of all functions in this module. `train` and
    `test` are batches; the result has shape ``[test, train]``. The loss draws no random numbers. `damping` is
    added to the diagonal of H, which has to become positive definite. Conjugate gradients stop when the
    residual is smaller than `tolerance` times the gradient, and fail after `max_iterations`.

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
    parts = list(_split("influence", train, chunk_size))

    def hessian_times(v: list[Tensor]) -> list[Tensor]:
        product = [damping * x for x in v]
        for part in parts:

            def of_part(leaves: list[Tensor], part: tuple[Any, ...] = part) -> Tensor:
                return vmap(of_sample, (None, *[0] * len(part)))(leaves, *part).sum() / count

            _add(product, jvp(grad(of_part), (leaves,), (v,))[1])
        return product

    def along(v: list[Tensor], *sample: Any) -> Tensor:
        change: Tensor = jvp(lambda leaves: of_sample(leaves, *sample), (leaves,), (v,))[1]
        return change

    rows = []
    with torch.no_grad():
        for sample in _split("influence", test, 1):
            g = grad(of_sample)(leaves, *pytree.tree_map_only(Tensor, lambda x: x[0], sample))
            v = _solve(hessian_times, g, max_iterations, tolerance)
            changes = [vmap(along, (None, *[0] * len(part)))(v, *part) for part in parts]
            rows.append(-torch.cat(changes))
    return torch.stack(rows)


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
                "influence: the Hessian of the training loss, damped, is not positive definite. Pass a "
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


def _chunks(
    name: str, loss: Loss, parameters: Any, batch: tuple[Any, ...], chunk_size: int | None, randomness: str
) -> Iterator[list[Tensor]]:
    """Per-sample gradients of one chunk after the other: tensors of shapes ``[chunk, ...]``."""
    per_sample = vmap(grad(loss), (None, *[0] * len(batch)), randomness=randomness)
    states = world.states(world.random_streams(())) if randomness == "same" else []
    for part in _split(name, batch, chunk_size):
        for stream, state in states:
            stream.set_state(state)
        # Parameters of a module require grad: plain autograd would record it all.
        with torch.no_grad():
            gradients = pytree.tree_leaves(per_sample(parameters, *part))
        yield gradients
        del gradients  # before the next ones are computed


def _count(name: str, batch: tuple[Any, ...]) -> int:
    tensors = tensors_in(batch)
    lengths = {x.shape[0] if x.dim() else 0 for x in tensors}
    if len(lengths) != 1 or 0 in lengths:
        raise InputError(
            f"{name}: each tensor of the batch has the samples along its first dimension, at least one, and "
            f"not: {', '.join(map(describe, tensors)) or 'no tensor at all'}. What all samples share belongs "
            "into the closure of the loss."
        )
    return lengths.pop()


def _split(name: str, batch: tuple[Any, ...], chunk_size: int | None) -> Iterator[tuple[Any, ...]]:
    count = _count(name, batch)
    size = count if chunk_size is None else chunk_size
    if not isinstance(size, int) or size < 1:
        raise OptionError(f"{name}: chunk_size={chunk_size} is no positive number of samples.")
    for start in range(0, count, size):
        samples = slice(start, start + size)
        yield pytree.tree_map_only(Tensor, operator.itemgetter(samples), batch)


def _norms(gradients: list[Tensor]) -> Tensor:
    rows = [g.reshape(len(g), -1) for g in gradients]
    return torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows]).norm(dim=0)


def _dot(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


def _add(total: list[Tensor], terms: list[Tensor]) -> None:
    """total += terms, where nothing at all is zero."""
    total[:] = [x.add_(term) for x, term in zip(total, terms, strict=True)] if total else terms
