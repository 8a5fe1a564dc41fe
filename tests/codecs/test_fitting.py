"""Symmetric or not, as the data's signs are."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxcompact.codecs import Float8, OutlierQuantized, Quantized, fitted


@pytest.mark.parametrize("codec", [Quantized(4), OutlierQuantized()])
def test_fitted_looks_at_the_sign(codec):
    x = jnp.linspace(-1.0, 1.0, 64)
    assert fitted(codec, x).symmetric
    assert not fitted(codec, jnp.abs(x)).symmetric
    assert not fitted(codec, -jnp.abs(x)).symmetric
    assert not fitted(codec, jnp.where(x < 0, x * 9e-4, x)).symmetric
    assert fitted(codec, jnp.where(x < 0, x * 2e-3, x)).symmetric
    assert fitted(dataclasses.replace(codec, symmetric=False), x) == codec
    assert fitted(codec, jnp.zeros(3)).symmetric


def test_fitted_takes_wide_scales_where_a_minimum_is_stored():
    codec = fitted(Quantized(4, scale_bits=8), jnp.ones(3))
    assert codec == Quantized(4, symmetric=False)
    with pytest.raises(ValueError, match="known values"):
        jax.jit(lambda x: fitted(Quantized(4), x) and x)(jnp.ones(3))
    with pytest.raises(ValueError, match="known values"):
        fitted(Quantized(4), [1.0, 2.0])
    with pytest.raises(ValueError, match="no NaN"):
        fitted(Quantized(4), jnp.array([1.0, jnp.nan, 2.0]))
    with pytest.raises(ValueError, match="field symmetric"):
        fitted(Float8(), jnp.ones(3))
