"""Graph networks in plain JAX, GCN and GAT of jraph, GraphSAGE; the papers of Cora."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from model_tasks import Batch, Task


def gcn(data: Path, seed: int) -> Task:
    """Kipf and Welling's two layers and settings."""

    graph, labels, parts = _cora(data)
    keys = jax.random.split(jax.random.key(seed))
    params = [_glorot(keys[0], 1433, 16), _glorot(keys[1], 16, 7)]
    optimizer = optax.adam(1e-2)
    return _on_cora(gcn_logits, params, graph, labels, parts, optimizer, decay=5e-4)


def gcn_logits(params, graph, keys=None, wrap=lambda layer: layer):
    """A matrix for each layer, each of them wrapped; dropout with keys."""
    import jraph

    @wrap
    def layer(w, x, graph, key):
        x = x if key is None else _dropout(key, x)
        convolve = jraph.GraphConvolution(lambda x: x @ w, add_self_edges=True)
        return convolve(graph._replace(nodes=x)).nodes

    x, graph = graph.nodes, graph._replace(nodes=None)
    for i, w in enumerate(params):
        x = layer(
            w, jax.nn.relu(x) if i else x, graph, None if keys is None else keys[i]
        )
    return x


def graphsage(data: Path, seed: int) -> Task:
    """Hamilton et al.: means over all neighbours, beside the node; GCN's settings."""

    graph, labels, parts = _cora(data)
    keys = jax.random.split(jax.random.key(seed))
    params = [_glorot(keys[0], 2 * 1433, 16), _glorot(keys[1], 2 * 16, 7)]
    optimizer = optax.adam(1e-2)
    return _on_cora(sage_logits, params, graph, labels, parts, optimizer, decay=5e-4)


def sage_logits(params, graph, keys=None):
    """A matrix for each layer; dropout with keys; all but the last end normalized."""
    import jraph

    x = graph.nodes
    for i, w in enumerate(params):
        x = x if keys is None else _dropout(keys[i], x)
        around = jraph.segment_mean(x[graph.senders], graph.receivers, len(x))
        x = jnp.concatenate([x, around], -1) @ w
        if i + 1 < len(params):
            x = jax.nn.relu(x)
            x /= jnp.sqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-12)
    return x


def gat(data: Path, seed: int) -> Task:
    """Velickovic et al.: 8 heads of 8, then one; dropout of inputs."""

    graph, labels, parts = _cora(data)
    n = len(labels)
    loops = np.arange(n, dtype=np.int32)
    graph = graph._replace(
        senders=jnp.concatenate([graph.senders, loops]),
        receivers=jnp.concatenate([graph.receivers, loops]),
    )
    keys = jax.random.split(jax.random.key(seed), 4)
    params = [
        {"w": _glorot(keys[0], 1433, 64), "a": _glorot(keys[1], 16, 1)},
        {"w": _glorot(keys[2], 64, 7), "a": _glorot(keys[3], 14, 1)},
    ]

    logits = partial(gat_logits, heads=(8, 1))
    optimizer = optax.adam(5e-3)
    return _on_cora(logits, params, graph, labels, parts, optimizer, decay=5e-4)


def gat_logits(params, graph, keys=None, wrap=lambda layer: layer, *, heads):
    """As `gcn_logits`; graphs have a loop at each node."""
    import jraph

    def layer(p, x, graph, key, heads, last):
        n = len(x)
        x = x if key is None else _dropout(key, x)
        attend = jraph.GAT(
            lambda x: (x @ p["w"]).reshape(n, heads, -1),
            lambda s, r, _: jax.nn.leaky_relu(
                jnp.concatenate([s, r], -1) @ p["a"], 0.2
            ),
            lambda x: x.reshape(n, -1) if last else jax.nn.elu(x.reshape(n, -1)),
        )
        return attend(graph._replace(nodes=x)).nodes

    x, graph = graph.nodes, graph._replace(nodes=None)
    for i, (p, h) in enumerate(zip(params, heads, strict=True)):
        one = wrap(partial(layer, heads=h, last=i + 1 == len(heads)))
        x = one(p, x, graph, None if keys is None else keys[i])
    return x


def _glorot(key, n, m):
    return jax.nn.initializers.glorot_uniform()(key, (n, m))


def _dropout(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2.0 * x, 0.0)


def _cora(data: Path):
    import jraph

    with np.load(data / "cora" / "cora.npz") as file:
        z = dict(file)
    n = len(z["labels"])
    nodes = np.zeros(tuple(z["x_shape"]), np.float32)
    rows = np.repeat(np.arange(n), np.diff(z["x_indptr"]))
    nodes[rows, z["x_indices"]] = z["x_data"]
    nodes /= np.maximum(nodes.sum(1, keepdims=True), 1.0)
    one, other = z["edges"]
    graph = jraph.GraphsTuple(
        nodes=jnp.asarray(nodes),
        edges=None,
        senders=jnp.asarray(np.concatenate([one, other])),
        receivers=jnp.asarray(np.concatenate([other, one])),
        globals=None,
        n_node=jnp.array([n]),
        n_edge=jnp.array([2 * len(one)]),
    )
    return graph, z["labels"], (z["train_idx"], z["test_idx"])


def _on_cora(logits, params, graph, labels, parts, optimizer, decay) -> Task:
    def masked(index) -> Batch:
        weights = np.zeros(len(labels), np.float32)
        weights[index] = 1.0
        return graph, np.maximum(labels, 0), weights

    def apply(params, state, graph, key):
        return logits(params, graph, jax.random.split(key, len(params))), state

    train, test = map(masked, parts)
    return Task(
        apply,
        lambda params, state, graph: logits(params, graph),
        params,
        {},
        batch=lambda step: train,
        held_out=[test],
        steps=200,
        optimizer=optax.chain(optax.add_decayed_weights(decay), optimizer),
    )
