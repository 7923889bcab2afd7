"""Damage to files: bytes, JSON values, and the zip, the pickle and the values of a .pt."""

import io
import json
import pickletools
import random
import re
import zipfile

import torch

# pickle opcodes that call something; with os.system, `touch ran`
CODE = [
    b"cos\nsystem\n(Vtouch ran\ntR.",
    b"\x8c\x02os\x8c\x06system\x93\x8c\x09touch ran\x85R.",
    b"c__builtin__\neval\n(Vopen('ran','w')\ntR.",
    b"(Vtouch ran\nios\nsystem\n.",
    b"ctorch._utils\n_rebuild_parameter\n)R.",
]


def place(rng: random.Random, raw: bytes) -> int:
    """An offset, more often near the ends, where headers and directories are."""
    near = min(len(raw), 400)
    return rng.choice(
        [rng.randrange(len(raw) + 1), rng.randrange(near + 1), len(raw) - rng.randrange(near + 1)]
    )


def damage_once(rng: random.Random, raw: bytes) -> bytes:
    """One flip, cut, insertion, move, run of zeros, repeat or huge number."""
    at, n = place(rng, raw), rng.choice([1, 1, 2, 4, 8, 64, 512])
    head, middle, tail = raw[:at], raw[at : at + n], raw[at + n :]
    huge = rng.choice([2**63 - 1, 2**64 - 1, 2**32 - 1, 2**31, 2**40, 0])
    return rng.choice(
        [
            lambda: head + bytes(b ^ (1 << rng.randrange(8)) for b in middle) + tail,
            lambda: head,
            lambda: tail,
            lambda: head + tail,
            lambda: head + rng.randbytes(n) + middle + tail,
            lambda: head + tail[:n] + middle + tail[n:],
            lambda: head + bytes(len(middle)) + tail,
            lambda: raw + raw[at:],
            lambda: head + huge.to_bytes(8, "little")[: len(middle)] + tail,
            lambda: head + b"9" * n + tail,
            lambda: head + rng.choice(CODE) + tail,
        ]
    )()


def damage_bytes(rng: random.Random, raw: bytes) -> bytes:
    """A few of them."""
    for _ in range(rng.choice([1, 1, 2, 8])):
        raw = damage_once(rng, raw)
    return raw


HUGE = [-1, 0, 2**31, 2**63, -(2**63), 10**40, 1e308, float("nan"), float("inf"), -1e-320]
ODD = [*HUGE, None, True, False, "", "12", "\0", "a/../b", "\ud800", [], {}, [[1]], {"a": 1}, 3.5]


def odd_tensor(rng: random.Random, like: torch.Tensor) -> object:
    """A tensor that is not what `like` is in one respect."""
    return rng.choice(
        [
            lambda: like.double(),
            lambda: like.float(),
            lambda: like.int(),
            lambda: like.bool(),
            lambda: like.to(torch.complex64),
            lambda: like.reshape(-1)[:1],
            lambda: like.reshape(-1),
            lambda: like[None],
            lambda: like.new_zeros(0),
            lambda: like.float().to_sparse(),
            lambda: like.to("meta"),
            lambda: like.new_zeros(1).expand(2**40),
            lambda: like.new_zeros(()).expand(like.shape),
            lambda: torch.quantize_per_tensor(like.float(), 0.1, 0, torch.qint8),
            lambda: torch.nn.Parameter(like.float()),
            lambda: like.reshape(-1).tolist(),
            lambda: torch.full_like(like, -1),
        ]
    )()


def damage_value(rng: random.Random, value: object) -> object:
    """The same with one node replaced, removed, renamed or wrapped."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = rng.choice(list(keys))
        value = value.copy()
        act = rng.random()
        if act < 0.08:
            del value[key]
        elif act < 0.14 and isinstance(value, dict):
            value[rng.choice(["a", "", str(key) + "x", rng.choice(list(keys))])] = value.pop(key)
        else:
            value[key] = damage_value(rng, value[key])
        return value
    if isinstance(value, torch.Tensor) and rng.random() < 0.8:
        return odd_tensor(rng, value)
    if type(value) is int and rng.random() < 0.3:
        return rng.choice([value + 1, -value, value * 1000, float(value), str(value)])
    nested = value
    for _ in range(rng.choice([1, 2, 300])):
        nested = [nested]
    return rng.choice([*ODD, [value], {"x": value}, nested])


def damage_json(rng: random.Random, raw: bytes) -> bytes:
    """Values replaced, numbers made huge, deep nesting; of a .jsonl in one line."""
    lines = raw.splitlines(keepends=True) if raw.count(b"\n{") else [raw]
    i = rng.randrange(len(lines))
    act = rng.random()
    if act < 0.7:
        lines[i] = json.dumps(damage_value(rng, json.loads(lines[i]))).encode() + b"\n"
    else:
        deep, end = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
        n = rng.choice([900, 10**5])
        new = rng.choice([b"9" * 400, b"9" * 5000, b"1e999", b"-0", deep * n, deep * n + end * n])
        numbers = list(re.finditer(rb"(?<=[ :\[])[\d.e-]+(?=[,}\n\]])", lines[i]))
        start, stop = rng.choice(numbers).span()
        lines[i] = lines[i][:start] + new + lines[i][stop:]
    return b"".join(lines)


def rezip(records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, content in records.items():
            file.writestr(name, content)
    return buffer.getvalue()


def damage_pickle(rng: random.Random, raw: bytes) -> bytes:
    """One opcode replaced: a number (size, stride, key) by another, or anything by code."""
    operations = list(pickletools.genops(raw))
    i = rng.randrange(len(operations) - 1)
    new = rng.choice([*CODE, rng.randbytes(1), b"N", b"0", b"]", b"}", b")", b"("])
    if rng.random() < 0.7:
        i = rng.choice([i for i, o in enumerate(operations) if "INT" in o[0].name])
        exponent = rng.choice([0, 2, 20, 31, 40, 62, 63, 64, 80])
        number = rng.choice([-1, 1]) * 2**exponent - rng.choice([0, 1])
        new = b"\x8a\x0b" + number.to_bytes(11, "little", signed=True)
    start, end = operations[i][2], operations[i + 1][2]
    return raw[:start] + new + raw[end:]


def damage_zip(rng: random.Random, raw: bytes) -> bytes:
    """Records lost, renamed, cut, compressed, or with a damaged pickle; the zip itself is whole."""
    with zipfile.ZipFile(io.BytesIO(raw)) as file:
        records = {name: file.read(name) for name in file.namelist()}
    name, act = rng.choice(list(records)), rng.random()
    pkl = next(n for n in records if n.endswith("data.pkl"))
    if act < 0.5:
        records[pkl] = damage_pickle(rng, records[pkl])
    elif act < 0.65:
        records[pkl] = damage_bytes(rng, records[pkl])
    elif act < 0.75:
        del records[name]
    elif act < 0.8:
        records[rng.choice(list(records)) + rng.choice(["", "x"])] = records.pop(name)
    elif act < 0.95:
        records[name] = damage_bytes(rng, records[name])
    else:
        records[pkl] += bytes(2**26)  # a bomb, compressed
        return rezip(records, zipfile.ZIP_DEFLATED)
    return rezip(records)


def damage_checkpoint(rng: random.Random, raw: bytes) -> bytes:
    """A .pt damaged as a file, as a zip, as a pickle or as the values that it holds."""
    damage = rng.choice([damage_bytes, damage_zip, damage_zip, None, None])
    if damage:
        return damage(rng, raw)
    state = damage_value(rng, torch.load(io.BytesIO(raw), weights_only=True))
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=rng.random() < 0.95)
    return buffer.getvalue()
