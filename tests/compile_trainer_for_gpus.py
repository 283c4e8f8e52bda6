"""Compiles a training step of flax_models for 8 GPUs that are not present. Prints the memory of a device and the
collectives, one JSON line per program.

test_flax_mesh_compile.py runs it in a subprocess as `python compile_trainer_for_gpus.py TARGET.pbtxt PROGRAMS`.
PROGRAMS is a JSON list of dicts with the keys sizes (of the mesh's axes), rows (of a batch) and changes (of SHAPE).
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
from compile_for_gpus import DEVICES, collectives
from jax.experimental import topologies

from flax_models.model.config import ModelConfig
from flax_models.model.decoder import decoder_shapes
from flax_models.model.sharding import AXES
from flax_models.train.config import TrainConfig
from flax_models.train.step import Trainer

SHAPE = ModelConfig(32_768, 1024, 2, 8, 4, 128, 4096, 1024, dtype="bfloat16", remat="full")


def main() -> None:
    target, programs = Path(sys.argv[1]).read_text(), json.loads(sys.argv[2])
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{DEVICES}")
    for program in programs:
        mesh: Any = topologies.make_mesh(topology, program["sizes"], AXES)
        config, rows = dataclasses.replace(SHAPE, **program["changes"]), program["rows"]
        trainer = Trainer(decoder_shapes(config), TrainConfig(batch_size=rows), None, mesh)
        compiled = trainer.compile(rows, config.max_seq_len)
        memory = compiled.memory_analysis()
        assert memory is not None
        found = {
            "temporaries": memory.temp_size_in_bytes,
            "arguments": memory.argument_size_in_bytes,
            "collectives": collectives(compiled.as_text() or ""),
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(trainer.initial.params)),
        }
        print(json.dumps(program | found), flush=True)


if __name__ == "__main__":
    main()
