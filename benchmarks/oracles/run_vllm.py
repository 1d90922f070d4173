"""Generates greedy texts with vLLM, with or without draft heads, and counts acceptance. `compare_vllm.py` starts this
script in vLLM's environment, which need not have this package.

    python run_vllm.py REQUEST.json ANSWER.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
# saves starting a process, and errors are raised in this one
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# otherwise binds to a core that another process may be using
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main(request_file: str, answer_file: str) -> None:
    """Reads the request, and writes token ids, seconds and vLLM's own counters."""
    import torch
    import transformers
    import vllm

    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    llm = vllm.LLM(**request["model"], max_num_seqs=1, enforce_eager=True, disable_log_stats=False)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=request["max_new_tokens"], ignore_eos=True)
    start = time.perf_counter()
    texts = []
    for prompt in request["prompts"]:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        texts.append(list(output.outputs[0].token_ids))
    answer = {
        "texts": texts,
        "seconds": round(time.perf_counter() - start, 2),
        "counters": {
            metric.name.removeprefix("vllm:spec_decode_"): getattr(metric, "values", None) or metric.value
            for metric in llm.get_metrics()
            if "spec_decode" in metric.name
        },
        "versions": {module.__name__: module.__version__ for module in (vllm, torch, transformers)},
    }
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
