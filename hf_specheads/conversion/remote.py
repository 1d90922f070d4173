"""Headers of weight files on the Hub, read with range requests: what is in a repository without downloading it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

from ..errors import CorruptCheckpointError, HeadLoadError
from .checkpoint import Checkpoint, check_tensors, header_tensor, without_common_prefix
from .files import INDEXES, SAFETENSORS_INDEX, WEIGHT_FILES, needed, read_index

# What can go wrong on the way: answers of the Hub, and errors of the HTTP client that huggingface_hub uses (httpx in
# one version, its successor in the next).
HUB_ERRORS = (HfHubHTTPError, HfHubHTTPError.__bases__[0], OSError)


def remote_headers(
    repo: str,
    download: Callable[[str], str | None],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> tuple[dict[str, int], Checkpoint | None]:
    """Sizes of a repository's weight files, and their tensors on the device `meta`.

    Args:
        repo: Hub id.
        download: Fetches a small file, an index, and returns its path.
        revision, token, local_files_only: As for `load_heads`.

    Returns:
        Bytes by file name, and `None` in place of the tensors where the weights are pickled, which have no header.

    Raises:
        HeadLoadError: if there are no weights, or the Hub does not answer.
        CorruptCheckpointError: for a header or an index that is none.
    """
    if local_files_only:
        raise HeadLoadError(
            f"{repo!r} can only be looked at on the Hub; leave out local_files_only, or pass its folder."
        )
    api = HfApi(token=token)
    try:
        listed = {file.rfilename: file.size or 0
                  for file in api.model_info(repo, revision=revision, files_metadata=True).siblings or ()}  # fmt: skip
    except HUB_ERRORS as error:
        raise HeadLoadError(f"{repo!r} cannot be asked for: {str(error).splitlines()[0]}") from error
    first = next((name for name in WEIGHT_FILES if name in listed), None)
    if first is None:
        raise HeadLoadError(f"{repo!r} has no weights; expected one of {', '.join(WEIGHT_FILES)}.")
    index = read_index(Path(download(first) or "")) if first in INDEXES else None
    names = [first] if index is None else sorted({index[key] for key in needed(index)})
    sizes = {name: listed.get(name, 0) for name in names}
    if not first.endswith(".safetensors") and first != SAFETENSORS_INDEX:
        return sizes, None
    tensors = {}
    for name in names:
        try:
            header = api.parse_safetensors_file_metadata(repo, name, revision=revision, token=token).tensors
        except (SafetensorsParsingError, NotASafetensorsRepoError) as error:
            raise CorruptCheckpointError(f"{name} of {repo!r} is no safetensors file: {error}") from error
        except HUB_ERRORS as error:
            raise HeadLoadError(f"the header of {name} of {repo!r} cannot be read: {error}") from error
        for key in needed(header):
            tensors[key] = header_tensor(key, header[key].dtype, list(header[key].shape), name)
    check_tensors(tensors, Path(names[0]))
    return sizes, Checkpoint(without_common_prefix(tensors), tuple(Path(name) for name in names))
