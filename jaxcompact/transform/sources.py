"""Where what the backward pass reads comes from."""

from dataclasses import dataclass

from jaxcompact.graph import Op


@dataclass(frozen=True)
class Residual:
    """The k-th array that a block (a `jax.custom_vjp` op, a loop) keeps for itself."""

    op: Op
    k: int


@dataclass(frozen=True)
class Slope:
    """The derivative of an elementwise function, by the value that it makes."""

    value: int


@dataclass(frozen=True)
class Choice:
    """Which of its operands' entries an operation took."""

    op: Op


Source = int | Residual | Slope | Choice  # an int is a value of the graph
