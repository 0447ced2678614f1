"""Export a policy: ``python -m algos.export RUN_OR_CHECKPOINT OUT``.

What is written is a Hugging Face model folder with its tokenizer, without the trainer's state: Transformers, SGLang
and ``model.path`` of another run load it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

_EPILOG = """\
examples:
  python -m algos.export runs/quickstart-20260101-120000 policy            the newest checkpoint
  python -m algos.export runs/quickstart-20260101-120000 policy --best     the one that did best on held-out tasks
  python -m algos.export runs/quickstart-20260101-120000 policy --step 40
  python -m algos.export runs/quickstart-20260101-120000/checkpoints/step_000040 policy --dtype bfloat16
"""


class ExportError(RuntimeError):
    """There is nothing to export, or no place for it; the message says why."""


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 nothing was exported, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m algos.export",
        description="Write the policy of a checkpoint as a Hugging Face model folder.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="run folder, or one of its checkpoints")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint after N steps of a run; none: the newest")
    which.add_argument("--best", action="store_true", help="the run's checkpoint of the highest held-out reward")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="number format to write; none: as it is")
    args = parser.parse_args(argv)
    try:
        chosen = checkpoint(args.source, args.step, args.best)
        export(chosen, args.out, args.dtype)
    except (ExportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was exported", file=sys.stderr)
        return 130
    print(f"{chosen.name} of {chosen.parent.parent} is in {args.out}; train on: model.path={args.out}")
    return 0


def checkpoint(source: Path, step: int | None = None, best: bool = False) -> Path:
    """The undamaged checkpoint that is meant. Raises ExportError, and as ``actors.checkpoints.find``."""
    if not source.is_dir():
        raise ExportError(f"{source}: got no such folder, expected a run folder, or one of its checkpoints")
    from actors import checkpoints

    if (source / checkpoints.TRAINER).is_file():
        if step is not None or best:
            raise ExportError(f"{source}: got a checkpoint with --step or --best, expected a run folder for these")
        checkpoints.check(source)
        return source
    folder = source / "checkpoints"
    if best:
        return _best(folder)
    found = checkpoints.find(folder, step)
    if found is None:
        raise ExportError(f"{source}: got no undamaged checkpoint, expected a run folder with one, or a checkpoint")
    return found[1]


def _best(folder: Path) -> Path:
    """The undamaged checkpoint of the highest held-out reward, of equal ones the newest."""
    from actors import checkpoints

    there = checkpoints.complete(folder)
    scored = [(value, number) for number, path in there if (value := checkpoints.score(path)) is not None]
    for _, number in sorted(scored, reverse=True):
        try:
            found = checkpoints.find(folder, number)
        except ValueError as error:
            print(f"warning: {error}", file=sys.stderr)
            continue
        assert found is not None
        return found[1]
    raise ExportError(
        f"{folder}: got no undamaged checkpoint with a held-out reward; export one by --step: {[n for n, _ in there]}"
    )


def export(chosen: Path, out: Path, dtype: str | None = None) -> None:
    """Write the model of a checkpoint to ``out``, whole or not at all. Raises ExportError where there is something."""
    from actors import checkpoints

    if out.exists() or out.is_symlink():
        raise ExportError(f"{out}: is there already; name a folder that does not exist yet")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for file in checkpoints.model_files(chosen):
            shutil.copyfile(file, partial / file.name)
        if dtype is not None:
            _cast(partial, dtype)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _cast(folder: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        wanted = getattr(torch, dtype)
        tensors = {
            name: tensor.to(wanted) if tensor.is_floating_point() else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    config = folder / "config.json"
    told = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(told | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
