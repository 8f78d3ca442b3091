"""The doctor's checks of what is installed. Each imports what it looks at, so that a broken package is a finding."""

import contextlib
import importlib
import importlib.metadata
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from lazytrain.recipes.findings import FAIL, OK, WARN, Finding

OLDEST_PYTHON = (3, 11)
BFLOAT16_CAPABILITY = (8, 0)
NVIDIA_SMI_TIMEOUT_S = 20
GIB = 2**30


def check_python() -> Iterator[Finding]:
    """Tell Python's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield Finding("Python", FAIL, version, "install Python 3.11 or newer and make a new environment")
    else:
        yield Finding("Python", OK, f"{version} in {sys.prefix}")


def check_torch() -> Iterator[Finding]:
    """Tell torch's version, or why it does not load."""
    torch = _load("torch")
    if isinstance(torch, str):
        yield Finding("torch", FAIL, torch, "pip install torch, see https://pytorch.org/get-started for your GPU")
        return
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs only"
    yield Finding("torch", OK, f"{torch.__version__}, built {build}, {torch.get_num_threads()} threads")


def check_gpu() -> Iterator[Finding]:
    """Tell each GPU with its capability and memory, or that there is none."""
    torch = _load("torch")
    if isinstance(torch, str):
        return
    if not torch.cuda.is_available():
        if has_nvidia_gpu() and torch.version.cuda is None:
            text, remedy = "there is an NVIDIA GPU, but torch is built for CPUs only", "install torch's CUDA build"
            yield Finding("GPU", FAIL, text, f"{remedy}: https://pytorch.org/get-started")
        elif has_nvidia_gpu():
            text = "there is an NVIDIA GPU, but torch can't use it"
            yield Finding("GPU", FAIL, text, "update the driver to what torch's CUDA version needs; see nvidia-smi")
        else:
            yield Finding(
                "GPU", WARN, "none: a run trains on the CPU", "use a machine with an NVIDIA GPU for real models"
            )
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{about.name}, capability {about.major}.{about.minor}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        if (about.major, about.minor) < BFLOAT16_CAPABILITY:
            remedy = "none: below 8.0 there is no bfloat16 in hardware, and a run takes float32, which is slower"
            yield Finding(f"GPU {index}", WARN, text, remedy)
        elif free < total / 2:
            yield Finding(f"GPU {index}", WARN, text, "another program holds most of it: nvidia-smi shows which")
        else:
            yield Finding(f"GPU {index}", OK, text)


def check_driver() -> Iterator[Finding]:
    """Tell the version of NVIDIA's driver."""
    version = _driver_version()
    if version is not None:
        yield Finding("driver", OK, version)
    elif has_nvidia_gpu():
        yield Finding("driver", WARN, "its version can't be read", "run nvidia-smi; reinstall the driver if it fails")
    else:
        yield Finding("driver", OK, "no NVIDIA GPU, so none is needed")


def check_triton() -> Iterator[Finding]:
    """Tell whether Triton's kernels can run."""
    triton, torch = _load("triton"), _load("torch")
    has_gpu = not isinstance(torch, str) and torch.cuda.is_available()
    if not isinstance(triton, str):
        yield Finding("Triton", OK, triton.__version__)
    elif has_gpu:
        yield Finding("Triton", FAIL, triton, "pip install triton: updates on the GPU are its kernels")
    else:
        yield Finding("Triton", WARN, triton, "pip install triton; without a GPU the plain references are used")


def check_compiler() -> Iterator[Finding]:
    """Build the CPU's optimizer, as a run would at its first step."""
    try:
        native = importlib.import_module("lazytrain.kernels.native")
    except Exception as error:  # torch is missing or broken: that check has said so
        yield Finding("C++ compiler", WARN, f"not tried: {_first_line(error)}", "mend torch first")
        return
    try:
        compiler = " ".join(native.find_compiler())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            library = native.load()
        problem = "" if library is not None else _first_line(caught[0].message) if caught else "an earlier build failed"
    except native.NativeBuildError as error:
        compiler, problem = "", str(error)
    if problem:
        remedy = "apt-get install g++, or set CXX: without it updates on the CPU are about 30 times slower"
        yield Finding("C++ compiler", WARN, problem, remedy)
    else:
        yield Finding("C++ compiler", OK, f"{compiler}; the optimizer's operator builds and loads")


def check_scip() -> Iterator[Finding]:
    """Tell whether the planner has its solver: pyscipopt imports, and CVXPY knows it."""
    pyscipopt, cvxpy = _load("pyscipopt"), _load("cvxpy")
    remedy = "pip install 'pyscipopt>=5.5' 'cvxpy>=1.7'"
    if isinstance(cvxpy, str):
        yield Finding("CVXPY", FAIL, cvxpy, remedy)
        return
    solvers = importlib.import_module("lazytrain.solver.backends").list_solvers()
    if not isinstance(pyscipopt, str) and "scip" in solvers:
        versions = f"pyscipopt {_version('pyscipopt')}, CVXPY {cvxpy.__version__}"
        yield Finding("SCIP", OK, f"{versions}, which knows it")
        return
    problem = pyscipopt if isinstance(pyscipopt, str) else f"CVXPY {cvxpy.__version__} does not know SCIP"
    fallback = "HiGHS plans instead" if "highs" in solvers else "only heuristics plan"
    yield Finding("SCIP", WARN, f"{problem}; {fallback}", remedy)


def has_nvidia_gpu() -> bool:
    """Return whether the kernel shows an NVIDIA GPU, whatever torch thinks."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*")) or any(Path("/dev").glob("nvidia[0-9]*"))


def _driver_version() -> str | None:
    path = shutil.which("nvidia-smi")
    if path is not None:
        command = [path, "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False)
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout.split("\n")[0].strip()
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().split("\n")[0].strip()
    return None


def _load(name: str) -> ModuleType | str:
    """Return a module, or why it can't be imported. A broken package may raise anything."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{error.name or name} is not installed"
    except Exception as error:
        return f"{name} does not load: {_first_line(error)}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
