"""How each transport merges the copies of a token, unless a run says otherwise."""

from __future__ import annotations

from collections.abc import Mapping

MERGE_OF_TRANSPORT: Mapping[str, str] = {"nccl": "none", "deepep": "node", "m2n_rdma": "node"}
