"""Seeds of random numbers as PyTorch takes them."""

import zlib


def hash_seed(parts: str) -> int:
    """Return a seed that follows from a text with all that it depends on, such as "SEED STEP".

    Hashed to 32 bits, all that PyTorch's generator for CPUs keeps of a seed: whole numbers of any
    size can be parts. A sum of them would be the same for the next step of one process and for the
    same step of the next process.
    """
    return zlib.crc32(parts.encode())
