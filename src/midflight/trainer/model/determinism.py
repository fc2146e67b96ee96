"""Steps whose sums are added in the same order each time."""

import os

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def compute_in_one_order() -> None:
    """Makes torch use only operations that give the same bits each time, for the rest of this
    process. It must be called before the first product of matrices on a GPU. An operation that has
    no such form raises `RuntimeError` with its name.

    cuBLAS adds in one order only if its workspace is fixed, which it reads from the environment.
    """
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
