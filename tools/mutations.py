"""Breaks lines that much depends on, one at a time, and runs the test that must see it.

    python tools/mutations.py

In a copy of the checkout, with the Python that runs this (a `make test` has installed
what it needs). Prints a line for each mutation; exits with 1 if one survived, or if
the tests fail before anything is broken.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "docs")


class Mutation(NamedTuple):
    what: str
    path: str
    old: str  # stands there once
    new: str
    test: str


MUTATIONS = [
    Mutation(
        "steps of a function with a rule of its own are made again",
        "jaxcompact/decisions.py",
        "return any(isinstance(v, int) and v in found for v in body.outputs) or any(",
        "return any(",
        "tests/test_decisions.py::test_the_gradient_follows_the_forwards_decisions",
    ),
    Mutation(
        "steps that are learned are as others",
        "jaxcompact/exponents.py",
        "if by and not by.issuperset(maker.reads):",
        "if False:",
        "tests/test_exponents.py::test_the_gradient_of_a_step_that_is_learned",
    ),
    Mutation(
        "scores of powers of two have the bits of values",
        "jaxcompact/kinds.py",
        'EXPONENTIALS = frozenset("exp exp2".split())',
        'EXPONENTIALS = frozenset("exp".split())',
        "tests/test_exponents.py::test_what_scores_are_made_again_of",
    ),
    Mutation(
        "a budget is refused before the next smallest plans were tried",
        "jaxcompact/planner/candidates.py",
        "        yield from self.next\n",
        "",
        "tests/planner/test_steps.py::test_which_plans_are_compiled[the next]",
    ),
    Mutation(
        "rounded numbers are where their bounds are, whoever reads them",
        "jaxcompact/integers.py",
        "while at not in integers and len(graph.readers[at]) == 1:",
        "while at not in integers and graph.readers[at]:",
        "tests/test_integers.py::test_what_a_bound_is_read_beside_is_not_in_its_place",
    ),
    Mutation(
        "a narrower float moves no bound",
        "jaxcompact/integers.py",
        "return number and all(holds(aval.dtype, x, x) for x in ends)",
        "return number",
        "tests/test_integers.py::test_ranges",
    ),
    Mutation(
        "rounded numbers are stored as they are",
        "jaxcompact/tensors.py",
        'fields = {"discrete": discrete, **self.found.span(value)}',
        'fields = {"discrete": discrete}',
        "tests/test_integers.py::test_quantized_activations_are_stored_in_their_bits",
    ),
    Mutation(
        "what is made of what is stored is needed all the same",
        "jaxcompact/planner/lifetimes.py",
        "(found.get(v, ()) for v in op.outs if v not in apart)",
        "(found.get(v, ()) for v in op.outs)",
        "tests/planner/test_candidates.py"
        "::test_blocks_of_a_network_that_is_planned_whole",
    ),
    Mutation(
        "the sum of a block's relu can't be stored",
        "jaxcompact/planner/items.py",
        "if function and not tensor.discrete and len(large) > 1:",
        "if False:",
        "tests/planner/test_candidates.py"
        "::test_blocks_of_a_network_that_is_planned_whole",
    ),
    Mutation(
        "noise costs nothing",
        "jaxcompact/planner/milp.py",
        "price = _PRICE * sum(problem.runs.values()) / noise",
        "price = 0.0",
        "tests/planner/test_milp.py::test_of_plans_as_fast_the_more_exact",
    ),
    Mutation(
        "a product is made again before what it waits for",
        "jaxcompact/schedule.py",
        "if again and _is_large(op):",
        "if False:",
        "tests/test_schedule.py::test_a_product_is_made_again_when_it_is_read",
    ),
    Mutation(
        "phases that are multiplied are as others",
        "jaxcompact/exponents.py",
        "return [v for v in op.reads if _is_fast(v, graph)]",
        "return []",
        "tests/test_exponents.py::test_gradients_are_near[4-turns]",
    ),
    Mutation(
        "what loops round is no part of a plan's error",
        "jaxcompact/planner/sensitivity.py",
        "if plan.inside:",
        "if False:",
        "tests/planner/test_loops.py::test_a_plans_error_is_also_that_of_its_loops",
    ),
    Mutation(
        "loops are rounded by a guess, where they can be measured",
        "jaxcompact/planner/problem.py",
        "if inside and found is not None and found.measure:",
        "if False:",
        "tests/planner/test_loops.py::test_a_plans_error_is_also_that_of_its_loops",
    ),
    Mutation(
        "loops are rounded where there is room",
        "jaxcompact/planner/trials.py",
        "return (found.cost, -k) if found else (math.inf, k)",
        "return 0.0, k",
        "tests/planner/test_loops.py::test_loops_are_exact_where_there_is_room",
    ),
    Mutation(
        "what moves no gradient counts as bits",
        "jaxcompact/planner/effects.py",
        "return moving or dict(self.effects)",
        "return dict(self.effects)",
        "tests/planner/test_bits.py::test_what_moves_nothing_is_not_counted",
    ),
    Mutation(
        "the first moment of another name stays in the old coordinates",
        "jaxcompact/optimizers.py",
        '"ema", "exp_avg"',
        '"ema"',
        "tests/optimizers/test_inner.py::test_first_moments_of_any_name_are_transferred",
    ),
    Mutation(
        "a spectrum of which corners are read is stored whole",
        "jaxcompact/candidates.py",
        "less = lesser or 2 * entries(slices) <= whole",
        "less = lesser",
        "tests/test_parts.py::test_slices_of_no_more_than_half_are_stored_alone",
    ),
    Mutation(
        "complex queries have groups along another axis than the tokens",
        "jaxcompact/tensors.py",
        "scores += len(tensor.shape) - graph.avals[value].ndim",
        "pass",
        "tests/test_reals.py::test_scores_have_groups_of_tokens",
    ),
    Mutation(
        "a complex cotangent is not conjugated where an error is measured",
        "jaxcompact/planner/probing.py",
        "as_reals(ct.conj())",
        "as_reals(ct)",
        "tests/test_reals.py::test_errors_that_add_up_are_measured",
    ),
    Mutation(
        "tensors share their rounding noise",
        "jaxcompact/stores.py",
        "any(graph.inputs[-1] in op.reads for op in graph.ops)",
        "False",
        "tests/checkpoint/test_gradients.py::test_tensors_share_no_noise",
    ),
    Mutation(
        "a state blown up is saved over the good one",
        "train/runs.py",
        "if last or stop or not log.skipped:",
        "if True:",
        "tests/train/pretraining/test_stops.py::"
        "test_batches_without_a_finite_loss_are_skipped_also_after_a_resume",
    ),
    Mutation(
        "a block's outputs that nothing reads get zeros for cotangents",
        "jaxcompact/backward.py",
        "moved = [_none(ct) for",
        "moved = [ad.instantiate_zeros(_none(ct)) for",
        "tests/checkpoint/test_unread.py::test_a_slope_that_is_infinite",
    ),
    Mutation(
        "a log that a loop carries is differentiated",
        "jaxcompact/pullbacks.py",
        "partial_eval.dce_rules[_linear] = _cut",
        "",
        "tests/checkpoint/test_unread.py::test_a_slope_that_is_infinite",
    ),
    Mutation(
        "a step's rule reads a cotangent that there is not",
        "jaxcompact/backward.py",
        "if cheap or whole:",
        "if whole:",
        "tests/test_rules.py::test_a_step_with_another_output_that_nothing_reads",
    ),
    Mutation(
        "a rule divides by decoded values",
        "jaxcompact/recording.py",
        "needed = keeps_decisions(*of) or divides(*of, backward, cts)",
        "needed = keeps_decisions(*of)",
        "tests/test_rules.py::test_rules_divide_by_exact_values",
    ),
    Mutation(
        "a bias inside a function whose derivative is stored has no gradient",
        "jaxcompact/functions.py",
        "learned = any(v in fixed and v in differentiated for v in op.reads)",
        "learned = False",
        "tests/test_derivatives.py::"
        "test_a_derivative_leaves_the_gradients_of_biases_and_scales",
    ),
    Mutation(
        "a rule on relu's result decides its slope anew",
        "jaxcompact/recording.py",
        "return ruled and op.outs[0] not in self.slopes and not op.eqn.effects",
        "return ruled and not (op.outs[0] in self.tensors.found and "
        "self.tensors.found[op.outs[0]].step) and not op.eqn.effects",
        "tests/test_decisions.py::test_a_rule_for_what_relu_leaves_keeps_its_mask",
    ),
    Mutation(
        "a policy as default does not know of rules that round",
        "jaxcompact/policy.py",
        "if found[0] != Recompute():",
        "if True:",
        "tests/test_policy.py::test_a_policy_as_default_knows_that_a_rule_rounds",
    ),
    Mutation(
        "a rule reads what is not stored, as one of its outputs is not read",
        "jaxcompact/backward.py",
        "if cheap or whole:",
        "if cheap:",
        "tests/checkpoint/test_unread.py::test_a_rule_that_asks_what_is_read",
    ),
    Mutation(
        "what JAX can't differentiate is an error though nothing reads it",
        "jaxcompact/traced.py",
        "if not still and not refused:",
        "if True:",
        "tests/checkpoint/test_unread.py::test_what_has_no_gradient",
    ),
    Mutation(
        "modules that are checkpointed are compiled each time they are called",
        "jaxcompact/linen.py",
        "pure.place_of, pure.once = _place_of, True",
        "pure.place_of = _place_of",
        "tests/test_linen.py::test_outside_of_jit_it_runs_op_by_op",
    ),
    Mutation(
        "what is decoded behind arithmetic is decoded early",
        "jaxcompact/schedule.py",
        "if not expensive(op) and self._reads_last(op):",
        "if False:",
        "tests/test_schedule.py::test_arithmetic_is_done_again_after_a_product",
    ),
    Mutation(
        "octaves that are written one after another are rounded",
        "jaxcompact/phases.py",
        "if len({*each.values()}) > 1:",
        "if not each:",
        "tests/test_phases.py::test_gradients_are_near",
    ),
    Mutation(
        "groups are shorter than they need to be",
        "jaxcompact/codecs/quantized.py",
        "return -(-size // group) * (group * self.bits + levels)",
        "return -(-size // group) * group",
        "tests/codecs/test_quantized.py::test_rows_are_in_groups_that_take_the_least",
    ),
    Mutation(
        "a block's smallest plan is any of its size",
        "jaxcompact/planner/milp.py",
        "slow = solve(problem, nbytes=slow.nbytes, noise=noise) or slow",
        "pass",
        "tests/planner/test_milp.py::test_it_is_the_best_of_all_choices",
    ),
    Mutation(
        "Mamba's input is stored as dt, B and C are",
        "jaxcompact/candidates.py",
        "lesser = 0 < 2 * entries(read.intersection(slices)) <= whole",
        "lesser = False",
        "tests/test_parts.py::test_what_exponentials_read_a_part_of_is_stored_in_parts",
    ),
    Mutation(
        "q, k and v in one are stored in parts",
        "jaxcompact/candidates.py",
        "less = lesser or 2 * entries(slices) <= whole",
        "less = True",
        "tests/test_parts.py::test_what_is_stored_whole",
    ),
    Mutation(
        "the last group of tokens is filled up",
        "jaxcompact/codecs/quantized.py",
        "some = longest, *range(longest // 8 * 8, 0, -8)",
        "some = (longest,)",
        "tests/codecs/test_quantized.py::test_tokens_are_in_groups_that_are_alike",
    ),
    Mutation(
        "channels share groups before a batch norm",
        "jaxcompact/rows.py",
        "if prod(shape[i] for i in axes) >= _LEAST:",
        "if False:",
        "tests/test_rows.py::test_sizes_that_a_norm_takes_away_change_nothing",
    ),
    Mutation(
        "samples of other sizes share moments before an instance norm",
        "jaxcompact/compress.py",
        "standardized=every or row",
        "standardized=True",
        "tests/test_rows.py::test_samples_may_differ_in_size",
    ),
    Mutation(
        "what a mask leaves out of a norm is in its channels' moments",
        "jaxcompact/rows.py",
        "if not own and graph.made_by.keys().isdisjoint(of):",
        "if False:",
        "tests/test_rows.py::test_what_a_mask_leaves_out_may_be_of_any_size",
    ),
    Mutation(
        "a number that a rule keeps is an array where it is traced again",
        "jaxcompact/rules.py",
        "if isinstance(v, jax.core.Tracer) or jnp.ndim(v)]",
        "]",
        "tests/test_rules.py::test_what_is_kept_of_the_forward_pass_decides",
    ),
    Mutation(
        "deviations are of what is far from zero",
        "jaxcompact/codecs/moments.py",
        "deviation = jnp.sqrt(jnp.maximum(square - jnp.square(mean), least))",
        "deviation = jnp.sqrt(jnp.maximum(square, least))",
        "tests/codecs/test_moments.py::test_standardized_channels_are_as_others",
    ),
    Mutation(
        "scores of a table of positions are stored",
        "jaxcompact/tensors.py",
        "again = op in self.tables or is_product(op, self.fixed, self.known)",
        "again = is_product(op, self.fixed, self.known)",
        "tests/test_exponents.py::test_scores_of_a_table",
    ),
    Mutation(
        "a query has 4 bits whose scores of a table are made again",
        "jaxcompact/scores.py",
        "product = is_product(op, fixed, known) or op in tables",
        "product = is_product(op, fixed, known)",
        "tests/test_exponents.py::test_scores_of_a_table",
    ),
    Mutation(
        "a complex number is a decision",
        "jaxcompact/decisions.py",
        "(not is_inexact(aval) or op.kind in _ROUNDS)",
        "(not is_float(aval) or op.kind in _ROUNDS)",
        "tests/test_decisions.py::test_a_complex_number_is_no_decision",
    ),
    Mutation(
        "a first layer is another form",
        "jaxcompact/planner/block.py",
        "plans = [traced.plan(masks[_inputs(traced)]) for traced in every]",
        "plans = [traced.plan(next(iter(traced.plans))) for traced in every]",
        "tests/planner/test_steps.py::test_modules_in_a_loop",
    ),
    Mutation(
        "weights that are trained weigh a loss",
        "jaxcompact/differences.py",
        "return op.kind in _WEIGHS and not moving.issuperset(op.reads)",
        "return op.kind in _WEIGHS",
        "tests/test_differences.py::test_other_sums_are_no_differences",
    ),
    Mutation(
        "weighted squares are no loss",
        "jaxcompact/differences.py",
        "op.kind in _SUMS_UP or op.kind in LAYOUT or _weighs(op, moving):",
        "op.kind in _SUMS_UP or op.kind in LAYOUT:",
        "tests/test_differences.py::test_the_gradient_of_a_small_difference",
    ),
    Mutation(
        "a place in a cell is rounded where the cell is an integer",
        "jaxcompact/decisions.py",
        "if not (op.kind in _ROUNDS or to_integer) or",
        "if op.kind not in _ROUNDS or",
        "tests/test_steep.py::test_gradients_are_near",
    ),
    Mutation(
        "what a gradient's function returns besides is a part of the gradient",
        "jaxcompact/planner/sensitivity.py",
        "            _require_gradient(found, args, jaxpr)\n",
        "            pass\n",
        "tests/planner/test_sensitivity.py::test_the_gradient_alone_is_measured",
    ),
    Mutation(
        "errors of rows that are alike count each by itself",
        "jaxcompact/planner/sensitivity.py",
        "total = np.where(alike, together, alone)",
        "total = alone",
        "tests/planner/test_sensitivity.py::test_rows_that_are_alike_err_alike",
    ),
    Mutation(
        "a plan that was compiled ends the search for another",
        "jaxcompact/planner/trials.py",
        "return self.candidates.fastest(room, self._is_new)",
        "solution = self.candidates.fastest(room)\n"
        "        return solution if solution and self._is_new(solution) else None",
        "tests/planner/test_plan.py::test_a_larger_budget_is_not_slower",
    ),
    Mutation(
        "what numpy changed in place shares a sketch",
        "jaxcompact/sketched.py",
        "next(entries, None) if isinstance(x, jax.Array) else None",
        "next(entries, None)",
        "tests/linear/test_sharing.py::test_what_numpy_changes_in_place_is_read_again",
    ),
    Mutation(
        "a scan copies codes to where it stacks them",
        "jaxcompact/stores.py",
        "return [min(every, key=lambda i: self.leaves[i].size)] if kernel else every",
        "return every",
        "tests/kernels/test_stacks.py::test_codes_are_written_where_they_are_stacked",
    ),
    Mutation(
        "what layers share is broadcast ahead of their loop",
        "jaxcompact/hoisting.py",
        "values = [lax.select_n(never(), x, x)]",
        "values = [x]",
        "tests/test_hoisting.py::test_nothing_is_made_ahead_of_the_loop",
    ),
    Mutation(
        "a mask that layers share is stored by each",
        "jaxcompact/hoisting.py",
        "free = graph.independent_of(set(compress(inputs, perturbed)))",
        "free = set()",
        "tests/test_hoisting.py::test_a_mask_that_is_stored_is_stored_once",
    ),
    Mutation(
        "noise is compared with a constant of x's size",
        "kernels/quantize/reference.py",
        "x = jnp.where(u < 1, x, -x)",
        "x = jnp.where(u < 1, x, 0)",
        "tests/test_hoisting.py::test_nothing_is_made_ahead_of_the_loop",
    ),
    Mutation(
        "a norm is another's than of the product that is made again",
        "jaxcompact/backward.py",
        "stored = jnp.where(abs(out) >= abs(stored) / _SHRUNK, out, stored)",
        "pass",
        "tests/test_linear_attention.py::test_gradients_are_near",
    ),
    Mutation(
        "a norm is that of a row that decodes to zero",
        "jaxcompact/backward.py",
        "stored = jnp.where(abs(out) >= abs(stored) / _SHRUNK, out, stored)",
        "stored = out",
        "tests/test_linear_attention.py"
        "::test_of_a_row_that_decodes_to_zero_the_norm_is_the_stored_one",
    ),
    Mutation(
        "angles are rounded",
        "jaxcompact/tensors.py",
        "or value in divisors | phases",
        "or value in divisors",
        "tests/test_phases.py::test_gradients_are_near",
    ),
    Mutation(
        "an infinity that constants make is none",
        "jaxcompact/loops.py",
        "found = {v for v in large if is_float(graph.avals[v])}.union(graph.infinite)",
        "found = set(graph.infinite)",
        "tests/test_loops.py"
        "::test_a_loops_state_that_begins_as_an_infinity_is_stored_as_it_is",
    ),
    Mutation(
        "logits have four bits",
        "jaxcompact/tensors.py",
        "exponent=value in exponents,",
        "exponent=False,",
        "tests/test_exponents.py::test_gradients_are_near",
    ),
    Mutation(
        "a mean is carried into a variance that it does not fit",
        "jaxcompact/optimizers.py",
        'moment="reset" if centered else moment',
        "moment=moment",
        "tests/optimizers/test_inner.py::test_a_centered_variance_outlives_a_new_projection",
    ),
    Mutation(
        "a resampled image is stored as its places",
        "jaxcompact/still.py",
        "    for end in ends:",
        "    for end in ():",
        "tests/test_still.py::test_a_resampled_image_is_stored_in_place_of_its_places",
    ),
    Mutation(
        "ends of one tensor are counted one by one",
        "jaxcompact/still.py",
        "above[top(value)] = top(made)",
        "pass",
        "tests/test_still.py::test_which_ends_are_stored",
    ),
    Mutation(
        "the axis of tokens is lost through a norm",
        "jaxcompact/scores.py",
        "if value in seen and (axis is None or seen[value] is not None):",
        "if value in seen:",
        "tests/test_scores.py::test_the_tokens_of_heads_that_are_normalized",
    ),
    Mutation(
        "groups are taken along few tokens",
        "jaxcompact/compress.py",
        "tensor.shape[tensor.scores] >= _TOKENS",
        "True",
        "tests/test_scores.py::test_where_tokens_are_few_groups_are_of_channels",
    ),
    Mutation(
        "a long sum that divides is made again of whole terms",
        "jaxcompact/candidates.py",
        "sums = set(filter(is_of_whole, sums & less))",
        "sums = set()",
        "tests/test_divisors.py"
        "::test_of_a_long_sum_that_has_no_gradient_the_sum_is_stored",
    ),
    Mutation(
        "terms that are divided by their sum are rounded",
        "jaxcompact/divisors.py",
        "alone = len(graph.readers[terms]) == 1 and terms not in squares",
        "alone = True",
        "tests/test_divisors.py"
        "::test_terms_that_are_read_beside_their_sum_are_as_whole",
    ),
    Mutation(
        "what is rounded of rounded numbers is made again",
        "jaxcompact/replay.py",
        "whole = all(is_exact(action) for _, action, _ in roots.values())",
        "whole = True",
        "tests/test_phases.py::test_what_is_rounded_of_what_is_whole_is_made_again",
    ),
    Mutation(
        "what a metric divides by is whole",
        "jaxcompact/tensors.py",
        "graph = replace(graph.cut([*moving]), outputs=graph.outputs)",
        "",
        "tests/test_divisors.py::test_what_a_metric_divides_by_is_none",
    ),
    Mutation(
        "the largest of many is taken of rounded ones",
        "jaxcompact/tensors.py",
        "self.found.change(value, small=True, cheap=False)",
        "self.found.change(value, small=True)",
        "tests/test_small.py::test_the_largest_of_many_points_are_whole",
    ),
    Mutation(
        "terms are rounded beside their sum",
        "jaxcompact/candidates.py",
        "long_sums(graph, divisors - moving)",
        "long_sums(graph, divisors)",
        "tests/test_divisors.py::test_terms_beside_their_sum_are_as_whole",
    ),
    Mutation(
        "means of narrow distributions are rounded",
        "jaxcompact/tensors.py",
        "steep = bells | find_means(graph, moving, self.fixed)",
        "steep = {*bells}",
        "tests/test_distributions.py::test_gradients_of_narrow_distributions",
    ),
    Mutation(
        "distances of all pairs are stored whole",
        "jaxcompact/candidates.py",
        "products = {v for v in self.keys() & divisors if self._is_of_less(v)}",
        "products = {}",
        "tests/test_divisors.py::test_distances_of_all_pairs_are_made_again_of_points",
    ),
    Mutation(
        "of small tensors as large as each other some are encoded",
        "jaxcompact/small.py",
        "left -= nbytes * len(values)",
        "left -= nbytes",
        "tests/test_small.py::test_together_they_take_a_hundredth",
    ),
    Mutation(
        "small tensors are encoded as others are",
        "jaxcompact/compress.py",
        "if tensor.small:",
        "if False:",
        "tests/test_small.py::test_gradients_of_what_few_numbers_multiply",
    ),
    Mutation(
        "a norm is made again of what is rounded",
        "jaxcompact/tensors.py",
        "        enlarged = self._add_norms(norms)\n",
        "        enlarged = set()\n",
        "tests/test_normalization.py::test_a_norm_of_what_is_rounded_away_stays",
    ),
    Mutation(
        "a plan makes a norm again of what it rounds",
        "jaxcompact/planner/milp.py",
        "if source in problem.own:",
        "if False:",
        "tests/test_normalization.py::test_a_plan_makes_no_norm_again_of_what_is_rounded",
    ),
    Mutation(
        "what a cosine is taken of is rounded",
        "jaxcompact/tensors.py",
        "steep |= find_angles(graph, given, self.data)",
        "pass",
        "tests/test_differences.py::test_the_gradient_of_a_small_difference",
    ),
    Mutation(
        "attention in a loop is not looked for",
        "jaxcompact/scores.py",
        'op.kind in _RULES or op.kind in ("scan", "cond", "shard_map")',
        "op.kind in _RULES",
        "tests/test_steep.py::test_gradients_are_near",
    ),
    Mutation(
        "a bias that an activation reads is another columns'",
        "kernels/activate/mosaic_gpu.py",
        "source = hbm.at[pl.ds(first * group, groups * group)]",
        "source = hbm.at[pl.ds(0, groups * group)]",
        "tests/kernels/test_activate.py::"
        "test_bits_are_the_references[GELU of a biased x, a group in part]",
    ),
    Mutation(
        "a prediction is rounded, not its difference from a near target",
        "jaxcompact/tensors.py",
        "        self._add_differences(near | products, moving)\n",
        "        self._add_differences(products, moving)\n",
        "tests/test_differences.py::test_the_gradient_of_a_small_difference",
    ),
    Mutation(
        "the sign of a gradient: dx of a compressed layer",
        "jaxcompact/linear.py",
        "dx = _product(dy,",
        "dx = -_product(dy,",
        "tests/contract/test_compact.py::test_a_linear_layer",
    ),
    Mutation(
        "a gradient by the sketch of another layer",
        "jaxcompact/sketched.py",
        "if layer is None and by_hand",
        "if False and by_hand",
        "tests/linear/test_sharing.py::test_the_sketch_of_another_layer_is_no_gradient",
    ),
    Mutation(
        "scales that begin where the copy engine takes none",
        "kernels/quantize/mosaic_gpu.py",
        "groups + -groups % unit",
        "groups",
        "tests/kernels/test_quantize.py::"
        "test_the_copy_engine_takes_each_warpgroups_levels",
    ),
    Mutation(
        "a layer's number is not folded into its key",
        "jaxcompact/subspace.py",
        "jax.vmap(partial(jax.random.fold_in, key))(numbers)",
        "jax.vmap(lambda number: key)(numbers)",
        "tests/test_subspace.py::"
        "test_keys_depend_on_key_family_layer_and_generation_alone",
    ),
    Mutation(
        "the period is off by one",
        "jaxcompact/subspace.py",
        "jnp.asarray(step, jnp.int32) // self.period",
        "(jnp.asarray(step, jnp.int32) + 1) // self.period",
        "tests/test_subspace.py::test_microbatches_of_one_update_add_up",
    ),
    Mutation(
        "the scale of P",
        "jaxcompact/projection.py",
        "jax.random.normal(key, (n, r), jnp.float32) / math.sqrt(r)",
        "jax.random.normal(key, (n, r), jnp.float32) / math.sqrt(n)",
        "tests/test_projection.py::test_unbiased_with_the_promised_variance"
        "[24-8-1-gaussian]",
    ),
    Mutation(
        "first moments are reset where P stays, not where it is new",
        "jaxcompact/optimizers.py",
        "generation != state.generation,",
        "generation == state.generation,",
        "tests/optimizers/test_updates.py::test_adam_equals_the_formula_in_numpy[reset]",
    ),
    Mutation(
        "the limiter remembers the norm that was asked for",
        "jaxcompact/limiter.py",
        "jax.tree.map(jnp.minimum, norms, limits)",
        "norms",
        "tests/test_limiter.py::test_equals_firas_rule",
    ),
    Mutation(
        "the group axis: channel-wise groups run along the last",
        "jaxcompact/codecs/quantized.py",
        "axis=self.axis,\n            symmetric",
        "axis=-1,\n            symmetric",
        "tests/codecs/test_quantized.py::test_channel_wise_groups_see_one_channel",
    ),
    Mutation(
        "rounding to the nearest code becomes rounding down",
        "kernels/quantize/levels.py",
        "position + (_INTEGERS + zero)",
        "jnp.floor(position) + (_INTEGERS + zero)",
        "tests/codecs/test_quantized.py::"
        "test_error_of_nearest_rounding_of_normal_values",
    ),
    Mutation(
        "rules with linear algebra inside are as others",
        "jaxcompact/kinds.py",
        "return ruled and is_any(op, LINEAR_ALGEBRA)",
        "return False",
        "tests/test_divisors.py::test_inverses_by_rules_of_their_own_are_exact",
    ),
    Mutation(
        "no entry is thought to lie below the lowest code",
        "kernels/quantize/levels.py",
        "within = bits < 8 and scale_bits == 16 and not stochastic",
        "within = True",
        "tests/kernels/test_scales.py::"
        "test_entries_at_the_ends_of_float32_keep_their_sign",
    ),
    Mutation(
        "float32's exp is approximated as if it were rounded to 16 bits",
        "kernels/functions/operations.py",
        "not (kind in _EXPONENTIALS and wide)",
        "True",
        "tests/kernels/test_exponential.py::test_what_may_be_approximated",
    ),
    Mutation(
        "a layer that is taken by hand is told by nothing that jax looks at",
        "jaxcompact/sketched.py",
        'object.__setattr__(self, "by_hand", True)',
        "pass",
        "tests/linear/test_sharing.py::test_what_was_traced_before_is_no_excuse",
    ),
    Mutation(
        "a sketch waits for the input that it is made of",
        "jaxcompact/sketched.py",
        "return jax.lax.optimization_barrier((x, z))[0], z",
        "return jax.lax.optimization_barrier((x, z))",
        "tests/linear/test_saved.py::"
        "test_in_a_checkpoint_what_makes_a_sketch_is_not_stored",
    ),
    Mutation(
        "two entries of a group share their noise",
        "kernels/quantize/noise.py",
        "return _centred(h << 7), _centred(h >> 9)",
        "return _centred(h << 7), _centred(h << 7)",
        "tests/codecs/test_quantized.py::test_equals_the_emulation",
    ),
    Mutation(
        "a group's digest is the sum of its entries",
        "kernels/quantize/noise.py",
        "return turned * (spread ^ (spread >> 16) | 1)",
        "return turned + 0 * spread",
        "tests/kernels/test_noise.py::test_groups_of_few_values_have_keys_of_their_own",
    ),
    Mutation(
        "noise has more bits than beside codes up to 255 there is room for",
        "kernels/quantize/noise.py",
        "bits = (h & jnp.uint32(0x7FFF00)) | jnp.uint32(0x3F800080)",
        "bits = (h & jnp.uint32(0x7FFF80)) | jnp.uint32(0x3F800040)",
        "tests/kernels/test_noise.py::test_what_is_a_code_already_stays_what_it_is",
    ),
    Mutation(
        "every block's noise is that of the first channels",
        "kernels/quantize/channels.py",
        "channel = (channel + j * columns)",
        "channel = (channel + 0 * columns)",
        "tests/kernels/test_quantize.py::"
        "test_bits_are_the_references[channels, stochastic, tails]",
    ),
    Mutation(
        "the kernel that activates encodes its first array twice",
        "kernels/activate/mosaic_gpu.py",
        "load(xs_smem[n], g * group",
        "load(xs_smem[0], g * group",
        "tests/kernels/test_activate.py::"
        "test_bits_are_the_references[SwiGLU, a group in part]",
    ),
    Mutation(
        "the kernel that normalizes leaves out what other warpgroups added up",
        "kernels/normalize/mosaic_gpu.py",
        "for w in range(workers)]",
        "for w in range(1)]",
        "tests/kernels/test_normalize.py"
        "::test_bits_are_the_references_where_sums_are_exact",
    ),
    Mutation(
        "a rule that rounds leaves decisions to its default",
        "jaxcompact/policy.py",
        "if self._rounds and _decides(tensor):",
        "if False:",
        "tests/test_decisions.py::test_decisions_beside_a_rule_that_rounds",
    ),
    Mutation(
        "a kernel takes a norm inside which others read",
        "jaxcompact/norms.py",
        "if any(graph.avals[v].size > rows for v in values):",
        "if False:",
        "tests/test_norms.py::test_what_is_none[middle_read_elsewhere]",
    ),
    Mutation(
        "a kernel takes a tensor that others read as well",
        "jaxcompact/regions.py",
        "return read_inside and inner",
        "return inner",
        "tests/test_regions.py::test_what_is_none[middle_read_elsewhere]",
    ),
    Mutation(
        "the order of a mask's bits",
        "kernels/bits/reference.py",
        "(part << (bits * lane)",
        "(part << (8 - bits - bits * lane)",
        "tests/codecs/test_exact.py::test_masks_of_any_length",
    ),
    Mutation(
        "a limit of 2^b integers is thought to need b bits and hold one more",
        "jaxcompact/codecs/exact.py",
        "if most - least < 2**b)",
        "if most - least <= 2**b)",
        "tests/codecs/test_exact.py::test_few_integers_share_bytes",
    ),
    Mutation(
        "what an absolute value decided, the other way round",
        "jaxcompact/choices.py",
        "jnp.where(choice == 1, x, -x)",
        "jnp.where(choice == 1, -x, x)",
        "tests/test_decisions.py::"
        "test_the_gradient_follows_the_forwards_decisions[abs]",
    ),
    Mutation(
        "arguments that are parameters are not those that are said to be",
        "jaxcompact/checkpoint.py",
        "mask += [said]",
        "mask += [not said]",
        "tests/test_explain.py::test_every_tensor_has_its_action_and_a_reason",
    ),
    Mutation(
        "a plan above its budget is taken",
        "jaxcompact/planner/trials.py",
        "if nbytes <= self.limit:",
        "if nbytes >= self.limit:",
        "tests/planner/test_plan.py::test_budgets_are_kept_and_used",
    ),
    Mutation(
        "a plan's error is that of what it encodes, whatever it makes of that",
        "jaxcompact/planner/search.py",
        "measured = found.under(best.actions)",
        "measured = found",
        "tests/planner/test_noise.py::"
        "test_what_is_made_again_of_what_is_encoded[0.03-0.1]",
    ),
    Mutation(
        "what a step closes over takes no memory",
        "jaxcompact/memory/compiler.py",
        "stats.argument_size_in_bytes + self.constant_bytes",
        "stats.argument_size_in_bytes",
        "tests/memory/test_peak.py::test_arrays_that_a_step_closes_over[512]",
    ),
    Mutation(
        "a plan's error has no bound",
        "jaxcompact/planner/milp.py",
        "program.row(error, -np.inf, noise - problem.noise)",
        "program.row(error, -np.inf, np.inf)",
        "tests/planner/test_milp.py::test_noise_has_a_limit_of_its_own",
    ),
    Mutation(
        "what is made again takes no memory, to the integer program",
        "jaxcompact/planner/lifetimes.py",
        "range(min(at), self.last[source] + 1)",
        "()",
        "tests/planner/test_milp.py::test_what_is_in_memory_is_counted[mlp-1]",
    ),
    Mutation(
        "what is made again for others' sake is there no earlier than it is read",
        "jaxcompact/planner/alive.py",
        "need.get(value, math.inf) > found[op]",
        "value not in need",
        "tests/planner/test_alive.py::test_by_hand[again-1]",
    ),
    Mutation(
        "the backward pass that finds everything lacks derivatives that are bits",
        "jaxcompact/replay.py",
        "derived += [Slope(v) for v in self.slopes]",
        "pass",
        "tests/planner/test_milp.py::test_it_is_the_best_of_all_choices[relu]",
    ),
    Mutation(
        "what waits for one of several products that are added",
        "jaxcompact/schedule.py",
        "self._read_later(waiting - self.summands)",
        "self._read_later(waiting)",
        "tests/test_schedule.py::test_a_sum_over_cards_is_sent_once",
    ),
    Mutation(
        "what is gathered again does not wait for its reader",
        "jaxcompact/schedule.py",
        "op.reads and waited < self.stage",
        "op.reads and waited < 0",
        "tests/test_schedule.py::"
        "test_what_is_gathered_again_waits_for_the_layers_behind_it",
    ),
    Mutation(
        "a gradient comes before what it waits for",
        "jaxcompact/schedule.py",
        "len(last.reads) > 1 or ",
        "",
        "tests/checkpoint/test_devices.py"
        "::test_a_gradient_that_waits_for_another_and_is_shared",
    ),
    Mutation(
        "what a rule decides by is rounded in another's place",
        "jaxcompact/replay.py",
        "if of_value(self.chosen[value][1]) != Recompute():",
        "if False:",
        "tests/test_rules.py::test_a_rule_that_decides_by_what_relu_leaves",
    ),
    Mutation(
        "what is chosen stands still for a second derivative",
        "jaxcompact/choices.py",
        "held = pinned if rounded else lambda value, chosen: chosen",
        "held = pinned",
        "tests/test_extremes.py::test_second_derivatives_where_nothing_is_rounded",
    ),
    Mutation(
        "of equals the largest has all",
        "jaxcompact/choices.py",
        "share = jnp.where(count > 0, 1 / count, jnp.nan)",
        "share = jnp.where(count > 0, 1.0, jnp.nan)",
        "tests/test_extremes.py"
        "::test_ties_are_shared_as_the_plain_gradient_shares_them",
    ),
    Mutation(
        "what a bound does is measured, and not found",
        "jaxcompact/planner/sensitivity.py",
        "own = replace(own, bound=None)",
        "own = replace(own, axis=-1)",
        "tests/planner/test_noise.py::test_the_error_of_what_is_stored_within_a_bound",
    ),
    Mutation(
        "a gradient that devices are to have parts of waits",
        "jaxcompact/schedule.py",
        'if len(last.reads) > 1 or not (renames(last) or last.kind == "reshard"):',
        "if len(last.reads) > 1 or not renames(last):",
        "tests/test_schedule.py"
        "::test_weight_gradients_do_not_wait_where_weights_are_shared",
    ),
    Mutation(
        "a barrier holds what nothing reads behind it",
        "jaxcompact/graph.py",
        "if out in read_later]",
        "]",
        "tests/test_schedule.py::test_a_barrier_holds_only_what_is_read_behind_it",
    ),
    Mutation(
        "what is stored is decoded by a kernel",
        "jaxcompact/stores.py",
        'choice.using("xla")',
        'choice.using("mosaic_gpu")',
        "tests/kernels/test_devices.py::test_gradients_of_a_checkpointed_scan",
    ),
    Mutation(
        "donated bytes count twice",
        "jaxcompact/memory/compiler.py",
        "stats.output_size_in_bytes - stats.alias_size_in_bytes",
        "stats.output_size_in_bytes",
        "tests/memory/test_peak.py::test_a_donated_argument_is_overwritten",
    ),
    Mutation(
        "a loop's state that begins as zeros counts as a constant",
        "jaxcompact/loops.py",
        "        begins = found",
        "        return [i for i, b in enumerate(begins) if b]",
        "tests/test_loops.py::test_a_loops_state_is_encoded_however_it_begins",
    ),
    Mutation(
        "a residual stream is made again of the branches of all layers",
        "jaxcompact/sums.py",
        "bool(carried) or any(",
        "any(",
        "tests/test_depth.py::test_a_whole_model_takes_what_its_layers_take",
    ),
    Mutation(
        "a sum of many tensors is made again of all of them",
        "jaxcompact/depth.py",
        "_MOST = 4 ",
        "_MOST = 400 ",
        "tests/test_depth.py::test_every_fourth_sum_is_stored",
    ),
    Mutation(
        "small errors beside outliers are codes of their scale",
        "jaxcompact/tensors.py",
        " or self.found[value].size <= little",
        "",
        "tests/test_differences.py::test_small_errors_beside_outliers",
    ),
    Mutation(
        "the optimizer's state is copied to all devices of an Auto mesh",
        "jaxcompact/optimizers.py",
        "return placed_as(slot.map_layers(project, key, generation, param), param)",
        "return slot.map_layers(project, key, generation, param)",
        "tests/linear/test_devices.py::test_the_state_lies_as_the_kernels_do",
    ),
    Mutation(
        "a sum stands for a term that something else reads",
        "jaxcompact/sums.py",
        "v in sums and len(graph.readers[v]) == 1}",
        "v in sums}",
        "tests/test_sums.py::test_what_is_read_as_a_sum_alone_is_stored_as_that",
    ),
    Mutation(
        "what a loop's body divides by is rounded",
        "jaxcompact/divisors.py",
        "    return _steep_inputs(op)\n",
        "    return []\n",
        "tests/test_by_hand.py::test_a_divisor_in_a_body_is_no_zero",
    ),
    Mutation(
        "sketches do not vary over devices as their tokens do",
        "jaxcompact/linear.py",
        "*varying_as(operands, operands), z",
        "*operands, z",
        "tests/linear/test_devices.py"
        "::test_in_a_shard_map_sketches_are_those_of_plain_gradients",
    ),
    Mutation(
        "devices' weight gradients are averaged instead of added",
        "kernels/weight_gradient/api.py",
        "jax.lax.psum(",
        "jax.lax.pmean(",
        "tests/kernels/test_explicit.py::test_gradients_of_weights",
    ),
    Mutation(
        "the last entries of a row are not projected",
        "kernels/project/mosaic_gpu.py",
        "rounds, both = n // _SUMMED,",
        "rounds, both = max(1, n // _SUMMED - 1),",
        "tests/kernels/test_project.py"
        "::test_bits_are_the_references_where_sums_are_exact",
    ),
    Mutation(
        "a kernel reads rows that the copy engine can't",
        "kernels/quantize/api.py",
        "if nbytes % 16:",
        "if nbytes % 2:",
        "tests/kernels/test_quantize.py::test_what_the_kernel_does_not_take",
    ),
    Mutation(
        "a device has part of a group",
        "kernels/quantize/devices.py",
        "else size) % (group * parts)",
        "else size) % group",
        "tests/kernels/test_devices.py::test_bits_are_those_of_one_device",
    ),
    Mutation(
        "groups of part of a row run over two devices",
        "jaxcompact/codecs/codec.py",
        "if parts == 1 or size % (group * parts) == 0:",
        "if True:",
        "tests/codecs/test_sharding.py"
        "::test_nothing_is_moved_for_groups_that_do_not_come_out_even",
    ),
    Mutation(
        "sketches, moments and updates do not lie as their kernels do",
        "kernels/explicit.py",
        "    if not typed(other):",
        "    if True:",
        "tests/linear/test_devices.py::test_two_steps_are_those_of_one_device",
    ),
    Mutation(
        "what a jax.custom_vjp decides by is made again of what is rounded",
        "jaxcompact/compress.py",
        'if tensor.kind == "function" and not read:',
        'if tensor.kind == "function":',
        "tests/test_steep.py::test_gradients_are_near",
    ),
    Mutation(
        "a guarded degree is rounded",
        "jaxcompact/divisors.py",
        'if guarded and op.kind in ("scatter-add", "dot_general"):',
        "if False:",
        "tests/test_segments.py::test_gradients_are_near",
    ),
    Mutation(
        "a choice that is to be saved is not",
        "jaxcompact/replay.py",
        "action == Save() and not self.lossy)",
        "action == Save())",
        "tests/test_decisions.py::test_a_choice_that_is_saved_is_the_forwards",
    ),
    Mutation(
        "an output that examples share counts for each",
        "jaxcompact/traced.py",
        "return even(outs, self.traced.uneven, inputs), stored",
        "return outs, stored",
        "tests/checkpoint/test_vmap.py::test_what_examples_share_counts_once",
    ),
    Mutation(
        "what is made of parameters alone is made inside",
        "jaxcompact/outputs.py",
        "isinstance(v, Literal) or v in known for",
        "isinstance(v, Literal) for",
        "tests/checkpoint/test_vmap.py::test_what_is_made_of_parameters_alone_is_the_same_for_all",
    ),
    Mutation(
        "a loop that fits one kernel is stored beside another",
        "jaxcompact/tensors.py",
        "again = ordered or self._counts(op) or op in self.solving",
        "again = ordered or self._counts(op)",
        "tests/test_solving.py::test_gradients_are_near",
    ),
    Mutation(
        "normalization counts as an inverse of a loop's state",
        "jaxcompact/solving.py",
        "if len(reads) != 1 or not still.issuperset(others):",
        "if not reads:",
        "tests/test_solving.py::test_other_loops_are_stored",
    ),
    Mutation(
        "potentials are stored beside other costs",
        "jaxcompact/solving.py",
        "made |= _of_sums(body, begins, still - sliced)",
        "made |= set()",
        "tests/test_solving.py::test_gradients_are_near",
    ),
    Mutation(
        "attention in a loop counts as potentials",
        "jaxcompact/solving.py",
        "for value, done in steps.items() if done == len(_OF_SUMS)}",
        "for value, done in steps.items() if done >= 3}",
        "tests/test_solving.py::test_other_loops_are_stored",
    ),
    Mutation(
        "what Newton's steps solve for is rounded",
        "jaxcompact/solving.py",
        "made |= _of_powers(body, begins, still, exact)",
        "made |= set()",
        "tests/test_solving.py::test_errors_do_not_grow_with_the_steps_of_newton",
    ),
    Mutation(
        "attention to a loop's own state counts as Newton's steps",
        "jaxcompact/solving.py",
        "if not reads or by_parameters or not still.issuperset(others):",
        "if not reads or not still.issuperset(others):",
        "tests/test_solving.py::test_other_loops_are_stored",
    ),
    Mutation(
        "products of a loop's vectors count as Newton's steps",
        "jaxcompact/solving.py",
        "return all(len(gone) + len(shared) < v.aval.ndim for v, gone, shared in each)",
        "return True",
        "tests/test_solving.py::test_other_loops_are_stored",
    ),
    Mutation(
        "differences in large units are rounded beside those in small ones",
        "jaxcompact/tensors.py",
        "divisor=value in scaled or ",
        "divisor=",
        "tests/test_differences.py::test_the_gradient_of_a_small_difference",
    ),
    Mutation(
        "a constant is no target",
        "jaxcompact/differences.py",
        "return one and abs(constants[0]) >= _LEAST",
        "return False",
        "tests/test_differences.py::test_a_constant_is_a_target_too",
    ),
    Mutation(
        "the farthest of none is rounded beside others",
        "jaxcompact/loops.py",
        "elif op.kind in LAYOUT | _SHIFTS | _EXTREMES or",
        "elif op.kind in LAYOUT | _SHIFTS or",
        "tests/checkpoint/test_gradients.py::test_nor_are_the_extremes_of_what_is_masked_whole",
    ),
    Mutation(
        "what each step adds counts as what all steps share",
        "jaxcompact/solving.py",
        "if i not in scanned]",
        "if i >= 0]",
        "tests/test_solving.py::test_other_loops_are_stored",
    ),
    Mutation(
        "what a loop gives to a norm has few bits",
        "jaxcompact/tensors.py",
        "enlarged=value in enlarged,",
        "enlarged=False,",
        "tests/test_linear_attention.py::test_what_a_loop_gives_to_a_norm_has_8_bits",
    ),
    Mutation(
        "what a step does to modules is not compiled",
        "jaxcompact/memory/compiler.py",
        "step = _with_changes(step, numbers) if modules(args) else step",
        "pass",
        "tests/memory/test_peak.py::test_a_step_that_changes_modules_in_place",
    ),
    Mutation(
        "microbatches count alike, however many words they guess",
        "train/training.py",
        "return (targets_bt >= 0).sum().astype(jnp.float32)",
        "return jnp.float32(1)",
        "tests/train/test_roberta.py::test_microbatches_count_by_their_masked_words",
    ),
    Mutation(
        "correlations are rounded beside those of a feature with itself",
        "jaxcompact/tensors.py",
        "self._add_differences(near | products, moving)",
        "self._add_differences(near, moving)",
        "tests/test_correlations.py::test_the_gradient_of_small_correlations",
    ),
    Mutation(
        "probabilities are there while their gradient is read",
        "jaxcompact/schedule.py",
        "waiting = self._beside_freed(op, operands)",
        "waiting = set()",
        "tests/test_schedule.py::test_probabilities_are_read_before_their_gradient",
    ),
    Mutation(
        "a layer that closes over an array is traced at each call",
        "jaxcompact/checkpoint.py",
        "any(map(_is_tracer, [*consts, *leaves]))",
        "any(map(_is_tracer, consts))",
        "tests/checkpoint/test_arguments.py::"
        "test_what_closes_over_an_array_is_traced_once_for_all_layers",
    ),
    Mutation(
        "what was accumulated is lifted by another P",
        "jaxcompact/optimizers.py",
        '"exp_avg", "acc_grads"',
        '"exp_avg"',
        "tests/optimizers/test_inner.py::"
        "test_what_is_accumulated_is_not_lifted_by_another_p",
    ),
    Mutation(
        "what examples share counts once for all of them",
        "jaxcompact/pullbacks.py",
        "shared = dims[:count], [d is None for d in dims[count:]]",
        "shared = dims[:count], [False for d in dims[count:]]",
        "tests/checkpoint/test_vmap.py::test_what_examples_share_counts_once",
    ),
    Mutation(
        "jitted functions are taken apart for their tangents",
        "jaxcompact/pullbacks.py",
        'apart = type(trace).__name__ == "JaxprTrace"',
        "apart = False",
        "tests/checkpoint/test_tracing.py::"
        "test_tracing_time_is_near_that_of_jax_checkpoint",
    ),
    Mutation(
        "a backward rule decides by decoded values",
        "jaxcompact/rules.py",
        "if not decided(graph, residuals):",
        "if True:",
        "tests/test_rules.py::test_gradients_are_near",
    ),
    Mutation(
        "what a rule keeps of the forward pass is made again",
        "jaxcompact/recording.py",
        "return outs, backward if needed else None",
        "return outs, None",
        "tests/test_rules.py::test_what_is_kept_of_the_forward_pass_decides",
    ),
    Mutation(
        "what labels decide is stored",
        "jaxcompact/rules.py",
        "same = graph.independent_of(moving)",
        "same = set()",
        "tests/test_rules.py::test_what_is_exact_when_made_again_is_not_stored",
    ),
    Mutation(
        "where nothing is rounded what rules decide is stored",
        "jaxcompact/replay.py",
        "if not self.lossy:  # what is exact",
        "if False:  # what is exact",
        "tests/test_rules.py::test_what_is_exact_when_made_again_is_not_stored",
    ),
    Mutation(
        "whole numbers that a rule keeps are as others",
        "jaxcompact/residuals.py",
        "if value in ranges:",
        "if False:",
        "tests/test_rules.py::test_what_is_kept_is_in_the_fewest_bits",
    ),
    Mutation(
        "a mask that a function with a rule gives is made again",
        "jaxcompact/decisions.py",
        "if ruled and is_inexact(aval):",
        "if ruled:",
        "tests/test_rules.py::test_what_is_kept_of_the_forward_pass_decides",
    ),
    Mutation(
        "the operand of relu is stored, whose size may be below zero",
        "jaxcompact/bounded.py",
        "found[value] = at",
        "pass",
        "tests/test_replay.py::test_of_what_relu_alone_reads_its_result_is_stored",
    ),
    Mutation(
        "what others read as well has the bound of one",
        "jaxcompact/bounded.py",
        "while len(readers[at]) == 1 and self.scale:",
        "while readers[at]:",
        "tests/test_bounded.py::test_what_is_not_flat_has_no_bound",
    ),
    Mutation(
        "gates that are made together have one bound, or none",
        "jaxcompact/candidates.py",
        "less or bounded >= {*slices} or",
        "less or",
        "tests/test_parts.py::"
        "test_gates_that_are_made_together_have_bounds_as_if_they_were_not",
    ),
    Mutation(
        "a tensor is cut where one slice has a bound",
        "jaxcompact/candidates.py",
        "bounded >= {*slices}",
        "not bounded.isdisjoint(slices)",
        "tests/test_parts.py::"
        "test_gates_that_are_made_together_have_bounds_as_if_they_were_not",
    ),
    Mutation(
        "parts that are read as sums are stored one by one",
        "jaxcompact/tensors.py",
        "if self.found.move_to_slices(exponents, self.tables):",
        "if not self.found.move_to_slices(exponents, self.tables):",
        "tests/test_parts.py::test_parts_that_are_read_as_sums_are_stored_as_these",
    ),
    Mutation(
        "where relu's operand has a name, its result is stored",
        "jaxcompact/bounded.py",
        "and (at == value or at not in named)",
        "",
        "tests/test_bounded.py::test_a_rule_for_what_is_named_on_the_way_wins",
    ),
    Mutation(
        "what is added moves no bound",
        "jaxcompact/bounded.py",
        "self.shift += low if known else 0.0",
        "pass",
        "tests/test_bounded.py::test_bounds",
    ),
    Mutation(
        "in a shard_map nothing is known of constants",
        "jaxcompact/spans.py",
        "convert_element_type pvary reduce_max",
        "convert_element_type reduce_max",
        "tests/test_bounded.py::test_in_a_shard_map",
    ),
    Mutation(
        "what is multiplied by what is not known has a bound",
        "jaxcompact/bounded.py",
        "        return False\n\n\ndef _is_of_one",
        "        return True\n\n\ndef _is_of_one",
        "tests/test_bounded.py::test_what_is_not_flat_has_no_bound",
    ),
    Mutation(
        "a clip on one side has two bounds",
        "jaxcompact/bounded.py",
        "if len(self.ends) == 2:\n                    low, high",
        "if self.ends:\n                    self.ends = {'max': 1.0, **self.ends}\n"
        "                    self.ends = {'min': 1.0, **self.ends}\n"
        "                    low, high",
        "tests/test_bounded.py::test_bounds",
    ),
    Mutation(
        "what frozen weights make of a stream is a loss",
        "jaxcompact/differences.py",
        "if not _is_of_products(op, graph, begins, moving):",
        "if True:",
        "tests/test_differences.py::test_other_sums_are_no_differences",
    ),
    Mutation(
        "what is flat on one side has no bound",
        "jaxcompact/tensors.py",
        "bounds |= find_tails(graph, self.fixed, plain - bounds.keys())",
        "",
        "tests/test_tails.py::test_gelu_is_nearer_by_a_third_or_more",
    ),
    Mutation(
        "what others read of a tensor is forgotten where a function is flat",
        "jaxcompact/tails.py",
        "read.update(made.keys() & op.reads)",
        "read.update((made.keys() & op.reads) - {value})",
        "tests/test_tails.py::test_what_is_not_flat_has_no_bound",
    ),
    Mutation(
        "a spectrum is stored, however much larger than what it is of",
        "jaxcompact/spectra.py",
        "return made > _LARGER * of",
        "return False",
        "tests/test_spectra.py::"
        "test_what_a_padded_sequences_spectrum_is_of_is_stored_in_its_place",
    ),
    Mutation(
        "every spectrum is made again",
        "jaxcompact/spectra.py",
        "return made > _LARGER * of",
        "return True",
        "tests/test_spectra.py::test_what_is_no_larger_is_stored",
    ),
    Mutation(
        "a variance is stored as often as it is repeated",
        "jaxcompact/divisors.py",
        "            found = value\n    return found\n\n\ndef _end_of",
        "            pass\n    return found\n\n\ndef _end_of",
        "tests/test_divisors.py::"
        "test_of_groups_a_variance_is_kept_as_it_is_before_it_is_repeated",
    ),
    Mutation(
        "data that can't be differentiated hides all tensors",
        "jaxcompact/explain.py",
        "    mask = _differentiable(traced, mask)\n",
        "",
        "tests/test_explain.py::test_data_that_jax_cant_differentiate_does_not_count",
    ),
    Mutation(
        "what is given of a function is not looked at",
        "jaxcompact/tails.py",
        "read.add(out)",
        "pass",
        "tests/test_tails.py::test_what_is_given_is_read_too",
    ),
    Mutation(
        "a small leak is flat",
        "jaxcompact/tails.py",
        "np.ptp(side) <= _LEFT * usual and",
        "",
        "tests/test_tails.py::test_what_is_not_flat_has_no_bound",
    ),
    Mutation(
        "what grows ever steeper is flat",
        "jaxcompact/tails.py",
        " or slopes.max() > _GROWS * usual",
        "",
        "tests/test_tails.py::test_what_is_not_flat_has_no_bound",
    ),
    Mutation(
        "of an open side nothing is known, and it has an end",
        "kernels/quantize/levels.py",
        "if end is not None:\n            yield",
        "if True:\n            end = end or 1.0\n            yield",
        "tests/test_tails.py::test_an_infinity_is_one_on_the_open_side_alone",
    ),
    Mutation(
        "a clip has the smaller of its bounds",
        "jaxcompact/bounded.py",
        "return max(ends) / abs(self.scale)",
        "return min(ends) / abs(self.scale)",
        "tests/test_bounded.py::test_gradients_are_near_whatever_the_size",
    ),
    Mutation(
        "all tensors of a function have one bound",
        "jaxcompact/stores.py",
        "bounds = [store.codec.ends for store in stores]",
        "bounds = [codec.ends for store in stores]",
        "tests/test_regions.py::test_gradients_are_those_without_the_kernel[gated]",
    ),
    Mutation(
        "what lies beyond a bound is cut off, and moves a little",
        "kernels/quantize/levels.py",
        "near = x * (1 / _SQUEEZED) + ",
        "near = 0 * x + ",
        "tests/test_bounded.py::test_what_is_saturated_moves_nothing",
    ),
    Mutation(
        "what is measured has no bound",
        "jaxcompact/planner/probing.py",
        "codecs = tuple(bounded(codec, tensor) for codec in codecs)",
        "",
        "tests/test_bounded.py::test_what_is_stored_is_what_is_measured",
    ),
    Mutation(
        "what a loop does beside encoding is left out when it is measured",
        "jaxcompact/planner/sensitivity.py",
        "inside = {n: action for n, (_, action) in bodies.items()} if lossy else {}",
        "inside = {n: a for n, (t, a) in bodies.items() if noise_of(a, t)}",
        "tests/planner/test_loops.py::test_a_plans_error_is_also_that_of_its_loops",
    ),
    Mutation(
        "what a cheap branch decides is decided again",
        "jaxcompact/kinds.py",
        "return op.kind in BLOCKS and (decides or expensive(op))",
        "return op.kind in BLOCKS and expensive(op)",
        "tests/test_decisions.py::test_the_gradient_follows_the_forwards_decisions",
    ),
    Mutation(
        "any function named relu is one",
        "jaxcompact/functions.py",
        'in ("relu", "relu6") and source.startswith(_JAX)',
        'in ("relu", "relu6")',
        "tests/test_decisions.py::test_the_gradient_follows_the_forwards_decisions",
    ),
    Mutation(
        "what relu is of is held for its bits",
        "jaxcompact/recording.py",
        "env[value if self.tensors.found[value].step else function.root]",
        "env[function.root]",
        "tests/memory/test_peak.py::test_what_relu_is_of_is_not_held",
    ),
    Mutation(
        "guards against zero are decisions",
        "jaxcompact/rules.py",
        "made -= _guards(graph, same)",
        "made -= set()",
        "tests/test_rules.py::test_guards_against_zero_are_no_decisions",
    ),
    Mutation(
        "what a rule keeps of what is whole is stored",
        "jaxcompact/recording.py",
        "return value in self.tensors.data and not whole",
        "return value in self.tensors.data",
        "tests/test_rules.py::test_of_what_is_whole_nothing_is_kept",
    ),
    Mutation(
        "a plan makes slopes again of what is rounded",
        "jaxcompact/planner/problem.py",
        "or _of_rule(i.source, replay)",
        "or False",
        "tests/test_surrogates.py::test_a_plan_makes_no_slope_again_of_what_is_rounded",
    ),
    Mutation(
        "the slope of a step is made again",
        "jaxcompact/recording.py",
        "if is_step(op):",
        "if False:",
        "tests/test_surrogates.py::test_slopes_of_steps_are_near",
    ),
    Mutation(
        "all rules have slopes",
        "jaxcompact/recording.py",
        "if is_step(op):",
        "if True:",
        "tests/test_rules.py::test_a_rule_that_decides_nothing_is_replayed",
    ),
    Mutation(
        "what is no number counts among what is chosen",
        "jaxcompact/graph.py",
        "return {v for op in unequal for v in op.outs}",
        "return set()",
        "tests/test_surrogates.py::test_slopes_of_steps_are_near",
    ),
    Mutation(
        "what is turned may vanish",
        "jaxcompact/divisors.py",
        "turned = not self.added.isdisjoint",
        "turned = self.added is None and not self.added.isdisjoint",
        "tests/test_divisors.py::test_norms_are_kept_and_not_what_is_normalized",
    ),
    Mutation(
        "every difference beside a sum is part of a rotation",
        "jaxcompact/divisors.py",
        "factors = [filter(is_large, o.reads) for o in makers",
        "factors = [(0,) for o in makers",
        "tests/test_divisors.py::test_what_is_not_turned_may_vanish",
    ),
    Mutation(
        "a steep sigmoid is as others",
        "jaxcompact/exponents.py",
        "if op.kind in _STEEP and steep:",
        "if False:",
        "tests/test_exponents.py::test_gradients_are_near",
    ),
    Mutation(
        "a steep softplus is as others",
        "jaxcompact/exponents.py",
        "return op.reads if steep and any(sharp) else ()",
        "return ()",
        "tests/test_exponents.py::test_what_a_number_makes_steep_has_8_bits",
    ),
    Mutation(
        "what devices run by themselves is one block",
        "jaxcompact/traced.py",
        "if not is_entered(op):",
        'if op.kind == "shard_map" or not is_entered(op):',
        "tests/checkpoint/test_devices.py::"
        "test_what_devices_run_by_themselves_is_stored_as_elsewhere",
    ),
    Mutation(
        "an attention kernel of each device's heads is checkpointed inside",
        "jaxcompact/kinds.py",
        'return [o.kind for o in body.ops if expensive(o)] != ["custom_vjp_call"]',
        "return True",
        "tests/test_scores.py::"
        "test_fused_attention_is_told_from_one_that_makes_its_softmax_again",
    ),
    Mutation(
        "what a rule is made again of decides, not the mask",
        "jaxcompact/rules.py",
        "[given[op.outs[0]]] if op.outs[0] in given else op.bind(*values)",
        "op.bind(*values)",
        "tests/test_rules.py::test_masks_are_one_bit_an_entry_and_what_they_are_of_is_as_ever",
    ),
    Mutation(
        "what is made of constants has a tangent",
        "jaxcompact/pullbacks.py",
        "if is_inexact(aval) and i in moving]",
        "if is_inexact(aval)]",
        "tests/checkpoint/test_unread.py::test_what_has_no_gradient",
    ),
    Mutation(
        "a rule is handed zeros in the place of no cotangent",
        "jaxcompact/recording.py",
        "self.partial.add(op)",
        "pass",
        "tests/checkpoint/test_unread.py::test_what_has_no_gradient",
    ),
    Mutation(
        "all that a branch makes moves",
        "jaxcompact/moving.py",
        "return found if known and len(each) == len(op.jaxprs) else op.outs",
        "return op.outs",
        "tests/checkpoint/test_unread.py::test_what_has_no_gradient",
    ),
    Mutation(
        "features of normal equations are rounded",
        "jaxcompact/normal.py",
        "if len(of) == 1 for v in of",
        "if not of for v in of",
        "tests/test_normal.py::test_gradients_of_a_ridge_regression",
    ),
    Mutation(
        "all of a matrix that is solved with is a sum of squares",
        "jaxcompact/normal.py",
        "scaled = op.kind in MULTIPLES and len({*op.reads}) == 1",
        "scaled = op.kind in MULTIPLES",
        "tests/test_normal.py::test_which_features_are_whole",
    ),
    Mutation(
        "references in a branch are not seen",
        "jaxcompact/checkpoint.py",
        "map(_has_references, map(graph_of, bodies))",
        "()",
        "tests/checkpoint/test_refusals.py::test_mutable_references_are_refused_by_name",
    ),
    Mutation(
        "a solver's steps are chosen again of rounded numbers",
        "jaxcompact/decisions.py",
        "if again or op.kind in _COMPARES",
        "if op.kind in _COMPARES",
        "tests/models/test_diffrax.py::test_a_solver_that_chooses_its_steps",
    ),
    Mutation(
        "heads share a scale",
        "jaxcompact/compress.py",
        "group = max(1, min([codec.group_size, *tensor.shape[-1:]]))",
        "group = codec.group_size",
        "tests/test_linear_attention.py::"
        "test_a_head_that_is_small_has_scales_of_its_own",
    ),
]


def passes(copy: Path, *tests: str) -> bool:
    # Nothing is compiled before, by the mutated or by the plain.
    fresh = {"JAXCOMPACT_CACHE": str(copy / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    fresh |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--all-cases"]
    command += ["-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *tests], cwd=copy, env=os.environ | fresh, capture_output=True
    )
    shutil.rmtree(copy / "cache", ignore_errors=True)
    if done.returncode not in (0, 1):  # no test of that name, for example
        sys.exit(done.stdout.decode() + done.stderr.decode())
    return done.returncode == 0


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
        if not passes(copy, *{m.test for m in MUTATIONS}):
            print("the tests fail before anything is broken")
            return 1
        survived = 0
        for mutation in MUTATIONS:
            path = copy / mutation.path
            text = path.read_text()
            if (found := text.count(mutation.old)) != 1:
                sys.exit(f"{mutation.path}: {mutation.old!r} is there {found} times")
            path.write_text(text.replace(mutation.old, mutation.new))
            lives = passes(copy, mutation.test)
            path.write_text(text)
            survived += lives
            print("SURVIVED" if lives else "caught  ", mutation.what, flush=True)
            print(f"          {mutation.path}, by {mutation.test}", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
