"""Compiles the C++ operations when they are first used, and keeps the result in torch's extension folder.

The compiler is called directly: `torch.utils.cpp_extension.load` wants ninja, has no time limit, and waits for ever on
the lock of a build that was killed. Here every process builds under a name of its own and then renames, so that any
number of them may build at once. The environment variables CXX, CXXFLAGS and TORCH_EXTENSIONS_DIR are honoured.
"""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

TIME_LIMIT = 300  # seconds for the compiler (5 to 15 are usual)
_FLAGS = "-O3 -march=native -std=c++20 -fPIC -shared -fopenmp -fno-math-errno -fno-trapping-math -w".split()

_logger = logging.getLogger(__name__)


@cache
def load(source: Path) -> str | None:
    """Load the operations of a C++ file (whose headers lie beside it) into `torch.ops`, compiling it if need be.

    Returns:
        `None`, or why they cannot be had and what to install.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"it is written for Linux on x86-64, and this is {sys.platform} on {platform.machine()}"
    try:
        library = _folder() / f"{source.parent.name}-{_fingerprint(source)}.so"
        if not library.exists():
            reason = _compile(source, library)
            if reason:
                return reason
        try:
            torch.ops.load_library(library)
        except OSError:
            library.unlink(missing_ok=True)  # the next process builds it anew
            raise
    except (OSError, ImportError) as error:
        return f"{type(error).__name__}: {error} (TORCH_EXTENSIONS_DIR names the folder where it is built)"
    return None


def _folder() -> Path:
    from torch.utils import cpp_extension

    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(folder, "hf_kvplus")


def _fingerprint(source: Path) -> str:
    """Names a build by all that it depends on: sources, flags, torch, and the processor that `native` means."""
    files = sorted(file for file in source.parent.iterdir() if file.suffix in (".cpp", ".h"))
    said = [*(file.read_bytes() for file in files), *(flag.encode() for flag in _flags())]
    said += [torch.__version__.encode(), str(torch.version.git_version).encode(), _processor()]
    return hashlib.sha256(b"\0".join(said)).hexdigest()[:16]


def _flags() -> list[str]:
    return _FLAGS + shlex.split(os.environ.get("CXXFLAGS", ""))


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith(b"flags")), b"")


def _compile(source: Path, library: Path) -> str | None:
    from torch.utils import cpp_extension

    compiler = shlex.split(cpp_extension.get_cxx_compiler())
    if shutil.which(compiler[0]) is None:
        return f"there is no C++ compiler ({compiler[0]!r}): install one (apt install g++, conda install gxx)"
    library.parent.mkdir(parents=True, exist_ok=True)
    _logger.warning("Compiling the CPU kernel %s, once for this torch version (about 15 seconds).", source.parent.name)
    handle, draft = tempfile.mkstemp(dir=library.parent, prefix=f"{library.stem}-", suffix=".part")
    os.close(handle)
    command = [*compiler, *_flags(), str(source), "-o", draft, "-ltorch_cpu", "-lc10"]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIME_LIMIT)
        os.replace(draft, library)
    except subprocess.TimeoutExpired:
        return f"{compiler[0]} did not finish within {TIME_LIMIT} seconds"
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line.lower()] or [error.stderr[-500:]]
        return f"{compiler[0]} failed (a newer g++ or clang++ may help; CXX names the one to use): {lines[0]}"
    finally:
        Path(draft).unlink(missing_ok=True)
    return None
