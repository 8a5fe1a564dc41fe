#!/usr/bin/env bash
# All that only a GPU can tell, in one command under 9 minutes:
#
#     PYTHONPATH=. benchmarks/gpu.sh [OUT]        OUT: a folder, benchmarks/results/gpu
#
# Needs jax, flax, optax, orbax and numpy; no network, no install. One JSON line a part
# in OUT/step.jsonl, what was printed in OUT/PART.log. Without a GPU it runs at toy size,
# so that it is known to work. PYTHON names the interpreter, COMMIT the commit where there
# is no git; SECONDS_LEFT (520) is the whole time: parts that would not fit are said.
set -u
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/gpu}
python=${PYTHON:-python3}
end=$((SECONDS + ${SECONDS_LEFT:-520}))
export PYTHONPATH=. PYTHONUNBUFFERED=1
mkdir -p "$out"
rm -f "$out"/step.jsonl "$out"/*.log

if "$python" -c 'import jax; raise SystemExit(jax.default_backend() != "gpu")'; then
    size=(--model 350m --batch 128 --seq 256 --steps 15 --seconds 8)
    on_gpu=1
else
    echo "no GPU: toy size"
    on_gpu=
    size=(--model tiny --batch 4 --seq 64 --dtype float32 --steps 3 --seconds 5)
fi

failed=0
limited() { # NAME SECONDS COMMAND...: within the time that is left
    local name=$1 most=$2 left=$((end - SECONDS))
    shift 2
    if [ "$left" -lt 20 ]; then
        echo "$name: not run, no time left"
        failed=1
        return 1
    fi
    if timeout "$((left < most ? left : most))" "$@" >"$out/$name.log" 2>&1; then
        echo "$name: done at $SECONDS s"
    else
        echo "$name: FAILED with status $?, see $out/$name.log"
        tail -n 3 "$out/$name.log"
        failed=1
        return 1
    fi
}

step() { # NAME OPTIONS...: one row of step.jsonl
    local name=$1
    shift
    if limited "$name" 90 "$python" benchmarks/step.py --part "$name" "${size[@]}" "$@"
    then
        grep '^{' "$out/$name.log" >>"$out/step.jsonl"
    fi
}

limited tests 170 "$python" tests/gpu/test_gpu.py
step exact --method exact
step remat_nothing --method remat --checkpoint nothing
step remat_dots_no_batch --method remat --checkpoint dots_no_batch
step compact --method compact --rank 0.25
step compact_remat_nothing --method compact --rank 0.25 --checkpoint nothing
step compact_remat_dots_no_batch --method compact --rank 0.25 --checkpoint dots_no_batch
step int4 --method exact --checkpoint int4
step compact_int4 --method compact --rank 0.25 --checkpoint int4
# The allocator's peak beside that of the compiled program: within 2 %.
[ -z "$on_gpu" ] ||
    limited memory 90 "$python" benchmarks/memory.py --method int4 --measure
step int8 --method exact --checkpoint int8
step int3 --method exact --checkpoint int3
step offload --method exact --checkpoint offload
step galore --method galore --rank 0.25
step remat_dots --method remat --checkpoint dots
step compact_half_4bit --method compact --rank 0.5 --bits 4
step compact_countsketch --method compact --rank 0.25 --kind countsketch
"$python" benchmarks/table.py "$out/step.jsonl"
exit "$failed"
