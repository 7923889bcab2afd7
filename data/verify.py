"""Check folders of token shards: each file against its checksum, each token against the vocabulary.

python data/verify.py --data_dir data/edu_fineweb10B
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts data/ there instead

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

from data.loader import parse_corpora
from data.manifest import sha256
from data.shards import TokenStream, open_folder, open_folders
from utils.cli import start_script
from utils.errors import UserError
from utils.files import printable

CHUNK = 2**20  # tokens checked at a time


@dataclass
class VerifyOptions:
    """Check the checksums and token ids of folders of token shards."""

    data_dir: tuple[Path, ...]
    """Folders of token shards, as in train.py: FOLDER, or FOLDER:WEIGHT."""


def main(options: VerifyOptions) -> None:
    # As in train.py, a folder with a weight is a corpus; folders without weights form one corpus.
    for corpus in parse_corpora(options.data_dir):
        names = " ".join(map(printable, corpus.folders))
        train_folders = open_folders(corpus.folders, "train")
        # these may be empty, by --val_fraction 0
        val_folders = [open_folder(folder, "val") for folder in corpus.folders]
        for folders in (train_folders, val_folders):
            stream = TokenStream(folders)  # compares their tokenizers
            check_shards(stream)
            size = f"{len(stream):,} {stream.split} tokens"
            print(f"{names}: {size} of {stream.tokenizer_identity}, intact")


def check_shards(stream: TokenStream) -> None:
    """Raise UserError if a shard differs from its checksum or holds an id beyond the vocabulary."""
    for shard in stream.shards:
        # sha256 is None in a folder of another project, which has no manifest
        if shard.sha256 is not None and sha256(shard.path) != shard.sha256:
            raise UserError(f"{shard.path} differs from the manifest's checksum; make it again")
    # read in chunks, because a split may be larger than memory
    for start in range(0, len(stream), CHUNK):
        # Reading is the check: it raises UserError for an id beyond the vocabulary, and for a
        # header that contradicts the size of its file.
        stream.read(start, min(CHUNK, len(stream) - start))


if __name__ == "__main__":
    start_script(main, VerifyOptions)
