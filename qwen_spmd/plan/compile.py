# SPDX-License-Identifier: Apache-2.0
"""The real step programs through the TPU's compiler, without a TPU: what it says of memory, and what came out.

libtpu wants an environment of its own and may end its process, so `compile_steps` runs this file as another one:
`python -m qwen_spmd.plan.compile` reads a Target as JSON and writes a list of Programs.

Not here: what the step does (`serve/step.py`), reading HLO (`hlo`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from typing import Any, Literal

from qwen_spmd.plan.hardware import topology
from qwen_spmd.plan.hlo import Collective, Copy, Module
from qwen_spmd.plan.presets import model_config

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""What libtpu needs to compile on a machine that is no TPU host, beside others that do so."""


class Refused(ValueError):
    """The compiler does not take a program, such as one that does not fit."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What to compile. Counts are of one rank, null page and slot included.

    keys   as `serve.packed.Key`: (tokens, sequences) of a ragged step, sequences of a decode window
    moe_route, moe_wire   as the server's
    """

    model: str
    topology: str
    dp: int
    ep: int
    tp: int
    dtype: str
    weight_dtype: str
    state_dtype: str
    page_size: int
    pages: int
    slots: int
    pages_per_seq: int
    window: int
    keys: tuple[tuple[int, int] | int, ...]
    moe_route: Literal["auto", "gather_scatter", "all_to_all"] = "auto"
    moe_wire: Literal["auto", "fp8"] = "auto"


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program. Bytes are those of one device.

    arguments, outputs, aliased, temporaries, code   the compiler's memory analysis
    state           the model's state, all of which must be in `aliased`: updated in place
    flops, bytes_accessed   its cost analysis, which counts each loop's body once
    collectives     in one run: of a window, in one decode iteration
    copies          of weights or state
    unknown_loops   loops whose length is known at run time only; what is in them counts once
    """

    key: tuple[int, int] | int
    lower_s: float
    compile_s: float
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    state: int
    flops: float
    bytes_accessed: float
    collectives: tuple[Collective, ...]
    copies: tuple[Copy, ...]
    unknown_loops: int

    @property
    def problems(self) -> list[str]:
        """What a program must not do: copy weights or state, or return state that is not updated in place."""
        out = [f"copy of {c.of}: {c.bytes / 1e6:,.1f} MB, {c.count} times ({c.op})" for c in self.copies]
        if self.aliased < self.state:
            out.append(f"{(self.state - self.aliased) / 1e6:,.1f} MB of the state are not updated in place")
        return out


def compile_steps(target: Target) -> list[Program]:
    """The Programs of a Target. ValueError if it is no TPU or libtpu is not there, Refused by the compiler."""
    if topology(target.topology).chip.platform != "tpu":
        raise ValueError(
            f"topology is {target.topology!r}: only TPU programs are compiled without the device; a GPU's need the "
            "CUDA plugin and a description of the GPU, which is not there yet; use --no-compile"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("compiling for a TPU needs its compiler, which is not installed: pip install libtpu")
    print(f"compiling {len(target.keys)} programs for {target.topology}: minutes for a large model", file=sys.stderr)
    env = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env.pop("XLA_FLAGS", None)  # the CPU's: emulated devices, or none of its optimisations
    command = [sys.executable, "-m", "qwen_spmd.plan.compile"]
    spec = json.dumps(dataclasses.asdict(target))
    done = subprocess.run(command, input=spec, env=env, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        error = next((line for line in reversed(lines) if "Error" in line or "RESOURCE_EXHAUSTED" in line), lines[-1])
        raise Refused(f"the compiler refuses {target.model} on {target.topology}: {error.strip()[:600]}")
    return [_program(x) for x in json.loads(done.stdout.splitlines()[-1])]


def _program(x: dict[str, Any]) -> Program:
    x["key"] = tuple(x["key"]) if isinstance(x["key"], list) else x["key"]
    x["collectives"] = tuple(Collective(**c) for c in x["collectives"])
    x["copies"] = tuple(Copy(**c) for c in x["copies"])
    return Program(**x)


def build(target: Target, devices: Any) -> Any:
    """`Steps` of abstract weights on these devices, of which none needs to be there."""
    import jax
    from jax.sharding import NamedSharding

    from qwen_spmd import params
    from qwen_spmd.layers.moe import route_on
    from qwen_spmd.mesh.axes import make_mesh
    from qwen_spmd.mesh.rules import layout
    from qwen_spmd.plan.memory import weights
    from qwen_spmd.serve.sizes import Shapes
    from qwen_spmd.serve.step import Steps

    cfg = dataclasses.replace(model_config(target.model), mtp=False)
    sizes = {"dp": target.dp, "ep": target.ep, "tp": target.tp}
    lay, mesh = layout(cfg.dims(), **sizes), make_mesh(**sizes, devices=devices)
    shapes = Shapes(
        page_size=target.page_size,
        pages=target.pages,
        slots=target.slots,
        pages_per_seq=target.pages_per_seq,
        window=target.window,
        ragged=tuple(key for key in target.keys if not isinstance(key, int)),
        windows=tuple(key for key in target.keys if isinstance(key, int)),
    )
    put = lambda s, spec: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec))  # noqa: E731
    abstract = jax.tree.map(put, weights(cfg, target.dtype, target.weight_dtype, lay), params.specs(cfg, lay))
    route = route_on(mesh, kind=target.moe_route, wire="float8_e4m3fn" if target.moe_wire == "fp8" else None)
    return Steps(cfg, abstract, mesh, lay, shapes, target.dtype, target.state_dtype, route)


def compile_key(steps: Any, key: tuple[int, int] | int) -> Program:
    """Lower, compile and read one of `steps`' programs."""
    start = time.perf_counter()
    lowered = steps.lower(key)
    lowered_at = time.perf_counter()
    compiled = steps.build(lowered)
    compiled_at = time.perf_counter()
    text, memory, cost = compiled.as_text(), compiled.memory_analysis(), compiled.cost_analysis() or {}
    module = Module(text)
    arrays = _leaves({"weights": steps.weights, "state": steps.abstract_state})
    shapes = {name: x.sharding.shard_shape(x.shape) for name, x in arrays.items()}
    return Program(
        key=key,
        lower_s=lowered_at - start,
        compile_s=compiled_at - lowered_at,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        state=sum(math.prod(shapes[n]) * x.dtype.itemsize for n, x in arrays.items() if n.startswith("state.")),
        flops=cost.get("flops", 0.0),
        bytes_accessed=cost.get("bytes accessed", 0.0),
        collectives=tuple(module.collectives()),
        copies=tuple(module.copies(shapes)),
        unknown_loops=module.unknown_loops,
    )


def _leaves(tree: Any) -> dict[str, Any]:
    import jax

    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def main() -> int:
    target = json.load(sys.stdin)
    target["keys"] = tuple(tuple(key) if isinstance(key, list) else key for key in target["keys"])
    target = Target(**target)
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices
    steps = build(target, devices)
    print(json.dumps([dataclasses.asdict(compile_key(steps, key)) for key in target.keys]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
