"""Steps whose bytes can be counted by hand."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

S = jax.ShapeDtypeStruct
F32, BF16 = jnp.float32, jnp.bfloat16
TX = optax.adam(1e-3)


def double(x):
    return x + x


def sgd(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def train_step(params, opt_state, x):
    def loss(params):
        h = jax.nn.gelu(x @ params["up"]) @ params["down"]
        with jax.named_scope("logits"):
            logits = (h @ params["head"]).astype(F32)
            return jax.nn.logsumexp(logits, axis=-1).mean()

    updates, opt_state = TX.update(jax.grad(loss)(params), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


PARAMS = {
    "up": S((256, 1024), F32),
    "down": S((1024, 256), F32),
    "head": S((256, 8192), F32),
}
ARGS = PARAMS, jax.eval_shape(TX.init, PARAMS), S((2048, 256), F32)


def sharded(count, axis_type=AxisType.Auto):
    mesh = AbstractMesh((count,), ("data",), axis_types=(axis_type,))
    return S(
        (4096, 4096), F32, sharding=NamedSharding(mesh, PartitionSpec("data", None))
    )
