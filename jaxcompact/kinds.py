"""What operations cost, by the name of their primitive."""

from collections.abc import Collection

from jaxcompact.graph import Graph, Op, behind, graph_of

ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma
    div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag
    integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne neg
    nextafter not or polygamma polynomial population_count pow real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    one_minus_square stop_gradient sub tan tanh xor zeta name optimization_barrier pvary
    bitcast_convert_type""".split()
)
LAYOUT = frozenset(
    """broadcast_in_dim concatenate expand_dims iota pad reshape rev slice split squeeze
    transpose sharding_constraint reshard dynamic_slice dynamic_update_slice gather
    scatter mesh_cast tile stack unstack empty""".split()
)
CUTS = frozenset("split unstack".split())  # into all of their parts
ADDITIONS = frozenset("add add_any sub".split())
REDUCTIONS = frozenset(
    """reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
    scatter-max scatter-min square_sum""".split()
)
# Made again of decoded terms, their sums fit together; encoded each, they would not.
SCANS = frozenset("cumlogsumexp cumprod cumsum".split())
ORDERS = frozenset("approx_top_k cummax cummin sort top_k".split())
RANDOM = frozenset(
    """random_bits random_clone random_fold_in random_seed random_split random_unwrap
    random_wrap threefry2x32 create_token debug_callback debug_print""".split()
)
CHEAP = ELEMENTWISE | LAYOUT | REDUCTIONS | SCANS | RANDOM
# As cheap as what is inside.
HOLDERS = frozenset(
    "custom_jvp_call custom_vjp_call cond remat2 checkpoint run_state".split()
)
NONLINEAR = frozenset(
    """abs acos asin asinh atan atanh cbrt clamp cos cosh custom_jvp_call erf erf_inv
    erfc exp exp2 expm1 log log1p log2 logistic max min pow rsqrt sign sin sinh sqrt tan
    tanh""".split()
)
EXPONENTIALS = frozenset("cumlogsumexp exp exp2".split())
SOLVES = frozenset(  # the last is Lineax's
    "custom_linear_solve triangular_solve tridiagonal_solve linear_solve".split()
)
LINEAR_ALGEBRA = SOLVES | frozenset(
    """cholesky cholesky_update eig eigh hessenberg householder_product lu ormqr qr
    schur svd tridiagonal""".split()
)
# Differentiated as a whole, from what they keep for themselves.
BLOCKS = LINEAR_ALGEBRA | frozenset(
    """custom_vjp_call custom_jvp_call scan while cond remat2 checkpoint
    shard_map""".split()
)
_DECIDES = frozenset(
    """abs ceil clamp custom_jvp_call custom_vjp_call eq floor ge gt is_finite le lt max
    min ne reduce_max reduce_min rem round select_n sign""".split()
)
_ALIAS = frozenset(
    """name reshape transpose squeeze expand_dims copy copy_p
    optimization_barrier""".split()
)


def expensive(op: Op) -> bool:
    """Whether an operation is worth storing the result of."""
    if op.kind in HOLDERS:
        return any(
            expensive(inner) for body in op.jaxprs for inner in graph_of(body).ops
        )
    return op.kind not in CHEAP


def is_block(op: Op) -> bool:
    """Whether it is differentiated as a whole, from what it keeps for itself: what it
    decides if it is cheap to run again."""
    decides = op.kind in ("checkpoint", "cond", "remat2") and is_any(op, _DECIDES)
    return op.kind in BLOCKS and (decides or expensive(op))


def is_entered(op: Op) -> bool:
    """Whether what it runs is checkpointed inside: a loop, a branch, what devices run
    by themselves, if that is no attention kernel alone, and what a `jax.checkpoint`
    runs again, if that is cheap."""
    if op.kind in ("checkpoint", "remat2"):
        return not expensive(op)
    if op.kind == "shard_map":
        (body,) = map(graph_of, op.jaxprs)
        return [o.kind for o in body.ops if expensive(o)] != ["custom_vjp_call"]
    return op.kind in ("cond", "scan")


def is_of_expensive(value: int, graph: Graph) -> bool:
    """Whether it is made by an expensive operation, or cheaply of what one makes."""
    ops = map(graph.made_by.get, behind([value], graph))
    return any(op is not None and expensive(op) for op in ops)


def renames(op: Op) -> bool:
    """Whether it gives the same entries in another shape or under another name."""
    if op.kind == "broadcast_in_dim":
        return op.eqn.invars[0].aval.size == op.eqn.outvars[0].aval.size
    return op.kind in _ALIAS


def rules_algebra(op: Op) -> bool:
    """Whether it has a rule of its own, and linear algebra inside, as pinv: terms of
    the rule cancel, if what it read and what it made belong together."""
    ruled = op.kind in ("custom_jvp_call", "custom_vjp_call")
    return ruled and is_any(op, LINEAR_ALGEBRA)


def is_any(op: Op, kinds: Collection[str]) -> bool:
    """Whether it is one of these kinds, or one of them is inside it."""
    bodies = map(graph_of, op.jaxprs)
    return op.kind in kinds or any(
        is_any(o, kinds) for body in bodies for o in body.ops
    )
