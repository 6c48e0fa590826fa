"""One graph, from its call to an executable, through the artifact cache."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from vlmgen.compile import artifacts, in_place, layer_graphs, torchax_import, xla_cpu
from vlmgen.compile.artifacts import ArtifactCache, CacheMissError
from vlmgen.compile.calls import Call
from vlmgen.compile.census import census, denied, operators_of
from vlmgen.compile.export_faults import explain, not_to_lower
from vlmgen.compile.findings import Finding, Sources
from vlmgen.compile.interface import Interface
from vlmgen.compile.lower import Program, export, lower
from vlmgen.files import replace_file
from vlmgen.validate.driver import describe


@dataclass
class BuiltGraph:
    """A graph that was exported, lowered and compiled, or what kept it from that.

    Args:
        call: Its warm-up call.
        interface: What the program takes and gives; None if it could not be exported.
        findings: What was found in it.
        operators: Operator census of the StableHLO.
        layers: Different graphs in every stack of layers.
        caches: What happens to the caches.
        cost: XLA's account.
        seconds: Time of every step that was taken in this run.
        program: Hash of the StableHLO.
        hit: The executable came from the cache.
        payload: The executable as bytes, where it came from the cache.
        compiled: The executable, where it was compiled or has been needed; see `executable`.
    """

    call: Call
    interface: Interface | None = None
    findings: list[Finding] = field(default_factory=list)
    operators: dict[str, int] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    caches: list[in_place.CacheUse] = field(default_factory=list)
    cost: xla_cpu.Cost | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    program: str = ""
    hit: bool = False
    payload: bytes = b""
    compiled: Any = None

    @property
    def executable(self) -> Any:
        """Ready to run; None if there is none. One from the cache is loaded when it is needed."""
        if self.compiled is None and self.payload:
            self.compiled = xla_cpu.deserialized(self.payload)
        return self.compiled

    @property
    def errors(self) -> list[Finding]:
        """Findings that keep the graph from a device."""
        return [finding for finding in self.findings if finding.severity == "error"]


class GraphBuilder:
    """Builds the graphs of one package.

    Args:
        package: Folder of the package.
        cache: Where artifacts are kept.
        offline: Raise instead of compiling.
        emit: Folder for the StableHLO and the optimised HLO of every graph.
    """

    def __init__(
        self,
        package: Path,
        cache: ArtifactCache,
        *,
        offline: bool = False,
        emit: Path | None = None,
    ) -> None:
        torchax_import.load()  # what is missing is said here, not found as a fault of a graph
        self.package, self.cache, self.offline, self.emit = package, cache, offline, emit
        self.sources = Sources(package)

    def request_key(self, call: Call, layout: str = "") -> str:
        """Hash of everything that the program of a call depends on.

        Args:
            call: The call, on one rank.
            layout: How the graph is split over ranks, which the call does not show.
        """
        module = call.module
        # Sizes alone: a weight that was loaded may lie in memory in another way.
        state = {
            name: f"{tensor.dtype} {list(tensor.shape)}"
            for named in (module.named_parameters, module.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }
        config = getattr(module, "config", None)
        shapes = json.dumps([describe(call.kwargs), state, repr(config)], sort_keys=True)
        return artifacts.digest(
            self._sources_hash, artifacts.toolchain(), shapes, call.graph.kind, layout,
            json.dumps(xla_cpu.FLAGS, sort_keys=True),
        )  # fmt: skip

    @cached_property
    def _sources_hash(self) -> str:
        import vllm_neuron

        plugin = Path(inspect.getfile(vllm_neuron)).parent
        return artifacts.digest_of_files([self.package, plugin, Path(__file__).parent])

    def cached(self, call: Call) -> BuiltGraph | None:
        """The graph from the cache, or None."""
        started = time.perf_counter()
        request = self.cache.get("requests", self.request_key(call))
        if request is None:
            return None
        record, _ = request
        if not record["program"]:
            return None  # it could not be compiled; that is found out again, with the message
        program = self.cache.get("programs", record["artifact"])
        if program is None:
            return None
        return self._from_cache(call, record, *program, started)

    def build(self, call: Call) -> BuiltGraph:
        """The graph from the cache, or compiled.

        Raises:
            CacheMissError: It is not in the cache, and only the cache may be used.
        """
        # Texts are made on the way, so whoever wants them goes the way again.
        found = self.cached(call) if self.emit is None or self.offline else None
        if found is not None:
            self.cache.statistics.hits += 1
            return found
        self.missed(call.graph.name)
        return self._compile(call)

    def missed(self, name: str) -> None:
        """Count something that has to be compiled.

        Raises:
            CacheMissError: Only the cache may be used.
        """
        if self.offline:
            raise CacheMissError(
                f"{name} is not in the cache ({self.cache.local}) and --offline forbids to "
                "compile it",
                hint="run once without --offline, or name a shared folder with --shared-cache",
            )
        self.cache.statistics.misses += 1

    def _compile(self, call: Call) -> BuiltGraph:
        built = BuiltGraph(call)
        try:
            program = export(call)
            built.findings += not_to_lower(program, self.sources)
            if built.findings:
                return built  # what has no value yet cannot be lowered
            lowered = lower(program)
        except Exception as error:  # whatever torch raises, it is about the package
            built.findings.append(explain(error, call.graph.name, self.sources))
            return built
        operators = operators_of(lowered)
        built.interface, built.operators = program.interface, census(operators)
        built.layers = layer_graphs.distinct_layers(program)
        built.findings += [
            *denied(operators, program, self.sources),
            *in_place.copied_caches(program, caches_of(call, program), self.sources),
            *layer_graphs.specialised_layers(program, self.sources),
        ]
        text = lowered.as_text()
        built.program = artifacts.digest(text)
        key = executable_key(built.program)
        stored = self.cache.get("programs", key)
        if stored is None:
            with program.timed("compile"):
                built.compiled = xla_cpu.compile_lowered(lowered)
            hlo = built.compiled.get_hlo_text()
            built.cost = xla_cpu.cost_of(program.interface, built.compiled)
            built.caches = in_place.cache_uses(program, hlo)
            record = {
                "cost": asdict(built.cost),
                "caches": [asdict(use) for use in built.caches],
                "seconds": program.seconds["compile"],
            }
            self.cache.put("programs", key, record, xla_cpu.serialized(built.compiled))
        else:
            record, payload = stored
            self._take(built, record, payload)
            self.cache.statistics.hits += 1
            self.cache.statistics.misses -= 1
            hlo = built.executable.get_hlo_text() if self.emit is not None else ""
        built.seconds = program.seconds
        self.cache.put("requests", self.request_key(call), self._record(built, key))
        if self.emit is not None:
            texts = {"stablehlo.mlir": lowered.as_text(debug_info=True), "optimised.hlo": hlo}
            for suffix, text in texts.items():
                replace_file(self.emit / f"{call.graph.name}.{suffix}", text.encode(), parents=True)
        return built

    def _record(self, built: BuiltGraph, artifact: str) -> dict[str, Any]:
        assert built.interface is not None
        return {
            "program": built.program,
            "artifact": artifact,
            "interface": built.interface.to_dict(),
            "findings": [finding.to_dict() for finding in built.findings],
            "operators": built.operators,
            "layers": built.layers,
            "seconds": built.seconds,
        }

    def _from_cache(
        self,
        call: Call,
        record: Mapping[str, Any],
        program: Mapping[str, Any],
        payload: bytes,
        started: float,
    ) -> BuiltGraph:
        findings = [
            Finding.from_dict({**found, "graph": call.graph.name}) for found in record["findings"]
        ]
        built = BuiltGraph(
            call,
            Interface.from_dict(record["interface"]),
            findings,
            dict(record["operators"]),
            dict(record["layers"]),
            program=record["program"],
        )
        self._take(built, program, payload)
        built.seconds = {"from the cache": time.perf_counter() - started}
        return built

    @staticmethod
    def _take(built: BuiltGraph, record: Mapping[str, Any], payload: bytes) -> None:
        built.cost = xla_cpu.Cost(**record["cost"])
        built.caches = [in_place.CacheUse(**use) for use in record["caches"]]
        built.payload = payload
        built.hit = True


def executable_key(program: str) -> str:
    """Name of an executable in the cache.

    Args:
        program: Hash of its StableHLO, which says how many ranks it is for.
    """
    flags = json.dumps(xla_cpu.FLAGS, sort_keys=True)
    return artifacts.digest(program, "xla-cpu", artifacts.toolchain(), flags)


def caches_of(call: Call, program: Program) -> list[str]:
    """Names of the arguments that a graph must write in place: the caches it is handed.

    A tower gets the encoder cache as its only argument that is no input of its own; a text graph
    the buffers that the runner bound.
    """
    if call.graph.kind == "vision":
        cache = call.kwargs["encoder_cache_buffer"]
        inputs = [a for a in program.interface.arguments if a.leaf is not None]
        return [a.name for a in inputs if a.shape == tuple(cache.shape)]
    persistent = set(call.module.state_dict(keep_vars=True))
    bound = {name for name, buffer in call.module.named_buffers() if buffer.dim() == 4} - persistent
    return sorted(bound)
