"""Data parallel, sharded and tensor parallel models: real processes, started by torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

WORKER = Path(__file__).with_name("worker.py")


@pytest.mark.exhaustive
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo")
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_those_of_one_process(ranks):
    """All cases of the worker; processes take longer to start than a case to run."""
    root = WORKER.parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [*command, str(WORKER)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
