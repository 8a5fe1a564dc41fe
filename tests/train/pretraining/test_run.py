"""What a run prints, counts, draws and judges."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pretrain
from jaxcompact import Quantized
from methods import Method
from summary import linear_input_bytes
from tests.train.pretraining.runs import SMALL, TINY, losses_of, rows_of
from training import Training

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.mark.slow
def test_a_spike_at_a_new_projection_is_in_the_log(book, tmp_path, monkeypatch, capsys):
    """A run whose weights are quadrupled as its second projection begins."""
    compile_step = pretrain.compile_step

    def disturbed(job):
        step = compile_step(job)

        def run(state, tokens):
            if state.step == 40:
                wrong = jax.tree.map(lambda w: 4 * w, state.params)
                state = state._replace(params=wrong)
            return step(state, tokens)

        return run

    monkeypatch.setattr(pretrain, "compile_step", disturbed)
    given = ["--data", str(book), *SMALL, "--method", "compact", "--period", "40"]
    given += ["--steps", "45", "--log-every", "45", "--out", str(tmp_path)]
    assert pretrain.main(given) == 0
    [spike] = [x for x in capsys.readouterr().out.splitlines() if "a spike" in x]
    assert spike.endswith("before the new projection of step 41")


def test_both_methods_learn_and_stand_side_by_side(example):
    out, printed = example
    table = printed[printed.index("validation loss  perplexity") :].splitlines()
    names = [line.split()[0] for line in table[1:3]]
    assert names == ["compact", "exact"]
    summaries = {}
    for name, line in zip(names, table[1:3], strict=True):
        folder = out / name
        summary = summaries[name] = json.loads((folder / "summary.json").read_text())
        valid = [row["valid_loss"] for row in rows_of(folder) if "valid_loss" in row]
        assert valid[-1] == summary["valid_loss"] < valid[0] < math.log(257)
        assert f"{summary['valid_loss']:.4f}" in line
        assert sorted(losses_of(folder)) == list(range(1, 11))
        assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["10", "8"]
    # The methods begin with the same weights and the same batch.
    first = [losses_of(out / name)[1] for name in names]
    assert first[0] == pytest.approx(first[1], rel=1e-5)
    for held in ("gradient_bytes", "optimizer_bytes", "linear_input_bytes"):
        assert summaries["compact"][held] < summaries["exact"][held]


def test_it_says_what_it_reads_and_where_it_writes(example):
    out, printed = example
    assert printed.startswith("data: 1 document, ")
    assert "compiled in" in printed and str(out / "exact") in printed
    assert "step     10/10  loss" in printed and "tokens/s" in printed


def test_curves_are_drawn(example):
    assert (example[0] / "curves.png").exists()


def test_gradients_and_optimizer_state_are_counted_by_hand(example):
    """float32; matrices q, k, v 32x32, gate, up 32x48, down 48x32, at rank n/4."""
    rest = 2 * 257 * 32 + 32 + 2 * (2 * 32 + 32 * 32)  # embedding, head, norms, o
    exact = rest + 2 * (3 * 32 * 32 + 3 * 32 * 48)
    compact = rest + 2 * (3 * 8 * 32 + 2 * 8 * 48 + 12 * 32)
    for name, size in (("exact", exact), ("compact", compact)):
        summary = json.loads((example[0] / name / "summary.json").read_text())
        assert summary["gradient_bytes"] == 4 * size
        # Two moments; Adam's and the schedule's counts, and the subspace's own state.
        assert 0 < summary["optimizer_bytes"] - 2 * 4 * size <= 32


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (Method("exact"), 100 * (128 + 128 + 352) * 2),
        (Method("galore"), 100 * (128 + 128 + 352) * 2),
        (Method("remat"), None),
        # A quarter of 352 is 88, which as a rank becomes a multiple of 64.
        (Method("compact"), 100 * (32 + 32 + 64) * 2),
        (
            Method("compact", rank=0.5, bits=4),
            2 * Quantized(bits=4).nbytes((100, 64)) + Quantized(4).nbytes((100, 192)),
        ),
    ],
)
def test_linear_inputs_are_counted_once_for_those_that_share_them(method, expected):
    job = Training(TINY, method, lambda _: 1e-3, dtype=jnp.bfloat16)
    counted = linear_input_bytes(job, job.abstract.params, tokens=100)
    assert counted == (expected and TINY.layers * expected)


def judged(arguments, tmp_path, *more):
    """A run that is not begun: its config, data and job."""
    given = [*arguments, "--method", "compact", "--out", str(tmp_path), *more]
    (config,) = pretrain.pretrain_options.parse(given)
    dataset = pretrain.load_data(config)
    return config, dataset, pretrain.prepare(config, dataset)


def test_validation_reads_the_same_text_however_batches_are_cut(arguments, tmp_path):
    made = [
        judged(arguments, tmp_path, "--batch-size", "8", "--accumulate", cut)
        for cut in ("1", "2")
    ]
    whole, cut = (list(pretrain.read_validation(*each[:2])) for each in made)
    assert [len(batch) for batch in whole] == [8, 8]  # of --eval-batches 2
    assert [len(batch) for batch in cut] == [4, 4, 4, 4]
    np.testing.assert_array_equal(np.concatenate(cut), np.concatenate(whole))
    losses = [
        pretrain.evaluate(
            jax.jit(job.training.weighed_loss), pretrain.init(job), job, dataset
        )
        for _, dataset, job in made
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # float32 sums reordered


@pytest.mark.parametrize(
    "pairs, mean", [([(2, 30), (5, 10)], 2.75), ([(0, 0), (0, 0)], 0)]
)
def test_a_microbatch_counts_in_validation_by_what_is_guessed_in_it(
    arguments, tmp_path, pairs, mean
):
    _, dataset, job = judged(arguments, tmp_path)
    found = iter(np.array(pairs, np.float32))
    state = pretrain.init(job)
    assert pretrain.evaluate(lambda *_: next(found), state, job, dataset) == mean


def test_help_names_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit, match="0"):
        pretrain.main(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for part in (
        "--output-alpha",
        "(default: exact,compact)",
        "then a cosine to 10 % (default: 0.1)",
        "or 4 (default: 16)",
    ):
        assert part in printed
