"""remat(op) against op, for every operator that torch itself tests: values, derivatives, streams.

In five minutes the first sample of each in float64, under two transforms. In the run that is exhaustive all
samples in float64 and a few in complex128, under all of them: the first ones, and others spread evenly over
the rest. More of them, or all (which takes a while), in every dtype:

    FUNCCKPT_OP_SAMPLES=20 python -m pytest tests/test_op_db.py
    FUNCCKPT_OP_SAMPLES=all python -m pytest tests/test_op_db.py
"""

import os
import warnings
import zlib

import op_db_support as op_db
import pytest
import torch

from funcckpt import remat

pytestmark = pytest.mark.filterwarnings("ignore")  # some operators are deprecated

CHOSEN = os.environ.get("FUNCCKPT_OP_SAMPLES")

# dtype, and how many samples of each operator (None: all)
RUNS = [(torch.float64, None), (torch.complex128, 2)]


def check(op, runs, transforms=op_db.TRANSFORMS):
    report = op_db.Report()
    for dtype, few in runs:
        limit = few if CHOSEN is None else None if CHOSEN == "all" else int(CHOSEN)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report += op_db.check(op, remat, limit=limit, dtype=dtype, transforms=transforms)
    return report


OPERATORS = pytest.mark.parametrize("op", [pytest.param(op, id=op.full_name) for op in op_db.load()])


def passed(report):
    failures = report.failures
    if failures:
        lines = [f"{len(failures)} failures, {report.passed} passes", *map(str, failures[:8])]
        pytest.fail("\n".join([*lines, failures[0].trace]), pytrace=False)


@OPERATORS
def test_the_first_sample_of_an_operator(op):
    first = zlib.crc32(op.full_name.encode())
    # Each of the seven for two sevenths of the operators.
    few = [op_db.TRANSFORMS[(first + i) % 7] for i in (0, 3)]
    passed(check(op, [(torch.float64, 1)], few))


@pytest.mark.exhaustive
@OPERATORS
def test_remat_of_an_operator_is_the_operator(op):
    report = check(op, RUNS)
    passed(report)
    name = op.full_name
    if name in op_db.MORE_THAN_TORCH:
        assert report.allowed, f"{name} is refused as by torch: take it out of MORE_THAN_TORCH"


@pytest.mark.exhaustive
def test_the_harness_finds_what_it_should():
    """A remat with one flaw each: its values, its derivative, its random stream."""
    by_name = {op.full_name: op for op in op_db.load()}

    def found(name, flawed):
        report = op_db.check(by_name[name], flawed, limit=2)
        return {failure.transform for failure in report.failures}

    every = {transform.__name__ for transform in op_db.TRANSFORMS}
    assert found("sin", lambda f: f) == set()
    assert found("sin", lambda f: lambda x: f(x) + 1) >= {"plain_backward", "forward"}
    assert found("sin", lambda f: lambda x: f(x * 1.001)) == every
    assert found("sin", lambda f: lambda x: f(x.detach())) == every
    assert found("nn.functional.dropout", lambda f: lambda *a, **k: (f(*a, **k), f(*a, **k))[0])


@pytest.mark.exhaustive
def test_plain_torch_refuses_little():
    """Otherwise every comparison above could be one of two errors."""
    report = op_db.Report()
    for op in op_db.load()[::10]:
        report += op_db.check(op, lambda f: f, limit=1)
    assert report.failures == []
    assert report.refused < 0.06 * report.passed
    assert report.left_out <= 2
