"""Disassembles kernels, and reads the machine code of NVIDIA GPUs (SASS) that nvdisasm and `cuobjdump -sass` print."""

import re
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from benchmarks.launch_recorder import TOOLS


class Instruction(NamedTuple):
    address: int
    opcode: str  # with its modifiers
    operands: str


INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")


def disassemble(cubins: Sequence[bytes], arch: int) -> list[str]:
    """Returns the SASS of kernels, without a header, from one run of nvdisasm, which takes 0.2 s to start.

    The addresses are those in the code of all kernels together, also where an instruction jumps to.

    Args:
        cubins: each with one kernel.
        arch: 80, 90, ...
    """
    codes = [code_of(cubin) for cubin in cubins]
    starts = [0, *accumulate(map(len, codes))]
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        target = f"SM{arch}{'a' if arch >= 90 else ''}"
        command = [str(TOOLS / "nvdisasm"), "--binary", target, file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines: list[list[str]] = [[] for _ in codes]
    for line in printed.splitlines():
        if found := re.match(r"\s*/\*([0-9a-f]{4,})\*/", line):
            lines[bisect_right(starts, int(found[1], 16)) - 1].append(line)
    return ["\n".join(of_kernel) for of_kernel in lines]


def code_of(cubin: bytes) -> bytes:
    """Returns the instructions of the only kernel in a cubin, an ELF file."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * index) for index in range(count)]
    starts = (sections[names][4] + name for name, *_ in sections)
    (code,) = (section for start, section in zip(starts, sections, strict=True) if cubin.startswith(b".text.", start))
    *_, place, length = code
    return cubin[place : place + length]


def innermost_loop(sass: str, opcode: str) -> list[Instruction]:
    """Returns the shortest loop that has an instruction whose opcode starts with `opcode`; empty if there is none."""
    code = [Instruction(int(address, 16), name, rest.strip()) for address, name, rest in INSTRUCTION.findall(sass)]
    loops = []
    for branch in code:
        target = re.search(r"0x([0-9a-f]+)", branch.operands) if branch.opcode in ("BRA", "BRA.U") else None
        if target is not None and int(target[1], 16) < branch.address:
            loop = [one for one in code if int(target[1], 16) <= one.address <= branch.address]
            if any(one.opcode.startswith(opcode) for one in loop):
                loops.append(loop)
    return min(loops, key=len, default=[])


def opcodes(code: Iterable[Instruction]) -> Counter[str]:
    """Returns how often each opcode occurs, without its modifiers."""
    return Counter(one.opcode.partition(".")[0] for one in code)


def missing_overlap(sass: str) -> str | None:
    """Returns why the loop of a matmul does not copy asynchronously (cp.async, LDGSTS) while it multiplies, or None.

    Args:
        sass: of a kernel for compute capability 8.x or 12.x.
    """
    loop = innermost_loop(sass, "LDGSTS")
    if not loop:
        return "copies nothing asynchronously in a loop"
    copies = {one.opcode for one in loop if one.opcode.startswith("LDGSTS")}
    if not all(copy.endswith(".128") for copy in copies):
        return f"copies less than 16 bytes at a time: {copies}"
    places = [index for index, one in enumerate(loop) if one.opcode.startswith("HMMA")]
    if not places:
        return "does not multiply where it copies"
    between = [one.opcode.partition(".")[0] for one in loop[places[0] : places[-1]]]
    if "LDG" in between:
        return "waits for loads"
    waits = [index for index, one in enumerate(loop) if one.opcode.startswith("DEPBAR")]
    if not waits:
        return "does not wait for its copies"
    # DEPBAR.LE waits until at most so many groups of copies are in flight. A matmul with two stages waits for all of
    # them, but only after it has multiplied for most of a step.
    for wait in waits:
        covered = _multiplies_since_copy(loop, wait)
        if loop[wait].operands.endswith(" 0x0") and 2 * covered < len(places):
            return f"waits for all copies after {covered} of {len(places)} HMMA"
    return None


def _multiplies_since_copy(loop: list[Instruction], wait: int) -> int:
    """Returns how many times a loop multiplies between its last copy and the instruction at index `wait`."""
    before = [one.opcode for one in reversed(loop[wait + 1 :] + loop[:wait])]
    copy = next(index for index, opcode in enumerate(before) if opcode.startswith("LDGSTS"))
    return sum(opcode.startswith("HMMA") for opcode in before[:copy])


def unread_at_arrival(sass: str) -> list[str]:
    """Returns the matrices that a warp loads from shared memory, and whose memory it frees, by an arrival at a barrier,
    before an instruction waits for them. Another warp may then overwrite what is yet to be read."""
    code = [Instruction(int(address, 16), name, rest.strip()) for address, name, rest in INSTRUCTION.findall(sass)]
    found = []
    for index, load in enumerate(code):
        if not load.opcode.startswith("LDSM"):
            continue
        first = int(re.search(r"R(\d+)", load.operands)[1])  # pyright: ignore[reportOptionalSubscript]
        loaded = re.compile(rf"\bR(?:{'|'.join(str(first + i) for i in range(4))})\b")
        for later in code[index + 1 :]:
            if loaded.search(later.operands) or later.opcode.startswith(("BAR", "BRA", "EXIT")):
                break
            if later.opcode.startswith("SYNCS.ARRIVE"):
                found.append(f"{load.opcode} {load.operands} at {load.address:#x}")
                break
    return found
