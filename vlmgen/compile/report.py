"""What `vlmgen compile` found: rows for a table, and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vlmgen.compile.analytic import Count
from vlmgen.compile.build import BuiltGraph
from vlmgen.compile.findings import SEVERITIES, Finding
from vlmgen.compile.graphs import Deployment, Graph
from vlmgen.compile.ranks import RankReport
from vlmgen.compile.verify import LIMIT, Difference

COUNTS_AGREE = 0.05
"""How far XLA's FLOPs may be from the analytic count."""


@dataclass
class GraphReport:
    """One graph.

    Args:
        graph: Which.
        why: Why it exists.
        built: What compiling it gave.
        difference: How far its results are from both references; None if it was not run.
        count: Operations by the spec; None where nothing was counted.
        run_seconds: Time of the run and of both references.
    """

    graph: Graph
    why: str
    built: BuiltGraph
    difference: Difference | None = None
    count: Count | None = None
    run_seconds: float = 0.0

    @property
    def flops_ratio(self) -> float | None:
        """XLA's FLOPs over the analytic count."""
        if self.built.cost is None or self.count is None or not self.count.total:
            return None
        return self.built.cost.flops / self.count.total

    def problems(self) -> Iterator[str]:
        """Why the graph did not pass, nothing if it did."""
        for finding in self.built.errors:
            yield str(finding)
        if self.built.interface is None:
            return
        for use in self.built.caches:
            if not use.in_place:
                yield (
                    f"{self.graph.name}: {use.name} is not written in place (donated "
                    f"{use.donated}, aliased {use.aliased}, whole copies {use.copies})"
                )
        difference = self.difference
        if difference is not None and not difference.passed:
            yield (
                f"{self.graph.name}: differs by {difference.eager:.2g} from the eager package and "
                f"by {difference.hugging_face:.2g} from Hugging Face; the limit is {LIMIT:g}"
            )
        ratio = self.flops_ratio
        if ratio is not None and abs(ratio - 1) > COUNTS_AGREE:
            yield (
                f"{self.graph.name}: XLA counts {ratio:.3f} times the operations that the spec "
                f"gives; they must agree within {COUNTS_AGREE:.0%}"
            )

    @property
    def passed(self) -> bool:
        """Whether there is no problem."""
        return not list(self.problems())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        built, count = self.built, self.count
        return {
            "graph": self.graph.name,
            "kind": self.graph.kind,
            "size": self.graph.size,
            "why": self.why,
            "passed": self.passed,
            "problems": list(self.problems()),
            "program": built.program,
            "cached": built.hit,
            "seconds": {name: round(value, 3) for name, value in built.seconds.items()},
            "run_seconds": round(self.run_seconds, 3),
            "difference": None if self.difference is None else asdict(self.difference),
            "cost": None if built.cost is None else built.cost.to_dict(),
            "analytic": None if count is None else {**asdict(count), "total": count.total},
            "flops_ratio": self.flops_ratio,
            "operators": built.operators,
            "layers": built.layers,
            "caches": [use.to_dict() for use in built.caches],
            "findings": [finding.to_dict() for finding in built.findings],
        }


@dataclass
class CompileReport:
    """One package.

    Args:
        title: Name of the family.
        package: Folder of the package.
        checkpoint: Folder of the checkpoint, or the name of a published one.
        deployment: What was compiled for.
        graphs: Every graph.
        ranks: The largest graph of each kind on every layout that was asked for.
        hits, misses: Of the artifact cache.
    """

    title: str
    package: str
    checkpoint: str
    deployment: Deployment
    graphs: list[GraphReport] = field(default_factory=list)
    ranks: list[RankReport] = field(default_factory=list)
    hits: int = 0
    misses: int = 0

    @property
    def passed(self) -> bool:
        """Whether every graph passed, and there was at least one."""
        return bool(self.graphs) and not self.problems

    @property
    def problems(self) -> list[str]:
        """Why it did not pass; what several graphs have in common stands once."""
        texts = [text for graph in self.graphs for text in graph.problems()]
        texts += [text for ranks in self.ranks for text in ranks.problems()]
        return list(dict.fromkeys(texts))

    @property
    def findings(self) -> list[Finding]:
        """All findings, errors first; what is in several graphs stands once."""
        graphs: dict[Finding, list[str]] = {}
        found = [finding for graph in self.graphs for finding in graph.built.findings]
        found += [finding for ranks in self.ranks for finding in ranks.findings]
        for finding in found:
            same = replace(finding, graph="", count=1)
            graphs.setdefault(same, []).append(finding.graph)
        return sorted(
            (
                replace(finding, graph=", ".join(dict.fromkeys(names)))
                for finding, names in graphs.items()
            ),
            key=lambda finding: (
                SEVERITIES.index(finding.severity),
                finding.rule,
                str(finding.place),
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "title": self.title,
            "package": self.package,
            "checkpoint": self.checkpoint,
            "passed": self.passed,
            "deployment": self.deployment.to_dict(),
            "cache": {"hits": self.hits, "misses": self.misses},
            "graphs": [graph.to_dict() for graph in self.graphs],
            "ranks": [ranks.to_dict() for ranks in self.ranks],
        }
