from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from checkpoint import CheckpointError, Checkpoints


class Run(NamedTuple):
    step: jax.Array
    params: Any
    opt_state: Any


def make_run(width: int = 64) -> Run:
    keys = jax.random.split(jax.random.key(0))
    params = {
        "layer": {"kernel": jax.random.normal(keys[0], (width, 64))},
        "half": jax.random.normal(keys[1], (65,)).astype(jnp.bfloat16),
        "key": jnp.arange(2, dtype=jnp.uint32),
        "empty": jnp.zeros((0, 3), jnp.int32),
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())
    return Run(jnp.int32(7), params, tx.init({"layer": params["layer"]}))


def abstract_of(state: Run) -> Run:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_equal(a: Run, b: Run) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.sharding) == (y.dtype, y.sharding)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 4 and 8, and the state that both hold."""
    state = make_run()
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        checkpoints.save(4, state)
        checkpoints.save(8, state)
    return checkpoints, state


def data_file(checkpoints: Checkpoints, step: int):
    """The largest file: it holds the arrays."""
    files = (checkpoints.folder / str(step)).rglob("*")
    return max((f for f in files if f.is_file()), key=lambda f: f.stat().st_size)


def test_the_state_comes_back_bit_by_bit(saved):
    checkpoints, state = saved
    checkpoints.check(8, abstract_of(state))
    assert_equal(checkpoints.load(8, abstract_of(state)), state)


def test_a_replicated_state_comes_back_replicated(tmp_path):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    state = jax.device_put(make_run(), NamedSharding(mesh, P()))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    assert_equal(checkpoints.load(1, abstract_of(state)), state)


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    @partial(jax.jit, donate_argnums=0)
    def add_one(x):
        return x + 1

    x = add_one(jnp.zeros((1000, 1000)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": x})
        for _ in range(10):
            x = add_one(x)
        jax.block_until_ready(x)
    loaded = checkpoints.load(1, abstract_of({"x": x}))["x"]
    assert (loaded.min(), loaded.max()) == (1, 1)


def test_only_the_newest_are_kept(tmp_path):
    state = make_run()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (2, 9, 10):
            checkpoints.save(step, state)
    assert checkpoints.steps() == [9, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "9"]


@pytest.mark.parametrize("damage", ["truncated", "removed", "one bit"])
def test_a_damaged_checkpoint_is_refused_and_the_good_one_named(saved, damage):
    checkpoints, state = saved
    file = data_file(checkpoints, 8)
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "removed":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    fault = "missing" if damage == "removed" else "changed"
    good = checkpoints.folder / "4"
    with pytest.raises(CheckpointError, match=fault) as error:
        checkpoints.check(8, abstract_of(state))
    assert file.name in str(error.value)
    assert f"the previous good one is step 4, {good}" in str(error.value)
    assert "--resume 4" in str(error.value)
    checkpoints.check(4, abstract_of(state))


def test_the_good_one_that_is_named_is_good(saved):
    checkpoints, state = saved
    for step in (4, 8):
        data_file(checkpoints, step).unlink()
    with pytest.raises(CheckpointError, match="there is no good one before it"):
        checkpoints.check(8, abstract_of(state))


@pytest.mark.parametrize("seal", [None, "", "[1]", '{"leaves": 3}'])
def test_a_checkpoint_without_a_valid_seal_is_refused(saved, seal):
    checkpoints, state = saved
    file = checkpoints.folder / "8" / "seal.json"
    file.unlink() if seal is None else file.write_text(seal)
    with pytest.raises(CheckpointError, match=r"seal\.json.*step 4"):
        checkpoints.check(8, abstract_of(state))


def test_a_checkpoint_of_another_state_is_refused(saved):
    checkpoints, _ = saved
    wider = abstract_of(make_run(width=128))
    told = r"params/layer/kernel is float32\[64, 64\] in it, float32\[128, 64\] in this"
    with pytest.raises(CheckpointError, match=told):
        checkpoints.check(8, wider)
    fewer = abstract_of(make_run())
    del fewer.params["half"]
    with pytest.raises(CheckpointError, match="half is bfloat16.*absent in this run"):
        checkpoints.check(8, fewer)


def test_a_checkpoint_under_another_number_or_of_another_run_is_refused(tmp_path):
    state = make_run()
    with Checkpoints(tmp_path / "checkpoints", keep=9) as checkpoints:
        for step, sealed in ((4, {"run": 1}), (6, {}), (8, {"run": 2})):
            checkpoints.save(step, state, **sealed)
    abstract = abstract_of(state)
    checkpoints.check(4, abstract, run=1)
    checkpoints.check(6, abstract, run=1)  # of an older version: its seal says none
    with pytest.raises(CheckpointError, match="8 is of another run.*--resume 6"):
        checkpoints.check(8, abstract, run=1)
    (checkpoints.folder / "4").rename(checkpoints.folder / "12")
    with pytest.raises(CheckpointError, match=r"12 is of another step by its .*, 4;"):
        checkpoints.check(12, abstract, run=1)


def test_a_file_in_place_of_a_checkpoint(saved):
    checkpoints, state = saved
    (checkpoints.folder / "9").write_text("")
    with pytest.raises(CheckpointError, match="9 is a file and must be .*--resume 8"):
        checkpoints.check(9, abstract_of(state))
    checkpoints.drop_after(8)
    assert checkpoints.steps() == [4, 8]


def test_a_number_that_is_written_otherwise_is_none_of_them(saved):
    checkpoints, _ = saved
    (checkpoints.folder / "0014").mkdir()
    assert checkpoints.steps() == [4, 8]


def test_a_step_that_is_not_there_is_refused_with_those_that_are(saved):
    checkpoints, state = saved
    with pytest.raises(CheckpointError, match=r"does not exist \(steps there: 4, 8\)"):
        checkpoints.check(6, abstract_of(state))


def test_going_back_drops_what_came_later_and_what_is_unfinished(saved):
    checkpoints, state = saved
    (checkpoints.folder / "12.unfinished" / "state").mkdir(parents=True)
    assert checkpoints.steps() == [4, 8]
    checkpoints.drop_after(4)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["4"]


def test_fewer_are_kept_before_the_next_is_written(saved):
    """On a full disk there may be no room for one more than before."""
    checkpoints, _ = saved
    with Checkpoints(checkpoints.folder, keep=1) as fewer:
        fewer.drop_after(8)
        assert fewer.steps() == [8]


def test_a_failed_write_is_raised(tmp_path, monkeypatch):
    state = make_run()
    with Checkpoints(tmp_path) as checkpoints:

        def full(*_):
            raise OSError("No space left on device")

        monkeypatch.setattr("checkpoint._files", full)
        checkpoints.save(1, state)
        with pytest.raises(CheckpointError, match="1 could not be written: No space"):
            checkpoints.save(2, state)
    assert checkpoints.steps() == []
