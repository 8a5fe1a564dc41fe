"""Training as pure functions: the first state, one step, the loss of a batch.

A batch is what the model's ``loss`` takes, with an axis of microbatches before it: of
text (a, b, t) tokens, a microbatches of b sequences.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import methods
from configs import GPT2Config, ModelConfig, RobertaConfig
from dropout import noise_of
from gpt2 import Gpt2, Text
from jaxcompact.kernels.explicit import laid_as
from llama import Llama
from methods import Method
from roberta import Roberta, masked

MODEL = {ModelConfig: Llama, GPT2Config: Gpt2, RobertaConfig: Roberta}


class State(NamedTuple):
    """All that a run needs to go on; the batch of a step is a function of the step."""

    step: jax.Array  # shape=(), int32: updates made
    params: Any  # the plain model's, in nested dicts
    opt_state: Any


class Training:
    """How one method trains one model. Every method is pure and made to be jitted.

    ``schedule`` maps the number of updates made to the learning rate; ``seed`` makes
    initial weights, projections and dropout; ``attention`` as in `Llama`; ``policy``
    takes the place of what the method's ``checkpoint`` names, such as a plan.

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
        cfg: ModelConfig | GPT2Config | RobertaConfig,
        method: Method,
        schedule: optax.Schedule,
        *,
        weight_decay: float = 0.0,
        clip: float = 1.0,
        seed: int = 0,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        attention: str | Callable | None = None,
        policy: Any = None,
    ):
        self.cfg, self.method, self.schedule = cfg, method, schedule
        self.seed = seed
        self.dtype = jnp.dtype(dtype)
        self.policy = method.checkpoint_policy if policy is None else policy
        self.make_model = lambda: MODEL[type(cfg)](
            cfg,
            dtype=dtype,
            param_dtype=param_dtype,
            checkpoint=self.policy,
            attention=attention,
            rngs=nnx.Rngs(seed),
        )
        model = nnx.eval_shape(self.make_model)
        self.graphdef = nnx.graphdef(model)
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
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        self.abstract: State = jax.eval_shape(self.init, params)  # shapes and dtypes

    def init(self, params: Any = None) -> State:
        """The first state, with these parameters or with new ones."""
        if params is None:
            params = nnx.to_pure_dict(nnx.state(self.make_model(), nnx.Param))
        return State(jnp.zeros((), jnp.int32), params, self.optimizer.init(params))

    def model(self, params: Any) -> nnx.Module:
        return nnx.merge(self.graphdef, params)

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """As the model has it: of the next token, of masked ones, of examples."""
        return self.model(params).loss(batch)

    def weighed_loss(self, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """It, and how much it counts among those of other batches as large.

        Masked words are not as many in each, and the loss is a mean over them.
        """
        return self.loss(params, batch), self._weight(batch)

    def _weight(self, batch: Any) -> jax.Array:
        if not self._guesses_words:
            return jnp.float32(1)
        _, targets_bt = masked(self.cfg, batch)
        return (targets_bt >= 0).sum().astype(jnp.float32)

    @property
    def _guesses_words(self) -> bool:
        return isinstance(self.cfg, RobertaConfig) and not self.cfg.labels

    def gradients(self, state: State, batches: Any) -> tuple[jax.Array, Any]:
        """Loss and gradients, the means over the microbatches, summed in float32.

        Means over masked words count by how many these are: as in the whole batch.
        The microbatches are the first axis of every leaf. Compact's gradients are
        sketches, and are summed as such. A GPT-2's hidden states drop out, as a
        function of (seed, step, microbatch); in `loss` itself they do not.
        """
        if isinstance(self.cfg, GPT2Config):
            batches = Text(batches, noise_of(self.seed, state.step, len(batches)))
        count = len(jax.tree.leaves(batches)[0])
        first = jax.tree.map(lambda x: x[0], batches)
        if count == 1:
            return self.value_and_grad(state.params, first, step=state.step)

        def of(batch):
            weight = self._weight(batch)
            found = self.value_and_grad(state.params, batch, step=state.step)
            return weight, jax.tree.map(lambda x: weight * x.astype(jnp.float32), found)

        def add(total, batch):
            return jax.tree.map(jnp.add, total, of(batch)), None

        zeros = jax.tree.map(
            lambda x: laid_as(jnp.zeros(x.shape, jnp.float32), x),
            jax.eval_shape(of, first),
        )
        (weight, total), _ = jax.lax.scan(add, zeros, batches)
        # Nothing may be masked; a count is known when this is compiled.
        weight = jnp.maximum(weight, 1) if self._guesses_words else count
        return jax.tree.map(lambda x: x / weight, total)

    def step(self, state: State, batches: Any) -> tuple[State, dict[str, jax.Array]]:
        """One update, and what is to be said of it.

        With a loss or a gradient that is not finite it is none: the state stays as it
        was, moments, schedule and projection too.
        """
        loss, grads = self.gradients(state, batches)
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
