"""Curves, tables and example episodes of runs on one page: ``python -m algos.report RUN [RUN ...]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from algos.reporting.examples import chosen, tree_page
from algos.reporting.groups import grouped
from algos.reporting.kept import Kept, add_behaviour, kept
from algos.reporting.page import document
from algos.reporting.runs import ReportError, Run, flat, read_run
from configs.schema import RunConfig

_EPILOG = """\
examples:
  python -m algos.report runs/NAME                        one run: writes runs/NAME/report.html
  python -m algos.report runs/grpo-* runs/ppo-*           several: writes report.html here
  python -m algos.report runs/NAME --out page.html        another file
  python -m algos.report runs/NAME --no-trees             without example episodes and their trees

Runs of the same settings but the seed are one curve with a band from the lowest to the highest; other settings are
curves of their own. The page needs no network. The trees of the example episodes are in a second file beside it,
OUT_trees.html, to which it links. A run that still goes on may be looked at; the page is of this moment.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 written, 2 wrong arguments or no run, 130 interrupted."""
    args = _arguments(argv)
    try:
        return _report(args)
    except (ReportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m algos.report",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, as python -m algos.run makes it")
    parser.add_argument(
        "--out", type=Path, metavar="OUT.html", help="where to; else RUN/report.html, of several report.html"
    )
    parser.add_argument("--no-trees", action="store_true", help="leave the example episodes and their trees out")
    return parser.parse_args(argv)


def _report(args: argparse.Namespace) -> int:
    runs = _read(args.runs)
    out = args.out or (runs[0].folder / "report.html" if len(runs) == 1 else Path("report.html"))
    if out.is_dir():
        raise ReportError(f"--out {out}: got a folder, expected a file to write, such as {out / 'report.html'}")
    groups = grouped(runs)
    notes = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    trees = {} if args.no_trees else _trees(runs, notes)
    examples = chosen(groups, trees, notes)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    beside = out.with_name(f"{out.stem}_trees.html")
    with_tree = any(example.payload is not None for example in examples)
    if with_tree:
        _write(beside, tree_page(examples))
    _write(out, [document(groups, examples, beside.name, notes, _defaults())])
    also = f", and {beside} ({_size(beside)}) with the trees of its examples" if with_tree else ""
    print(f"wrote {out} ({_size(out)}){also}\nopen it in a browser: {out.resolve().as_uri()}")
    return 0


def _size(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"


def _trees(runs: Sequence[Run], notes: list[str]) -> dict[Path, Kept]:
    """The trees of the runs that kept some; their behaviour becomes figures of the runs."""
    found = {}
    for run in runs:
        if (run.folder / "trees").is_dir():
            print(f"reading trees of {run.name}", flush=True)
            if (trees := kept(run, notes)) is not None:
                add_behaviour(trees)
                found[run.folder] = trees
    return found


def _read(folders: Sequence[Path]) -> list[Run]:
    """Each folder once, however often it is named."""
    found: dict[Path, Run] = {}
    for folder in folders:
        if folder.resolve() not in found:
            print(f"reading {folder}", flush=True)
            found[folder.resolve()] = read_run(folder)
    return list(found.values())


def _defaults() -> dict[str, Any]:
    return flat(RunConfig().model_dump(mode="json", by_alias=True))


def _write(path: Path, parts: Iterable[str]) -> None:
    """All of it or nothing: a page that somebody has open stays whole."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8", errors="replace") as file:
        for part in parts:
            file.write(part)
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
