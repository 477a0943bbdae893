"""A kernel's PTX, evaluated: the instructions of programs without loops, all threads of a block at a time.

What Pallas interprets on a CPU is not what a GPU runs where a kernel is written in single instructions
(`kernels/instructions.py`); this is, up to the assembler. Approximate functions are computed exactly.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

WORD, LONG, FLOAT = np.uint32, np.uint64, np.float32
SPACE = 1 << 32  # addresses of one array; shared memory comes first


def run(source: str, arrays: list[np.ndarray], block: tuple[int, ...]) -> None:
    """One block of the grid of a program that has one kernel; `arrays` are changed in place."""
    threads = int(re.search(r"\.reqntid (\d+)", source)[1])
    body = source[source.index("{", source.index(".entry")) + 1 : source.rindex("}")]
    body = re.sub(r"//[^\n]*", "", body)
    Block([np.zeros(1 << 17, np.uint8), *(a.reshape(-1).view(np.uint8) for a in arrays)], threads, block).run(body)


class Block:
    def __init__(self, memory: list[np.ndarray], threads: int, block: tuple[int, ...]) -> None:
        self.memory, self.threads, self.block = memory, threads, block
        self.registers: dict[str, np.ndarray] = {}

    def run(self, body: str) -> None:
        for line in body.split(";"):
            text = re.sub(r"^[{}\s]+", "", line).strip()
            if not text or text.startswith((".", "$", "bar.sync", "griddepcontrol")):
                continue
            text = re.sub(r"^\$L\S+:\s*", "", text)
            guard = re.match(r"@(!?)(%p\d+)\s+", text)
            mask = np.ones(self.threads, bool)
            if guard:
                mask, text = self.registers[guard[2]] ^ bool(guard[1]), text[guard.end() :]
            if text == "ret":
                return
            name, _, rest = text.partition(" ")
            self.one(name.split("."), re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", rest), mask)

    def one(self, name: list[str], operands: list[str], mask: np.ndarray) -> None:
        kind = name[-1]
        if name[0] == "st":
            return self.store(operands, mask, 2 if kind == "b16" else 4)
        if name[0] == "ldmatrix":
            return self.load_matrix(operands)
        if name[0] == "ld":
            return self.load(name, operands, mask, 2 if kind == "b16" else 4)
        target, *given = operands
        values = [self.value(x, self.type(name, place)) for place, x in enumerate(given)]
        self.registers[target] = np.broadcast_to(np.asarray(compute(name, values)), (self.threads,))
        return None

    def type(self, name: list[str], place: int) -> Any:
        if name[0] == "selp" and place == 2:
            return bool
        kind = name[-1] if name[0] != "setp" else name[2]
        kind = "u32" if name[0] in ("mul", "mad") and name[1] == "wide" and kind == "u32" else kind
        return {"f32": FLOAT, "f64": np.float64, "s32": np.int32, "s64": np.int64, "b64": LONG, "u64": LONG}.get(
            kind, bool if kind == "pred" else WORD
        )

    def value(self, text: str, kind: Any) -> np.ndarray:
        sign = -1 if text.startswith("-%") else 1
        if text in ("%tid.x", "%ctaid.x", "%ctaid.y"):
            found = np.arange(self.threads) if text == "%tid.x" else np.full(1, self.block["xy".index(text[-1])])
            return found.astype(kind)
        if text.startswith("0f"):
            return np.asarray([int("0x" + text[2:], 0)], WORD).view(FLOAT)
        if text == "global_smem":
            return np.zeros(1, kind)
        if re.match(r"-?(0x)?[0-9]", text):
            wide = np.asarray([int(text, 0) & (2**64 - 1)], LONG)
            return wide.astype(WORD).view(kind) if np.dtype(kind).itemsize == 4 else wide.view(kind)
        found = self.registers[text]
        if kind is bool:
            return found
        same = found.view(kind) if found.itemsize == np.dtype(kind).itemsize else found.astype(kind)
        return same * sign if sign < 0 else same

    def places(self, text: str, count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        base, _, offset = text.strip("[ ]").replace(" ", "").partition("+")
        start = (np.zeros(self.threads, LONG) if base == "global_smem" else self.registers[base]) + LONG(
            int(offset or 0)
        )
        start = np.broadcast_to(start, (self.threads,))
        return start // LONG(SPACE), (start % LONG(SPACE))[:, None] + np.arange(count * width, dtype=LONG)

    def load(self, name: list[str], operands: list[str], mask: np.ndarray, width: int) -> None:
        if name[1].startswith("param"):
            place = int(re.search(r"_(\d+)\]", operands[1])[1])
            self.registers[operands[0]] = np.full(self.threads, (place + 1) * SPACE, LONG)
            return
        targets = operands[0].strip("{ }").replace(" ", "").split(",")
        arrays, where = self.places(operands[1], len(targets), width)
        made = np.zeros(where.shape, np.uint8)
        for number in np.unique(arrays[mask]):
            chosen = mask & (arrays == number)
            made[chosen] = self.memory[int(number)][where[chosen].astype(np.int64)]
        words = made.view(np.uint16 if width == 2 else WORD)
        for target, column in zip(targets, words.T, strict=True):
            old = self.registers.get(target, np.zeros(self.threads, column.dtype))
            self.registers[target] = np.where(mask, column, old)

    def load_matrix(self, operands: list[str]) -> None:
        """Of each warp one of 8 x 8 numbers of 16 bits: its first eight threads say where rows are, all get two."""
        arrays, where = self.places(operands[1], 4, 4)
        lane = np.arange(self.threads) % 32
        row = np.arange(self.threads) - lane + lane // 4
        words = self.memory[int(arrays[0])][where[row].astype(np.int64)].view(WORD)
        self.registers[operands[0].strip("{ }")] = words[np.arange(self.threads), lane % 4]

    def store(self, operands: list[str], mask: np.ndarray, width: int) -> None:
        given = operands[1].strip("{ }").replace(" ", "").split(",")
        arrays, where = self.places(operands[0], len(given), width)
        words = [np.broadcast_to(self.value(x, np.uint16 if width == 2 else WORD), (self.threads,)) for x in given]
        made = np.ascontiguousarray(np.stack(words, 1)).view(np.uint8)
        for number in np.unique(arrays[mask]):
            chosen = mask & (arrays == number)
            self.memory[int(number)][where[chosen].astype(np.int64)] = made[chosen]


def compute(name: list[str], v: list[Any]) -> Any:
    kind, word = name[-1], name[0]
    with np.errstate(all="ignore"):
        if word in ("add", "sub", "mul", "fma", "mad") and kind == "f32":
            wide = [x.astype(np.float64) for x in v]
            made = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}.get(word)
            return rounded(made(*wide) if made else wide[0] * wide[1] + wide[2], name)
        if word in FUNCTIONS:
            return flushed(FUNCTIONS[word](*(x.astype(np.float64) for x in map(flushed, v))).astype(FLOAT))
        if word == "mul" and name[1] == "wide":
            return v[0].astype(np.int64 if kind == "s32" else LONG) * v[1].astype(np.int64 if kind == "s32" else LONG)
        if word == "setp":
            return COMPARED[name[1]](v[0], v[1])
        if word == "cvt":
            return converted(name, v)
        return PLAIN[word](*v)


def rounded(wide: np.ndarray, name: list[str]) -> np.ndarray:
    made = wide.astype(FLOAT)
    if "rz" in name:
        made = np.where(np.abs(made.astype(np.float64)) > np.abs(wide), np.nextafter(made, FLOAT(0)), made)
    return np.clip(made, FLOAT(0), FLOAT(1)) if "sat" in name else made


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < FLOAT(2.0**-126), np.copysign(FLOAT(0), x), x)


def converted(name: list[str], v: list[Any]) -> Any:
    if name[1] == "pack":
        high, low, rest = (x.view(np.int32) for x in v)
        bytes_ = [np.clip(x, 0, 255).astype(WORD) for x in (high, low)]
        return (rest.view(WORD) << WORD(16)) | (bytes_[0] << WORD(8)) | bytes_[1]
    to, source = name[-2], name[-1]
    if to == "bf16x2":
        halves = [(x.view(WORD) + WORD(0x7FFF) + ((x.view(WORD) >> WORD(16)) & WORD(1))) >> WORD(16) for x in v]
        return (halves[0] << WORD(16)) | halves[1]
    kinds = {"f32": FLOAT, "u32": WORD, "s32": np.int32, "u64": LONG, "s64": np.int64}
    return v[0].view(kinds[source]).astype(kinds[to])


def permuted(a: Any, b: Any, selector: Any) -> Any:
    given = [(x >> WORD(8 * byte)) & WORD(255) for x in (a, b) for byte in range(4)]
    chosen = [given[int(selector[0]) >> (4 * place) & 7] << WORD(8 * place) for place in range(4)]
    return chosen[0] | chosen[1] | chosen[2] | chosen[3]


FUNCTIONS = {
    "ex2": np.exp2, "rcp": lambda x: 1 / x, "sqrt": np.sqrt, "div": lambda a, b: a / b,
}  # fmt: skip
COMPARED = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
PLAIN = {
    "mov": lambda x: x, "cvta": lambda x: x, "abs": np.abs, "neg": np.negative,
    "max": np.fmax, "min": np.fmin, "add": np.add, "sub": np.subtract, "mul": np.multiply,
    "mad": lambda a, b, c: a * b + c,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "shl": lambda x, by: x << by.astype(x.dtype), "shr": lambda x, by: x >> by.astype(x.dtype),
    "selp": lambda a, b, p: np.where(p, a, b), "prmt": permuted,
    "shfl": lambda x, lane, *_: x[np.arange(len(x)) ^ int(lane[0])],
    "redux": lambda x, _: np.repeat(x.reshape(-1, 32).max(1), 32),  # of a warp, which jax 0.12 has of whole numbers
}  # fmt: skip
