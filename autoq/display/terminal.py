"""Results as text: tables with rich. Reads results, computes nothing."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from autoq.display.fronts import front_table
from autoq.display.trials import trials_view
from autoq.display.units import UnitTable
from autoq.display.words import nats, plus_minus, size, tiny

if TYPE_CHECKING:
    from autoq.api import SearchResult


PAYS, TRIALS = (3.25, 4.75), 60  # bits between which trials gained, and how many (benchmarks/trials.py)


class RichReporter:
    """Progress bars and lines on stderr."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        self.console.print(Text(text, style="dim"), soft_wrap=True)

    def stage(self, name: str) -> RichStage:
        return RichStage(self.console, name)


class RichStage:
    """One stage's bar, gone when it is done; a line with its time stays."""

    def __init__(self, console: Console, name: str) -> None:
        self.name = name
        self.progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self.started = time.perf_counter()
        self.progress.start()
        self.task: TaskID = self.progress.add_task(name, total=None)

    def update(self, done: int, total: int) -> None:
        self.progress.update(self.task, completed=done, total=total)

    def close(self, finished: bool) -> None:
        self.progress.stop()
        if not finished:
            return
        self.progress.console.print(
            f"[green]done[/] {self.name} [dim]{time.perf_counter() - self.started:.1f} s[/]", highlight=False
        )


def search_result(result: SearchResult, units: list[dict[str, Any]]) -> RenderableType:
    """Return what `autoq search` prints at the end; `units` are those of `autoq show`."""
    recipe, measured = result.recipe, result.divergence
    totals, predicted = recipe.totals, recipe.predicted
    predicted_kl, stderr = (predicted.kl, predicted.stderr) if predicted else (0.0, None)
    lines = Table.grid(padding=(0, 2))
    lines.add_row(
        "weights", f"{totals.bits:.4f} bits each ({totals.bits_whole_model:.4f} over the whole model, {size(totals.weight_bytes)})"
    )
    asked = recipe.budget
    many = "" if asked.batch == 1 else f"{asked.batch} x "
    lines.add_row("KV cache", f"{totals.kv_bits:.4g} bits a value ({size(totals.kv_bytes)} at {many}{asked.context:,} tokens)")
    if asked.max_kl is not None:
        lines.add_row("asked", f"at most {asked.max_kl:g} nats per token, in the fewest bits")
    if asked.memory is not None:
        lines.add_row("together", f"{size(totals.weight_bytes + totals.kv_bytes)} of {asked.memory}; {_split(result)}")
    if result.free_kl is not None and result.kv_front:
        who = asked.engine if asked.engine != "none" else asked.consumer
        lines.add_row(
            "cache formats",
            f"as {who} mixes them: {nats(predicted_kl)} nats predicted, {nats(result.free_kl)} if every K and V had its own",
        )
    lines.add_row("predicted KL", f"{plus_minus(predicted_kl, stderr)} nats per token")
    lines.add_row(
        "measured KL",
        f"{plus_minus(measured.mean_kl, measured.stderr)} nats per token, "
        f"{measured.kl.shape[0]} windows of {measured.kl.shape[1]} (noise floor {tiny(result.noise_floor)})",
    )
    points = measured.percentiles()
    lines.add_row("  per token", "  ".join(f"{k} {nats(v)}" for k, v in points.items()))
    lines.add_row("top-1 agreement", f"{100 * measured.top1_agreement:.1f} %")
    ratio = measured.perplexity / measured.perplexity_original
    lines.add_row(
        "perplexity",
        f"{measured.perplexity_original:.3f} before, {measured.perplexity:.3f} after "
        f"(ratio {ratio:.4f} ± {measured.perplexity_ratio_stderr:.4f})",
    )
    parts: list[RenderableType | None] = [
        UnitTable(units, predicted_kl),
        front_table(result.weight_front, totals.bits, "bits per weight"),
        front_table(result.kv_front, totals.kv_bits, "bits per cached value"),
        uniform_table(result),
        trials_view(result),
        lines,
    ]
    parts += [Text(f"warning: {w}", style="yellow") for w in result.warnings]
    written = [
        (str(result.run / name), what) for name, what in (
            ("recipe.yaml", "the recipe"), ("result.json", "these figures"), ("profile.safetensors", "the profile, reused for any budget"),
            ("profile.json", "the profile's facts in words"), ("run.json", "what was asked"),
        )
    ]  # fmt: skip
    if result.trials is not None and result.trials.storage.startswith(str(result.run)):
        written.append((result.trials.storage, "every trial; optuna-dashboard opens it"))
    if result.validation is not None:
        from autoq.display.checks import validation

        parts.append(validation(result.validation))
    parts += [lines_with_remarks("written", written), lines_with_remarks("next", _next_steps(result))]
    return Group(*(p for p in parts if p is not None))


def _split(result: SearchResult) -> str:
    """Say what more memory would buy on each side."""
    parts = [
        f"{size(e.more)} more for the {name} would save {nats(e.saved)} nats ({e.nats_per_gib:.3g} a GiB)"
        for name, e in result.exchanges.items()
    ]
    return ", ".join(parts)


def lines_with_remarks(title: str, lines: list[tuple[str, str]]) -> RenderableType:
    """Return lines to copy, each with a remark after it as a shell has it; none is cut or broken, however narrow the terminal."""
    width = min(64, max(len(line) for line, _ in lines))
    parts = [Text(title, style="bold")]
    for line, remark in lines:
        parts.append(Text.assemble(line.ljust(width), ("  # " + remark, "dim"), no_wrap=True, overflow="ignore"))
    return Group(*parts)


def _next_steps(result: SearchResult) -> list[tuple[str, str]]:
    """Return commands to go on with, and what each is for."""
    asked, totals, autoq = result.recipe.budget, result.recipe.totals, command_name()
    budgets = [f"--budget {totals.bits + 0.5:.2g}bits"] if asked.weights else []
    budgets += [f"--kv-budget {totals.kv_bits + 0.5:.2g}bits"] if asked.kv else []
    another = f"{autoq} search {result.options} --run {result.run} {' '.join([*budgets, *asked.limits()])}"
    same = f"{autoq} search {result.options} --run {result.run} {' '.join(asked.options())} --trials {TRIALS}"
    sample = " --sample 2" if result.plan.config.device == "cpu" else ""  # kernels are interpreted there
    steps = [
        (f"{autoq} report {result.run}", "plots and tables in one HTML file"),
        (f"{autoq} validate {result.recipe_path}{sample}", "check on packed bytes"),
        (f"{autoq} show {result.recipe_path}", "this recipe again"),
        (f"{autoq} export {result.run} --to {asked.consumer}", f"for {asked.consumer}")
        if asked.consumer != "none"
        else (
            f"{autoq} export {result.run} --to {asked.engine} --round scales",
            f"for {asked.engine}, whose tools pick scales in their own way",
        )
        if asked.engine != "none"
        else (f"{autoq} export {result.run} --to all --round up", "for PTQ tools and engines, in the formats that each has"),
        (f"{autoq} front {result.run}", "other budgets' cost"),
        (" ".join(another.split()), "another budget"),
    ]
    if result.trials is None and PAYS[0] < totals.bits < PAYS[1]:
        steps.append((" ".join(same.split()), "measure recipes nearby"))
    return steps


def command_name() -> str:
    """Return how a user calls autoq here: by its name if that is on the PATH, else by the path it was called by."""
    called = Path(sys.argv[0])
    if shutil.which("autoq") or called.name != "autoq":
        return "autoq"
    return os.path.relpath(called)


def uniform_table(result: SearchResult) -> RenderableType:
    """Return the recipe beside the uniform formats of no more bits."""
    table = Table(
        title="measured, beside uniform formats within the budget",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    for name in ("format", "bits", "KV bits", "measured KL", "recipe is less by"):
        table.add_column(name, justify="left" if name == "format" else "right")
    totals = result.recipe.totals
    kl = result.divergence.mean_kl
    table.add_row("this recipe", f"{totals.bits:.4f}", f"{totals.kv_bits:.4g}", nats(kl), "", style="bold cyan")
    for row in result.uniforms:
        difference, error = row.divergence.minus(result.divergence)
        table.add_row(
            row.uniform.name, f"{row.uniform.bits:.4f}", f"{row.uniform.kv_bits:.4g}", nats(row.divergence.mean_kl),
            f"{difference:+.4f} ± {error:.4f}",
        )  # fmt: skip
    if not result.uniforms:
        table.add_row("no uniform format of the space takes so few bits", "", "", "", "", style="dim")
    return table
