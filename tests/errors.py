"""How far gradients are from what they should be."""

import jax
import numpy as np


def relative(a, b) -> float:
    """The norm of what two pytrees differ by, of the second's, in float64."""
    a, b = (np.concatenate([_flat(x) for x in jax.tree.leaves(t)]) for t in (a, b))
    assert b.any()
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def _flat(x):
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    return np.ravel(np.asarray(x).astype(wide))
