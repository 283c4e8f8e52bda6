"""Reads the machine code of NVIDIA GPUs (SASS), as `cuobjdump -sass` prints it."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class Instruction(NamedTuple):
    address: int
    opcode: str  # with its modifiers
    operands: str


INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")


def innermost_loop(sass: str, opcode: str) -> list[Instruction]:
    """Returns the shortest loop that has an instruction whose opcode starts with `opcode`; empty if there is none."""
    code = [Instruction(int(address, 16), name, rest.strip()) for address, name, rest in INSTRUCTION.findall(sass)]
    loops = []
    for branch in code:
        target = re.search(r"0x([0-9a-f]+)", branch.operands) if branch.opcode == "BRA" else None
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
        sass: of a kernel for compute capability 8.x.
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
