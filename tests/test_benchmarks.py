"""The scripts in benchmarks/ run, at a size that says nothing about speed."""

import json
import os
import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[1]
_RUN = """
import runpy, sys
sys.path.insert(0, "benchmarks")
import limits, workload

limits._SIZE = 64
workload.SHAPES["S"] = dict(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=32, vocab_size=64)
for script, *options in {runs}:
    sys.argv = [script, *options, *"--prompts 2 --group-size 4 --new-tokens 3 --repeats 1".split()]
    runpy.run_path(f"benchmarks/{{script}}", run_name="__main__")
"""


def test_sampler_and_learner(tmp_path):
    """On one device, as their users have it, and in one process, as JAX takes seconds to start."""
    files = {name: str(tmp_path / name) for name in ("sampler", "learner")}
    runs = [
        ("sampler.py", "--rows", "2", "--json", files["sampler"]),
        ("learner.py", "--micro-batches", "2", "--dtype", "bfloat16", "--json", files["learner"]),
    ]
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _RUN.format(runs=runs)],
        cwd=_ROOT, env=os.environ | flags, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sampler, learner = (json.loads(pathlib.Path(file).read_text())["results"] for file in files.values())
    assert [result["rows"] for result in sampler] == [2]
    assert [result["micro_batch"] for result in learner] == [2]
    for result in [*sampler, *learner]:
        assert result["limits"].keys() == {"float32", "bfloat16", "copy"}
        assert result["fastest_gflops"] > 0
    for result in learner:
        assert result["fastest_seconds"] <= result["seconds"]
        assert result["temporary_mb"] > 0
        assert result["peak_rss_mb"] > 100
    assert "limits: 64² products, GFLOP/s:" in " ".join(done.stdout.split())
