"""Commands that serve an export. `{folder}` and `{target}` stand for the export's folder and the target's name."""

from __future__ import annotations

import json
from pathlib import Path

from ...heads.base import DraftHead


def drafted_positions(heads: DraftHead) -> int:
    """Number of draft positions to request from an engine: the depth of the heads' own tree.

    This also holds for POSS heads, whose specialist 0 then drafts the later positions as well.
    """
    return heads.tree_config.depth


def vllm_command(heads: DraftHead, method: str) -> str:
    """Command for vLLM, which drafts chains. It names the method, because vLLM otherwise infers it from the path."""
    speculative = {"model": "@", "method": method, "num_speculative_tokens": drafted_positions(heads)}
    return f"vllm serve {{target}} --speculative-config '{_braced(json.dumps(speculative))}'"


def path_note(folder: Path, method: str) -> list[str]:
    """Note for the user if vLLM, which infers an unnamed method from the path, would infer another one; else empty."""
    text = str(folder).lower()
    inferred = "eagle" if "eagle-" in text else "eagle3" if "eagle3" in text else None
    if inferred == method:
        return []
    found = "no method" if inferred is None else f"the method {inferred!r}"
    return [f"vLLM infers {found} from this path: name {method!r} explicitly, as the command below does"]


def _braced(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}").replace('"@"', '"{folder}"')


def sglang_command(heads: DraftHead, algorithm: str) -> str:
    """Command for SGLang, which drafts chains (top-k 1) and EAGLE-2's trees."""
    tree, steps = heads.tree_config, drafted_positions(heads)
    top_k = tree.top_k if tree.kind == "dynamic" else 1
    tokens = tree.total_tokens if tree.kind == "dynamic" else steps + 1
    return (
        f"python -m sglang.launch_server --model-path {{target}} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {{folder}} --speculative-num-steps {steps} "
        f"--speculative-eagle-topk {top_k} --speculative-num-draft-tokens {tokens}"
    )
