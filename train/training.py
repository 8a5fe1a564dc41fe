"""Training as pure functions: the first state, one step, the loss of a batch.

Shapes in names: a microbatches, b sequences, t tokens (one more than are predicted).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import methods
from configs import ModelConfig
from llama import Llama
from loss import next_token_loss
from methods import Method


class State(NamedTuple):
    """All that a run needs to go on; the batch of a step is a function of the step."""

    step: jax.Array  # shape=(), int32: updates made
    params: Any  # the plain model's, in nested dicts
    opt_state: Any


class Training:
    """How one method trains one model. Every method is pure and made to be jitted.

    ``schedule`` maps the number of updates made to the learning rate; ``seed`` makes
    initial weights and projections; ``attention`` as in `Llama`; ``policy`` takes the
    place of what the method's ``checkpoint`` names, such as a plan.

    Raises ValueError where model and method do not fit, a rank above a width.

    >>> from configs import ModelConfig
    >>> cfg = ModelConfig(vocab_size=256, width=32, ff=64, layers=2, heads=4)
    >>> training = Training(cfg, Method("compact"), optax.constant_schedule(1e-3))
    >>> loss = training.loss(training.init().params, jnp.zeros((2, 9), jnp.int32))
    >>> loss.shape, bool(abs(loss - jnp.log(256)) < 0.2)
    ((), True)
    """

    def __init__(
        self,
        cfg: ModelConfig,
        method: Method,
        schedule: optax.Schedule,
        *,
        weight_decay: float = 0.0,
        clip: float = 1.0,
        seed: int = 0,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        attention: str | None = None,
        policy: Any = None,
    ):
        self.cfg, self.method, self.schedule = cfg, method, schedule
        self.dtype = jnp.dtype(dtype)
        self.make_model = lambda: Llama(
            cfg,
            dtype=dtype,
            param_dtype=param_dtype,
            checkpoint=method.checkpoint_policy if policy is None else policy,
            attention=attention,
            rngs=nnx.Rngs(seed),
        )
        self.graphdef = nnx.graphdef(nnx.eval_shape(self.make_model))
        self.subspace = method.subspace(seed)
        self.optimizer = methods.optimizer(
            method,
            self.subspace,
            schedule,
            width=cfg.width,
            weight_decay=weight_decay,
            clip=clip,
        )
        self.value_and_grad = methods.value_and_grad(self.loss, self.subspace)
        self.abstract: State = jax.eval_shape(self.init)  # shapes and dtypes

    def init(self) -> State:
        params = nnx.to_pure_dict(nnx.state(self.make_model(), nnx.Param))
        return State(jnp.zeros((), jnp.int32), params, self.optimizer.init(params))

    def loss(self, params: Any, tokens_bt: jax.Array) -> jax.Array:
        """Mean loss of every token but the first, given those before it."""
        model = nnx.merge(self.graphdef, params)
        hidden_btd = model.hidden(tokens_bt[:, :-1])
        return next_token_loss(hidden_btd, model.output_kernel(), tokens_bt[:, 1:])

    def gradients(self, state: State, tokens_abt: jax.Array) -> tuple[jax.Array, Any]:
        """Loss and gradients, the means over the microbatches, summed in float32.

        Compact's are sketches, and are summed as such.
        """
        if len(tokens_abt) == 1:
            return self.value_and_grad(state.params, tokens_abt[0], step=state.step)

        def of(tokens_bt):
            return self.value_and_grad(state.params, tokens_bt, step=state.step)

        def add(total, tokens_bt):
            return jax.tree.map(
                lambda s, x: s + x.astype(jnp.float32), total, of(tokens_bt)
            ), None

        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(of, tokens_abt[0])
        )
        total, _ = jax.lax.scan(add, zeros, tokens_abt)
        return jax.tree.map(lambda x: x / len(tokens_abt), total)

    def step(
        self, state: State, tokens_abt: jax.Array
    ) -> tuple[State, dict[str, jax.Array]]:
        """One update, and what is to be said of it.

        With a loss or a gradient that is not finite it is none: the state stays as it
        was, moments, schedule and projection too.
        """
        loss, grads = self.gradients(state, tokens_abt)
        norm = optax.tree.norm(grads)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        updated = State(state.step + 1, params, opt_state)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        after = jax.tree.map(lambda x, y: jnp.where(finite, x, y), updated, state)
        measured = {
            "loss": loss,
            "gradient_norm": norm,
            "learning_rate": jnp.asarray(self.schedule(state.step), jnp.float32),
        }
        if self.subspace is not None:
            measured["projection"] = self.subspace.generation(state.step)
        return after, measured


def all_finite(state: State) -> jax.Array:
    """Whether no parameter and no moment is NaN or infinite."""
    finite = [
        jnp.isfinite(x).all()
        for x in jax.tree.leaves(state)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return jnp.stack(finite).all()


def warmup_cosine(peak: float, steps: int, warmup: float) -> optax.Schedule:
    """A linear rise over the fraction ``warmup`` of the steps, a cosine to 10 %."""
    rise = min(round(warmup * steps), steps - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / max(rise, 1),
        peak_value=peak,
        warmup_steps=rise,
        decay_steps=steps,
        end_value=0.1 * peak,
    )
