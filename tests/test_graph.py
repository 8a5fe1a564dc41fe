"""What a graph says of its values."""

import jax
import jax.numpy as jnp

from jaxcompact.graph import graph_of


def test_what_makes_and_reads_a_value():
    graph = graph_of(jax.make_jaxpr(lambda x: x * x + jnp.sin(x))(1.0))
    (x,), (out,) = graph.inputs, graph.outputs
    assert [op.kind for op in graph.readers[x]] == ["mul", "sin"]  # each once
    assert x not in graph.made_by
    assert graph.made_by[out].kind == "add" and not graph.readers[out]
