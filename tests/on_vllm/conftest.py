"""Fixtures of the tests on real vLLM: `make test-vllm`. Without vLLM nothing here is collected.

The folder is not called vllm: `tests` is on the path, where it would hide the package.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVICES = "test_services_on_vllm.py"
"""Runs in the project's own environment and starts verifiers in the other one."""

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
    if "TEST_VLLM_PYTHON" in os.environ:
        collect_ignore_glob = [name.name for name in Path(__file__).parent.glob("test_*.py") if name.name != SERVICES]
else:
    collect_ignore_glob = [SERVICES]
    sys.path.append(str(Path(__file__).parents[1] / "unit"))
    ranks = int(os.environ.get("TEST_VLLM_RANKS", "1"))
    # One rank computes in this process, where faults are planted.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(ranks))))
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from draftwire.engine.model_loading import load_target
    from draftwire.runtime.settings import ModelSettings
    from draftwire_verifier.engine import TargetEngine
    from draftwire_verifier.vllm.vllm_engine import LoadedVllm
    from on_vllm.models import CONTEXT_LENGTH, ENGINE, load_shared, save_target

    @pytest.fixture(scope="session")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return save_target(tmp_path_factory.mktemp("target"))

    @pytest.fixture(scope="session")
    def loaded(folder: Path) -> Iterator[LoadedVllm]:
        """vLLM in this process, which all tests share: it can be started only once."""
        loaded = load_shared(folder)
        yield loaded
        loaded.engine.stop()

    @pytest.fixture
    def vllm(loaded: LoadedVllm) -> Iterator[LoadedVllm]:
        """The same, without sessions before and after."""
        engine = loaded.engine
        assert not engine._names
        engine.core.reset_prefix_cache()
        yield loaded
        for key in list(engine._names):
            engine.forget(key)
        assert not engine._scheduler.requests

    @pytest.fixture(scope="session")
    def own_model(folder: Path):
        return load_target(ModelSettings(str(folder), dtype="float32"), ENGINE).model

    @pytest.fixture
    def own(own_model) -> Iterator[TargetEngine]:
        engine = TargetEngine(own_model, CONTEXT_LENGTH)
        yield engine
        for key in list(engine._sequences):
            engine.forget(key)
