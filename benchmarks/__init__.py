"""Measurements of the shipped pair, or of any other target and heads; results are JSON with their provenance.

    python -m benchmarks.bench_speedup   tokens per second against plain generate and transformers' own methods
    python -m benchmarks.bench_round     where the wall time of a round goes
    python -m benchmarks.bench_cache     pre-allocated slots against transformers' cache, by length of the context
    python -m benchmarks.bench_batch     batches against plain batches
    python -m benchmarks.bench_compile   compiled rounds, and the floor that memory bandwidth sets
    python -m benchmarks.bench_context   long contexts, and plain steps where drafting does not pay
    python -m benchmarks.bench_train     a training step against dense masks and whole logits
    python -m benchmarks.methods         all methods, greedy and sampled
    python -m benchmarks.acceptance      acceptance length and pos-acc of several heads, at several depths
    python -m benchmarks.choose_tree     which draft tree is fastest on this machine
    python -m benchmarks.training_curve  acceptance length over training compute
    python -m benchmarks.render_readme   puts the tables into README.md and docs/

Run them in the repository's root; each takes `--help`.
"""
