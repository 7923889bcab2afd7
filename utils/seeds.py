"""Seeds of random numbers as PyTorch takes them."""

import zlib


def hash_seed(text: str) -> int:
    """Return a 32-bit seed: the hash of a text that names everything the seed depends on, such as
    "SEED STEP".

    PyTorch's generator for CPUs keeps only 32 bits of a seed. A hash, unlike a sum, takes numbers
    of any size and differs between step 1 of process 0 and step 0 of process 1.
    """
    return zlib.crc32(text.encode())
