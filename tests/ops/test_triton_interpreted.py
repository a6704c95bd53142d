"""Every Triton kernel against its reference without a GPU: numpy runs them, in a process that imports triton so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)  # there, the `test` extra installs it: no skipping

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("interpreted_*.py")))
def test_under_the_interpreter(file):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", str(HERE / file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
