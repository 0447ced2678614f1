"""Shows the prefix trees of a run in a browser.

    python -m trees.view runs/NAME                              serve a run folder on the loopback address
    python -m trees.view runs/NAME s00003g001m002               open one episode at once
    python -m trees.view calls/                                 what python -m actors.serve --record calls/ kept
    python -m trees.view one.tree --tokenizer MODEL_DIR         one file, with the tokenizer that its ids are of
    python -m trees.view runs/NAME s00003g001m002 --html one.html   a file of its own, to send to somebody
    python -m trees.view runs/NAME --no-browser --port 8000     on another machine: ssh -L 8000:127.0.0.1:8000 HOST

The texts come from the tokenizer of the run's newest checkpoint, or of its model; without one, ids are shown.
"""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tokenizers import Tokenizer

from trees.viewer import wording
from trees.viewer.catalogue import Catalogue, PlaceError
from trees.viewer.page import standalone
from trees.viewer.payload import describe
from trees.viewer.server import ViewServer
from trees.viewer.wording import Wording


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        catalogue = Catalogue(args.place)
        if args.episode is not None:
            catalogue.entry(args.episode)
        words = _words(args.place, args.tokenizer)
        about = {"place": args.place.resolve().name}
        if args.html is not None:
            return _write(args, catalogue, words, about)
    except (PlaceError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return _serve(args, catalogue, words, about)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trees.view", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("place", type=Path, metavar="RUN", help="run folder, folder with .tree files, or .tree file")
    parser.add_argument("episode", nargs="?", metavar="EPISODE", help="show this one first; with --html only this one")
    parser.add_argument("--html", type=Path, metavar="OUT.html", help="write one file that needs no server, and end")
    parser.add_argument("--port", type=int, default=0, help="port on the loopback address; 0 takes a free one")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="folder with a tokenizer.json, or that file")
    return parser.parse_args(argv)


def _words(place: Path, named: Path | None) -> Wording | None:
    """The texts of ids; raises PlaceError when the tokenizer is not there or is none."""
    path = wording.find(place) if named is None else named / wording.FILE if named.is_dir() else named
    if path is None:
        print("no tokenizer found, so ids are shown: --tokenizer DIR names a folder with its tokenizer.json")
        return None
    if not path.is_file():
        raise PlaceError(f"--tokenizer {named}: no {wording.FILE} there; expected a Hugging Face model folder")
    try:
        return Wording(Tokenizer.from_file(str(path)))
    except Exception as error:
        # The library has no error of its own.
        raise PlaceError(f"{path}: {error}; expected a tokenizer, or name another with --tokenizer DIR") from error


def _write(args: argparse.Namespace, catalogue: Catalogue, words: Wording | None, about: dict[str, Any]) -> int:
    if args.episode is not None:
        catalogue.only(args.episode)
    if catalogue.holds(args.html):
        raise PlaceError(f"--html {args.html}: got one of the trees, expected another file to write")
    rows = catalogue.rows()
    partial = args.html.with_name(args.html.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for part in standalone(rows, about, _described(catalogue, words)):
            file.write(part)
    partial.replace(args.html)
    size = args.html.stat().st_size
    print(f"wrote {args.html}: {len(rows)} episode{'s' * (len(rows) != 1)}, {size / 1e6:.1f} MB")
    if len(rows) > 1:
        print(f"smaller: name one EPISODE, such as {rows[-1]['episode']}, to write it alone")
    return 0


def _described(catalogue: Catalogue, words: Wording | None) -> Iterator[dict[str, Any]]:
    for name in catalogue.names():
        try:
            yield describe(name, catalogue.open(name), words)
        except Exception as error:
            # One odd tree must not cost the others.
            yield {"error": str(error)}


def _serve(args: argparse.Namespace, catalogue: Catalogue, words: Wording | None, about: dict[str, Any]) -> int:
    try:
        server = ViewServer(catalogue, words, about, args.port)
    except (OSError, OverflowError) as error:
        print(f"--port {args.port}: {error}; expected a free port, or 0 for one", file=sys.stderr)
        return 2
    url = server.url + (f"#episode={quote(args.episode, safe='')}" if args.episode else "")
    print(f"{len(catalogue.names())} trees of {args.place} at {url}\nCtrl-C ends it", flush=True)
    if not args.no_browser and _has_display():
        webbrowser.open(url)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def _has_display() -> bool:
    """Whether a browser would be a window; one in the terminal would stand in the way of it."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


if __name__ == "__main__":
    sys.exit(main())
