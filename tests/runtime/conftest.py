"""One pool of processes per world size for the whole session: a process start costs more than most cases."""

from collections.abc import Iterator

import pytest
import torch

from disagmoe.plan.verify import verify
from disagmoe.runtime.launch import Pool
from tests.runtime.training_cases import Case


class Pools:
    """Pools by world size, started when first asked for, replaced when a test has ended one."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, world_size: int) -> Pool:
        if world_size not in self._pools or not self._pools[world_size].is_open:
            self._pools.pop(world_size, None)
            self._pools[world_size] = Pool(world_size, group_timeout_s=20.0)
        return self._pools[world_size]

    def close(self) -> None:
        for pool in reversed(self._pools.values()):  # ranks of a later pool hold copies of an earlier one's pipes
            pool.close()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    torch.set_num_threads(1)
    verify(Case().plan)  # loads the compiled loops before the forks: ranks inherit them instead of loading their own
    started = Pools()
    yield started
    started.close()
