"""The order of a backward pass, as its jaxpr has it."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal, jaxprs_in_params

import jaxcompact as jc
from jaxcompact.graph import graph_of
from jaxcompact.kernels import choice
from jaxcompact.memory import compiler
from jaxcompact.memory.collectives import collectives
from jaxcompact.transform.schedule import Later, Schedule
from tests.draws import normal

N = 64
INT4 = jc.Quantized(4)
small = partial(normal, scale=1 / 8)
W, X = (small(0, N, N), small(1, N, N)), small(2, 4, N)


def gated(w, x):
    """A product reads the hidden values; after it, the gradient reads their factors."""
    a = x @ w[0]
    return (jnp.tanh(a) * a) @ w[1]


def backward(fun, policy, w=W, x=X, params=None):
    """The operations of the gradient with respect to the parameters."""
    wrapped = jc.checkpoint(fun, policy=policy, params=params)
    jaxpr = jax.make_jaxpr(jax.grad(lambda w: wrapped(w, x).sum().astype("float32")))(w)
    (call,) = (e for e in jaxpr.eqns if e.params.get("name") == "_jaxcompact_backward")
    (inner,) = jaxprs_in_params(call.params)
    return inner.eqns


def places(eqns, name):
    """Where operations of this name are, or calls of a function of this name."""
    names = [(eqn.primitive.name, eqn.params.get("name")) for eqn in eqns]
    return [i for i, found in enumerate(names) if name in found]


def made_of(eqns, i):
    """All operations that the i-th one waits for."""
    maker = {v: k for k, eqn in enumerate(eqns) for v in eqn.outvars}
    needed, found = [i], set()
    while needed:
        read = eqns[needed.pop()].invars
        new = {maker[v] for v in read if not isinstance(v, Literal) and v in maker}
        needed.extend(new - found)
        found |= new
    return found


def doubled(w, x):
    """What a product gives the gradient is read once, before the hidden values are."""
    a = x @ w[0]
    return (2 * (jnp.tanh(a) * a)) @ w[1]


@pytest.mark.parametrize("fun", [gated, doubled])
def test_arithmetic_is_done_again_after_a_product(fun):
    """Kept meanwhile, the decoded tensor would be alive beside the product."""
    eqns = backward(fun, jc.policies.uniform(INT4))
    weights, hidden, _ = places(eqns, "dot_general")
    first, second = places(eqns, "_decode")
    assert first < weights < hidden < second
    assert len(places(eqns, "tanh")) == 2
    assert hidden in made_of(eqns, second)


def masked(w, x):
    """What a product gives the gradient meets a mask before the hidden values."""
    return jax.nn.relu(jnp.sin(x @ w[0])) @ w[1]


@pytest.mark.parametrize("fun", [gated, masked])
def test_a_product_is_made_again_when_it_is_read(fun):
    """Of the inputs, nothing else would keep XLA from making it at once."""
    policy = jc.Policy({"dot_general.0": jc.Recompute()}, default=jc.Save())
    eqns = backward(fun, policy, params=0)
    _, hidden, again, _ = places(eqns, "dot_general")
    assert hidden in made_of(eqns, again)


@pytest.mark.parametrize(
    "codec", [jc.Chain(jc.Hadamard(), INT4), jc.OutlierQuantized(), jc.Offload()]
)
def test_what_takes_more_than_arithmetic_is_done_once(codec):
    eqns = backward(gated, jc.policies.uniform(codec))
    assert len(places(eqns, "_decode")) == 1


def test_what_a_product_reads_is_decoded_once():
    """It is in memory then; here for the gradients of three matrices."""
    w = small(3, 3, N, N)

    def fun(w, x):
        x = jnp.sin(x @ w[0])
        return jnp.sin(jnp.sin(x @ w[1]) * (x @ w[2]))

    policy = jc.Policy({"sin.0": INT4}, default=jc.Save())
    assert len(places(backward(fun, policy, w), "_decode")) == 1


@jax.custom_vjp
def attended(x):
    return jnp.tanh(x @ x.T) @ x


attended.defvjp(
    lambda x: ((y := attended(x)), y), lambda y, dy: ((dy @ y.reshape(N, -1)) @ y,)
)


def test_what_two_products_read_is_decoded_once():
    """As attention's output, of the next weights' gradient and by attention's own rule,
    however it is named there; between the two is one more product."""
    eqns = backward(
        lambda w, x: attended(x @ w[0]) @ w[1],
        jc.Policy({"custom_vjp_call.0": INT4}, default=jc.Save()),
    )
    assert len(places(eqns, "_decode")) == 1


def test_a_layer_is_decoded_after_the_layers_behind_it():
    w = small(4, 6, N, N)

    def layers(w, x):
        for w_nn in w:
            x = jnp.tanh(x @ w_nn)
        return x

    eqns = backward(layers, jc.policies.uniform(INT4), w)
    decodes, products = places(eqns, "_decode"), places(eqns, "dot_general")
    waits = [len(made_of(eqns, i) & set(products)) for i in decodes]
    assert waits == sorted(waits) and set(waits) == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weight_gradients_do_not_wait(dtype):
    """Also where they are cast to the parameters' dtype last."""
    eqns = backward(
        lambda w, x: gated([a.astype(dtype) for a in w], x.astype(dtype)),
        jc.policies.uniform(INT4),
    )
    weights, hidden, _ = places(eqns, "dot_general")
    assert weights in made_of(eqns, hidden)


def test_weight_gradients_do_not_wait_where_weights_are_shared():
    """What shares them among devices follows at once: XLA sends parts alone then."""
    mesh = jax.make_mesh((4,), ("d",))

    def gathered(w, x):
        return gated([jax.sharding.reshard(a, jax.P()) for a in w], x)

    with jax.set_mesh(mesh):
        w = [jax.device_put(a, jax.P(None, "d")) for a in W]
        x = jax.device_put(X, jax.P("d"))
        eqns = backward(gathered, jc.policies.uniform(INT4), w, x)
    weights, hidden, other = places(eqns, "dot_general")
    for i in (weights, other):
        turned, shared = eqns[i + 1 : i + 3]
        assert turned.primitive.name == "transpose"
        assert shared.primitive.name == "reshard"
        assert shared.invars == turned.outvars
    assert weights + 2 in made_of(eqns, hidden)


def attention_over_edges(w, x):
    """As a GAT's layers: each edge's weight is of what lies at its two ends."""
    senders, receivers = jnp.arange(64 * N) % len(x), jnp.arange(64 * N) // 64
    for w_nn in w:
        x = x @ w_nn
        ends = jnp.concatenate([x[senders], x[receivers]], -1)
        weights = jax.nn.sigmoid(ends @ w_nn[0].repeat(2))
        x = jnp.zeros_like(x).at[receivers].add(weights[:, None] * x[senders])
    return x


def test_what_is_gathered_again_waits_for_the_layers_behind_it():
    """Though all that it is made of is there from the beginning."""
    w, x = small(5, 3, N, N), small(6, N, N)
    policy = jc.Policy({}, default=jc.Save())
    eqns = backward(attention_over_edges, policy, w, x)
    ends = [i for i in places(eqns, "concatenate") if eqns[i].outvars[0].aval.ndim == 2]
    scattered = places(eqns, "scatter-add")
    waits = [len(made_of(eqns, i) & set(scattered)) for i in ends]
    assert len(ends) == 3 and waits[0] < waits[1] < waits[2]


def test_probabilities_are_read_before_their_gradient():
    """By the product that makes v's gradient: then they are gone. Beside the scores'
    gradient they would be a fourth array as large."""

    def attention(w, x):
        q, k, v = (x @ w_nn for w_nn in w)
        probabilities = jax.nn.softmax(q @ k.T / 8)
        return jnp.tanh(probabilities @ v)

    w, x = small(7, 3, N, N), small(8, 4 * N, N)
    eqns = backward(attention, jc.policies.int8(), w, x, params=0)
    shapes = {i: eqns[i].outvars[0].aval.shape for i in places(eqns, "dot_general")}
    (exp,) = places(eqns, "exp")
    large = [i for i, shape in shapes.items() if shape == (4 * N, 4 * N)]
    (gradient,) = (i for i in large if i not in made_of(eqns, exp))
    behind = [i for i in shapes if exp in made_of(eqns, i)]
    of_v, *others = (i for i in behind if {*shapes[i]} == {N, 4 * N})  # in their order
    assert len(others) == 2  # of q and k
    assert all({gradient, of_v} <= made_of(eqns, i) for i in others)


def test_what_is_an_output_itself_is_made():
    jaxpr = jax.make_jaxpr(lambda a, ct: (a, 2 * ct, 3.0))(1.0, 1.0)
    later = Later([jnp.float32(5)], lambda leaves: leaves[0] + 1, light=True)
    outs = Schedule(graph_of(jaxpr), [later, jnp.float32(4)], cts=1).run()
    assert [float(x) for x in outs] == [6, 8, 3]


@pytest.mark.slow
def test_a_sum_over_cards_is_sent_once():
    """As without a checkpoint: gate's and up's gradients of x are added first."""
    auto = jax.sharding.AxisType.Auto
    mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(auto,))

    def array(*shape, spec):
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    x = array(256, 128, spec=jax.P())
    gate = up = array(128, 512, spec=jax.P(None, "d"))
    down = array(512, 128, spec=jax.P("d"))

    def fun(gate, up, down, x):
        x = jnp.sin(x)
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    def sent(fun):
        grad = jax.grad(lambda *args: jnp.sin(fun(*args)).sum(), (0, 1, 2, 3))
        card = jc.memory.devices()["h200"]
        lowered = compiler.lower(jax.jit(grad), (gate, up, down, x), card, None, None)
        return collectives(compiler.compile_lowered(lowered, card).text)

    twice = 2 * 4 * x.size  # forward and backward
    assert sent(fun) == {"all-reduce": twice}
    wrapped = jc.checkpoint(fun, policy=jc.policies.int4(), params=(0, 1, 2))
    assert sent(wrapped) == {"all-reduce": twice}
    with choice.using("mosaic_gpu"):
        assert sent(wrapped) == {"all-reduce": twice}


def test_what_only_its_encoding_reads_is_not_held():
    """A relu's slope is packed where it is found, in one operation."""

    def fun(w, x):
        return jax.nn.relu(x @ w[0]) @ w[1]

    wrapped = jc.checkpoint(fun, policy=jc.policies.int4(), params=0)
    jaxpr = jax.make_jaxpr(lambda w, x: jax.vjp(wrapped, w, x)[1])(W, X)
    (call,) = (e for e in jaxpr.eqns if e.params.get("name") == "_jaxcompact_forward")
    (inner,) = jaxprs_in_params(call.params)
    read = {v for e in inner.eqns for v in e.invars if not isinstance(v, Literal)}
    ties = [inner.eqns[i].outvars for i in places(inner.eqns, "optimization_barrier")]
    ties = [outs for outs in ties if outs[0].aval.shape]  # no broadcast's
    *early, last = ties  # which holds all that is returned
    assert len(early) == 2  # x, and x @ w[0]
    assert all(outs[0] in read for outs in early)
    assert [v.aval.size for v in last if v.aval.dtype == "uint8"][-1] == 4 * N // 8


def test_a_barrier_holds_only_what_is_read_behind_it():
    """A compressed layer ties x and its sketch; of what is decoded that is all."""

    def fun(w, x):
        a = jnp.tanh(x @ w[0])
        sketch = a[:, : N // 2] * a[:, N // 2 :]
        _, sketch = jax.lax.optimization_barrier((a, sketch))
        return sketch @ w[1][: N // 2]

    eqns = backward(fun, jc.policies.uniform(INT4))
    read = {v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)}
    held = [eqns[i].outvars for i in places(eqns, "optimization_barrier")]
    assert held and all(v in read for outs in held for v in outs if v.aval.ndim == 2)
