"""Draw the README's figure and write its tables from committed results: damage against bits, and what a profile costs.

    python benchmarks/figure.py docs/results README.md

They go between marks such as `<!-- results -->` and `<!-- /results -->`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

mpl.rcParams["svg.hashsalt"] = "autoq"
LINE, WIDTH = 10.5, 75  # of a label, in pixels


def draw(results: dict[str, Any], out: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    uniform = [r for r in results["uniform"] if r["kind"] == "weight" and r["measured"] < 1.5]
    axes.errorbar(
        [r["bits"] for r in uniform],
        [r["measured"] for r in uniform],
        [r["stderr"] for r in uniform],
        fmt="o",
        color="#888888",
        label="one format for all weights",
    )
    for space, colour, label in (
        ("plain", "#7aa6d6", "searched, one encoder a format"),
        ("default", "#1f6fd0", "searched, with rounding variants"),
    ):
        rows = sorted(
            (
                r
                for r in results["recipes"]
                if (r["space"], r["sequences"], r["estimator"], r["weighted"]) == (space, 32, "steady", False)
            ),
            key=lambda r: r["bits"],
        )
        axes.errorbar(
            [r["bits"] for r in rows],
            [r["measured"] for r in rows],
            [r["stderr"] for r in rows],
            fmt="-s",
            color=colour,
            label=label,
        )
    axes.set(yscale="log", xlabel="effective bits per weight", ylabel="measured KL, nats per token", xlim=(3, 8.7))
    axes.legend(frameon=False)
    name_points(axes, uniform)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Date": None})


def name_points(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Write formats beside their points, those that would lie on one another below each other."""
    axes.figure.canvas.draw()
    placed: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda r: -r["measured"]):
        x, y = axes.transData.transform((row["bits"], row["measured"]))
        at = y
        while any(abs(at - other) < LINE and abs(x - beside) < WIDTH for beside, other in placed):
            at -= 1
        placed.append((x, at))
        points = 72 / axes.figure.dpi
        axes.annotate(
            row["format"], (row["bits"], row["measured"]), xytext=(5, (at - y) * points + 1), textcoords="offset points", fontsize=7,
            color="#555555", va="center",
        )  # fmt: skip


def table(results: dict[str, Any]) -> str:
    lines = ["| what | bits | predicted KL | measured KL | against uniform nvfp4 |", "|---|---|---|---|---|"]
    nvfp4 = next(r for r in results["uniform"] if r["kind"] == "weight" and r["format"] == "nvfp4")
    lines.append(
        f"| uniform nvfp4 | {nvfp4['bits']:.3f} | {nvfp4['predicted']:.3f} | {nvfp4['measured']:.3f} ± {nvfp4['stderr']:.3f} | 1 |"
    )
    for row in results["recipes"]:
        if row["sequences"] == 32 and row["estimator"] == "steady" and not row["weighted"]:
            what = "searched" + (", with rounding variants" if row["space"] == "default" else ", one encoder a format")
            lines.append(
                f"| {what} | {row['bits']:.3f} | {row['predicted']:.3f} | {row['measured']:.3f} ± {row['stderr']:.3f} | {row['against_nvfp4']:.2f} |"
            )
    return "\n".join(lines)


def cache_table(results: dict[str, Any]) -> str:
    lines = ["| K and V cache | bits | predicted KL | measured KL | against uniform nvfp4 |", "|---|---|---|---|---|"]
    nvfp4 = results["mixed"][0]["measured"]
    for row in results["mixed"]:
        predicted = "" if row["predicted"] is None else f"{row['predicted']:.4f}"
        lines.append(
            f"| {row['what']} | {row['bits']:.3f} | {predicted} | {row['measured']:.4f} ± {row['stderr']:.4f} | {row['measured'] / nvfp4:.2f} |"
        )
    names = list(dict.fromkeys(r["format"] for r in results["contexts"]))
    lines += ["", f"| windows of | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for length in dict.fromkeys(r["length"] for r in results["contexts"]):
        cells = [f"{r['measured']:.4f} ± {r['stderr']:.4f}" for r in results["contexts"] if r["length"] == length]
        lines.append(f"| {length:,} tokens | {' | '.join(cells)} |")
    return "\n".join(lines)


def joint_table(results: dict[str, Any]) -> str:
    names = {
        "joint": "one budget for both", "equal bits": "as many bits for both", "weights first": "weights first, one cache format for the rest",
        "cache first": "one cache format first, the rest for weights", "nvfp4 cache": "nvfp4 cache, the rest for weights",
    }  # fmt: skip
    lines = ["| memory | spent on | bits per weight | per cached value | measured KL |", "|---|---|---|---|---|"]
    for row in results["joint"]:
        lines.append(
            f"| {row['share']:g}/16 | {names[row['way']]} | {row['bits']:.2f} | {row['kv_bits']:.2f} | {row['measured']:.3f} ± {row['stderr']:.3f} |"
        )
    return "\n".join(lines)


def trials_table(results: dict[str, Any]) -> str:
    """One row for each budget: the exact solution and the best of some trials; then what weak spots change."""
    lines = [
        "| bits | exact solution | best of 20 trials, less by | best of 60, less by | seconds of 60 |",
        "|---|---|---|---|---|",
    ]
    for row in results["trials"]:
        gains = [
            f"{0.0 - row[f'less_{n}']:+.4f} ± {row[f'less_error_{n}']:.4f}" if row[f"best_of_{n}"] else "the solution itself"
            for n in (20, 60)
        ]
        lines.append(
            f"| {row['budget']} | {row['solution']:.4f} ± {row['stderr']:.4f} | {gains[0]} | {gains[1]} | {row['seconds_60']:,.0f} |"
        )
    lines += [
        "",
        "| bits | damage solved with | cells measured alone | measured KL | less than with columns corrected, by |",
        "|---|---|---|---|---|",
    ]
    for row in results["weak_spots"]:
        gain, error = row["less_than_columns"], row["error"]
        less = "" if gain is None else "the same recipe" if gain == error == 0 else f"{-gain:+.3f} ± {error:.3f}"
        lines.append(
            f"| {row['budget']} | {row['damage']} | {row['cells_measured'] or ''} | {row['measured']:.3f} ± {row['stderr']:.3f} | {less} |"
        )
    return "\n".join(lines)


def cost(rows: list[dict[str, Any]]) -> str:
    timed = [r for r in rows if "profile_over_bare" in r]
    weighed = [r for r in rows if "peak_over_model" in r]
    weights, keys, _ = rows[0]["formats"]
    return "\n".join(
        [
            f"Scoring {weights} weight formats and {keys} formats each for keys and values of SmolLM2-135M in {rows[0]['dtype']}, sequences of "
            f"{rows[0]['tokens']} tokens (`benchmarks/cost.py`):",
            "",
            "| sequences | in batches of | seconds / bare forward and backward | peak memory / model |",
            "|---|---|---|---|",
            *(f"| {r['sequences']} | {r['batch']} | {r['profile_over_bare']:.2f} | |" for r in timed),
            *(f"| {r['sequences']} | {r['batch']} | | {r['peak_over_model']:.2f} |" for r in weighed),
        ]
    )


def peers_table(results: dict[str, Any]) -> str:
    """Return every search at counted bits, and the bars."""
    lines = [
        "| search | bits | its own count | measured in | KL | seconds | CPU seconds | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for part in results.values() for row in part["rows"]):
        own = "" if row["own_bits"] is None else f"{row['own_bits']:.3f}"
        lines.append(
            f"| {row['search']} | {row['bits']:.3f} | {own} | {row['simulator']} | {row['kl']:.4f} | {row['seconds']:.0f} | {row['cpu_seconds']:.0f} | "
            f"{row['peak_bytes'] / 2**30:.1f} GiB |"
        )
    lines += ["", "| against the peer | measured | bar |", "|---|---|---|"]
    lines += [
        f"| {b['what']} | {b['measured']:.2f} | {b['limit']:.2f}{'' if b['holds'] else ' (missed)'} |"
        for part in results.values()
        for b in part["bars"]
    ]
    return "\n".join(lines)


def between_marks(text: str, mark: str, content: str) -> str:
    return re.sub(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", lambda m: m[1] + content + "\n" + m[2], text, flags=re.DOTALL)


def main() -> None:
    source, readme = Path(sys.argv[1]), Path(sys.argv[2])
    results = json.loads((source / "quality.json").read_text())
    draw(results, readme.parent / "docs" / "damage.svg")
    text = between_marks(readme.read_text(), "results", table(results))
    for mark, made in (
        ("cache", cache_table),
        ("joint", joint_table),
        ("trials", trials_table),
        ("cost", cost),
        ("peers", peers_table),
    ):
        file = source / {"cache": "kv.json"}.get(mark, f"{mark}.json")
        if file.is_file():
            text = between_marks(text, mark, made(json.loads(file.read_text())))  # type: ignore[operator]
    readme.write_text(text)


if __name__ == "__main__":
    main()
