"""Plans of steps whose arguments several devices share."""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.planner.problem import CODECS, problem_of
from jaxcompact.planner.scan import scan_step
from tests.draws import normal
from tests.errors import relative
from tests.planner.blocks import FF, LAYERS, PARAMS, D, X, block, of


@pytest.mark.slow
def test_arguments_lie_on_several_devices(tmp_path, monkeypatch):
    """Of what an optimizer knows, a fourth is here, and seen to fit at once."""
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=types)
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    moments = jax.ShapeDtypeStruct((2**14, 2**14), jnp.bfloat16, sharding=sharding)
    scanned = scan_step(block, (PARAMS, X), LAYERS, 0)

    def make_step(policy):
        step, args = scanned(policy)
        return lambda state, *args: (step(*args), state), (moments, *args)

    lines = []
    found = jc.plan_step(
        make_step, layers=LAYERS, budget="800MiB", progress=lines.append
    )
    assert found.seconds == 0 and len(lines) == 1  # 512 MiB, and 457 beside them


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_block_in_a_shard_map(kind, tmp_path, monkeypatch):
    """Whose weights two devices share; what rounding does to it is measured."""
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))
    types = (jax.sharding.AxisType[kind],)
    mesh = jax.make_mesh((2,), ("d",), axis_types=types)
    params = {
        "up": normal(0, 64, 256) / 8,
        "down": normal(1, 256, 64) / 16,
    }
    specs = {"up": jax.P(None, "d"), "down": jax.P("d")}

    def shared(w, x):
        return x + jax.lax.psum(jax.nn.gelu(x @ w["up"]) @ w["down"], "d")

    def make_step(policy):
        wrapped = jc.checkpoint(shared, policy=policy, params=0)
        mapped = jax.shard_map(wrapped, in_specs=(specs, jax.P()), out_specs=jax.P())
        return jax.grad(lambda w, x: jnp.sum(jnp.sin(3 * mapped(w, x)))), args

    with jax.set_mesh(mesh):
        place = {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}
        x = normal(2, 128, 64)
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P()))
        args = jax.device_put(params, place), x
        found = jc.plan_step(make_step, budget="1GiB")
        assert found.actions["dot_general.0"] == jc.Save()
        if kind == "Explicit":  # jax does not take there what measures it
            return
        effects = jc.sensitivity(make_step)
        exact, rounded = (
            jax.jit(make_step(policy)[0])(*args)
            for policy in (jc.Policy(), jc.policies.int4())
        )
        actions = dict.fromkeys(effects.effects, jc.Quantized(4))
        # Measured by one probe of a sum of squares.
        assert relative(rounded, exact) == pytest.approx(
            effects.error(actions), rel=0.3
        )


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_weights_lie_on_several_devices(kind):
    """Each of two has half of the layers' weights, and of their gradients."""
    types = (jax.sharding.AxisType[kind],)
    mesh = jax.sharding.AbstractMesh((2,), ("tensor",), axis_types=types)

    def shared(x, *spec):
        place = jax.NamedSharding(mesh, jax.P(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    def of_types(params, x):
        place = jax.typeof(x).sharding
        y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        h = jax.nn.silu(y @ params["gate"]) * (y @ params["up"])
        return x + jnp.matmul(h, params["down"], out_sharding=place)

    params = {name: shared(PARAMS[name], None, "tensor") for name in ("gate", "up")}
    params["down"] = shared(PARAMS["down"], "tensor")
    fun = of_types if kind == "Explicit" else block
    [step, args] = scan_step(fun, (params, shared(X)), LAYERS, 0)(jc.Policy())
    weights = LAYERS * 3 * 2 * D * FF
    found = jc.memory.peak(step, *args)
    assert found.breakdown["inputs"] == weights // 2 + 2 * X.size
    pointers = 3 * 8
    assert found.breakdown["outputs"] == weights // 2 + pointers


@pytest.mark.parametrize("count", [4, 64])
def test_values_lie_on_several_devices(count):
    """Whose types say so: the problem is that of one device's part."""
    card = jc.memory.devices()["h200"]

    def asked(*args):
        make_step = scan_step(block, args, LAYERS, 0)
        return problem_of(make_step, card, 0.2, None, CODECS)[1]

    types = (jax.sharding.AxisType.Explicit,)
    mesh = jax.sharding.AbstractMesh((count,), ("data",), axis_types=types)

    def shared(x, *spec):
        place = jax.NamedSharding(mesh, jax.P(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    one = asked(PARAMS, X)
    parts = asked(jax.tree.map(shared, PARAMS), shared(of(count * 8192, D), "data"))
    assert [i.options for i in parts.items] == [i.options for i in one.items]
    assert [*parts.runs.values()] == [*one.runs.values()] and sum(one.runs.values()) > 0
    assert parts.stages.cotangents == one.stages.cotangents
    assert [*parts.stages.sizes.values()] == [*one.stages.sizes.values()]
