"""Corpus of the shipped pair: the Python standard library's source, split by file into train and held-out.

The split is decided by a hash of the relative path, so it does not depend on the order of the files, on the
machine or on which optional folders (`test`, `idlelib`, ...) an installation leaves out.
"""

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

HELD_OUT_PER_MILLE = 25
# Tables rather than programs: thousands of near-identical lines that any model learns by heart.
SKIPPED_PARTS = {"site-packages", "__pycache__", "encodings", "cjkencodings", "pydoc_data", "bad_grammars"}
MAX_FILE_BYTES = 400_000


def corpus_files(root: Path | None = None) -> list[Path]:
    """Python files of the corpus, sorted by relative path.

    Args:
        root: Folder to search; default the running interpreter's standard library.

    Raises:
        FileNotFoundError: if `root` holds no usable Python file.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not SKIPPED_PARTS & set(path.relative_to(root).parts) and 200 < path.stat().st_size < MAX_FILE_BYTES
    ]
    if not files:
        raise FileNotFoundError(f"no Python source files under {root}; pass the folder of a standard library")
    return files


def is_held_out(path: Path, root: Path) -> bool:
    """Whether a file belongs to the held-out split (about 2.5 % of all files), by a hash of its relative path."""
    digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def read_split(held_out: bool, root: Path | None = None) -> list[str]:
    """Texts of one split, one string per file; files that are not valid UTF-8 are left out."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in corpus_files(root):
        if is_held_out(path, root) != held_out:
            continue
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    return texts


def fingerprint(texts: list[str]) -> str:
    """Short hash of a list of texts: goes into the model cards, so that a rebuilt corpus can be compared."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()[:16]


def pack_tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase, block_size: int, seed: int = 0) -> torch.Tensor:
    """All texts as one stream of blocks, files in a seeded random order and separated by the EOS token.

    Returns:
        int32 tensor [number of blocks, block_size]; a remainder shorter than a block is dropped.
    """
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = [texts[i] for i in order]
    stream: list[int] = []
    for start in range(0, len(shuffled), 64):
        for ids in tokenizer(shuffled[start : start + 64], add_special_tokens=False)["input_ids"]:
            stream.extend(ids)
            stream.append(tokenizer.eos_token_id)
    usable = len(stream) // block_size * block_size
    return torch.tensor(stream[:usable], dtype=torch.int32).view(-1, block_size)


class PackedBlocks(Dataset):
    """Language-modelling items from packed blocks: `input_ids` and `labels` of `block_size` tokens each."""

    def __init__(self, blocks: torch.Tensor):
        self.blocks = blocks

    def __len__(self) -> int:
        return self.blocks.shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.blocks[index].long()
        return {"input_ids": ids, "labels": ids}
