"""One thread per process and the same hypothesis examples every time: tests run side by side and must repeat.

What the user of this checkout has in conf.local (`make calibrate` writes there) is not seen.
"""

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest  # noqa: E402 - threads are set before numpy loads
from hypothesis import HealthCheck, settings  # noqa: E402

from disagmoe.specs import fields  # noqa: E402

settings.register_profile(
    "suite", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _no_settings_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(fields, "OWN_CONF", tmp_path_factory.getbasetemp() / "conf.local")
