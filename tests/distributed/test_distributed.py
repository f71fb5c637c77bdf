"""Data parallel, sharded and tensor parallel models: real processes, started by torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

WORKER = Path(__file__).with_name("worker.py")
CASES = [
    "ddp",
    "fsdp",
    "fsdp_first",
    "tensor_parallel",
    "functional_call_of_distributed_tensors",
    "per_sample",
]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo")
@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case, ranks):
    root = WORKER.parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [*command, str(WORKER), case], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
