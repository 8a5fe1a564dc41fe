"""Products of products that a norm follows: linear attention, RetNet, Mamba-2.

The products are made again of rounded q, k and v. A norm that was stored would not be
theirs, and a row that the norm has to enlarge much, as the first tokens', would have
gradients many times too large: up to 1.5 off with 8 bits, 0.5 to 168 with 4.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc

pytestmark = pytest.mark.usefixtures("any_rank")

WIDTH, INNER, TOKENS = 64, 32, 64


@pytest.fixture
def any_rank():
    with jax.numpy_rank_promotion("allow"):
        yield


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def rms(y):
    return y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-5)


def linear_attention(p, x):
    q, k, v = (x @ p[name] for name in "qkv")
    return rms(jnp.tril(q @ k.mT) @ v) @ p["o"]


def retention(p, x):
    """Decays by head, and a norm of each head."""
    q, k, v = ((x @ p[name]).reshape(2, TOKENS, 2, -1).swapaxes(1, 2) for name in "qkv")
    ages = jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS)
    ages = ages.astype(jnp.float32)
    decays = jnp.array([0.97, 0.9])[:, None, None] ** jnp.maximum(ages, 0)
    scores = jnp.where(ages >= 0, (q @ k.mT) * decays, 0.0)
    return rms(scores @ v).swapaxes(1, 2).reshape(2, TOKENS, -1) @ p["o"]


def state_space(p, x):
    """Mamba-2 in its quadratic form; its gate comes before its norm."""
    c, b, v = (x @ p[name] for name in "qkv")
    steps = jax.nn.softplus(x @ p["steps"] - 3)
    sums = jnp.cumsum(-steps, 1)
    causal = jnp.tri(TOKENS, dtype=bool)[None, :, :, None]
    decays = jnp.exp(jnp.where(causal, sums[:, :, None] - sums[:, None], -jnp.inf))
    heads = jax.nn.silu(v).reshape(2, TOKENS, 4, -1) * steps[..., None]
    scores = jnp.einsum("btn,bsn->bts", c, b)
    y = jnp.einsum("bts,btsh,bshp->bthp", scores, decays, heads)
    return rms(y.reshape(2, TOKENS, -1) * jax.nn.silu(x @ p["gate"])) @ p["o"]


PARAMS = {
    name: normal(i, WIDTH, INNER) / WIDTH**0.5
    for i, name in enumerate(["q", "k", "v", "gate"])
}
PARAMS |= {"o": normal(4, INNER, WIDTH) / INNER**0.5, "steps": normal(5, WIDTH, 4) / 8}
LAYERS = {
    "linear attention": linear_attention,
    "retention": retention,
    "state space": state_space,
}


@pytest.mark.parametrize("seed", [9, 21])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("policy", ["int8", "int4"])
def test_gradients_are_near(name, policy, seed):
    """The rounding of all tensors, 0.5 and 7 %, which a row's norm may enlarge."""
    layer, x = LAYERS[name], normal(seed, 2, TOKENS, WIDTH)
    wrapped = jc.checkpoint(layer, policy=getattr(jc.policies, policy)(), params=0)

    def gradient(layer):
        return jax.jit(jax.grad(lambda p: jnp.mean((layer(p, x) - x) ** 2)))(PARAMS)

    found, exact = gradient(wrapped), gradient(layer)
    for n in "qkvo":
        off = jnp.linalg.norm(found[n] - exact[n]) / jnp.linalg.norm(exact[n])
        assert off < {"int8": 0.06, "int4": 0.7}[policy], n


def test_a_norm_fits_what_it_normalizes():
    """A product of more terms than are made again is stored, and so is its norm."""
    x = normal(9, 2, TOKENS, WIDTH)
    for terms, norm in ((128, "Recompute()"), (16, "Save()")):
        policy = jc.policies.Compress(
            jc.Quantized(4), scores=jc.Quantized(8, symmetric=False), terms=terms
        )
        said = jc.explain(linear_attention, PARAMS, x, policy=policy, params=0)
        actions = {row.name: row.action for row in said.rows}
        (name,) = (n for n in actions if n.startswith("add."))
        assert actions[name] == norm
        stored = actions["dot_general.4"] == "Quantized(bits=4)"
        assert stored == (norm == "Save()")
        # q and k have the 8 bits of other attention's.
        assert all("bits=8" in actions[f"dot_general.{i}"] for i in (0, 1))
        assert actions["dot_general.2"] == "Quantized(bits=4)"
